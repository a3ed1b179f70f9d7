# SPDX-License-Identifier: Apache-2.0
"""The one launch on a GPU: one block, copies side by side, graphs in any order, threads. Numbers: test_kernels_device.py."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import chain
from tests.integration.test_kernels_device import weights_of
from tests.nvfp4_layer import INPUT_SCALE, distance, interleaved, random_call, random_layer
from trtllm_b12x.formats.nvfp4 import pack_fp4
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.cards import card_of
from trtllm_b12x.kernels.cuda.decode import CudaKernel, CudaMXFP8Kernel
from trtllm_b12x.kernels.cuda.probe import PROBE, takes_subnormals

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU of capability 9.0 or newer"
)
CUDA = torch.device("cuda", 0)
TOKENS = (1, 2, 3, 4, 5, 7, 8, 9, 33, 64)
LAYER = Geometry(32, 4, 1024, 384, "Swiglu")
NARROW = Geometry(64, 22, 1024, 2688, "Relu2")
"""FC2 has few tiles of 16 rows."""
IDLE = Geometry(16, 4, 5120, 256, "Relu2")
"""Fewer tasks of FC1 than multiprocessors, and fewer units of FC2's than warps."""


def planned(kind: type[CudaKernel], geometry: Geometry, weights: Any, blocks: int = 0) -> CudaKernel:
    kernel = kind(replace(card_of(CUDA), multiprocessors=blocks) if blocks else None)
    kernel.plan(geometry, 64, CUDA)
    kernel.bind(weights)
    return kernel


@pytest.mark.parametrize("blocks", [1, 3, 48])
@pytest.mark.parametrize(
    ("kind", "geometry"),
    [(CudaKernel, LAYER), (CudaKernel, NARROW), (CudaKernel, IDLE), (CudaMXFP8Kernel, replace(LAYER, format="MXFP8"))],
)
def test_any_number_of_blocks(kind: type[CudaKernel], geometry: Geometry, blocks: int) -> None:
    """One block gets through alone, and the bits do not depend on who computes what."""
    weights = weights_of(geometry)
    whole, few = planned(kind, geometry, weights), planned(kind, geometry, weights, blocks)
    for tokens in TOKENS:
        call = MoECall(*random_call(geometry, tokens, device="cuda", seed=tokens))
        first = whole.run(call)
        for _ in range(3):
            assert torch.equal(few.run(call), first), tokens


def test_a_chain_from_logits_is_the_chain_from_ids() -> None:
    """Of two layers, with kernels for norm, router product and top-k around them."""
    lines = chain.measure(Geometry(64, 4, 2048, 384, "Swiglu"), (1, 3))
    assert all(line["difference"] < 0.003 for line in lines)


def test_graphs_of_two_streams_in_any_order() -> None:
    """Two launches at once, each with all multiprocessors, and graphs of different counts that share a layer."""
    kernel = planned(CudaKernel, LAYER, weights_of(LAYER))
    streams, drawn = [torch.cuda.Stream() for _ in range(2)], random.Random(0)
    graphs: list[tuple[int, torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, MoECall]] = []
    for place in range(2):
        for tokens in TOKENS:
            call = MoECall(*random_call(LAYER, tokens, device="cuda", seed=tokens))
            expected, graph = kernel.run(call), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(4):
                    result = kernel.run(call)
            graphs.append((place, graph, result, expected, call))
    torch.cuda.synchronize()
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    for _ in range(2000):
        for place, stream in enumerate(streams):
            _, graph, result, expected, _ = drawn.choice([entry for entry in graphs if entry[0] == place])
            with torch.cuda.stream(stream):
                graph.replay()
                wrong[place] += (result != expected).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


def test_threads_and_streams_beside_other_work() -> None:
    """100,000 calls on four threads, each with a stream of its own, beside products that take the multiprocessors."""
    kernel = planned(CudaKernel, LAYER, weights_of(LAYER))
    calls = {tokens: MoECall(*random_call(LAYER, tokens, device="cuda", seed=tokens)) for tokens in TOKENS}
    expected = {tokens: kernel.run(call) for tokens, call in calls.items()}
    torch.cuda.synchronize()
    wrong: list[int] = []
    done = threading.Event()

    def run(seed: int) -> None:
        drawn, stream = random.Random(seed), torch.cuda.Stream()
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        with torch.cuda.stream(stream):
            for number in range(25_000):
                tokens = drawn.choice(TOKENS)
                result = kernel.run(calls[tokens])
                if number % 4 == 0:
                    bad += (result != expected[tokens]).sum()
            stream.synchronize()
        wrong.append(int(bad))

    def disturb() -> None:
        stream, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
        with torch.cuda.stream(stream):
            while not done.is_set():
                torch.mm(x, x)
                stream.synchronize()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    other = threading.Thread(target=disturb)
    for thread in (other, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    other.join()
    assert wrong == [0] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_input_that_arrives_quantized(dtype: torch.dtype) -> None:
    layer = random_layer(Geometry(8, 2, 1024, 256, "Swiglu", dtype), "cuda")
    kernel = planned(CudaKernel, layer.geometry, layer.kernel_weights())
    for tokens in TOKENS:
        _, ids, router_weights = random_call(layer.geometry, tokens, device="cuda")
        codes = torch.randint(0, 16, (tokens, 1024), dtype=torch.uint8, device="cuda")
        scales = (torch.rand(tokens, 64, device="cuda") * 100).to(torch.float8_e4m3fn)
        magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")[(codes & 7).long()]
        values = torch.where(codes >= 8, -magnitude, magnitude) * scales.float().repeat_interleave(16, 1) * INPUT_SCALE[0]
        for swizzled in (True, False):
            given = interleaved(scales.unsqueeze(0)).permute(5, 2, 4, 0, 1, 3).contiguous() if swizzled else scales
            found = kernel.run(MoECall(pack_fp4(codes), ids, router_weights, x_sf=given, swizzled=swizzled))
            assert distance(found, layer.expected(values, ids, router_weights)) < 0.004, (tokens, swizzled)


@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["Swiglu", "SwigluBias", "Relu2"])
def test_bias(activation: str, bias: torch.dtype) -> None:
    layer = random_layer(Geometry(16, 4, 512, 256, activation, bias=bias), "cuda", ratio=True)
    kernel = planned(CudaKernel, layer.geometry, layer.kernel_weights())
    for tokens in TOKENS:
        call = random_call(layer.geometry, tokens, device="cuda", seed=tokens)
        assert distance(kernel.run(MoECall(*call)), layer.expected(*call)) < 0.004, tokens


def test_graphs_that_share_memory() -> None:
    """As engines capture them: one pool for graphs of all counts, which replay one after the other in any order."""
    kernel, pool, drawn = planned(CudaKernel, LAYER, weights_of(LAYER)), torch.cuda.graph_pool_handle(), random.Random(0)
    graphs = []
    for tokens in (*TOKENS, *TOKENS):
        call = MoECall(*random_call(LAYER, tokens, device="cuda", seed=tokens))
        expected, graph, kept = kernel.run(call), torch.cuda.CUDAGraph(), torch.zeros_like(call.x)
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(3):
                kept.copy_(kernel.run(call))
        graphs.append((graph, kept, expected, call))
    for _ in range(500):
        graph, kept, expected, _ = drawn.choice(graphs)
        kept.zero_()
        graph.replay()
        assert torch.equal(kept, expected)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="not known of other cards")
def test_hopper_takes_bfloat16_subnormals() -> None:
    torch.zeros(1, device=CUDA)  # makes the context
    assert takes_subnormals(CUDA, PROBE.compile("sm_90a")[0])
