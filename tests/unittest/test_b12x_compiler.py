"""FlashInfer's kernels are loaded from its cache; what it lacks is tried in a child first, inside a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trtllm_b12x.core import process, settings
from trtllm_b12x.environment import prove
from trtllm_b12x.kernels import PlanError
from trtllm_b12x.kernels.b12x import compiler

DEVICE = torch.device("cuda")


def build(cached: bool) -> Any:
    def flashinfers(module: str, name: str, compile_kernel: Callable[[], Any]) -> Any:
        return "loaded" if cached else compile_kernel()

    return compiler._build(flashinfers, "trtllm-b12x warmup ...", DEVICE, "module", "static_1", lambda: "compiled")


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A server on an sm_120a, where FlashInfer cannot compile."""
    targets: list[str] = []

    def fails(target: str) -> str:
        targets.append(target)
        return "ptxas fatal"

    monkeypatch.setattr(process, "in_server", True)
    monkeypatch.setattr(prove, "compile_error", fails)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    return targets


def test_what_is_in_the_cache_is_loaded_without_a_proof(proved: list[str]) -> None:
    with settings.FREEZE.set("1"):
        assert build(cached=True) == "loaded"
    assert not proved


def test_a_miss_is_compiled_in_a_child_first(proved: list[str]) -> None:
    with pytest.raises(PlanError, match="ptxas fatal"):
        build(cached=False)
    assert proved == ["sm_120a"]


def test_a_miss_is_compiled_where_no_server_would_die(proved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "in_server", False)
    assert build(cached=False) == "compiled"
    assert not proved


def test_a_miss_is_refused_when_frozen(proved: list[str]) -> None:
    with settings.FREEZE.set("1"), pytest.raises(PlanError, match=r"static_1 is not in FlashInfer's cache.*warmup \.\.\."):
        build(cached=False)
    assert not proved
