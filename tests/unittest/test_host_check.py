# SPDX-License-Identifier: Apache-2.0
"""Whether the engine's own path is right: a double of the host that is wrong is found, named, and replaced where it can be."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import layers, mxfp4
from tests.checkpoints import random_experts
from tests.clock import Clock, capturing, standing_in
from tests.layers import host
from tests.nvfp4_layer import random_layer
from trtllm_b12x import status
from trtllm_b12x.core import process, settings
from trtllm_b12x.dispatch import crossover
from trtllm_b12x.dispatch.host_check import BOUNDS, _routes_of_groups, results_of
from trtllm_b12x.dispatch.policy import HOST
from trtllm_b12x.dispatch.schedule import EVERY, InParts
from trtllm_b12x.engines.trtllm.embedded import ops
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.reference import CUTLASS, QuantizedReferenceKernel, ReferenceKernel

pytestmark = pytest.mark.usefixtures("every_family")
E, H, SIZE = 8, 128, 256
TENSORS = random_experts(E, H, SIZE)


def host_from_32(name: str, tokens: int) -> float:
    return 10.0 if (name == HOST) == (tokens >= 32) else 20.0


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(settings.CROSSOVER.name, "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no tables of earlier tests
    caplog.set_level(logging.INFO, logger="trtllm_b12x")
    with standing_in(Clock(host_from_32)):
        yield


def broken(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, dict[str, Any]], Any]) -> None:
    """Let the host's operator run on arguments that ``change`` has made wrong."""
    right = ops.fused_moe

    def fused_moe(x: Any, *arguments: Any, **named: Any) -> Any:
        named = dict(named)
        arguments = change(arguments, named)
        return right(x, *arguments, **named)

    monkeypatch.setattr(ops, "fused_moe", fused_moe)


def one_expert_larger(arguments: Any, named: dict[str, Any]) -> Any:
    *others, alpha = named["quant_scales"]
    named["quant_scales"] = *others, alpha * torch.where(torch.arange(E) == 5, 1.5, 1.0)
    return arguments


def halves_swapped_above_32(arguments: Any, named: dict[str, Any]) -> Any:
    ids, router_weights, fc1, *others = arguments
    if ids.shape[0] > 32:
        fc1 = torch.cat(fc1.chunk(2, dim=1)[::-1], dim=1)
    return ids, router_weights, fc1, *others


def second_route_forgotten(arguments: Any, named: dict[str, Any]) -> Any:
    ids, router_weights, *others = arguments
    return ids, router_weights * torch.tensor([1.0, 0.0]), *others


FAULTS = {
    "one expert is 1.5 times as large": one_expert_larger,
    "gate and up are swapped above 32": halves_swapped_above_32,
    "the second route is forgotten": second_route_forgotten,
}


