# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose gate and up have a ``weight_scale_2`` each: our kernels apply both, CUTLASS the larger one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts
from tests.clock import Clock, standing_in
from trtllm_b12x.core import process, settings
from trtllm_b12x.decision import RejectReason
from trtllm_b12x.dispatch.layer import LIKE
from trtllm_b12x.dispatch.policy import HOST
from trtllm_b12x.dispatch.schedule import InParts
from trtllm_b12x.tools.verify import kernel_calls
from trtllm_b12x.tools.verify.reference import Arithmetic

pytestmark = pytest.mark.usefixtures("every_family")
E, H, SIZE = 4, 128, 256
BOUND = 0.004
CONSTANTS = {"": (), "limit": (1.0, 0.0, 0.05), "alpha, beta, limit": (1.702, 1.0, 0.05)}
"""SwiGLU's alpha, beta and limit; the limit cuts off up in every layer here."""


def created(constants: str = "", **arguments: Any) -> Any:
    given = {name: torch.full((E,), value) for name, value in zip(("alpha", "beta", "limit"), CONSTANTS[constants], strict=False)}
    if constants == "limit":
        given = {"limit": given["limit"]}
    return layers.create(E, H, SIZE, **(layers.swiglu_constants(**given) if given else {}), **arguments)


def loaded(ratio: float, constants: str = "", seed: int = 0, **arguments: Any) -> Any:
    return layers.load(created(constants, **arguments), random_experts(E, H, SIZE, seed=seed, up_to_gate=ratio))


