from __future__ import annotations

import os
import re

import pytest
import torch

from trtllm_b12x.core import process

os.environ.setdefault("TRTLLM_B12X_KERNELS", "b12x")
"""Where a test does not say which families it is about, it is about b12x alone."""
os.environ.setdefault("TRTLLM_B12X_CROSSOVER", "64")
"""And about the fixed split, on a GPU too."""


LONG = re.compile(
    "|".join(
        (
            r"test_triton_compiled\.py::test_grouped_products_are_native\[(GroupedKernel|GroupedNVFP4Kernel-121)",
            r"test_triton_compiled\.py::test_products_of_16_bits_spill_nothing\[90",
            r"test_triton_compiled\.py::test_proof_of_both_grouped_formats",
            r"test_triton_compiled\.py::test_other_formats.*\[(90|120-1-Qwen|120-64-gpt|.*by turns)",
            r"hosts/test_start\.py::test_a_model_is_promoted.*\[(B-12\.1-(after|by|spawned)|C2-(9\.0|12\.1-(before|after|by|spawned)))",
            r"hosts/test_start\.py::test_on_stock_pins.*\[(B-by_itself|B-mpi|C2-before|C2-by)",
            r"hosts/test_start\.py::(test_the_off_switch|test_without_configurable_moe_or_with_it|test_the_line_is_seen)\[C2",
            r"hosts/test_start\.py::test_a_broken_plugin_breaks_nothing\[(syntax|missing|unreadable)",
            r"test_exports\.py::test_served_by_b12x_within_the_bounds\[[a-z0-9-]*-(128|160|1856)",
            r"test_exports\.py::test_the_judge_agrees_with_the_model_itself\[(mixtral|nemotron|minimax|deepseek)",
            r"hosts/test_calls\.py::(test_compile_finds_no_graph_break|test_the_crossover_is_measured_once.*)\[B",
        )
    )
)
"""Cases that take long and of which another case of the same kind stays in ``make test``. ``make test-all`` runs them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if LONG.search(item.nodeid):
            item.add_marker(pytest.mark.all)


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled kernels between workers and runs: Triton's cache knows them by source, options and compiler."""
    if hasattr(config, "cache"):
        os.environ.setdefault("TRITON_CACHE_DIR", str(config.cache.mkdir("triton")))
    config.pluginmanager.register(_Failures(config))


class _Failures:
    """Names a failure at once, and not only after the last test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f" {report.nodeid} ({report.when})")


@pytest.fixture(autouse=True)
def fresh_process() -> None:
    """The same numbers, and nothing that the package remembers, whatever ran before, in whichever worker."""
    torch.manual_seed(0)
    process.forget()


@pytest.fixture
def every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user has it who sets nothing."""
    monkeypatch.delenv("TRTLLM_B12X_KERNELS")


@pytest.fixture
def triton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host whose FlashInfer cannot serve."""
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "triton")
