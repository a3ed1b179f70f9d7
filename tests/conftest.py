from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("TRTLLM_B12X_KERNELS", "b12x")
"""Where a test does not say which families it is about, it is about b12x alone."""
os.environ.setdefault("TRTLLM_B12X_CROSSOVER", "64")
"""And about the fixed split, on a GPU too."""


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled kernels between workers and runs: Triton's cache knows them by source, options and compiler."""
    if hasattr(config, "cache"):
        os.environ.setdefault("TRITON_CACHE_DIR", str(config.cache.mkdir("triton")))
    config.pluginmanager.register(_Failures(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have a worker run whole files, whose fixtures are made once, unless ``--dist`` names another way."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getoption("dist") == "load" else None


class _Failures:
    """Names a failure at once, and not only after the last test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f" {report.nodeid} ({report.when})")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers whatever ran before, in whichever worker."""
    torch.manual_seed(0)


@pytest.fixture
def every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user has it who sets nothing."""
    monkeypatch.delenv("TRTLLM_B12X_KERNELS")


@pytest.fixture
def triton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host whose FlashInfer cannot serve."""
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "triton")
