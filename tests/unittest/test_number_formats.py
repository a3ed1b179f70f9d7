# SPDX-License-Identifier: Apache-2.0
"""Numbers of MXFP8 and NVFP4; what Triton multiplies of MXFP8, and what is asked of a family for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_b12x.decision import Deployment, Environment, KernelFeatures, Lacking, RejectReason, decide, families, resolve
from trtllm_b12x.decision.families import grouped, grouped_nvfp4, triton_mxfp8
from trtllm_b12x.engines.trtllm import machine
from trtllm_b12x.environment import triton
from trtllm_b12x.formats import mxfp4, nvfp4
from trtllm_b12x.formats.geometry import LayerShape
from trtllm_b12x.formats.mxfp8 import decode_e8m0, dequantize, quantize
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.self_test import _off_ties
from trtllm_b12x.kernels.triton.grouped import GroupedKernel
from trtllm_b12x.kernels.triton.jit import CompiledPlan
from trtllm_b12x.tools.verify import reference as strict_reference
from trtllm_b12x.tools.verify import reference_formats as reference
from trtllm_b12x.tools.verify.reference_formats import fake_quantize_mxfp8


def test_every_scale() -> None:
    found = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert found[255].isnan()
    assert torch.equal(found[:255].double(), torch.ldexp(torch.ones(255).double(), torch.arange(255) - 127))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_pair_of_fp4_times_every_scale_is_exact(dtype: torch.dtype) -> None:
    packed, scales = torch.arange(256, dtype=torch.uint8).expand(256, 256), torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    values, e4m3 = nvfp4.decode_e2m1(nvfp4.unpack_fp4(packed)), scales.view(torch.float8_e4m3fn)
    found = nvfp4.dequantize(packed, e4m3.expand(256, 32), dtype).float()
    assert torch.equal(found.nan_to_num(), (values * e4m3.float()).nan_to_num())
    if dtype != torch.float16:
        found = mxfp4.dequantize(packed, scales.expand(256, 16), dtype).float()
        assert torch.equal(found.nan_to_num(), (values * decode_e8m0(scales)).nan_to_num())


def test_activations_are_quantized_as_the_judge_has_it() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, 64, generator=generator) * torch.ldexp(torch.ones(400, 1), torch.randint(-100, 100, (400, 1)))
    values[0], values[1, :32], values[2, 5], values[3, 40], values[4, 3] = 0.0, 0.0, torch.nan, torch.inf, 2.0**-140
    values[5] = torch.arange(64) / 64 * 511.9  # beyond 448 of a power of two
    values = values.to(torch.bfloat16).float()
    codes, scales = quantize(values)
    found, expected = dequantize(codes, scales), fake_quantize_mxfp8(values)
    usable = expected.isfinite() & (values.abs().amax(1, keepdim=True) > 2.0**-110)  # float32 has no more room below
    assert torch.equal(found[usable], expected[usable])
    for row, block in ((2, 0), (3, 1)):
        assert int(scales[row, block]) == 255
        assert found[row, 32 * block : 32 * block + 32].isnan().all()
        assert expected[row, 32 * block : 32 * block + 32].isnan().all()
    assert (scales[0] == 0).all()
    assert not found[0].any()


def test_rounding_is_to_nearest_even_and_saturates() -> None:
    block = torch.zeros(1, 32)
    block[0, :6] = torch.tensor([256.0, 500.0, 17.0, 19.0, -272.0, 2.0**-10])  # steps of 2 from 16 on, of 32 from 256 on
    codes, scales = quantize(block)
    assert int(scales[0, 0]) == 127
    assert codes.float()[0, :6].tolist() == [256.0, 448.0, 16.0, 20.0, -256.0, 0.0]


@pytest.mark.parametrize(
    ("version", "sm", "native"),
    [("3.5.1", 120, False), ("3.6.0", 120, True), ("3.7.0", 121, False), ("3.8.0", 121, True), ("3.5.0", 90, True)],
)
def test_which_triton_multiplies_blocks(version: str, sm: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "version", lambda: version)
    assert (triton.upcast(sm) == "") is native
    assert native or version in triton.upcast(sm)
    assert triton.block_scaled(sm) is (native and sm >= 120)  # of other cards nothing is known


@pytest.mark.parametrize("family", [grouped, triton_mxfp8, grouped_nvfp4])
def test_an_upcast_serves_only_where_the_host_has_no_path(family: Callable[[Environment], KernelFeatures]) -> None:
    slow = Environment(upcast="Triton 3.5.1 multiplies bfloat16")
    features = family(slow)
    (algorithm,), group = features.quantizations, features.group_size
    problem = LayerShape(quant_algo=algorithm, group_size=group, activation="Swiglu", hidden_size=256, intermediate_size=96)
    refused = [RejectReason.UPCAST] if algorithm == "NVFP4" else []
    assert [rejection.reason for rejection in decide(problem, Deployment(), slow, features).rejections] == refused
    assert features.caveat == (slow.upcast if family is grouped else "")
    assert decide(problem, Deployment(), Environment(), features).served


@pytest.mark.parametrize("version", ["3.5.1", "3.6.0"])
def test_a_slow_product_is_said_once(version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(triton, "version", lambda: version)
    monkeypatch.setattr(GroupedKernel, "_make_plan", lambda self: CompiledPlan(None))
    for experts in (4, 8):
        GroupedKernel(Card(170, 99 << 10, 120)).plan(Geometry(experts, 2, 128, 64, "Swiglu"), 64, torch.device("cuda"))
    words = "Triton 3.5.1 multiplies bfloat16 on sm_120, which is slow; Triton 3.6 and newer have block-scaled products"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == (
        [f"grouped kernels: {words}"] if version == "3.5.1" else []
    )


def test_decode_alone_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has no path for prefill."""
    problem = LayerShape(quant_algo="MXFP8", group_size=32, activation="Swiglu", hidden_size=256, intermediate_size=96)
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "triton")
    assert machine.resolve((problem, Deployment())).reasons == (RejectReason.PREFILL,)
    assert "let it name kernels that serve any number" in str(machine.resolve((problem, Deployment())))
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "cuda,grouped")
    facts = Environment(triton_lacks=(Lacking("Triton is not installed", "pip install triton"),))
    features = {row.name: row.features(facts) for row in families.rows(("cuda", "grouped"), "MXFP8")}
    assert "(fix what keeps grouped from serving)" in str(resolve(problem, None, facts, features))  # not: unset a variable
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "grouped")
    assert machine.resolve((problem, Deployment())).families == ("grouped",)
    monkeypatch.delenv("TRTLLM_B12X_KERNELS")
    assert machine.resolve((problem, Deployment())).families == ("triton", "grouped")


