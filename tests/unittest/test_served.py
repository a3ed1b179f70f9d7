# SPDX-License-Identifier: Apache-2.0
"""``benchmarks.served`` without a GPU: arguments, order of the engines, an interrupted run, its JSON, table and plot."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import results
from benchmarks.served import compare, kernels, models, reference, report, sides
from benchmarks.served.__main__ import main
from trtllm_b12x.core import settings

ROOT = Path(__file__).parents[2]
MODEL = "qwen3-30b-a3b-nvfp4"
CARD = {"name": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "total_memory": 80 << 30}


def plan(*names: str, **more: Any) -> sides.Plan:
    return sides.Plan(**{"models": names or (MODEL,), "requests": (1, 8), "prompts": (256,), "tokens": 16, "layers": 2, **more})


def runner(out: Path, asked: sides.Plan, **more: Any) -> sides.Runner:
    (out / "records").mkdir(parents=True, exist_ok=True)
    return sides.Runner(asked, out, CARD, {"card": "H100"}, **more)


# ---- arguments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-model"], "nor a Hugging Face name; with random weights there are qwen3-30b-a3b-nvfp4"),
        (["/no/such/folder"], "is neither a checkpoint folder"),
        ([MODEL, "--enable-expert-parallel"], "add --tensor-parallel 2"),
        (["nemotron-3-super", "--tensor-parallel", "2"], "name a checkpoint"),
        ([MODEL, "--without-backend", "with"], "is not a backend of vLLM"),
        ([MODEL, "--tokens", "2"], "8 or more"),
        (["a/model", "b/model"], "an OUT of their own"),
    ],
)
def test_wrong_arguments_end_with_a_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "out"), *arguments, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    assert "has no config.json" in models.refusal(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert models.refusal(str(tmp_path)) == ""


@pytest.mark.parametrize("text", ["0", "1,x", "", "-1"])
def test_counts_are_whole_numbers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["out", MODEL, f"--requests={text}"])
    assert ended.value.code == 2
    assert "must be a whole number above 0" in capsys.readouterr().err


def test_without_a_gpu_or_vllm_a_line_says_what_to_do(tmp_path: Path) -> None:
    """In a process of its own: this Python may have either."""
    command = [sys.executable, "-m", "benchmarks.served", str(tmp_path / "out"), MODEL]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "--dry-run prints the plan anywhere" in done.stderr or "pip install ." in done.stderr


def test_help_and_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text.replace("\n", "").replace(" ", "") for name in models.DRAWN)
    assert main(["out", MODEL, "gpt-oss-20b", "--without-backend", "marlin", "--dry-run", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)
    assert [step["step"].removeprefix(f"{MODEL}.") for step in steps[:7]] == [
        "with.first",
        "without.first",
        "marlin.first",
        "float32.judge",
        "with.second",
        "without.second",
        "marlin.second",
    ]
    assert main(["out", MODEL, "--dry-run"]) == 0
    assert "about" in capsys.readouterr().out.splitlines()[-1]


# ---- models --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.DRAWN)
def test_configurations_are_shortened_to_what_fits(name: str) -> None:
    whole, half = (models.layers_that_fit(name, memory) for memory in (1e12, 24e9))
    assert whole == models.DRAWN[name].base["num_hidden_layers"]
    assert 2 <= half <= whole
    config = models.config(name, 4)
    assert config["num_hidden_layers"] == 4
    lengths = {len(config[key]) for key in ("layer_types", "hybrid_override_pattern") if key in config}
    assert lengths <= {4}
    assert models.format_of(config) == models.DRAWN[name].format
    assert "quantization_config" not in models.DRAWN[name].base


def test_a_checkpoints_format_is_read_where_modelopt_writes_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 9}}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    config = models.read(str(tmp_path))
    assert models.format_of(config) == "NVFP4"
    assert models.text_config(config) == {"vocab_size": 9}


# ---- engines -------------------------------------------------------------------------------------------------------------


def test_sides_differ_by_the_switch_alone(tmp_path: Path) -> None:
    before = {"TRTLLM_B12X_CROSSOVER": "64", "PATH": "/bin", "XDG_CACHE_HOME": "/home/me/.cache"}
    found = {}
    for side in ("with", "without"):
        step = sides.Step(MODEL, side, "first", ())
        found[side] = sides.environment(step, tmp_path, CARD, before)
    changed = {name for name in found["with"] if found["with"][name] != found["without"].get(name)}
    assert changed == {"TRTLLM_B12X", settings.HOPPER.name}
    assert "TRTLLM_B12X_CROSSOVER" not in found["with"]
    assert found["with"]["HF_HOME"] == "/home/me/.cache/huggingface"
    caches = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
    assert all(found["with"][name].startswith(str(tmp_path)) for name in caches)
    blackwell = sides.environment(sides.Step(MODEL, "with", "first", ()), tmp_path, {"capability": [12, 0]}, before)
    assert settings.HOPPER.name not in blackwell


def test_arguments_of_the_engines(tmp_path: Path) -> None:
    asked = plan(without_backends=("marlin",), attention="TRITON_ATTN", prompts=(8192,))
    made = runner(tmp_path, asked)
    jobs = {step.name.removeprefix(f"{MODEL}."): made.job(step) for step in sides.steps(asked)}
    engines = {name: job["engine"] for name, job in jobs.items()}
    assert {name for name, engine in engines.items() if engine.get("moe_backend") == "marlin"} == {
        "marlin.first",
        "marlin.second",
    }
    assert engines["with.first"] == engines["without.first"]
    assert engines["with.first"]["max_model_len"] > 8192
    assert engines["with.first"]["attention_config"] == {"backend": "TRITON_ATTN"}
    assert [name for name, job in jobs.items() if job["judge"]] == ["float32.judge"]
    assert json.loads(json.dumps(jobs["with.first"]))["vocabulary"] == models.config(MODEL)["vocab_size"]
    assert "kv_cache_memory_bytes" not in engines["with.first"]
    assert made.job(sides.steps(asked)[0], 2)["engine"]["kv_cache_memory_bytes"] >= 2**29


@pytest.mark.parametrize("there", [True, False])
def test_without_flashinfer_vllm_takes_triton_for_linear_attention(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: (there or None) if name == "flashinfer" else find(name))
    made, first = runner(tmp_path, plan()), sides.steps(plan())[0]
    assert made.job(first)["engine"].get("additional_config") == (None if there else {"gdn_prefill_backend": "triton"})
    variables = sides.environment(first, tmp_path, CARD, {})
    assert variables.get("VLLM_USE_FLASHINFER_SAMPLER") == (None if there else "0")


def test_a_split_model_is_compared_with_one_gpu(tmp_path: Path) -> None:
    asked = plan(tensor_parallel=2, expert_parallel=True)
    found = {(step.side, step.turn): step for step in sides.steps(asked)}
    assert found["with", "one-gpu"].tasks == ("answers",)
    assert not {"forced", "kernels"} & set(found["with", "first"].tasks)
    made = runner(tmp_path, asked)
    sizes = {turn: made.job(step)["engine"]["tensor_parallel_size"] for (side, turn), step in found.items() if side == "with"}
    assert sizes == {"first": 2, "second": 2, "one-gpu": 1}
    assert asked.parallel == "TP 2, EP"


# ---- a run ---------------------------------------------------------------------------------------------------------------

CHILD = """
import json, os, pathlib, sys, time
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
path = pathlib.Path(job["record"])
record = json.loads(path.read_text()) if path.exists() else {"failed": {}}
with open(os.environ["STARTED"], "a") as log:
    log.write(path.name + "\\n")
