"""Time of a decode layer on SM12x cards, on paper: a fixed part, and bytes over bandwidth, as measured on a Hopper card."""

from __future__ import annotations

from typing import Any

from benchmarks.floor_models import CARDS
from benchmarks.markdown import table
from benchmarks.peers import pages
from trtllm_b12x.kernels.cards import MODELS

FILES = {"moe-decode.json": "NVFP4", "moe-w4a16.json": "W4A16_NVFP4", "moe-mxfp4.json": "MXFP4", "moe-mxfp8.json": "MXFP8"}
TOKENS = (1, 2, 4, 8, 16, 32, 64)
DATASHEET = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}
"""Bytes a second, of the vendor's specifications."""
CLOCK = 2.4e9
"""Of a multiprocessor under load, on RTX 50 and GB10: public specifications and reports."""
_HEAD = """
## One MoE layer on paper

Microseconds that a decode layer would take, by `fixed part + factor x bytes / copy`. Fixed part and factor are fitted
to one run on {gpu} ({tokens} tokens); "off" is the largest error of the fit there. Assumed: the fixed part is the same on every
card, a copy gets {share:.0%} of the specified bandwidth as on that card, and no part of a layer is in L2.
"""
_BOUND = """
Memory would bound these layers, not instructions: a multiprocessor moved {least:.1f} to {most:.1f} bytes a clock on that card
(NVFP4, {tokens} tokens). At {clock} GHz the whole bandwidth is {needed}. Part of the factor is instructions all the same:
MXFP8 takes fewer for a byte, and its factor is smaller. So a card with less bandwidth for its clock may do better than this.
"""


def fit(lines: list[dict[str, Any]], copy: float) -> tuple[float, float, float]:
    """Return the fixed part in seconds, the factor of ``bytes / copy``, and the largest relative error.

    The sum of squared relative errors is least.
    """
    rows = [(1e6 * x["megabytes"] / copy / (1e-6 * x["us"]), 1 / (1e-6 * x["us"])) for x in lines]
    aa, ab, bb = (sum(f(u, v) for u, v in rows) for f in (lambda u, v: v * v, lambda u, v: u * v, lambda u, v: u * u))
    a, b = sum(v for _, v in rows), sum(u for u, _ in rows)
    determinant = aa * bb - ab * ab
    fixed, factor = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    return fixed, factor, max(abs(fixed * v + factor * u - 1) for u, v in rows)


def _by_bandwidth() -> dict[float, list[str]]:
    cards: dict[float, list[str]] = {}
    for card in CARDS:
        cards.setdefault(card.bandwidth, []).append(card.name)
    return cards


def section(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of docs/floor.md: of the first file's card, if its specifications are known here."""
    first = next((found[file] for file in FILES if file in found), None)
    if first is None or first["gpu"] not in DATASHEET:
        return []
    share, rows = first["copy"] / DATASHEET[first["gpu"]], []
    for file, form in FILES.items():
        results = found.get(file, first)
        if file in found and results["gpu"] == first["gpu"]:
            rows += _rows(form, results, share)
    usual = pages.whole_layers(first).values()
    reached = [line["bytes_per_clock_sm"] for lines in usual for tokens, line in lines.items() if tokens in TOKENS]
    multiprocessors = {name: count for target in MODELS.values() for name, count in target.items()}
    needed = ", ".join(
        f"{bandwidth / CLOCK / multiprocessors[name]:.1f} on {name}"
        for bandwidth, names in _by_bandwidth().items()
        for name in names
        if name in multiprocessors
    )
    counts = f"{TOKENS[0]} to {TOKENS[-1]}"
    bound = {"least": min(reached), "most": max(reached), "tokens": counts, "clock": CLOCK / 1e9, "needed": needed}
    head = ["layer", "fixed part, us", "factor", "off", "card", *map(str, TOKENS)]
    return [_HEAD.format(gpu=first["gpu"], tokens=counts, share=share), *table(head, rows), _BOUND.format(**bound)]


def _rows(form: str, results: dict[str, Any], share: float) -> list[list[str]]:
    """Return a row for each layer and bandwidth. Two token counts at least are needed for a fit."""
    rows = []
    for name, lines in pages.whole_layers(results).items():
        layer = {tokens: line for tokens, line in lines.items() if tokens in TOKENS}
        if len(layer) < 2:
            continue
        fixed, factor, off = fit(list(layer.values()), results["copy"])
        head = [f"{name}, {form}", f"{1e6 * fixed:.1f}", f"{factor:.2f}", f"{off:.0%}"]
        for bandwidth, cards in _by_bandwidth().items():
            times = {n: fixed + factor * 1e6 * x["megabytes"] / (share * bandwidth) for n, x in layer.items()}
            rows.append([*head, ", ".join(cards), *(f"{1e6 * times[n]:.0f}" if n in times else "-" for n in TOKENS)])
    return rows
