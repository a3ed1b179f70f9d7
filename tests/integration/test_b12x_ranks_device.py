"""Two processes with NCCL on two Hopper GPUs: reduced expert- and tensor-parallel layers on the real SM120 kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import test_distributed

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or torch.cuda.get_device_capability()[0] != 9, reason="needs two Hopper GPUs"
)


def reduced(rank: int) -> None:
    from tests import layers
    from tests.checkpoints import random_experts
    from tests.integration.sm12x_on_hopper import sm12x_on_hopper
    from trtllm_b12x.kernels.b12x.kernel import B12xKernel

    with sm12x_on_hopper() as bed, torch.device("cuda"):
        for gated in (True, False):
            tensors = _experts(random_experts, gated)
            whole = layers.load(layers.create(16, 512, 512, top_k=4, gated=gated), tensors)
            for tp, ep in ((2, 1), (1, 2)):
                mapping = {"world_size": 2, "rank": rank, "tp_size": 2, "moe_tp_size": tp, "moe_ep_size": ep}
                part = layers.create(16, 512, 512, top_k=4, gated=gated, mapping=mapping, reduce_results=True)
                part = layers.load(part, tensors)
                for module in (whole, part):
                    assert type(module.backend.kernel) is B12xKernel, module.backend.verdict
                for tokens in (1, 5, 8, 40, 63, 70):
                    with torch.device("cpu"):
                        x, logits = layers.inputs(part, tokens, tensors)
                    logits[-1, :8] = -torch.inf  # the last token has no expert on rank 0 of two
                    results = [module(x.cuda(), logits.cuda()).float() for module in (part, whole)]
                    torch.cuda.synchronize()
                    apart = float((results[0] - results[1]).norm() / results[1].norm())
                    assert apart < 0.01, (gated, tp, ep, tokens, apart)
                    with torch.device("cpu"):
                        none, kernel = layers.errors(part, x, logits, results[0].cpu(), tensors)
                    assert none < 0.05, (gated, tp, ep, tokens, none)
                    assert tokens >= 64 or kernel < 0.009, (gated, tp, ep, tokens, kernel)
                    print(rank, gated, tp, ep, tokens, bed.launched[-1].split("_")[0], apart, none, kernel, flush=True)


def _experts(random_experts: Any, gated: bool) -> Any:
    with torch.device("cpu"):
        return random_experts(16, 512, 512, gated)


def test_ranks(tmp_path: Path) -> None:
    test_distributed.run_ranks(reduced, tmp_path, backend="nccl")
