"""Real processes over gloo: reduced ranks, and attention-DP with uneven token counts in both forms."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trtllm_b12x.decision import Verdict
from trtllm_b12x.strict_reference import Arithmetic

WORLD = 2
TIMEOUT_S = 180


def run_ranks(job: Callable[[int], None], directory: Path, backend: str = "gloo") -> None:
    """``job(rank)`` in :data:`WORLD` processes of one group; an exception in any, or a hang, fails."""
    context = mp.spawn(_rank, args=(job, str(directory / "store"), backend), nprocs=WORLD, join=False)
    assert context is not None
    try:
        until = time.monotonic() + TIMEOUT_S
        while not context.join(timeout=max(0.0, until - time.monotonic())):
            assert time.monotonic() < until, "the ranks hang"
    finally:
        for process in context.processes:
            process.kill()


def _rank(rank: int, job: Callable[[int], None], store: str, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    job(rank)
    dist.barrier()
    dist.destroy_process_group()


def _layer(rank: int, tp: int, ep: int, **arguments: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    from tests import layers
    from tests.checkpoints import random_experts

    tensors = random_experts(4, 128, 256)  # 128 per rank: the host alone serves attention-DP, and is wrong off its tile
    attention_dp = arguments.pop("attention_dp", False)
    mapping = {"world_size": WORLD, "rank": rank, "tp_size": WORLD, "moe_tp_size": tp, "moe_ep_size": ep}
    module = layers.create(4, 128, 256, mapping={**mapping, "enable_attention_dp": attention_dp}, **arguments)
    return layers.load(module, tensors), tensors


def _arithmetic(module: Any) -> Arithmetic:
    """Rounding points of the layer's first family, which not every family has in common."""
    return Arithmetic[module.backend.kernel.features.arithmetic]


def reduced(rank: int) -> None:
    from tests import layers

    for tp, ep in ((2, 1), (1, 2)):
        module, tensors = _layer(rank, tp, ep, reduce_results=True)
        for tokens in (40, 70):
            x, logits = layers.inputs(module, tokens, tensors)
            none, kernel = layers.errors(module, x, logits, module(x, logits), tensors, _arithmetic(module))
            # Of the kernels' one bf16 rounding more, of the sum.
            assert (none < 0.05) if tokens >= 64 else (kernel < 0.006), (tp, ep, tokens, none, kernel)


def attention_dp(rank: int) -> None:
    from tests import layers
    from trtllm_b12x.formats.nvfp4 import dequantize
    from trtllm_b12x.host.embedded.ops import fp4_quantize
    from trtllm_b12x.verification import kernel_calls

    takes_quantized = os.environ["TRTLLM_B12X_KERNELS"] == "triton"
    for gather_bf16 in (False, True):
        os.environ["TRTLLM_B12X_GATHER_BF16"] = str(int(gather_bf16))
        for tp, ep in ((2, 1), (1, 2)):
            module, tensors = _layer(rank, tp, ep, attention_dp=True)
            for counts in ([3, 100], [40, 20], [1, 62], [100, 3]):
                on_kernel = (gather_bf16 or takes_quantized) and sum(counts) < 64
                # A few tokens are judged over many calls together: in three alone one code that rounds apart would show.
                calls = [layers.inputs(module, counts[rank], tensors, seed=2 * seed + rank) for seed in range(20)]
                results = []
                for x, logits in calls:
                    with kernel_calls(module.backend) as reached:
                        results.append(module(x, logits, all_rank_num_tokens=counts))
                    assert results[-1].shape == x.shape
                    assert len(reached) == int(on_kernel), (gather_bf16, counts)
                x, logits = (torch.cat(parts) for parts in zip(*calls, strict=True))
                if not on_kernel:
                    assert layers.errors(module, x, logits, torch.cat(results), tensors)[0] < 0.05, (gather_bf16, tp, ep, counts)
                    continue
                if takes_quantized:  # it is given what the host has quantized
                    scale = module.backend.fc31_input_scale
                    codes, block_scales = fp4_quantize(x, scale, is_sf_swizzled_layout=False)
                    x = dequantize(codes, block_scales.view(len(x), -1).view(torch.float8_e4m3fn)) / scale
                _, kernel = layers.errors(module, x, logits, torch.cat(results), tensors, _arithmetic(module))
                assert kernel < 0.006, (gather_bf16, tp, ep, counts, kernel)


