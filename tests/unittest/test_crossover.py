# SPDX-License-Identifier: Apache-2.0
"""When layers are measured, and which source decides; a stand-in clock has the times, on machines without a GPU."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests import layers, mxfp8
from tests.checkpoints import random_experts
from tests.clock import Clock, capturing, standing_in
from trtllm_b12x import status
from trtllm_b12x.core import process, settings
from trtllm_b12x.dispatch import crossover, store
from trtllm_b12x.dispatch import layer as dispatch_layer
from trtllm_b12x.dispatch.layer import LayerDispatch
from trtllm_b12x.dispatch.policy import HOST, FixedThreshold, MeasuredPolicy, Timings
from trtllm_b12x.dispatch.schedule import Schedule
from trtllm_b12x.engines.trtllm import fused_moe, host_path
from trtllm_b12x.kernels import Geometry, Kernel, PlanError
from trtllm_b12x.kernels.reference import (
    MXFP8ReferenceKernel,
    MXFP8UnquantizedReferenceKernel,
    QuantizedReferenceKernel,
    ReferenceKernel,
    UnquantizedReferenceKernel,
)

TENSORS = random_experts(4, 128, 192)
CPU = torch.device("cpu")
B12X, TRITON, GROUPED, NONE = ReferenceKernel, UnquantizedReferenceKernel, QuantizedReferenceKernel, type(None)


def even(name: str, tokens: int) -> float:
    """Kernels win below 32 tokens, Triton's below 4, grouped ones from 512 to 2047."""
    if name == "grouped":
        return 11.0 if 512 <= tokens < 2048 else 20.0
    return {"b12x": 9.0, "triton": 4.0 * tokens**0.5, HOST: 12.0}[name] if tokens < 32 or name == HOST else 20.0


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(settings.CROSSOVER.name, "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO, logger="trtllm_b12x")


@pytest.fixture
def clock() -> Iterator[Clock]:
    with standing_in(Clock(even)) as found:
        yield found


def built(**arguments: Any) -> Any:
    return layers.load(layers.create(4, 128, 192, **arguments), TENSORS)


def called(module: Any, tokens: int = 3) -> torch.Tensor:
    result: torch.Tensor = module(*layers.inputs(module, tokens, TENSORS))
    return result


def measured(**arguments: Any) -> Any:
    module = built(**arguments)
    called(module)
    return module


def served(module: Any, *counts: int) -> list[Any]:
    return [type(module.backend.schedule.at(tokens)) for tokens in counts]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """That say which policy applies."""
    return [r.getMessage() for r in caplog.records if "CUTLASS" in r.getMessage() and "4 experts, top 2" in r.getMessage()]


def test_without_anything_to_measure_on_the_fixed_threshold_holds(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    module = measured()
    called(module, 70)
    assert served(module, 1, 63, 64) == [B12X, B12X, NONE]
    assert module.backend.schedule.kernels[0].capacity == 63
    (line,) = lines(caplog)
    assert line.endswith(": default: b12x 1-63, then CUTLASS")
    assert not list(tmp_path.rglob("crossover*"))


def test_the_first_call_measures_every_layer_of_the_geometry_and_all_follow(
    clock: Clock, every_family: None, caplog: pytest.LogCaptureFixture
) -> None:
    modules = [built(), built(), layers.load(layers.create(8, 128, 192), random_experts(8, 128, 192))]
    assert [module.backend.schedule.kernels[0].capacity for module in modules] == [64, 64, 128]  # 32 rows for each expert
    first = modules[0].backend.dispatch
    assert (list(first.schedule.families), first.waiting) == (["b12x"], {"triton": 64, "grouped": 8192})
    on = {line.partition(" layers on ")[2].split(",")[0] for line in caplog.messages if " layers on " in line}
    assert on == {"b12x"}  # no call reaches the others until they are measured
    assert served(modules[0], 1, 63, 64, 600) == [B12X, B12X, NONE, NONE]  # until then
    for module in modules[:2] * 2:
        called(module, 100)
    assert (len(clock.asked), clock.layers) == (1, 2)
    assert 0 < clock.largest_gap < 0.2  # each path computes the layer: they differ by what quantization costs
    for module in modules[:2]:
        decode = {1: TRITON, 5: TRITON, 6: B12X, 26: B12X, 27: NONE, 64: NONE}
        prefill = {480: NONE, 512: GROUPED, 1570: GROUPED, 1600: NONE, 8192: NONE, 9000: NONE}
        assert served(module, *decode, *prefill) == [*decode.values(), *prefill.values()]
        assert 1570 < module.backend.schedule.below <= 1600
    assert [line.partition("measured")[0] for line in lines(caplog)] == ["4 experts, top 2, 128 x 256, Swiglu: "]
    called(modules[2])
    assert len(clock.asked) == 2
    for tokens in (9, 600):
        call = layers.inputs(modules[0], tokens, TENSORS)
        assert layers.errors(modules[0], *call, modules[0](*call), TENSORS)[1] < 0.005


def test_a_family_that_cannot_be_planned_when_its_turn_comes(
    clock: Clock, every_family: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are measured; the verdict says why this one is not."""
    monkeypatch.setattr(GROUPED, "plan", Mock(side_effect=PlanError("no memory for this")))
    module = built()
    assert "grouped" in module.backend.verdict.families
    called(module)
    assert served(module, 1, 8, 600) == [TRITON, B12X, NONE]
    assert module.backend.verdict.families == ("b12x", "triton")
    assert any("no memory for this" in text for text in caplog.messages)


class Odd(MXFP8UnquantizedReferenceKernel):
    """Does not take the sizes of the layer."""

    @classmethod
    def fits(cls, *_: Any) -> bool:
        return False


@pytest.mark.parametrize(
    ("families", "now", "ahead"),
    [
        # The one launch serves fewer than 64 tokens: the others wait for a measurement.
        ({"cuda": TRITON, "triton": TRITON}, ["cuda"], [["triton"]]),
        # A format without a host's path: the family that serves every count is compiled beside the first, and others after it.
        (
            {"cuda": MXFP8UnquantizedReferenceKernel, "triton": MXFP8UnquantizedReferenceKernel, "grouped": MXFP8ReferenceKernel},
            ["cuda", "grouped"],
            [["cuda", "grouped"], ["triton"]],
        ),
        ({"cuda": Odd, "triton": TRITON, "grouped": MXFP8ReferenceKernel}, ["triton", "grouped"], [["triton", "grouped"]]),
    ],
)
def test_what_no_call_reaches_before_a_measurement_is_compiled_meanwhile(
    clock: Clock, families: dict[str, type[Kernel]], now: list[str], ahead: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    planned: list[str] = []
    geometry, device = Geometry(128, 8, 2048, 768, "Swiglu"), torch.device("cuda", 0)

    class Recorded(LayerDispatch):
        def _add(self, name: str, limit: int, bound: dict[str, Any], errors: dict[str, str]) -> None:
            planned.append(name)
            if not families[name].fits(geometry, limit, device):
                return
            bound[name] = kernel = families[name]()
            vars(kernel).update(geometry=geometry, capacity=limit, device=device)

    def compile_ahead(cls: Any, kinds: Sequence[Any], *_: Any) -> int:
        if kinds[0][0] is cls:
            asked.append([kind.name for kind, _ in kinds])
        return 0

    distinct = {
        name: type(name, (kind,), {"name": name, "compile_ahead": classmethod(compile_ahead)}) for name, kind in families.items()
    }
    monkeypatch.setattr(dispatch_layer, "_ahead", type(dispatch_layer._ahead)())
    monkeypatch.setattr(threading, "Thread", lambda target, daemon: type("Started", (), {"start": staticmethod(target)}))
    for _ in range(2):
        dispatch = Recorded(distinct)
        dispatch.load(geometry, None, device, 0, set(families))
        assert list(dispatch.schedule.families) == now
    assert asked == ahead  # once, whatever the number of layers
    waiting = [name for name in families if name not in now and families[name] is not Odd]
    assert list(dispatch.waiting) == waiting
    planned.clear()
    assert (dispatch.plan_waiting(), dispatch.plan_waiting(), planned) == ({}, {}, waiting)
    assert list(dispatch.schedule.families) == [name for name in families if families[name] is not Odd]  # by preference


def test_kernels_beyond_decode(clock: Clock, every_family: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They serve where they were measured to be the fastest, or where someone wants to see what they compute."""
    module = measured()
    kernels = module.backend.schedule.families
    policies = [FixedThreshold(300), FixedThreshold(300, measured=True)]
    assert [Schedule(kernels, policy).at(200) for policy in policies] == [None, kernels["grouped"]]
    for kind in (TRITON, GROUPED):
        monkeypatch.setattr(kind, "features", dataclasses.replace(kind.features, graph_safe=True))
    captured = {name: path.captured for name, path in host_path.timed_paths(module.backend, None).items()}
    assert captured == {"b12x": False, "triton": True, "grouped": False, HOST: False}  # prefill is launched
    assert kernels["grouped"].capacity == 8192
    assert built(max_num_tokens=2048).backend.dispatch.waiting["grouped"] == 2048  # more never come at once
    small = built(max_num_tokens=32).backend
    assert (list(small.dispatch.waiting), "grouped" in small.verdict.families) == (["triton"], True)
    monkeypatch.setenv(settings.CROSSOVER.name, "300")
    fixed = measured()
    assert list(fixed.backend.schedule.families) == ["b12x"]  # it serves every count
    assert served(fixed, 299, 300, 600) == [B12X, NONE, NONE]


def test_a_family_that_is_alone_has_no_count_without_a_measurement(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "grouped")
    assert served(measured(), 63, 600, 4096) == [NONE, GROUPED, NONE]
    monkeypatch.setenv(settings.CROSSOVER.name, "64")
    backend = measured().backend
    assert backend.verdict.families == ("grouped",)
    assert (backend.schedule.kernels, backend.schedule.below) == ((), 1)


@pytest.mark.parametrize(
    ("setting", "value", "kinds", "said"),
    [
        (settings.KERNELS, "grouped", [MXFP8ReferenceKernel] * 2, "grouped at every count"),  # nothing to be measured against
        (
            settings.CROSSOVER,
            "80",
            [MXFP8UnquantizedReferenceKernel, MXFP8ReferenceKernel],
            "TRTLLM_B12X_CROSSOVER=80: triton 1-79, then grouped",
        ),
    ],
)
def test_a_format_without_a_host_path_that_needs_no_measurement(
    clock: Clock, every_family: None, setting: Any, value: str, kinds: list[Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting.name, value)
    config = layers.host.QuantConfig(quant_algo=layers.host.QuantAlgo.MXFP8, group_size=32)
    module = layers.load(layers.create(4, 128, 192, quant_config=config), mxfp8.random_experts(4, 128, 192))
    assert module(torch.randn(3, 128).bfloat16(), torch.randn(3, 4)).isfinite().all()
    assert not clock.asked
    assert served(module, 79, 80) == kinds
    assert status().crossovers[str(module.backend.kernel.geometry)] == said


def test_nothing_is_measured_under_capture_or_while_a_compiler_traces(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    module = built()
    with capturing():
        called(module)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        called(module)
    assert not clock.asked
    assert isinstance(module.backend.schedule.policy, FixedThreshold)
    called(module)
    other = built()
    with capturing():  # another layer of the geometry, whose first call it is
        called(other)
    assert len(clock.asked) == 1
    assert isinstance(other.backend.schedule.policy, MeasuredPolicy)


@pytest.mark.embedded
def test_once_more_after_the_host_has_tuned(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tuning = [False]
    monkeypatch.setattr(fused_moe.FlashInferNvfp4Sm12xFusedMoE, "_is_tuning", staticmethod(lambda: tuning[0]))
    module = measured()  # as hosts warm attention up
    tuning[0] = True
    called(module, 100)
    assert len(clock.asked) == 1
    tuning[0] = False
    clock.microseconds = lambda name, tokens: 1.0 if name == HOST else 2.0  # now that it is tuned
    for tokens in (100, 8, 3):
        called(module, tokens)
    assert len(clock.asked) == 2
    assert served(module, 3) == [NONE]
    tuning[0] = True
    called(module, 100)
    tuning[0] = False
    called(module)
    assert len(clock.asked) == 2
    assert len(list(tmp_path.rglob("crossover-*.json"))) == 2
    process.forget()
    assert served(measured(), 3) == [NONE]  # the tuned host's table holds before it has tuned, too
    assert len(clock.asked) == 2


def test_a_layer_whose_kernels_are_not_tested_yet_waits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    module = built()
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceKernel, "settled", False)
        called(module)
        assert not clock.asked
    called(module)
    assert len(clock.asked) == 1


@pytest.mark.parametrize("tuned", [False, True])
def test_a_load_and_a_move_keep_what_was_measured(clock: Clock, tuned: bool) -> None:
    if tuned:
        crossover.tuning()
    module = measured()
    layers.load(module, random_experts(4, 128, 192, seed=3))
    module.to("cpu")
    called(module)
    assert len(clock.asked) == 1
    assert isinstance(module.backend.schedule.policy, MeasuredPolicy)


def test_forms_take_weights_that_have_moved(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceKernel, "forms", lambda self: {"": self, "other": copy.copy(self)})
    clock.microseconds = lambda name, tokens: 1.0 if name == "b12x other" else 2.0
    backend = measured().backend
    weights = backend._kernel_weights()
    backend.dispatch.bind(weights, 4)
    serving = backend.schedule.at(3)
    assert serving is backend.schedule.forms["b12x other"] is not backend.kernel
    assert (serving.weights, serving.experts.first) == (weights, 4)


def test_families_that_wait_take_weights_that_have_moved(clock: Clock, every_family: None) -> None:
    backend = built().backend
    weights = backend._kernel_weights()
    backend.dispatch.bind(weights, 4)
    backend.dispatch.plan_waiting()
    kernels = backend.schedule.kernels
    assert [(kernel.weights is weights, kernel.experts.first) for kernel in kernels] == [(True, 4)] * 3


# ---- which source decides ------------------------------------------------------------------------------------------------


def stored(rows: dict[int, dict[str, float]]) -> None:
    """What another process of this machine would have measured."""
    schedule = built().backend.schedule
    store.keep(crossover.key_of(schedule.kernels[0].geometry, CPU, schedule, "embedded", tuned=False), Timings(rows))
    process.forget()


def test_a_number_before_all_else(clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    stored({1: {"b12x": 1.0, HOST: 2.0}})
    monkeypatch.setenv(settings.CROSSOVER.name, "8")
    module = measured()
    assert module.backend.schedule.kernels[0].capacity == 7
    assert served(module, 7, 8) == [B12X, NONE]
    assert not clock.asked
    assert lines(caplog)[-1].endswith("TRTLLM_B12X_CROSSOVER=8: b12x 1-7, then CUTLASS")
    monkeypatch.setenv(settings.CROSSOVER.name, "100")
    assert served(built(), 99, 100) == [B12X, NONE]


def test_a_file_then_what_is_stored_then_a_measurement(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def reread() -> Any:
        process.forget()
        return measured()

    stored({1: {"b12x": 1.0, HOST: 2.0}, 2: {"b12x": 3.0, HOST: 2.0}})
    assert served(measured(), 1, 2, 30) == [B12X, NONE, NONE]
    assert lines(caplog)[-1].endswith("stored: b12x 1-1, then CUTLASS")
    (file,) = tmp_path.rglob("crossover-*.json")
    content = json.loads(file.read_text())
    content["microseconds"] = {"1": {"b12x": 2.0, HOST: 1.0}}
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"tables": [content]}))
    monkeypatch.setenv(settings.CROSSOVER.name, str(given))
    assert served(reread(), 1, 2, 30) == [NONE] * 3
    assert lines(caplog)[-1].endswith(f"TRTLLM_B12X_CROSSOVER={given}: CUTLASS")
    content["card"] = {"name": "another"}
    given.write_text(json.dumps(content))
    assert served(reread(), 1, 2) == [B12X, NONE]
    assert "has no table for 4 experts, top 2" in caplog.text
    assert "of another card (name); it is measured on this card" in caplog.text
    assert not clock.asked
    file.write_text(json.dumps(content))
    reread()
    assert len(clock.asked) == 1
    assert json.loads(file.read_text())["card"] == {"name": "cpu"}


def test_what_cannot_be_measured_leaves_the_default(clock: Clock, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    clock.before = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    modules = [built(), built()]
    for module in modules * 2:
        called(module)
        assert not module.backend.dispatch.should_measure()
    assert len(clock.asked) == 1
    assert served(modules[0], 1, 63, 64) == [B12X, B12X, NONE]
    assert caplog.text.count("cannot be measured: OutOfMemoryError: CUDA out of memory") == 1
    assert not list(tmp_path.rglob("crossover*"))


def test_a_router_that_needs_more_than_logits_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = built()
    sample = host_path.route_sampler(module.backend, module.backend.kernel.geometry, CPU)
    with_router = sample(6, 1, False)
    monkeypatch.setattr(type(module.backend.routing_method), "apply", Mock(side_effect=AttributeError("e_score_correction_bias")))
    without = sample(6, 1, False)
    for ids, router_weights in (with_router, without):
        assert ids.shape == router_weights.shape == (6, 2)
        assert (ids.dtype, router_weights.dtype) == (torch.int32, torch.float32)
        assert all(len(set(row)) == 2 for row in ids.tolist())
    assert torch.equal(with_router[0], without[0])
    busiest = [sum(int(sample(64, seed, skewed)[0].flatten().bincount().max()) for seed in range(9)) for skewed in (False, True)]
    assert busiest[1] > 1.2 * busiest[0]  # experts are preferred, at every seed others
