# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.on_card`` where no card is: a stand-in for ``trtllm-bench``, and a card that is said to be there."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks import published
from benchmarks.on_card import __main__ as on_card
from benchmarks.on_card import card, host, plan, recipes, refusals, steps
from benchmarks.on_card.steps import Runner, Step, StepError, gpu_state, write_json
from tests import llm_api, mxfp4, trtllm_bench
from tests.checkpoints import random_experts, write_checkpoint

SUPER = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"
FACTS: dict[str, Any] = {
    "system": "Linux",
    "python": "3.12.3",
    "versions": {"trtllm-b12x": "0.1.0", "tensorrt-llm": "1.3.0"},
    "nvidia_smi": [{"name": "A stand-in", "uuid": "GPU-1", "driver_version": "580.1"}],
    "clocks": [{"clocks.max.sm": 2600.0, "persistence_mode": "Enabled"}],
    "card": {"name": "A stand-in", "total_memory": 96e9, "multi_processor_count": 188, "capability": [12, 0], "gpu": "GPU-1"},
}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in on the path, and a card; returns the file with a line per run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    executable(folder / "trtllm-bench", f"import runpy; runpy.run_path({trtllm_bench.__file__!r}, run_name='__main__')")
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_CALLS", str(calls))
    llm_api.install(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in ("STAND_IN", "STAND_IN_LLM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(card, "look", lambda environment: FACTS)
    monkeypatch.setattr(plan, "_doctor", lambda runner: {"active": True, "facts": [["GPU", "SM120"]], "verdicts": []})
    return calls


def executable(path: Path, code: str) -> None:
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run(out: Path, *arguments: str) -> int:
    return on_card.main([str(out), "--engine", "tensorrt-llm", "--no-kernels", *arguments])


def read(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found


def called(calls: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


@pytest.mark.all("1.2")
@pytest.mark.parametrize("generation", ["1.2", "1.3"])
def test_a_model_with_and_without(bench: Path, tmp_path: Path, generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", generation)
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "triton")
    monkeypatch.delenv("TRTLLM_B12X_CROSSOVER")
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1") == 0
    found = read(tmp_path)
    with_it, without = found["bench"]
    assert (with_it["with"], without["with"]) == (True, False)
    assert (with_it["tpot_ms"]["p50"], without["tpot_ms"]["p50"]) == (11.5, 14.0)
    assert with_it["ttft_ms"]["p50"] == 154.5
    assert with_it["output_tokens_per_second"] == pytest.approx(1e3 * 1024 / (154.5 + 11.5 * 1023))
    assert with_it["served"] == ["rank 0: 40 of 40 MoE layers on b12x+triton, decode below 64 tokens (NVFP4)"]
    assert found["not_measured"] == []
    assert found["settings_left_out"] == ["TRTLLM_B12X_KERNELS"]
    config = "--extra_llm_api_options" if generation == "1.2" else "--config"
    for call, switch in zip(called(bench), ("1", "0"), strict=True):
        assert call["switches"] == {"TRTLLM_B12X": switch}
        words = call["argv"]
        given = dict(zip(words[words.index("throughput") + 1 :: 2], words[words.index("throughput") + 2 :: 2], strict=False))
        assert words[:3] == ["--model", SUPER, "throughput"]
        assert given["--concurrency"] == "1"
        assert "--max_num_tokens 4096" in " ".join(words)
        options = json.loads(Path(words[words.index(config) + 1]).read_text())
        assert options["cuda_graph_config"] == {"batch_sizes": [1]}
        assert options["moe_config"] == {"backend": "CUTLASS"}
        assert options["kv_cache_config"]["enable_block_reuse"] is False
        dataset = [json.loads(line) for line in Path(words[words.index("--dataset") + 1]).read_text().splitlines()]
        assert [(len(one["input_ids"]), one["output_tokens"]) for one in dataset] == [(2048, 1024)] * 5
    page = (tmp_path / "report.md").read_text()
    row = next(line for line in page.splitlines() if published.TPOT in line)
    assert "| 11.50 | 14.00 | -17.9 % | less | 11.49 (b12x below 64 tokens" in row
    assert "13.97 (CUTLASS, RTX PRO 6000)" in row
    assert "Nothing is missing." in page


def own_b12x(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a TensorRT-LLM that has a b12x class of its own."""
    moe = folder / "tensorrt_llm" / "_torch" / "modules" / "fused_moe"
    moe.mkdir(parents=True)
    (moe / "fused_moe_cute_dsl_b12x.py").write_text("class CuteDslB12xFusedMoE: ...")
    monkeypatch.syspath_prepend(str(folder))


def test_tensorrt_llms_own_b12x_is_a_comparator(bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert run(out, "--model", SUPER, "--concurrency", "1") == 0
    assert read(out)["other_backends"] == {"CUTEDSL": "TensorRT-LLM is not installed in this Python"}
    assert "- CUTEDSL is not measured: TensorRT-LLM is not installed in this Python" in (out / "report.md").read_text()
    own_b12x(tmp_path / "bin", monkeypatch)
    assert run(out, "--model", SUPER, "--concurrency", "1") == 0
    assert [call["switches"]["TRTLLM_B12X"] for call in called(bench)] == ["1", "0", "0"], "the other two are measured"
    words = called(bench)[-1]["argv"]
    assert json.loads(Path(words[words.index("--config") + 1]).read_text())["moe_config"] == {"backend": "CUTEDSL"}
    found, page = read(out), (out / "report.md").read_text()
    assert [(run["with"], run["backend"]) for run in found["bench"]] == [
        (True, "CUTLASS"),
        (False, "CUTLASS"),
        (False, "CUTEDSL"),
    ]
    title = "Slower with the package by 4.5 %: " + Path(SUPER).name + ", 2048 in, 1024 out, 1 at a time, TPOT P50 11.50 ms, "
    assert page.startswith(f"# {title}without it on CUTEDSL 11.00 ms, and 1 more. TRTLLM_B12X=0 turns the package off")
    row = next(line for line in page.splitlines() if line.startswith("|") and published.TPOT in line)
    assert row.startswith(f"| {Path(SUPER).name} | 2048 / 1024 | 1 | TPOT P50, ms | 11.50 | 14.00 | -17.9 % | less |")
    assert row.endswith("| 11.00 |")
    assert "11.50 ms with, 14.00 ms without (-17.9 %), 11.00 ms on CUTEDSL" in found["issue"]
    monkeypatch.setenv("STAND_IN", "fallback")
    assert run(out, "--model", SUPER, "--concurrency", "1", "--again") == 0
    assert "CUTEDSL: the log names no CuteDslB12x class, so CUTLASS may have served" in (out / "report.md").read_text()
    (tmp_path / "bin" / "tensorrt_llm" / "_torch" / "modules" / "fused_moe" / "fused_moe_cute_dsl_b12x.py").unlink()
    assert host.backends() == {"CUTEDSL": "this TensorRT-LLM has no b12x class of its own"}


MIXED = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}}}
PLAIN = {f"{e}.{n}.weight": torch.zeros((128, 64) if n == "w2" else (64, 128)) for e in (0, 1) for n in ("w1", "w2", "w3")}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, ""),
        ({"quantization": {"quant_algo": "W4A16_NVFP4"}}, ""),
        ({"quantization": MIXED}, ""),  # one of two layers is served
        ({"quantization": {"group_size": 32}}, "model.layers.0.mlp is not served (GROUP_SIZE: NVFP4 with group size 32"),
        ({"config": {"hidden_act": "gelu"}}, "is not served (ACTIVATION: activation gelu"),
        ({"quantization": {"quant_algo": "W4A16_MXFP4", "group_size": 32}}, "TensorRT-LLM refuses it on SM120 and SM121"),
        ({"quantization": {"quant_algo": "FP8"}}, "is not served (QUANTIZATION: the experts are FP8"),
    ],
)
def test_a_model_that_the_package_would_not_serve_is_refused(
    bench: Path, tmp_path: Path, written: dict[str, Any], expected: str, capsys: Any
) -> None:
    """Before anything is measured; the tests' own choice of families does not count."""
    folder = tmp_path / "model"
    tensors = mxfp4.random_experts(2, 128, 64) if "MXFP4" in str(written) else random_experts(2, 128, 64)
    write_checkpoint(folder, [tensors, *([PLAIN] if written.get("quantization") is MIXED else [])], top_k=1, **written)
    assert run(tmp_path, "--model", str(folder), "--dry-run") == (2 if expected else 0)
    assert expected in capsys.readouterr().err
    assert called(bench) == []


def test_a_name_on_the_hub_that_the_package_would_not_serve_is_refused(bench: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, "--model", "RedHatAI/gemma-4-26B-A4B-it-NVFP4") == 2
    error = capsys.readouterr().err
    assert "its NVFP4 in compressed-tensors experts are not served: TensorRT-LLM's weight mapper does not rename" in error
    assert called(bench) == []
    for name in ("nvidia/Qwen3.6-35B-A3B-NVFP4", "openai/gpt-oss-20b", "somebody/unknown"):
        assert refusals.refusal(name, "tensorrt-llm") == ""


def test_a_second_start_goes_on(bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1") == 0
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1") == 0
    assert len(called(bench)) == 2, "measured once"
    name = f"bench-{Path(SUPER).name}-2048-1024-c1-with"
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1", "--again", name) == 0
    assert [call["switches"]["TRTLLM_B12X"] for call in called(bench)] == ["1", "0", "1"]
    # Another load is measured, those that are there stay.
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1", "4") == 0
    assert len(called(bench)) == 5
    expected = [(concurrency, with_it) for concurrency in (1, 4) for with_it in (True, False)]
    assert [(r["load"]["concurrency"], r["with"]) for r in read(tmp_path)["bench"]] == expected
    # On another driver nothing holds.
    monkeypatch.setattr(card, "look", lambda environment: {**FACTS, "nvidia_smi": [{"uuid": "GPU-1", "driver_version": "590.2"}]})
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1") == 0
    assert len(called(bench)) == 7
    capsys.readouterr()
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1", "8", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:6] for line in lines[:-2]] == ["  done"] * 4 + ["   5 m"] * 2 + ["  done"] * 2
    assert lines[-2].startswith("about 10 minutes")
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1", "8", "--dry-run", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert [step["done"] for step in planned] == [True] * 4 + [False] * 2 + [True] * 2
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == read(tmp_path)
    assert run(tmp_path, "--model", SUPER, "--again", "nothing") == 2
    assert (
        "--again nothing: no such step; with these options the steps are doctor, trtllm-bench, bench-" in capsys.readouterr().err
    )


def test_a_dry_run_looks_at_the_model_the_disk_and_the_gpu(
    bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for model in (str(tmp_path / "nonexistent"), "nonexistent"):
        assert run(tmp_path, "--model", model, "--dry-run") == 2
        assert (
            f"--model {model} is neither a folder that exists nor a Hugging Face name such as nvidia/" in capsys.readouterr().err
        )
    for free, memory, few in ((500e9, 96e9, 0), (50e9, 96e9, 1), (500e9, 32e9, 1)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        facts = {**FACTS, "card": {**FACTS["card"], "total_memory": memory}}
        monkeypatch.setattr(card, "look", lambda environment, facts=facts: facts)
        assert run(tmp_path / "out", "--model", SUPER, "--dry-run") == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert line.startswith(f"{SUPER}: about 72 GB, a download of 12 minutes at 100 MB/s into {tmp_path / 'hf' / 'hub'} (")
        assert f"{free / 1e9:.0f} GB free" in line
        assert f"the GPU has {memory / 1e9:.0f} GB" in line
        assert line.count("TOO FEW") == few
        assert not (tmp_path / "out").exists(), "a dry run creates nothing"
    write_checkpoint(tmp_path / "model", [random_experts(2, 128, 64)], top_k=1)
    assert run(tmp_path, "--model", str(tmp_path / "model"), "--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path / 'model'}: about 0 GB; the GPU has 32 GB"


def test_an_interruption_loses_nothing(bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1") == 0
    monkeypatch.setenv("STAND_IN", "interrupt")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest-xdist may ignore it
    try:
        assert run(tmp_path, "--model", SUPER, "--concurrency", "1", "4") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    found = read(tmp_path)
    assert [(run["load"]["concurrency"], run["with"]) for run in found["bench"]] == [(1, True), (1, False)]
    assert [line["because"] for line in found["not_measured"]] == ["the run was interrupted before it"] * 2
    assert not list(tmp_path.rglob(".*")), "no file is half written"
    monkeypatch.delenv("STAND_IN")
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1", "4") == 0
    assert len(read(tmp_path)["bench"]) == 4
    assert len(called(bench)) == 5


@pytest.mark.parametrize(
    ("how", "because"),
    [
        ("crash", "ended with 1"),
        ("no report", "wrote no report; out of memory looks so"),
        ("unserved", "the engine would be compared with itself: rank 0: layers stay on CUTLASS: FLASHINFER: none is installed"),
    ],
)
def test_a_step_that_fails_is_in_the_report(
    bench: Path, tmp_path: Path, how: str, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", how)
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1") == 1
    found = read(tmp_path)
    lines = [line["because"] for line in found["not_measured"]]
    assert because in lines[0]
    assert len(lines) == (1 if how == "unserved" else 2)
    page = (tmp_path / "report.md").read_text()
    assert because in page
    assert ("| - | 14.00 | - | less |" in page) == (how == "unserved")  # the run without the package
    if how == "crash":
        assert "CUDA out of memory" in lines[0]
    monkeypatch.delenv("STAND_IN")
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1") == 0, "what failed is tried again"
    if how == "no report":
        monkeypatch.setenv("STAND_IN", how)
        assert run(tmp_path, "--model", SUPER, "--concurrency", "1", "--again") == 1, "and an older report is no report"


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    runner = Runner(tmp_path, timeout_s=1.0)
    with pytest.raises(StepError, match=r"not done after 0 minutes; --timeout"):
        runner.command("slow", ["sh", "-c", "sleep 60 & echo $!; wait"])
    grandchild = int(runner.path("slow", ".log").read_text().splitlines()[-1])
    status, deadline = Path(f"/proc/{grandchild}/stat"), time.monotonic() + 30
    while status.exists() and status.read_text().split()[2] != "Z":  # a busy machine takes a moment to end it
        assert time.monotonic() < deadline, "its workers go with it"
        time.sleep(0.05)


def test_without_trtllm_bench_or_the_package(tmp_path: Path, bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1") == 1
    lines = {line["step"]: line["because"] for line in read(tmp_path)["not_measured"]}
    assert len(lines) == 3
    assert lines["trtllm-bench"].startswith("trtllm-bench is not on the path: run this with the environment of TensorRT-LLM")
    assert all(because.count("trtllm-bench is not on the path") == 1 for because in lines.values())
    monkeypatch.setattr(card, "look", lambda environment: {**FACTS, "versions": {"tensorrt-llm": "1.3.0"}})
    assert run(tmp_path, "--model", SUPER, "--concurrency", "1") == 1
    assert "not installed in this environment" in read(tmp_path)["not_measured"][0]["because"]


@pytest.mark.all
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: Any) -> None:
    """In this very environment."""
    assert run(tmp_path) == 2
    assert capsys.readouterr().err.startswith("error: torch sees no GPU")
    assert not any(tmp_path.iterdir())
    assert card.look()["versions"]["torch"]
    doctor = plan._doctor(Runner(tmp_path, 60))
    assert doctor["active"] is False
    assert ["GPU", "none"] in doctor["facts"]
    with pytest.raises(StepError, match=r"ended with 2.*this measures on a GPU"):
        plan._kernels(Runner(tmp_path, 60), "Qwen3-30B-A3B", "")


def test_a_report_that_cannot_be_written(bench: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "report.json").mkdir()
    assert run(tmp_path) == 2
    assert "report.json" in (said := capsys.readouterr().err)
    assert "cannot be written (Is a directory); fix that, then run the same command again" in said
    (tmp_path / "file").touch()
    for out in ("file", "file/out", "\udcff"):
        with pytest.raises(SystemExit, match="2"):
            run(tmp_path / out)
        words = "must be UTF-8" if out == "\udcff" else f"{out} must be a folder that can be written; choose another one"
        assert words in capsys.readouterr().err


def test_a_card_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StepError, match=r"benchmarks.on_card.card ended with 1"):
        card.look()


def test_a_defect_costs_one_step(tmp_path: Path) -> None:
    runner, step = Runner(tmp_path, 1), Step("broken", "", {}, Mock(side_effect=ZeroDivisionError("of ours")), 1)
    record = runner.run(step)
    assert record["because"] == "ZeroDivisionError: of ours"
    assert json.loads((tmp_path / "steps" / "broken.json").read_text())["state"] == "failed"
    assert runner.stored(step) is None


def test_recipes_are_those_of_the_published_figures(tmp_path: Path) -> None:
    loads = {recipe.model: recipe.loads for recipe in recipes.RECIPES}
    first, overview = loads["Nemotron-3-Super"][0], loads["Qwen3-30B-A3B"][-1]
    files = {name: Path(name) for name in ("dataset", "options", "report")}
    words = host.throughput("trtllm-bench", ["--config"], "nvidia/Qwen3-30B-A3B-FP4", recipes.OTHER, overview, files)
    assert "--max_num_tokens" not in words
    assert words[words.index("--concurrency") + 1] == "-1"
    assert recipes.recipe_for("nvidia/Qwen3-30B-A3B-FP4").model == "Qwen3-30B-A3B"
    assert recipes.recipe_for("/models/my-own") is recipes.OTHER
    for figure in published.FIGURES:
        assert figure.model in loads
    # A folder is given by both of its names, and bounds the ids.
    folder = tmp_path / "nemotron-3-super-mine"
    folder.mkdir()
    write_json(folder / "config.json", {"text_config": {"vocab_size": 1200}})
    words = host.throughput("trtllm-bench", ["--config"], str(folder), recipes.recipe_for(str(folder)), first, files)
    assert words[1:5] == ["--model", SUPER, "--model_path", str(folder)]
    recipes.write_dataset(tmp_path / "data", first, recipes.vocabulary_of(str(folder)))
    ids = [i for line in (tmp_path / "data").read_text().splitlines() for i in json.loads(line)["input_ids"]]
    assert 0 < min(ids) < max(ids) < 1200


def test_a_report_of_another_form_is_named(tmp_path: Path) -> None:
    partial: dict[str, Any] = {"streaming_metrics": {}, "performance": {}}
    for content in ("{", "[]", json.dumps({"performance": {}}), json.dumps(partial)):
        (tmp_path / "r.json").write_text(content)
        with pytest.raises(StepError, match=r"r\.json has not the form that is known"):
            host.read(tmp_path / "r.json")


def test_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GB10 does not know its memory's clock; an older driver refuses a field."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_state(["clocks.sm"]) == []
    executable(tmp_path / "nvidia-smi", "print('581.80, 2418')")  # a driver is no number
    assert gpu_state(["driver_version", "clocks.sm"]) == [{"driver_version": "581.80", "clocks.sm": 2418.0}]
    executable(tmp_path / "nvidia-smi", "print('No devices were found')")
    assert gpu_state(["driver_version", "clocks.sm"]) == []
    code = (
        "import sys; fields = sys.argv[1].split('=')[1].split(',')\n"
        "if 'new.field' in fields or sys.argv[3:] not in ([], ['--id=GPU-1']): sys.exit(2)\n"
        "print(', '.join({'clocks.sm': '2418', 'clocks.mem': '[N/A]', 'pstate': 'P0'}[f] for f in fields))"
    )
    executable(tmp_path / "nvidia-smi", code)
    assert gpu_state(["clocks.sm", "clocks.mem", "pstate"]) == [{"clocks.sm": 2418.0, "pstate": "P0"}]
    assert gpu_state(["clocks.sm", "new.field"], "GPU-1") == [{"clocks.sm": 2418.0}]
    assert gpu_state(["clocks.sm"], "GPU-2") == []


def test_clocks_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_EVERY_S", 0.0)
    (tmp_path / "count").touch()
    code = f"import pathlib; calls = pathlib.Path({str(tmp_path / 'count')!r}); n = len(calls.read_bytes())\n"
    executable(tmp_path / "nvidia-smi", code + "calls.write_bytes(b'x' * (n + 1)); print(f'{800 + 100 * n}, [N/A], 50.5, 40')")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    done = Runner(tmp_path, 60).command("load", ["sleep", "1.4"])
    assert done.clocks["clocks.sm"]["least"] == 800.0
    assert done.clocks["clocks.sm"]["most"] >= 900.0
    assert done.clocks["power.draw"] == {"least": 50.5, "median": 50.5, "most": 50.5}
    assert "clocks.mem" not in done.clocks
