"""Memory of layers on the real SM120 kernels, on a Hopper GPU: graphs, moves, what ran out, and a soak."""

from __future__ import annotations

import dataclasses
import random

import torch

from tests import layers
from tests.checkpoints import random_experts
from tests.integration import test_b12x_device
from tests.integration.test_b12x_device import SIZE, SIZES, TOP_K, E, H, built, captured, drawn
from trtllm_b12x.kernels import MoECall
from trtllm_b12x.kernels.reference import ReferenceKernel

pytestmark = test_b12x_device.pytestmark
unplanned = test_b12x_device.unplanned


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


def test_a_layer_that_is_moved_ends_where_it_began() -> None:
    module, tensors = built()
    backend, given = module.backend, drawn(module, 16, tensors)
    expected = layers.run_moe(backend, *given)
    kernel, plan = backend.kernel, backend.kernel._plan
    with captured(backend, *given) as (graph, result):
        module.cuda()  # nothing to move
        assert backend.kernel is kernel
        others = [torch.full((1 << 20,), 7, device="cuda", dtype=torch.uint8) for _ in range(64)]  # what was freed is taken
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)
        del others
    module.cpu()
    assert backend.kernel is None
    assert backend.verdict.served
    module.cuda()
    assert backend.kernel is kernel
    assert backend.kernel._plan is plan
    before = len(plan.results)
    assert torch.equal(layers.run_moe(backend, *given), expected)
    assert len(plan.results) == before


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
