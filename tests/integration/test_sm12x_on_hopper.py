# SPDX-License-Identifier: Apache-2.0
"""The bed as far as it goes without a GPU: translation rule by rule, and every kernel that the package can select."""

from __future__ import annotations

import ctypes
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.results import beyond_bounds
from benchmarks.warmup import CARDS
from tests.integration.sm12x_on_hopper import UnknownInstructionError, probes
from tests.integration.sm12x_on_hopper.build import BuildError, device_functions, instructions
from tests.integration.sm12x_on_hopper.kernels import LISTED, Job, build_all
from tests.integration.sm12x_on_hopper.own import machine_code, translating_triton
from tests.integration.sm12x_on_hopper.own_run import MUTATIONS, differing, layers
from tests.integration.sm12x_on_hopper.run import BOUND
from tests.integration.sm12x_on_hopper.translate import RULES, opcodes, translate
from tests.integration.test_kernels_device import BOUNDS, KINDS, TOKENS, bounds_of
from tests.nvfp4_layer import distance, worst_token
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.formats import FORMATS
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.cards import MODELS, SHARED_MEMORY, Card
from trtllm_b12x.kernels.cuda.variant import variants
from trtllm_b12x.kernels.triton.decode import TritonMXFP8Kernel
from trtllm_b12x.kernels.triton.grouped import GroupedKernel, GroupedNVFP4Kernel


def module(*statements: str, maps: int = 0) -> str:
    """A kernel of these statements; its first ``maps`` parameters are tensor maps."""
    parameters = ",\n".join(f"\t.param .align 64 .b8 k_param_{i}[128]" for i in range(maps)) or "\t.param .u64 k_param_0"
    body = "\n".join(f"\t{statement}" for statement in statements)
    return f".version 9.4\n.target sm_120a\n.address_size 64\n.visible .entry k(\n{parameters}\n)\n{{\n{body}\n}}\n"


def test_the_rest_stays_as_it_is() -> None:
    source = module("add.s32 %r1, %r2, %r3;", "@%p1 bra $L__BB0_1;", "ret;")
    result = translate(source, "")
    assert result.ptx == source.replace("9.4", "8.7").replace("sm_120a", "sm_90a").replace("64\n.v", "64\n\n\n.v")
    assert not any(result.counts.values())


@pytest.mark.parametrize(
    "opcode", ["tcgen05.ld.sync", "add.rn.f32x2", "cvt.rn.bf16x2.ue8m0x2", "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32"]
)
def test_an_unknown_instruction_is_named(opcode: str) -> None:
    with pytest.raises(UnknownInstructionError, match=re.escape(opcode)):
        translate(module(f"{opcode} %r1, %r2;"), "")


def test_16_bits_are_widened() -> None:
    expected = "cvt.f32.bf16 wide0, %rs1; cvt.f32.bf16 wide1, %rs2; fma.rn.f32 %f1, wide0, wide1, %f2;"
    assert expected in translate(module("fma.rn.f32.bf16 %f1, %rs1, %rs2, %f2;"), "").ptx


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (f"@%p1 {probes.MMA.format(tid_a=0, tid_b=0)}", "predicated"),
        (probes.MMA.format(tid_a=0, tid_b=0).replace("{0,", "{%rs1,"), "byte selector %rs1"),
        ("cvt.rn.satfinite.e2m1x2.f32 %b1, 0f3F800000, %f1, %f2;", "this form of cvt.rn.satfinite.e2m1x2.f32"),
        ("add.rn.f32.bf16 %f1, {%rs1}, %f2;", "this form of add.rn.f32.bf16"),
    ],
)
def test_an_unknown_form_is_refused(statement: str, words: str) -> None:
    with pytest.raises(UnknownInstructionError, match=re.escape(words)):
        translate(module(statement), "")


LOAD = "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r4, %r5, %r6}], [%r7];"


@pytest.mark.parametrize(("parameter", "halved"), [(0, True), (1, False), (2, True), (3, False), (4, True), (5, False)])
def test_coordinates_of_4_bit_maps_are_halved(parameter: int, halved: bool) -> None:
    source = module(f"mov.b64 %rd1, k_param_{parameter};", "cvta.param.u64 %rd2, %rd1;", LOAD, maps=6)
    result = translate(source, "")
    assert ("shr.s32 pair, %r4, 1;" in result.ptx) is halved
    assert ("{pair, %r5, %r6}" in result.ptx) is halved
    assert result.entries[0].fp4_maps == (0, 2, 4)