def write():
    path.with_suffix(".new").write_text(json.dumps(record)); path.with_suffix(".new").replace(path)
if job["judge"]:
    record = {"judge": {"not_measured": {"logits against float32": "no float32 computation of this"}}}
    write(); sys.exit(0)
with_it = os.environ["TRTLLM_B12X"] == "1"
print("Initializing model took 1.500000 seconds")
print("Model loading took 16.5 GiB memory and 12.250000 seconds")
print("NVFP4 experts run on trtllm-b12x, in place of vLLM's MARLIN" if with_it else "Using 'MARLIN' NvFp4 MoE backend")
record.setdefault("start", {"ready": 30.0, "at_once": job["at_once"]})
record["facts"] = {"experts": {"NVFP4Sm12xExperts" if with_it else "MarlinExperts": 2}, "backends": {}, "attention": {},
                   "kernels": {"1": "cuda"} if with_it else {}, "faults": [], "memory": {"allocated": 1}, "settings": {}}
write()
if job["go"]:
    pathlib.Path(job["go"]).with_suffix(".ready").touch()
    while not pathlib.Path(job["go"]).exists():
        time.sleep(0.01)
for batch in job["requests"]:
    if str(batch) in record.get("decode", {}):
        continue
    time.sleep(float(os.environ.get("SLOW", "0")))
    ms = batch + (2.0 if with_it else 4.0)
    record.setdefault("decode", {})[str(batch)] = {"ms": ms, "p90_ms": ms + 1, "mean_ms": ms, "steps": 14}
    write()
