# SPDX-License-Identifier: Apache-2.0
"""Run TensorRT-LLM with and without the package: ``trtllm-bench``, its command line and its report."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.geometries import GEOMETRIES
from benchmarks.on_card import package_log
from benchmarks.on_card.recipes import CUTEDSL, CUTLASS, Load, Recipe, options, recipe_for, vocabulary_of, write_dataset
from benchmarks.on_card.steps import Runner, Step, StepError, need_package

COMMAND = "trtllm-bench"
CONFIGS = ("--config", "--extra_llm_api_options")
"""Names of one option. TensorRT-LLM 1.3 and later have the first name."""
_BYTES_OF_A_PARAMETER, _DOWNLOAD = 0.6, 100e6
"""Bytes per parameter, with NVFP4 experts, their block scales, and the rest in bfloat16; bytes per second, a guess."""
MAX_SEQ_LEN = 2048
"""Enough for every greedy prompt. A model's own limit, up to a million, may not fit the KV cache of a small card."""
_B12X = "CuteDslB12x"
"""Prefix of the names of TensorRT-LLM's b12x classes (pull request 13773), also in its log."""


def is_model(model: str) -> bool:
    """Return whether ``model`` is an existing folder or a Hugging Face name."""
    return os.path.isdir(model) or re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) is not None


def fits(model: str, memory: float | None) -> str:
    """Return a line on a model's memory on GPU and disk, and on the time of its download.

    Args:
        memory: bytes of the GPU; None: unknown.
    """
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub").expanduser()
    folder = Path(model) if Path(model).is_dir() else cache / f"models--{model.replace('/', '--')}"
    size = float(sum(file.stat().st_size for file in {path.resolve() for path in folder.rglob("*.safetensors")}))
    if not size and Path(model).is_dir():
        return f"{model}: holds no *.safetensors"
    download, billions = not size, re.search(r"(\d+(?:\.\d+)?)B\b", model)
    if download:
        if billions is None:
            return f"{model}: its download takes a while, and its size is not known here; look at the free space of {cache}"
        size = _BYTES_OF_A_PARAMETER * 1e9 * float(billions[1])
    said = f"{model}: about {size / 1e9:.0f} GB"
    if download:
        free = shutil.disk_usage(next(parent for parent in (cache, *cache.parents) if parent.exists())).free
        said += f", a download of {size / _DOWNLOAD / 60:.0f} minutes at {_DOWNLOAD / 1e6:.0f} MB/s into {cache}"
        said += f" ({free / 1e9:.0f} GB free{'' if free > size else ', TOO FEW: set HF_HOME'})"
    if memory is not None:
        said += f"; the GPU has {memory / 1e9:.0f} GB{'' if memory > size else ', TOO FEW'}"
    return said


def backends() -> dict[str, str]:
    """Return TensorRT-LLM's other backends for these layers, each with the reason why it cannot be measured, or ""."""
    spec = importlib.util.find_spec("tensorrt_llm")
    if spec is None or spec.origin is None:
        return {CUTEDSL: "TensorRT-LLM is not installed in this Python"}
    files = (Path(spec.origin).parent / "_torch").glob("**/*cute_dsl*.py")
    there = any(f"class {_B12X}" in file.read_text(encoding="utf-8", errors="replace") for file in files)
    return {CUTEDSL: "" if there else "this TensorRT-LLM has no b12x class of its own"}


def look() -> list[Step]:
    return [Step(COMMAND, f"which {COMMAND} there is", {}, _look, 1)]


def _look(runner: Runner) -> dict[str, Any]:
    """Return the path of ``trtllm-bench`` and its options.

    Raises:
        StepError: ``trtllm-bench`` is missing, or its help fails.
    """
    need_package(runner)
    path = shutil.which(COMMAND, path=runner.environment.get("PATH"))
    if path is None:
        raise StepError(f"{COMMAND} is not on the path: run this with the environment of TensorRT-LLM, or in its container")
    # trtllm-bench requires a model before it prints the help, but does not load the model.
    done = runner.command(COMMAND, [path, "--model", "none", "throughput", "--help"], TRTLLM_B12X="0")
    text = done.log.read_text(encoding="utf-8", errors="replace")
    found = sorted(set(re.findall(r"--[a-z][a-z_]+", text)))
    return {"path": path, "options": found}


def layer(geometry: str) -> Step:
    """Return the step that times every family and TensorRT-LLM's CUTLASS on a layer."""
    title = f"every family and TensorRT-LLM's CUTLASS on a layer of {geometry}"
    return Step(f"paths-{geometry}", title, {"geometry": geometry}, functools.partial(_layer, geometry=geometry), 2)


def _layer(runner: Runner, geometry: str) -> dict[str, Any]:
    """Run ``trtllm-b12x tune``: the families and TensorRT-LLM's own path in turn, on the installed TensorRT-LLM's layers."""
    g = GEOMETRIES[geometry]
    if g.bias is not None or g.activation not in ("Swiglu", "Relu2"):
        raise StepError("TensorRT-LLM loads no such layer in NVFP4, so there is no path of its own to compare with")
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise StepError("TensorRT-LLM is not installed, so its CUTLASS is not there")
    file = runner.path(f"paths-{geometry}", ".tune.json")
    command = [sys.executable, "-m", "trtllm_b12x", "tune", "--experts", str(g.num_experts), "--top-k", str(g.top_k)]
    command += ["--hidden", str(g.hidden_size), "--intermediate", str(g.intermediate_size), "--activation", g.activation.lower()]
    done = runner.command(f"paths-{geometry}", [*command, "--out", str(file)])
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    if found["embedded_host"]:
        raise StepError("the installed TensorRT-LLM is not of a form that is known here: trtllm-b12x doctor says what differs")
    return {"tune": found, "clocks": done.clocks}


