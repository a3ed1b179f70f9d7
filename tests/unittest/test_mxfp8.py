"""MXFP8: numbers, quantization, what Triton multiplies, and what is asked of a family for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests import mxfp8
from trtllm_b12x import formats
from trtllm_b12x.decision import Deployment, Environment, KernelFeatures, RejectReason, decide
from trtllm_b12x.decision.families import grouped, grouped_nvfp4, triton_mxfp8
from trtllm_b12x.engines.trtllm import machine
from trtllm_b12x.environment import triton
from trtllm_b12x.formats.geometry import LayerShape
from trtllm_b12x.formats.mxfp8 import decode_e8m0, dequantize, quantize
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.catalog import KERNELS
from trtllm_b12x.kernels.triton.grouped import GroupedKernel
from trtllm_b12x.kernels.triton.jit import CompiledPlan
from trtllm_b12x.tools.verify.reference_formats import dequantize_mxfp8, fake_quantize_mxfp8


def test_every_scale() -> None:
    found = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert found[255].isnan()
    assert torch.equal(found[:255].double(), torch.ldexp(torch.ones(255).double(), torch.arange(255) - 127))


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


def test_weights_of_an_export() -> None:
    tensors = mxfp8.quantize_weight(torch.randn(64, 96))
    plain = dequantize_mxfp8(tensors["weight"], tensors["weight_scale"])
    assert torch.equal(plain, dequantize(tensors["weight"], tensors["weight_scale"]))


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
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "grouped")
    assert machine.resolve((problem, Deployment())).families == ("grouped",)
    monkeypatch.delenv("TRTLLM_B12X_KERNELS")
    assert machine.resolve((problem, Deployment())).families == ("triton", "grouped")


def test_other_formats_know_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRTLLM_B12X_KERNELS")
    assert [row.name for row in formats.FORMATS if not row.hosts_path] == ["MXFP8"]
    found = machine.resolve((LayerShape(quant_algo="NVFP4"), Deployment()))
    assert found.families == ("b12x", "triton", "grouped")
    assert KERNELS["grouped", "NVFP4"][0].features.quantizations == {"NVFP4"}
