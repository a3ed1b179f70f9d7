"""The number formats, against values worked out by hand and against the judge's own arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_b12x.formats import nvfp4
from trtllm_b12x.kernels.self_test import _off_ties
from trtllm_b12x.tools.verify import reference as strict_reference
from trtllm_b12x.tools.verify import reference_formats as reference

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_every_code_decodes_to_its_value_and_rounds_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = nvfp4.decode_e2m1(codes)
    assert values.tolist() == VALUES + [-v for v in VALUES]
    assert nvfp4.round_to_e2m1(values).tolist() == codes.tolist()


def test_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    # 0.25 -> 0, 0.75 -> 1.0, 1.25 -> 1.0, 1.75 -> 2.0, 2.5 -> 2.0, 3.5 -> 4.0, 5.0 -> 4.0
    assert nvfp4.decode_e2m1(nvfp4.round_to_e2m1(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    above = nvfp4.decode_e2m1(nvfp4.round_to_e2m1(torch.nextafter(ties, torch.tensor(9.0))))
    assert above.tolist() == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_saturation_and_nan() -> None:
    odd = torch.tensor([7.0, -1e30, float("inf"), float("-inf"), float("nan"), -0.0])
    assert nvfp4.round_to_e2m1(odd).tolist() == [7, 15, 7, 15, 7, 8]


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
def test_rounding_agrees_with_the_judge(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    assert torch.equal(nvfp4.decode_e2m1(nvfp4.round_to_e2m1(values)), reference._nearest(values, reference._E2M1).float())


@given(st.lists(st.floats(0, 1000, width=32), min_size=1, max_size=64))
def test_block_scales_agree_with_the_judge(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    assert torch.equal(nvfp4.round_to_e4m3(values).float(), reference._nearest(values, reference._E4M3).float())


def test_every_e4m3_code_is_its_own_nearest() -> None:
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(reference._nearest(values, reference._E4M3).float(), values)


def test_packing_puts_the_even_column_low() -> None:
    packed = nvfp4.pack_fp4(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x0F]]
    assert nvfp4.unpack_fp4(packed).tolist() == [[1, 2, 15, 0]]


def test_dequantize_agrees_with_the_judge() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(1, 256)
    scales = torch.arange(32, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 32)
    ours = nvfp4.dequantize(packed, scales)
    assert torch.equal(ours, reference.dequantize_nvfp4(packed, scales, torch.tensor(1.0)))


@pytest.mark.parametrize("move_off_ties", [reference.move_off_ties, _off_ties], ids=["strict reference", "reference kernel"])
def test_move_off_ties_leaves_no_tie_and_moves_by_one_step(move_off_ties: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    amax = 3.3125  # a bf16 value whose triple is one too: block maxima of 3 * amax / 2**n tie
    scale = amax / 2688
    x = torch.zeros(4, 16, dtype=torch.bfloat16)
    x[0, 3], x[1, 0], x[2, :2] = 3 * amax / 4, -3 * amax / 8, torch.tensor([1.0, 0.3])
    moved = move_off_ties(x, scale)
    assert moved[0, 3] == torch.tensor(3 * amax / 4, dtype=torch.bfloat16) * (1 + 2**-7)
    assert moved[1, 0] < x[1, 0]
    assert torch.equal(moved[3], x[3])
    for arithmetic in (strict_reference.Arithmetic.KERNEL, strict_reference.Arithmetic.NONE):
        for gated in (True, False):
            up, down = (
                reference.fake_quantize_nvfp4(moved.float(), torch.tensor(scale * f), arithmetic, gated) / f
                for f in (1 + 1e-6, 1 - 1e-6)
            )
            torch.testing.assert_close(up, down, rtol=1e-5, atol=0)
