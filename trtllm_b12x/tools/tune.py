"""``trtllm-b12x tune``: measure the fastest path for each token count on this card."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from trtllm_b12x.core import settings
from trtllm_b12x.core.errors import first_line
from trtllm_b12x.core.version import __version__
from trtllm_b12x.dispatch.policy import HOST, MeasuredPolicy, Timings, counts_to_measure, fastest
from trtllm_b12x.formats.geometry import LayerShape

from . import options
from .progress import Progress, UnusableError, expect_folder, write, writing

_Advance = Callable[[float], None]
"""Function of the share of the work that is done."""
_BUILT = 0.6
"""Share of a geometry's time that building its layers takes, including compiling and testing the kernels."""
_SEED = 1
"""Seed of the skewed routes."""


@dataclass
class _Table:
    """Measurements of one geometry."""

    name: str
    geometry: Any
    record: dict[str, Any]
    """Table in the form of the stored files."""
    times: Timings
    largest: dict[str, int]
    """Maximum number of tokens per family."""
    seconds: float
    layers: int
    limit: dict[int, float]
    """Microseconds by token count to read the weights of a call once, at copy bandwidth."""
    skewed: Timings | None = None
    base: str = ""
    """Family that serves prefill if TensorRT-LLM has no path for the format."""
    policy: MeasuredPolicy = field(init=False)

    def __post_init__(self) -> None:
        self.policy = MeasuredPolicy(self.times, f"measured in {self.seconds:.1f} s")

    def rows(self, tokens: int) -> float:
        return float(tokens * self.geometry.top_k / self.geometry.num_experts / self.geometry.ranks)

    def loss(self) -> float:
        """Return the largest relative loss of the chosen path against the fastest one under skewed routes."""
        assert self.skewed is not None
        worst = 0.0
        for tokens, paths in self.skewed.rows.items():
            chosen = self.policy.select(tokens, [name for name, last in self.largest.items() if tokens <= last]) or HOST
            worst = max(worst, paths[chosen] / min(paths.values()) - 1)
        return worst

    def json(self) -> dict[str, Any]:
        content = {
            **self.record,
            "layer": self.name,
            "layers": self.layers,
            "seconds": round(self.seconds, 2),
            "rows_per_local_expert": {str(tokens): round(self.rows(tokens), 3) for tokens in self.times.counts},
            "bandwidth_limit": {str(tokens): round(self.limit[tokens], 2) for tokens in self.times.counts},
            "chosen": self.policy.ranges(max(self.largest.values()), self.largest),
        }
        if self.skewed is not None:
            points = {str(tokens): {name: round(t, 3) for name, t in p.items()} for tokens, p in self.skewed.rows.items()}
            content["skewed"] = {"microseconds": points, "worst_loss": round(self.loss(), 4)}
        return content

    def lines(self) -> list[str]:
        """Return the table as it is printed."""
        names = {**{name: name for name in self.largest}, HOST: self.base or HOST}
        heads = ("tokens", "rows/expert", *(f"{name} us".rjust(10) for name in names.values()), "  limit us", "chosen")
        policy = self.policy.summary(self.base or "CUTLASS")
        lines = [f"{self.name}, on a rank {self.geometry}: {policy}, {self.layers} layers", "  ".join(heads)]
        for tokens, paths in self.times.rows.items():
            cells = [(f"{paths[name]:.1f}" if name in paths else "-").rjust(10) for name in names]
            ends = f"{self.limit[tokens]:.1f}".rjust(10), names[fastest(paths) or HOST]
            lines.append("  ".join((str(tokens).rjust(6), f"{self.rows(tokens):.2f}".rjust(11), *cells, *ends)))
        if self.skewed is not None:
            lines.append(f"skewed routes: the choice is at most {100 * self.loss():.1f} % behind the fastest path")
        return lines


@click.command(short_help="Measure which path is the fastest at how many tokens.")
@options.options
@click.option("--skewed", is_flag=True, help="Also routes that prefer experts by 1 / rank: is the choice right for those too?")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write every number to this file; - for standard output."
)
@click.option("--png", type=click.Path(path_type=Path), help="Draw time over tokens into this file (needs matplotlib).")
@click.pass_context
def tune(ctx: click.Context, skewed: bool, json_file: Path | None, png: Path | None, **layer: Any) -> None:
    """Measure each kernel family and TensorRT-LLM's own path on this card, as a server does at warm-up.

    Measures each geometry of an NVFP4 or MXFP8 CHECKPOINT, or one given by its sizes. MXFP8 families are compared with each
    other. Weights are random: times do not depend on them. The table is stored where a server of this installation looks for it.
    A --json file serves other machines with the same kind of card through TRTLLM_B12X_CROSSOVER=FILE.

    Exit status: 0 measured, 2 no GPU or nothing to measure, 130 interrupted.
    """
    options.check(**layer)
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        raise UnusableError("--png needs matplotlib: pip install matplotlib, or the package's extra, trtllm-b12x[plot]")
    expect_folder(json_file, png)
    gpu = _gpu()
    shapes = options.layer_shapes(**layer)
    ctx.exit(_tune(shapes, options.Ranks(layer["tp"], layer["ep"]), gpu, skewed, json_file, png))


def _gpu() -> str:
    try:
        import torch
    except Exception as error:
        raise UnusableError(f"torch does not import: {first_line(error)}") from None
    if not torch.cuda.is_available():
        raise UnusableError("no GPU: torch sees none, and times of another machine say nothing; run it on the one with the card")
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (SM{major}{minor})"


def _device() -> str:
    return "cuda:0"


