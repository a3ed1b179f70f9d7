# SPDX-License-Identifier: Apache-2.0
"""The kernels beside ours in ``benchmarks.peers``: vLLM's parts, weights in Marlin's order, errors, the page and the plot."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.geometries import GEOMETRIES
from benchmarks.peers import __main__ as command
from benchmarks.peers import marlin, pages, parts, plots, triton_kernels
from trtllm_b12x.kernels import Geometry

QWEN = GEOMETRIES["Qwen3-30B-A3B"]
SMALL = Geometry(4, 2, 256, 128, "Swiglu")
ON_A_GPU = torch.cuda.is_available()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with the names of vLLM's, and more than is needed."""
    names = ["vllm/_moe_C.abi3.so", "vllm/_C_stable_libtorch.abi3.so", "vllm/third_party/triton_kernels/routing.py"]
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as archive:
        for name in [*names, "vllm/_C.abi3.so", "vllm/__init__.py", "vllm/third_party/deep_gemm/a.py"]:
            archive.writestr(name, "no library")
        archive.writestr("vllm-0.22.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.22.1\n")
    return tmp_path / "vllm.whl"


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["peers", *map(str, words)])
    return command.main()


def test_only_the_needed_parts_are_taken(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "--parts", wheel, tmp_path / "parts") == 0
    found = sorted(str(path.relative_to(tmp_path / "parts")) for path in (tmp_path / "parts").rglob("*") if path.is_file())
    assert found == [
        "vllm-0.22.1.dist-info/METADATA",
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/_moe_C.abi3.so",
        "vllm/third_party/triton_kernels/routing.py",
    ]
    vllm = parts.find(tmp_path / "parts")
    assert vllm == tmp_path / "parts" / "vllm"
    assert parts.version(vllm) == "0.22.1"
    error = marlin.lacks(QWEN, vllm)
    assert error.startswith(f"_moe_C.abi3.so does not load under torch {torch.__version__}: ")


def test_a_wheel_without_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("vllm/_moe_C.abi3.so", "")
    assert run(monkeypatch, "--parts", tmp_path / "other.whl", tmp_path / "parts") == 2
    assert "other.whl has no vllm/_C_stable_libtorch*.so: expected a wheel of vLLM 0.22" in capsys.readouterr().err
    (tmp_path / "text.whl").write_text("text")
    assert run(monkeypatch, "--parts", tmp_path / "text.whl", tmp_path / "parts") == 2
    assert "text.whl is not a wheel that can be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(monkeypatch, "--vllm", tmp_path)
    assert f"--vllm {tmp_path} has no folder vllm" in capsys.readouterr().err


def test_what_is_lacking_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert marlin.lacks(QWEN, None) == triton_kernels.lacks(QWEN, None) == parts.MISSING
    (tmp_path / "vllm").mkdir()
    assert marlin.lacks(QWEN, tmp_path / "vllm") == f"{tmp_path / 'vllm'} has no _moe_C*.so"
    geglu = Geometry(4, 2, 256, 128, "Geglu", format="MXFP8")
    assert (
        marlin.lacks(geglu, tmp_path) == triton_kernels.lacks(geglu, tmp_path) == "this comparison has no MXFP8 layer with Geglu"
    )
    nemotron = Geometry(512, 22, 1024, 2688, "Swiglu")
    assert triton_kernels.lacks(nemotron, tmp_path) == "its routing does not support top 22"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    assert triton_kernels.lacks(QWEN, tmp_path) == "vLLM runs it on capability 9.0 to 10.x, this is 12.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert triton_kernels.lacks(QWEN, tmp_path).startswith("triton_kernels does not import: ModuleNotFoundError")


@pytest.mark.skipif(ON_A_GPU, reason="without a GPU every kernel fails")
def test_a_kernel_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", "--geometry", "Qwen3-30B-A3B", "--peer", "marlin", "triton_kernels"])
    options = command.arguments()
    results: dict[str, Any] = {name: [] for name in ("lines", "marlin", "triton_kernels", "not_measured")}
    results |= {"format": "NVFP4", "copy": 1e12}
    assert len(list(command.run(options, results, deadline=float("inf")))) == 3
    assert [line.split(",")[0].split(":")[0] for line in results["not_measured"]] == ["ours", "marlin", "triton_kernels"]
    if options.vllm is None:
        assert results["not_measured"][1] == f"marlin, Qwen3-30B-A3B: {parts.MISSING}"


# ---- page and plot -------------------------------------------------------------------------------------------------------


def results() -> dict[str, Any]:
    """Numbers of an H100 (Qwen3-30B-A3B, Nemotron-3-Super), in the form of OUT.json."""

    def ours(geometry: str, tokens: int, us: float) -> dict[str, Any]:
        names = {"geometry": geometry, "kernel": "triton", "split": "TP1", "tokens": tokens, "quantization": "W4A16 NVFP4"}
        return {**names, "us": us, "megabytes": 21.2, "fraction": 0.42, "host_us": 35.0, "error": 0.0022}

    def other(geometry: str, tokens: int, us: float) -> dict[str, Any]:
        return {"geometry": geometry, "tokens": tokens, "us": us, "error": 0.0047}

    return {
        "gpu": "NVIDIA H100",
        "copy": 3.01e12,
        "l2_megabytes": 50.0,
        "clocks": {"after the copy": {"clocks.sm": 345.0, "clocks.mem": 2619.0}},
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "vllm": "0.22.1", "driver": None, "trtllm-b12x": "0.1.0"},
        "format": "NVFP4",
        "lines": [ours("Qwen3-30B-A3B", 1, 17.0), ours("Qwen3-30B-A3B", 256, 253.7), ours("Nemotron-3-Super", 1, 41.7)],
        "marlin": [other("Qwen3-30B-A3B", 1, 31.5), other("Qwen3-30B-A3B", 256, 229.1)],
        "triton_kernels": [other("Qwen3-30B-A3B", 256, 196.2)],
        "not_measured": ["dequantize, Qwen3-30B-A3B: it has another format"],
    }


