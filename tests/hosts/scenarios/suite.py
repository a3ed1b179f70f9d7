# SPDX-License-Identifier: Apache-2.0
"""The embedded host's own tests, on a double."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3]


class _Part:
    """Selects tests and keeps what became of them."""

    def __init__(self, part: str) -> None:
        self._part = part
        self.outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the first parameters of each test, or the others."""
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        items[:] = [item for item in items if (item in first.values()) == (self._part == "first")]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = report.longreprtext[-2000:] if report.failed else ""
            self.outcomes[report.outcome].append(f"{report.nodeid} {text}".strip())


def rerun(part: str, *files: str) -> dict[str, Any]:
    """Run the ``first`` parameters of each test in the files, or the ``others``."""
    os.chdir(FOLDER)
    plugin = _Part(part)
    options = ["-q", "-p", "no:cacheprovider", "-c", str(FOLDER.parent / "clone" / "pyproject.toml"), "--rootdir", "."]
    code = pytest.main([*options, "-m", "not embedded", *files], plugins=[plugin])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r}")
    return plugin.outcomes
