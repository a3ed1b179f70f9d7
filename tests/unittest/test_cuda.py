"""On a GPU of any kind: the same numbers as on the CPU, and streams that overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts
from trtllm_b12x.engines.trtllm.embedded import AuxStreamType
from trtllm_b12x.tools import verify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def on_gpu(gated: bool = True, **arguments: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    tensors = random_experts(6, 128, 160, gated)
    with torch.device("cuda"):
        module = layers.create(6, 128, 160, top_k=3, gated=gated, **arguments)
    return layers.load(module, tensors), tensors


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 63, 64])
def test_the_same_numbers(tokens: int, gated: bool) -> None:
    module, tensors = on_gpu(gated)
    assert all(tensor.is_cuda for tensor in module.backend.kernel.weights.tensors().values())
    x, logits = layers.inputs(module, tokens, tensors)
    none, kernel = layers.errors(module, x, logits, module(x.cuda(), logits.cuda()).cpu(), tensors)
    assert none < 0.05
    if tokens < 64:
        assert kernel < 0.005


@pytest.mark.parametrize("chunk", [40, 100])
def test_chunks_on_two_streams_are_concatenated_later(chunk: int) -> None:
    """Even chunks on the auxiliary stream, odd ones on the current one; outputs must not share memory."""
    streams = {AuxStreamType.MoeChunkingOverlap: torch.cuda.Stream()}
    module, tensors = on_gpu(max_num_tokens=1000, moe_max_num_tokens=chunk, aux_stream_dict=streams)
    assert module.aux_stream is streams[AuxStreamType.MoeChunkingOverlap]
    x, logits = layers.inputs(module, 300, tensors)
    with verify.kernel_calls(module.backend) as reached:
        results = [module(x.cuda(), logits.cuda()) for _ in range(5)]
    torch.cuda.synchronize()
    assert len(reached) == (5 * 8 if chunk == 40 else 0)
    for result in results:
        assert layers.errors(module, x, logits, result.cpu(), tensors)[0] < 0.05
    assert len({result.data_ptr() for result in results}) == 5


def test_shared_experts_on_another_stream() -> None:
    """As Nemotron-H runs them: the routed experts on one stream, a dense matrix on another, joined by events."""
    module, tensors = on_gpu()
    x, logits = layers.inputs(module, 20, tensors)
    x_gpu, logits_gpu = x.cuda(), logits.cuda()
    dense = torch.randn(128, 128, device="cuda", dtype=torch.bfloat16)
    other = torch.cuda.Stream()
    for _ in range(5):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            routed = module(x_gpu, logits_gpu)
        shared = x_gpu @ dense
        torch.cuda.current_stream().wait_stream(other)
        assert layers.errors(module, x, logits, routed.cpu(), tensors)[1] < 0.005
        torch.testing.assert_close(shared, x_gpu @ dense)
