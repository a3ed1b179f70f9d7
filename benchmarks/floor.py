"""The least time of one decode step: bytes that it must read over the bandwidth of the card.

``python -m benchmarks.results`` writes docs/floor.md.  No GPU, no network.  Weights that a step reads are read once, whatever the
batch; of the experts those that some token goes to.  Nothing else is counted: no activation, no launch, no synchronization, no
sampling.  So no implementation is faster, and none gets there.
"""

from __future__ import annotations

from benchmarks import published
from benchmarks.floor_models import CARDS, CONTEXT, MODELS, Card, Model
from benchmarks.markdown import table

BATCHES = (1, 2, 4, 8, 16, 32, 64)

_HEAD = """# The floor of a decode step

Bytes that one decode step must read, over the bandwidth of the card: no implementation is faster, and none gets there.
Written by `python -m benchmarks.results` (`benchmarks/floor.py`; figures of models and cards in `benchmarks/floor_models.py`).
Nothing on this page was measured on SM12x, but for what others have published.

## What a step reads

Megabytes at batch 1, {context} tokens behind the sequence:
"""
_HITS = """
T tokens that each choose k of E experts hit E (1 - (1 - k/E)^T) of them on average. Where routing is skewed, the expert of rank r
is liked by 1/r. Experts of a layer that are hit, uniform and skewed:
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

## Assumptions
"""
_COMMON = """- Figures of a config.json are those that public code quotes; they add up to the published numbers of parameters.
- A weight that a step needs is read once; nothing is left in L2 from the step before (96 MB on RTX 5090).
- One card; one token a sequence (no speculative decoding); tokens choose experts independently of each other.
- Activations, router scores, norms and biases are not counted: below one percent. Nor are launches, sampling and the host.
"""


def page() -> str:
    """docs/floor.md."""
    columns = [str(batch) for batch in BATCHES]
    parts = {m.name: m.parts(1) for m in MODELS}
    names = list(dict.fromkeys(name for one in parts.values() for name in one))
    text = [_HEAD.format(context=CONTEXT)]
    rows = [[f"{parts[m.name][n] / 1e6:,.0f}" if parts[m.name].get(n) else "-" for n in names] for m in MODELS]
    ends = [[f"{sum(parts[m.name].values()) / 1e6:,.0f}", f"{m.weights / 1e9:.1f}"] for m in MODELS]
    text += table(
        ["model", *names, "sum", "all weights, GB"],
        [[m.name, *row, *end] for m, row, end in zip(MODELS, rows, ends, strict=True)],
    )
    text += [_HITS]
    text += table(
        ["model", *columns],
        [[m.name, *(f"{m.hits(batch):.0f}, {m.hits(batch, skewed=True):.0f}" for batch in BATCHES)] for m in MODELS],
    )
    text += ["", "## Milliseconds of a step at the floor", "", "By batch; uniform routing, in parentheses skewed.", ""]
    text += table(["model", "card", *columns], [[m.name, c.name, *_floors(m, c)] for m in MODELS for c in CARDS])
    text += [_BESIDE]
    text += table(["model", "card", "at a time", "experts by", "published", "floor", "floor is", "source"], _beside())
    text += [_AFTER.format(server=_least("Nemotron-3-Super", "RTX PRO 6000 Server", 1))]
    text += [f"- {card.name}: {card.bandwidth / 1e9:,.0f} GB/s. {card.source}." for card in CARDS]
    text += [f"- {m.name}: {m.sources}. Assumed: {m.assumed}." for m in MODELS]
    return "\n".join(text) + "\n" + _COMMON


def _floors(model: Model, card: Card) -> list[str]:
    if not model.fits(card):
        return ["does not fit", *["-"] * (len(BATCHES) - 1)]
    return [f"{1e3 * model.floor(card, batch):.2f} ({1e3 * model.floor(card, batch, skewed=True):.2f})" for batch in BATCHES]


def _least(model: str, card: str, batch: int) -> float:
    """Milliseconds, by the names of model and card."""
    ((m, c),) = ((m, c) for m in MODELS for c in CARDS if (m.name, c.name) == (model, card))
    return 1e3 * m.floor(c, batch)


def _beside() -> list[list[str]]:
    rows = []
    for f in published.FIGURES:
        step = f.value if f.metric == published.TPOT else 1e3 * (f.concurrency or 0) / f.value
        cells = ["-", "-"]
        if f.concurrency and f.metric != published.TTFT:
            least = _least(f.model, f.card, f.concurrency)
            cells = [f"{least:.2f} ms", f"{100 * least / step:.0f} % of {step:.2f} ms"]
        at = str(f.concurrency or "no limit")
        rows.append([f.model, f.card, at, f.path, f"{f.metric} {f.value:g} ({f.recipe})", *cells, f.source])
    return rows
