"""MXFP8 experts through the host's own layer: no path of the host's serves them, so every call is a kernel's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import mxfp8
from tests.layers import create, host
from trtllm_b12x.strict_reference import Arithmetic, Call, outputs

EXPERTS, HIDDEN, SIZE, TOP_K = 6, 256, 160, 2


def built(weights: dict[str, torch.Tensor], gated: bool = True, size: int = SIZE, **arguments: Any) -> Any:
    """The backend, loaded."""
    config = host.QuantConfig(quant_algo=host.QuantAlgo.MXFP8, group_size=32)
    layer = create(EXPERTS, HIDDEN, size, TOP_K, gated, quant_config=config, **arguments)
    layer.load_weights([weights])
    layer.post_load_weights()
    return layer


@pytest.fixture(autouse=True)
def families(every_family: None) -> None:
    """All of them."""


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
    [[expected]] = outputs(weights, EXPERTS, gated, [Call(x, ids, router_weights)], [arithmetic], quant_algo="MXFP8")
    assert float((found.float() - expected).norm() / expected.norm()) < 0.005


def test_ranks_of_attention_dp_gather_bf16() -> None:
    """Nothing of a rank decides what is sent: the host has no form of its own to send."""
    weights = mxfp8.random_experts(EXPERTS, HIDDEN, SIZE)
    module = built(weights, mapping={"world_size": 2, "tp_size": 2, "moe_ep_size": 2, "enable_attention_dp": True})
    assert module.backend.verdict.families == ("triton", "grouped")
    x = torch.randn(5, HIDDEN).to(torch.bfloat16)
    for after in (True, False):
        sent, scales = module.backend.quantize_input(x, post_quant_comm=after)
        assert sent is x
        assert scales is None
