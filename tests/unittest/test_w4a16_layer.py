# SPDX-License-Identifier: Apache-2.0
"""W4A16_NVFP4 experts through the host's own layer: block scales in rows, activations in 16 bits throughout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trtllm_b12x
from tests import layers, mxfp8
from tests.checkpoints import random_experts
from tests.layers import host
from trtllm_b12x.core import settings
from trtllm_b12x.engines.trtllm import build_layer
from trtllm_b12x.engines.trtllm.quantization_nvfp4 import NVFP4Sm12xFusedMoEMethod
from trtllm_b12x.formats.geometry import LayerShape
from trtllm_b12x.tools.verify import kernel_calls
from trtllm_b12x.tools.verify.reference import Arithmetic

pytestmark = pytest.mark.usefixtures("every_family")
BOUND, HOSTS_BOUND = 0.004, 0.008
"""Relative L2 from float32 with unquantized activations; the host rounds weights to bf16 first."""
STORED = ("w3_w1_weight", "w2_weight", "w3_w1_weight_scale", "w2_weight_scale")
CONFIG = host.QuantConfig(quant_algo=host.QuantAlgo.W4A16_NVFP4, group_size=16)
OF_MXFP8 = host.QuantConfig(quant_algo=host.QuantAlgo.MXFP8, group_size=32)


def experts(size: int, gated: bool = True, input_scales: bool = True, **arguments: Any) -> dict[str, torch.Tensor]:
    tensors = random_experts(4, 128, size, gated, **arguments)
    return {name: tensor for name, tensor in tensors.items() if input_scales or not name.endswith("input_scale")}


def built(tensors: dict[str, torch.Tensor], size: int, **arguments: Any) -> Any:
    return layers.load(layers.create(4, 128, size, **{"quant_config": CONFIG, **arguments}), tensors)


def call(module: Any, tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 128, generator=generator).to(dtype)
    return x, torch.randn(tokens, module.num_experts, generator=generator)


def distance(module: Any, x: torch.Tensor, logits: torch.Tensor, result: torch.Tensor, tensors: dict[str, torch.Tensor]) -> float:
    scales = {name.replace("weight_scale_2", "input_scale"): torch.ones(()) for name in tensors if name.endswith("scale_2")}
    return layers.errors(module, x, logits, result, {**scales, **tensors}, Arithmetic.UNQUANTIZED)[1]


@pytest.mark.parametrize("input_scales", [True, False], ids=["calibrated", "weights alone"])
@pytest.mark.parametrize("up_to_gate", [1.0, 3.0])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("size", [64, 192, 224, 352])
def test_numbers_at_every_count(size: int, gated: bool, up_to_gate: float, input_scales: bool) -> None:
    """Decode is ours, the rest the host's, on the same tensors: also of sizes that the host misplaces by itself."""
    tensors = experts(size, gated, input_scales, up_to_gate=up_to_gate)
    module = built(tensors, size, gated=gated)
    for tokens, served in ((1, ["triton"]), (63, ["triton"]), (200, [])):
        x, logits = call(module, tokens)
        with kernel_calls(module.backend) as reached:
            result = module(x, logits)
        assert reached == served
        # Where the scales of gate and up differ, the host applies the larger one to both.
        right = bool(served) or up_to_gate == 1 or not gated
        assert (distance(module, x, logits, result, tensors) < (BOUND if served else HOSTS_BOUND)) == right


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("size", [64, 128, 192])
def test_the_parameters_are_the_hosts_to_the_bit(size: int, gated: bool) -> None:
    tensors = experts(size, gated, up_to_gate=2.0)
    ours, hosts = (built(tensors, size, gated=gated, promote=promote) for promote in (True, False))
    mine, its = ours.backend.state_dict(), hosts.backend.state_dict()
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in its)
    x, logits = call(ours, 200)
    assert torch.equal(ours(x, logits), hosts(x, logits))
    few = call(ours, 7)
    assert torch.equal(layers.as_the_host(ours, *few), hosts(*few))  # what is timed


def test_the_kernels_read_the_hosts_scales_in_rows() -> None:
    """0 extra bytes of codes and scales."""
    backend = built(experts(224), 224).backend
    weights = backend.quant_method.kernel_weights(backend)
    for name, parameter in zip(("fc1_weight", "fc2_weight", "fc1_weight_sf", "fc2_weight_sf"), STORED, strict=True):
        assert getattr(weights, name).data_ptr() == getattr(backend, parameter).data_ptr()
    assert backend.quant_method.scalar_bytes(backend) == 16 * 4


