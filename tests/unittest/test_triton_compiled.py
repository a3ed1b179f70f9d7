# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compiled without a GPU, for Hopper and both Blackwells of this package: what instructions they became."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from trtllm_b12x.environment import prove
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.formats import BY_TURNS, ROWS, WeightLayout
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.triton.decode import TritonKernel, TritonMXFP4Kernel, TritonMXFP8Kernel, TritonW4A16Kernel
from trtllm_b12x.kernels.triton.grouped import GroupedKernel, GroupedNVFP4Kernel
from trtllm_b12x.kernels.triton.variant import Variant

QWEN3_30B = Geometry(128, 8, 2048, 768, "Swiglu")
CARDS = {90: Card(132, 228 << 10, 90), 120: Card(188, 100 << 10, 120), 121: Card(48, 100 << 10, 121)}
INSTRUCTION = {GroupedKernel: "kind::mxf8f6f4.block_scale", GroupedNVFP4Kernel: "kind::mxf4nvf4.block_scale.scale_vec::4X"}
PARTS = {"fc1_kernel": 2, "fc2_kernel": 1}
"""Matrices that a kernel multiplies by."""
LIMIT = {"fc1_kernel": 7.2, "fc2_kernel": 7.6}
"""Lane instructions per byte of FP4 in the loop, of blocks of up to 16 routes; seen: 6.2 to 7.1 and 6.1 to 7.3 with Triton 3.9.
A conversion of layouts between codes and products adds one to each, scales that are spread by shuffles two."""

SERVED = [(90, 64, ()), (90, 128, ("fc1_kernel",)), (120, 64, ()), (120, 256, ("fc1_kernel",)), (121, 128, ("fc1_kernel",))]


_TOOLS = Path(os.environ.get("SASS_TOOLS") or Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*);")


def launched(
    card: Card, geometry: Geometry, tokens: int, *, quantized: bool = False, kind: type[TritonKernel] = TritonKernel
) -> tuple[Variant, ...]:
    """The kernels that a call of ``tokens`` launches on ``card``."""
    kernel = kind(card)
    kernel.describe(geometry, tokens, torch.device("cuda"))
    return kernel.variants_of_call(kernel.tiles(tokens), quantized)


