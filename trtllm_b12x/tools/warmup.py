"""``trtllm-b12x warmup``: every kernel that a server will take, compiled into its caches where there is no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_b12x import formats
from trtllm_b12x.core.version import __version__
from trtllm_b12x.decision import Deployment, Environment, families
from trtllm_b12x.formats.geometry import LayerShape

from . import options, target
from .options import Unusable
from .verify_output import plain, progress

if TYPE_CHECKING:
    from trtllm_b12x.kernels.warmup import Made, Work

_DONE, _FAILED = 0, 1


class _Targets(click.ParamType):
    """``sm_120a,sm_121a``."""

    name = "targets"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        words = list(dict.fromkeys(word.strip() for word in str(value).split(",")))
        unknown = [word for word in words if word not in target.TARGETS]
        if unknown:
            self.fail(f"{unknown[0]!r} is none of {', '.join(target.TARGETS)}", param, ctx)
        return words


@click.command(short_help="Compile every kernel of a model ahead of time, without a GPU.")
@options.options
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16", show_default=True, help="Of activations."
)
@click.option("--target", "targets", type=_Targets(), required=True, help="sm_120a, sm_121a, or both with a comma between.")
@click.option(
    "--card",
    "cards",
    multiple=True,
    help="A model (RTX 5090, RTX PRO 6000, GB10, ...) or a number of SMs; may be repeated.  [default: all known of the target]",
)
@click.option("--jobs", type=click.IntRange(1, 256), help="Processes that compile.  [default: one for each core]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_context
def warmup(
    ctx: click.Context,
    checkpoint: Path | None,
    form: str,
    dtype: str,
    targets: list[str],
    cards: tuple[str, ...],
    jobs: int | None,
    as_json: bool,
    activation: str,
    tp: int,
    ep: int,
    **sizes: int | None,
) -> None:
    """Compile every kernel that serving will take into the caches that a server reads: Triton's and FlashInfer's.

    For each geometry of an NVFP4 or MXFP8 CHECKPOINT, or for one that is given by its sizes; for all families that can serve it
    with what is installed here.  It is meant for the build of an image: no GPU is needed, and the server then needs no compiler.

    Exit status: 0 all is in the caches, 1 a kernel could not be compiled, 2 there is nothing to compile, or nothing to compile
    with, 130 interrupted.
    """
    with options.reported(ctx, "interrupted: what was compiled is kept"):
        shapes = {
            name: dataclasses.replace(shape, dtype=dtype)
            for name, shape in options.given(checkpoint, sizes, activation, tp, ep, form).items()
        }
        ctx.exit(_warm_up(shapes, tp, ep, targets, cards, jobs, as_json))


def _warm_up(
    shapes: dict[str, LayerShape], tp: int, ep: int, targets: list[str], cards: tuple[str, ...], jobs: int | None, as_json: bool
) -> int:
    from trtllm_b12x.kernels import PlanError, warmup
    from trtllm_b12x.kernels.cards import models

    found: list[dict[str, Any]] = []
    failed = False
    for name in targets:
        try:
            asked = models(name, cards)
        except ValueError as error:
            raise Unusable(f"--card: {error}") from None
        works, against = _works(shapes, name, tp, ep)
        for line in against:
            click.echo(plain(line), err=True)
        if not works:
            raise Unusable(
                f"{name}: no family of kernels can serve this here; trtllm-b12x doctor --target {name} says what to do"
            )
        made: list[Made] = []
        started = time.monotonic()
        with progress(1, f"kernels for {name}", "") as (advance, paused):

            def report(
                one: Made | None, total: int, made: list[Made] = made, advance: Any = advance, paused: Any = paused
            ) -> None:
                if one is not None:
                    made.append(one)
                    if one.error:
                        with paused():
                            click.echo(f"error: {plain(one.name)}: {plain(one.error)}", err=True)
                advance(len(made), total)

            try:
                warmup.run(works, asked, report, jobs)
            except PlanError as error:
                click.echo(f"error: {plain(error)}", err=True)
                failed = True
        failed = failed or any(one.error for one in made)
        found.append(_record(name, [card.multiprocessors for card in asked], made, time.monotonic() - started))
    content = {"trtllm_b12x": __version__, "caches": _caches(), "targets": found}
    click.echo(json.dumps(content, indent=1) if as_json else _screen(content, shapes))
    return _FAILED if failed else _DONE


def _works(shapes: dict[str, LayerShape], name: str, tp: int, ep: int) -> tuple[list[Work], list[str]]:
    """List what to compile for a target, and a line for each family that is left out."""
    import torch

    from trtllm_b12x.dispatch import crossover
    from trtllm_b12x.kernels.warmup import Work

    facts, works, against = _facts(name), [], []
    for shape in dict.fromkeys(shapes.values()):
        verdict = target.judged(shape, facts, Deployment(tp_size=tp, ep_size=ep))
        against += [f"{name}: not {family}: {rejection}" for family, rejection in verdict.refused]
        rows = [row for row in families.rows(verdict.families, shape.quant_algo) if row.name in verdict.families]
        tile = math.lcm(*(row.features(facts).tile for row in rows))
        for row in rows:
            kind = formats.load(row.kernel)
            on_rank = shape.on_rank(tp, ep, tile)
            most = crossover.max_tokens(kind.features, on_rank, torch.device("cuda"))
            if most:
                works.append(Work(kind, on_rank, most))
    return list(dict.fromkeys(works)), list(dict.fromkeys(against))


def _facts(name: str) -> Environment:
    """Describe the card on this machine, which must have the tools that compile even if the cache has been filled before."""
    from trtllm_b12x.environment import triton

    facts = target.machine(name)
    faults = dict.fromkeys((*triton.tools_lacking(), *(facts.triton_lacks or ())))
    return dataclasses.replace(facts, triton_lacks=tuple(faults))


# ---- output --------------------------------------------------------------------------------------------------------------


def _record(name: str, cards: list[int], made: list[Made], seconds: float) -> dict[str, Any]:
    rows = []
    for family in dict.fromkeys(one.family for one in made):
        mine = [one for one in made if one.family == family]
        rows.append(
            {
                "family": family,
                "kernels": len(mine),
                "compiled": sum(not one.cached and not one.error for one in mine),
                "cached": sum(one.cached and not one.error for one in mine),
                "failed": sum(bool(one.error) for one in mine),
                "seconds": round(sum(one.seconds for one in mine), 1),
            }
        )
    return {
        "target": name,
        "multiprocessors": cards,
        "seconds": round(seconds, 1),
        "rows": rows,
        "kernels": [dataclasses.asdict(one) for one in made],
    }


def _caches() -> dict[str, str]:
    from trtllm_b12x.environment import triton

    found = {"triton": str(triton.cache_folder())}
    with contextlib.suppress(Exception):  # not installed, or damaged
        from trtllm_b12x.kernels.b12x.precompile import cache_folder

        found["flashinfer"] = str(cache_folder())
    return found


def _screen(content: dict[str, Any], shapes: dict[str, LayerShape]) -> str:
    lines = [f"{len(shapes)} {'geometry' if len(shapes) == 1 else 'geometries'}: {'; '.join(shapes)}"]
    for found in content["targets"]:
        lines.append("")
        lines.append(f"{found['target']}, cards of {', '.join(map(str, found['multiprocessors']))} SMs: {found['seconds']} s")
        lines.append("  ".join(("family".ljust(8), "kernels", "compiled", "in cache", "failed", "seconds of a core")))
        for row in found["rows"]:
            cells = [str(row[name]).rjust(size) for name, size in (("kernels", 7), ("compiled", 8), ("cached", 8), ("failed", 6))]
            lines.append("  ".join((row["family"].ljust(8), *cells, str(row["seconds"]).rjust(17))))
    lines.append("")
    lines += [f"{name}'s cache: {folder}" for name, folder in content["caches"].items()]
    return "\n".join(map(plain, lines))
