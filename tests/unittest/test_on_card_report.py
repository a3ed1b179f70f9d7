"""The report of ``python -m benchmarks.on_card``: the kernels' numbers beside the benchmark's own."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.on_card import plan, report
from benchmarks.on_card.steps import Runner, Step
from benchmarks.peers import pages
from benchmarks.peers.ours import Line
from tests.unittest.test_on_card import FACTS, SUPER, executable


def _decode(us: float = 50.0, error: float = 0.0022) -> dict[str, Any]:
    """What benchmarks.peers writes."""
    numbers = (8.0, 21.2, 0.23, 3.7, 1.5, 22.0)
    lines = [
        asdict(
            Line("Qwen3-30B-A3B", "triton", "TP1", routing, tokens, us * tokens, *numbers, error if tokens < 64 else float("nan"))
        )
        for tokens in (1, 64)
        for routing in ("random", "skewed")
    ]
    torch_grouped = [{"geometry": "Qwen3-30B-A3B", "tokens": 1, "us": 98.0, "error": float("nan")}]
    lacking = ["triton_kernels: it is not on PYTHONPATH"]
    return {
        "gpu": "A",
        "copy": 4e12,
        "lines": lines,
        "format": "NVFP4",
        "torch_grouped": torch_grouped,
        "triton_kernels": [],
        "flashinfer": [],
        "not_measured": lacking,
    }


def _reported(tmp_path: Path, decode: dict[str, Any]) -> dict[str, Any]:
    clocks = {"clocks.sm": {"least": 800.0, "median": 850.0, "most": 900.0}}
    tune = {"tables": [{"microseconds": {"1": {"b12x": 30.0, "triton": 51.0, "host": 60.0}}}]}
    results = {
        "kernels-Qwen3-30B-A3B": {"peers": decode, "clocks": clocks},
        "paths-Qwen3-30B-A3B": {"tune": tune, "clocks": {}},
    }
    made = [Step(name, name, {}, lambda runner: None, 1) for name in results]
    records = {name: {"state": "done", "result": result, "asked": {}, "seconds": 1.0} for name, result in results.items()}
    return report.write(tmp_path, FACTS, [], made, records, models=False)


def test_the_numbers_are_those_of_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for it writes where it is told to, as the benchmark names its files."""
    (tmp_path / "decode.json").write_text(json.dumps(_decode()))
    code = "import pathlib, shutil, sys; out = pathlib.Path(sys.argv[3])\n"
    code += f"for kind in ('.json', '.md', '.png'): shutil.copy({str(tmp_path / 'decode.json')!r}, out.with_suffix(kind))"
    executable(tmp_path / "python", code)
    monkeypatch.setattr(plan, "_PYTHON", str(tmp_path / "python"))
    runner = Runner(tmp_path, 60)
    wanted = plan.Wanted((), ("Qwen3.6-35B-A3B",), (1, 64), 2, 10, ())
    (step,) = (one for one in plan.steps(wanted) if one.name.startswith("kernels-"))
    record = runner.run(step)
    assert json.dumps(record["result"]["peers"]) == json.dumps(_decode())
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == [f"{step.name}.json", f"{step.name}.log"]
    words = (tmp_path / "steps" / f"{step.name}.log").read_text().splitlines()[0]
    assert words.endswith("--geometry Qwen3.6-35B-A3B --split TP1 --layers 2 --seconds 10 --tokens 1 64")
    (tmp_path / "decode.json").write_text(json.dumps({**_decode(), "lines": []}))
    assert runner.run(step)["because"] == "no line was measured within 10 s; --seconds gives it longer"


def test_the_kernels_of_a_report(tmp_path: Path) -> None:
    found = _reported(tmp_path, _decode())
    assert found["kernels"]["Qwen3-30B-A3B"]["peers"]["lines"][0]["us"] == 50.0
    page = (tmp_path / "report.md").read_text()
    assert "| B/clock/SM | b12x us (tune) | triton us (tune) | host us (tune) | torch_grouped us |" in page
    assert "| 1 | 50.0 | 21.2 | 0.23 | 3.7 | 30.0 | 51.0 | 60.0 | 98.0 | 0.0022 |" in page
    assert "| 64 | 3200.0 | 21.2 | 0.23 | 3.7 | - | - | - | - | - |" in page
    assert "Never at 90% of 2600 MHz: kernels Qwen3-30B-A3B. Lock the clock (`sudo nvidia-smi -lgc 2600`" in page
    assert "triton_kernels: it is not on PYTHONPATH" in page
    assert "no --model was given" in page
    assert (tmp_path / "kernels.png").exists() == ("kernels.png" in page)


def test_the_floor_stands_beside_a_model(tmp_path: Path) -> None:
    load = {"input_tokens": 2048, "output_tokens": 1024, "requests": 5, "concurrency": 1}
    run = {"model": SUPER, "load": load, "with": True, "served": ["all"], "clocks": {}, "ttft_ms": {"p50": 150.0}}
    run |= {"tpot_ms": {"p50": 10.0}, "output_tokens_per_second": 90.0}
    found = _reported(tmp_path, {**_decode(), "copy": 2e12}) | {"bench": [run]}
    page = report.markdown(found)
    assert "a step reads 11.9 GB (docs/floor.md), 5.94 ms at the copy's rate: 59% of TPOT" in page
    assert "| 10.00 | - | - | less |" in page


def test_the_page_of_the_benchmark_alone() -> None:
    """With every peer."""
    peer = {"geometry": "Qwen3-30B-A3B", "tokens": 1, "us": 47.5, "products_us": 30.0, "error": 0.002}
    found = {**_decode(), "torch": "2.11.0", "triton": "3.6.0", "triton_kernels": [peer], "marlin": [{**peer, "us": 75.0}]}
    found["marlin"].append({**peer, "tokens": 64, "us": 4800.0, "products_us": 4700.0})
    page = pages.markdown(found)
    slower = "**1.05x slower** than triton_kernels"
    assert f"| 1 | 50.0 | 0.23 | 0.0022 | 75.0 | 30.0 | 0.0020 | 47.5 | 30.0 | 0.0020 | 98.0 | - | {slower} |" in page
    assert "| 64 | 3200.0 | 0.23 | - | 4800.0 | 4700.0 | 0.0020 | - | - | - | - | - | 1.50x faster than marlin |" in page
    assert "Not measured: triton_kernels: it is not on PYTHONPATH" in page
