"""Is the choice right near a crossing?  Every token count is measured again afterwards, on a GPU of capability 8.0 or newer.

``python -m benchmarks.crossover OUT`` writes OUT.json and OUT.md; about 7 minutes on an H200, ``--geometry`` takes fewer.

Triton's kernels on four geometries are compared with stand-ins for the host that are made to cross them: at 5, 11, 23 and 47
tokens, so gently that the two are within 10 % of each other over three octaves.  One is a delay on the GPU that follows the
kernels' smoothed time, jumps at powers of two, as a host does that has a tactic for each, and does not care for routes.  The
other is the same kernels on the same weights with tiles of their own, hence steps of their own, and a delay that shrinks with
tokens.

The choice is made as a server makes it, from nothing, in its budget.  Then each count is measured with other routes, twice: half
of the calls random and half skewed, as the choice was made; and once each kind alone, for users whose routes are all of one kind.
A choice is behind by its time over the best path's, where the host's time counts 0.97: what a kernel has to reach.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path as File
from typing import Any

import torch
import triton
from trtllm_b12x.crossover import measuring
from trtllm_b12x.crossover.search import Search

from benchmarks import require_gpu
from benchmarks.geometries import GEOMETRIES
from benchmarks.moe_decode import split, stack
from trtllm_b12x.dispatch.policy import GAIN, HOST, Measured, Times
from trtllm_b12x.dispatch.schedule import DEFAULT_CROSSOVER
from trtllm_b12x.dispatch.timing import Bench, Path
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.jit.cards import Card, card_of
from trtllm_b12x.kernels.triton import TritonKernel

LAYERS = {"Qwen3-30B-A3B": 1, "Nemotron-3-Super": 1, "gpt-oss-120b-like": 1, "DeepSeek-like": 8}
"""And the ranks that share the experts."""
CROSSINGS = (5, 11, 23, 47)
MOST = 128
"""Tokens that are planned."""
SLOPE = 0.08
"""Of the ratio of both times over tokens, in logarithms: within 10 % from a third of the crossing to three times that."""
TACTIC = 1.05
"""What every other tactic of the host's is slower by."""
LATER_S = 2.0
"""A budget for each count of a later measurement."""
_STACK = 8
_OTHER_CARD = 100 << 10
"""Bytes of shared memory, for which other tiles are chosen."""
_FAMILY = "triton"
MIXED, RANDOM, SKEWED = "mixed", "random", "skewed"
_SEEDS = ((MIXED, None, 7), (MIXED, None, 8), (RANDOM, False, 9), (SKEWED, True, 10))


@dataclass
class Choice:
    """One stand-in that crosses at one count."""

    stand_in: str
    crossing: int
    paths: dict[str, Path]
    split: Measured
    seconds: float
    """Of measuring."""


@dataclass
class Judged:
    """A choice at one count, by a later measurement."""

    tokens: int
    chosen: str
    microseconds: dict[str, float]
    behind: float
    """Relative, of the best path, where the host's time is what a kernel has to reach."""
    behind_fastest: float
    """The same, whatever the rule."""
    behind_host: float
    """0 where the host is chosen: what the package costs or, below 0, gains."""
    noise: float
    """By how much the ratio of both paths differs between two later measurements."""


@dataclass
class Summary:
    geometry: str
    stand_in: str
    crossing: int
    routes: str
    seconds: float
    measured: list[int]
    chosen: list[tuple[int, int, str]]
    counts: int
    """Judged: up to twice the crossing."""
    close: int
    """Of those, where the paths are within 10 %."""
    within: int
    """Of those, where the choice is within 3 %."""
    median: float
    worst: float
    worst_tokens: int
    worst_fastest: float
    worst_host: float
    noise_median: float
    noise_worst: float