def _families() -> list[str]:
    """Return the families whose real kernels run on this card."""
    from trtllm_b12x.engines.trtllm.machine import candidate_kernels

    return [family for family, kernel in candidate_kernels("cuda").items() if kernel.features.name == family]


def _tune(
    shapes: dict[str, LayerShape], ranks: options.Ranks, gpu: str, skewed: bool, json_file: Path | None, png: Path | None
) -> int:
    """Measure every layer, print and write the tables, and return the exit status."""
    from trtllm_b12x.dispatch import timing
    from trtllm_b12x.engines.trtllm import build_layer

    tables: list[_Table] = []
    to_stderr, embedded = str(json_file) == "-", build_layer.is_embedded()
    with Progress(f"measuring {len(shapes)} layer{'' if len(shapes) == 1 else 's'}", len(shapes)) as bar:
        bar.line(f"{gpu}: the tables are this GPU's, not another card's", to_stderr)
        if embedded:
            words = "TensorRT-LLM is not installed: the host's path is the embedded host's operator in torch, not CUTLASS"
            bar.line(words, to_stderr)
        copy = timing.copy_bandwidth()
        bar.line(f"a copy moves {copy / 1e12:.2f} TB/s, read plus written", to_stderr)
        for number, (name, shape) in enumerate(shapes.items()):

            def advance(share: float, number: int = number) -> None:
                bar.set(number + share)

            try:
                table = _measure(name, shape, ranks, copy, skewed, advance)
            except Exception as error:  # from the host, torch or the driver: the other geometries may still work
                reason = error if isinstance(error, build_layer.NothingToMeasureError) else first_line(error)
                bar.line(f"error: {name}: {reason}", err=True)
                continue
            tables.append(table)
            for text in table.lines():
                bar.line(text, to_stderr)
    if json_file is not None:
        content = {
            "trtllm_b12x": __version__,
            "gpu": gpu,
            "embedded_host": embedded,
            "copy_bytes_per_second": round(copy),
            "tables": [table.json() for table in tables],
        }
        write(json_file, json.dumps(content, indent=1) + "\n")
    if png is not None and tables:
        _draw(tables, gpu, png)
        bar.line(f"{png} is drawn", to_stderr)
    return 0 if len(tables) == len(shapes) else 2


def _measure(name: str, shape: LayerShape, ranks: options.Ranks, copy: float, skewed: bool, advance: _Advance) -> _Table:
    import torch

    from trtllm_b12x.dispatch import crossover, store, timing
    from trtllm_b12x.engines.trtllm import build_layer, host_path
    from trtllm_b12x.engines.trtllm.host import load

    logging.getLogger("trtllm_b12x").setLevel(logging.WARNING)
    families, device = _families(), torch.device(_device())
    if not families:
        raise build_layer.NothingToMeasureError("no kernel family runs on this card")
    with settings.KERNELS.only(families), settings.CROSSOVER.set("auto"):
        modules = build_layer.build(shape, device, ranks.tp, ranks.ep, progress=lambda share: advance(_BUILT * share))
        backend, geometry = getattr(modules[0], "backend", modules[0]), build_layer.geometry(modules[0])
        schedule = backend.schedule
        if list(schedule.families) == [schedule.base]:
            raise build_layer.NothingToMeasureError(f"{schedule.summary}: there is nothing to compare it with")
        paths = host_path.timed_paths(backend, build_layer.call(modules[0], 1))
        largest = timing.largest_served(paths)
        build_layer.tuned(modules[0], max(largest.values()))
        arguments = paths, geometry, host_path.route_sampler(backend, geometry, device), device
        timer = timing.PathTimer(*arguments, progress=lambda share: advance(_BUILT + (1 - _BUILT) * share))
        times = timer(counts_to_measure(largest.values()))
        others = timing.PathTimer(*arguments, seed=_SEED, skewed=True)(times.counts) if skewed else None
        tuned = bool(schedule.base) or not build_layer.is_embedded()
        key = crossover.key_of(geometry, device, schedule, load().generation, tuned)
    store.keep(key, times)
    expert = 1e6 * timing.expert_bytes(geometry) / copy
    limit = {tokens: expert * timing.expected_hits(geometry, tokens) for tokens in times.counts}
    record = store.record(key, times)
    return _Table(name, geometry, record, times, largest, timer.spent_s, len(modules), limit, others, schedule.base)


def _draw(tables: list[_Table], gpu: str, file: Path) -> None:
    """Plot time over tokens for each path, the bandwidth limit, and a background in the color of the chosen path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(len(tables), 1, figsize=(8, 4.5 * len(tables)), squeeze=False)
    for table, axes in zip(tables, all_axes[:, 0], strict=True):
        colors, label = {}, table.base or "the host's path"
        for name in [*table.largest, HOST]:
            points = [(tokens, paths[name]) for tokens, paths in table.times.rows.items() if name in paths]
            (line,) = axes.plot(*zip(*points, strict=True), marker="o", label=label if name == HOST else name)
            colors[name] = line.get_color()
        axes.plot(list(table.limit), list(table.limit.values()), "k--", label="bandwidth limit")
        counts = table.times.counts
        for first, last, name in table.policy.ranges(counts[-1], table.largest):
            axes.axvspan(max(first - 0.5, counts[0]), last + 0.5, color=colors[name], alpha=0.12, lw=0)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds", title=f"{table.name}\n{gpu}")
        ticks = [count for count in counts if count & (count - 1) == 0]
        axes.set_xticks(ticks, [str(count) for count in ticks])
        axes.legend()
        axes.grid(alpha=0.3)
    with writing(file):
        figure.savefig(file, dpi=120, bbox_inches="tight")