# ---- NVFP4's numbers, against values worked out by hand and against the judge's own arithmetic -------------------------


GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        (GRID + [-value for value in GRID], list(range(16))),
        (TIES, [0, 2, 2, 4, 4, 6, 6]),  # to the even code
        (torch.nextafter(torch.tensor(TIES), torch.tensor(9.0)).tolist(), [1, 2, 3, 4, 5, 6, 7]),
        ([7.0, -1e30, float("inf"), float("-inf"), float("nan"), -0.0], [7, 15, 7, 15, 7, 8]),
    ],
    ids=["values", "ties", "above ties", "beyond"],
)
def test_codes_by_hand(values: list[float], codes: list[int]) -> None:
    assert nvfp4.round_to_e2m1(torch.tensor(values)).tolist() == codes
    if len(codes) == 16:
        assert nvfp4.decode_e2m1(torch.tensor(codes, dtype=torch.uint8)).tolist() == values


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
def test_rounding_agrees_with_the_judge(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    assert torch.equal(nvfp4.decode_e2m1(nvfp4.round_to_e2m1(values)), reference._nearest(values, reference._E2M1).float())


@given(st.lists(st.floats(0, 1000, width=32), min_size=1, max_size=64))
def test_block_scales_agree_with_the_judge(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    assert torch.equal(nvfp4.round_to_e4m3(values).float(), reference._nearest(values, reference._E4M3).float())


def test_packing_puts_the_even_column_low() -> None:
    packed = nvfp4.pack_fp4(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x0F]]
    assert nvfp4.unpack_fp4(packed).tolist() == [[1, 2, 15, 0]]


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
