# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest
import torch

from trtllm_b12x.core import process

os.environ.setdefault("TRTLLM_B12X_KERNELS", "b12x")
"""Where a test does not say which families it is about, it is about b12x alone."""
os.environ.setdefault("TRTLLM_B12X_CROSSOVER", "64")
"""And about the fixed split, on a GPU too."""


LONGEST = (
    *(
        "test_cuda_emulated",
        "test_payload",
        "test_tritons",
        "test_start",
        "test_triton_compiled",
        "test_warmup",
        "test_triton_numbers",
    ),
    *("test_calls", "test_promotion", "test_b12x", "test_exports", "test_format_numbers", "test_distributed"),
)
"""Files that start first: a worker takes whole files, and one that begins late leaves the other worker idle."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Keep ``all`` on the cases that its patterns name; a mark without patterns names every case. Order files by length."""
    for item in items:
        case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
        item.own_markers[:] = [
            mark
            for mark in item.own_markers
            if mark.name != "all" or not mark.args or any(fnmatchcase(case, p) for p in mark.args)
        ]
    yield
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_configure(config: pytest.Config) -> None:
    """Share caches between workers and runs, and write none of the user's: tables of a CPU are no news to ``doctor``."""
    if hasattr(config, "cache"):
        os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("home"))
        for variable, name in (("TRITON_CACHE_DIR", "triton"), ("FLASHINFER_WORKSPACE_BASE", "flashinfer")):
            os.environ.setdefault(variable, str(config.cache.mkdir(name)))


@pytest.fixture(autouse=True)
def fresh_process() -> None:
    """The same numbers, and nothing that the package remembers, whatever ran before, in whichever worker."""
    torch.manual_seed(0)
    process.forget()


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> list[str]:
    """Each ``name`` for which this run has a test in the module."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return [str(item.callspec.params["name"]) for item in items if hasattr(item, "callspec") and "name" in item.callspec.params]


@pytest.fixture
def every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user has it who sets nothing."""
    monkeypatch.delenv("TRTLLM_B12X_KERNELS")


@pytest.fixture
def triton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host whose FlashInfer cannot serve."""
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "triton")
