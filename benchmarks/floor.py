"""The least time of one decode step: bytes that it must read over the bandwidth of the card.

``python -m benchmarks.results`` writes docs/floor.md, .json and, with matplotlib, .png.  No GPU, no network.  Weights that a step
reads are read once, whatever the batch; of the experts those that some token goes to.  Nothing else is counted: no activation,
no launch, no synchronization, no sampling.  So no implementation is faster, and none gets there.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import published
from benchmarks.floor_models import CARDS, CONTEXT, H200, MODELS, Card, Model
from benchmarks.markdown import table

BATCHES = (1, 2, 4, 8, 16, 32, 64)
DOCS = Path(__file__).parents[1] / "docs"
_WANTED = ("TP1", "random", "triton")


# ---- what a Hopper GPU measured ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One MoE layer on the H200, random routing."""

    seconds: float
    bytes: float
    """That were read."""

    @property
    def cycles(self) -> float:
        return self.seconds * H200.clock

    @property
    def rate(self) -> float:
        """Bytes per clock and multiprocessor."""
        return self.bytes / self.cycles / H200.multiprocessors


def measured(docs: Path = DOCS) -> dict[str, dict[int, Layer]]:
    """Map a geometry (MXFP8: with ", MXFP8" behind its name) and a token count to the layer of the last run kept in docs/."""
    layers: dict[str, dict[int, Layer]] = {}
    for name, suffix in (("moe-decode", ""), ("moe-mxfp8", ", MXFP8")):
        file = docs / f"{name}.json"
        results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"lines": []}
        for line in results["lines"]:
            if (line.get("split", "TP1"), line.get("routing", "random"), line.get("kernel", "triton")) == _WANTED:
                seconds = 1e-6 * line["us"]
                layer = Layer(seconds, line["fraction"] * seconds * results["copy"])
                layers.setdefault(line["geometry"] + suffix, {})[line["tokens"]] = layer
    return layers


@dataclass(frozen=True)
class Prediction:
    """Seconds of a decode step, experts as measured on Hopper, all else at the floor."""

    by_rate: float
    """Bytes per clock and multiprocessor are those of the H200, at most the bandwidth."""
    by_cycles: float
    """Clocks of a layer are those of the H200, as where latency decides; not less than the bandwidth asks for."""


def predicted(model: Model, card: Card, batch: int, layers: dict[int, Layer], context: int = CONTEXT) -> Prediction | None:
    """None where the H200 was not measured up to ``batch``."""
    counts = sorted(layers)
    above = next((count for count in counts if count >= batch), None)
    if above is None or batch < counts[0]:
        return None
    below = max(count for count in counts if count <= batch)
    share = 0.0 if below == above else math.log(batch / below) / math.log(above / below)

    def between(value: Callable[[Layer], float]) -> float:
        return value(layers[below]) ** (1 - share) * value(layers[above]) ** share

    size = model.hits(batch) * model.expert_bytes
    least = size / card.bandwidth
    rate = between(lambda layer: layer.rate) * card.multiprocessors * card.clock
    rest = sum(model.parts(batch, context).values()) / card.bandwidth - model.moe_layers * least
    by_rate, by_cycles = max(least, size / rate), max(least, between(lambda layer: layer.cycles) / card.clock)
    return Prediction(rest + model.moe_layers * by_rate, rest + model.moe_layers * by_cycles)


def results(docs: Path = DOCS) -> dict[str, Any]:
    """Everything that docs/floor.json holds."""
    hopper = measured(docs)
    lines = []
    for model, card, batch in itertools.product(MODELS, CARDS, BATCHES):
        guess = predicted(model, card, batch, hopper.get(model.geometry, {})) if model.geometry in hopper else None
        lines.append(
            {
                "model": model.name,
                "card": card.name,
                "batch": batch,
                "fits": model.fits(card),
                "experts_hit": round(model.hits(batch), 2),
                "experts_hit_skewed": round(model.hits(batch, skewed=True), 2),
                "megabytes": round(sum(model.parts(batch).values()) / 1e6, 1),
                "floor_ms": _ms(model.floor(card, batch)),
                "floor_skewed_ms": _ms(model.floor(card, batch, skewed=True)),
                "predicted_by_rate_ms": _ms(guess.by_rate) if guess else None,
                "predicted_by_cycles_ms": _ms(guess.by_cycles) if guess else None,
            }
        )
    parts = {m.name: {name: round(size / 1e6, 1) for name, size in m.parts(1).items()} for m in MODELS}
    cards = {card.name: {k: v for k, v in vars(card).items() if k != "name"} for card in CARDS}
    return {"context": CONTEXT, "cards": cards, "megabytes_of_batch_1": parts, "lines": lines}


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


