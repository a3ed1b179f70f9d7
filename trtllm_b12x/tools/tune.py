# SPDX-License-Identifier: Apache-2.0
"""``trtllm-b12x tune``: measure the fastest path for each token count on this card."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import click

from trtllm_b12x.core import disk, settings
from trtllm_b12x.core.errors import first_line
from trtllm_b12x.core.version import __version__
from trtllm_b12x.dispatch.policy import HOST, MeasuredPolicy, counts_to_measure
from trtllm_b12x.formats.geometry import LayerShape

from . import options
from .progress import UnusableError, expect_writable, print_line, progress_bar, write

_DEVICE = "cuda:0"


@click.command(short_help="Measure which path is the fastest at how many tokens.")
@options.options
@options.as_json
@options.out_file
@click.option("--plot", "plot_file", type=options.FILE, help="Draw every path's times as PNG; needs matplotlib.")
@click.pass_context
def tune(ctx: click.Context, as_json: bool, out: Path | None, plot_file: Path | None, **layer: Any) -> None:
    """Measure each kernel family, with each set of tiles, and TensorRT-LLM's own path on this card, as a server does at warm-up.

    Measures each geometry of a CHECKPOINT in a known format, or one given by its sizes. MXFP8 families are compared with each
    other. Weights are random: times do not depend on them. The table is stored where a server of this installation looks for it.
    An --out file serves other machines with the same kind of card through TRTLLM_B12X_CROSSOVER=FILE.

    Exit status: 0 measured, 2 no GPU or nothing to measure, 130 interrupted.
    """
    shapes = options.layer_shapes(**layer)
    expect_writable(out)
    expect_writable(plot_file)
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise UnusableError("--plot needs matplotlib: pip install matplotlib")
    ctx.exit(_tune(shapes, options.Ranks(layer["tp"], layer["ep"]), _gpu(), as_json, out, plot_file))


def _gpu() -> str:
    try:
        import torch
    except (ImportError, OSError) as error:
        raise UnusableError(f"torch does not import: {first_line(error)}") from None
    if not torch.cuda.is_available():
        raise UnusableError("no GPU: torch sees none, and times of another machine say nothing; run it on the one with the card")
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (SM{major}{minor})"


def _families() -> list[str]:
    from trtllm_b12x.engines.trtllm.machine import candidate_kernels

    return [family for family, kernel in candidate_kernels("cuda").items() if kernel.features.name == family]  # no stand-ins


def _tune(
    shapes: dict[str, LayerShape], ranks: options.Ranks, gpu: str, to_stderr: bool, out: Path | None, plot_file: Path | None
) -> int:
    """Measure, print and write. ``to_stderr``: standard output gets one JSON object, and standard error the lines."""
    from trtllm_b12x.dispatch import timing
    from trtllm_b12x.engines.trtllm import build_layer

    tables: list[dict[str, Any]] = []
    embedded = build_layer.is_embedded()
    with progress_bar("measuring layers") as set_progress:
        print_line(f"{gpu}: the tables are this GPU's, not another card's", to_stderr)
        if embedded:
            words = "TensorRT-LLM is not installed: the host's path is the embedded host's operator in torch, not CUTLASS"
            print_line(words, to_stderr)
        folder = disk.directory()
        if folder is None or not disk.writable(folder):
            problem = f"{folder} cannot be written" if folder else "no HOME is known"
            print_line(f"warning: no table is stored for servers: {problem}; set XDG_CACHE_HOME", err=True)
        copy = timing.copy_bandwidth()
        print_line(f"a copy moves {copy / 1e12:.2f} TB/s, read plus written", to_stderr)
        for number, (name, shape) in enumerate(shapes.items()):
            set_progress(number, len(shapes))
            try:
                table, lines = _measure(name, shape, ranks, copy)
            except Exception as error:  # from TensorRT-LLM, torch or the driver: the other geometries may work
                set_progress(number, len(shapes))  # raises if Ctrl-C caused the error
                reason = error if isinstance(error, build_layer.NothingToMeasureError) else first_line(error)
                print_line(f"error: {name}: {reason}", err=True)
                continue
            tables.append(table)
            for text in lines:
                print_line(text, to_stderr)
    content = {
        "trtllm_b12x": __version__,
        "gpu": gpu,
        "embedded_host": embedded,
        "copy_bytes_per_second": round(copy),
        "tables": tables,
    }
    text = json.dumps(content, indent=1)
    if out is not None:
        write(out, f"{text}\n")
    if to_stderr:
        click.echo(text)
    if plot_file is not None and tables:
        _plot(tables, gpu, plot_file)
        print_line(f"wrote {plot_file}", to_stderr)
    return 0 if len(tables) == len(shapes) else 2


def _measure(name: str, shape: LayerShape, ranks: options.Ranks, copy: float) -> tuple[dict[str, Any], list[str]]:
    """Measure one geometry and store its table. Return the table for JSON, and lines to print. ``copy``: bytes per second."""
    import torch

    from trtllm_b12x.dispatch import crossover, store, timing
    from trtllm_b12x.engines.trtllm import build_layer, host_path
    from trtllm_b12x.engines.trtllm.host import load

    logging.getLogger("trtllm_b12x").setLevel(logging.WARNING)
    families, device = _families(), torch.device(_DEVICE)
    if not families:
        raise build_layer.NothingToMeasureError("no kernel family runs on this card")
    with settings.KERNELS.set(",".join(families)), settings.CROSSOVER.set("auto"):
        modules = build_layer.build(shape, device, ranks.tp, ranks.ep)
        backend = getattr(modules[0], "backend", modules[0])
        backend.plan_waiting()
        schedule, geometry = backend.schedule, backend.schedule.kernels[0].geometry
        if list(schedule.families) == [schedule.base]:
            raise build_layer.NothingToMeasureError(f"{schedule.summary}: there is nothing to compare it with")
        paths = host_path.timed_paths(backend, build_layer.call(modules[0], 1))
        largest = timing.largest_served(paths)
        build_layer.tuned(modules[0], max(largest.values()))
        routes = host_path.route_sampler(backend, geometry, device)
        timer = timing.PathTimer(paths, geometry, routes, device)
        times = timer(counts_to_measure(largest.values()))
        tuned = bool(schedule.base) or not build_layer.is_embedded()
        key = crossover.key_of(geometry, device, schedule, load().generation, tuned)
    store.keep(key, times)
    policy = MeasuredPolicy(times, f"measured in {timer.spent_s:.1f} s", base=schedule.base)
    rows = {tokens: tokens * geometry.top_k / geometry.num_experts / geometry.ranks for tokens in times.counts}
    expert_us = 1e6 * timing.expert_bytes(geometry) / copy
    limit_us = {tokens: expert_us * timing.expected_hits(geometry, tokens) for tokens in times.counts}
    table = {
        **store.record(key, times),
        "layer": name,
        "layers": len(modules),
        "seconds": round(timer.spent_s, 2),
        "rows_per_local_expert": {str(tokens): round(number, 3) for tokens, number in rows.items()},
        "bandwidth_limit": {str(tokens): round(time, 2) for tokens, time in limit_us.items()},
        "chosen": policy.ranges(max(largest.values()), largest),
    }
    summary = policy.summary()
    lines = [f"{name}, on a rank {geometry}: {summary}, {len(modules)} layers"]
    return table, lines + _lines([*largest, HOST], policy, rows, limit_us)


def _lines(paths: list[str], policy: MeasuredPolicy, rows: dict[int, float], limit_us: dict[int, float]) -> list[str]:
    """Return the lines of the table. A letter stands for a path with a long name, and a line above explains the letter."""
    host = policy.base or HOST
    short = {path: path if len(path) <= 8 else f"({chr(97 + number)})" for number, path in enumerate(paths)} | {HOST: host}
    lines = [f"{letter} {path}" for path, letter in short.items() if letter not in (path, host)]
    lines.append("  ".join(("tokens", "rows/expert", *(f"{short[path]} us".rjust(10) for path in paths), "  limit us", "chosen")))
    for tokens, row in policy.timings.rows.items():
        cells = [(f"{row[path]:.1f}" if path in row else "-").rjust(10) for path in paths]
        ends = f"{limit_us[tokens]:.1f}".rjust(10), short[policy.select(tokens, [path for path in row if path != HOST]) or HOST]
        lines.append("  ".join((str(tokens).rjust(6), f"{rows[tokens]:.2f}".rjust(11), *cells, *ends)))
    return lines


def _plot(tables: list[dict[str, Any]], gpu: str, file: Path) -> None:
    """Plot the time of each path over tokens, on log axes per geometry, with the time to copy the weights that are read."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(tables), figsize=(9 * len(tables), 6), squeeze=False, layout="constrained")
    for table, ax in zip(tables, axes[0], strict=True):
        times = {int(tokens): row for tokens, row in table["microseconds"].items()}
        for path in dict.fromkeys(path for row in times.values() for path in row):
            points = [(tokens, row[path]) for tokens, row in times.items() if path in row]
            ax.plot(*zip(*points, strict=True), marker="o", label=table["paths"]["host"] if path == HOST else path)
        limits = {int(tokens): limit for tokens, limit in table["bandwidth_limit"].items()}
        ax.plot(list(limits), list(limits.values()), color="black", linestyle=":", label="copy of what is read")
        ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds of a layer", title=f"{table['layer']}, {gpu}")
        ax.legend(fontsize="small")
    figure.savefig(file, dpi=120, format="png")
    pyplot.close(figure)