class Layers:
    """Of one geometry: kernels by tiles, delays, and routes."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry, self.device = geometry, torch.device("cuda", torch.cuda.current_device())
        card, layers = card_of(self.device), stack(geometry, _STACK)
        self.kernels: dict[str, list[TritonKernel]] = {}
        for name, shared in (("own", card.shared_memory), ("other", _OTHER_CARD)):
            self.kernels[name] = []
            for layer in layers:
                kernel = TritonKernel(Card(card.multiprocessors, shared, card.capability))
                kernel.plan(geometry, MOST, self.device)
                kernel.bind(layer.kernel_weights())
                self.kernels[name].append(kernel)
        self.empty_us, self.cycles_per_us = _sleeping()
        plain = {"other": self.path("other"), HOST: self.path("own")}
        counts = [1 << power for power in range(MOST.bit_length())]
        found = self.bench(plain, budget_s=4.0)(counts)
        self.own, self.other = (_smooth({n: paths[name] for n, paths in found.points.items()}) for name in (HOST, "other"))

    def path(self, tiles: str, delay: Callable[[int], float] = lambda tokens: 0.0) -> Path:
        """The kernels and so many microseconds."""

        def added(run: measuring.Run) -> measuring.Run:
            def both(x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> None:
                run(x, ids, router_weights)
                self.sleep(delay(x.shape[0]))

            return both

        kernels = self.kernels[tiles]
        return Path([added(kernel.run) for kernel in kernels], lambda n: n <= MOST, launches=kernels[0].launches)

    def alone(self, delay: Callable[[int], float]) -> Path:
        run: measuring.Run = lambda x, ids, router_weights: self.sleep(delay(x.shape[0]))  # noqa: E731
        return Path([run] * _STACK, launches=int.bit_length)

    def sleep(self, microseconds: float) -> None:
        cycles = round((microseconds - self.empty_us) * self.cycles_per_us)
        if cycles > 0:
            torch.cuda._sleep(cycles)

    def draw(self, tokens: int, seed: int, skewed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = (
            measuring.router_logits(self.geometry, tokens, seed, skewed).to(self.device).topk(self.geometry.top_k, dim=1)
        )
        return ids.int(), values.softmax(1)

    def bench(self, paths: Mapping[str, Path], **named: Any) -> Bench:
        return Bench(paths, self.geometry, self.draw, self.device, **named)

    def crossing_at(self, crossing: int) -> dict[str, dict[str, Path]]:
        """Paths by stand-in."""
        least = (self.own(n) + 2 * self.empty_us for n in range(1, MOST + 1))  # so that the host's delay is never less than none
        always = max(0.0, *(least_ / _slope(crossing, n) - self.other(n) for n, least_ in enumerate(least, 1)))

        def tactics(tokens: int) -> float:
            return self.own(tokens) * _slope(crossing, tokens) * (TACTIC if tokens.bit_length() % 2 else 1.0)

        def shrinking(tokens: int) -> float:
            return (self.other(tokens) + always) * _slope(crossing, tokens) - self.own(tokens)

        return {
            "delay": {_FAMILY: self.path("own"), HOST: self.alone(tactics)},
            "other tiles": {_FAMILY: self.path("other", lambda tokens: always), HOST: self.path("own", shrinking)},
        }

    def choose(self, crossing: int) -> list[Choice]:
        """As a server does."""
        found = []
        for name, paths in self.crossing_at(crossing).items():
            started, bench, steps = time.monotonic(), self.bench(paths), measuring.steps(paths)
            times = Search(measuring.served(paths), steps).run(bench)
            assert times is not None
            split_ = Measured(times, "measured", DEFAULT_CROSSOVER, steps)
            found.append(Choice(name, crossing, paths, split_, time.monotonic() - started))
        return found

    def later(self, choices: Sequence[Choice], seed: int, skewed: bool | None) -> list[Times]:
        """Of each choice's paths, at every count up to twice its crossing; all take turns."""
        points: list[dict[int, dict[str, float]]] = [{} for _ in choices]
        for tokens in range(1, 2 * max(choice.crossing for choice in choices) + 1):
            there = [place for place, choice in enumerate(choices) if tokens <= 2 * choice.crossing]
            paths = {f"{place} {name}": path for place in there for name, path in choices[place].paths.items()}
            paths[HOST] = paths.pop(f"{there[-1]} {HOST}")
            found = self.bench(paths, budget_s=LATER_S, seed=seed, skewed=skewed)([tokens]).points[tokens]
            for place in there:
                points[place][tokens] = {name: found.get(f"{place} {name}", found[HOST]) for name in (_FAMILY, HOST)}
        return [Times(own) for own in points]


def _slope(crossing: int, tokens: int) -> float:
    """The host's time over the kernels'."""
    return float((crossing / tokens) ** SLOPE / GAIN)


def _sleeping() -> tuple[float, float]:
    """Microseconds of a delay of no cycles, and cycles per microsecond."""
    short, long = 20_000, 420_000
    times = [1e6 * measuring.graph_seconds(lambda n=n: [torch.cuda._sleep(n) for _ in range(20)]) / 20 for n in (short, long)]  # type: ignore[misc]
    rate = (long - short) / (times[1] - times[0])
    return max(times[0] - short / rate, 0.5), rate


def _smooth(times: Mapping[int, float]) -> Callable[[int], float]:
    """A parabola in the logarithms of both."""
    x = torch.tensor([math.log(n) for n in times], dtype=torch.float64)
    y = torch.tensor([math.log(t) for t in times.values()], dtype=torch.float64)
    powers = torch.stack([x**0, x, x**2], dim=1)
    a, b, c = torch.linalg.lstsq(powers, y[:, None]).solution[:, 0].tolist()
    return lambda tokens: math.exp(a + b * math.log(tokens) + c * math.log(tokens) ** 2)


# ---- judging -------------------------------------------------------------------------------------------------------------