def requests(model: str) -> set[int]:
    return {load.concurrency for load in recipe_for(model).loads if load.concurrency}


def runs(model: str, requests: Sequence[int], others: Sequence[str]) -> list[Step]:
    """Return the steps of a model: each load with the package, without it, and without it on other backends."""
    sides = [(True, CUTLASS), (False, CUTLASS), *((False, backend) for backend in others)]
    loads = [load for load in recipe_for(model).loads if not requests or load.concurrency in requests]
    return [_run(model, load, with_it, backend) for load in loads for with_it, backend in sides]


def _run(model: str, load: Load, with_it: bool, backend: str) -> Step:
    recipe, label = recipe_for(model), Path(model).name
    which, on = "with" if with_it else "without", "" if backend == CUTLASS else f" on {backend}"
    name = f"bench-{label}-{load.name}-{which}{on.replace(' on ', '-').lower()}"
    title = f"{label}, {load.title}, {which} the package{on}"
    asked = {"model": model, "recipe": recipe.model, "load": asdict(load), "with": with_it, "backend": backend}
    measure = functools.partial(bench, name=name, model=model, recipe=recipe, load=load, with_it=with_it, backend=backend)
    return Step(name, title, asked, measure, load.minutes, needs=(COMMAND,))


def answer_options(model: str) -> dict[str, Any]:
    """Return options of TensorRT-LLM's ``LLM``: those of the recipe's first run, in little memory."""
    load = recipe_for(model).loads[0]
    sizes = {"max_batch_size": load.concurrency, "max_num_tokens": load.max_num_tokens, "max_seq_len": MAX_SEQ_LEN}
    return {**options(load), **sizes}


def throughput(path: str, known: list[str], model: str, recipe: Recipe, load: Load, files: dict[str, Path]) -> list[str]:
    """Return the command of one run.

    Args:
        model: a Hugging Face name, or a folder.
        files: ``dataset``, ``options`` and ``report``.
    """
    local = Path(model).is_dir()
    named = (recipe.hf_name or Path(model).name) if local else model
    command = [path, "--model", named, *(["--model_path", str(Path(model).absolute())] if local else [])]
    config = next((name for name in CONFIGS if name in known), CONFIGS[0])
    command += ["throughput", "--backend", "pytorch", "--dataset", str(files["dataset"]), config, str(files["options"])]
    command += ["--num_requests", str(load.requests), "--concurrency", str(load.concurrency or -1), "--streaming"]
    if load.max_num_tokens:
        command += ["--max_batch_size", str(load.concurrency or load.requests), "--max_num_tokens", str(load.max_num_tokens)]
    return [*command, "--report_json", str(files["report"])]


def bench(runner: Runner, name: str, model: str, recipe: Recipe, load: Load, with_it: bool, backend: str) -> dict[str, Any]:
    """Run ``trtllm-bench`` once. ``backend`` is the value of ``moe_config.backend``.

    Raises:
        StepError: the run failed, or its report is incomplete.
    """
    there = runner.result(COMMAND)
    files = {
        "dataset": runner.out / "datasets" / f"{load.input_tokens}-{load.output_tokens}-{load.requests}.jsonl",
        "options": runner.path(f"{name}.options", ".yaml"),
        "report": runner.path(name, ".report.json"),
    }
    write_dataset(files["dataset"], load, vocabulary_of(model))
    files["options"].write_text(json.dumps(options(load, backend), indent=1) + "\n", encoding="utf-8")  # JSON is YAML
    files["report"].unlink(missing_ok=True)
    command = throughput(there["path"], there["options"], model, recipe, load, files)
    done = runner.command(name, command, TRTLLM_B12X="1" if with_it else "0")
    if not files["report"].exists():
        raise StepError(f"{COMMAND} ended with 0 and wrote no report; out of memory looks so: {done.log}")
    found = read(files["report"])
    lines, said = package_log.served(done.log, with_it)
    if backend == CUTEDSL and _B12X not in done.log.read_text(encoding="utf-8", errors="replace"):
        lines = [f"{CUTEDSL}: the log names no {_B12X} class, so CUTLASS may have served"]
    found |= {"served": lines, "said": said, "clocks": done.clocks, "command": command, "options": options(load, backend)}
    if found["requests"] != load.requests:
        raise StepError(f"{load.requests} requests were asked for, {found['requests']} are in {files['report']}")
    return found


def read(path: Path) -> dict[str, Any]:
    """Return the values that are used of ``--report_json`` (``ReportUtility.get_statistics_dict``, ms and tokens/s).

    Raises:
        StepError: the report has an unknown layout.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        streaming, performance = report["streaming_metrics"], report["performance"]
        return {
            "requests": report["request_info"]["num_requests"],
            "ttft_ms": {"p50": float(streaming["ttft_percentiles"]["p50"])},
            "tpot_ms": {"p50": float(streaming["tpot_percentiles"]["p50"])},
            "output_tokens_per_second": performance["system_output_throughput_tok_s"],
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StepError(f"{path} has not the form that is known: {type(error).__name__}: {error}") from None
