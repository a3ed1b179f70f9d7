"""``trtllm-bench`` with and without the package: its command line, and what its report says."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from benchmarks.on_card.recipes import Load, Recipe, options, vocabulary_of, write_dataset
from benchmarks.on_card.steps import Runner, StepError

COMMAND = "trtllm-bench"
CONFIGS = ("--config", "--extra_llm_api_options")
"""One option under two names: the first from 1.3 on."""
_BYTES_OF_A_PARAMETER, _DOWNLOAD = 0.6, 100e6
"""NVFP4 experts and their block scales, the rest in bfloat16; bytes a second, a guess."""
_SERVED = re.compile(r"rank \d+: \d+ of \d+ MoE layers .*")
"""The package's line; what stands before it is the host's to say."""
_SAID = re.compile(r"\[trtllm_b12x\] \[\w+\] (.*)")


def is_model(model: str) -> bool:
    """A folder that is there, or a Hugging Face name."""
    return Path(model).is_dir() or re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) is not None


def fits(model: str, memory: float | None) -> str:
    """Say what a model takes of the GPU and of the disk, and how long its download takes.

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


def look(runner: Runner) -> dict[str, Any]:
    """Which ``trtllm-bench`` there is, and which options it takes.

    Raises:
        StepError: none, or none that can be asked.
    """
    if "trtllm-b12x" not in runner.on.get("versions", {}):
        raise StepError("the package is not installed in this environment, so nothing would be compared: pip install .")
    path = shutil.which(COMMAND, path=runner.environment.get("PATH"))
    if path is None:
        raise StepError(f"{COMMAND} is not on the path: run this with the environment of TensorRT-LLM, or in its container")
    # The model is asked for before the help is; it is not loaded.
    done = runner.command("trtllm-bench", [path, "--model", "none", "throughput", "--help"], TRTLLM_B12X="0")
    text = done.log.read_text(encoding="utf-8", errors="replace")
    found = sorted(set(re.findall(r"--[a-z][a-z_]+", text)))
    return {"path": path, "options": found}


def throughput(path: str, known: list[str], model: str, recipe: Recipe, load: Load, files: dict[str, Path]) -> list[str]:
    """The command of one run.

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


def bench(runner: Runner, name: str, model: str, recipe: Recipe, load: Load, with_it: bool) -> dict[str, Any]:
    """One run of ``trtllm-bench``.

    Raises:
        StepError: it failed, or its report lacks what is asked of it.
    """
    there = runner.result("trtllm-bench")
    files = {
        "dataset": runner.out / "datasets" / f"{load.input_tokens}-{load.output_tokens}-{load.requests}.jsonl",
        "options": runner.path(f"{name}.options", ".yaml"),
        "report": runner.path(name, ".report.json"),
    }
    write_dataset(files["dataset"], load, vocabulary_of(model))
    files["options"].write_text(json.dumps(options(load), indent=1) + "\n", encoding="utf-8")  # JSON is YAML
    files["report"].unlink(missing_ok=True)
    command = throughput(there["path"], there["options"], model, recipe, load, files)
    done = runner.command(name, command, TRTLLM_B12X="1" if with_it else "0")
    if not files["report"].exists():
        raise StepError(f"{COMMAND} ended with 0 and wrote no report; out of memory looks so: {done.log}")
    found = read(files["report"])
    lines, said = served(done.log, with_it)
    found |= {"served": lines, "said": said, "clocks": done.clocks, "command": command, "options": options(load)}
    if found["requests"] != load.requests:
        raise StepError(f"{load.requests} requests were asked for, {found['requests']} are in {files['report']}")
    return found


def served(log: Path, with_it: bool) -> tuple[list[str], list[str]]:
    """Return the package's lines on what it serves, and all of its lines.

    Raises:
        StepError: it served nothing, or it served though it was switched off.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    found, said = ([line.strip() for line in dict.fromkeys(form.findall(text))] for form in (_SERVED, _SAID))
    if with_it and not found:
        why = " / ".join(said[-5:]) or "it said nothing; trtllm-b12x doctor may know"
        raise StepError(f"the package served no layer, so the host would be compared with itself: {why}")
    if found and not with_it:
        raise StepError(f"the package was not off: {found[0]}")
    return found, said


def read(path: Path) -> dict[str, Any]:
    """What is used of ``--report_json`` (``ReportUtility.get_statistics_dict``, ms and tokens/s).

    Raises:
        StepError: it has another form.
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
