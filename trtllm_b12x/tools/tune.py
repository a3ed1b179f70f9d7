"""``trtllm-b12x tune``: measure the fastest path for each token count on this card."""

from __future__ import annotations

import importlib.util
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_b12x.core import settings
from trtllm_b12x.core.errors import first_line
from trtllm_b12x.core.version import __version__
from trtllm_b12x.dispatch.policy import HOST, MeasuredPolicy, Timings, counts_to_measure, fastest
from trtllm_b12x.formats.geometry import LayerShape

from . import options as geometry
from .options import Unusable
from .verify_output import plain, progress

if TYPE_CHECKING:
    import torch

_DONE, _UNUSABLE = 0, 2
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
    most: dict[str, int]
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

    def called(self, path: str) -> str:
        return self.base if self.base and path == HOST else path

    def rows(self, tokens: int) -> float:
        return float(tokens * self.geometry.top_k / self.geometry.num_experts / self.geometry.ranks)

    def loss(self) -> float:
        """Return the largest relative loss of the chosen path against the fastest one under skewed routes."""
        assert self.skewed is not None
        worst = 0.0
        for tokens, paths in self.skewed.rows.items():
            chosen = self.policy.select(tokens, [name for name, most in self.most.items() if tokens <= most]) or HOST
            worst = max(worst, paths[chosen] / min(paths.values()) - 1)
        return worst

    def json(self) -> dict[str, Any]:
        counts = self.times.counts
        found = {
            **self.record,
            "layer": self.name,
            "layers": self.layers,
            "seconds": round(self.seconds, 2),
            "rows_per_local_expert": {str(tokens): round(self.rows(tokens), 3) for tokens in counts},
            "bandwidth_limit": {str(tokens): round(self.limit[tokens], 2) for tokens in counts},
            "chosen": self.policy.ranges(max(self.most.values()), self.most),
        }
        if self.skewed is not None:
            points = {str(tokens): {name: round(t, 3) for name, t in p.items()} for tokens, p in self.skewed.rows.items()}
            found["skewed"] = {"microseconds": points, "worst_loss": round(self.loss(), 4)}
        return found


@click.command(short_help="Measure which path is the fastest at how many tokens.")
@geometry.options
@click.option("--skewed", is_flag=True, help="Also routes that prefer experts by 1 / rank: is the choice right for those too?")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write every number to this file; - for standard output."
)
@click.option("--png", type=click.Path(path_type=Path), help="Draw time over tokens into this file (needs matplotlib).")
@click.pass_context
def tune(
    ctx: click.Context,
    checkpoint: Path | None,
    form: str,
    activation: str,
    tp: int,
    ep: int,
    skewed: bool,
    json_file: Path | None,
    png: Path | None,
    **sizes: int | None,
) -> None:
    """Measure each kernel family and TensorRT-LLM's own path on this card, as a server does at warm-up.

    Measures each geometry of an NVFP4 or MXFP8 CHECKPOINT, or one given by its sizes. MXFP8 families are compared with each
    other. Weights are random: times do not depend on them. The table is stored where a server of this installation looks for it.
    A --json file serves other machines with the same kind of card through TRTLLM_B12X_CROSSOVER=FILE.

    Exit status: 0 measured, 2 no GPU or nothing to measure, 130 interrupted.
    """
    with geometry.reported(ctx):
        geometry.check(checkpoint, sizes)
        if png is not None and importlib.util.find_spec("matplotlib") is None:
            raise Unusable("--png needs matplotlib: pip install matplotlib, or the package's extra, trtllm-b12x[plot]")
        for file in (json_file, png):
            if file is not None and str(file) != "-" and not file.absolute().parent.is_dir():
                raise Unusable(f"{file}: its folder does not exist; create it first")
        gpu = _gpu()
        shapes = geometry.given(checkpoint, sizes, activation, tp, ep, form)
        ctx.exit(_tune(shapes, tp, ep, gpu, skewed, json_file, png))


def _gpu() -> str:
    try:
        import torch
    except Exception as error:
        raise Unusable(f"torch does not import: {str(error).splitlines()[0]}") from None
    if not torch.cuda.is_available():
        raise Unusable("no GPU: torch sees none, and times of another machine say nothing; run it on the one with the card")
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (SM{major}{minor})"


def _device() -> str:
    return "cuda:0"


def _families() -> list[str]:
    """Return the families whose real kernels run on this card."""
    from trtllm_b12x.engines.trtllm.eligibility import considered

    return [family for family, kernel in considered("cuda").items() if kernel.features.name == family]


def _tune(
    shapes: dict[str, LayerShape], tp: int, ep: int, gpu: str, skewed: bool, json_file: Path | None, png: Path | None
) -> int:
    import torch

    from trtllm_b12x.dispatch import timing
    from trtllm_b12x.engines.trtllm import build_layer as layers

    to_stderr = str(json_file) == "-"

    def line(text: str) -> None:
        click.echo(plain(text), err=to_stderr)

    line(f"{gpu}: the tables are this GPU's, not another card's")
    if layers.is_embedded():
        line("TensorRT-LLM is not installed: the host's path is the embedded host's operator in torch, not CUTLASS")
    device = torch.device(_device())
    copy = timing.copy_bandwidth()
    line(f"a copy moves {copy / 1e12:.2f} TB/s, read plus written")
    tables: list[_Table] = []
    failed = False
    with progress(len(shapes), "measuring") as (set_done, paused):
        for number, (name, shape) in enumerate(shapes.items()):
            try:
                set_share = lambda share, number=number: set_done(number + share)  # noqa: E731
                tables.append(_measure(name, shape, tp, ep, device, copy, skewed, set_share))
            except Exception as error:  # from the host, torch or the driver: the other geometries may still work
                failed = True
                with paused():
                    reason = error if isinstance(error, layers.NothingToMeasureError) else first_line(error)
                    click.echo(f"error: {plain(name)}: {plain(reason)}", err=True)
                continue
            with paused():
                for text in _lines(tables[-1]):
                    line(text)
    _write(tables, gpu, copy, layers.is_embedded(), json_file)
    if png is not None and tables:
        _draw(tables, gpu, png)
        line(f"{png} is drawn")
    return _UNUSABLE if failed else _DONE


