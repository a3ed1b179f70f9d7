# SPDX-License-Identifier: Apache-2.0
"""Calls as hosts make them beyond prefill and decode: what only CUTLASS does goes there, the rest is right on b12x."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts
from trtllm_b12x.tools import verify

host = layers.host


@pytest.fixture
def layer() -> tuple[Any, dict[str, torch.Tensor]]:
    tensors = random_experts(6, 128, 192)
    return layers.load(layers.create(6, 128, 192, top_k=3), tensors), tensors


@pytest.mark.parametrize("arguments", [{"do_finalize": False}, {"lora_params": {"module": 1}}, {"enable_alltoall": True}])
def test_what_only_cutlass_does(
    layer: tuple[Any, dict[str, torch.Tensor]], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent gets quantized input in the layout of the call, and every argument."""
    module, tensors = layer
    seen: dict[str, Any] = {}
    run_moe = host.CutlassFusedMoE.run_moe
    known = inspect.signature(run_moe).parameters  # others are another generation's

    def spy(self: Any, x: Any, *routes: Any, **kwargs: Any) -> Any:
        seen.update(kwargs, x=x)
        return run_moe(self, x, *routes, **{name: value for name, value in kwargs.items() if name in known})

    monkeypatch.setattr(host.CutlassFusedMoE, "run_moe", spy)
    monkeypatch.setattr(host.CutlassFusedMoE, "_moe_lora_active", lambda self, lora_params: bool(lora_params), raising=False)
    if arguments.keys() & {"enable_alltoall"} & known.keys():  # with the sizes that the autotuner has seen
        arguments = {**arguments, "tuner_num_tokens": 5, "tuner_top_k": 3}
    x, logits = layers.inputs(module, 5, tensors)
    ids, router_weights = module.routing_method.apply(logits)
    ids[4, 0] = 6  # the host's padding id: num_slots
    passed, sf = module.backend.quantize_input(x, post_quant_comm=False)
    with verify.kernel_calls(module.backend) as reached:
        result = module.backend.run_moe(passed, ids, router_weights, sf, output_dtype=torch.bfloat16, **arguments)
    assert len(reached) == 0
    assert seen["x"].dtype is torch.uint8
    assert seen["x_sf"] is not None
    assert arguments.items() <= seen.items()
    assert layers.errors(module, x[:4], logits[:4], result[:4], tensors)[0] < 0.05


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding", [6, 100, -1])
def test_ids_of_nobody_are_unrouted(padding: int, dtype: torch.dtype) -> None:
    """Behind expert parallelism.  Without it an id beyond the last expert comes from an all-to-all alone, which is CUTLASS's."""
    tensors = random_experts(6, 128, 320)
    mapping = {"world_size": 2, "rank": 1, "tp_size": 2, "moe_ep_size": 2}
    backend = layers.load(layers.create(6, 128, 320, mapping=mapping), tensors).backend
    x = layers.inputs(backend, 40, tensors)[0]
    ids = torch.stack([torch.randperm(3)[:2] for _ in range(40)]).to(dtype) + 3
    router_weights = torch.rand(40, 2)
    ids[::3, 1] = padding
    without = torch.where(ids == padding, torch.zeros_like(router_weights), router_weights)
    valid = torch.where(ids == padding, torch.full_like(ids, 3), ids)
    assert torch.equal(backend.run_moe(x, ids, router_weights), backend.run_moe(x, valid, without))


@pytest.mark.parametrize(
    "arguments",
    [
        {
            "pretrained_config": type("Config", (), {"hidden_size": 1024}),
            "gated": False,
        },
        {"mapping": {"world_size": 2, "rank": 1}},
    ],
    ids=["latent", "pipeline"],
)
def test_a_layer_is_what_it_was_constructed_with(arguments: dict[str, Any]) -> None:
    """Latent experts have a hidden size of their own; a rank of two pipeline stages holds its layer whole."""
    module, tensors = layers.made(6, 256, 192, top_k=3, **arguments)
    assert module.backend.kernel.geometry.hidden_size == 256
    x, logits = layers.inputs(module, 40, tensors)
    assert layers.errors(module, x, logits, module(x, logits), tensors)[1] < 0.005