def test_the_page_says_where_ours_is_behind() -> None:
    page = pages.markdown(results())
    assert "NVIDIA H100, copy 3.01 TB/s (read and write); torch 2.11.0, triton 3.6.0, vllm 0.22.1, trtllm-b12x 0.1.0." in page
    assert "Clocks after the copy: SM 345.0, memory 2619.0 MHz." in page
    assert [line for line in page.splitlines() if line.startswith(("| Qwen", "| Nemotron"))] == [
        "| Nemotron-3-Super | 1 | ours, `triton` | 41.7 | 21.2 | 0.42 | 35 | 0.0022 |",
        "| Qwen3-30B-A3B | 1 | ours, `triton` | 17.0 | 21.2 | 0.42 | 35 | 0.0022 |",
        "| Qwen3-30B-A3B | 1 | vLLM's Marlin, W4A16 NVFP4 | 31.5 | - | - | - | 0.0047 |",
        "| Qwen3-30B-A3B | 256 | OpenAI's triton_kernels, W4A16 MXFP4 | 196.2 | - | - | - | 0.0047 |",
        "| Qwen3-30B-A3B | 256 | vLLM's Marlin, W4A16 NVFP4 | 229.1 | - | - | - | 0.0047 |",
        "| Qwen3-30B-A3B | 256 | ours, `triton` | 253.7 | 21.2 | 0.42 | 35 | 0.0022 |",
    ]
    assert "Not measured: dequantize, Qwen3-30B-A3B: it has another format" in page
    assert "- Marlin has our weights, with hidden size padded to 256" in page
    assert "Dequantize-then-multiply" not in page


def test_the_plot_is_drawn_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "a.json").write_text(json.dumps(results()))
    tune = {"tables": [{"microseconds": {"1": {"triton": 17.0, "host": 60.0}, "8": {"host": 90.0}, "512": {"host": 400.0}}}]}
    card = {"kernels": {"Qwen3-30B-A3B": {"peers": results()}}, "paths": {"Qwen3-30B-A3B": {"tune": tune}}}
    (tmp_path / "card.json").write_text(json.dumps(card))
    for name in ("a.png", "a.svg"):
        assert run(monkeypatch, "--plot", tmp_path / "a.json", tmp_path / "card.json", tmp_path / name) == 0
    (tmp_path / "none.json").write_text(json.dumps({"gpu": "A", "copy": 1.0, "lines": []}))
    assert run(monkeypatch, "--plot", tmp_path / "none.json", tmp_path / "none.png") == 2
    assert "none.png cannot be drawn: ValueError: no line of a whole layer" in capsys.readouterr().err
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "a.svg").read_text()
    for text in ("tokens", "microseconds a layer, lower is better", "256", "Nemotron-3-Super", "One MoE layer on NVIDIA H100"):
        assert f"<!-- {text}" in drawn
    for curve in (plots.CUTLASS, "vLLM's Marlin, W4A16 NVFP4", f"{plots.OURS}, W4A16 NVFP4"):
        assert drawn.count(f"<!-- {curve} -->") == 1
    found = plots.curves(card)["Qwen3-30B-A3B"]
    assert found[plots.CUTLASS] == [(1, 60.0), (8, 90.0)]


_PRODUCT = """moe_wna16_marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, Tensor b_scales,
Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, {}Tensor workspace, Tensor sorted_token_ids,
Tensor expert_ids, Tensor num_tokens_past_padded, Tensor topk_weights, int moe_block_size, int top_k, bool mul_topk_weights,
int b_type_id, int size_m, int size_n, int size_k, {}bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float,
int thread_k, int thread_n, int blocks_per_sm) -> Tensor"""


@pytest.mark.parametrize(
    "earlier", [("Tensor? g_idx_or_none, Tensor? perm_or_none, ", "bool is_full_k, "), ("", "")], ids=["0.22.1", "0.33.0"]
)
def test_marlin_gets_the_arguments_that_its_operator_has(earlier: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.library.Library("peers_marlin", "DEF")
    try:
        library.define(_PRODUCT.format(*earlier).replace("\n", " "))
        library.impl("moe_wna16_marlin_gemm", lambda a, c_or_none, *more: c_or_none + 1, "CPU")
        monkeypatch.setattr(torch.ops, "_moe_C", torch.ops.peers_marlin, raising=False)
        layer = object.__new__(marlin.MarlinLayer)
        layer.workspace = torch.zeros(4, dtype=torch.int32)
        matrix = marlin.Matrix(torch.zeros(2, 1, 128, dtype=torch.int32), torch.zeros(2, 1, 64), None, None)
        order = (*torch.zeros(3, 1, dtype=torch.int32), 8)
        found = layer.gemm(torch.ones(3, 16), matrix, torch.ones(3, 2), order, 3, 2, True)
    finally:
        library._destroy()
    assert found.shape == (6, 64)
