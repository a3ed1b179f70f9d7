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
    """Write the figure of these axes, with a legend."""
    from matplotlib import pyplot

    drawn.legend()
    drawn.figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(drawn.figure)


def by_tokens(path: Path, curves: Mapping[str, Sequence[tuple[int, float]]], label: str, top: float) -> bool:
    """Draw a curve for each name, from (tokens, value) pairs. Return False without matplotlib."""
    drawn = axes(8, 5)
    if drawn is None:
        return False
    for name, points in curves.items():
        drawn.plot(*zip(*points, strict=True), marker="o", label=name)
    drawn.set(xscale="log", xlabel="tokens", ylabel=label, ylim=(0, top))
    ticks = sorted({tokens for points in curves.values() for tokens, _ in points})
    drawn.set_xticks(ticks, [str(tokens) for tokens in ticks])
    drawn.grid(alpha=0.3)
    save(drawn, path)
    return True
