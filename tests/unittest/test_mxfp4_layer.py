# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts through the host's own layer, on the host's own tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import layers, mxfp4
from tests.layers import host, ranks, swiglu_constants
from tests.nvfp4_layer import distance
from trtllm_b12x.tools.verify import kernel_calls

pytestmark = pytest.mark.usefixtures("every_family")
EXPERTS, TOP_K = 6, 2
SIZES = [(160, 288), (256, 128)]
"""H and I of the model. The first is gpt-oss's 2880 x 2880 made small: neither is a multiple of 128, and at TP 4 rank 0 holds 128
real rows, rank 2 32 and rank 3 none, where I / 4 is 72."""


def built(weights: dict[str, torch.Tensor], hidden: int, size: int, swiglu: Any = None, **arguments: Any) -> Any:
    local = EXPERTS // arguments.get("mapping", {}).get("moe_ep_size", 1)
    given = dict(zip(("alpha", "beta", "limit"), swiglu or (), strict=False))
    constants = swiglu_constants(**{name: torch.full((local,), value) for name, value in given.items()}) if given else {}
    config = host.QuantConfig(quant_algo=host.QuantAlgo.W4A8_MXFP4_MXFP8, group_size=32)
    layer = layers.create(EXPERTS, hidden, size, TOP_K, quant_config=config, **{**arguments, **constants})
    return layers.load(layer, weights)


def call(hidden: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    return x, torch.randn(tokens, EXPERTS, generator=generator)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize(("hidden", "size"), SIZES)
def test_numbers_over_ranks(hidden: int, size: int, bias: bool, tp: int, ep: int) -> None:
    """Decode on our kernels with activations as they are; each rank adds its part, FC2's bias once."""
    swiglu = mxfp4.GPT_OSS if bias else None
    weights = mxfp4.random_experts(EXPERTS, hidden, size, bias)
    x, logits = call(hidden, 5)
    total, served = torch.zeros(x.shape), []
    for mapping in ranks(tp, ep):
        layer = built(weights, hidden, size, swiglu, mapping=mapping, bias=bias)
        with kernel_calls(layer.backend) as reached:
            total += layer(x, logits).float()
        served += reached
    assert served == ["triton"] * tp * ep
    wanted = mxfp4.expected(weights, x, layer.routing_method.apply(logits), swiglu)
    assert distance(total, wanted) < 0.004
    without = {name: tensor for name, tensor in weights.items() if not name.endswith("w2.bias")}
    if bias:
        assert distance(mxfp4.expected(without, x, layer.routing_method.apply(logits), swiglu), wanted) > 0.04


@pytest.mark.parametrize(("byte", "served"), [(136, True), (137, False)])
def test_scales_that_the_kernels_cannot_multiply_by_stay_with_the_host(byte: int, served: bool) -> None:
    hidden, size = SIZES[0]
    weights = mxfp4.random_experts(EXPERTS, hidden, size)
    weights["1.w2.weight_scale"][3, 1] = byte
    x, logits = call(hidden, 5)
    layer = built(weights, hidden, size)
    with kernel_calls(layer.backend) as reached:
        assert layer(x, logits).isfinite().all()
    assert reached == ["triton"] * served
    assert ("w2_weight_scale holds scales above 2**9" in str(layer.backend.verdict)) is not served


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_hosts_path_serves_prefill_with_mxfp8_activations(tp: int) -> None:
    hidden, size = SIZES[0]
    weights = mxfp4.random_experts(EXPERTS, hidden, size, bias=True)
    x, logits = call(hidden, 200)
    total, alone = torch.zeros(x.shape), torch.zeros(x.shape)
    for mapping in ranks(tp, 1):
        layer = built(weights, hidden, size, mxfp4.GPT_OSS, mapping=mapping, bias=True)
        with kernel_calls(layer.backend) as reached:
            total += layer(x, logits).float()
        assert not reached
        assert layer.backend.quantize_input(x)[0].dtype == torch.float8_e4m3fn  # what ranks send each other
        plain = built(weights, hidden, size, mxfp4.GPT_OSS, mapping=mapping, bias=True, promote=False)
        alone += plain(x, logits).float()
        few = call(hidden, 7)
        assert torch.equal(layers.as_the_host(layer, *few), plain(*few))  # what is timed
    assert torch.equal(total, alone)
    wanted = mxfp4.expected(weights, x, layer.routing_method.apply(logits), mxfp4.GPT_OSS)
    assert 0.005 < distance(total, wanted) < 0.05


@pytest.mark.parametrize("tp", [1, 4])
def test_the_kernels_read_the_hosts_tensors(tp: int) -> None:
    """The same state dict, byte for byte, and no storage but its own."""
    hidden, size = SIZES[0]
    weights = mxfp4.random_experts(EXPERTS, hidden, size, bias=True)
    for mapping in ranks(tp, 1):
        layer, plain = (
            built(weights, hidden, size, mxfp4.GPT_OSS, mapping=mapping, bias=True, promote=promote) for promote in (True, False)
        )
        mine, its = layer.state_dict(), plain.state_dict()
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[name].view(torch.uint8), its[name].view(torch.uint8)) for name in its)
        method, backend = layer.backend.quant_method, layer.backend
        kernel_weights = method.kernel_weights(backend)
        stored = {parameter.untyped_storage().data_ptr() for parameter in backend.parameters()}
        for name, tensor in kernel_weights.tensors().items():
            assert tensor.untyped_storage().data_ptr() in stored, name
        epilogue = kernel_weights.epilogue
        assert epilogue.fc1_bias.data_ptr() == backend.w3_w1_bias.data_ptr()
        assert (epilogue.fc2_bias.data_ptr() == backend.w2_bias.data_ptr()) == (mapping["rank"] == 0)
        assert bool(epilogue.fc2_bias.any()) == (mapping["rank"] == 0)
        assert method.scalar_bytes(backend) == 0


def test_a_refit_and_a_bias_that_is_moved_are_followed() -> None:
    """A host may replace a parameter without calling a hook."""
    hidden, size = SIZES[0]
    old, weights = (mxfp4.random_experts(EXPERTS, hidden, size, bias=True, seed=seed) for seed in (0, 1))
    layer = layers.load(built(old, hidden, size, mxfp4.GPT_OSS, bias=True), weights)
    x, logits = call(hidden, 3)
    before = layer(x, logits)
    assert torch.equal(before, built(weights, hidden, size, mxfp4.GPT_OSS, bias=True)(x, logits))
    layer.backend.w2_bias.data = torch.zeros_like(layer.backend.w2_bias)
    without = {name: tensor for name, tensor in weights.items() if not name.endswith("w2.bias")}
    wanted = mxfp4.expected(without, x, layer.routing_method.apply(logits), mxfp4.GPT_OSS)
    assert distance(layer(x, logits), wanted) < 0.004 < distance(before, wanted)
