"""The one launch compiled by NVRTC for the cards that it serves and for Hopper: registers, spills, shared memory, the cache."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trtllm_b12x.formats import BY_TURNS, FORMATS, GATE_UP, ROWS, WeightLayout
from trtllm_b12x.kernels import Geometry, PlanError, prove_child, warmup
from trtllm_b12x.kernels.cards import models
from trtllm_b12x.kernels.cuda import nvrtc, variant
from trtllm_b12x.kernels.cuda.decode import CudaKernel, CudaMXFP4Kernel, CudaMXFP8Kernel, CudaW4A16Kernel
from trtllm_b12x.kernels.warmup import CompileTask

QWEN3_30B = Geometry(128, 8, 2048, 768, "Swiglu")
LAYERS: dict[str, tuple[type[CudaKernel], Geometry, int]] = {
    "Qwen3-30B-A3B NVFP4": (CudaKernel, QWEN3_30B, 8),
    "Nemotron-3-Super NVFP4": (CudaKernel, Geometry(512, 22, 1024, 2688, "Relu2"), 1),
    "gpt-oss-like NVFP4 float16": (
        CudaKernel,
        Geometry(128, 4, 2880, 2880, "SwigluBias", torch.float16, bias=torch.float16),
        4,
    ),
    "Qwen3.6-35B-A3B W4A16": (
        CudaW4A16Kernel,
        Geometry(256, 8, 2048, 512, "Swiglu", format="W4A16_NVFP4", layout=WeightLayout(ROWS, GATE_UP)),
        8,
    ),
    "gpt-oss-120b MXFP4": (
        CudaMXFP4Kernel,
        Geometry(
            *(128, 4, 2880, 2944, "SwigluBias"), bias=torch.bfloat16, format="MXFP4", layout=WeightLayout(hidden_multiple=128)
        ),
        4,
    ),
    "gpt-oss-120b MXFP4, as vLLM has it": (
        CudaMXFP4Kernel,
        Geometry(128, 4, 2880, 2880, "SwigluBias", bias=torch.bfloat16, format="MXFP4", layout=WeightLayout(ROWS, BY_TURNS)),
        4,
    ),
    "gemma-4-26B-A4B MXFP8": (CudaMXFP8Kernel, Geometry(128, 8, 2816, 704, "Geglu", format="MXFP8"), 4),
}
MOST_SPILLED = {"sm_90a": 120, "sm_120a": 48, "sm_121a": 48}
"""Bytes of a thread. Spilled are lane constants, which a task reads once."""


@pytest.mark.parametrize("target", ["sm_120a", *(pytest.param(name, marks=pytest.mark.all) for name in ("sm_90a", "sm_121a"))])
@pytest.mark.parametrize("name", LAYERS)
def test_compiles(name: str, target: str) -> None:
    kind, geometry, apart = LAYERS[name]
    kernel = kind(models("sm_120a", ["RTX 5090"])[0])
    kernel.describe(geometry, 64, torch.device("cuda"))
    variants = kernel.variants()
    assert [each.tokens for each in variants] == [count for count in variant.TOKENS if count <= apart or count == 64]
    for each in variants:
        content, log = each.compile(target)
        assert content.startswith(b"\x7fELF")
        registers, threads = int(re.findall(r"Used (\d+) registers", log)[-1]), 32 * (dict(each.definitions)["WARPS"] + 4)
        spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", log)]
        assert registers * threads <= 65536, (each.tokens, registers)
        assert max(spilled) <= MOST_SPILLED[target], (each.tokens, spilled)


@pytest.mark.parametrize(
    ("kind", "geometry"),
    [
        (CudaKernel, replace(QWEN3_30B, intermediate_size=720)),
        (CudaKernel, replace(QWEN3_30B, hidden_size=2064)),
        (CudaKernel, replace(QWEN3_30B, top_k=40)),
        (CudaKernel, replace(QWEN3_30B, layout=WeightLayout(fc1=BY_TURNS))),
        (CudaW4A16Kernel, replace(QWEN3_30B, intermediate_size=336, format="W4A16_NVFP4", layout=WeightLayout(ROWS))),
    ],
)
def test_what_it_does_not_take(kind: type[CudaKernel], geometry: Geometry) -> None:
    kernel = kind(models("sm_120a", ["RTX 5090"])[0])
    kernel.describe(geometry, 8, torch.device("cuda"))
    with pytest.raises(ValueError, match="one launch"):
        kernel.variants()


def test_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cubin is compiled once, and not at all with TRTLLM_B12X_FREEZE; a file that others may write is none of ours."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    needed = variant.variants(Geometry(8, 2, 512, 256, "Swiglu"), FORMATS[0])[:1]
    monkeypatch.setenv("TRTLLM_B12X_FREEZE", "1")
    with pytest.raises(PlanError, match=r"TRTLLM_B12X_FREEZE=1 \(the command\)"):
        variant.load(needed, "sm_120a", "the command")
    monkeypatch.delenv("TRTLLM_B12X_FREEZE")
    (compiled,) = variant.load(needed, "sm_120a", "the command")
    monkeypatch.setattr(nvrtc, "compiled", lambda *arguments: pytest.fail("compiled again"))
    assert list(variant.load(needed, "sm_120a", "the command")) == [compiled]
    file = needed[0].file("sm_120a")
    assert list(tmp_path.rglob("*.cubin")) == [file]
    file.chmod(0o666)
    assert needed[0].cached("sm_120a") is None


def test_warmup_and_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's task fills the package's own cache, where a server finds it, and says what was there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    task, results = CompileTask(CudaKernel, Geometry(8, 2, 512, 256, "Relu2"), 8), []
    for _ in range(2):
        warmup.run([task], models("sm_120a", ["RTX 5090"]), lambda result, total: results.append((result, total)))
    done = [(result.family, result.cached, result.error, total) for result, total in results if result is not None]
    assert done == [("cuda", cached, "", len(variant.TOKENS)) for cached in (False, True) for _ in variant.TOKENS]
    found = prove_child.proof("sm_120a", "cuda")
    assert found.compiled, found
    assert found.products >= 4 * 8


def test_an_error_of_the_compiler() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"does not compile a\.cu for sm_120a(.|\n)*\"y\" is undefined"):
        nvrtc.compiled("int f() { return y; }", "a.cu", "sm_120a", {})
