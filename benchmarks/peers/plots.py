# SPDX-License-Identifier: Apache-2.0
"""Plot OUT.json, and reports of ``benchmarks.on_card``, as PNG if matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.others import PEERS
from benchmarks.peers.pages import SHOWN, label, whole_layers

OURS, CUTLASS = "trtllm-b12x (ours)", "TensorRT-LLM's CUTLASS, W4A4 NVFP4"
COPY = "its bytes at the bandwidth of a copy"
_STYLES = (("#1f5fbf", "o", 2.8), ("#d9480f", "s", 1.8), ("#2b8a3e", "^", 1.8), ("#7048a8", "D", 1.8), ("#555555", "v", 1.8))
"""Color, marker and line width of each kernel."""


def curves(results: dict[str, Any]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return microseconds of whole layers up to 256 tokens, by layer and kernel, from a file of peers or from a card's report."""
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
    """Draw time over tokens on log2 axes: a panel for each of at most three layers, a curve for each kernel.

    Later files add kernels to the layers of the first. Return False without matplotlib.

    Raises:
        LookupError, TypeError, ValueError: a file has no whole layers, or has an unknown layout.
    """
    found = curves(files[0])
    for other in files[1:]:
        for name, more in curves(other).items():
            found[name] = more | found.get(name, {})
    if not found:
        raise ValueError("no line of a whole layer")
    layers = ([name for name in SHOWN if name in found] or list(found))[:3]
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    kernels = list(dict.fromkeys(name for layer in layers for name in found[layer] if name != COPY))
    figure, drawn = pyplot.subplots(1, len(layers), figsize=(4.6 * len(layers) + 0.6, 4.9), squeeze=False, facecolor="white")
    for axis, layer in zip(drawn[0], layers, strict=True):
        axis.plot(*zip(*found[layer][COPY], strict=True), "--", color="#777777", linewidth=1.6, label=COPY)
        for name, (color, marker, width) in zip(kernels, _STYLES, strict=False):
            if name in found[layer]:
                tokens, values = zip(*found[layer][name], strict=True)
                axis.plot(tokens, values, marker=marker, color=color, linewidth=width, markersize=6, label=name)
        seen = [point for points in found[layer].values() for point in points]
        low, high = min(value for _, value in seen), max(value for _, value in seen)
        ticks = sorted({tokens for tokens, _ in seen})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_title(layer, fontsize=15)
        axis.set_xlabel("tokens", fontsize=13)
        axis.set_xticks(ticks, [str(n) for n in ticks])
        powers = [2**n for n in range(20) if low / 1.5 <= 2**n <= high * 1.5]
        axis.set_yticks(powers, [str(n) for n in powers])
        axis.minorticks_off()
        axis.tick_params(labelsize=12)
        axis.grid(alpha=0.3)
    drawn[0][0].set_ylabel("microseconds a layer, lower is better", fontsize=13)
    one = files[0] if "gpu" in files[0] else next(iter(files[0]["kernels"].values()))["peers"]
    figure.suptitle(f"One MoE layer on {one['gpu']} (copy {one['copy'] / 1e12:.2f} TB/s)", fontsize=16)
    lines = {line.get_label(): line for axis in drawn[0] for line in axis.get_lines()}
    figure.legend(
        lines.values(), lines.keys(), loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=2, fontsize=13, frameon=False
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130, bbox_inches="tight", facecolor="white")
    pyplot.close(figure)
    return True
