# SPDX-License-Identifier: Apache-2.0
"""On a Hopper GPU: each replaced instruction by itself, over all its inputs."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import torch

from tests.integration.sm12x_on_hopper import probes

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """By the definition: sign, exponent of bias 1, one mantissa bit; float64."""
    sign, exponent, mantissa = codes.long() >> 3, codes.long() >> 1 & 3, codes.long() & 1
    magnitude = torch.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * 2.0 ** (exponent - 1).double())
    return torch.where(sign == 1, -magnitude, magnitude).double()


def ue4m3(codes: torch.Tensor) -> torch.Tensor:
    """By the definition: exponent of bias 7, three mantissa bits, 0x7F is NaN; bit 7 is not looked at; float64."""
    exponent, mantissa = codes.long() >> 3 & 15, codes.long() & 7
    value = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7).double())
    return torch.where(codes.long() & 0x7F == 0x7F, float("nan"), value.double())


def product(a: torch.Tensor, b: torch.Tensor, scales_a: torch.Tensor, scales_b: torch.Tensor) -> torch.Tensor:
    """``(n, 16, 8)`` float64."""
    left = e2m1(a) * ue4m3(scales_a).repeat_interleave(16, -1)
    right = e2m1(b) * ue4m3(scales_b).repeat_interleave(16, -1)
    return left @ right.transpose(1, 2)


def mma(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, c: torch.Tensor, ids: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    registers = probes.fragments(a, b, sa, sb, *ids)
    d = torch.empty(a.shape[0], 32, 4, device="cuda")
    probes.run(probes.mma_ptx(*ids), a.shape[0], 32, registers, probes.accumulators(c), d)
    return probes.matrix(d)


def codes(*shape: int, below: int = 16) -> torch.Tensor:
    return torch.randint(0, below, shape, device="cuda", dtype=torch.uint8)


@pytest.mark.parametrize("ids", [(a, b) for a in range(2) for b in range(4)])
def test_mma_on_random_operands(ids: tuple[int, int]) -> None:
    torch.manual_seed(0)
    a, b = codes(4096, 16, 64), codes(4096, 8, 64)
    sa, sb = (codes(4096, rows, 4, below=0x7F) | codes(4096, rows, 4, below=2) << 7 for rows in (16, 8))
    c = torch.randn(4096, 16, 8, device="cuda")
    expected = c.double() + product(a, b, sa, sb)
    size = c.double().abs() + product(a & 7, b & 7, sa, sb)  # the same sum without signs: what rounding is relative to
    assert bool(((mma(a, b, sa, sb, c, ids).double() - expected).abs() <= 64 * 2.0**-24 * size).all())


def test_mma_on_every_pair_of_codes_and_scales() -> None:
    """Each row has one code and scale, each column another, all else zero: 2048 x 2048 products, exact; NaN where a scale is."""
    both = torch.arange(2048, device="cuda")
    rows, columns = torch.meshgrid(both.view(128, 16)[:, 0] // 16, both.view(256, 8)[:, 0] // 8, indexing="ij")
    rows, columns = rows.flatten(), columns.flatten()
    n = rows.numel()
    k = torch.arange(n, device="cuda") % 64
    a, b = torch.zeros(n, 16, 64, device="cuda", dtype=torch.uint8), torch.zeros(n, 8, 64, device="cuda", dtype=torch.uint8)
    sa, sb = (
        torch.full((n, 16, 4), 0x38, device="cuda", dtype=torch.uint8),
        torch.full((n, 8, 4), 0x38, device="cuda", dtype=torch.uint8),
    )
    for matrix, scales, first, height in ((a, sa, rows * 16, 16), (b, sb, columns * 8, 8)):
        which = first.unsqueeze(1) + torch.arange(height, device="cuda")
        at = k.view(n, 1, 1).expand(n, height, 1)
        matrix.scatter_(2, at, (which % 16).to(torch.uint8).unsqueeze(-1))
        scales.scatter_(2, at // 16, (which // 16).to(torch.uint8).unsqueeze(-1))
    result = mma(a, b, sa, sb, torch.zeros(n, 16, 8, device="cuda"))
    expected = product(a, b, sa, sb).float()
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(0.5), expected.nan_to_num(0.5))


def ones_by_turns(rows: int, columns: int, one: int) -> torch.Tensor:
    """Codes ``(rows * columns, rows, columns)``: the code of 1.0 at each place in turn, zero elsewhere."""
    n = rows * columns
    return (torch.eye(n, device="cuda", dtype=torch.uint8) * one).view(n, rows, columns)


@pytest.mark.parametrize("of_a", [True, False])
def test_mma_at_every_position(of_a: bool) -> None:
    """One element of A (or B) at a time against a random other matrix: every lane, register and nibble."""
    torch.manual_seed(1)
    one = ones_by_turns(16 if of_a else 8, 64, 2)
    n = len(one)
    other = codes(n, 8 if of_a else 16, 64)
    a, b = (one, other) if of_a else (other, one)
    sa, sb = codes(n, 16, 4, below=0x7F), codes(n, 8, 4, below=0x7F)
    result = mma(a, b, sa, sb, torch.zeros(n, 16, 8, device="cuda"))
    assert torch.equal(result, product(a, b, sa, sb).float())


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    return torch.where(codes >= 0x80, -1.0, 1.0) * ue4m3(codes)


def e8m0(codes: torch.Tensor) -> torch.Tensor:
    """float64; 255 is NaN."""
    return torch.where(codes == 255, float("nan"), torch.exp2(codes.double() - 127))


def mma_e4m3(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, c: torch.Tensor, ids: tuple[int, ...]
) -> torch.Tensor:
    registers = probes.fragments(a, b, sa, sb, *ids)
    d = torch.empty(a.shape[0], 32, 4, device="cuda")
    probes.run(
        probes.mma_ptx(ids[0], ids[1], probes.MMA_E4M3, ids[2], ids[3]), a.shape[0], 32, registers, probes.accumulators(c), d
    )
    return probes.matrix(d)


@pytest.mark.parametrize("ids", [(0, 0, 0, 0), (1, 0, 2, 0), (0, 1, 0, 3), (1, 2, 3, 1), (0, 3, 1, 2)])
def test_mma_of_e4m3_on_random_operands(ids: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    n = 4096
    a, b = codes(n, 16, 32, below=256), codes(n, 8, 32, below=256)
    a[(a & 0x7F) == 0x7F], b[(b & 0x7F) == 0x7F] = 0, 0
    sa, sb = (torch.randint(100, 155, (n, rows, 1), device="cuda", dtype=torch.uint8) for rows in (16, 8))
    c = torch.randn(n, 16, 8, device="cuda")
    factor = e8m0(sa) * e8m0(sb).transpose(1, 2)
    expected = c.double() + (e4m3(a) @ e4m3(b).transpose(1, 2)) * factor
    size = c.double().abs() + (e4m3(a).abs() @ e4m3(b).abs().transpose(1, 2)) * factor
    assert bool(((mma_e4m3(a, b, sa, sb, c, ids).double() - expected).abs() <= 64 * 2.0**-24 * size).all())


@pytest.mark.parametrize("of_a", [True, False])
def test_mma_of_e4m3_at_every_position_and_of_every_pair_of_scales(of_a: bool) -> None:
    """One 1.0 in A (or B) against a random other matrix; then one product of 1 by 1 with each pair of scales."""
    torch.manual_seed(1)
    one = ones_by_turns(16 if of_a else 8, 32, 0x38)
    n = len(one)
    other = codes(n, 8 if of_a else 16, 32, below=0x7F)
    a, b = (one, other) if of_a else (other, one)
    sa, sb = (torch.randint(100, 150, (n, rows, 1), device="cuda", dtype=torch.uint8) for rows in (16, 8))
    zero = torch.zeros(n, 16, 8, device="cuda")
    expected = (e4m3(a) @ e4m3(b).transpose(1, 2)) * e8m0(sa) * e8m0(sb).transpose(1, 2)
    assert torch.equal(mma_e4m3(a, b, sa, sb, zero, (0, 0, 0, 0)), expected.float())
    every = torch.arange(256, device="cuda", dtype=torch.uint8)
    sa, sb = every.view(16, 1, 16, 1).expand(16, 32, 16, 1), every.view(1, 32, 8, 1).expand(16, 32, 8, 1)
    a, b = (torch.full((512, rows, 32), 0, device="cuda", dtype=torch.uint8) for rows in (16, 8))
    a[..., 0], b[..., 0] = 0x38, 0x38
    found = mma_e4m3(a, b, sa.reshape(512, 16, 1), sb.reshape(512, 8, 1), zero[:1].expand(512, 16, 8).contiguous(), (0, 0, 0, 0))
    wanted = (e8m0(sa) * e8m0(sb).transpose(2, 3)).float().view(512, 16, 8)
    wanted[wanted.abs() < 2.0**-126] = 0  # subnormal: the instruction's own result is not known
    found[found.abs() < 2.0**-126] = 0
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(0.5), wanted.nan_to_num(0.5))


def test_pairs_of_float32() -> None:
    given = torch.randn(4, 2, device="cuda")
    given[3] *= 2.0**-130
    out = torch.empty(8, 2, device="cuda")
    probes.run(probes.PAIRS, 1, 1, given, out)
    a, b, c, d = given.double()
    wanted = torch.stack((a * b + c, a + b, a * b, a - b, a * b, a - b, torch.zeros_like(d), 2 * d)).float()
    assert torch.equal(out.cpu(), wanted.cpu())  # the GPU's comparison may take subnormals for zero


def test_float32_and_16_bits() -> None:
    """Every bfloat16."""
    narrow = torch.arange(1 << 16, device="cuda").to(torch.int16).view(torch.bfloat16)
    given, out = torch.randn(1 << 16, device="cuda"), torch.empty(1 << 16, device="cuda")
    probes.run(probes.MIXED, 256, 256, narrow, given, out)
    wide = narrow.float()
    wanted = (wide.double() * wide.double() + (wide + given).double()).float()
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize(
    "values", [(1.0, 3.0, 2.0), (3.0, -1.0, 2.0), (-5.0, -4.0, -3.0), (1.0, float("nan"), 0.5), (1.0, 2.0**-130, 2.0)]
)
def test_largest_of_three(values: tuple[float, ...]) -> None:
    out = torch.empty(3, device="cuda")
    probes.run(probes.LARGEST, 1, 1, torch.tensor(values, device="cuda"), out)
    largest, smallest, largest_or_nan = out.tolist()
    known = [value for value in values if value == value]
    assert largest == max(known)
    assert smallest == min(value if abs(value) >= 2.0**-126 else 0.0 for value in known)
    assert math.isnan(largest_or_nan) if len(known) < 3 else largest_or_nan == max(known)


def nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """By distance, ties to the even code, NaN to +6; float32 in, codes out."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=values.device, dtype=torch.float64)
    magnitude = values.abs().double().clamp(max=6)
    best = torch.zeros(values.shape, device=values.device, dtype=torch.uint8)
    distance = magnitude.clone()
    for code in range(1, 8):
        other = (magnitude - grid[code]).abs()
        closer = (other < distance) | ((other == distance) & (code % 2 == 0))
        best[closer] = code
        distance = torch.minimum(distance, other)
    best |= (values.view(torch.int32) < 0).to(torch.uint8) << 3
    return torch.where(values.isnan(), 7, best)


