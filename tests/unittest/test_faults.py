# SPDX-License-Identifier: Apache-2.0
"""A fault of ours, anywhere, costs speed and a line: never the host's import, load or call, and never a number."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

import trtllm_b12x
from tests import faults, layers
from tests.checkpoints import random_experts
from tests.clock import Clock, standing_in
from trtllm_b12x import bootstrap
from trtllm_b12x.core import hook, process
from trtllm_b12x.dispatch.policy import HOST

EVERY = 1 if layers.host.generation == "embedded" or os.environ.get("FAULTS") == "all" else 12
"""In doubles of TensorRT-LLM one function of twelve, ``FAULTS=all`` for each."""

HOSTS = (
    "formats.nvfp4.round_to",
    "formats.nvfp4.decode",
    "formats.nvfp4.dequantize",
    "formats.nvfp4.pack",
    "formats.nvfp4.unpack",
    "formats.layouts.scales_of_tokens",
    "formats.constants.kept",
    "formats.constants.outside_pools",
    "engines.trtllm.host._equality",
)
"""What the embedded host computes with, and what a host asks when it compares classes."""
SEAMS = (
    "bootstrap.patch",
    "core.hook._Loader",
    "core.hook.hand_over",
    "engines.trtllm.promote._or_host",
    "engines.trtllm.promote._promoting.<locals>.wrapper",
    "engines.trtllm.promote._building.<locals>.wrapper",
    "engines.trtllm.promote._resolving.<locals>.wrapper",
    "engines.trtllm.patches.known_as_cutlass",
    "engines.trtllm.guard.",
    "engines.trtllm.fused_moe.FlashInferNvfp4Sm12xFusedMoE._serve",
    "engines.trtllm.routing.RoutesItself._takes_logits",
    "engines.trtllm.calls.ContextCalls._supports_load_balancer",
    "engines.trtllm.quantization_nvfp4.NVFP4Sm12xFusedMoEMethod.record_weight_scale_2",
    "engines.trtllm.fused_moe.FlashInferNvfp4Sm12xFusedMoE._announce_and_record",
    "dispatch.layer.LayerDispatch.drop",
    "engines.trtllm.fused_moe.FlashInferNvfp4Sm12xFusedMoE._weights_are_ready",
    "engines.trtllm.fused_moe.FlashInferNvfp4Sm12xFusedMoE._quantize_late",
)
"""The guards themselves, and what stands in the host's place."""
PLACING = ("engines.trtllm.quantization.PaddedMethod._place", "formats.layouts.interleave", "formats.layouts.interleaved_rows")
"""A tensor that could not be placed is a load that failed: anything but an error would be a wrong number."""

TENSORS = {ratio: random_experts(4, 128, 128, up_to_gate=ratio) for ratio in (1.0, 2.0)}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    trtllm_b12x.uninstall()
    process.forget()


@functools.cache
def calls(ratio: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    module = layers.create(4, 128, 128, promote=False)
    return [layers.inputs(module, tokens, TENSORS[ratio]) for tokens in (5, 70)]


def flow(ratio: float = 1.0) -> tuple[Any, list[torch.Tensor]]:
    """Of a host: its modules are imported, a layer is built, loaded, moved, called on both sides of the crossover, twice."""
    hook.hand_over(sys.modules[layers.host.create_moe.__name__], bootstrap.patch)
    module = layers.build(4, 128, 128)
    if not getattr(module, "backend", module)._weights_created:
        module.create_weights()
    outputs = []
    for _ in range(2):
        layers.load(module, TENSORS[ratio])
        module._apply(torch.clone)
        module.load_state_dict(module.state_dict(), strict=False)
        outputs += [module(x, logits) for x, logits in calls(ratio)]
    return module.backend, outputs


def overrides(name: str) -> bool:
    """It stands in the place of a method that the host has, and calls."""
    parents = (layers.host.CutlassFusedMoE, layers.host.methods["NVFP4"])
    modules = tuple(f"engines.trtllm.{name}" for name in ("fused_moe.", "quantization", "calls.", "load_hooks."))
    return name.startswith(modules) and any(hasattr(parent, name.rpartition(".")[2]) for parent in parents)


def guarded(code: CodeType) -> bool:
    name = faults.name(code)
    return not overrides(name) and not name.startswith((*HOSTS, *SEAMS, *PLACING))


def distance(results: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(results, expected, strict=True))


def with_each_fault(
    reached: list[CodeType], caplog: pytest.LogCaptureFixture, run: Callable[[int], tuple[Any, list[torch.Tensor]]]
) -> Iterator[tuple[str, Any, list[torch.Tensor]]]:
    """Name of each function, and what ``run`` returned while it raised."""
    among = faults.functions()
    for number, code in enumerate(reached):
        forget()
        caplog.clear()
        with faults.injected(code, among):
            try:
                backend, outputs = run(number)
            except Exception as error:
                raise AssertionError(f"{faults.name(code)} reaches the host") from error
        yield faults.name(code), backend, outputs


@pytest.mark.all("2.0")
@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_every_function_that_a_host_reaches(
    ratio: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ratio != 1:
        monkeypatch.setenv("TRTLLM_B12X_KERNELS", "b12x,triton")
    caplog.set_level(logging.WARNING, logger="trtllm_b12x")
    calls(ratio)
    backend, expected = flow(ratio)
    assert backend.kernel is not None
    trtllm_b12x.uninstall()
    plain = layers.load(layers.build(4, 128, 128), TENSORS[ratio])
    # Where gate and up differ in scale, the host has the larger one for both: what is lost is the exactness, at most.
    alone = [plain(x, logits) for x, logits in calls(ratio)] * 2
    assert (distance(expected, alone) > 0.1) == (ratio != 1)
    forget()
    reached = [code for code in faults.called(functools.partial(flow, ratio)) if guarded(code)]
    assert len(reached) > 60
    if ratio != 1:
        parts = tuple(f"engines.trtllm.{name}" for name in ("quantization", "host.weights", "fused_moe"))
        reached = [code for code in reached if faults.name(code).startswith(parts)]
        assert reached
    for name, backend, outputs in with_each_fault(reached[::EVERY], caplog, lambda number: flow(ratio)):
        for result, *right in zip(outputs, expected, alone, strict=True):
            assert min(distance([result], [each]) for each in right) < 0.02, name
        kernel = getattr(backend, "kernel", None)
        if kernel is None:
            assert caplog.records or hook.failure, f"{name} costs the kernel, and nothing is said"


@pytest.mark.embedded
@pytest.mark.all
def test_every_function_of_a_measurement(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It costs the card's say at most: a fault at a call leaves the kernels where they were."""
    caplog.set_level(logging.INFO, logger="trtllm_b12x")
    monkeypatch.setenv("TRTLLM_B12X_CROSSOVER", "auto")
    calls(1.0)
    with standing_in(Clock(lambda name, tokens: 10.0 if name == HOST else 1.0 + tokens)) as clock:

        def measured(number: int) -> tuple[Any, list[torch.Tensor]]:
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(number)))
            return flow()

        _, expected = measured(0)
        assert len(clock.asked) == 1
        forget()
        modules = tuple(f"dispatch.{module}." for module in ("crossover", "policy", "store", "timing"))
        reached = [code for code in faults.called(functools.partial(measured, 1)) if faults.name(code).startswith(modules)]
        assert len(reached) > 25
        for name, backend, outputs in with_each_fault(reached, caplog, lambda number: measured(2 + number)):
            assert distance(outputs, expected) < 0.05, name
            assert backend.kernel is not None or "KERNEL_PLAN_FAILED" in caplog.text, name
            assert caplog.records
