"""What a first start compiles, and who waits for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from benchmarks.geometries import GEOMETRIES
from tests.clock import Clock, standing_in
from trtllm_b12x.core import settings
from trtllm_b12x.dispatch import layer
from trtllm_b12x.dispatch.layer import LayerDispatch
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.kernels.base import Kernel
from trtllm_b12x.kernels.reference import MXFP8ReferenceKernel, MXFP8UnquantizedReferenceKernel, UnquantizedReferenceKernel
from trtllm_b12x.kernels.triton import cache

QWEN3_30B = GEOMETRIES["Qwen3-30B-A3B"]


@pytest.mark.parametrize(
    ("families", "now", "ahead"),
    [
        # The one launch serves fewer than 64 tokens: the others wait for a measurement.
        ({"cuda": UnquantizedReferenceKernel, "triton": UnquantizedReferenceKernel}, ["cuda"], ["triton"]),
        # A format without a host's path: the family that serves every count is compiled first.
        (
            {"cuda": MXFP8UnquantizedReferenceKernel, "triton": MXFP8UnquantizedReferenceKernel, "grouped": MXFP8ReferenceKernel},
            ["cuda", "grouped"],
            ["grouped", "triton"],
        ),
    ],
)
def test_what_no_call_reaches_before_a_measurement_is_compiled_meanwhile(
    families: dict[str, type[Kernel]], now: list[str], ahead: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    planned: list[str] = []

    class Recorded(LayerDispatch):
        def _add(self, name: str, limit: int, bound: dict[str, Any], errors: dict[str, str]) -> None:
            planned.append(name)
            kernel: Any = families[name]()
            kernel.geometry, kernel.capacity, kernel.device = QWEN3_30B, limit, torch.device("cuda", 0)
            bound[name] = kernel

    def compile_ahead(cls: Any, kinds: Sequence[Any], geometry: Any, device: torch.device) -> int:
        if kinds[0][0] is cls:
            asked.append([kind.name for kind, _ in kinds])
        return 0

    distinct = {
        name: type(name, (kind,), {"name": name, "compile_ahead": classmethod(compile_ahead)}) for name, kind in families.items()
    }
    monkeypatch.setattr(threading, "Thread", lambda target, daemon: type("Started", (), {"start": staticmethod(target)}))
    with settings.CROSSOVER.set("auto"), standing_in(Clock(lambda name, tokens: 1.0)):
        for _ in range(2):
            dispatch = Recorded(distinct)
            dispatch.load(QWEN3_30B, None, torch.device("cuda", 0), 0, set(families))
            assert list(dispatch.schedule.families) == now
        assert asked == [ahead]  # once, whatever the number of layers
        waiting = [name for name in families if name not in now]
        assert list(dispatch.waiting) == waiting
        planned.clear()
        assert (dispatch.plan_waiting(), dispatch.plan_waiting(), planned) == ({}, {}, waiting)
    assert list(dispatch.schedule.families) == list(families)  # in order of preference
    layer._ahead.clear()


def test_a_plan_waits_for_its_own_kernels_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another thread or process compiles for longer: the cache is asked again, and what is there is taken."""
    monkeypatch.setattr(toolchain, "cache_folder", lambda: tmp_path)
    answers = [["missing"], ["missing"], []]
    monkeypatch.setattr(cache, "_missing", lambda needed: answers.pop(0))
    with FileLock(tmp_path / "trtllm_b12x.lock"):
        assert cache.fill([], 120) == 0
    assert not answers
    answers = [["missing"], ["missing"]]
    monkeypatch.setattr(cache.compile_pool, "fill", lambda missing, capability: len(missing))
    assert cache.fill([], 120) == 1
