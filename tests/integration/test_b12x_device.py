# SPDX-License-Identifier: Apache-2.0
"""Layers on the real SM120 kernels, on a Hopper GPU: numbers, captured graphs, streams, refits, ranks, the self-test, a soak."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts, write_checkpoint
from tests.integration.sm12x_on_hopper import Bed
from tests.nvfp4_layer import distance
from trtllm_b12x.kernels import MoECall
from trtllm_b12x.kernels.b12x import compiler
from trtllm_b12x.kernels.b12x.kernel import B12xKernel
from trtllm_b12x.kernels.reference import ReferenceKernel
from trtllm_b12x.tools.checkpoint import Checkpoint
from trtllm_b12x.tools.verify import Case, Ranks, verify_layer

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
E, TOP_K, H, SIZE = 16, 4, 512, 256
SIZES = (1, 3, 8, 16, 63)
"""Direct micro twice, static, the last before the crossover."""


@pytest.fixture(autouse=True)
def unplanned(bed: Bed) -> None:
    """Nothing that another test compiled."""
    compiler._compiled.clear()


def built(gated: bool = True, seed: int = 0, **arguments: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    tensors = random_experts(E, H, SIZE, gated, seed)
    with torch.device("cuda"):
        module = layers.create(E, H, SIZE, top_k=TOP_K, gated=gated, **arguments)
    module = layers.load(module, tensors)
    assert type(module.backend.kernel) is B12xKernel, module.backend.verdict
    return module, tensors


def drawn(module: Any, tokens: int, tensors: dict[str, torch.Tensor], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """x, ids and router weights on the GPU."""
    x, logits = layers.inputs(module, tokens, tensors, seed)
    ids, router_weights = module.routing_method.apply(logits)
    return x.cuda(), ids.cuda(), router_weights.cuda()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [*SIZES, 2, 5, 9, 40, 64, 100])
def test_numbers_on_both_sides_of_the_crossover(bed: Bed, tokens: int, gated: bool) -> None:
    module, tensors = built(gated)
    x, logits = layers.inputs(module, tokens, tensors)
    before = len(bed.launched)
    result = module(x.cuda(), logits.cuda()).cpu()
    launched = [name.split("_")[0] for name in bed.launched[before:]]
    assert launched == ([] if tokens >= 64 else ["direct" if tokens < 8 else "static"])
    none, kernel = layers.errors(module, x, logits, result, tensors)
    assert none <= 0.05
    if tokens < 64:
        assert kernel <= 0.005


@contextlib.contextmanager
def captured(backend: Any, *given: torch.Tensor) -> Iterator[tuple[torch.cuda.CUDAGraph, torch.Tensor]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layers.run_moe(backend, *given)
    yield graph, result


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("gated", [True, False])
def test_graphs_of_several_sizes_follow_their_inputs(gated: bool, ep: int) -> None:
    """Captured without any warm-up: at load everything is planned."""
    mapping = {"world_size": ep, "rank": ep - 1, "tp_size": ep, "moe_ep_size": ep}
    module, tensors = built(gated, mapping=mapping)
    for tokens in SIZES:
        buffers = drawn(module, tokens, tensors)
        with captured(module.backend, *buffers) as (graph, result):
            for seed in (1, 2, 3):
                given = drawn(module, tokens, tensors, seed)
                for buffer, value in zip(buffers, given, strict=True):
                    buffer.copy_(value)
                graph.replay()
                eager = layers.run_moe(module.backend, *given)
                assert torch.equal(result, eager)


def test_a_refit_between_replays_needs_no_new_memory() -> None:
    """Not even a hook: input scales are overwritten too, and the divisors that the kernel reads follow inside the graph."""
    (module, tensors), (other, _) = built(), built(seed=7)
    other.backend.fc31_input_scale.data.mul_(0.75)
    other.backend.fc2_input_scale.data.mul_(0.6)
    given = drawn(module, 16, tensors)
    with captured(module.backend, *given) as (graph, result):
        graph.replay()
        first, wanted = result.clone(), layers.run_moe(other.backend, *given)
        allocated = torch.cuda.memory_allocated()
        for name, parameter in module.backend.named_parameters():
            parameter.data.copy_(dict(other.backend.named_parameters())[name].data)
        assert torch.cuda.memory_allocated() == allocated
        graph.replay()
        assert not torch.equal(result, first)
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("in_a_graph", [False, True])
def test_two_streams_at_once(in_a_graph: bool) -> None:
    """Two layers share scratch memory and all SMs: each launch waits for the other stream's."""
    (first, tensors), (second, _) = built(), built(seed=7)
    assert first.backend.kernel.workspace == second.backend.kernel.workspace
    given = [drawn(first, tokens, tensors, tokens) for tokens in (16, 40, 63, 9)]
    expected = [layers.run_moe(m.backend, *g) for m in (first, second) for g in given]

    def overlapping(stream: torch.cuda.Stream) -> list[torch.Tensor]:
        results: list[Any] = [None] * 8
        stream.wait_stream(torch.cuda.current_stream())
        for at, inputs in enumerate(given):
            results[at] = layers.run_moe(first.backend, *inputs)
            with torch.cuda.stream(stream):
                results[4 + at] = layers.run_moe(second.backend, *inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return results

    torch.cuda.synchronize()
    if in_a_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = overlapping(torch.cuda.Stream())
        for _ in range(50):
            graph.replay()
            torch.cuda.synchronize()
            assert all(map(torch.equal, results, expected))
    else:
        for _ in range(50):
            results = overlapping(torch.cuda.Stream())
            torch.cuda.synchronize()
            assert all(map(torch.equal, results, expected))


def test_output_goes_where_the_host_wants_it() -> None:
    module, tensors = built()
    result = half = None
    for tokens in SIZES:
        given = drawn(module, tokens, tensors)
        del result, half
        buffer = torch.full((tokens + 1, H), torch.nan, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        result = layers.run_moe(module.backend, *given, moe_output=buffer[:tokens])
        assert result.data_ptr() == buffer.data_ptr()
        assert torch.cuda.memory_allocated() == before
        assert buffer[tokens:].isnan().all()
        assert torch.equal(result, layers.run_moe(module.backend, *given))
        half = torch.empty(tokens, 2 * H, device="cuda", dtype=torch.bfloat16)[:, H:]  # not contiguous
        assert layers.run_moe(module.backend, *given, moe_output=half).data_ptr() == half.data_ptr()
        assert torch.equal(half, result)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("ranks", [Ranks(1, 1), Ranks(2, 1), Ranks(1, 2)], ids=str)
def test_verify_judges_the_kernels_themselves(tmp_path: Path, gated: bool, ranks: Ranks) -> None:
    checkpoint = Checkpoint(write_checkpoint(tmp_path, [random_experts(E, H, SIZE * ranks.tp, gated)], TOP_K, gated=gated))
    (layer,) = checkpoint.layers
    cases = [Case(tokens) for tokens in SIZES]
    report = verify_layer(checkpoint, layer, cases, ranks=ranks, device="cuda", require_b12x=True)
    assert report.passed, (report.failures, [case.failures for case in report.cases])
    assert [case.path for case in report.cases] == ["b12x"] * len(SIZES)


@pytest.mark.parametrize("filler", [0, 0x7F])
def test_dummy_weights_wait_for_real_ones(filler: int) -> None:
    """All zero, and block scales that are no number: nothing is served that was not tested, and every layer once one was."""
    tensors, kernels = random_experts(E, H, SIZE), []
    nothing = {name: t.clone() for name, t in tensors.items()}
    for name, tensor in nothing.items():
        if name.endswith("weight_scale"):
            tensor.view(torch.uint8).fill_(filler)
    for given in (nothing, nothing, tensors):
        with torch.device("cuda"):
            module = layers.create(E, H, SIZE, top_k=TOP_K)
        kernels.append(layers.load(module, given).backend.kernel)
        assert [kernel.serves(8) for kernel in kernels] == [given is tensors] * len(kernels)
    first = module.backend
    assert first.verdict.served


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gated", [True, False])
def test_an_id_of_no_expert_touches_nothing(gated: bool, dtype: torch.dtype) -> None:
    """What a router makes of logits that are no number, in one route of one token."""
    module, tensors = built(gated)
    reference = ReferenceKernel()
    reference.plan(module.backend.kernel.geometry, 64, torch.device("cuda"))
    reference.bind(module.backend.kernel.weights)
    ids_of_no_expert = [E, E + 1, 1 << 20, 2**31 - 1, -1, -(2**31)] + ([2**32, -(2**40)] if dtype is torch.int64 else [])
    for tokens in (1, 4, 8, 16, 63):
        x, ids, router_weights = drawn(module, tokens, tensors)
        untouched = layers.run_moe(module.backend, x, ids, router_weights)
        for bad in ids_of_no_expert:
            given = ids.to(dtype)
            given[-1, 1] = bad
            result = layers.run_moe(module.backend, x, given, router_weights)
            assert distance(result, reference.run(MoECall(x, given, router_weights)).float()) <= 0.02, (tokens, bad)
            if tokens > 1:
                assert torch.equal(result[:-1], untouched[:-1])
        torch.cuda.synchronize()


# ---- memory: graphs, moves, what ran out, and a soak -------------------------------------------------------------------


def test_two_graphs_replayed_at_once_have_memory_of_their_own() -> None:
    (first, tensors), (second, _) = built(), built(seed=7)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for tokens in SIZES:
        given = [drawn(first, tokens, tensors, seed) for seed in (1, 2)]
        expected = [layers.run_moe(m.backend, *g) for m, g in zip((first, second), given, strict=True)]
        with captured(first.backend, *given[0]) as (one, left), captured(second.backend, *given[1]) as (two, right):
            for replay in range(300):
                for stream, graph in zip(streams, (one, two), strict=True):
                    with torch.cuda.stream(stream):
                        graph.replay()
                third = layers.run_moe(second.backend, *given[1]) if replay % 3 == 0 else expected[1]
                torch.cuda.synchronize()
                for result, wanted in ((left, expected[0]), (right, expected[1]), (third, expected[1])):
                    assert torch.equal(result, wanted), (tokens, replay)


def test_scratch_memory_of_graphs_that_share_a_pool_is_taken_once() -> None:
    module, tensors = built()
    plan, pool = module.backend.kernel._plan, torch.cuda.graph_pool_handle()
    graphs, used = [], []
    for tokens in (40, 16, 24, 63):
        given = drawn(module, tokens, tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(3):
                layers.run_moe(module.backend, *given)
        graphs.append(graph)
        used.append(torch.cuda.memory_reserved())
    assert used[-1] - used[0] <= plan.scratch.nbytes() // 2 + (4 << 20)


def test_what_was_planned_in_inference_mode_runs_outside_it() -> None:
    with torch.inference_mode():
        module, tensors = built()
    for tokens in SIZES:
        given = drawn(module, tokens, tensors)
        with captured(module.backend, *given) as (graph, result):
            graph.replay()
        assert torch.equal(layers.run_moe(module.backend, *given), result)


def test_a_stream_that_is_gone_is_not_waited_for() -> None:
    from cuda.bindings import runtime

    module, tensors = built()
    given = drawn(module, 16, tensors)
    expected = layers.run_moe(module.backend, *given)
    for _ in range(3):
        status, handle = runtime.cudaStreamCreate()
        assert not int(status)
        with torch.cuda.stream(torch.cuda.ExternalStream(int(handle))):
            result = layers.run_moe(module.backend, *given)
            torch.cuda.current_stream().synchronize()
        assert torch.equal(result, expected)
        assert not int(runtime.cudaStreamDestroy(handle)[0])
        assert torch.equal(layers.run_moe(module.backend, *given), expected)


def test_the_self_test_gives_its_memory_back() -> None:
    tensors = random_experts(E, H, SIZE)
    with torch.device("cuda"):
        module = layers.create(E, H, SIZE, top_k=TOP_K)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        backend = layers.load(module, tensors).backend
    assert backend.kernel.workspace is not None
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() <= before + (32 << 20)


CALLS = 10_000


def test_a_soak_repeats_to_the_bit() -> None:
    """On static, which alone serves expert parallelism; micro adds with atomics."""
    assert soak(2, CALLS) == soak(2, CALLS)


def test_a_soak_of_all_kernels() -> None:
    soak(1, CALLS)


def soak(ep: int, calls: int) -> int:
    """Random sizes and routes, values that are no numbers; every 50th call against the torch kernel.  A sum over all outputs."""
    mapping = {"world_size": ep, "rank": ep - 1, "tp_size": ep, "moe_ep_size": ep}
    module, tensors = built(mapping=mapping)
    kernel = module.backend.kernel
    reference = ReferenceKernel()
    reference.plan(dataclasses.replace(kernel.geometry), kernel.capacity, torch.device("cuda"))
    reference.bind(kernel.weights, module.backend.slot_start)
    rng = random.Random(0)
    torch.manual_seed(0)
    # Within the calibrated range, and off rounding ties, where two correct kernels may round apart.
    pool = layers.inputs(module, 4096, tensors)[0].cuda()
    outputs = torch.full((64, H), torch.nan, device="cuda", dtype=torch.bfloat16)
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    allocated = 0
    for call in range(calls):
        tokens = rng.choice((0, 1, 1, 2, 3, 4, 7, 8, 8, 9, 16, 31, 40, 62, 63))
        experts = torch.arange(E, device="cuda")
        first = rng.randrange(4096 - 64)
        x = pool[first : first + tokens]
        kind = rng.choice(("any", "any", "any", "one expert", "duplicates", "remote", "not a number"))
        if kind == "one expert":
            ids = torch.full((tokens, TOP_K), rng.randrange(E), device="cuda")
        elif kind == "duplicates":
            ids = experts[torch.randint(0, 2, (tokens, TOP_K), device="cuda")]
        else:
            ids = torch.rand(tokens, E, device="cuda").argsort(1)[:, :TOP_K]
        if kind == "remote":  # on rank 1 of 2: experts of rank 0
            ids = ids % (E // ep)
        ids = ids.to(rng.choice((torch.int32, torch.int64)))
        router_weights = torch.softmax(torch.randn(tokens, TOP_K, device="cuda"), 1)
        bad = None
        if kind == "not a number" and tokens:
            bad = rng.randrange(tokens)
            x = x.clone()
            x[bad, rng.randrange(H)] = rng.choice((torch.inf, -torch.inf, torch.nan))
        out = outputs[:tokens]
        result = layers.run_moe(module.backend, x, ids, router_weights, moe_output=out)
        assert result.data_ptr() == out.data_ptr()
        good = torch.ones(tokens, dtype=torch.bool, device="cuda")
        if bad is not None:
            good[bad] = False
        total += result[good].view(torch.int16).long().sum() * (call + 1)
        if call % 50 == 0 or (bad is not None and call % 5 == 0):
            assert bool(result[good].isfinite().all()), (call, kind, tokens)
            assert bool(outputs[tokens:].isnan().all())
            if kind == "remote" and ep == 2:
                assert not result.any()
            elif tokens:
                expected = reference.run(MoECall(x, ids, router_weights))
                error = (result - expected).float()[good].norm() / expected.float()[good].norm().clamp(min=1e-30)
                assert not good.any() or float(error) <= 0.02, (call, kind, tokens, float(error))
        outputs.fill_(torch.nan)
        if call == 500:
            torch.cuda.synchronize()
            allocated = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated + (1 << 20)
    return int(total)