def measured_alike(rank: int) -> None:
    """Opposite noise, then a rank that cannot measure, then one that has measured before: the same split on both."""
    import tempfile

    from tests import layers
    from tests.checkpoints import random_experts
    from tests.clock import Clock, standing_in
    from trtllm_b12x import votes
    from trtllm_b12x.crossover import deciding, measuring, store
    from trtllm_b12x.crossover.table import HOST, Times

    def noisy(name: str, tokens: int) -> float:
        noise = (tokens % 7 - 3) / 10 * (1 - 2 * rank)
        return 10.0 if name == HOST else (10 if 4 <= tokens <= 16 else 2 if tokens < 32 else 30) * (1 + noise)

    def fails() -> None:
        raise MemoryError("no memory to measure")

    family = os.environ["TRTLLM_B12X_KERNELS"]
    os.environ["TRTLLM_B12X_CROSSOVER"] = "auto"
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    os.environ["TRTLLM_B12X_GATHER_BF16"] = "1"
    for experts, case in ((4, "both measure"), (6, "one cannot"), (8, "one has stored")):
        with standing_in(Clock(noisy, fails if case == "one cannot" and rank == 1 else lambda: None)) as clock:
            for tp, ep, dp in ((2, 1, False), (1, 2, True)):
                mapping = {"world_size": WORLD, "rank": rank, "tp_size": WORLD, "moe_tp_size": tp, "moe_ep_size": ep}
                tensors = random_experts(experts, 128, 256)
                module = layers.create(experts, 128, 256, mapping={**mapping, "enable_attention_dp": dp}, reduce_results=not dp)
                backend = layers.load(module, tensors).backend
                if case == "one has stored" and rank == 1:
                    key = deciding.key(backend.kernel.geometry, torch.device("cpu"), backend.schedule, tuned=True)
                    points = {tokens: {family: noisy(family, tokens), HOST: 10.0} for tokens in (1, 2, 4, 8, 16, 32, 64)}
                    store.keep(key, Times(points))
                start = time.monotonic()
                for counts in ([100, 3], [3, 7]):
                    x, logits = layers.inputs(module, counts[rank] if dp else 5, tensors, seed=rank * dp)
                    module(x, logits, **({"all_rank_num_tokens": counts} if dp else {}))
                assert time.monotonic() - start < deciding.WAIT_S
                chosen = [backend.schedule.split.pick(count, [family]) for count in range(1, 65)]
                heard = votes.share(backend._mapping, f"{case} {tp} {ep}", ",".join(map(str, chosen)), 5.0)
                assert heard is not None
                assert heard[0] == heard[1], (case, tp, ep, heard)
                assert set(chosen) == {family, None}
            assert len(clock.asked) == (0 if case == "one has stored" and rank == 1 else 2)
    assert measuring.possible(torch.device("cpu")) is False
    os.environ["TRTLLM_B12X_CROSSOVER"] = "64"


def measured_alike_without_a_path_of_the_host(rank: int) -> None:
    """Decode of MXFP8 is quicker below 29 tokens on one rank and below 9 on the other; both have the sum's answer."""
    import tempfile

    from tests import layers, mxfp8
    from tests.clock import Clock, standing_in
    from trtllm_b12x import settings, votes
    from trtllm_b12x.crossover.table import HOST

    os.environ["TRTLLM_B12X_CROSSOVER"] = "auto"
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    config = layers.host.QuantConfig(quant_algo=layers.host.QuantAlgo.MXFP8, group_size=32)
    with (
        settings.KERNELS.only(["triton", "grouped"]),
        standing_in(Clock(lambda name, tokens: 30.0 if name == HOST else tokens * (1 + 2 * rank))) as clock,
    ):
        for tp, ep in ((2, 1), (1, 2)):
            mapping = {"world_size": WORLD, "rank": rank, "tp_size": WORLD, "moe_tp_size": tp, "moe_ep_size": ep}
            module = layers.create(4, 256, 256, quant_config=config, mapping=mapping, reduce_results=True)
            layers.load(module, mxfp8.random_experts(4, 256, 256))
            module(torch.ones(5, 256, dtype=torch.bfloat16), torch.arange(20.0).view(5, 4))
            found = module.backend.schedule
            assert [found.at(tokens) is found.families["triton"] for tokens in (1, 14, 15, 64)] == [True, True, False, False]
            heard = votes.share(module.backend._mapping, f"MXFP8 {tp} {ep}", found.summary, 5.0)
            assert heard is not None
            assert all(line.endswith("triton 1-14, then grouped") for line in heard), heard
        assert len(clock.asked) == 2
    os.environ["TRTLLM_B12X_CROSSOVER"] = "64"