def judged(choice: Measured, later: Sequence[Times]) -> list[Judged]:
    """A choice at the counts of one or two later measurements, the mean of which counts."""
    found = []
    for tokens in later[0].counts:
        both = [times.points[tokens] for times in later]
        paths = {name: statistics.geometric_mean(t[name] for t in both) for name in both[0]}
        chosen = choice.pick(tokens, [_FAMILY]) or HOST
        needed = {name: GAIN * t if name == HOST else t for name, t in paths.items()}
        ratios = [math.log(t[_FAMILY] / t[HOST]) for t in both]
        found.append(
            Judged(
                tokens,
                chosen,
                {name: round(t, 3) for name, t in paths.items()},
                needed[chosen] / min(needed.values()) - 1,
                paths[chosen] / min(paths.values()) - 1,
                paths[chosen] / paths[HOST] - 1,
                max(ratios) - min(ratios),
            )
        )
    return found


def summary(name: str, choice: Choice, routes: str, found: Sequence[Judged]) -> Summary:
    worst = max(found, key=lambda one: one.behind)
    close = sum(abs(math.log(one.microseconds[_FAMILY] / one.microseconds[HOST])) < 0.1 for one in found)
    return Summary(
        name,
        choice.stand_in,
        choice.crossing,
        routes,
        round(choice.seconds, 2),
        choice.split.times.counts,
        choice.split.ranges(MOST, {_FAMILY: MOST}),
        len(found),
        close,
        sum(one.behind <= 0.03 for one in found),
        statistics.median(one.behind for one in found),
        worst.behind,
        worst.tokens,
        max(one.behind_fastest for one in found),
        max(one.behind_host for one in found),
        statistics.median(one.noise for one in found),
        max(one.noise for one in found),
    )


def run(name: str, crossings: Sequence[int] = CROSSINGS) -> tuple[list[Summary], list[Any]]:
    """Summaries, and every number behind them."""
    whole = GEOMETRIES[name]
    layers = Layers(split(whole, 1, LAYERS[name]))
    choices = [choice for crossing in crossings for choice in layers.choose(crossing)]
    for choice in choices:
        chosen = choice.split.ranges(MOST, {_FAMILY: MOST})
        print(
            f"{name}, {choice.stand_in} at {choice.crossing}: {choice.seconds:.2f} s, {choice.split.times.counts}, {chosen}",
            flush=True,
        )
    later = [(kind, layers.later(choices, seed, skewed)) for kind, skewed, seed in _SEEDS]
    summaries, numbers = [], []
    for place, choice in enumerate(choices):
        for kind in (MIXED, RANDOM, SKEWED):
            times = [found[place] for other, found in later if other == kind]
            own = judged(choice.split, times)
            summaries.append(summary(name, choice, kind, own))
            print(f"  {_row(summaries[-1])}", flush=True)
            key = {"geometry": name, "stand_in": choice.stand_in, "crossing": choice.crossing, "routes": kind}
            first = {str(tokens): paths for tokens, paths in choice.split.times.points.items()}
            numbers.append({**key, "measured": first, "later": [asdict(one) for one in own]})
    return summaries, numbers


_TITLES: tuple[str, ...] = (
    "layer",
    "stand-in",
    "crosses at",
    "routes",
    "measured in",
    "counts judged",
    "within 10 % of each other",
    "choice within 3 %",
)
_TITLES += ("behind, median", "worst", "at", "worst behind the fastest", "worst against the host", "noise, median", "worst")


def _row(s: Summary) -> str:
    cells = (
        s.geometry,
        s.stand_in,
        s.crossing,
        s.routes,
        f"{s.seconds:.2f} s, {len(s.measured)} counts",
        s.counts,
        s.close,
        s.within,
    )
    shares = (f"{100 * share:.1f} %" for share in (s.median, s.worst))
    rest = (f"{100 * share:.1f} %" for share in (s.worst_fastest, s.worst_host, s.noise_median, s.noise_worst))
    return " | ".join(map(str, (*cells, *shares, s.worst_tokens, *rest)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=File)
    parser.add_argument("--geometry", action="append", choices=list(LAYERS), default=None)
    given = parser.parse_args()
    require_gpu()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    summaries: list[Summary] = []
    numbers: list[Any] = []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for name in given.geometry or LAYERS:
        started = time.monotonic()
        found, behind = run(name)
        summaries += found
        numbers += behind
        torch.cuda.empty_cache()
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        content = {
            **about,
            "summaries": [asdict(one) for one in summaries],
            "numbers": numbers,
        }  # what there is of a run that is cut short
        given.out.with_suffix(".json").write_text(json.dumps(content) + "\n")
        rows = [" | ".join(_TITLES), " | ".join("---" for _ in _TITLES), *map(_row, summaries)]
        given.out.with_suffix(".md").write_text("\n".join(f"| {line} |" for line in rows) + "\n")


if __name__ == "__main__":
    main()
