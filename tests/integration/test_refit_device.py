# SPDX-License-Identifier: Apache-2.0
"""Captured graphs on a GPU while the layer's weights are loaded again: every replay is right, so is every eager call."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import layers, mxfp8
from tests.checkpoints import random_experts
from trtllm_b12x.dispatch import crossover
from trtllm_b12x.engines.trtllm.embedded.ops import fp4_quantize

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU of capability 8.9 or newer"
)
E, TOP_K, H, SIZE = 16, 4, 512, 256
REPLAYS = 50
COUNTS = (1, 8, 63, 100)
ACTIVATIONS = ("Swiglu", "Relu2", "limit", "alpha, beta, limit")
SERVED = dict.fromkeys(("cuda", "triton", "gemm", "grouped"), ("NVFP4", "MXFP8")) | {"b12x": ("NVFP4",)}
INPUTS = ("bf16", "quantized", "router weight on input")


def constants(activation: str) -> dict[str, Any]:
    """The arguments of ``create_moe`` for SwiGLU's constants."""
    values = {"alpha": 1.7, "beta": 0.5, "limit": 0.05}
    tensors = {name: torch.full((E,), value, device="cuda") for name, value in values.items() if name in activation}
    return layers.swiglu_constants(**tensors) if tensors else {}


def built(number_format: str, activation: str, router_weight_on_input: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    gated = activation != "Relu2"
    top_k = 1 if router_weight_on_input else TOP_K
    arguments = {"top_k": top_k, "gated": gated, "apply_router_weight_on_input": router_weight_on_input, **constants(activation)}
    if number_format == "MXFP8":
        tensors = mxfp8.random_experts(E, H, SIZE, gated)
        arguments["quant_config"] = layers.host.QuantConfig(quant_algo=layers.host.QuantAlgo.MXFP8, group_size=32)
    else:
        tensors = random_experts(E, H, SIZE, gated, up_to_gate=1.5 if os.environ["TRTLLM_B12X_KERNELS"] != "b12x" else 1.0)
    with torch.device("cuda"):
        module = layers.create(E, H, SIZE, **arguments)
    return layers.load(module, tensors), tensors


def call_of(backend: Any, tokens: int, form: str) -> Callable[[], torch.Tensor]:
    generator, top_k = torch.Generator().manual_seed(tokens), backend.routing_method.experts_per_token
    x = torch.randn(tokens, H, generator=generator).bfloat16().cuda()
    ids = torch.rand(tokens, E, generator=generator).topk(top_k, dim=1).indices.int().cuda()
    router_weights = None if form == "router weight on input" else torch.rand(tokens, top_k, generator=generator).cuda()
    x_sf = None
    if form == "quantized":
        x, x_sf = fp4_quantize(x, backend.fc31_input_scale.data, is_sf_swizzled_layout=True)
    return lambda: layers.run_moe(backend, x, ids, router_weights, x_sf, output_dtype=torch.bfloat16)


def load_hooks(module: Any, tensors: dict[str, torch.Tensor]) -> None:
    layers.load(module, tensors)


def other_storage(module: Any, tensors: dict[str, torch.Tensor]) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def state_dict(module: Any, tensors: dict[str, torch.Tensor]) -> None:
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()})


def to_the_cpu_and_back(module: Any, tensors: dict[str, torch.Tensor]) -> None:
    module.cpu()
    module.cuda()


WAYS = (load_hooks, other_storage, state_dict, to_the_cpu_and_back)


def garbage() -> list[torch.Tensor]:
    """Fill whatever was freed with numbers that no constant and no weight has."""
    sizes = [128] * 3000 + [1024] * 500 + [1 << 16] * 100 + [1 << 20] * 8
    return [torch.full((size,), torch.nan, device="cuda") for size in sizes]


CASES = [
    (family, number_format, activation, form)
    for family, formats in SERVED.items()
    for number_format, activation, form in itertools.product(formats, ACTIVATIONS, INPUTS)
    if not (form != "bf16" and (number_format != "NVFP4" or family == "b12x"))
    and not (family == "b12x" and "limit" in activation)
]


@pytest.mark.parametrize(("family", "number_format", "activation", "form"), CASES)
def test_replays_and_eager_calls_after_every_way_of_loading(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, family: str, number_format: str, activation: str, form: str
) -> None:
    # MXFP8 has no path of the host's: grouped serves what a decode family does not.
    families = [family, "grouped"] if number_format == "MXFP8" and family != "grouped" else [family]
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", ",".join(families))
    if family == "b12x":
        request.getfixturevalue("bed")
    with crossover.unmeasured():
        module, tensors = built(number_format, activation, form == "router weight on input")
        backend = module.backend
        assert list(backend.schedule.families) == families, backend.verdict
        counts = [tokens for tokens in COUNTS if backend.schedule.at(tokens) is not None]
        assert counts
        calls = {tokens: call_of(backend, tokens, form) for tokens in counts}
        expected = {tokens: call().clone() for tokens, call in calls.items()}
        graphs = {tokens: captured(call) for tokens, call in calls.items()}
        belongs_to_the_host = []
        for way in WAYS * 2:
            belongs_to_the_host.append([parameter.data for parameter in module.parameters()])
            way(module, tensors)
            fresh = {tokens: captured(call) for tokens, call in calls.items()}  # before any eager call
            for tokens, call in calls.items():
                assert torch.equal(call(), expected[tokens]), (way.__name__, tokens)
            for tokens, (graph, result) in (*graphs.items(), *fresh.items()):
                kept = garbage()
                wrong = 0
                for _ in range(REPLAYS):
                    result.fill_(torch.nan)
                    graph.replay()
                    wrong += not torch.equal(result, expected[tokens])
                assert not wrong, (way.__name__, tokens, wrong)
                del kept


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result