def a_kernel_that_one_rank_cannot_have(rank: int) -> None:
    """The other rank leaves its geometry to CUTLASS as well, with the reason; another geometry is served on both."""
    import trtllm_b12x
    from tests import layers
    from trtllm_b12x.kernels.reference import ReferenceKernel

    plan = ReferenceKernel.plan

    def fails_here(self: Any, geometry: Any, *arguments: Any) -> None:
        if rank == 1 and geometry.num_experts == 2:
            raise MemoryError("no memory for 2 experts")
        plan(self, geometry, *arguments)

    ReferenceKernel.plan = fails_here  # type: ignore
    for _ in range(3):  # layers of one geometry
        module, tensors = _layer(rank, 1, 2)
        x, logits = layers.inputs(module, 5, tensors)
        module(x, logits)
        assert [reason.name for reason in module.backend.verdict.reasons] == ["KERNEL_PLAN_FAILED"]
        assert f"{'' if rank else 'rank 1: '}MemoryError: no memory for 2 experts" in str(module.backend.verdict)
        assert module.backend.kernel is None
    served, _ = _layer(rank, 2, 1)
    assert served.backend.verdict.served
    assert trtllm_b12x.status().reasons == {"KERNEL_PLAN_FAILED": 1}


def a_later_load_is_asked_anew(rank: int) -> None:
    """Layers of one load keep to what became of the first of their sizes, also at a refit; the next load has another chance."""
    from tests import layers
    from tests.checkpoints import random_experts
    from trtllm_b12x.kernels.reference import ReferenceKernel

    plan, bind, tensors = ReferenceKernel.plan, ReferenceKernel.bind, random_experts(4, 128, 256)
    mapping = {"world_size": WORLD, "rank": rank, "tp_size": WORLD, "moe_ep_size": WORLD}
    planned, failing = [], False

    def counts(self: Any, *arguments: Any) -> None:
        planned.append(self)
        plan(self, *arguments)

    def may_fail(self: Any, *arguments: Any) -> None:
        if failing and rank == 1:
            raise MemoryError("no memory now")
        bind(self, *arguments)

    ReferenceKernel.plan, ReferenceKernel.bind = counts, may_fail  # type: ignore
    modules = [layers.create(4, 128, 256, mapping=mapping, layer_idx=index) for index in range(4)]
    for index, module in enumerate(modules):
        failing = index == 1
        layers.load(module, tensors)
    assert [module.backend.kernel is not None for module in modules] == [True, False, False, False]
    assert len(planned) == 2 + rank  # rank 1 could have had the third, and heard that rank 0 did not try
    for module in modules:
        layers.load(module, tensors)
    assert [module.backend.verdict.served for module in modules] == [True, False, False, False]
    later = layers.load(layers.create(4, 128, 256, mapping=mapping), tensors)
    assert later.backend.kernel is not None
    ReferenceKernel.plan, ReferenceKernel.bind = plan, bind  # type: ignore


def votes_about_layers(rank: int) -> None:
    """Each vote is about one layer: met in another order, built on one rank alone, or failing at the second of its sizes."""
    from tests import layers
    from tests.checkpoints import random_experts
    from trtllm_b12x.kernels.reference import ReferenceKernel

    bind = ReferenceKernel.bind
    failing: set[int] = set()

    def fails_where_told(self: Any, *given: Any) -> None:
        if self.geometry.num_experts in failing:
            raise MemoryError("no memory for A")
        bind(self, *given)

    ReferenceKernel.bind = fails_where_told  # type: ignore
    mapping = {"world_size": WORLD, "rank": rank, "tp_size": WORLD, "moe_ep_size": WORLD}
    a, b, c = (layers.create(experts, 128, 256, mapping=mapping, layer_idx=0) for experts in (4, 8, 12))
    failing.update({2} if rank == 1 else {})
    for module, experts in ((a, 4), (b, 8), (c, 12)) if rank else ((b, 8), (c, 12), (a, 4)):
        layers.load(module, random_experts(experts, 128, 256))
        if rank:  # a draft model of this rank, after each
            layers.load(layers.create(4, 128, 256), random_experts(4, 128, 256))
    found = {experts: str(module.backend.verdict) for experts, module in ((4, a), (8, b), (12, c))}
    assert found[8] == found[12] == os.environ["TRTLLM_B12X_KERNELS"], found
    assert f"KERNEL_PLAN_FAILED: {'' if rank else 'rank 1: '}MemoryError: no memory for A" in found[4]

    module, _ = _layer(rank, 2, 1)
    assert module.backend.verdict.served
    failing.update({4} if rank == 1 else {})
    for _ in range(2):
        second, _ = _layer(rank, 2, 1)
        assert [reason.name for reason in second.backend.verdict.reasons] == ["KERNEL_PLAN_FAILED"]
        assert second.backend.kernel is None
    assert module.backend.verdict.served


