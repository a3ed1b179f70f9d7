"""The least time of one decode step: bytes that it must read over the bandwidth of the card.

``python -m benchmarks.results`` writes docs/floor.md.  No GPU, no network.  Weights that a step reads are read once, whatever the
batch; of the experts those that some token goes to.  Nothing else is counted: no activation, no launch, no synchronization, no
sampling.  So no implementation is faster, and none gets there.
"""

from __future__ import annotations

from typing import Any

from benchmarks import layer_times, published
from benchmarks.floor_models import CARDS, CONTEXT, MODELS, Card, Model
from benchmarks.markdown import table

BATCHES = (1, 2, 4, 8, 16, 32, 64)
DRAFTS = (2, 3, 4)
"""Tokens of a sequence in one step, with multi-token prediction or another drafter."""

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
_MTP = """
## Several tokens of a sequence in a step

With multi-token prediction (MTP) a step checks 2 to 4 tokens of each sequence. They go to more experts; weights, KV cache and
recurrent states are read once. The drafter's own steps are not counted. Milliseconds by batch on RTX PRO 6000, whose bandwidth
RTX 5090 has too; uniform routing, in parentheses skewed:
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
- One card; one token a sequence if a table does not say otherwise; tokens choose experts independently of each other.
- Activations, router scores, norms and biases are not counted: below one percent. Nor are launches, sampling and the host.
"""


def page(found: dict[str, dict[str, Any]]) -> str:
    """Return docs/floor.md.

    Args:
        found: files of docs/ by name; times of layers are fitted to them.
    """
    columns = [str(batch) for batch in BATCHES]
    parts = {m.name: m.parts(1) for m in MODELS}
    names = list(dict.fromkeys(name for one in parts.values() for name in one))
    text = [_HEAD.format(context=CONTEXT)]
    rows = [[f"{parts[m.name][n] / 1e6:,.0f}" if parts[m.name].get(n) else "-" for n in names] for m in MODELS]
    sums = [sum(parts[m.name].values()) for m in MODELS]
    fast = max(CARDS, key=lambda card: card.bandwidth).bandwidth
    ends = [[f"{s / 1e6:,.0f}", f"{fast / s:,.0f}", f"{m.weights / 1e9:.1f}"] for m, s in zip(MODELS, sums, strict=True)]
    text += table(
        ["model", *names, "sum", f"tokens/s at {fast / 1e9:,.0f} GB/s", "all weights, GB"],
        [[m.name, *row, *end] for m, row, end in zip(MODELS, rows, ends, strict=True)],
    )
    text += [_HITS]
    text += table(
        ["model", *columns],
        [[m.name, *(f"{m.hits(batch):.0f}, {m.hits(batch, skewed=True):.0f}" for batch in BATCHES)] for m in MODELS],
    )
    text += ["", "## Milliseconds of a step at the floor", "", "By batch; uniform routing, in parentheses skewed.", ""]
    text += table(["model", "card", *columns], [[m.name, c.name, *_floors(m, c)] for m in MODELS for c in CARDS])
    text += [_MTP]
    card = next(card for card in CARDS if card.name == "RTX PRO 6000")
    rows = [[m.name, str(draft), *_floors(m, card, draft)] for m in MODELS for draft in (1, *DRAFTS)]
    text += table(["model", "tokens a sequence", *columns], rows)
    text += layer_times.section(found)
    text += [_BESIDE]
    text += table(["model", "card", "at a time", "experts by", "published", "floor", "floor is", "source"], _beside())
    text += [_AFTER.format(server=_least("Nemotron-3-Super", "RTX PRO 6000 Server", 1))]
    text += [f"- {card.name}: {card.bandwidth / 1e9:,.0f} GB/s. {card.source}." for card in CARDS]
    text += [f"- {m.name}: {m.sources}. Assumed: {m.assumed}." for m in MODELS]
    return "\n".join(text) + "\n" + _COMMON


def _floors(model: Model, card: Card, draft: int = 1) -> list[str]:
    if not model.fits(card):
        return ["does not fit", *["-"] * (len(BATCHES) - 1)]
    pairs = [[1e3 * model.floor(card, batch, skewed=skewed, draft=draft) for skewed in (False, True)] for batch in BATCHES]
    return [f"{uniform:.2f} ({skewed:.2f})" for uniform, skewed in pairs]


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
