# SPDX-License-Identifier: Apache-2.0
"""Render the numbers in OUT.json as OUT.md, and as tables in reports of ``benchmarks.on_card``."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.markdown import table
from benchmarks.peers.others import PEERS

SHOWN = ("Qwen3-30B-A3B", "Nemotron-3-Super", "gpt-oss-120b-like")
"""Layers of the default run and of the plot."""
DECODE = "cuda", "triton"
_DIGITS = {"us": 1, "megabytes": 1, "fraction": 2, "host_us": 0, "error": 4}
_TITLES = "layer", "tokens", "kernel", "us", "MB", "of copy", "host us", "error"


def label(peer: str, line: dict[str, Any]) -> str:
    """Return a peer's title, and the formats of its weights and activations in this line."""
    return f"{PEERS[peer].title}, {line.get('quantization') or PEERS[peer].quantization}"


def row(line: dict[str, Any], peer: str = "") -> list[str]:
    """Return the cells of one line, measured on a peer or on our kernels."""
    name = label(peer, line) if peer else f"ours, `{line['kernel']}`"
    part = "" if line.get("split", "TP1") == "TP1" else f", {line['split']}"
    return [line["geometry"] + part, str(line["tokens"]), name, *(number(line.get(key), n) for key, n in _DIGITS.items())]


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def every_kernel(results: dict[str, Any]) -> list[str]:
    """Return a table of all lines, the fastest kernel of a layer and token count first."""
    lines = [(line, "") for line in results["lines"]] + [(line, peer) for peer in PEERS for line in results.get(peer) or []]
    lines.sort(key=lambda pair: (pair[0]["geometry"], pair[0].get("split", "TP1"), pair[0]["tokens"], pair[0]["us"] or math.inf))
    return table(_TITLES, [row(*pair) for pair in lines])


def whole_layers(results: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return our decode lines of whole layers, by layer and token count, each for the faster kernel."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for line in sorted(results["lines"], key=lambda line: float(line["us"]), reverse=True):
        if line["split"] == "TP1" and line["kernel"] in DECODE:
            found.setdefault(line["geometry"], {})[line["tokens"]] = line
    return {name: dict(sorted(lines.items())) for name, lines in found.items()}


def markdown(results: dict[str, Any]) -> str:
    """Return the page: where it ran, and a row for each kernel, layer and token count."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if version)
    head = [f"{results['gpu']}, copy {results['copy'] / 1e12:.2f} TB/s (read and write); {versions}."]
    for when, clocks in results["clocks"].items():
        if clocks:
            head.append(f"Clocks {when}: SM {clocks.get('clocks.sm')}, memory {clocks.get('clocks.mem')} MHz.")
    notes = [
        "- us: microseconds of a whole layer from x, ids and router weights.",
        "- error: relative L2 from float32 on dequantized weights with activations that are not quantized.",
        *(f"- {PEERS[peer].note}" for peer in PEERS if results.get(peer)),
        *(f"- Not measured: {line}" for line in results["not_measured"]),
    ]
    return "\n".join([*head, "", *every_kernel(results), "", *notes]) + "\n"
