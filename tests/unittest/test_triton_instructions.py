# SPDX-License-Identifier: Apache-2.0
"""The inline PTX that turns codes into 16-bit floats, executed here, one instruction after the other, on every code and scale."""

from __future__ import annotations

import re

import pytest
import torch

from trtllm_b12x.formats import mxfp4
from trtllm_b12x.formats.mxfp8 import decode_e8m0
from trtllm_b12x.formats.nvfp4 import decode_e2m1
from trtllm_b12x.kernels.triton import grouped_products, operands

Registers = dict[str, torch.Tensor]
"""32 bits each, as int64."""


def floats(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Low and high half of each register, ``(2, n)`` float64."""
    halves = torch.stack((bits & 0xFFFF, bits >> 16))
    return (halves - ((halves & 0x8000) << 1)).to(torch.int16).view(dtype).double()


def multiplied(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``mul.rn`` of both halves, which must be exact."""
    exact = floats(a, dtype) * floats(b, dtype)
    rounded = exact.to(dtype)
    assert torch.equal(rounded.double().nan_to_num(), exact.nan_to_num())
    return packed(*rounded)


def packed(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    low, high = (half.view(torch.int16).long() & 0xFFFF for half in (low, high))
    return low | high << 16


def execute(assembly: str, inputs: Registers, dtype: torch.dtype) -> Registers:
    state = dict(inputs)

    def read(operand: str) -> torch.Tensor:
        return state[operand] if operand in state else torch.tensor(int(operand, 0))

    for line in assembly.strip().strip("{}").split(";"):
        name, *rest = line.replace(",", " ").split() or [""]
        if name in ("", ".reg"):
            continue
        target, operands = rest[0], [read(operand) for operand in rest[1:]]
        if name == "mov.b32":
            state[target] = operands[0]
        elif name == "shl.b32":
            state[target] = operands[0] << operands[1] & 0xFFFFFFFF
        elif name == "shr.u32":
            state[target] = operands[0] >> operands[1]
        elif name == "mul.lo.u32":
            state[target] = operands[0] * operands[1] & 0xFFFFFFFF
        elif name == "and.b32":
            state[target] = operands[0] & operands[1]
        elif name == "lop3.b32":
            assert int(operands[3]) == 0xEA  # (a and b) or c
            state[target] = operands[0] & operands[1] | operands[2]
        elif name == "prmt.b32":
            source_bytes = operands[0] | operands[1] << 32
            picked = [source_bytes >> 8 * (int(operands[2]) >> 4 * i & 7) & 0xFF for i in range(4)]
            state[target] = picked[0] | picked[1] << 8 | picked[2] << 16 | picked[3] << 24
        elif re.match(r"(fma|mul)\.rn\.(bf16x2|f16x2)", name):
            state[target] = multiplied(operands[0], operands[1].expand_as(operands[0]), dtype)
            if name.startswith("fma"):  # plus negative zero, or NaN
                added = floats(operands[2].expand_as(state[target]), dtype)
                assert ((added == 0) & added.signbit() | added.isnan()).all()
                product = floats(state[target], dtype)
                state[target] = packed(*torch.where(added.isnan(), torch.nan, product).to(dtype))
        elif re.match(r"cvt\.rn\.(bf16x2|f16x2)\.f32", name):
            high, low = ((bits - ((bits & 0x80000000) << 1)).int().view(torch.float32).to(dtype) for bits in operands)
            state[target] = packed(low, high)
        elif name == "max.u32":
            state[target] = operands[0].maximum(operands[1])
        elif name == "min.u32":
            state[target] = operands[0].minimum(operands[1])
        elif name == "add.u32":
            state[target] = operands[0] + operands[1]
        else:
            raise AssertionError(f"{name} is not known here")
    return state


@pytest.mark.parametrize("kind", ["E4M3 as bfloat16", "E4M3 as float16", "E8M0 as bfloat16"])
def test_every_code_times_every_scale(kind: str) -> None:
    """A 256th of the product.  E8M0 from 2**-124 to 2**9, exact as far as bfloat16 has an exponent for it; NaN beyond, as 255."""
    dtype = torch.float16 if kind.endswith("float16") and "bf" not in kind else torch.bfloat16
    if kind.startswith("E8M0"):
        given = torch.arange(3, 256).repeat_interleave(64)
        scales, number = decode_e8m0(given.to(torch.uint8)).double(), given <= mxfp4.LARGEST_SCALE
        assembly = operands.MX_E2M1_BFLOAT16
    else:  # negative ones too, and NaN
        scales = torch.arange(256).repeat_interleave(64).to(torch.uint8).view(torch.float8_e4m3fn).double()
        given = (scales * 2.0 ** (118 if dtype is torch.bfloat16 else 6)).float().view(torch.int32).long() & 0xFFFFFFFF
        assembly, number = operands.E2M1_BFLOAT16 if dtype is torch.bfloat16 else operands.E2M1_FLOAT16, ~scales.isnan()
    generator = torch.Generator().manual_seed(0)
    codes = torch.stack([torch.randperm(16, generator=generator) for _ in scales])  # of two words, lowest nibble first
    words = (codes.view(-1, 2, 8) << 4 * torch.arange(8)).sum(2)
    state = execute(str(assembly.value), {"$8": words[:, 0], "$9": words[:, 1], "$10": given, "$11": given}, dtype)
    for product in range(8):
        found = floats(state[f"${product}"], dtype)
        for parity in range(2):
            code = codes[:, 8 * (product // 4) + 4 * parity + product % 4]
            expected = decode_e2m1(code).double() * scales / 256
            assert torch.equal(found[parity].isnan(), ~number)
            assert torch.equal(found[parity][number], expected[number]), (product, parity)
            assert torch.equal(found[parity][number].signbit(), ((code >= 8) ^ scales.signbit())[number])


def test_every_e4m3_of_a_word() -> None:
    """Four bytes to bfloat16 times 2**-120."""
    codes = torch.arange(256).view(-1, 4)
    words = (codes << 8 * torch.arange(4)).sum(1)
    state = execute(str(grouped_products._BITS.value), {"$2": words}, torch.bfloat16)
    found = torch.cat([floats(state[f"${i}"], torch.bfloat16).T for i in range(2)], 1) * 2.0**120
    expected = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    assert torch.equal(found[~expected.isnan()], expected[~expected.isnan()])


def test_every_e4m3_times_every_scale() -> None:
    """Of those whose product bfloat16 has an exponent for: exact, beyond it rounding is no matter."""
    scales = torch.arange(8, 240).repeat_interleave(256)
    codes = torch.arange(256).repeat(232)
    number = (codes & 0x7F) != 0x7F
    scales, codes = scales[number], codes[number]
    codes, scales = codes[: len(codes) // 8 * 8].view(-1, 8), scales[: len(scales) // 8 * 8].view(-1, 8)
    same = (scales == scales[:, :1]).all(1)
    codes, scales = codes[same], scales[same, 0]
    words = (codes.view(-1, 2, 4) << 8 * torch.arange(4)).sum(2)
    inputs = {"$4": words[:, 0], "$5": words[:, 1], "$6": scales, "$7": scales}
    state = execute(str(operands.E4M3_BFLOAT16.value), inputs, torch.bfloat16)
    for product in range(4):
        found = floats(state[f"${product}"], torch.bfloat16)
        for parity in range(2):
            code = codes[:, 4 * (product // 2) + product % 2 + 2 * parity].to(torch.uint8).view(torch.float8_e4m3fn).double()
            assert torch.equal(found[parity], code * decode_e8m0(scales.to(torch.uint8)).double())