def called(tokens: int = 3, **arguments: Any) -> Any:
    module = layers.load(layers.create(E, H, SIZE, **arguments), TENSORS)
    module(*layers.inputs(module, tokens, TENSORS))
    return module


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if "TensorRT-LLM" in r.getMessage() and "(E" not in r.name and r.levelno == level
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_host_is_found_named_and_replaced(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken(monkeypatch, FAULTS[fault])
    modules = [called(), called()]
    (line,) = said(caplog, logging.WARNING)
    assert line.startswith("TensorRT-LLM embedded computes MoE layer ")
    assert "(8 experts, top 2, 128 x 256, Swiglu) wrongly on cpu: host, " in line
    assert "; grouped serves instead, unless TRTLLM_B12X_CROSSOVER is set. A similar" in line
    assert line.endswith("https://github.com/NVIDIA/TensorRT-LLM/issues/14154")
    for module in modules:
        backend = module.backend
        families = [backend.schedule.at(tokens).features.name for tokens in (1, 40, 64, 8192, 8193)]
        assert families == ["reference", "reference W4A16", *["reference W4A4"] * 3]
        assert backend.schedule.below == EVERY
        backend.dispatch.bind(backend._kernel_weights(), backend.slot_start)  # as where weights have moved
        call = layers.inputs(module, 70, TENSORS)
        assert backend.schedule.hostless
        assert layers.errors(module, *call, module(*call), TENSORS)[1] < 0.005
    assert all("beyond" in text for text in status().host_paths.values())


def test_a_right_host_serves(caplog: pytest.LogCaptureFixture) -> None:
    module = called()
    assert not said(caplog, logging.WARNING)
    assert any(line.startswith("TensorRT-LLM's own path for 8 experts") for line in said(caplog, logging.INFO))
    assert module.backend.schedule.at(64) is None
    (text,) = status().host_paths.values()
    assert "within" in text


def test_one_scale_for_gate_and_up_is_wrong_in_its_own_layers_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The load has said so; the judge adds by how much."""
    module = layers.load(layers.create(E, H, SIZE), random_experts(E, H, SIZE, up_to_gate=3.0))
    module(*layers.inputs(module, 3, TENSORS))
    other = called()
    assert not said(caplog, logging.WARNING)
    assert [module.backend.schedule.path(64), other.backend.schedule.path(64)] == ["grouped", HOST]
    assert "up to 3 times" in next(line for line in said(caplog, logging.INFO) if "weight_scale_2" in line)
    assert module.backend.dispatch.host.wrong
    assert not other.backend.dispatch.host.wrong


@pytest.mark.parametrize("form", ["unquantized", "rows", "swizzled"])
@pytest.mark.parametrize("tokens", [257, 300, 700])
def test_longer_calls_than_are_planned_for_run_in_parts(form: str, tokens: int) -> None:
    """An engine announces its largest batch, but a call may be longer."""
    tensors = random_experts(E, H, SIZE, up_to_gate=3.0)
    module = layers.load(layers.create(E, H, SIZE, max_num_tokens=300), tensors)
    x, logits = layers.inputs(module, tokens, tensors)
    module(x[:3], logits[:3])
    whole = module.backend.schedule.at(tokens)
    assert isinstance(whole, InParts) == (tokens > 300)
    ids, router_weights = module.routing_method.apply(logits)
    call = MoECall(x, ids, router_weights)
    if form != "unquantized":
        codes, scales = ops.fp4_quantize(x, module.backend.fc31_input_scale, is_sf_swizzled_layout=form == "swizzled")
        call = call._replace(x=codes, x_sf=scales, swizzled=form == "swizzled")
    reference = QuantizedReferenceKernel()
    reference.plan(whole.geometry, tokens, torch.device("cpu"))
    reference.bind(module.backend._kernel_weights())
    expected = reference.run(call)
    assert torch.equal(whole.run(call), expected)
    out = torch.empty_like(x)
    assert whole.run(call._replace(out=out)) is out
    assert torch.equal(out, expected)


def test_a_load_runs_two_experts_once() -> None:
    with mock.patch.object(ReferenceKernel, "each_expert", autospec=True, side_effect=ReferenceKernel.each_expert) as ran:
        called(), called()
    assert [len(call.args[1]) for call in ran.call_args_list] == [2, E]


def test_a_host_that_is_wrong_once_it_is_tuned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    module = called(mapping={"world_size": 2, "tp_size": 2, "moe_ep_size": 2, "rank": 1})
    assert not said(caplog, logging.WARNING)
    assert any("within" in text for text in status().host_paths.values())
    right = ops.fused_moe
    monkeypatch.setattr(ops, "fused_moe", lambda *arguments, **named: 2 * right(*arguments, **named))
    crossover.tuning()
    module(*layers.inputs(module, 3, TENSORS))
    (line,) = said(caplog, logging.WARNING)
    assert "wrongly on cpu" in line
    assert module.backend.schedule.at(64) is not None


def test_a_setting_is_obeyed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(settings.CROSSOVER.name, "32")
    broken(monkeypatch, one_expert_larger)
    module = called()
    (line,) = said(caplog, logging.WARNING)
    assert "it serves nevertheless, as TRTLLM_B12X_CROSSOVER says" in line
    assert module.backend.schedule.at(32) is None


def test_a_file_of_times_is_obeyed_if_it_is_of_this_card(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    called()
    (measured,) = tmp_path.rglob("crossover-*.json")
    file = tmp_path / "given.json"
    broken(monkeypatch, one_expert_larger)
    for content, obeyed in ((measured.read_text(), True), (measured.read_text().replace('"cpu"', '"another"'), False)):
        file.write_text(content)
        monkeypatch.setenv(settings.CROSSOVER.name, str(file))
        process.forget()
        schedule = called().backend.schedule
        assert (schedule.at(64) is None) == obeyed
        assert ("grouped" in schedule.summary) != obeyed
    assert "it serves nevertheless, as TRTLLM_B12X_CROSSOVER says" in caplog.text


def test_what_cannot_be_judged_is_not_blamed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with capturing():
        captured = called()
    assert captured.backend.dispatch.host is None
    assert any("the engine's own path is not judged" in line for line in caplog.messages)
    assert set(status().host_paths.values()) == {"not judged"}

    def raising(arguments: Any, named: dict[str, Any]) -> Any:
        raise RuntimeError("CUTLASS does not take this")

    broken(monkeypatch, raising)
    captured(*layers.inputs(captured, 3, TENSORS))
    assert not said(caplog, logging.WARNING)
    assert "not judged: RuntimeError: CUTLASS does not take this" in status().host_paths.values()


MXFP4 = host.QuantConfig(quant_algo=host.QuantAlgo.W4A8_MXFP4_MXFP8, group_size=32)


@pytest.mark.parametrize("ep", [1, 4])
@pytest.mark.parametrize("quantization", [None, MXFP4], ids=["NVFP4", "MXFP4"])
def test_the_engines_rounding_points(quantization: Any, ep: int, caplog: pytest.LogCaptureFixture) -> None:
    """Also on a rank that has fewer experts than a token has routes."""
    tensors = TENSORS if quantization is None else mxfp4.random_experts(E, H, SIZE)
    for mapping in layers.ranks(1, ep)[-1:]:
        module = layers.load(layers.create(E, H, SIZE, top_k=3, quant_config=quantization, mapping=mapping), tensors)
        module(torch.randn(3, H).bfloat16(), torch.randn(3, E))
        assert not said(caplog, logging.WARNING)
        backend, like = module.backend, caught(module)
        run = functools.partial(backend.run_as_the_host, like)
        results = results_of(backend.kernel.geometry, backend.kernel.weights, backend.slot_start, run)
        assert results
        assert all(result.error < 0.02 and result.worst < 0.04 for result in results), list(map(str, results))
        if quantization is not None:
            assert all(result.worst < 0.005 for result in results), list(map(str, results))


def caught(module: Any) -> Any:
    return layers.caught(module, torch.randn(3, H).bfloat16(), torch.randn(3, E))


@pytest.mark.parametrize(("experts", "width"), [(8, 2), (10, 4), (11, 4), (4, 4), (5, 1), (2, 2)])
def test_every_expert_comes_first_once_and_shares_a_group(experts: int, width: int) -> None:
    order, group, routes = _routes_of_groups(experts, width)
    assert sorted(order.tolist()) == list(range(experts))
    assert routes[:, 0].tolist() == list(range(experts))
    for row in routes.tolist():
        assert len(set(row)) == width
        assert len({int(group[expert]) for expert in row}) == 1


@pytest.mark.all("250")
@pytest.mark.parametrize("draws", [4, 250])
def test_a_right_host_is_never_blamed(draws: int) -> None:
    module, like = layers.create(E, H, H), None
    for seed in range(draws):
        backend = layers.load(module, random_experts(E, H, H, seed=seed)).backend
        like = like or caught(module)
        kernel = backend.kernel
        results = results_of(kernel.geometry, kernel.weights, 0, functools.partial(backend.run_as_the_host, like))
        assert results
        assert all(result.passed for result in results), (seed, list(map(str, results)))


class Elsewhere(QuantizedReferenceKernel):
    """A right engine that rounds at other places: routes' shares, and no products."""


@pytest.mark.parametrize("activation", ["Swiglu", "Relu2"])
def test_a_right_engine_is_within_the_bounds_wherever_it_rounds(activation: str) -> None:
    """What 1,000 draws of three geometries gave is with ``BOUNDS``."""
    geometry = Geometry(16, 4, 512, 256, activation)
    for seed in range(6):
        weights = random_layer(geometry, "cpu", seed).kernel_weights()
        for kind in (Elsewhere, CUTLASS["NVFP4"]):
            kernel = kind()
            kernel.plan(geometry, 64, torch.device("cpu"))
            kernel.bind(weights)
            results = results_of(geometry, weights, 0, kernel.run)
            assert results
            assert all(result.passed and result.bounds == BOUNDS for result in results), list(map(str, results))
        torch.testing.assert_close(kernel.each_expert(torch.ones(2, 512)), kernel.each_expert(torch.ones(16, 512))[:2])
