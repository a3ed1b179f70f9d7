"""Tables for the pages that benchmarks write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table; an empty one has its titles alone."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in (titles, ["---"] * len(titles), *rows)]