def _measure(
    name: str, shape: LayerShape, tp: int, ep: int, device: torch.device, copy: float, skewed: bool, set_share: Any
) -> _Table:
    from trtllm_b12x.dispatch import crossover, store, timing
    from trtllm_b12x.engines.trtllm import build_layer as layers
    from trtllm_b12x.engines.trtllm import host_path
    from trtllm_b12x.engines.trtllm.host import load

    logging.getLogger("trtllm_b12x").setLevel(logging.WARNING)
    real = _families()
    if not real:
        raise layers.NothingToMeasureError("no kernel family runs on this card")
    with settings.KERNELS.only(real), settings.CROSSOVER.set("auto"):
        made = layers.build(shape, device, tp, ep, progress=lambda share: set_share(_BUILT * share))
        backend, geometry = getattr(made[0], "backend", made[0]), layers.geometry(made[0])
        among = backend.schedule
        if list(among.families) == [among.base]:
            raise layers.NothingToMeasureError(f"{among.summary}: there is nothing to compare it with")
        paths = host_path.timed_paths(backend, layers.call(made[0], 1))
        most = timing.largest_served(paths)
        layers.tuned(made[0], max(most.values()))
        sampler = host_path.route_sampler(backend, geometry, device)
        measured = lambda share: set_share(_BUILT + (1 - _BUILT) * share)  # noqa: E731
        timer = timing.PathTimer(paths, geometry, sampler, device, progress=measured)
        times = timer(counts_to_measure(most.values()))
        others = timing.PathTimer(paths, geometry, sampler, device, seed=_SEED, skewed=True)(times.counts) if skewed else None
        tuned = bool(among.base) or not layers.is_embedded()
        key = crossover.key_of(geometry, device, among, load().generation, tuned)
    store.keep(key, times)
    read = {tokens: timing.expert_bytes(geometry) * timing.expected_hits(geometry, tokens) for tokens in times.counts}
    limit = {tokens: 1e6 * size / copy for tokens, size in read.items()}
    return _Table(name, geometry, store.record(key, times), times, most, timer.spent_s, len(made), limit, others, among.base)


# ---- output --------------------------------------------------------------------------------------------------------------


def _lines(table: _Table) -> list[str]:
    names = [*table.most, HOST]
    found = [
        f"{table.name}, on a rank {table.geometry}: {table.policy.summary(table.base or 'CUTLASS')}, {table.layers} layers",
        "  ".join(("tokens", "rows/expert", *(f"{table.called(name)} us".rjust(10) for name in names), "  limit us", "chosen")),
    ]
    for tokens, paths in table.times.rows.items():
        cells = [f"{paths[name]:.1f}".rjust(10) if name in paths else "-".rjust(10) for name in names]
        ends = f"{table.limit[tokens]:.1f}".rjust(10), table.called(fastest(paths) or HOST)
        found.append("  ".join((str(tokens).rjust(6), f"{table.rows(tokens):.2f}".rjust(11), *cells, *ends)))
    if table.skewed is not None:
        found.append(f"skewed routes: the choice is at most {100 * table.loss():.1f} % behind the fastest path")
    return found


def _write(tables: list[_Table], gpu: str, copy: float, embedded: bool, file: Path | None) -> None:
    if file is None:
        return
    content = {
        "trtllm_b12x": __version__,
        "gpu": gpu,
        "embedded_host": embedded,
        "copy_bytes_per_second": round(copy),
        "tables": [table.json() for table in tables],
    }
    from trtllm_b12x.core import disk

    text = json.dumps(content, indent=1) + "\n"
    if str(file) == "-":
        click.echo(text, nl=False)
        return
    try:
        disk.replace(file, text)
    except OSError as error:
        raise Unusable(f"{file}: cannot be written ({error.strerror}); free space or choose another file") from None


def _draw(tables: list[_Table], gpu: str, file: Path) -> None:
    """Plot time over tokens for each path, the bandwidth limit, and a background in the color of the chosen path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(len(tables), 1, figsize=(8, 4.5 * len(tables)), squeeze=False)
    for table, axes in zip(tables, all_axes[:, 0], strict=True):
        colors, label = {}, table.base or "the host's path"
        for name in [*table.most, HOST]:
            points = [(tokens, paths[name]) for tokens, paths in table.times.rows.items() if name in paths]
            (drawn,) = axes.plot(*zip(*points, strict=True), marker="o", label=label if name == HOST else name)
            colors[name] = drawn.get_color()
        axes.plot(list(table.limit), list(table.limit.values()), "k--", label="bandwidth limit")
        counts = table.times.counts
        for first, last, name in table.policy.ranges(counts[-1], table.most):
            axes.axvspan(max(first - 0.5, counts[0]), last + 0.5, color=colors[name], alpha=0.12, lw=0)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds", title=f"{table.name}\n{gpu}")
        ticks = [count for count in counts if count & (count - 1) == 0]
        axes.set_xticks(ticks, [str(count) for count in ticks])
        axes.legend()
        axes.grid(alpha=0.3)
    try:
        figure.savefig(file, dpi=120, bbox_inches="tight")
    except OSError as error:
        raise Unusable(f"{file}: cannot be written ({error.strerror}); free space or choose another file") from None