def product_loop(cubin: Path) -> Counter[str]:
    """Opcodes of the longest loop with tensor core instructions."""
    text = subprocess.run([_TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    found: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if match := _LABEL.match(line):
            labels[match[1]] = len(found)
        elif match := _INSTRUCTION.match(line):
            found.append(match[1] + match[2])
    longest: list[str] = []
    for place, instruction in enumerate(found):
        match = re.search(r"BRA.*\((\.L_x_\d+)\)", instruction)
        if match and labels.get(match[1], place + 1) <= place:
            body = found[labels[match[1]] : place + 1]
            if len(body) > len(longest) and any("MMA" in line for line in body):
                longest = body
    return Counter(line.split()[0] for line in longest)


def resources(cubin: Path) -> dict[str, int]:
    """``REG``, ``STACK``, ``LOCAL`` and so on."""
    text = subprocess.run([_TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}


def inspected(
    variants: Iterable[Variant], capability: int, folder: Path
) -> Iterator[tuple[Variant, Any, dict[str, int], Counter[str]]]:
    """Each kernel with what Triton made of it, the resources that it uses, and the loop of its products."""
    for variant in variants:
        made, path = variant.compile_for(capability), folder / f"{variant.name}.cubin"
        path.write_bytes(made.asm["cubin"])
        yield variant, made, resources(path), product_loop(path) if variant.name in PARTS else Counter()


@pytest.mark.all("90-*", "120-256-*")
@pytest.mark.parametrize(("capability", "tokens", "only"), SERVED)
def test_what_the_compiler_made(capability: int, tokens: int, only: tuple[str, ...], tmp_path: Path) -> None:
    variants = [v for v in launched(CARDS[capability], QWEN3_30B, tokens) if not only or v.name in only]
    assert [v.name for v in variants] == [name for name in ("route_kernel", *PARTS) if not only or name in only]
    for variant, made, used, loop in inspected(variants, capability, tmp_path):
        ptx, warps = made.asm["ptx"], variant.options["num_warps"]
        assert re.search(rf"\.target sm_{capability}", ptx)
        assert used["STACK"] == used["LOCAL"] == 0, used
        if variant.name == "route_kernel":
            continue
        assert used["REG"] <= 168
        # The assembly takes two words of a row at a time: a lane's first registers must be neighboring columns.
        form = r"packed_element = 2.*tensor<\d+x\d+xi32, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = [24]}>"
        assert re.search(form, made.asm["ttgir"])
        # Two programs, with what each launch reserves, find room on a multiprocessor.
        assert 2 * (made.metadata.shared + 1024) <= CARDS[capability].shared_memory
        # Triton 3.9 has Hopper multiply 64 rows of four warps as one, with inputs in shared memory; 3.7 and older do not.
        group = f"wgmma.mma_async.sync.aligned.m64n{variant.constants['BM']}k16.f32.bf16.bf16" in ptx
        assert not group or (capability == 90 and warps >= 4)
        assert group or "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx
        assert "griddepcontrol.wait" in ptx
        assert any(code.startswith("HGMMA" if group else "HMMA") for code in loop)
        # Codes go to shared memory asynchronously, and from there, 16 bytes at a time, to the lanes that multiply them.
        assert any(code.startswith("LDGSTS") for code in loop)
        assert group or loop["LDS.128"]
        unwanted = ("LDSM", "SHFL", "LDG.", "LDL", "STL") + (() if group else ("STS",))
        assert not any(code.startswith(unwanted) for code in loop), loop
        size = PARTS[variant.name] * variant.constants["BN"] * variant.constants["BK"] // 2
        if variant.constants["BM"] <= 16:
            assert loop.total() * warps * 32 / size <= (10.2 if group else LIMIT[variant.name])


GPT_OSS: dict[str, Any] = {"activation": "SwigluBias", "bias": torch.bfloat16, "format": "MXFP4"}
OTHER_FORMATS = {
    "Qwen3.6 W4A16": (
        TritonW4A16Kernel, Geometry(256, 8, 2048, 512, "Swiglu", format="W4A16_NVFP4", layout=WeightLayout(scales=ROWS)), 7.6,
    ),
    "gpt-oss": (TritonMXFP4Kernel, Geometry(128, 4, 2880, 2944, layout=WeightLayout(hidden_multiple=128), **GPT_OSS), 7.2),
    "gpt-oss by turns": (
        TritonMXFP4Kernel, Geometry(128, 4, 2880, 2944, layout=WeightLayout(ROWS, BY_TURNS, 128), **GPT_OSS), 7.6,
    ),
}  # fmt: skip
"""Kernel, geometry, and lane instructions per byte of codes on SM120; seen: 6.0 to 6.7, 5.5 to 6.7 and 5.5 to 6.7."""


@pytest.mark.all("90-*", "120-256-Qwen*", "120-64-gpt*", "*by turns")
@pytest.mark.parametrize("name", OTHER_FORMATS)
@pytest.mark.parametrize(("capability", "tokens"), [(90, 64), (120, 64), (120, 256)])
def test_other_formats_spill_nothing_and_read_ahead(name: str, capability: int, tokens: int, tmp_path: Path) -> None:
    kind, geometry, limit = OTHER_FORMATS[name]
    for variant, made, used, loop in inspected(launched(CARDS[capability], geometry, tokens, kind=kind), capability, tmp_path):
        constants = variant.constants
        assert used["LOCAL"] == 0, (variant.name, used)
        assert used["STACK"] <= 8, (variant.name, used)  # a predicate of gpt-oss's FC2, outside of the loop
        if variant.name == "route_kernel":
            continue
        assert 2 * (made.metadata.shared + 1024) <= CARDS[capability].shared_memory
        assert any(code.startswith("LDGSTS") for code in loop)
        assert not any(code.startswith(("LDG.", "LDL", "STL")) for code in loop), (variant.name, loop)
        size = PARTS[variant.name] * constants["BN"] * constants["BK"] // 2
        assert loop.total() * variant.options["num_warps"] * 32 / size <= (10.2 if capability == 90 else limit), variant.name


@pytest.mark.all("121")
@pytest.mark.parametrize("capability", [120, 121])
def test_bias_constants_and_quantized_input_spill_nothing(capability: int, tmp_path: Path) -> None:
    geometry = Geometry(128, 4, 2880, 2880, "SwigluBias", bias=torch.bfloat16)
    variants = launched(CARDS[capability], geometry, 32, quantized=True)
    assert [variant.name for variant in variants] == ["route_kernel", "fc1_kernel", "fc2_kernel"]
    for variant, made, used, _ in inspected(variants, capability, tmp_path):
        assert used["STACK"] == used["LOCAL"] == 0, (variant.name, used)
        assert used["REG"] <= 168
        assert f".target sm_{capability}" in made.asm["ptx"]


@pytest.mark.parametrize(
    ("kind", "geometry"),
    [
        (TritonKernel, Geometry(128, 4, 2880, 720, "SwigluBias", bias=torch.bfloat16)),
        (TritonMXFP8Kernel, Geometry(128, 8, 2816, 704, "Geglu")),
    ],
    ids=["a quarter of gpt-oss", "gemma-4 in MXFP8"],
)
@pytest.mark.all("90-*")
@pytest.mark.parametrize("capability", [90, 120])
def test_scales_beside_each_other_by_less_than_four(
    kind: type[TritonKernel], geometry: Geometry, capability: int, tmp_path: Path
) -> None:
    """45 and 22 blocks: what is asked for a loop ahead is four scales nevertheless."""
    fc2 = [variant for variant in launched(CARDS[capability], geometry, 64, kind=kind) if variant.name == "fc2_kernel"]
    ((*_, loop),) = inspected(fc2, capability, tmp_path)
    assert any(code.startswith("LDGSTS") for code in loop)
    assert not any(code.startswith(("LDG.", "LDL", "STL")) for code in loop), loop


@pytest.mark.all
@pytest.mark.parametrize(("kind", "capability"), [(GroupedKernel, 120), (GroupedNVFP4Kernel, 120), (GroupedNVFP4Kernel, 121)])
def test_grouped_products_are_native(kind: type[GroupedKernel], capability: int, tmp_path: Path) -> None:
    """Block-scaled where this Triton has them, with nothing of bfloat16 beside; else what the refusal says."""
    kernel, names = kind(Card(48, 100 << 10, capability)), []
    if capability == 121:
        kernel.table = kind.table[-1:]  # type: ignore[misc]
    kernel.describe(QWEN3_30B, 4096, torch.device("cuda"))
    for variant, made, used, loop in inspected({v.key: v for v in kernel.variants()}.values(), capability, tmp_path):
        name = variant.name
        names.append(name)
        if not toolchain.upcast(capability):
            assert used["STACK"] == used["LOCAL"] == 0, (name, used)
            assert made.metadata.shared <= 99 << 10
            # Scales too are on their way while products are made; of six steps ptxas makes no loop.
            assert not any(code.startswith("LDG.") for code in loop), name
        products = set(re.findall(r"(?:wg)?mma\.[\w.:]+", made.asm["ptx"]))
        assert bool(products) is (name in ("fc1_kernel", "fc2_kernel"))
        native = {product for product in products if INSTRUCTION[kind] in product}
        assert products == native if not toolchain.upcast(capability) else not native
    assert names.count("fc1_kernel") == len({rule.fc1 for rule in kernel.table})
    assert names.count("fc2_kernel") == len({rule.fc2 for rule in kernel.table})


@pytest.mark.all
def test_proof_of_both_grouped_formats() -> None:
    proof = prove.prove("sm_120a", "grouped")
    assert (proof.compiled, proof.error) == (True, "")
    assert proof.products > 0


@pytest.mark.all
def test_doctors_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a card that is not here, in a process of its own; with a ptxas that does not know it, its own words."""
    proof = prove.prove("sm_121a", "triton")
    assert proof.compiled, proof.error
    assert proof.products > 0
    ptxas = tmp_path / "ptxas"
    words = "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"
    ptxas.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "release 13.0, V13.0" && exit\necho "{words}" >&2\nexit 255\n')
    ptxas.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(ptxas))
    proof = prove.prove("sm_121a", "triton")
    assert (proof.compiled, proof.error) == (False, words)