# ---- page ----------------------------------------------------------------------------------------------------------------


_HEAD = """# The floor of a decode step

Bytes that one decode step must read, over the bandwidth of the card: no implementation is faster, and none gets there.
Written by `python -m benchmarks.results` (`benchmarks/floor.py`; figures of models and cards in `benchmarks/floor_models.py`).
Nothing on this page was measured on SM12x, but for what others have published.

![tokens a second at the floor](floor.png)

## What a step reads

Megabytes at batch 1, {context} tokens behind the sequence:
"""
_HITS = """
Of T tokens that choose k of E experts, each for itself, E (1 - (1 - k/E)^T) are hit on average; skewed, the expert of rank r is
liked by 1/r. Experts of a layer that are hit, uniform and skewed:
"""
_BESIDE = """
## Beside what is published

All published figures are others', on their own kernels, as their sources report them.
"""
_AFTER = """
A step of `n` sequences takes `n` over the output tokens a second. That counts prefill too, so the floor's share is a little low.
A first token is not a decode step, and of a run without a limit on requests nobody says how many were decoded together: these
have no floor here. Which edition of the RTX PRO 6000 pull request 13773 measured is not known; on the Server Edition the floor
is {server:.2f} ms.

## What the Hopper measurement predicts

A MoE layer of the package's Triton kernels was measured on an H200 ([triton.md](triton.md), [mxfp8.md](mxfp8.md)). Two readings:

- by rate: the bytes that a multiprocessor takes in a clock are the same on another card, as far as its bandwidth goes (what
  instructions allow);
- by cycles: the clocks of a layer are the same, however many multiprocessors there are, and not less than the bandwidth asks for
  (what latency costs).

All else is at the floor. Neither is a measurement, and both leave out what the rest of a step costs. Milliseconds of a step,
where they are above the floor:
"""
_SAME = """
Everywhere else that was measured both are the floor: the kernels would wait for memory, and nothing in them could be faster. Not
measured on Hopper, or not up to the batch: {missing}.

## Assumptions
"""
_COMMON = """- Figures of a config.json are those that public code quotes; they add up to the published numbers of parameters.
- A weight that a step needs is read once; nothing is left in L2 from the step before (96 MB on RTX 5090).
- One card; one token a sequence (no speculative decoding); tokens choose experts independently of each other.
- Activations, router scores, norms and biases are not counted: below one percent. Nor are launches, sampling and the host.
"""


