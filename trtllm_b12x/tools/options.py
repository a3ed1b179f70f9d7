# SPDX-License-Identifier: Apache-2.0
"""Turn a command's arguments into layers, ranks and a machine, and resolve layers for a card that is not here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_b12x import environment, formats
from trtllm_b12x.core import settings
from trtllm_b12x.decision import Deployment, Environment, Resolution, families, resolve
from trtllm_b12x.engines.trtllm import host
from trtllm_b12x.environment import triton
from trtllm_b12x.formats.geometry import LayerShape

from .progress import UnusableError

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

TARGETS = {"sm_120a": 120, "sm_121a": 121}
CHECKPOINT = FILE = click.Path(path_type=Path, readable=False)  # the code that opens it reports errors
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object; all else goes to standard error.")
out_file = click.option("--out", type=FILE, help="Write that JSON object to this file.")
_SIZES = ("experts", "top_k", "hidden", "intermediate")


@dataclass(frozen=True)
class Ranks:
    """Tensor- and expert-parallel ranks."""

    tp: int = 1
    ep: int = 1

    @property
    def deployment(self) -> Deployment:
        return Deployment(tp_size=self.tp, ep_size=self.ep)

    def expect_to_divide(self, shape: LayerShape) -> None:
        """Raise UnusableError if the ranks do not divide the layer."""
        if (shape.intermediate_size or 0) % self.tp:
            raise UnusableError(f"--tp {self.tp} does not divide intermediate size {shape.intermediate_size}")
        if (shape.num_experts or 0) % self.ep:
            raise UnusableError(f"--ep {self.ep} does not divide the number of experts {shape.num_experts}")


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add CHECKPOINT, the sizes and the ranks: the arguments of ``layer_shapes``."""
    ranks, most, names = click.IntRange(1, 1024), 2**20, [name.lower() for name in formats.names()]
    form = click.Choice(names, case_sensitive=False)
    for option in (
        click.option("--ep", type=ranks, default=1, show_default=True, help="Expert-parallel ranks."),
        click.option("--tp", type=ranks, default=1, show_default=True, help="Tensor-parallel ranks."),
        click.option("--format", "form", type=form, default=names[0], show_default=True, help="Of weights given by their sizes."),
        click.option("--activation", default="swiglu", show_default=True, help="swiglu, relu2 or another one with kernels."),
        click.option("--top-k", type=click.IntRange(1, most), help="Experts per token."),
        click.option("--experts", type=click.IntRange(1, most), help="Experts of the layer, over all ranks."),
        click.option("--intermediate", type=click.IntRange(16, most), help="Intermediate size of an expert, before any split."),
        click.option("--hidden", type=click.IntRange(128, most), help="Hidden size."),
        click.argument("checkpoint", type=CHECKPOINT, required=False),
    ):
        command = option(command)
    return command


def layer_shapes(checkpoint: Path | None, activation: str, form: str, tp: int, ep: int, **sizes: Any) -> dict[str, LayerShape]:
    """Return distinct layers by name: each shape's first layer in a checkpoint, or one layer of the given sizes.

    Raise UsageError unless a checkpoint or all sizes are given. Raise UnusableError if an argument cannot be used.
    """
    missing = [name for name in _SIZES if sizes[name] is None]
    if (checkpoint is None) == bool(missing) or (checkpoint is not None and len(missing) < len(_SIZES)):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in _SIZES)
        raise click.UsageError(f"give a CHECKPOINT or all of {names}, not both")
    if checkpoint is not None:
        shapes = {name: shape for name, shape in shapes_in(opened(checkpoint)).items() if formats.find(shape.quant_algo)}
        if not shapes:
            raise UnusableError(f"{checkpoint}: has no {' or '.join(formats.names())} MoE layer")
        for shape in shapes.values():
            _activation(shape.kernel_activation or "")
    else:
        experts, top_k, hidden, intermediate = (sizes[name] for name in _SIZES)
        if top_k > experts:
            raise UnusableError(f"--top-k {top_k} exceeds --experts {experts}")
        name = _activation(activation)
        constants = name == "SwigluBias"
        row = formats.find(form.upper())
        algorithm = None if row is None else row.quant_algo
        shape = LayerShape(
            experts, top_k, hidden, intermediate, "Swiglu" if constants else name, algorithm, activation_constants=constants
        )
        shapes = {f"{experts} experts, top {top_k}, {hidden} x {intermediate}": shape}
    for shape in shapes.values():
        Ranks(tp, ep).expect_to_divide(shape)
    return shapes


def opened(checkpoint: Path) -> Checkpoint:
    """Open a checkpoint. Raise UnusableError if the folder cannot be used, or torch is missing."""
    try:
        from .checkpoint import Checkpoint
    except ImportError as error:
        raise UnusableError(f"reading a checkpoint needs torch: {error}") from None
    return Checkpoint(checkpoint)


def shapes_in(checkpoint: Checkpoint) -> dict[str, LayerShape]:
    names: dict[LayerShape, str] = {}
    for layer in checkpoint.layers:
        names.setdefault(layer.shape, layer.name)
    return {name: shape for shape, name in names.items()}


def _activation(word: str) -> str:
    """Return TensorRT-LLM's name of an activation that a kernel has, without TensorRT-LLM: image builds may lack it."""
    names = sorted({name for family in families.FAMILIES for name in family.features(Environment()).activations})
    name = next((name for name in names if name.lower() == word.lower()), None)
    if name is None:
        raise UnusableError(f"activation {word!r}: there are kernels for {', '.join(names)}")
    return name


def probe_machine(target: str | None) -> Environment:
    """Probe this machine; replace its card by ``target``."""
    here = environment.probe(host.state(), always_look=True)
    if target is None:
        return here
    # The other machine's toolkit is unknown if this one has none.
    toolkit, sm = here.toolkit_cuda if here.toolkit_cuda != (0, 0) else None, TARGETS[target]
    return dataclasses.replace(here, sm=sm, toolkit_cuda=toolkit, triton_lacks=triton.lacking(sm), upcast=triton.upcast(sm))


def resolve_layer(shape: LayerShape, facts: Environment, deployment: Deployment | None = None) -> Resolution:
    rows = families.rows(settings.KERNELS(), shape.quant_algo)
    return resolve(shape, deployment, facts, {row.name: row.features(facts) for row in rows})
