"""The Triton kernels compiled without a GPU, for Hopper and both Blackwells of this package: what instructions they became."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests import sass
from tests.compiled import Compiled, compile_for
from trtllm_b12x.environment import prove
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.triton.decode import TritonKernel, TritonMXFP8Kernel
from trtllm_b12x.kernels.triton.decode_tiles import Card
from trtllm_b12x.kernels.triton.grouped import GroupedKernel, GroupedNVFP4Kernel

QWEN3_30B = Geometry(128, 8, 2048, 768, "Swiglu")
CARDS = {90: Card(132, 228 << 10, 90), 120: Card(188, 100 << 10, 120), 121: Card(48, 100 << 10, 121)}
INSTRUCTION = {GroupedKernel: "kind::mxf8f6f4.block_scale", GroupedNVFP4Kernel: "kind::mxf4nvf4.block_scale.scale_vec::4X"}
LIMIT = {"fc1_kernel": 7.2, "fc2_kernel": 7.6, "fc2_token_kernel": 8.0}
"""Lane instructions per byte of FP4 in the loop; seen: 6.1 to 7.0, 6.1 to 7.0 and 7.2 to 7.7 with Triton 3.6 and 3.9.  A
conversion of layouts between codes and products adds one to each, scales that are spread by shuffles two."""

SERVED = [(90, 1, ()), (90, 32, ("fc1_kernel", "route_kernel")), (120, 32, ()), (121, 1, ("fc1_kernel",))]


def load(made: Compiled, folder: Path) -> Path:
    path = folder / f"{made.name}.cubin"
    path.write_bytes(made.cubin)
    return path


@pytest.mark.parametrize(("capability", "tokens", "only"), SERVED)
def test_what_the_compiler_made(capability: int, tokens: int, only: tuple[str, ...], tmp_path: Path) -> None:
    names = []
    for made in compile_for(CARDS[capability], QWEN3_30B, tokens, only=only):
        names.append(made.name)
        assert re.search(rf"\.target sm_{capability}", made.ptx)
        cubin = load(made, tmp_path)
        used = sass.resources(cubin)
        assert used["STACK"] == used["LOCAL"] == 0, used
        if made.name == "route_kernel":
            continue
        assert used["REG"] <= 168
        # The assembly takes two words of a row at a time: a lane's first registers must be neighboring columns.
        assert re.search(
            r"packed_element = 2.*tensor<\d+x\d+xi32, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = [24]}>", made.ttgir
        )
        # Two programs, with what each launch reserves, find room on a multiprocessor.
        assert 2 * (made.shared_memory + 1024) <= CARDS[capability].shared_memory
        # Triton 3.9 has Hopper multiply 64 rows of four warps as one, with inputs in shared memory; 3.7 and older do not.
        group = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16" in made.ptx
        assert not group or (capability == 90 and made.num_warps >= 4)
        assert group or "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in made.ptx
        assert "griddepcontrol.wait" in made.ptx
        loop = sass.product_loop(cubin)
        assert any(code.startswith("HGMMA" if group else "HMMA") for code in loop)
        # Codes go to shared memory asynchronously, and from there, 16 bytes at a time, to the lanes that multiply them.
        assert any(code.startswith("LDGSTS") for code in loop)
        assert group or loop["LDS.128"]
        unwanted = ("LDSM", "SHFL", "LDG.", "LDL", "STL") + (() if group else ("STS",))
        assert not any(code.startswith(unwanted) for code in loop), loop
        parts = {"fc1_kernel": 2, "fc2_kernel": 1, "fc2_token_kernel": 8}[made.name]
        size = parts * made.constants["BN"] * made.constants["BK"] // 2
        assert loop.total() * made.num_warps * 32 / size <= (10.2 if group else LIMIT[made.name])
    several = tokens * 8 > 64
    assert names == [
        name
        for name in ["route_kernel"] * several + ["fc1_kernel", "fc2_kernel" if several else "fc2_token_kernel"]
        if not only or name in only
    ]


@pytest.mark.parametrize("capability", [120, 121])
def test_bias_constants_and_quantized_input_spill_nothing(capability: int, tmp_path: Path) -> None:
    geometry = Geometry(128, 4, 2880, 2880, "SwigluBias", bias=torch.bfloat16)
    made = list(compile_for(CARDS[capability], geometry, 32, quantized=True, inline=False))
    assert [kernel.name for kernel in made] == ["route_kernel", "fc1_kernel", "fc2_kernel"]
    for kernel in made:
        used = sass.resources(load(kernel, tmp_path))
        assert used["STACK"] == used["LOCAL"] == 0, (kernel.name, used)
        assert used["REG"] <= 168
        assert f".target sm_{capability}" in kernel.ptx


@pytest.mark.parametrize(
    ("kind", "geometry"),
    [
        (TritonKernel, Geometry(128, 4, 2880, 720, "SwigluBias", bias=torch.bfloat16)),
        (TritonMXFP8Kernel, Geometry(128, 8, 2816, 704, "Geglu")),
    ],
    ids=["a quarter of gpt-oss", "gemma-4 in MXFP8"],
)
@pytest.mark.parametrize("capability", [90, 120])
def test_scales_beside_each_other_by_less_than_four(
    kind: type[TritonKernel], geometry: Geometry, capability: int, tmp_path: Path
) -> None:
    """45 and 22 blocks: what is asked for a loop ahead is four scales nevertheless."""
    (made,) = compile_for(CARDS[capability], geometry, 8, only=("fc2_kernel",), kind=kind)
    loop = sass.product_loop(load(made, tmp_path))
    assert any(code.startswith("LDGSTS") for code in loop)
    assert not any(code.startswith(("LDG.", "LDL", "STL")) for code in loop), loop


@pytest.mark.parametrize("capability", [120, 121])
@pytest.mark.parametrize("kind", [GroupedKernel, GroupedNVFP4Kernel])
def test_grouped_products_are_native(kind: type[GroupedKernel], capability: int, tmp_path: Path) -> None:
    """Block-scaled where this Triton has them, with nothing of bfloat16 beside; else what the refusal says."""
    kernel, names = kind(Card(48, 100 << 10, capability)), []
    if capability == 121:
        kernel.table = kind.table[-1:]  # type: ignore[misc]
    kernel.describe(QWEN3_30B, 4096, torch.device("cuda"))
    for variant in kernel.variants():
        name, made = variant.name, variant.assemble(capability)
        names.append(name)
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        used = sass.resources(cubin)
        if not toolchain.upcast(capability):
            assert used["STACK"] == used["LOCAL"] == 0, (name, used)
            assert made.metadata.shared <= 99 << 10
            # Scales too are on their way while products are made; of six steps ptxas makes no loop.
            assert not any(code.startswith("LDG.") for code in sass.product_loop(cubin)), name
        products = set(re.findall(r"(?:wg)?mma\.[\w.:]+", made.asm["ptx"]))
        assert bool(products) is (name in ("fc1_kernel", "fc2_kernel"))
        native = {product for product in products if INSTRUCTION[kind] in product}
        assert products == native if not toolchain.upcast(capability) else not native
    assert names.count("fc1_kernel") == len({rule.fc1 for rule in kernel.table})
    assert names.count("fc2_kernel") == len({rule.fc2 for rule in kernel.table})


def test_proof_of_both_grouped_formats() -> None:
    proof = prove.prove("sm_120a", "grouped")
    assert (proof.compiled, proof.error) == (True, "")
    assert proof.products > 0


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
