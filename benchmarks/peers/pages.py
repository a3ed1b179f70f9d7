"""OUT.md and OUT.png of the numbers in OUT.json, and of reports of ``benchmarks.on_card``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.peers.others import PEERS
from benchmarks.plots import panels

SHOWN = ("Qwen3-30B-A3B", "Nemotron-3-Super", "gpt-oss-120b-like")
"""Layers of the default run and of the plot."""
DECODE = "cuda", "triton"
OURS, CUTLASS = "trtllm-b12x (ours)", "TensorRT-LLM's CUTLASS, W4A4 NVFP4"
COPY = "its bytes at the bandwidth of a copy"
_DIGITS = {"us": 1, "products_us": 1, "megabytes": 1, "fraction": 2, "host_us": 0, "error": 4}
_TITLES = "layer", "tokens", "kernel", "us", "products us", "MB", "of copy", "host us", "error"


def label(peer: str, line: dict[str, Any]) -> str:
    """Return a peer's title, and the formats of its weights and activations in this line."""
    return f"{PEERS[peer].title}, {line.get('quantization') or PEERS[peer].quantization}"


def row(line: dict[str, Any], peer: str = "") -> list[str]:
    """Return the cells of one line, a peer's or ours."""
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
    """Return our decode lines of whole layers, by layer and token count: of the faster kernel."""
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
        "- us: microseconds of a whole layer from x, ids and router weights. products us: without the sorting of routes.",
        "- error: relative L2 from float32 on dequantized weights with activations that are not quantized.",
        *(f"- {PEERS[peer].note}" for peer in PEERS if results.get(peer)),
        *(f"- Not measured: {line}" for line in results["not_measured"]),
    ]
    return "\n".join([*head, "", *every_kernel(results), "", *notes]) + "\n"


# ---- plot ----------------------------------------------------------------------------------------------------------------


def curves(results: dict[str, Any]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return microseconds of whole layers up to 256 tokens, by layer and kernel, of a file of peers or of a card's report."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    if "kernels" in results:
        for one in results["kernels"].values():
            found |= curves(one["peers"])
        for name, path in results["paths"].items():
            times = {int(n): at for part in path["tune"]["tables"] for n, at in part["microseconds"].items()}
            host = sorted((n, at["host"]) for n, at in times.items() if at.get("host") and n <= 256)
            if host and name in found:
                found[name][CUTLASS] = host
        return found
    for name, lines in whole_layers(results).items():
        few = {n: line for n, line in lines.items() if n <= 256}
        drawn = found[name] = {f"{OURS}, {next(iter(lines.values()))['quantization']}": [(n, x["us"]) for n, x in few.items()]}
        for peer in PEERS:
            for line in results.get(peer) or []:
                if line["geometry"] == name and line["us"] and line["tokens"] <= 256:
                    drawn.setdefault(label(peer, line), []).append((line["tokens"], line["us"]))
        drawn[COPY] = [(n, line["us"] * line["fraction"]) for n, line in few.items()]
    return found


def plot(files: list[dict[str, Any]], path: Path) -> bool:
    """Draw at most three layers. Later files add kernels to the layers of the first. Return False without matplotlib.

    Raises:
        LookupError, TypeError, ValueError: a file holds no whole layers, or has another form.
    """
    first = files[0]
    found = curves(first)
    for other in files[1:]:
        for name, more in curves(other).items():
            found[name] = more | found.get(name, {})
    if not found:
        raise ValueError("no line of a whole layer")
    names = [name for name in SHOWN if name in found] or list(found)
    one = first if "gpu" in first else next(iter(first["kernels"].values()))["peers"]
    title = f"One MoE layer on {one['gpu']} (copy {one['copy'] / 1e12:.2f} TB/s)"
    return panels(path, {name: found[name] for name in names[:3]}, title, "microseconds a layer, lower is better", COPY)