def with_the_larger_scale(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the host makes of a checkpoint."""
    both = {e: torch.maximum(*(tensors[f"{e}.{half}.weight_scale_2"] for half in ("w1", "w3"))) for e in range(E)}
    return tensors | {f"{e}.{half}.weight_scale_2": both[e] for e in both for half in ("w1", "w3")}


def error(module: Any, tokens: int, tensors: dict[str, torch.Tensor], constants: str = "") -> float:
    x, logits = layers.inputs(module, tokens, tensors)
    result, swiglu = module(x, logits), CONSTANTS[constants] or None
    return layers.errors(module, x, logits, result, tensors, Arithmetic.UNQUANTIZED, swiglu=swiglu)[1]


def assert_same(module: Any, other: Any, counts: tuple[int, ...] = (1, 9, 70)) -> None:
    for tokens in counts:
        call = layers.inputs(module, tokens, random_experts(E, H, SIZE))
        assert torch.equal(module(*call), other(*call)), tokens


# ---- numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constants", CONSTANTS)
@pytest.mark.parametrize("ratio", [3.0, 0.4])
def test_each_half_has_its_own_scale(ratio: float, constants: str) -> None:
    tensors = random_experts(E, H, SIZE, up_to_gate=ratio)
    module, plain = (layers.load(created(constants, promote=p), tensors) for p in (True, False))
    for tokens in (1, 9, 63):
        with kernel_calls(module.backend) as reached:
            assert error(module, tokens, tensors, constants) < BOUND
        assert reached == ["triton"]
    assert error(plain, 9, tensors, constants) > 0.1
    assert_same(module, plain, (70,))


@pytest.mark.parametrize("ratio", [3.0, 0.4])
def test_b12x_has_one_scale_and_refuses(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = loaded(ratio).backend.verdict
    assert verdict.families == ("triton", "grouped")
    assert [(name, rejection.reason) for name, rejection in verdict.refused] == [("b12x", RejectReason.UNEQUAL_SCALES)]
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "b12x")
    module = loaded(ratio)
    assert module.backend.verdict.reasons == (RejectReason.UNEQUAL_SCALES,)
    assert_same(module, loaded(ratio, promote=False))


def test_some_experts_differ_and_one_half_is_zero() -> None:
    tensors = random_experts(E, H, SIZE)
    for expert, half in ((1, "w1"), (2, "w3")):
        tensors[f"{expert}.{half}.weight_scale_2"] = tensors[f"{expert}.{half}.weight_scale_2"] * (0 if expert == 1 else 0.3)
    module = layers.load(created(), tensors)
    assert error(module, 9, tensors) < BOUND


@pytest.mark.parametrize(("gate", "up"), [(1e-45, 1.0), (1.0, 1e-45), (0.0, 1.0), (0.0, 0.0)])
def test_scales_far_apart(gate: float, up: float) -> None:
    """TensorRT-LLM loads them."""
    tensors = random_experts(E, H, SIZE)
    for expert in range(E):
        tensors[f"{expert}.w1.weight_scale_2"] = torch.tensor(gate)
        tensors[f"{expert}.w3.weight_scale_2"] = torch.tensor(up)
    module = layers.load(created(), tensors)
    assert not module(torch.randn(5, H).bfloat16() * 1e-4, torch.randn(5, E)).abs().gt(1e-20).any()
    assert_same(module, layers.load(created(promote=False), tensors), (70,))


# ---- what others see -----------------------------------------------------------------------------------------------------


def test_one_warning_names_the_first_layer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trtllm_b12x")
    for index in (3, 4):
        loaded(1.5, layer_idx=index)
    (record,) = [record for record in caplog.records if "weight_scale_2" in record.message]
    assert record.levelno == logging.WARNING
    assert record.message == (
        "MoE layer 3: gate and up have different weight_scale_2 (up to 1.5 times). Our kernels apply each. TensorRT-LLM's "
        "CUTLASS applies the larger one to both: prompts, which it serves, are off by a factor of up to 1.5"
    )


@pytest.mark.parametrize(
    ("form", "family", "served"),
    [
        ("NVFP4", "grouped", "triton 1-63, grouped 64-8192"),
        pytest.param("W4A16_NVFP4", "gemm", "triton 1-8, gemm 9-8192", marks=pytest.mark.embedded),
    ],
)
def test_prompts_run_on_ours_whatever_is_faster(
    form: str, family: str, served: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card that measures. A setting is obeyed."""
    config = layers.host.QuantConfig(quant_algo=layers.host.QuantAlgo(form), group_size=16)
    arithmetic = Arithmetic.KERNEL if form == "NVFP4" else Arithmetic.UNQUANTIZED
    monkeypatch.setenv(settings.CROSSOVER.name, "auto")
    caplog.set_level(logging.INFO, logger="trtllm_b12x")
    tensors = random_experts(E, H, SIZE, up_to_gate=3.0)
    with standing_in(Clock(lambda name, tokens: 1.0 if name == HOST else 9.0)):
        module = layers.load(created(layer_idx=3, quant_config=config), tensors)
        module(*layers.inputs(module, 3, tensors))  # measures
        for tokens in (70, 300):
            call = layers.inputs(module, tokens, tensors)
            assert layers.errors(module, *call, module(*call), tensors, arithmetic)[1] < 0.005
        dispatch = module.backend.dispatch
        assert {dispatch.schedule.at(tokens) for tokens in (65, 300, 8192)} == {dispatch.schedule.families[family]}
        assert isinstance(dispatch.schedule.at(8193), InParts)
        assert dispatch.schedule.summary.endswith(f": {served}, then {family} in parts")
        (record,) = [record for record in caplog.records if "weight_scale_2" in record.message]
        assert (record.levelno, record.message.partition("to both: ")[2]) == (
            logging.INFO,
            f"{family} serves prompts instead",
        )
        process.forget()
        monkeypatch.setenv(settings.CROSSOVER.name, "64")
        module = layers.load(created(quant_config=config), tensors)
        call = layers.inputs(module, 70, tensors)
        assert min(layers.errors(module, *call, module(*call), tensors, arithmetic)) > 0.1


# ---- parameters alone ----------------------------------------------------------------------------------------------------


def by_name(target: Any, source: Any) -> None:
    parameters = dict(target.named_parameters())
    for name, parameter in source.named_parameters():
        parameters[name].data.copy_(parameter.data)


def by_state_dict(target: Any, source: Any) -> None:
    target.load_state_dict(source.state_dict())


@pytest.mark.parametrize(("first", "second"), [(3.0, 0.4), (3.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("way", [by_name, by_state_dict])
@pytest.mark.parametrize("hook", [True, False])
def test_parameters_over_those_of_a_checkpoint(way: Any, first: float, second: float, hook: bool) -> None:
    """What was recorded of the checkpoint no longer counts, whether a hook follows or not."""
    tensors = random_experts(E, H, SIZE, seed=1, up_to_gate=second)
    module = loaded(first)
    way(module, layers.load(created(promote=False), tensors))
    if hook:
        module.backend._weights_are_ready()
    shared = with_the_larger_scale(tensors)
    if first == 1 or hook:
        assert_same(module, layers.load(created(), shared))
    else:
        assert error(module, 9, shared) < BOUND
        assert_same(module, layers.load(created(promote=False), shared), (70,))


# ---- loads ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize(("first", "second"), [(1.0, 3.0), (3.0, 0.4), (3.0, 1.0), (1.005, 3.0), (3.0, 1.005)])
def test_reloads(first: float, second: float, hooks: bool) -> None:
    """Not every reload of a host ends with its post-load hooks; numbers are those of a fresh layer, memory stays."""
    module, tensors = loaded(first, seed=1), random_experts(E, H, SIZE, up_to_gate=second)
    own = {name: buffer.data_ptr() for name, buffer in module.backend.named_buffers()}
    module.load_weights([tensors])
    if hooks:
        module.post_load_weights()
    assert {name: buffer.data_ptr() for name, buffer in module.backend.named_buffers()} == own
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()})  # its own: scales stay
    assert_same(module, layers.load(created(), tensors))
    assert ("b12x" in module.backend.verdict.families) == (second == 1)
    assert (module.backend.dispatch.scale_ratio > LIKE) == (second != 1.005 and second != 1)
