"""Which layers a command is about: those of a checkpoint, or one that is given by its sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_b12x import formats
from trtllm_b12x.decision import Environment
from trtllm_b12x.families import FAMILIES

from .verify_output import plain

if TYPE_CHECKING:
    from trtllm_b12x.host.build_layer import Shape

_SIZES = ("experts", "top_k", "hidden", "intermediate")


class Unusable(Exception):  # noqa: N818 - one line for the user, not a fault
    pass


@contextmanager
def reported(ctx: click.Context, interrupted: str = "interrupted") -> Iterator[None]:
    """What cannot be done, and an interrupt, are a line and an exit status, 2 and 130."""
    try:
        yield
    except Unusable as error:
        click.echo(f"error: {plain(error)}", err=True)
        ctx.exit(2)
    except KeyboardInterrupt:
        click.echo(interrupted, err=True)
        ctx.exit(130)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """CHECKPOINT and the sizes: what :func:`given` takes."""
    ranks = click.IntRange(1, 1024)
    for option in reversed(
        (
            click.argument("checkpoint", type=click.Path(path_type=Path), required=False),
            click.option("--hidden", type=click.IntRange(128), help="Hidden size."),
            click.option("--intermediate", type=click.IntRange(16), help="Intermediate size of an expert, before any split."),
            click.option("--experts", type=click.IntRange(1), help="Experts of the layer, on all ranks."),
            click.option("--top-k", type=click.IntRange(1), help="Experts of a token."),
            click.option(
                "--activation", default="swiglu", show_default=True, help="swiglu, relu2 or another that there are kernels for."
            ),
            click.option(
                "--format",
                "form",
                type=click.Choice([name.lower() for name in formats.names()], case_sensitive=False),
                default=formats.names()[0].lower(),
                show_default=True,
                help="Of the weights of a geometry; a checkpoint says its own.",
            ),
            click.option("--tp", type=ranks, default=1, show_default=True, help="Tensor-parallel ranks that share it."),
            click.option("--ep", type=ranks, default=1, show_default=True, help="Expert-parallel ranks that share it."),
        )
    ):
        command = option(command)
    return command


def check(checkpoint: Path | None, sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes by their options.

    Raises:
        click.UsageError: neither they nor a checkpoint is given, or both.
    """
    wanted = {f"--{name.replace('_', '-')}": sizes[name] for name in _SIZES}
    missing = [name for name, value in wanted.items() if value is None]
    if (checkpoint is None) == bool(missing) or (checkpoint is not None and len(missing) < len(wanted)):
        raise click.UsageError(f"give a CHECKPOINT, or all of {', '.join(wanted)}")
    return wanted


def given(checkpoint: Path | None, sizes: dict[str, Any], activation: str, tp: int, ep: int, form: str) -> dict[str, Shape]:
    """Name of the first layer of each geometry to what it is.

    Args:
        sizes: by the names of their parameters; of these :data:`_SIZES` count.
        form: of a geometry's weights, in any case.

    Raises:
        click.UsageError: see :func:`check`.
        Unusable: what is given cannot be.
    """
    wanted = check(checkpoint, sizes)
    if checkpoint is not None:
        return _of_checkpoint(checkpoint, tp, ep)
    from trtllm_b12x.host.build_layer import Shape

    experts, top_k, hidden, intermediate = wanted.values()
    if top_k > experts:
        raise Unusable(f"--top-k {top_k}: there are {experts} experts")
    shape = Shape(experts, top_k, hidden, intermediate, _activation(activation), tp, ep, form.upper())
    return {f"{experts} experts, top {top_k}, {hidden} x {intermediate}": _divided(shape)}


def _of_checkpoint(checkpoint: Path, tp: int, ep: int) -> dict[str, Shape]:
    from trtllm_b12x.checkpoint import Checkpoint, CheckpointError
    from trtllm_b12x.host.build_layer import Shape

    try:
        with Checkpoint(checkpoint) as source:
            served = [layer for layer in source.layers if layer.quant_algo in formats.names()]
    except CheckpointError as error:
        raise Unusable(str(error)) from None
    found: dict[Shape, str] = {}
    for layer in served:
        sizes = (layer.num_experts, layer.top_k, layer.hidden_size, layer.intermediate_size)
        kind = "SwigluBias" if layer.activation.constants else layer.activation.name
        found.setdefault(Shape(*sizes, _activation(kind), tp, ep, layer.quant_algo), layer.name)
    if not found:
        raise Unusable(f"{checkpoint}: has no {' or '.join(formats.names())} MoE layer")
    return {name: _divided(shape) for shape, name in found.items()}


def _divided(shape: Shape) -> Shape:
    for size, parts, what in ((shape.intermediate_size, shape.tp, "tp"), (shape.num_experts, shape.ep, "ep")):
        if size % parts:
            raise Unusable(f"--{what} {parts}: there are {size} to divide; choose a divisor")
    return shape


def _activation(word: str) -> str:
    """The host's name, of those that some kernels have: TensorRT-LLM need not import where images are built."""
    names = sorted({name for family in FAMILIES for name in family.features(Environment()).activations})
    found = next((name for name in names if name.lower() == word.lower()), None)
    if found is None:
        raise Unusable(f"activation {word!r}: there are kernels for {', '.join(names)}")
    return found
