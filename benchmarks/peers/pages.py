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
_TITLES = (
    *("layer", "kernel", "split", "routing", "tokens", "us", "experts", "MB", "MB/replay"),
    *("of copy", "B/clock/SM", "TFLOP/s", "host us", "error"),
)


def row(line: dict[str, Any]) -> list[str]:
    """Return the cells of one of our lines."""
    numbers = [
        f"{line['us']:.1f}",
        f"{line['experts']:.1f}",
        f"{line['megabytes']:.1f}",
        _number(line.get("replay_megabytes"), 0),
    ]
    numbers += [f"{line['fraction']:.2f}", f"{line['bytes_per_clock_sm']:.1f}", f"{line['tflops']:.1f}", f"{line['host_us']:.0f}"]
    names = [line["geometry"], line.get("kernel", "triton"), line["split"], line["routing"], str(line["tokens"])]
    return [*names, *numbers, _number(line["error"], 4)]


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def whole_layers(results: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return our decode lines of whole layers with random routing, by layer and token count: of the faster kernel."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for line in sorted(results["lines"], key=lambda line: float(line["us"]), reverse=True):
        if (line["split"], line["routing"]) == ("TP1", "random") and line.get("kernel", "triton") in DECODE:
            found.setdefault(line["geometry"], {})[line["tokens"]] = line
    return {name: dict(sorted(lines.items())) for name, lines in found.items()}


def of_peer(results: dict[str, Any], peer: str, geometry: str) -> dict[int, dict[str, Any]]:
    """Return a peer's lines of one layer by token count."""
    return {line["tokens"]: line for line in results.get(peer) or [] if line["geometry"] == geometry}


def quantization_of(peer: str, lines: dict[int, dict[str, Any]]) -> str:
    """Return the formats of a peer's weights and activations on one layer."""
    return str(next(iter(lines.values())).get("quantization") or PEERS[peer].quantization)


def verdict(ours: float, peers: dict[str, float]) -> str:
    """Say how ours compares with the fastest peer that runs whole layers."""
    if not peers:
        return "-"
    name = min(peers, key=lambda peer: peers[peer])
    ratio = peers[name] / ours
    return f"{ratio:.2f}x faster than {name}" if ratio >= 1 else f"**{1 / ratio:.2f}x slower** than {name}"


def markdown(results: dict[str, Any]) -> str:
    """Return the page: where it ran, a table for each layer with every peer, and all of our lines."""
    text = [*_head(results), ""]
    for name, lines in whole_layers(results).items():
        peers = {peer: found for peer in PEERS if (found := of_peer(results, peer, name))}
        titles = ["tokens", f"ours us, {next(iter(lines.values())).get('quantization') or results['format']}", "of copy", "error"]
        for peer, found in peers.items():
            titles += [f"{PEERS[peer].title} us, {quantization_of(peer, found)}", "error"]
            titles[-1:-1] = ["products us"] if any("products_us" in line for line in found.values()) else []
        rows = []
        for tokens, line in lines.items():
            cells = [str(tokens), f"{line['us']:.1f}", f"{line['fraction']:.2f}", _number(line["error"], 4)]
            for found in peers.values():
                other = found.get(tokens, {})
                cells.append(_number(other.get("us")))
                if any("products_us" in each for each in found.values()):
                    cells.append(_number(other.get("products_us")))
                cells.append(_number(other.get("error"), 4))
            times = {
                peer: found[tokens].get("us") for peer, found in peers.items() if tokens in found and peer != "torch_grouped"
            }
            rows.append([*cells, verdict(line["us"], {peer: us for peer, us in times.items() if us})])
        text += [f"## {name}", "", *table([*titles, "ours"], rows), ""]
    text += [
        "- us: microseconds of a whole layer from x, ids and router weights. products us: without the sorting of routes.",
        "- error: relative L2 from float32 on dequantized weights with activations that are not quantized.",
        *(f"- {PEERS[peer].note}" for peer in PEERS if results.get(peer)),
        "",
    ]
    if results["not_measured"]:
        text += [*(f"- Not measured: {line}" for line in results["not_measured"]), ""]
    return "\n".join([*text, "## Our lines", "", *table(_TITLES, map(row, results["lines"]))]) + "\n"


def _head(results: dict[str, Any]) -> list[str]:
    versions = results.get("versions") or {name: results[name] for name in ("torch", "triton")}
    stated = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    head = [f"{results['gpu']}, copy {results['copy'] / 1e12:.2f} TB/s (read and write); {stated}."]
    if "l2_megabytes" in results:
        head.append(
            f"Captured graphs, cold: L2 holds {results['l2_megabytes']:.0f} MB, column MB/replay says what a graph reads."
        )
    for when, clocks in (results.get("clocks") or {}).items():
        if clocks:
            head.append(f"Clocks {when}: SM {clocks.get('clocks.sm')}, memory {clocks.get('clocks.mem')} MHz.")
    return head


# ---- plot ----------------------------------------------------------------------------------------------------------------


def curves(results: dict[str, Any]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return microseconds of whole layers up to 256 tokens, by layer and kernel, of a file of peers or of a card's report."""
    if "kernels" in results:
        found: dict[str, dict[str, list[tuple[int, float]]]] = {}
        for one in results["kernels"].values():
            found |= curves(one["peers"])
        for name, path in results["paths"].items():
            times = {int(n): at for part in path["tune"]["tables"] for n, at in part["microseconds"].items()}
            host = sorted((n, at["host"]) for n, at in times.items() if at.get("host") and n <= 256)
            if host and name in found:
                found[name][CUTLASS] = host
        return found
    found = {}
    for name, lines in whole_layers(results).items():
        format_ = next(iter(lines.values())).get("quantization") or f"W4A16 {results.get('format', 'NVFP4')}"
        few = {n: line for n, line in lines.items() if n <= 256}
        found[name] = {f"{OURS}, {format_}": [(n, line["us"]) for n, line in few.items()]}
        for peer in ("marlin", "triton_kernels", "flashinfer", "dequantize"):
            lines_of_peer = of_peer(results, peer, name)
            points = [(n, line["us"]) for n, line in lines_of_peer.items() if line["us"] and n <= 256]
            if points:
                found[name][f"{PEERS[peer].title}, {quantization_of(peer, lines_of_peer)}"] = points
        found[name][COPY] = [(n, line["us"] * line["fraction"]) for n, line in few.items()]
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
        raise ValueError("no line of a whole layer with random routing")
    names = [name for name in SHOWN if name in found] or list(found)
    one = first if "gpu" in first else next(iter(first["kernels"].values()))["peers"]
    title = f"One MoE layer on {one['gpu']} (copy {one['copy'] / 1e12:.2f} TB/s)"
    return panels(path, {name: found[name] for name in names[:3]}, title, "microseconds a layer, lower is better", COPY)
