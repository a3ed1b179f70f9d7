# SPDX-License-Identifier: Apache-2.0
"""Real processes over gloo: reduced ranks, and attention-DP with uneven token counts in both forms."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import trtllm_b12x
from tests import layers
from tests.checkpoints import random_experts
from tests.communication import AllGatherReduceScatter, all_reduce
from trtllm_b12x.engines.trtllm.embedded import create_moe
from trtllm_b12x.engines.trtllm.embedded.ops import fp4_quantize
from trtllm_b12x.formats.nvfp4 import dequantize
from trtllm_b12x.kernels.reference import ReferenceKernel, UnquantizedReferenceKernel
from trtllm_b12x.tools.verify import kernel_calls
from trtllm_b12x.tools.verify.reference import Arithmetic

WORLD = 2
SPLITS = ((2, 1), (1, 2))
"""Parts of tensor and expert parallelism."""
KINDS = (ReferenceKernel, UnquantizedReferenceKernel)
TIMEOUT_S = 180
MIXED_BOUND = 0.3
"""Relative L2 of a result of which some activations are quantized to NVFP4 and others not; a lost partial sum is 0.7."""


def run_ranks(job: Callable[[int], None], directory: Path) -> None:
    """``job(rank)`` in :data:`WORLD` processes of one group; an exception in any, or a hang, fails."""
    context = mp.spawn(_rank, args=(job, str(directory / "store")), nprocs=WORLD, join=False)
    assert context is not None
    try:
        until = time.monotonic() + TIMEOUT_S
        while not context.join(timeout=max(0.0, until - time.monotonic())):
            assert time.monotonic() < until, "the ranks hang"
    finally:
        for process in context.processes:
            process.kill()


def _rank(rank: int, job: Callable[[int], None], store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    job(rank)
    dist.barrier()
    dist.destroy_process_group()


def _layer(rank: int, tp: int, ep: int, **arguments: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    tensors = random_experts(4, 128, 256)  # 128 per rank: the host alone serves attention-DP, and is wrong off its tile
    return layers.load(_empty(rank, tp, ep, **arguments), tensors), tensors


def _empty(rank: int, tp: int, ep: int, attention_dp: bool = False, **arguments: Any) -> Any:
    mapping = {"world_size": WORLD, "rank": rank, "tp_size": WORLD, "moe_tp_size": tp, "moe_ep_size": ep}
    with mock.patch.object(create_moe, "ConfigurableMoE", CommunicatingMoE):
        return layers.create(4, 128, 256, mapping={**mapping, "enable_attention_dp": attention_dp}, **arguments)


class CommunicatingMoE(create_moe.ConfigurableMoE):
    """The embedded host's wrapper, with communication between its ranks."""

    def __init__(self, reduce_results: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.reduce_results = reduce_results

    def forward(self, x: Any, router_logits: torch.Tensor, *, all_rank_num_tokens: Any = None, **named: Any) -> torch.Tensor:
        if all_rank_num_tokens is None:
            output = super().forward(x, router_logits, **named)
            return all_reduce(output) if self.reduce_results else output
        ranks = AllGatherReduceScatter(self.rank)
        (codes, sf), (ids, scales) = self.backend.quantize_input(x), self.routing_method.apply(router_logits)
        tokens, sf, *routes = ranks.dispatch(codes, sf, ids, scales, all_rank_num_tokens)
        return ranks.combine(self.backend.run_moe(tokens, *routes, sf, is_sf_swizzled=False, output_dtype=x.dtype))


def _distance(module: Any, x: torch.Tensor, logits: torch.Tensor, result: torch.Tensor, tensors: Any, arithmetic: str) -> float:
    """Relative L2 from float32 with these rounding points."""
    return layers.errors(module, x, logits, result, tensors, Arithmetic[arithmetic])[1]


def reduced(rank: int) -> None:
    for tp, ep in SPLITS:
        module, tensors = _layer(rank, tp, ep, reduce_results=True)
        for tokens in (40, 70):
            x, logits = layers.inputs(module, tokens, tensors)
            result = module(x, logits)
            served = module.backend.schedule.at(tokens)
            arithmetic, bound = ("NONE", 0.05) if served is None else (served.features.arithmetic, 0.006)  # rounds twice to bf16
            assert _distance(module, x, logits, result, tensors, arithmetic) < bound, (tp, ep, tokens)


def attention_dp(rank: int) -> None:
    """Tokens are gathered as the host quantizes them: b12x leaves them to it, Triton's kernels take them."""
    takes_quantized = os.environ["TRTLLM_B12X_KERNELS"] == "triton"
    for tp, ep in SPLITS:
        module, tensors = _layer(rank, tp, ep, attention_dp=True)
        for counts in ([3, 100], [40, 20], [1, 62], [100, 3]):
            on_kernel = takes_quantized and sum(counts) < 64
            # A few tokens are judged over many calls together: in three alone one code that rounds apart would show.
            calls = [layers.inputs(module, counts[rank], tensors, seed=2 * seed + rank) for seed in range(20)]
            results = []
            for x, logits in calls:
                with kernel_calls(module.backend) as reached:
                    results.append(module(x, logits, all_rank_num_tokens=counts))
                assert results[-1].shape == x.shape
                assert len(reached) == int(on_kernel), counts
            x, logits = (torch.cat(parts) for parts in zip(*calls, strict=True))
            if on_kernel:  # it is given what the host has quantized, and keeps FC2's input as it is
                scale = module.backend.fc31_input_scale
                codes, block_scales = fp4_quantize(x, scale, is_sf_swizzled_layout=False)
                x = dequantize(codes, block_scales.view(len(x), -1).view(torch.float8_e4m3fn)) / scale
            arithmetic, bound = ("UNQUANTIZED", 0.006) if on_kernel else ("NONE", 0.05)
            assert _distance(module, x, logits, torch.cat(results), tensors, arithmetic) < bound, (tp, ep, counts)


def _of_two_paths(rank: int, tp: int, ep: int, attention: bool, **arguments: Any) -> Any:
    """Check a result that the host's path and the family's kernels have made together; return the backend."""
    module, tensors = _layer(rank, tp, ep, reduce_results=not attention, attention_dp=attention, **arguments)
    x, logits = layers.inputs(module, 5, tensors, seed=rank * attention)
    result = module(x, logits, **({"all_rank_num_tokens": [5, 5]} if attention else {}))
    b12x = os.environ["TRTLLM_B12X_KERNELS"] == "b12x"
    arithmetic, bound = ("NONE", 0.05) if b12x else ("UNQUANTIZED", MIXED_BOUND)
    assert _distance(module, x, logits, result, tensors, arithmetic) < bound, (attention, tp, ep)
    return module.backend


def a_kernel_that_one_rank_cannot_have(rank: int) -> None:
    """Rank 1 is served by the host, rank 0 by its kernel: what they send each other is the same, and so are the numbers."""
    no_memory = mock.Mock(side_effect=MemoryError("no memory for kernels"))
    with ExitStack() as stack:
        for kind in KINDS if rank == 1 else ():
            stack.enter_context(mock.patch.object(kind, "plan", no_memory))
        for attention, (tp, ep) in itertools.product((False, True), SPLITS):
            backend = _of_two_paths(rank, tp, ep, attention)
            if not attention:
                assert (backend.kernel is None) == (rank == 1)
                assert [reason.name for reason in backend.verdict.reasons] == ["KERNEL_PLAN_FAILED"] * rank
    assert trtllm_b12x.status().layers


def a_rank_without_the_package(rank: int) -> None:
    """Nothing of ours is built on rank 1: the other serves its part and does not wait."""
    for attention in (False, True):
        _of_two_paths(rank, 1, 2, attention, promote=rank == 0)


def in_turn(jobs: tuple[Callable[[int], None], ...], rank: int) -> None:
    """In the same processes, which take seconds to start."""
    for job in jobs:
        job(rank)


@pytest.mark.parametrize("family", [pytest.param("b12x", marks=pytest.mark.all), "triton"])
@pytest.mark.parametrize(
    "jobs",
    [
        (reduced, attention_dp),
        pytest.param(
            (a_kernel_that_one_rank_cannot_have, a_rank_without_the_package), marks=[pytest.mark.embedded, pytest.mark.all]
        ),
    ],
    ids=lambda jobs: jobs[0].__name__,
)
def test_ranks(monkeypatch: pytest.MonkeyPatch, jobs: tuple[Callable[[int], None], ...], family: str, tmp_path: Path) -> None:
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", family)
    run_ranks(functools.partial(in_turn, jobs), tmp_path)
