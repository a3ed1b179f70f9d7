"""Tensor and expert parallelism, simulated through ``verify``: two models x TP x EP x token counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts, write_checkpoint
from trtllm_b12x.decision import RejectReason
from trtllm_b12x.tools.checkpoint import Checkpoint
from trtllm_b12x.tools.progress import UnusableError
from trtllm_b12x.tools.verify import Case, Ranks, resolve_on_ranks, verify_layer

TOKENS = [Case(1), Case(8), Case(63)]
EXPERTS, TOP_K = 4, 3
SIZES = {"qwen3-moe": 1280, "nemotron-h": 768}  # 1280 / 8 = 160, / 4 = 320; 768 / 8 = 96


@pytest.fixture(scope="module", params=sorted(SIZES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    gated = request.param == "qwen3-moe"
    experts = random_experts(EXPERTS, 128, SIZES[request.param], gated)
    return Checkpoint(write_checkpoint(tmp_path_factory.mktemp(request.param), [experts], TOP_K, gated=gated))


@pytest.mark.all("*-[14]-?", "*-?-4", "*-2-2", "*-8-1")
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_add_up(checkpoint: Checkpoint, tp: int, ep: int, caplog: pytest.LogCaptureFixture) -> None:
    (layer,) = checkpoint.layers
    report = verify_layer(checkpoint, layer, TOKENS, ranks=Ranks(tp, ep), require_b12x=True)
    assert report.passed, (report.failures, [case.failures for case in report.cases])
    assert [case.path for case in report.cases] == ["b12x"] * 3
    size = layer.intermediate_size // tp
    padded = tp * (-(-size // 256) * 256) - layer.intermediate_size
    matrices = EXPERTS * len(layer.projections)
    assert report.bytes is not None
    assert report.bytes.padding == matrices * padded * 128 * 9 // 16
    assert report.bytes.extra == 0
    assert report.bytes.scalars <= 16 * EXPERTS * tp
    assert [line.split(" refuses")[0] for line in report.warnings] == (
        ["TensorRT-LLM from August 2026 on"] if layer.gated and size % 64 else []
    )
    assert "answer" not in caplog.text  # nobody is asked about simulated ranks


def test_ranks_that_do_not_divide(checkpoint: Checkpoint) -> None:
    (layer,) = checkpoint.layers
    with pytest.raises(UnusableError, match="--tp 7"):
        verify_layer(checkpoint, layer, TOKENS, ranks=Ranks(tp=7))
    with pytest.raises(UnusableError, match="--ep 3"):
        verify_layer(checkpoint, layer, TOKENS, ranks=Ranks(ep=3))
    ranks = Ranks(tp=32 if layer.gated else 96)
    assert resolve_on_ranks(checkpoint, layer, ranks).reasons == (RejectReason.INTERMEDIATE_SIZE,)


@pytest.mark.parametrize("tokens", [3, 70])
def test_a_rank_without_a_local_expert_for_any_token_returns_zeros(tokens: int) -> None:
    tensors = random_experts(4, 128, 96)
    total: Any = 0
    for rank in range(4):
        mapping = {"world_size": 4, "rank": rank, "tp_size": 4, "moe_ep_size": 4}
        module = layers.load(layers.create(4, 128, 96, top_k=3, mapping=mapping), tensors)
        assert module.backend.expert_size_per_partition < module.routing_method.top_k
        x, logits = layers.inputs(module, tokens, tensors)
        logits[:, 2] = -torch.inf  # nobody chooses expert 2
        result = module(x, logits)
        assert bool(result.any()) == (rank != 2)
        total = total + result.float()
    assert layers.errors(module, x, logits, total, tensors)[0] < 0.05
