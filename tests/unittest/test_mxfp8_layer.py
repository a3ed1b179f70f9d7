# SPDX-License-Identifier: Apache-2.0
"""MXFP8 experts through the host's own layer: no path of the host's serves them, so every call is a kernel's."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trtllm_b12x
from tests import mxfp8
from tests.checkpoints import random_experts
from tests.layers import create, host, load
from trtllm_b12x.decision import RejectReason
from trtllm_b12x.dispatch import crossover
from trtllm_b12x.engines.trtllm import quantization_mxfp8
from trtllm_b12x.tools.verify.reference import Arithmetic, MoECall, outputs

pytestmark = pytest.mark.usefixtures("every_family")
EXPERTS, HIDDEN, SIZE, TOP_K = 6, 256, 160, 2


def built(weights: dict[str, torch.Tensor], gated: bool = True, size: int = SIZE, **arguments: Any) -> Any:
    """The backend, loaded."""
    config = host.QuantConfig(quant_algo=host.QuantAlgo.MXFP8, group_size=32)
    layer = create(EXPERTS, HIDDEN, size, TOP_K, gated, quant_config=config, **arguments)
    layer.load_weights([weights])
    layer.post_load_weights()
    return layer


@pytest.mark.parametrize("gated", [True, False], ids=["Swiglu", "Relu2"])
@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 300])
def test_numbers(gated: bool, tokens: int) -> None:
    weights = mxfp8.random_experts(EXPERTS, HIDDEN, SIZE, gated)
    layer = built(weights, gated)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    ids, router_weights = layer.routing_method.apply(logits)
    found = layer(x, logits)
    arithmetic = Arithmetic.UNQUANTIZED if tokens < 64 else Arithmetic.KERNEL
    [[expected]] = outputs(weights, EXPERTS, gated, [MoECall(x, ids, router_weights)], [arithmetic], quant_algo="MXFP8")
    assert float((found.float() - expected).norm() / expected.norm()) < 0.005


def test_scales_by_another_name_and_a_state_dict_that_is_handed_on() -> None:
    """``weight_scale_inv``, as MiniMax-M3-MXFP8 and trainers that hand on weights have it."""
    weights = mxfp8.random_experts(EXPERTS, HIDDEN, SIZE)
    renamed = {name.replace("weight_scale", "weight_scale_inv"): tensor for name, tensor in weights.items()}
    x, logits = torch.randn(40, HIDDEN).bfloat16(), torch.randn(40, EXPERTS)
    module, other = built(weights), built(mxfp8.random_experts(EXPERTS, HIDDEN, SIZE, seed=7))
    other.load_state_dict(module.state_dict())
    assert torch.equal(built(renamed)(x, logits), module(x, logits))
    assert torch.equal(other(x, logits), module(x, logits))


def test_scales_that_a_checkpoint_lacks_are_seen() -> None:
    """Tokens of that expert are not numbers; the host would take whatever was in memory."""
    weights = mxfp8.random_experts(EXPERTS, HIDDEN, SIZE)
    del weights["3.w2.weight_scale"]
    layer = built(weights)
    x, logits = torch.randn(40, HIDDEN).bfloat16(), torch.randn(40, EXPERTS)
    met = (layer.routing_method.apply(logits)[0] == 3).any(1)
    assert 0 < int(met.sum()) < 40
    assert torch.equal(layer(x, logits).isnan().all(1), met)


def test_beside_a_layer_of_another_format(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trtllm_b12x")
    config = host.QuantConfig(quant_algo=host.QuantAlgo.MXFP8, group_size=32)
    modules = [create(EXPERTS, HIDDEN, SIZE, TOP_K, quant_config=config), create(EXPERTS, HIDDEN, SIZE, TOP_K)]
    for module, weights in zip(modules, (mxfp8.random_experts, random_experts), strict=True):
        load(module, weights(EXPERTS, HIDDEN, SIZE))
    assert "2 of 2 MoE layers 1 on triton+grouped, 1 on b12x, " in caplog.text
    assert "(MXFP8 and NVFP4)" in caplog.text
    assert trtllm_b12x.status().formats == {"MXFP8": 1, "NVFP4": 1}
    backend = modules[0].backend
    geometry = backend.kernel.geometry
    assert str(geometry).endswith("Swiglu, MXFP8")
    same_sizes = dataclasses.replace(geometry, format="NVFP4")
    keys = [crossover.key_of(one, torch.device("cpu"), backend.schedule, "embedded", True) for one in (geometry, same_sizes)]
    assert keys[0] != keys[1]


def test_explain() -> None:
    beyond = dict.fromkeys(("W4A16_NVFP4", "W4A8_MXFP4_MXFP8"), ("triton", "gemm")) | {"MXFP8": ("triton", "grouped")}
    expected = {**beyond, "MIXED_PRECISION": ("b12x", "triton", "grouped"), "W4A16_AWQ": ()}
    for algorithm, names in expected.items():
        verdict = trtllm_b12x.explain(host.ModelConfig(quant_config=host.QuantConfig(quant_algo=host.QuantAlgo(algorithm))))
        assert verdict.families == names
        assert names or verdict.reasons == (RejectReason.QUANTIZATION,)


def test_stacked_scales_have_gate_before_up() -> None:
    mode = SimpleNamespace(name="FUSED_GATE_UP_PROJ")
    module = SimpleNamespace(hidden_size=HIDDEN, intermediate_size=SIZE, weight_loading_mode=mode)
    stacked = torch.ones(EXPERTS, HIDDEN // 32, 2 * SIZE, dtype=torch.uint8)
    stacked[..., SIZE:] = 2
    down = torch.full((EXPERTS, SIZE // 32, HIDDEN), 3, dtype=torch.uint8)
    scales = quantization_mxfp8._scales(module, {"gate_up_proj_weight_scale": stacked, "down_proj_weight_scale": down}, 1)
    found = [(tuple(scale.shape), scale.unique().tolist()) for scale in scales if scale is not None]
    assert found == [((SIZE, HIDDEN // 32), [1]), ((SIZE, HIDDEN // 32), [2]), ((HIDDEN, SIZE // 32), [3])]
