# SPDX-License-Identifier: Apache-2.0
"""The report of ``python -m benchmarks.on_card``: kernels beside the benchmark's own, answers, and its page in one file."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.on_card import __main__ as on_card
from benchmarks.on_card import greedy, page, plan, report
from benchmarks.on_card.card import identity
from benchmarks.on_card.steps import Runner, Step, gpu_state
from tests.unittest.test_on_card import FACTS, SUPER, bench, executable, read, run  # noqa: F401
from tests.unittest.test_peers import results


def _decode() -> dict[str, Any]:
    """What benchmarks.peers writes; one error is not a number."""
    found = results()
    found["lines"][1]["error"] = float("nan")
    return found


def _reported(tmp_path: Path, decode: dict[str, Any]) -> dict[str, Any]:
    clocks = {"clocks.sm": {"least": 800.0, "median": 850.0, "most": 900.0}}
    tune = {"tables": [{"microseconds": {"1": {"b12x": 30.0, "triton": 51.0, "host": 60.0}}}]}
    results = {"kernels-Qwen3-30B-A3B": {"peers": decode, "clocks": clocks}, "paths-Qwen3-30B-A3B": {"tune": tune, "clocks": {}}}
    made = [Step(name, name, {}, lambda runner: None, 1) for name in results]
    records = {name: {"state": "done", "result": result, "asked": {}, "seconds": 1.0} for name, result in results.items()}
    return report.write(tmp_path, FACTS, [], made, records, engine="")


def test_the_numbers_are_those_of_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for it writes where it is told to, as the benchmark names its files."""
    (tmp_path / "decode.json").write_text(json.dumps(_decode()))
    code = "import pathlib, shutil, sys; out = pathlib.Path(sys.argv[3])\n"
    code += f"for kind in ('.json', '.md', '.png'): shutil.copy({str(tmp_path / 'decode.json')!r}, out.with_suffix(kind))"
    executable(tmp_path / "python", code)
    monkeypatch.setattr(plan, "PYTHON", str(tmp_path / "python"))
    runner = Runner(tmp_path, 60)
    (step,) = (one for one in plan.steps("tensorrt-llm", [], ["Qwen3.6-35B-A3B"]) if one.name.startswith("kernels-"))
    record = runner.run(step)
    assert json.dumps(record["result"]["peers"]) == json.dumps(_decode())
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == [f"{step.name}.json", f"{step.name}.log"]
    words = (tmp_path / "steps" / f"{step.name}.log").read_text().splitlines()[0]
    assert words.endswith("--geometry Qwen3.6-35B-A3B")
    (tmp_path / "decode.json").write_text(json.dumps({**_decode(), "lines": []}))
    assert runner.run(step)["because"] == "no kernel was measured: dequantize, Qwen3-30B-A3B: it has another format"


def test_the_kernels_of_a_report(tmp_path: Path) -> None:
    found = _reported(tmp_path, _decode())
    assert found["kernels"]["Qwen3-30B-A3B"]["peers"]["lines"][0]["us"] == 17.0
    page = (tmp_path / "report.md").read_text()
    assert "| Qwen3-30B-A3B | 1 | ours, `triton` | 17.0 | 21.2 | 0.42 | 35 | 0.0022 |" in page
    assert "| Qwen3-30B-A3B | 1 | vLLM's Marlin, W4A16 NVFP4 | 31.5 | - | - | - | 0.0047 |" in page
    assert "| Qwen3-30B-A3B | 256 | ours, `triton` | 253.7 | 21.2 | 0.42 | 35 | - |" in page
    assert "| tokens | b12x | triton | host |\n| --- | --- | --- | --- |\n| 1 | 30.0 | 51.0 | 60.0 |" in page
    assert "Never at 90% of 2600 MHz: kernels Qwen3-30B-A3B. Lock the clock (`sudo nvidia-smi -lgc 2600`" in page
    assert "dequantize, Qwen3-30B-A3B: it has another format" in page
    assert "no --model was given" in page
    assert (tmp_path / "kernels.png").exists() == ("kernels.png" in page)


# ---- answers, and the page in one file ---------------------------------------------------------------------------------


ONE = ("--model", SUPER, "--concurrency", "1")