def page(found: dict[str, Any]) -> str:
    """docs/floor.md, of :func:`results`."""
    by = {(line["model"], line["card"], line["batch"]): line for line in found["lines"]}
    columns = [str(batch) for batch in BATCHES]
    parts = found["megabytes_of_batch_1"]
    names = list(dict.fromkeys(name for one in parts.values() for name in one))
    text = [_HEAD.format(context=found["context"])]
    rows = [[f"{parts[m.name][n]:,.0f}" if parts[m.name].get(n) else "-" for n in names] for m in MODELS]
    ends = [[f"{sum(parts[m.name].values()):,.0f}", f"{m.weights / 1e9:.1f}"] for m in MODELS]
    text += table(
        ["model", *names, "sum", "all weights, GB"],
        [[m.name, *row, *end] for m, row, end in zip(MODELS, rows, ends, strict=True)],
    )
    text += [_HITS]
    hits = {m.name: [by[m.name, CARDS[0].name, batch] for batch in BATCHES] for m in MODELS}
    text += table(
        ["model", *columns],
        [[m, *(f"{line['experts_hit']:.0f}, {line['experts_hit_skewed']:.0f}" for line in lines)] for m, lines in hits.items()],
    )
    text += ["", "## Milliseconds of a step at the floor", "", "By batch; uniform routing, in parentheses skewed.", ""]
    text += table(["model", "card", *columns], [[m.name, c.name, *_floors(m, c, by)] for m in MODELS for c in CARDS])
    text += [_BESIDE]
    text += table(["model", "card", "at a time", "experts by", "published", "floor", "floor is", "source"], _beside(by))
    text += [_AFTER.format(server=by["Nemotron-3-Super", "RTX PRO 6000 Server", 1]["floor_ms"])]
    rows, missing = _predictions(by)
    text += table(["model", "card", "", *columns], rows)
    text += [_SAME.format(missing=", ".join(missing) or "nothing")]
    for card in CARDS:
        figures = f"{card.bandwidth / 1e9:,.0f} GB/s, {card.multiprocessors} multiprocessors, {card.clock / 1e9:.2f} GHz"
        text += [f"- {card.name}: {figures}. {card.source}."]
    text += [f"- {m.name}: {m.sources}. Assumed: {m.assumed}." for m in MODELS]
    return "\n".join(text) + "\n" + _COMMON


def _floors(model: Model, card: Card, by: dict[Any, Any]) -> list[str]:
    if not model.fits(card):
        return ["does not fit", *["-"] * (len(BATCHES) - 1)]
    lines = [by[model.name, card.name, batch] for batch in BATCHES]
    return [f"{line['floor_ms']:.2f} ({line['floor_skewed_ms']:.2f})" for line in lines]


def _predictions(by: dict[Any, Any]) -> tuple[list[list[str]], list[str]]:
    """Rows of what is above the floor, and models that Hopper did not measure whole."""
    rows, missing = [], {}
    for model, card, kind in itertools.product(MODELS, CARDS, ("by rate", "by cycles")):
        lines = [by[model.name, card.name, batch] for batch in BATCHES] if model.fits(card) else []
        values = [line[f"predicted_{kind.replace(' ', '_')}_ms"] for line in lines]
        if None in values:
            missing[model.name] = True
        cells = ["-" if v is None else f"{v:.2f}" if v > line["floor_ms"] else "=" for v, line in zip(values, lines, strict=True)]
        if set(cells) - {"-", "="}:
            rows.append([model.name, card.name, kind, *cells])
    return rows, list(missing)


def _beside(by: dict[Any, Any]) -> list[list[str]]:
    rows = []
    for f in published.FIGURES:
        step = f.value if f.metric == published.TPOT else 1e3 * (f.concurrency or 0) / f.value
        cells = ["-", "-"]
        if f.concurrency and f.metric != published.TTFT:
            least = by[f.model, f.card, f.concurrency]["floor_ms"]
            cells = [f"{least:.2f} ms", f"{100 * least / step:.0f} % of {step:.2f} ms"]
        at = str(f.concurrency or "no limit")
        rows.append([f.model, f.card, at, f.path, f"{f.metric} {f.value:g} ({f.recipe})", *cells, f.source])
    return rows


def plot(path: Path) -> bool:
    """Tokens a second at the floor over the batch, a panel per card; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(CARDS), figsize=(4 * len(CARDS), 4), sharey=True)
    for axes, card in zip(panels, CARDS, strict=True):
        for place, model in enumerate(MODELS):
            color = f"C{place}"
            if model.fits(card):
                axes.plot(BATCHES, [b / model.floor(card, b) for b in BATCHES], color=color, marker="o", label=model.name)
            for f in published.FIGURES:
                if (f.model, f.card) == (model.name, card.name) and f.concurrency and f.metric != published.TTFT:
                    rate = f.value if f.metric == published.OUTPUT else 1e3 * f.concurrency / f.value
                    axes.plot([f.concurrency], [rate], color=color, marker="x", linestyle="none")
        axes.set(xscale="log", yscale="log", xlabel="batch", title=f"{card.name}, {card.bandwidth / 1e9:,.0f} GB/s")
        axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="tokens a second; x: published, others' kernels")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=len(MODELS))
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
    return True
