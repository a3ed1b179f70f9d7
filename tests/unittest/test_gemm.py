# SPDX-License-Identifier: Apache-2.0
"""Grouped products (``gemm.py``): shapes, what they take of a multiprocessor, parts of long calls, and what is refused."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from tests import emulator
from trtllm_b12x.formats import BY_TURNS, ROWS, WeightLayout
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.cards import SHARED_MEMORY, Card, models
from trtllm_b12x.kernels.catalog import KERNELS
from trtllm_b12x.kernels.cuda import gemm

QWEN3 = Geometry(128, 8, 2048, 768, "Swiglu")
TURNS = WeightLayout(ROWS, BY_TURNS)
LAYERS = {
    "NVFP4": QWEN3,
    "MXFP4": Geometry(32, 4, 2880, 2880, "SwigluBias", bias=torch.bfloat16, format="MXFP4", layout=TURNS),
    "MXFP8": Geometry(128, 8, 2816, 704, "Geglu", format="MXFP8", layout=WeightLayout(ROWS)),
}
RTX_5090 = models("sm_120a", ["RTX 5090"])[0]
MOST_SPILLED = 160
"""Bytes of a thread outside of loops: a tile's constants."""


def described(geometry: Geometry, card: Card = RTX_5090, capacity: int = 8192) -> Any:
    kind: Any = KERNELS["gemm", geometry.format][0]
    kernel = kind(card)
    kernel.describe(geometry, capacity, torch.device("cuda"))
    return kernel


def loops_of(cubin: bytes, folder: Path) -> list[list[str]]:
    """Return the instructions of the innermost loops with products, one for each number of columns of FC1 and FC2."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    (folder / "kernel.cubin").write_bytes(cubin)
    text = subprocess.run([tool, "-sass", folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    found = []
    for body in text.split("Function : ")[1:]:
        lines = [(int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?);", body)]
        jumps = [(int(to, 16), at) for at, line in lines for to in re.findall(r"BRA.*?(0x[0-9a-f]+)", line) if int(to, 16) < at]
        loops = [(a, b) for a, b in jumps if any(a <= at <= b and "HMMA" in line for at, line in lines)]
        inner = [(a, b) for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]
        # A jump from behind a tile's end encloses a loop over stages with what follows it.
        found += [[line for at, line in lines if a <= at <= b] for a, b in inner if b - a < 16 * 1200]
    return found


@pytest.mark.all
@pytest.mark.parametrize(("name", "target"), [("MXFP4", "sm_120a"), ("MXFP8", "sm_121a")])
def test_shapes_of_sm12x(name: str, target: str, tmp_path: Path) -> None:
    """They fit a multiprocessor, and no loop spills registers."""
    kernel = described(LAYERS[name])
    for shape in kernel.shapes():
        variant = kernel.variant(shape)
        content, log = variant.compile(target)
        entries = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", log, re.S)
        products = [(int(spilled), int(registers)) for entry, spilled, registers in entries if entry.startswith("fc")]
        assert len(products) == 2
        for spilled, registers in products:
            assert -(-registers // 8) * 8 * shape.warps * 32 * shape.blocks <= 65536, shape
            assert spilled <= MOST_SPILLED, shape
        loops = loops_of(content, tmp_path)
        assert len(loops) >= shape.routes // 8, shape
        assert [line for loop in loops for line in loop if re.search(r"\b(STL|LDL)\b", line)] == [], shape
        shared = emulator.Module(variant.files(), emulator.main_of(gemm.SOURCE, *gemm.KERNELS)).constant("fc1_shared_bytes")
        assert shape.blocks * (shared + 1024) <= SHARED_MEMORY, shape


def test_proposals() -> None:
    """By routes an expert; a shape and its neighbors. Calls beyond what a launch takes have the parts' shapes."""
    kernel, known = described(QWEN3), gemm.SMALL_SHAPES[4]
    assert kernel.shapes() == known
    assert [kernel.proposals(tokens)[0] for tokens in (9, 128, 129, 384, 385, 768, 769, 8192)] == [
        shape for shape in known for _ in range(2)
    ]
    assert kernel.proposals(64) == known[:2]
    assert kernel.proposals(200) == (known[1], known[2], known[0])
    assert kernel.proposals(8192) == (known[3], known[2])
    assert described(QWEN3, capacity=100).shapes() == known[:2]
    assert described(QWEN3, Card(132, 228 << 10, 90)).shapes() == gemm.SHAPES[4]


@pytest.mark.parametrize(("top_k", "most"), [(8, 2048), (22, 640), (1, 16384), (200, 81)])
def test_tokens_of_a_launch(top_k: int, most: int) -> None:
    """A multiple of 128, as scales of quantized input lie, where a launch takes so many."""
    kernel = described(Geometry(256, 8, 2048, 768, "Swiglu"))
    kernel.geometry = replace(kernel.geometry, top_k=top_k)
    assert kernel._most_tokens == most


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (replace(QWEN3, num_experts=1025), "gemm takes at most 1024 experts, not 1025"),
        (replace(QWEN3, intermediate_size=720), "cuda does not take 2048 x 720"),
        (replace(QWEN3, format="MXFP8", dtype=torch.float16), "cuda takes MXFP8 in bfloat16, not float16"),
    ],
)
def test_what_it_does_not_take(geometry: Geometry, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        described(geometry)
