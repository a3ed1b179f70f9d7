from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("TRTLLM_B12X_KERNELS", "b12x")
"""Where a test does not say which families it is about, it is about b12x alone."""
os.environ.setdefault("TRTLLM_B12X_CROSSOVER", "64")
"""And about the fixed split, on a GPU too."""


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
