"""The door on a real GPU (Hopper counts as SM120 by an argument): calls beside other streams, and graphs in random order."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.integration.vllm import layers
from trtllm_b12x.core import settings
from trtllm_b12x.engines.vllm import plugin

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or not torch.cuda.is_available(), reason="vLLM and a GPU are needed"
)
SIZES = 128, 8, 2048, 768
CALLS = 20_000
FORMATS = ("MXFP8", "W4A16_NVFP4")


@pytest.fixture(scope="module", params=FORMATS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any, Any, layers.Experts]]:
    with pytest.MonkeyPatch.context() as patch, layers.vllm_config("cuda"), torch.no_grad():
        for switch in (settings.KERNELS, settings.CROSSOVER):
            patch.delenv(switch.name, raising=False)
        plugin.install(sm=120)
        config = layers.config_of(*SIZES, device="cuda")
        experts = layers.random_experts(request.param, SIZES[0], *SIZES[2:], "cuda")
        method, layer = layers.loaded(request.param, config, experts)
        assert "Sm12x" in type(method.moe_kernel.fused_experts).__name__
        layers.call(method, layer, *layers.routes(config, 4096, 0, "cuda"))  # the profile run
        assert method.moe_kernel.fused_experts.measured
        yield method, layer, config, experts
        plugin.uninstall()


def test_calls_beside_other_streams(served: Any) -> None:
    method, layer, config, experts = served
    counts = (1, 3, 8, 17, 64, 200)
    calls = {tokens: layers.routes(config, tokens, 0, "cuda") for tokens in counts}
    expected = {tokens: layers.call(method, layer, *call) for tokens, call in calls.items()}
    for tokens in counts:
        error = layers.distance(expected[tokens], experts.expected(*calls[tokens]))
        assert error < 0.06, (tokens, error)
    streams = [torch.cuda.Stream() for _ in range(3)]
    a = torch.randn(1024, 1024, device="cuda")
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for n in range(CALLS):
        tokens = counts[n % len(counts)]
        with torch.cuda.stream(streams[n % 3]):
            result = layers.call(method, layer, *calls[tokens])
            wrong[n % 3] += (result != expected[tokens]).any()
            if n % 7 == 0:
                a @ a
        if n % 500 == 499:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert sum(map(int, wrong)) == 0


def test_graphs_in_random_order(served: Any) -> None:
    method, layer, config, _ = served
    captured: dict[int, Any] = {}
    pool = torch.cuda.graph_pool_handle()
    for tokens in (256, 200, 128, 96, 64, 48, 32, 16, 8, 4, 2, 1):
        inputs = layers.routes(config, tokens, 5, "cuda")
        expected = layers.call(method, layer, *inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = layers.call(method, layer, *inputs)
        captured[tokens] = graph, result, expected
    order = random.Random(0)
    for _ in range(500):
        graph, result, expected = captured[order.choice(list(captured))]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


def test_no_bytes_are_added(served: Any) -> None:
    method, layer, *_ = served
    bound = method.moe_kernel.fused_experts.dispatch.schedule.kernels[0].weights
    held = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    assert {getattr(bound, name).untyped_storage().data_ptr() for name in bound.stored_fields} <= held