def test_a_load_through_an_unknown_map_is_refused() -> None:
    with pytest.raises(UnknownInstructionError, match="%rd2"):
        translate(module("ld.global.u64 %rd2, [%rd1];", LOAD, maps=6), "")
    twice = ("mov.b64 %rd2, k_param_0;", "mov.b64 %rd2, k_param_1;")
    with pytest.raises(UnknownInstructionError, match="two parameters"):
        translate(module(*twice, LOAD, maps=6), "")


def test_staggering_follows_every_barrier() -> None:
    source = module("bar.sync \t0;", "bar.sync \t1, 128;", "ret;")
    assert translate(source, "", stagger=True).ptx.count("\tcall.uni b12x_stagger;") == 2


def test_the_last_run_is_within_the_bounds() -> None:
    result = json.loads((Path(__file__).parents[2] / "docs/sm12x-on-hopper.json").read_text())
    rows = [row for section in ("numbers", "GB10", "staggered") for row in result[section]]
    assert {row["kernel"] for row in rows} == {"direct", "static"}
    for row in rows:
        assert row["kernel_points"] <= BOUND, row
        assert row["float32"] <= 0.05, row
        assert row["unquantized"] <= 1.03, row
        assert row["reruns"] == 0, row


def test_every_rule_has_a_function_and_a_source() -> None:
    functions = device_functions()
    assert ".target sm_90a" in functions
    for name in ("b12x_mma_mxf4nvf4", "b12x_mma_mxf8f6f4_e4m3", "b12x_cvt_e2m1x2_f32", "b12x_cvt_f16x2_e2m1x2"):
        assert f" {name}(" in functions
    assert all("PTX ISA" in rule.source for rule in RULES)


@pytest.mark.parametrize("sm", [120, 121])
@pytest.mark.parametrize(
    ("kind", "form", "rule"),
    [
        (GroupedNVFP4Kernel, "NVFP4", "block-scaled FP4 mma"),
        (GroupedKernel, "MXFP8", "block-scaled E4M3 mma"),
        (TritonMXFP8Kernel, "MXFP8", ""),
    ],
)
def test_tritons_kernels_translate(kind: Any, form: str, rule: str, sm: int) -> None:
    """As this Triton compiles them, for both cards; products of 16 bits are the same on Hopper."""
    native = toolchain.block_scaled(sm)
    kernel = kind(Card(48, SHARED_MEMORY, sm))
    kernel.describe(Geometry(16, 4, 512, 256, "Swiglu", format=form), 256, torch.device("cuda"))
    for name, variant in {variant.name: variant for variant in kernel.variants()}.items():
        made = variant.compile_for(sm).asm["ptx"]
        counts = translate(made, device_functions()).counts
        assert not rule or bool(counts[rule]) == (native and name in ("fc1_kernel", "fc2_kernel")), (name, counts)
        code, words = machine_code(made)
        assert code.startswith(b"\x7fELF")
        assert "0 bytes spill stores" in words


def test_nvrtcs_kernels_translate_without_a_rule() -> None:
    (variant, *_) = variants(Geometry(16, 4, 512, 256, "Swiglu"), FORMATS[0])
    translation = translate(variant.assembled("sm_120a").rstrip("\0"), device_functions())
    assert not any(translation.counts.values())
    assert "b12x_" not in translation.ptx
    assert translation.entries[0].fp4_maps == ()


def test_a_block_has_the_cards_shared_memory() -> None:
    with translating_triton():
        from triton.backends.nvidia.compiler import CUDABackend

        with pytest.raises(BuildError, match="fc1_kernel takes 101377 bytes"):
            CUDABackend.make_cubin(None, "", {"name": "fc1_kernel", "shared": 101377}, None, 120)


def test_our_last_run_is_within_the_bounds() -> None:
    result = json.loads((Path(__file__).parents[2] / "docs/own-on-hopper.json").read_text())
    assert {row["layer"] for row in result["own"]} == set(layers())
    assert sum(row["calls"] for row in result["own"]) >= 2000
    assert beyond_bounds(result) == []
    assert [(row["format"], row["what"]) for row in result["mutations"]] == list(MUTATIONS)
    assert {row["card"] for row in result["starts"]} == set(CARDS)


@pytest.mark.parametrize(("form", "family"), [("NVFP4", "triton"), ("NVFP4", "grouped"), ("MXFP8", "triton"), ("MXFP8", "cuda")])
def test_the_largest_card_takes_every_kernel_of_the_list(form: str, family: str) -> None:
    counts = sorted({count for cards in MODELS.values() for count in cards.values()}, reverse=True)
    for geometry in (g for of in layers().values() for g in of if g.format == form and g.hidden_size % 128 == 0):
        cards = list(differing(KINDS[family, form], geometry, TOKENS[family][-1], counts))
        assert [card.multiprocessors for card in cards] == counts[:1]


