# SPDX-License-Identifier: Apache-2.0
"""The embedded host's layouts, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts
from trtllm_b12x.engines.trtllm.embedded import ops
from trtllm_b12x.tools.verify import reference
from trtllm_b12x.tools.verify.bounds import exceeds


def build(tensors: dict[str, torch.Tensor], num_experts: int, h: int, i: int, gated: bool, **mapping: int) -> Any:
    return layers.load(layers.create(num_experts, h, i, gated=gated, promote=False, mapping=mapping), tensors).backend


def test_interleave_pads_with_zeros_and_reverses() -> None:
    scales = torch.randint(1, 256, (2, 130, 6), dtype=torch.uint8)
    flat = ops.block_scale_interleave(scales)
    assert flat.shape == (2 * 256 * 8,)
    plain = ops.block_scale_interleave_reverse(flat.view(2, 256, 8))
    assert torch.equal(plain[:, :130, :6], scales)
    assert int((plain != 0).sum()) == scales.numel()


def test_parameters_by_hand() -> None:
    tensors = random_experts(2, 128, 128)
    module = build(tensors, 2, 128, 128, gated=True)
    assert module.w3_w1_weight.shape == (2, 256, 8)
    assert module.w3_w1_weight.dtype == torch.int64
    assert module.w2_weight.shape == (2, 128, 8)
    assert module.w3_w1_weight_scale.shape == (2, 256, 2)
    assert module.w3_w1_weight_scale.dtype == torch.int32
    rows = module.w3_w1_weight.data.view(torch.uint8)
    assert torch.equal(rows[1, :128], tensors["1.w3.weight"])  # up first
    assert torch.equal(rows[1, 128:], tensors["1.w1.weight"])
    first = tensors["1.w3.weight"][0, :8].tolist()  # 16 FP4 codes, little endian in one int64
    assert int(module.w3_w1_weight[1, 0, 0]) & (2**64 - 1) == sum(byte << (8 * n) for n, byte in enumerate(first))
    interleaved = module.w3_w1_weight_scale.data.view(torch.uint8)[1].flatten()
    gate = tensors["1.w1.weight_scale"].view(torch.uint8)
    # Row 128 + 33 of [w3; w1] is w1's row 33: tile row 1 (of 2 column tiles each), lane 1, second quarter.
    assert interleaved[1024 + 16 + 4 : 1024 + 16 + 8].tolist() == gate[33, :4].tolist()

    assert module.fc31_input_scale.item() == pytest.approx(
        1 / max(tensors[f"{e}.w1.input_scale"].item() for e in range(2)), rel=1e-6
    )
    for e in range(2):
        expected = tensors[f"{e}.w1.weight_scale_2"].item() / module.fc31_input_scale.item()
        assert module.fc31_alpha[e].item() == pytest.approx(expected, rel=1e-6)


def test_input_scales_are_the_maximum_over_experts_of_other_ranks_too() -> None:
    tensors = random_experts(4, 128, 128)
    first = build(tensors, 4, 128, 128, True, world_size=2, rank=0, tp_size=2, moe_ep_size=2)
    last = build(tensors, 4, 128, 128, True, world_size=2, rank=1, tp_size=2, moe_ep_size=2)
    assert first.initial_local_expert_ids == [0, 1]
    assert last.initial_local_expert_ids == [2, 3]
    assert first.fc31_input_scale == last.fc31_input_scale


@pytest.mark.parametrize("size", [128, 160])
def test_the_host_splits_at_half_of_the_padded_rows(size: int) -> None:
    """Right at 128; wrong where 2 * I is not a multiple of 128: 320 rows are padded to 384 and split at 192."""
    tensors = random_experts(2, 128, size)
    module = build(tensors, 2, 128, size, gated=True)
    assert module.w3_w1_weight.shape[1] == -(-2 * size // 128) * 128
    x = torch.randn(8, 128).bfloat16()
    ids = torch.tensor([[0, 1]] * 8, dtype=torch.int32)
    router_weights = torch.full((8, 2), 0.5)
    packed, sf = module.quantize_input(x, post_quant_comm=False)
    result = module.run_moe(packed, ids, router_weights, sf, output_dtype=torch.bfloat16).float()
    call = reference.MoECall(x, ids, router_weights)
    (expected,) = reference.outputs(tensors, 2, True, [call], [reference.Arithmetic.NONE])[0]
    error = float((result - expected).norm() / expected.norm())
    assert error < 0.06 if size == 128 else error > 0.5


@pytest.mark.parametrize("gated", [True, False])
def test_against_the_reference_with_cutlass_rounding_points(gated: bool) -> None:
    tensors = random_experts(4, 128, 128, gated)
    module = build(tensors, 4, 128, 128, gated)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = reference.reference_for(tensors, 4, gated).move_off_ties(x)
    ids = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(n))[:2] for n in range(64)]).int()
    packed, sf = module.quantize_input(x, post_quant_comm=False)
    result = module.run_moe(packed, ids, torch.full((64, 2), 0.5), sf, output_dtype=torch.bfloat16).float()
    call = reference.MoECall(x, ids, torch.full((64, 2), 0.5))
    ((expected,),) = reference.outputs(tensors, 4, gated, [call], [reference.Arithmetic.CUTLASS])
    assert not exceeds(result, expected, 0.005)