@pytest.mark.parametrize("chunk", range(16))
def test_to_e2m1_on_every_float(chunk: int) -> None:
    """All 2**32 of them as the lower operand; the upper one gets them in reverse."""
    size = 2**28
    bits = torch.arange(size, device="cuda", dtype=torch.int32) + (chunk - 8) * size
    low, high = bits.view(torch.float32), bits.flip(0).view(torch.float32)
    out = torch.empty(size, device="cuda", dtype=torch.uint8)
    probes.run(probes.TO_E2M1, size // 256, 256, high, low, out)
    expected = nearest_e2m1(low)
    assert torch.equal(out & 15, expected)
    assert torch.equal(out >> 4, expected.flip(0))


def test_from_e2m1_on_every_pair() -> None:
    pairs = torch.arange(256, device="cuda", dtype=torch.uint8)
    out = torch.empty(256, device="cuda", dtype=torch.int32)
    probes.run(probes.FROM_E2M1, 1, 256, pairs, out)
    halves = out.view(torch.float16).view(256, 2)
    expected = torch.stack((e2m1(pairs & 15), e2m1(pairs >> 4)), 1).half()
    assert torch.equal(halves.view(torch.int16), expected.view(torch.int16))  # negative zero keeps its sign


@pytest.mark.parametrize("swizzle", [0, 2], ids=["plain", "64 bytes"])
def test_tensor_load_of_4_bit_elements(swizzle: int, tmp_path: Path) -> None:
    """A 128 x 32 tile of bytes, wanted as 128 x 64 elements at several coordinates; hint and out-of-range rows included."""
    from cuda.bindings import driver

    data = codes(3, 256, 256, below=256)  # 512 elements of 4 bits per row
    dims, strides, box = (256, 256, 3), (256, 65536), (64, 128, 1)
    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        3,
        data.data_ptr(),
        [driver.cuuint64_t(d) for d in dims],
        [driver.cuuint64_t(s) for s in strides],
        [driver.cuuint32_t(b) for b in box],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave(0),
        driver.CUtensorMapSwizzle(swizzle),
        driver.CUtensorMapL2promotion(0),
        driver.CUtensorMapFloatOOBfill(0),
    )
    assert not int(status)
    words = [int(word) for word in encoded.opaque]
    raw = b"".join(word.to_bytes(8, "little") for word in words)
    # The same map as the CuTe DSL describes it on sm_120: element type 11, twice the elements in dimension 0 and its box.
    fp4 = (ctypes.c_uint32 * 32).from_buffer_copy(raw)
    fp4[2] |= 11 << 7
    fp4[8] = 2 * (fp4[8] + 1) - 1
    view = (ctypes.c_uint8 * 128).from_buffer(fp4)
    view[0x37] = 2 * (view[0x37] + 1) - 1
    assert probes.tensor_map_rewriter(tmp_path)(fp4) == 1
    assert bytes(fp4) == raw
    for first, row, plane in ((0, 0, 0), (128, 128, 1), (384, 64, 2), (0, 192, 2)):
        out = torch.empty(128, 64, device="cuda", dtype=torch.uint8)
        probes.run(probes.TENSOR_LOAD, 1, 1, *[bytes(fp4)] * 6, out, first, row, plane, out.numel())
        expected = torch.zeros_like(out)
        part = data[plane, row : row + 128, first // 2 : first // 2 + 64]
        expected[: part.shape[0]] = part
        if swizzle:  # 16-byte chunk c of row r is stored as chunk c ^ (r / 2 % 4)
            rows = torch.arange(128, device="cuda").unsqueeze(1)
            order = torch.arange(4, device="cuda") ^ (rows // 2 % 4)
            expected = torch.gather(expected.view(128, 4, 16), 1, order.unsqueeze(-1).expand(128, 4, 16)).view(128, 64)
        assert torch.equal(out, expected)
