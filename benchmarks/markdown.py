# SPDX-License-Identifier: Apache-2.0
"""Tables for the pages that benchmarks write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table. An empty table has only its titles."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in (titles, ["---"] * len(titles), *rows)]
