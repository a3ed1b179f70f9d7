"""``tests/test_list.txt`` registers every test file, so that none is forgotten where tests are picked by list."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_the_list_is_complete_and_sorted() -> None:
    listed = (TESTS / "test_list.txt").read_text().splitlines()
    found = sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py"))
    assert listed == found