@pytest.mark.usefixtures("bench")
def test_where_answers_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, *ONE) == 0
    (found,) = read(tmp_path)["answers"]
    assert (found["equal"], found["prompts"], found["repeated"]) == (29, 32, {"with": 32, "without": 31})
    ended, unlisted, likeliest = found["differences"]
    assert (likeliest["token"], round(likeliest["margin"], 3), likeliest["bound"]) == (5, 0.2, False)
    assert (unlisted["token"], round(unlisted["margin"], 3), unlisted["bound"]) == (3, 0.9, True)
    assert (ended["token"], ended["tokens"][0], ended["bound"]) == (10, None, True)
    text = (tmp_path / "report.md").read_text()
    name = Path(SUPER).name
    assert f"| {name} | 29 of 32 | 1 | 2 | at least 1.50 nats | 32 of 32 | 31 of 32 |" in text
    assert re.search(r"\| `1, 1, 2, 3, 5, 8, 13,` \| 3 \| at least 0.90 nats \| `[\d ]+` \| `[\d ]+` \|", text)
    line = text.rstrip().splitlines()[-2]
    assert line == (
        "A stand-in, driver 580.1, trtllm-b12x 0.1.0, tensorrt-llm 1.3.0; "
        f"{name}: 2048 in, 1024 out, 1 at a time, TPOT P50 11.50 ms with, 14.00 ms without (-17.9 %), "
        "29 of 32 greedy answers equal, worst margin at least 1.50 nats"
    )
    assert capsys.readouterr().out.endswith(f"Line for an issue:\n{line}\n")
    before = (tmp_path / "steps" / f"answers-{name}-with.json").stat().st_mtime_ns
    assert run(tmp_path, *ONE) == 0
    assert (tmp_path / "steps" / f"answers-{name}-with.json").stat().st_mtime_ns == before, "asked once"


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize(
    ("how", "steps", "because"),
    [
        ("crash", ("with", "without"), "CUDA out of memory"),
        ("unserved", ("with",), "the package served no layer, so the engine would be compared with itself"),
        ("absent", ("with", "without"), "TensorRT-LLM does not import here (No module named 'tensorrt_llm')"),
    ],
)
def test_a_model_that_does_not_answer(
    tmp_path: Path, how: str, steps: tuple[str, ...], because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the run goes on, and the report says why."""
    monkeypatch.setenv("STAND_IN_LLM", how)
    if how == "absent":
        monkeypatch.delenv("PYTHONPATH")
    assert run(tmp_path, *ONE) == 1
    found = read(tmp_path)
    assert [line["step"] for line in found["not_measured"]] == [f"answers-{Path(SUPER).name}-{which}" for which in steps]
    assert all(because in line["because"] for line in found["not_measured"])
    assert (found["answers"], len(found["bench"])) == ([], 2)
    assert "greedy" not in found["issue"]


def _answer(tokens: list[int], *listed: dict[str, float]) -> dict[str, Any]:
    return {"text": " ".join(map(str, tokens)), "tokens": tokens, "logprobs": list(listed)}


def test_the_margin_is_the_hosts() -> None:
    host = _answer([5, 6], {"5": -0.1, "7": -0.4}, {"6": -0.1, "8": float("-inf")})
    assert greedy.difference(_answer([5, 6]), host) is None
    found = greedy.difference(_answer([7, 6], {"7": -9.0}), host)
    assert found is not None
    assert (found["token"], found["tokens"], round(found["margin"], 3)) == (0, [7, 5], 0.3)
    assert (found["with"], found["without"]) == ("7 6", "5 6")
    for ours in ([5, 8], [5]):  # the host lists one token that is likely at all
        found = greedy.difference(_answer(ours), host)
        assert found is not None
        assert (found["token"], found["margin"], greedy.margin(found)) == (1, None, "not known")
    longer = greedy.difference(_answer([5, 6, 9]), host)
    assert longer is not None
    assert longer["margin"] is None


def test_a_host_that_lists_sampled_tokens_alone(bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("STAND_IN_LLM", "floats")
    assert run(tmp_path, *ONE) == 0
    assert [each["margin"] for each in read(tmp_path)["answers"][0]["differences"]] == [None] * 3
    assert "29 of 32 greedy answers equal, worst margin not known" in read(tmp_path)["issue"]


def _tags(text: str) -> tuple[list[str], list[str]]:
    """Return every tag and every address of a page."""
    return re.findall(r"<([a-z]\w*)", text, re.IGNORECASE), re.findall(r"\b(?:src|href)\s*=\s*[\"']?([^\"'\s>]*)", text)


def test_one_page_holds_the_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = _reported(tmp_path, _decode())
    text = (tmp_path / "report.html").read_text()
    tags, addresses = _tags(text)
    assert {"main", "h1", "h2", "table", "th", "td", "li", "code", "img", "pre"} <= set(tags)
    assert not {"script", "link", "a", "iframe"} & set(tags)
    assert len(addresses) == 1
    assert addresses[0].startswith("data:image/png;base64,iVBORw0KGgo")
    assert "color-scheme: light dark" in text
    assert "<title>A stand-in, " in text
    assert written["issue"] in text
    rows = sum(line.startswith("| ") for line in (tmp_path / "report.md").read_text().splitlines())
    assert tags.count("tr") == rows - tags.count("table"), "every row but those of dashes"


def test_a_page_shows_what_models_say_as_text(tmp_path: Path) -> None:
    said = "<script>alert(1)</script> ![x](https://example.com/x.png) [y](https://example.com) a|b *c* `d`"
    rows = [f"| {greedy._code(said[start : start + 40])} | {said[start:].replace('|', '')} |" for start in (0, 20, 60)]
    text = page.html("\n".join(["# A <b> & c", "", "| a | b |", "| --- | --- |", *rows]), tmp_path)
    tags, addresses = _tags(text)
    assert not {"script", "img", "a", "em", "b"} & set(tags)
    assert addresses == []
    assert tags.count("tr") == 4
    assert tags.count("td") == 6
    assert "&lt;script&gt;" in text


def test_without_matplotlib_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _reported(tmp_path, _decode())
    text = (tmp_path / "report.html").read_text()
    assert "No plot: matplotlib is not installed" in text
    assert "<img" not in text


@pytest.mark.all("N/A", "*Supported*", "*Error*", "ERR!")
@pytest.mark.parametrize("word", ["[N/A]", "N/A", "[Not Supported]", "Not Supported", "[Unknown Error]", "ERR!", None])
def test_a_card_without_clocks_and_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str | None) -> None:
    """WSL2 and GB10: the step runs, and the report says that there are no clocks. None: there is no nvidia-smi."""
    (tmp_path / "bin").mkdir()
    if word is not None:
        code = f"import sys; fields = sys.argv[1].split('=')[1].split(',')\nprint(', '.join([{word!r}] * len(fields)))"
        executable(tmp_path / "bin" / "nvidia-smi", code)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("benchmarks.on_card.steps._EVERY_S", 0.0)
    assert not any(gpu_state(["clocks.sm", "power.draw"], "GPU-1"))
    done = Runner(tmp_path, 60).command("load", ["/bin/sleep", "1.2"])
    assert done.clocks == {}
    facts = {**FACTS, "nvidia_smi": gpu_state(["name", "driver_version"]), "clocks": gpu_state(["clocks.max.sm"])}
    assert identity(facts)["uuid"] == "GPU-1"
    found = report.write(tmp_path / "out", facts, [], [], {}, "")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "nvidia-smi gives no clocks here" in text
    assert found["issue"].startswith("A stand-in, driver unknown, ")
    kernels = _reported(tmp_path, _decode())["kernels"]  # their clocks are known, the card's highest is not
    assert "Never at" not in report.markdown({**found, "kernels": kernels, "paths": {}})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "the following arguments are required: OUT"),
        ("OUT --concurrency x", "argument --concurrency: must be a whole number above 0, got x"),
        ("OUT --timeout 0", "argument --timeout: must be a whole number above 0, got 0"),
        # Nothing would be served, and the report would not say why.
        (f"OUT --model {SUPER} --concurrency 1 99", "--concurrency 1 99: these models are run at [1, 4, 8]; choose"),
        ("/dev/null/out", "argument OUT: /dev/null/out must be a folder that can be written; choose another one"),
    ],
)
def test_what_cannot_be_run(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: Any = on_card.main(["--engine", "tensorrt-llm", *arguments.split()])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("bench")
def test_a_models_layer_is_the_one_that_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert on_card.main([str(tmp_path), "--engine", "tensorrt-llm", "--model", SUPER, "--dry-run", "--json"]) == 0
    names = [step["step"] for step in json.loads(capsys.readouterr().out)]
    assert [name for name in names if name.startswith("kernels-")] == ["kernels-Nemotron-3-Super"]
    assert on_card.main([str(tmp_path), "--dry-run", "--json"]) == 0
    assert sum(step["step"].startswith("kernels-") for step in json.loads(capsys.readouterr().out)) == 3
