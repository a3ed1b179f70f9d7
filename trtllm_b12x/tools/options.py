"""Turn a command's arguments into layers: those of a checkpoint, or one of the given sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from trtllm_b12x import formats
from trtllm_b12x.decision import Environment
from trtllm_b12x.decision.families import FAMILIES
from trtllm_b12x.formats.geometry import LayerShape

from .verify_output import plain

_SIZES = ("experts", "top_k", "hidden", "intermediate")


class Unusable(Exception):  # noqa: N818 - one line for the user, not a fault
    pass


@contextmanager
def reported(ctx: click.Context, interrupted: str = "interrupted") -> Iterator[None]:
    """Exit with 2 and one line if the arguments are unusable, with 130 on Ctrl-C."""
    try:
        yield
    except Unusable as error:
        click.echo(f"error: {plain(error)}", err=True)
        ctx.exit(2)
    except KeyboardInterrupt:
        click.echo(interrupted, err=True)
        ctx.exit(130)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add CHECKPOINT and the sizes: the arguments of ``given``."""
    ranks, formats_ = click.IntRange(1, 1024), [name.lower() for name in formats.names()]
    for option in (
        click.option("--ep", type=ranks, default=1, show_default=True, help="Expert-parallel ranks."),
        click.option("--tp", type=ranks, default=1, show_default=True, help="Tensor-parallel ranks."),
        click.option(
            "--format",
            "form",
            type=click.Choice(formats_, case_sensitive=False),
            default=formats_[0],
            show_default=True,
            help="Format of the weights, with sizes; a checkpoint has its own.",
        ),
        click.option("--activation", default="swiglu", show_default=True, help="swiglu, relu2 or another one with kernels."),
        click.option("--top-k", type=click.IntRange(1), help="Experts per token."),
        click.option("--experts", type=click.IntRange(1), help="Experts of the layer, over all ranks."),
        click.option("--intermediate", type=click.IntRange(16), help="Intermediate size of an expert, before any split."),
        click.option("--hidden", type=click.IntRange(128), help="Hidden size."),
        click.argument("checkpoint", type=click.Path(path_type=Path), required=False),
    ):
        command = option(command)
    return command


def check(checkpoint: Path | None, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes by their options.

    Raises:
        click.UsageError: neither they nor a checkpoint are given, or both are.
    """
    values = {f"--{name.replace('_', '-')}": sizes[name] for name in _SIZES}
    missing = [name for name, value in values.items() if value is None]
    if (checkpoint is None) == bool(missing) or (checkpoint is not None and len(missing) < len(values)):
        raise click.UsageError(f"give a CHECKPOINT, or all of {', '.join(values)}")
    return values


def given(checkpoint: Path | None, sizes: dict[str, Any], activation: str, tp: int, ep: int, form: str) -> dict[str, LayerShape]:
    """Map a name to each distinct layer: the first with that shape in a checkpoint, or the one of the given sizes.

    Raises:
        click.UsageError: see ``check``.
        Unusable: the checkpoint or the sizes cannot be used.
    """
    values = check(checkpoint, sizes)
    if checkpoint is None:
        experts, top_k, hidden, intermediate = values.values()
        if top_k > experts:
            raise Unusable(f"--top-k {top_k} exceeds --experts {experts}")
        name = _activation(activation)
        constants = name == "SwigluBias"
        shape = LayerShape(
            experts, top_k, hidden, intermediate, "Swiglu" if constants else name, form.upper(), activation_constants=constants
        )
        shapes = {f"{experts} experts, top {top_k}, {hidden} x {intermediate}": shape}
    else:
        shapes = _in_checkpoint(checkpoint)
    for shape in shapes.values():
        for option, parts, what, size in (
            ("tp", tp, "intermediate size", shape.intermediate_size),
            ("ep", ep, "the number of experts", shape.num_experts),
        ):
            if (size or 0) % parts:
                raise Unusable(f"--{option} {parts} does not divide {what} {size}")
    return shapes


def _in_checkpoint(checkpoint: Path) -> dict[str, LayerShape]:
    from .checkpoint import Checkpoint, CheckpointError

    try:
        with Checkpoint(checkpoint) as source:
            layers = [layer for layer in source.layers if layer.quant_algo in formats.names()]
    except CheckpointError as error:
        raise Unusable(str(error)) from None
    if not layers:
        raise Unusable(f"{checkpoint}: has no {' or '.join(formats.names())} MoE layer")
    names: dict[LayerShape, str] = {}
    for layer in layers:
        _activation(layer.shape.kernel_activation or "")
        names.setdefault(layer.shape, layer.name)
    return {name: shape for shape, name in names.items()}


def _activation(word: str) -> str:
    """Return the host's name of an activation that some kernel has. TensorRT-LLM may be missing where images are built."""
    names = sorted({name for family in FAMILIES for name in family.features(Environment()).activations})
    name = next((name for name in names if name.lower() == word.lower()), None)
    if name is None:
        raise Unusable(f"activation {word!r}: there are kernels for {', '.join(names)}")
    return name
