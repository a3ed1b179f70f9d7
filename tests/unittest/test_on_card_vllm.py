# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.on_card --engine vllm`` where neither card nor vLLM is: stand-ins for vLLM and ``benchmarks.served``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import results
from benchmarks.on_card import __main__ as on_card
from benchmarks.on_card import card, comparison, in_vllm, plan, refusals, report
from benchmarks.on_card.comparison import Row
from benchmarks.on_card.steps import Runner
from tests import llm_api, mxfp4
from tests.checkpoints import write_checkpoint
from tests.unittest.test_on_card import FACTS, SUPER, executable, read
from tests.unittest.test_peers import results as peers

LABEL = Path(SUPER).name
VERSIONS = {"trtllm-b12x": "0.1.0", "vllm": "0.33.0"}
SERVED: dict[str, Any] = {
    "model": LABEL,
    "format": "NVFP4",
    "layers": 40,
    "requests": {
        "1": {
            "without_ms": 4.0,
            "with_ms": 3.0,
            "without_p90_ms": 4.1,
            "with_p90_ms": 3.1,
            "ratio": 1.333,
            "marlin_ms": 4.5,
            "marlin_steps": 9,
        },
        "64": {"without_ms": 12.0, "with_ms": 11.0, "without_p90_ms": 12.1, "with_p90_ms": 11.1, "ratio": 1.091},
    },
    "ttft": {"256": {"without_ms": 30.0, "with_ms": 29.0}},
    "not_measured": [],
}


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins in this process and in commands, and a card; returns the folder of what they read and write."""
    folder = tmp_path / "stand-in"
    folder.mkdir()
    llm_api.install_vllm(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in ("flashinfer", "b12x"):
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    monkeypatch.delenv("STAND_IN_LLM", raising=False)
    monkeypatch.delenv("TRTLLM_B12X_CROSSOVER", raising=False)
    write(folder, SERVED)
    code = (
        "import json, pathlib, sys; words = sys.argv[1:]\n"
        f"folder, out = pathlib.Path({str(folder)!r}), pathlib.Path(words[2])\n"
        "assert words[:2] == ['-m', 'benchmarks.served'], words\n"
        "with (folder / 'calls').open('a') as file: file.write(json.dumps([words, (out / 'served.json').exists()]) + '\\n')\n"
        "out.mkdir(parents=True, exist_ok=True); found = (folder / 'served.json').read_text()\n"
        "(out / 'served.json').write_text(found); sys.exit(json.loads(found)['status'])"
    )
    executable(folder / "python", code)
    monkeypatch.setattr(in_vllm, "PYTHON", str(folder / "python"))
    monkeypatch.setattr(card, "look", lambda environment: {**FACTS, "versions": VERSIONS})
    monkeypatch.setattr(plan, "_doctor", lambda runner: {"active": True, "facts": [["GPU", "SM120"]], "verdicts": []})
    return folder


def write(folder: Path, model: dict[str, Any], status: int = 0) -> None:
    (folder / "served.json").write_text(json.dumps({"card": {}, "versions": {}, "models": [model], "status": status}))


def run(out: Path, *arguments: str) -> int:
    return on_card.main([str(out), "--engine", "vllm", "--no-kernels", "--model", SUPER, *arguments])


def called(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_a_model_on_all_sides(vllm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--concurrency", "64", "1") == 0
    ((words, before),) = called(vllm)
    assert "--again" not in words
    out = str(tmp_path / "served" / LABEL)
    assert words[2:] == [out, SUPER, "--requests", "1,64", "--json", "--without-backend", "marlin"]
    assert not before
    found = read(tmp_path)
    assert found["not_measured"] == []
    assert found["worse"] == []
    assert found["answers"][0]["equal"] == 29
    assert found["other_backends"] == {
        "marlin": "",
        "flashinfer_b12x": "flashinfer is not installed",
        "b12x": "b12x is not installed",
    }
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("# A stand-in, ")
    assert f"| {LABEL} | - | 1 | TPOT P50, ms | 3.00 | 4.00 | -25.0 % | less | - | 4.50 |" in page
    assert f"| {LABEL} | - | 64 | TPOT P50, ms | 11.00 | 12.00 | -8.3 % | less | - | - |" in page
    assert f"| {LABEL} | 256 / 1 | 1 | TTFT P50, ms | 29.00 | 30.00 | -3.3 % | less | - | - |" in page
    assert "- b12x is not measured: b12x is not installed" in page
    line = (
        f"A stand-in, driver 580.1, trtllm-b12x 0.1.0, vllm 0.33.0; {LABEL}: 1 at a time, TPOT P50 3.00 ms with, 4.00 ms without "
        "(-25.0 %), 4.50 ms on marlin, 64 at a time, TPOT P50 11.00 ms with, 12.00 ms without (-8.3 %), "
        "29 of 32 greedy answers equal, worst margin at least 1.50 nats"
    )
    assert found["issue"] == line
    printed = capsys.readouterr().out
    assert printed.endswith(f"Line for an issue:\n{line}\n")
    assert f"served-{LABEL}: TPOT P50 with / without: 1: 3.00 / 4.00 ms, 64: 11.00 / 12.00 ms" in printed
    assert "Slower" not in printed


def test_a_slower_model_is_the_first_line(vllm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = SERVED["requests"] | {"64": {"without_ms": 10.0, "with_ms": 11.0, "marlin_ms": 10.0, "b12x_ms": 10.9}}
    write(vllm, SERVED | {"requests": requests})
    assert run(tmp_path) == 0
    said = f"Slower with the package by 10.0 %: {LABEL}, 64 at a time, TPOT P50 11.00 ms, without it 10.00 ms"
    page = (tmp_path / "report.md").read_text().splitlines()
    assert page[0] == f"# {said}, and 1 more. {report.TURN_OFF}"
    assert page[2].startswith("A stand-in, ")
    assert page[4] == f"- {said.replace('without it', 'without it on marlin')}"
    assert "TRTLLM_B12X=0" in report.TURN_OFF
    assert "TRTLLM_B12X_KERNELS=" in report.TURN_OFF
    assert f"{said}. {report.TURN_OFF}\n" in capsys.readouterr().out
    assert f"<title>{said}" in (tmp_path / "report.html").read_text()
    assert run(tmp_path, "--json") == 0
    captured = capsys.readouterr()
    assert said in captured.err
    assert json.loads(captured.out)["worse"][0] == said


def test_a_difference_within_the_noise_is_not_called_worse() -> None:
    def lines(better: str, with_it: float | None, without: float | None) -> list[str]:
        return comparison.worse(Row("m", "-", 1, "TPOT P50, ms", better, with_it, without))

    assert not any(lines("less", *pair) for pair in ((10.1, 10.0), (9.0, 10.0), (None, 10.0), (10.0, None)))
    assert not lines("more", 99.0, 100.0)
    assert "by 3.0 %" in lines("less", 10.3, 10.0)[0]
    assert "by 11.1 %" in lines("more", 90.0, 100.0)[0]


def test_two_runs_of_the_same_engine_say_how_far_runs_differ() -> None:
    sides = {"with": {"EMULATION": 2}, "without": {"MARLIN": 2}, "marlin": {"MARLIN": 2}, "b12x": {"B12X": 2}}

    def lines(with_ms: float) -> list[str]:
        times = {"8": {"with_ms": with_ms, "without_ms": 1.87, "marlin_ms": 2.29, "b12x_ms": 2.31}}
        model = {"model": "m", "requests": times, "served_by": {name: {"backends": chosen} for name, chosen in sides.items()}}
        return [line for row in comparison.served(model) for line in comparison.worse(row)]

    assert not lines(2.31)
    assert [line.rpartition(", ")[2] for line in lines(2.4)] == ["without it 2.29 ms", "without it on b12x 2.31 ms"]


def test_an_interrupted_run_goes_on_and_a_measured_one_starts_anew(vllm: Path, tmp_path: Path) -> None:
    write(vllm, SERVED | {"requests": {}, "not_measured": [{"what": "with", "why": "the driver stopped"}]}, 1)
    assert run(tmp_path) == 1
    (line,) = read(tmp_path)["not_measured"]
    assert line["because"] == "not measured with and without the package: with: the driver stopped"
    write(vllm, SERVED | {"not_measured": [{"what": "profile of 8 requests", "why": "out of time"}]}, 1)
    assert run(tmp_path) == 1, "what is missing is in the report"
    (line,) = read(tmp_path)["not_measured"]
    assert (line["step"], line["because"]) == (f"served-{LABEL}", "profile of 8 requests: out of time")
    assert run(tmp_path, "--again", f"served-{LABEL}") == 1
    assert [before for _, before in called(vllm)] == [False, True, True]
    assert ["--again" in words for words, _ in called(vllm)] == [False, False, True]
    write(vllm, SERVED, 2)
    assert run(tmp_path, "--again", f"served-{LABEL}") == 1
    assert "ended with 2" in read(tmp_path)["not_measured"][0]["because"]


def test_backends_are_those_of_the_installed_vllm(
    vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = vllm / "vllm" / "config" / "kernel.py"
    kernel.write_text(kernel.read_text().replace('    "flashinfer_b12x",\n', ""))
    (vllm / "b12x").mkdir()
    (vllm / "b12x" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "b12x")
    assert in_vllm.backends() == {"marlin": "", "flashinfer_b12x": "this vLLM has no --moe-backend flashinfer_b12x", "b12x": ""}
    assert run(tmp_path, "--dry-run", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in planned] == [
        "doctor",
        f"served-{LABEL}",
        *(f"answers-{LABEL}-{w}" for w in ("with", "without")),
    ]
    assert "with and without the package and on marlin, b12x, 1, 2, 4, 8, 16, 32, 64 requests" in planned[1]["title"]
    kernel.unlink()
    assert set(in_vllm.backends().values()) == {f"this vLLM has no --moe-backend {name}" for name in in_vllm.BACKENDS}
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(vllm)])
    assert run(tmp_path / "without", "--concurrency", "1") == 1
    assert read(tmp_path / "without")["not_measured"][0]["because"] == in_vllm.NOT_INSTALLED


@pytest.mark.parametrize(
    ("how", "because"),
    [
        ("crash", "CUDA out of memory"),
        ("unserved", "vLLM's MARLIN keeps the NVFP4 experts (512 of 1024 x 2688): KERNEL_PLAN_FAILED: no compiler"),
    ],
)
def test_answers_that_compare_nothing(
    vllm: Path, tmp_path: Path, how: str, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_LLM", how)
    assert run(tmp_path) == 1
    found = read(tmp_path)
    assert because in found["not_measured"][0]["because"]
    assert (found["answers"], len(found["served"])) == ([], 1)


def test_the_engine_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, expected in (
        ((), "vllm"),
        (("vllm",), "vllm"),
        (("tensorrt_llm",), "tensorrt-llm"),
        (("tensorrt_llm", "vllm"), "vllm"),
    ):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, installed=installed: name if name in installed else None)
        assert on_card.default_engine() == expected


def test_hopper_is_measured_by_a_switch(vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def doctor(runner: Runner) -> dict[str, Any]:
        seen.append(runner.environment.get("TRTLLM_B12X_HOPPER"))
        return {"active": True, "facts": [], "verdicts": []}

    monkeypatch.setattr(plan, "_doctor", doctor)
    monkeypatch.setenv("TRTLLM_B12X_HOPPER", "0")
    for major, engine in ((12, "vllm"), (9, "vllm"), (9, "tensorrt-llm")):
        facts = {**FACTS, "card": {**FACTS["card"], "capability": [major, 0]}}
        monkeypatch.setattr(card, "look", lambda environment, facts=facts: facts)
        assert on_card.main([str(tmp_path), "--engine", engine, "--no-kernels", "--again"]) == 1
    assert seen == [None, "1", None]


def test_layers_as_vllm_calls_them(vllm: Path, tmp_path: Path) -> None:
    row = {"model": "Qwen3-30B-A3B", "format": "MXFP8", "tokens": 1, "kernel": "cuda", "ours us": 20.04, "marlin us": 30.04}
    code = (
        "import json, pathlib, sys; words = sys.argv[1:]; assert words[:2] == ['-m', 'benchmarks.vllm'], words\n"
        f"assert words[3:] == ['--model', 'Qwen3-30B-A3B'], words; out = pathlib.Path(words[2]); out.mkdir(); row = {row!r}\n"
        "(out / 'vllm.json').write_text(json.dumps({'layers': [row]}))"
    )
    executable(vllm / "python", code)
    (step,) = (one for one in plan.steps("vllm", [], ["Qwen3-30B-A3B", "Nemotron-3-Super"]) if one.name.startswith("vllm-"))
    record = Runner(tmp_path, 60).run(step)
    assert record["result"]["vllm"] == {"layers": [row]}, record
    records = {"kernels-Qwen3-30B-A3B": {"state": "done", "result": {"peers": peers(), "clocks": {}}, "seconds": 1.0}}
    found = report.write(tmp_path, FACTS, [], [step], {**records, step.name: record}, "")
    assert "| MXFP8 | 1 | cuda | 20.0 | 30.0 |" in (tmp_path / "report.md").read_text()
    assert list(found["in_vllm"]) == ["Qwen3-30B-A3B"]
    executable(vllm / "python", "")
    assert "no layer was measured" in Runner(tmp_path, 60).run(step)["because"]


def test_a_checkpoint_that_only_vllm_loads_is_not_refused(vllm: Path, tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path / "a", [mxfp4.random_experts(2, 128, 64)], top_k=1, quantization={"quant_algo": "W4A16_MXFP4", "group_size": 32}
    )
    assert "TensorRT-LLM refuses it" in refusals.refusal(str(tmp_path / "a"), "tensorrt-llm")
    assert refusals.refusal(str(tmp_path / "a"), "vllm") == ""
    plain = {f"{e}.{n}.weight": torch.zeros((128, 64) if n == "w2" else (64, 128)) for e in (0, 1) for n in ("w1", "w2", "w3")}
    write_checkpoint(tmp_path / "b", [plain], top_k=1, quantization={"quant_algo": "FP8"})
    assert refusals.refusal(str(tmp_path / "b"), "vllm")


def test_a_report_of_vllm_is_taken_in(vllm: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "run") == 0
    target = results.take(tmp_path / "run" / "report.json", tmp_path / "docs")
    kept = json.loads(target.read_text())
    lines = results.gains({f"on-card/{target.name}": kept}, False)
    assert [f"a token of {LABEL}, 1 at a time in vLLM (TPOT P50)", "3.00 ms", "4.00 ms: vLLM's own choice"] in [
        line[:3] for line in lines
    ]
