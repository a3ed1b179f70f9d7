# SPDX-License-Identifier: Apache-2.0
"""The page of results is what the files say; the floor of a decode step is bytes over bandwidth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import floor, results
from tests.unittest.test_on_card import FACTS
from tests.unittest.test_on_card_report import _decode
from trtllm_b12x.dispatch.timing import expert_bytes


def test_the_pages_are_what_the_command_writes() -> None:
    for path, text in results.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: python -m benchmarks.results writes it anew"


BEGIN, END = "<!-- results: begin, written by python -m benchmarks.results -->", "<!-- results: end -->"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout without results."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nearlier\n{END}\nafter\n")
    return tmp_path


def test_what_has_no_file_is_missing(root: Path) -> None:
    assert results.main([], root) == 0
    page = (root / "docs" / "results.md").read_text()
    for source in results.SOURCES:
        assert f"no file: `{source.command} OUT`" in page
        assert f"{source.what}: not in a file" in page
    assert "Any time on an SM12x card" in page
    readme = (root / "README.md").read_text()
    assert readme.startswith("before\n")
    assert readme.endswith(f"{END}\nafter\n")
    assert "| time of a token, served whole | not measured |" in readme
    assert "earlier" not in readme


def _on_card() -> dict[str, Any]:
    load = {"input_tokens": 2048, "output_tokens": 1024, "requests": 5, "concurrency": 1}
    run = {"model": "/home/me/Nemotron-3-Super", "load": load, "clocks": {}, "command": ["/home/me/bin/trtllm-bench"], "said": []}
    runs = [
        {**run, "with": True, "tpot_ms": {"p50": 11.5}, "output_tokens_per_second": 86.0},
        {**run, "with": False, "tpot_ms": {"p50": 14.0}, "output_tokens_per_second": 71.0},
    ]
    named = {"form": 1, "written": "2026-12-01 10:00:00 +0000", "card": FACTS, "bench": runs, "not_measured": []}
    return {
        **named,
        "kernels": {"Qwen3-30B-A3B": {"peers": _decode(), "clocks": {}}},
        "paths": {},
        "doctor": {"facts": ["/home/me"]},
        "answers": [{"model": "/home/me/Nemotron-3-Super", "prompts": 32, "equal": 32, "differences": []}],
    }


def _in_vllm(model: str, kernel: str, tokens: int, us: float) -> dict[str, Any]:
    return {"model": model, "format": "MXFP4", "tokens": tokens, "kernel": kernel, "ours us": us, "marlin us": 2 * us}


def test_layers_inside_vllm_keep_the_rows_of_other_models(root: Path, tmp_path: Path) -> None:
    run: dict[str, Any] = {"gpu": "NVIDIA H100", "versions": {"torch": "2.11.0", "vllm": "0.33.0"}, "layers": []}
    runs = (
        {**run, "layers": [_in_vllm("A", "triton", 1, 30.2)]},
        {**run, "layers": [_in_vllm("gpt-oss-120b", "triton", 1, 40.4)]},
        {**run, "layers": [_in_vllm("gpt-oss-120b", "cuda", 1, 35.4), _in_vllm("gpt-oss-120b", "grouped", 512, 700)]},
    )
    for found in runs:
        (tmp_path / "run.json").write_text(json.dumps(found))
        assert results.main(["--take", str(tmp_path / "run.json")], root) == 0
    page = (root / "docs" / "results.md").read_text()
    table = page[page.index("One layer inside vLLM") :].splitlines()
    assert "`cuda` (c), `triton` (t), `gemm` (m), `grouped` (g)" in table[0]
    assert table[2:9] == [
        "| layer | kernel | 1 | 512 |",
        "| --- | --- | --- | --- |",
        "| A, MXFP4 | ours | 30 t | - |",
        "| A, MXFP4 | vLLM's Marlin | 60 | - |",
        "| gpt-oss-120b, MXFP4 | ours | 35 c | 700 g |",
        "| gpt-oss-120b, MXFP4 | vLLM's Marlin | 71 | 1400 |",
        "",
    ]
    (tmp_path / "run.json").write_text(json.dumps({**runs[0], "gpu": "NVIDIA H200"}))
    assert results.main(["--take", str(tmp_path / "run.json")], root) == 0
    assert "gpt-oss-120b, MXFP4" not in (root / "docs" / "results.md").read_text()


def test_runs_are_taken_in(root: Path, tmp_path: Path) -> None:
    decode = {**_decode(), "gpu": "NVIDIA H200"}
    (tmp_path / "a.json").write_text(json.dumps(decode))
    (tmp_path / "b.json").write_text(json.dumps(_on_card()))
    assert results.main(["--take", str(tmp_path / "a.json"), str(tmp_path / "b.json")], root) == 0
    page, readme = (root / "docs" / "results.md").read_text(), (root / "README.md").read_text()
    assert "| decode of a Qwen3-30B-A3B layer, 1 tokens | 17 us | 32 us: vLLM's Marlin, NVFP4 |" in readme
    assert "11.50 ms, 86 tokens/s | 14.00 ms, 71 tokens/s: the host's CUTLASS | A stand-in" in readme
    assert "| greedy answers of Nemotron-3-Super | 32 of 32 as without, worst margin none | - | A stand-in" in readme
    assert "not measured" not in readme
    assert "Any time on an SM12x card" not in page
    assert "Nemotron-3-Super served whole" not in page
    assert "Qwen3-30B-A3B served whole" in page
    taken = (root / "docs" / "on-card" / "a-stand-in.json").read_text()
    assert "GPU-1" not in taken
    assert "/home/me" not in taken
    assert "NaN" not in taken
    assert "NaN" not in (root / "docs" / "moe-decode.json").read_text()


def test_a_card_without_a_model_leaves_that_open(root: Path, tmp_path: Path) -> None:
    hopper = {**FACTS, "card": {**FACTS["card"], "name": "NVIDIA H200", "capability": [9, 0]}}
    (tmp_path / "b.json").write_text(json.dumps({**_on_card(), "card": hopper, "bench": []}))
    assert results.main(["--take", str(tmp_path / "b.json")], root) == 0
    page = (root / "docs" / "results.md").read_text()
    assert "| NVIDIA H200, driver 580.1, 2026-12-01; " in page
    assert "| time of a token, served whole | not measured |" in page
    assert "Any time on an SM12x card" in page


def test_another_file_is_not_taken(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("{", "[]", '{"lines": []}', '{"copy": 1, "lines": [{}]}'):
        (tmp_path / "x.json").write_text(content)
        assert results.main(["--take", str(tmp_path / "x.json")], root) == 2
        assert "not a file that a benchmark wrote" in capsys.readouterr().err
    assert sorted(path.name for path in (root / "docs").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"error": 1.0}, "Qwen3-30B-A3B, NVFP4, grouped, sm_120a: error 1.0, at most 0.005"),
        ({"error": None}, "error None, at most 0.005"),
        ({"token error": 0.125, "token bound": 0.0125}, "token error 0.125, at most 0.0125"),
    ],
)
def test_wrong_numbers_are_not_taken(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    run = json.loads((Path(__file__).parents[2] / "docs/own-on-hopper.json").read_text())
    assert results.beyond_bounds(run) == []
    run["own"][0].update(change)
    (tmp_path / "own.json").write_text(json.dumps(run))
    assert results.main(["--take", str(tmp_path / "own.json")], root) == 2
    assert said in capsys.readouterr().err
    assert not (root / "docs/own-on-hopper.json").exists()


def test_a_mutation_that_changes_no_number_is_wrong() -> None:
    lines = [{"format": "NVFP4", "what": what, "error": 0.002, "bound": 0.005} for what in ("nothing", "codes exchanged")]
    assert results.beyond_bounds({"mutations": lines}) == ["NVFP4, codes exchanged: error 0.002, at least 0.05"]
    graphs = [{"card": "GB10", "format": "MXFP8", "caches": "empty", "captured": False}, {"captured": True}, {}]
    assert results.beyond_bounds({"starts": graphs}) == ["GB10, MXFP8, empty: a graph computes something else"]


# ---- the floor of a decode step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "widths", "total", "within"),
    [
        ("Qwen3-30B-A3B", {"attention": 9 / 16}, 30.53e9, 1e-3),
        # Without the MTP layer: attention, MoE, a projection of 8192 x 4096.
        ("Nemotron-3-Super", {"attention": 2, "router": 4}, 123.61e9 - 2.94e9, 5e-4),
        ("Qwen3.6-35B-A3B", {"LM head": 9 / 16, "shared experts": 9 / 16}, 35e9, 0.01),
    ],
)
def test_parameters_are_those_of_the_model(name: str, widths: dict[str, float], total: float, within: float) -> None:
    """Bytes over the width of each part."""
    model = floor.MODELS[name]
    widths = {"router": 2, "LM head": 2, "latent projections": 2, **widths}
    fixed = sum(size / widths.get(part, 1) for part, size in model.fixed.items()) + model.embedding / 2
    experts = model.moe_layers * model.layer.num_experts * expert_bytes(model.layer) * 16 / 9
    assert fixed + experts == pytest.approx(total, rel=within)


def test_qwen36_as_its_checkpoint_is() -> None:
    """Experts, shared experts and LM head in W4A16_NVFP4: 2,403 MB a step, 746 tokens/s on an RTX 5090."""
    model = floor.MODELS["Qwen3.6-35B-A3B"]
    assert sum(model.parts(1).values()) == pytest.approx(2403e6, rel=1e-3)
    assert 1e3 / model.milliseconds("RTX 5090", 1) == pytest.approx(746, rel=1e-3)