def test_fp16() -> None:
    tensors = experts(192)
    module = built(tensors, 192, dtype=torch.float16)
    for tokens in (5, 200):
        x, logits = call(module, tokens, torch.float16)
        result = module(x, logits)
        assert result.dtype == torch.float16
        assert distance(module, x, logits, result, tensors) < BOUND


def test_a_refit_is_followed() -> None:
    module = built(experts(224), 224)
    layers.load(module, tensors := experts(224, seed=3, up_to_gate=0.5))
    x, logits = call(module, 5)
    assert torch.equal(module(x, logits), built(tensors, 224)(x, logits))


@pytest.mark.parametrize("form", ["W4A16_NVFP4", pytest.param("MXFP8", marks=pytest.mark.embedded)])
def test_ranks_of_attention_dp_send_16_bit_tokens(form: str) -> None:
    """Before communication and after it, with us as without. In MXFP8 the host has no form of its own to send."""
    mapping = {"world_size": 2, "tp_size": 2, "moe_ep_size": 2, "enable_attention_dp": True}
    tensors, config = (experts(192), CONFIG) if form != "MXFP8" else (mxfp8.random_experts(4, 128, 192), OF_MXFP8)
    module = built(tensors, 192, mapping=mapping, quant_config=config)
    assert module.backend.verdict.families == ("triton", "gemm" if form != "MXFP8" else "grouped")
    x, _ = call(module, 200)
    for after in (True, False):
        sent, scales = module.backend.quantize_input(x, post_quant_comm=after)
        assert sent is x
        assert scales is None


@pytest.mark.embedded
@pytest.mark.parametrize("backend", ["CUTLASS", "AUTO"])
def test_one_layer_of_a_mixed_checkpoint(backend: str) -> None:
    """As nvidia/Qwen3.6-35B-A3B-NVFP4 is labeled: MIXED_PRECISION, and a configuration of its own for the experts."""
    mixed = host.QuantConfig(quant_algo=host.QuantAlgo.MIXED_PRECISION)
    module = built(experts(192), 192, quant_config=mixed, override_quant_config=CONFIG, moe_backend=backend)
    assert module.backend.quant_method.format == "W4A16_NVFP4"
    assert module.backend.verdict.families == ("triton", "gemm")


@pytest.mark.embedded
@pytest.mark.parametrize(("algorithm", "bias"), [("W4A16_NVFP4", None), ("W4A8_MXFP4_MXFP8", True)])
def test_random_weights_give_outputs_of_about_one(algorithm: str, bias: bool | None) -> None:
    """What ``trtllm-b12x tune`` measures."""
    sizes = LayerShape(4, 2, 128, 192, "Swiglu", algorithm, activation_constants=bias, bias=bias)
    (module,) = build_layer.build(sizes, torch.device("cpu"))
    x, logits = call(module, 5)
    assert 0.1 < float(module(x, logits).float().pow(2).mean().sqrt()) < 3


# ---- W4A4 prefill, by a switch -------------------------------------------------------------------------------------------


def test_w4a4_prefill_is_nvfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = experts(192)
    weights_alone = built(tensors, 192)
    monkeypatch.setenv(settings.W4A4_PREFILL.name, "1")
    monkeypatch.setenv(settings.KERNELS.name, "triton")
    module, nvfp4 = built(tensors, 192), layers.load(layers.create(4, 128, 192), tensors)
    assert type(module.backend.quant_method) is NVFP4Sm12xFusedMoEMethod
    assert trtllm_b12x.status().formats == {"W4A16_NVFP4": 1, "NVFP4": 2}
    for tokens in (5, 200):
        x, logits = call(module, tokens)
        assert torch.equal(module(x, logits), nvfp4(x, logits))
    assert not torch.equal(module(x, logits), weights_alone(x, logits))
    assert module.backend.quantize_input(x)[0].dtype == torch.uint8


def test_w4a4_prefill_needs_input_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.W4A4_PREFILL.name, "1")
    with pytest.raises(ValueError, match=r"MoE layer 7: TRTLLM_B12X_W4A4_PREFILL=1 needs input_scale .*: unset TRTLLM_B12X_W4A4"):
        built(experts(192, input_scales=False), 192, layer_idx=7)
