# SPDX-License-Identifier: Apache-2.0
"""``trtllm-b12x warmup``: compile every kernel that a server will use into its caches, without a GPU."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from typing import TYPE_CHECKING, Any

import click

from trtllm_b12x.core.version import __version__
from trtllm_b12x.decision import families
from trtllm_b12x.environment import flashinfer, triton
from trtllm_b12x.formats.geometry import LayerShape

from . import options
from .progress import UnusableError, plain, print_line, progress_bar

if TYPE_CHECKING:
    from trtllm_b12x.kernels.warmup import CompileResult, CompileTask


_TARGET = click.Choice(list(options.TARGETS))
_CARD = "A model (RTX 5090, GB10, ...) or a number of SMs; may be repeated.  [default: all known of the target]"


@click.command(short_help="Compile every kernel of a model ahead of time, without a GPU.")
@options.options
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16", show_default=True, help="Of activations."
)
@click.option("--target", "targets", type=_TARGET, multiple=True, required=True, help="Cards to compile for; may be repeated.")
@click.option("--card", "cards", multiple=True, help=_CARD)
@click.option("--jobs", type=click.IntRange(1, 256), help="Processes that compile.  [default: one for each core]")
@options.as_json
@click.pass_context
def warmup(
    ctx: click.Context,
    dtype: str,
    targets: tuple[str, ...],
    cards: tuple[str, ...],
    jobs: int | None,
    as_json: bool,
    **layer: Any,
) -> None:
    """Compile every kernel that serving will take into the caches that a server reads: Triton's and FlashInfer's.

    For each geometry of a CHECKPOINT in a known format, or for one that is given by its sizes; for all families that can serve it
    with what is installed here. It is meant for the build of an image: no GPU is needed, and the server then needs no compiler.
    Of kernels that take router logits it compiles those of softmax over the chosen experts, as Qwen3 and gpt-oss have it.

    Exit status: 0 all is in the caches, 1 a kernel could not be compiled, 2 there is nothing to compile, or nothing to compile
    with, 130 interrupted. What was compiled before an interrupt is kept.
    """
    if cache := triton.cache_lacking():
        raise UnusableError(f"{cache.what}; {cache.remedy}")
    shapes = {name: dataclasses.replace(shape, dtype=dtype) for name, shape in options.layer_shapes(**layer).items()}
    reports = [_fill(shapes, options.Ranks(layer["tp"], layer["ep"]), name, cards, jobs) for name in dict.fromkeys(targets)]
    caches = {"triton": str(triton.cache_folder()), "flashinfer": str(flashinfer.cache_folder())}
    content = {"trtllm_b12x": __version__, "caches": caches, "targets": [report for report, _ in reports]}
    click.echo(json.dumps(content, indent=1) if as_json else _screen(content, shapes))
    ctx.exit(int(any(failed for _, failed in reports)))


def _fill(
    shapes: dict[str, LayerShape], ranks: options.Ranks, name: str, cards: tuple[str, ...], jobs: int | None
) -> tuple[dict[str, Any], bool]:
    """Compile every kernel for one target. Return the target's report, and whether a kernel is missing."""
    from trtllm_b12x.kernels import PlanError, warmup
    from trtllm_b12x.kernels.cards import models

    try:
        models_ = models(name, cards)
    except ValueError as error:
        raise UnusableError(f"--card: {error}") from None
    tasks, refused = _tasks(shapes, name, ranks)
    for text in refused:
        print_line(text, err=True)
    if not tasks:
        raise UnusableError(
            f"{name}: no family of kernels can serve this here; trtllm-b12x doctor --target {name} says what to do"
        )
    results: list[CompileResult] = []
    failed, started = False, time.monotonic()
    with progress_bar(f"kernels for {name}") as set_progress:

        def report(result: CompileResult | None, total: int) -> None:
            if result is not None:
                results.append(result)
                if result.error:
                    print_line(f"error: {result.name}: {result.error}", err=True)
            set_progress(len(results), total)

        try:
            warmup.run(tasks, models_, report, jobs)
        except (PlanError, ValueError) as error:
            set_progress(len(results), len(results))  # raises if Ctrl-C caused the error
            print_line(f"error: {error}", err=True)
            failed = True
    rows = []
    for family in dict.fromkeys(result.family for result in results):
        mine = [result for result in results if result.family == family]
        errors = [result for result in mine if result.error]
        cached = sum(result.cached and not result.error for result in mine)
        counts = {"kernels": len(mine), "compiled": len(mine) - len(errors) - cached, "cached": cached, "failed": len(errors)}
        rows.append({"family": family, **counts, "seconds": round(sum(result.seconds for result in mine), 1)})
    content = {
        "target": name,
        "multiprocessors": [card.multiprocessors for card in models_],
        "seconds": round(time.monotonic() - started, 1),
        "rows": rows,
        "kernels": [dataclasses.asdict(result) for result in results],
    }
    return content, failed or any(result.error for result in results)


def _tasks(shapes: dict[str, LayerShape], name: str, ranks: options.Ranks) -> tuple[list[CompileTask], list[str]]:
    """Return the compile tasks for a target, and a line for each family that is left out."""
    import torch

    from trtllm_b12x.dispatch import crossover
    from trtllm_b12x.formats.geometry import Scoring
    from trtllm_b12x.kernels.catalog import KERNELS
    from trtllm_b12x.kernels.cuda.variant import MOST_SCORED
    from trtllm_b12x.kernels.warmup import CompileTask

    facts, tasks, refused = options.probe_machine(name), [], []
    # The compilers must be here even if an earlier run has filled the cache.
    missing_tools = dict.fromkeys((*triton.tools_lacking(), *(facts.triton_lacks or ())))
    facts = dataclasses.replace(facts, triton_lacks=tuple(missing_tools))
    for shape in dict.fromkeys(shapes.values()):
        verdict = options.resolve_layer(shape, facts, ranks.deployment)
        refused += [f"{name}: not {family}: {rejection}" for family, rejection in verdict.refused]
        rows = list(families.rows(verdict.families, shape.quant_algo))
        geometry = shape.on_rank(ranks.tp, ranks.ep, math.lcm(*(row.features(facts).tile for row in rows)))
        for row in rows:
            kernel, _ = KERNELS[row.name, row.format]
            if capacity := crossover.max_tokens(kernel.features, geometry, torch.device("cuda")):
                tasks.append(CompileTask(kernel, geometry, capacity))
                if kernel.takes_logits and geometry.num_experts * geometry.ranks <= MOST_SCORED:
                    tasks.append(CompileTask(kernel, dataclasses.replace(geometry, scoring=Scoring()), capacity))
    return list(dict.fromkeys(tasks)), list(dict.fromkeys(refused))


def _screen(content: dict[str, Any], shapes: dict[str, LayerShape]) -> str:
    lines = [f"{len(shapes)} {'geometry' if len(shapes) == 1 else 'geometries'}: {'; '.join(shapes)}"]
    for report in content["targets"]:
        sms = ", ".join(map(str, report["multiprocessors"]))
        lines += ["", f"{report['target']}, cards of {sms} SMs: {report['seconds']} s"]
        lines.append("  ".join(("family".ljust(8), "kernels", "compiled", "in cache", "failed", "seconds of a core")))
        for row in report["rows"]:
            widths = {"kernels": 7, "compiled": 8, "cached": 8, "failed": 6, "seconds": 17}
            lines.append("  ".join((row["family"].ljust(8), *(str(row[name]).rjust(size) for name, size in widths.items()))))
    lines += ["", *(f"{name}'s cache: {folder}" for name, folder in content["caches"].items())]
    return "\n".join(map(plain, lines))