if os.environ.get("BREAK") == path.name:
    print("ValueError: no memory for the KV cache"); sys.exit(1)
record["finished"] = True
write()
"""
"""A process that keeps the record of a job as ``benchmarks.served.child`` does, without an engine."""

HARNESS = """
import sys
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
from pathlib import Path
from benchmarks.served import __main__ as served, report, sides
from tests.unittest import test_served as t
made = t.runner(Path(sys.argv[1]), t.plan(), child=[sys.executable, sys.argv[2]], say=lambda text: print(text, flush=True))
write = lambda: served._write(made, {"card": t.CARD, "versions": {}}, ["OUT"], made.say)
status, _ = served._measure(made, sides.steps(made.plan), write)
write()
sys.exit(status)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    return [sys.executable, str(tmp_path / "child.py")]


def started(tmp_path: Path) -> list[str]:
    lines = (tmp_path / "started").read_text().splitlines()
    return [line.removeprefix(f"{MODEL}.").removesuffix(".json") for line in lines]


def run(made: sides.Runner) -> dict[str, Any]:
    made.run([step for step in sides.steps(made.plan) if not made.done(step)])
    return report.served(made, {"card": CARD, "versions": {"vllm": "0.33.0"}}, ["/home/me/out", MODEL])


ORDER = ["with.first", "without.first", "float32.judge", "with.second", "without.second"]


def test_what_a_run_writes(tmp_path: Path, child: list[str]) -> None:
    made = runner(tmp_path / "out", plan(), child=child)
    entry = run(made)["models"][0]
    assert started(tmp_path) == ORDER
    assert {entry[name] for name in ("model", "format", "parallel")} == {MODEL, "NVFP4", "one GPU"}
    assert (entry["layers"], entry["layers_of"]) == (2, 48)
    assert entry["requests"]["8"] == {
        "with_ms": 10.0,
        "with_p90_ms": 11.0,
        "with_steps": 28,
        "without_ms": 12.0,
        "without_p90_ms": 13.0,
        "without_steps": 28,
        "ratio": 1.2,
    }
    assert entry["starts"]["with"]["second"] == {"construct": 1.5, "load": 12.25, "ready": 30.0, "at_once": 1}
    assert entry["served_by"]["with"]["log"] == ["NVFP4 experts run on trtllm-b12x, in place of vLLM's MARLIN"]
    assert entry["not_measured"] == [
        {"what": f"{MODEL}: logits against float32", "why": "no float32 computation of this"},
    ]
    assert report.headline(entry).startswith(f"{MODEL}, NVFP4, 2 layers: 1.67 times as fast at 1 requests")
    run(made)
    assert started(tmp_path) == ORDER, "all is measured: nothing starts again"
    other = runner(tmp_path / "out", plan(tokens=32), child=child)
    assert not any(map(other.done, sides.steps(other.plan))), "another length is measured anew"


