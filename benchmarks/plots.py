"""Plots of measurements, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def axes(width: float, height: float) -> Any:
    """Return the axes of a new figure, or None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height))[1]


def save(drawn: Any, path: Path) -> None:
    """Write the figure of these axes, with a legend above them that hides nothing."""
    from matplotlib import pyplot

    drawn.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
    drawn.figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(drawn.figure)


_STYLES = (("#1f5fbf", "o", 2.8), ("#d9480f", "s", 1.8), ("#2b8a3e", "^", 1.8), ("#7048a8", "D", 1.8), ("#555555", "v", 1.8))
"""Color, marker and line width of each kernel."""


def panels(
    path: Path, layers: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], title: str, label: str, limit: str = ""
) -> bool:
    """Draw time over tokens on log2 axes, a panel for each layer and a curve for each kernel.

    Args:
        limit: name of the curve that kernels are compared with, dashed.

    Returns:
        False without matplotlib.
    """
    if axes(1, 1) is None:
        return False
    from matplotlib import pyplot

    pyplot.close("all")
    names = list(dict.fromkeys(name for curves in layers.values() for name in curves))
    figure, drawn = pyplot.subplots(1, len(layers), figsize=(4.6 * len(layers) + 0.6, 4.9), squeeze=False, facecolor="white")
    for axis, (layer, curves) in zip(drawn[0], layers.items(), strict=True):
        if limit in curves:
            axis.plot(*zip(*curves[limit], strict=True), "--", color="#777777", linewidth=1.6, label=limit)
        for name, (color, marker, width) in zip([name for name in names if name != limit], _STYLES, strict=False):
            if name in curves:
                tokens, values = zip(*curves[name], strict=True)
                axis.plot(tokens, values, marker=marker, color=color, linewidth=width, markersize=6, label=name)
        seen = [point for points in curves.values() for point in points]
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
    drawn[0][0].set_ylabel(label, fontsize=13)
    figure.suptitle(title, fontsize=16)
    lines = {line.get_label(): line for axis in drawn[0] for line in axis.get_lines()}
    figure.legend(
        lines.values(), lines.keys(), loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=2, fontsize=13, frameon=False
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130, bbox_inches="tight", facecolor="white")
    pyplot.close(figure)
    return True
