"""The embedded host's layouts, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import dequantized, random_experts
from trtllm_b12x.engines.trtllm import embedded as host
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


def test_fp4_quantize_by_hand() -> None:
    # Calibrated to amax 6 * 448 / 448 = 6: global scale 448.  Block 0 has amax 6 -> scale 448 (byte 0x7E); its values are
    # E2M1 values already.  Block 1 has amax 0.75 -> scale 56 (0x66), values times 8.  Block 2 is zero.
    x = torch.zeros(1, 48, dtype=torch.bfloat16)
    x[0, :4] = torch.tensor([6.0, -0.5, 1.5, 3.0])
    x[0, 16:18] = torch.tensor([0.75, -0.125])
    packed, scales = ops.fp4_quantize(x, torch.tensor(448.0), is_sf_swizzled_layout=False)
    assert scales.tolist() == [0x7E, 0x66, 0x00]
    assert packed[0, :2].tolist() == [0x97, 0x53]  # codes 7, 9; 3, 5
    assert packed[0, 8:10].tolist() == [0xA7, 0x00]  # 6 -> 7, -1 -> 10
    assert not packed[0, 16:].any()
    swizzled = ops.fp4_quantize(x, torch.tensor(448.0))[1]
    assert swizzled.shape == (128 * 4,)
    assert swizzled[:3].tolist() == scales.tolist()


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
    """Right at 128; wrong where 2 * I is no multiple of 128: 320 rows are padded to 384 and split at 192."""
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


def test_unquantized_experts() -> None:
    tensors = random_experts(2, 64, 48)
    plain = {f"{e}.{w}.weight": dequantized(tensors, e, w) for e in range(2) for w in ("w1", "w3", "w2")}
    module = host.CutlassFusedMoE(
        routing_method=host.RenormalizeMoeRoutingMethod(2),
        num_experts=2,
        hidden_size=64,
        intermediate_size=48,
        dtype=torch.float32,
        model_config=host.ModelConfig(),
    )
    module.load_weights([plain])
    module.post_load_weights()
    x = torch.randn(5, 64)
    ids = torch.tensor([[1, 0]] * 5)
    router_weights = torch.rand(5, 2)
    result = module.run_moe(*module.quantize_input(x)[:1], ids, router_weights)
    call = reference.MoECall(x, ids, router_weights)
    (expected,) = reference.outputs(plain, 2, True, [call], [reference.Arithmetic.NONE])[0]
    torch.testing.assert_close(result, expected)


def test_the_operator_checks_its_shapes() -> None:
    tensors = random_experts(1, 128, 128)
    module = build(tensors, 1, 128, 128, gated=True)
    module.w2_weight = torch.nn.Parameter(module.w2_weight.data[..., :4].contiguous(), requires_grad=False)
    packed, sf = module.quantize_input(torch.randn(1, 128).bfloat16())
    with pytest.raises(ValueError, match="256 rows"):
        module.run_moe(packed, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), sf, output_dtype=torch.bfloat16)