def test_a_failed_engine_is_named_and_tried_again(tmp_path: Path, child: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAK", f"{MODEL}.without.first.json")
    made = runner(tmp_path / "out", plan(), child=child)
    entry = run(made)["models"][0]
    lacking = {row["what"]: row["why"] for row in entry["not_measured"]}
    assert "no memory for the KV cache" in lacking[f"{MODEL}: first start, without"]
    assert entry["requests"]["1"]["ratio"] > 1, "what it measured before is kept"
    monkeypatch.delenv("BREAK")
    entry = run(made)["models"][0]
    assert started(tmp_path)[len(ORDER) :] == ["without.first"]
    assert [row["what"] for row in entry["not_measured"]] == [f"{MODEL}: logits against float32"]


def test_time_runs_out(tmp_path: Path, child: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW", "60")
    made = runner(tmp_path / "out", plan(), child=child, deadline=time.monotonic() + 2)
    entry = run(made)["models"][0]
    reasons = [row["why"] for row in entry["not_measured"]]
    assert reasons == ["--seconds ran out in it", *["--seconds ran out before it"] * 4]
    assert report.headline(entry) == f"{MODEL}: not compared (--seconds ran out in it)"


def test_engines_that_start_at_once_are_measured_one_by_one(
    tmp_path: Path, child: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW", "0.3")
    made = runner(tmp_path / "out", plan(), child=child, at_once=2)
    entry = run(made)["models"][0]
    assert sorted(started(tmp_path)) == sorted(ORDER)
    assert started(tmp_path)[2] == "float32.judge", "it has the card alone"
    assert entry["starts"]["with"]["first"]["at_once"] == 2
    times = sorted((made.out / "records").glob("*.first.go"), key=lambda path: path.stat().st_mtime)
    finished = [made.path(step).stat().st_mtime for step in sides.steps(made.plan)[:2]]
    assert times[1].stat().st_mtime >= min(finished) - 0.2


def test_engines_of_several_models_start_at_once(tmp_path: Path, child: list[str]) -> None:
    made = runner(tmp_path / "out", plan(MODEL, "gpt-oss-20b"), child=child, at_once=4)
    made.run(sides.steps(made.plan))
    content = report.served(made, {}, [])
    assert {entry["starts"][side]["first"]["at_once"] for entry in content["models"] for side in ("with", "without")} == {4}
    assert len(started(tmp_path)) == 2 * len(ORDER)
    assert all(step.turn == "first" or made.done(step) for step in sides.steps(made.plan))


def test_an_interrupted_run_goes_on(tmp_path: Path, child: list[str]) -> None:
    """Ctrl-C while the second engine measures: status 130, no process is left, and the next start does the rest."""
    out = tmp_path / "out"
    command = [sys.executable, "-c", HARNESS, str(out), child[1]]
    environment = {**os.environ, "SLOW": "0.5", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if f"{MODEL}, 1 requests, without: 5.000 ms a token" in line:
                process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, seen
    assert seen.count("interrupted: what was measured is kept, the same command goes on") == 1
    half = json.loads((out / "served.json").read_text())["models"][0]
    assert half["requests"]["1"]["ratio"] == 5 / 3
    assert "ratio" not in half["requests"]["8"]
    assert not _alive(child[1]), "the engine was ended"
    done = subprocess.run(command, cwd=ROOT, env={**environment, "SLOW": "0"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert started(tmp_path) == ["with.first", "without.first", *ORDER[1:]]
    whole = json.loads((out / "served.json").read_text())["models"][0]
    assert whole["requests"]["8"]["ratio"] == 1.2


def _alive(script: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if script.encode() in words and b"-c" not in words:
            found.append(path.parent.name)
    return found


# ---- comparisons ---------------------------------------------------------------------------------------------------------


def test_logits_are_compared_by_token() -> None:
    b = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    same = compare.logits(b, b)
    assert (same["error"], same["same_argmax"], same["tokens"]) == (0, 1, 6)
    assert abs(same["kl"]) < 1e-6
    twice = compare.logits(2 * b, b)
    assert twice["error"] == pytest.approx(1)
    assert twice["same_argmax"] == 1
    p, q = (2 * b).double().softmax(-1), b.double().softmax(-1)
    assert twice["kl"] == pytest.approx(float((q * (q / p).log()).sum(-1).mean()), rel=1e-4)
    assert compare.logits(b.roll(1, -1), b)["same_argmax"] == 0
    one = b.clone()
    one[1, 2] += 100
    assert compare.logits(one, b)["error"] == 0, "the median ignores one token"
    assert compare.logits(one, b)["error_max"] > 10


def test_answers_are_compared_up_to_where_they_part() -> None:
    a = [{"tokens": [1, 2, 3], "logprobs": [-1.0, -1.0, -1.0]}, {"tokens": [1, 2, 3], "logprobs": [-0.5, -0.5, -0.5]}]
    b = [{"tokens": [1, 2, 3], "logprobs": [-1.0, -1.25, -1.0]}, {"tokens": [1, 9, 3], "logprobs": [-0.5, -0.75, -9.0]}]
    assert compare.answers(a, b) == {"answers": 2, "equal": 1, "prefixes": [3, 1], "logprob": 0.25, "parted": [0.25]}


@pytest.mark.parametrize(
    ("ours", "theirs", "end"), [(0.05, 0.06, "with is nearer"), (0.2, 0.05, "without is nearer"), (0.05, 0.051, "equally near")]
)
def test_the_verdict_names_the_nearer_side(ours: float, theirs: float, end: str) -> None:
    assert compare.verdict(ours, theirs) == f"with {ours:.3g}, without {theirs:.3g} from float32: {end}"


def test_activations_are_clamped() -> None:
    """Random weights of unit gain do not reach gpt-oss's limit of 7."""
    gate, up = torch.tensor([[9.0, -9.0, 1.0]]), torch.tensor([[-8.0, 8.0, 0.5]])
    inner = torch.cat((gate, up), -1)
    expected = torch.tensor(
        [[7 * -6.0 / (1 + math.exp(-1.702 * 7)), -9 * 8.0 / (1 + math.exp(1.702 * 9)), 1.5 / (1 + math.exp(-1.702))]]
    )
    assert torch.allclose(reference.activate("swigluoai", inner, None), expected)
    silu = torch.nn.functional.silu
    assert torch.allclose(reference.activate("silu", inner, 5.0), silu(gate.clamp(max=5)) * up.clamp(-5, 5))
    assert torch.equal(reference.activate("silu", inner, None), silu(gate) * up)
    assert torch.equal(reference.activate("relu2_no_mul", inner, None), inner.relu() ** 2)
    with pytest.raises(reference.UnknownModelError, match="situ"):
        reference.activate("situ", inner, None)


def test_kernels_are_sorted_by_their_names() -> None:
    names = {
        "layer": "experts",
        "fc1_kernel": "experts",
        "void marlin_moe_wna16::Marlin<1125899906909960l>": "experts",
        "void vllm::moe::topkGating<8, 128>": "experts",
        "void marlin::Marlin<1125899906909960l>": "dense",
        "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT": "dense",
        "kernel_unified_attention": "attention",
        "reshape_and_cache_kernel_flash": "attention",
        "triton_red_fused_fused_add_rms_norm_moe_forward_0": "rest",
        "_gumbel_sample_kernel": "rest",
    }
    assert {name: kernels.part_of(name) for name in names} == names
    found = kernels.summary({"layer": [20, 300.0], "kernel_unified_attention": [10, 100.0]}, 10)
    assert found["us"] == {"experts": 30, "attention": 10, "dense": 0, "rest": 0, "all": 40}
    assert found["share"]["experts"] == 0.75
    assert found["launches"] == 3
    with pytest.raises(RuntimeError, match="saw no kernel"):
        kernels.summary({}, 10)


# ---- pages ---------------------------------------------------------------------------------------------------------------


def served_json(slower: bool = False) -> dict[str, Any]:
    rows = {
        str(n): {"without_ms": 4.0 + n, "with_ms": 3.0 + n * (2 if slower else 1), "without_p90_ms": 9, "with_p90_ms": 9}
        for n in (1, 8)
    }
    for row in rows.values():
        row["ratio"] = row["without_ms"] / row["with_ms"]
    yard = {"own routes": {"error": 0.16}, "routes of float32": {"error": 0.013}}
    verdict = "with 0.05, without 0.06 from float32: with is nearer"
    entry = {
        "model": MODEL,
        "format": "NVFP4",
        "layers": 48,
        "parallel": "one GPU",
        "weights": "random",
        "requests": rows,
        "ttft": {},
        "starts": {},
        "memory": {},
        "kernels": {},
        "served_by": {"with": {"log": ["x (/home/me/y.log)"]}},
        "agreement": {"logits": {"verdict": verdict, "bfloat16": yard}},
        "command": ["/home/me/out", MODEL, "--tokens", "256"],
        "not_measured": [{"what": f"{MODEL}: second start, with", "why": "ended with 1: killed (/home/me/out/records/x.log)"}],
    }
    return {"form": 1, "card": CARD, "versions": {"vllm": "0.33.0"}, "settings": {}, "models": [entry]}


def test_a_slower_count_is_said_first_with_the_way_out() -> None:
    entry = served_json(slower=True)["models"][0]
    assert "SLOWER at 8 (0.63): TRTLLM_B12X=0 turns the package off" in report.headline(entry)


def test_pages_show_what_was_measured_and_what_was_not(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    block = "<!-- results: begin, written by python -m benchmarks.results -->\n<!-- results: end -->\n"
    (tmp_path / "README.md").write_text(block)
    run = tmp_path / "run.json"
    run.write_text(json.dumps(served_json()))
    assert results.main([], tmp_path) == 0
    assert "| time of a token, served whole | not measured |" in (tmp_path / "README.md").read_text()
    assert results.main(["--take", str(run)], tmp_path) == 0
    page, readme = ((tmp_path / name).read_text() for name in ("docs/results.md", "README.md"))
    row = f"| {MODEL}, NVFP4, 48 layers, one GPU | with, ms | 4.000 | 11.000 |"
    assert row in page
    assert "| ratio | 1.250 | 1.091 |" in page
    assert f"| {MODEL}, NVFP4, one GPU | 200 / 250 (1.25) | 667 / 727 (1.09) | - |" in readme
    assert "with is nearer" in page
    assert "activations in bfloat16: 0.16 from float32, and 0.013 if every token keeps its experts" in page
    assert "second start, with: ended with 1: killed" in page
    assert f"`python -m benchmarks.served out {MODEL} --tokens 256`" in page
    assert "/home/me" not in (tmp_path / "docs" / "served.json").read_text() + page


def test_runs_of_other_models_are_added(tmp_path: Path) -> None:
    """What one run has in place of an earlier one's: a model with the same split. Another card starts anew."""
    (tmp_path / "docs").mkdir()
    split, slower, other = served_json(), served_json(slower=True), served_json()
    split["models"][0] |= {"parallel": "TP 2", "command": ["out", MODEL, "--tensor-parallel", "2"]}
    other["card"] = {"name": "NVIDIA H200"}
    tables = []
    for number, run in enumerate((served_json(), split, slower, other)):
        (tmp_path / f"{number}.json").write_text(json.dumps(run))
        assert results.main(["--take", str(tmp_path / f"{number}.json")], tmp_path) == 0
        tables.append((tmp_path / "docs" / "results.md").read_text())
    ratios = [[line for line in table.splitlines() if f"| {MODEL}" in line and "| ratio |" in line] for table in tables]
    assert [len(lines) for lines in ratios] == [1, 2, 2, 1]
    assert "TP 2 | ratio | 1.250 | 1.091 |" in ratios[2][0]
    assert "one GPU | ratio | 1.000 | 0.632 |" in ratios[2][1]
    assert f"`python -m benchmarks.served out {MODEL} --tensor-parallel 2`" in tables[2]


def test_the_plot_has_a_column_for_each_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    content = served_json()
    assert report.plot(content, tmp_path / "served.png")
    assert (tmp_path / "served.png").read_bytes().startswith(b"\x89PNG")
    content["models"][0]["requests"] = {}
    assert not report.plot(content, tmp_path / "none.png")