def test_a_token_that_lacks_columns_is_found() -> None:
    """The whole call's error hardly shows 8 of 512 columns of one token."""
    smallest, largest = (choose(bound for _, bound in map(bounds_of, KINDS)) for choose in (min, max))
    expected = torch.randn(2048, 512, generator=torch.Generator().manual_seed(0))
    found = expected.bfloat16()
    assert worst_token(found, expected) < smallest
    found[7, :8] = 0
    assert distance(found, expected) < min(BOUNDS.values())
    assert worst_token(found, expected) > 3 * largest
    expected[3] = 0  # a token without routes
    found = expected.bfloat16()
    found[3, 0] = 1
    assert worst_token(found, expected) > largest


@pytest.mark.parametrize("instruction", ["cvt.rn.satfinite.e2m1x2.f32 %b1, %f1, %f2;", "cvt.rn.f16x2.e2m1x2 %r3, %b1;"])
def test_a_predicated_call_is_refused(instruction: str) -> None:
    (probe,) = (text for text in (probes.TO_E2M1, probes.FROM_E2M1) if instruction in text)
    assert translate(probe, "").counts
    with pytest.raises(UnknownInstructionError, match="a predicated cvt"):
        translate(probe.replace(instruction, f"@%p1 {instruction}"), "")


def test_each_mutation_changes_something() -> None:
    source = instructions() + translate(probes.PAIRS, "").ptx
    assert all(what in source for what, _ in MUTATIONS.values())


def test_tensor_maps_are_rewritten(tmp_path: Path) -> None:
    """Words as the CuTe DSL writes them for 256 experts of 256 x 512 elements, boxes of 128 x 128, swizzled by 64 bytes."""
    rewrite = probes.tensor_map_rewriter(tmp_path)
    fp4 = (ctypes.c_uint32 * 32)()
    fp4[2] = 2 << 4 | 11 << 7 | 2 << 13
    fp4[8:11] = [511, 255, 255]
    box = (ctypes.c_uint8 * 128).from_buffer(fp4)
    box[0x37], box[0x38] = 127, 127
    other = bytes(fp4)
    assert rewrite(fp4) == 1
    assert fp4[2] == 2 << 4 | 2 << 13
    assert fp4[8:11] == [255, 255, 255]
    assert (box[0x37], box[0x38]) == (63, 127)
    once = bytes(fp4)
    assert rewrite(fp4) == 0
    assert bytes(fp4) == once != other


def test_opcodes() -> None:
    assert opcodes(
        "\tmov.b64 {lo, hi}, %rd1; // add.f32\nL1:\n\t@!%p3 bra.uni L1;\n\t{ .reg .b32 t; add.s32 t, 1, 2; }\n\tret;"
    ) == {"mov.b64", "bra.uni", "add.s32", "ret"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The listed kernels, compiled, translated, assembled and linked."""
    return list(build_all(LISTED, os.cpu_count() or 1, tmp_path_factory.mktemp("kernels")))


@pytest.mark.all
def test_the_list_is_what_the_package_can_select(built: list[dict[str, Any]]) -> None:
    kinds = {(kernel["name"].split("_")[0], kernel["shape"]["gated"]) for kernel in built}
    assert kinds == {(kind, gated) for kind in ("direct", "static") for gated in (True, False)}
    assert len(built) == len(LISTED)


@pytest.mark.all
@pytest.mark.parametrize("index", range(len(LISTED)), ids=lambda i: _name(LISTED[i]))
def test_a_kernel_translates(built: list[dict[str, Any]], index: int) -> None:
    kernel, job = built[index], LISTED[index]
    counts = kernel["counts"]
    direct = kernel["name"].startswith("direct")
    assert kernel["target"] == job.options.target
    assert kernel["sm_count"] == job.sm_count
    assert counts["float32 to E2M1"] > 0
    assert bool(counts["block-scaled FP4 mma"]) is not direct
    assert bool(counts["bulk tensor load of 4-bit elements"]) is not direct
    assert bool(counts["E2M1 to float16"]) is direct
    assert max(kernel["registers"]) <= 255
    assert kernel["spilled_bytes"] < 2048


def _name(job: Job) -> str:
    return f"{job.shape.name}-{job.tokens}-{job.kernel}-sm{job.options.sm}"