def what_is_gathered_is_agreed(rank: int) -> None:
    """bf16 tokens only where every rank serves the layer: by its switch, by its kernel, and where the layer is the host's own."""
    from tests import layers
    from trtllm_b12x import votes
    from trtllm_b12x.kernels.reference import ReferenceKernel

    def judged(reasons: list[str], **arguments: Any) -> None:
        module, tensors = _layer(rank, 1, 2, attention_dp=True, **arguments)
        assert [reason.name for reason in getattr(module.backend, "verdict", Verdict()).reasons] == reasons
        for counts in ([3, 5], [40, 20]):
            x, logits = layers.inputs(module, counts[rank], tensors, seed=rank)
            result = module(x, logits, all_rank_num_tokens=counts)
            assert layers.errors(module, x, logits, result, tensors)[0] < 0.05, counts

    start = time.monotonic()
    os.environ["TRTLLM_B12X_GATHER_BF16"] = str(1 - rank)
    judged(["ATTENTION_DP"] if rank else ["KERNEL_PLAN_FAILED"])
    os.environ["TRTLLM_B12X_GATHER_BF16"] = "1"
    plan = ReferenceKernel.plan
    if rank == 1:
        ReferenceKernel.plan = lambda *arguments: 1 / 0  # type: ignore
    judged(["KERNEL_PLAN_FAILED"])
    ReferenceKernel.plan = plan  # type: ignore
    judged([])
    assert time.monotonic() - start < votes.PRESENCE_S


def a_rank_without_the_package(rank: int) -> None:
    """Nothing of ours is built on rank 1: named once by the other, which gathers as the host does and waits once."""
    from tests import layers
    from trtllm_b12x import votes
    from trtllm_b12x.log import logger

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    os.environ["TRTLLM_B12X_GATHER_BF16"] = "1"
    votes.PRESENCE_S = 1.0
    for _ in range(3):
        module, tensors = _layer(rank, 1, 2, attention_dp=True, promote=rank == 0)
        if rank == 0:
            (rejection,) = module.backend.verdict.rejections
            assert rejection.detail == "rank 1 does not answer"
        x, logits = layers.inputs(module, 5, tensors, seed=rank)
        assert layers.errors(module, x, logits, module(x, logits, all_rank_num_tokens=[5, 5]), tensors)[0] < 0.05
    assert sum("no answer from ranks [1]" in line for line in lines) == 1 - rank


def in_turn(jobs: tuple[Callable[[int], None], ...], rank: int) -> None:
    """In the same processes, which take seconds to start."""
    for job in jobs:
        job(rank)


EMBEDDED = [
    pytest.param(jobs, marks=pytest.mark.embedded)
    for jobs in (
        (a_later_load_is_asked_anew, a_kernel_that_one_rank_cannot_have),
        (votes_about_layers,),
        (measured_alike_without_a_path_of_the_host, what_is_gathered_is_agreed),
        (a_rank_without_the_package,),
    )
]
"""In doubles: MPI workers, in test_hosts.py."""


@pytest.mark.parametrize("kernels", ["b12x", pytest.param("triton", marks=pytest.mark.embedded)])
@pytest.mark.parametrize("jobs", [(reduced, attention_dp, measured_alike), *EMBEDDED], ids=lambda jobs: jobs[0].__name__)
def test_ranks(jobs: tuple[Callable[[int], None], ...], kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", kernels)
    if kernels == "triton":  # its ranks send what they send without it, and agree on nothing
        jobs = tuple(job for job in jobs if job is not what_is_gathered_is_agreed)
    run_ranks(functools.partial(in_turn, jobs), tmp_path)
