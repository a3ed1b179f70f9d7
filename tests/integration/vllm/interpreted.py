# SPDX-License-Identifier: Apache-2.0
"""Layers of two experts through vLLM's modular kernel in Triton's interpreter: numbers, and what a call allocates."""

from __future__ import annotations

from typing import Any

import torch

from tests.allocations import Allocations
from tests.integration.vllm import layers


def found(form: str, activation: str, weighted: bool, scattered: bool, counts: tuple[int, ...]) -> dict[str, Any]:
    """Load a layer and call it at these counts.

    Args:
        weighted: the input comes multiplied by the router weights.
        scattered: the rank has every other expert of four.
    """
    parallel = {"ep_size": 2, "use_ep": True} if scattered else {}
    config = layers.config_of(
        4 if scattered else 2, 1, 128, 32, num_local_experts=2, activation=activation, parallel=parallel, has_bias=form == "MXFP4"
    )
    experts = layers.random_experts(form, 2, 128, 32, bias=config.has_bias)
    stored = layers.by_turns(experts) if activation == "swigluoai" else experts
    method, layer = layers.loaded(form, config, stored)
    if scattered:
        layer.expert_map = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    ours, apply = method.moe_kernel.fused_experts, type(method.moe_kernel.fused_experts).apply
    result: dict[str, Any] = {"errors": [], "allocated": [], "without a workspace": []}

    def counted(**kwargs: Any) -> None:
        for name, given in (("without a workspace", {"workspace2": None}), ("allocated", {})):
            with Allocations() as made:
                apply(ours, **kwargs | given)
            result[name] += made.names

    layer.apply_router_weight_on_input = weighted
    for tokens in counts:
        x, weights, ids = layers.routes(config, tokens)
        layers.call(method, layer, x, weights, ids)
        ours.apply = counted
        given = layers.call(method, layer, x, weights, ids)
        del ours.apply
        local, x = (torch.where(ids % 2 == 1, ids // 2, -1) if scattered else ids), (x * weights).bfloat16() if weighted else x
        expected = experts.expected(x, torch.ones_like(weights) if weighted else weights, local, activation)
        result["errors"].append(layers.distance(given, expected))
    result["kernels"] = [type(kernel).__name__ for kernel in ours.dispatch.schedule.kernels]
    return result


def cases() -> list[dict[str, Any]]:
    layers.pretend_sm120()
    from trtllm_b12x.engines.vllm import plugin
    from trtllm_b12x.kernels.triton import decode, grouped

    plugin.install()
    for kind in (decode.TritonKernel, grouped.GroupedKernel):  # other counts take minutes
        kind._counts = lambda self: [1]  # type: ignore[method-assign]
    with layers.vllm_config():
        return [found("MXFP8", "silu", True, True, (9, 70)), found("MXFP4", "swigluoai", False, False, (9,))]
