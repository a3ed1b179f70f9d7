"""The steps of a run, in order."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.geometries import GEOMETRIES
from benchmarks.on_card import greedy, host
from benchmarks.on_card.recipes import Load, Recipe, recipe_for
from benchmarks.on_card.steps import Runner, Step, StepError

_PYTHON = sys.executable


def steps(models: Sequence[str], geometries: Sequence[str], concurrency: Sequence[int] = (), vllm: str = "") -> list[Step]:
    """Return all steps.

    Args:
        concurrency: only the recipes' runs with so many requests at a time; empty: all.
        vllm: folder with parts of vLLM's wheel; empty: the installed vLLM.
    """
    found = [Step("doctor", "doctor: which kernels will serve here", {}, _doctor, 0.5)]
    for name in geometries:
        asked = {"geometry": name, "vllm": vllm}
        measure = functools.partial(_kernels, geometry=name, vllm=vllm)
        found.append(Step(f"kernels-{name}", f"kernels of a layer of {name}", asked, measure, 3))
    for name in geometries:
        title = f"every family and the host's CUTLASS on a layer of {name}"
        found.append(Step(f"paths-{name}", title, {"geometry": name}, functools.partial(_paths, geometry=name), 2))
    if models:
        found.append(Step("trtllm-bench", "which trtllm-bench there is", {}, host.look, 1))
    for model in models:
        recipe = recipe_for(model)
        for load in recipe.loads:
            if not concurrency or load.concurrency in concurrency:
                found += [_bench(model, recipe, load, with_it) for with_it in (True, False)]
        found += [_answers(model, recipe, with_it) for with_it in (True, False)]
    return found


def _bench(model: str, recipe: Recipe, load: Load, with_it: bool) -> Step:
    label = Path(model).name
    name = f"bench-{label}-{load.name}-{'with' if with_it else 'without'}"
    title = f"{label}, {load.title}, {'with' if with_it else 'without'} the package"
    asked = {"model": model, "recipe": recipe.model, "load": asdict(load), "with": with_it}
    measure = functools.partial(host.bench, name=name, model=model, recipe=recipe, load=load, with_it=with_it)
    return Step(name, title, asked, measure, load.minutes, needs=("trtllm-bench",))


def _answers(model: str, recipe: Recipe, with_it: bool) -> Step:
    label, which = Path(model).name, "with" if with_it else "without"
    name = f"answers-{label}-{which}"
    asked = {"model": model, "load": asdict(recipe.loads[0]), "prompts": greedy.PROMPTS, "max_tokens": greedy.MAX_TOKENS}
    title = f"{label}, {len(greedy.PROMPTS)} greedy prompts, {which} the package"
    measure = functools.partial(greedy.ask, name=name, model=model, recipe=recipe, with_it=with_it)
    return Step(name, title, {**asked, "with": with_it}, measure, 3)


def _doctor(runner: Runner) -> dict[str, Any]:
    """Exit status 1 says that no kernel will serve, which is an answer."""
    done = runner.command("doctor", [_PYTHON, "-m", "trtllm_b12x", "doctor", "--json"], ok=(0, 1))
    text = done.log.read_text(encoding="utf-8", errors="replace")
    start, end = text.find("\n{"), text.rfind("\n}")
    try:
        report: dict[str, Any] = json.loads(text[start : end + 2])
    except ValueError:
        raise StepError(f"doctor wrote no JSON: {done.log}") from None
    return {"active": report["active"], "facts": report["facts"], "verdicts": report["verdicts"]}


def _kernels(runner: Runner, geometry: str, vllm: str) -> dict[str, Any]:
    """Run ``benchmarks.peers`` as a user would. Exit status 1 says that some kernel was not measured."""
    file = runner.path(f"kernels-{geometry}", ".peers.json")
    file.unlink(missing_ok=True)
    command = [_PYTHON, "-m", "benchmarks.peers", str(file), "--geometry", geometry, *(["--vllm", vllm] if vllm else [])]
    done = runner.command(f"kernels-{geometry}", command, ok=(0, 1))
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for suffix in (".json", ".md", ".png"):
        file.with_suffix(suffix).unlink(missing_ok=True)
    if not results["lines"]:
        raise StepError(f"no kernel was measured: {'; '.join(results['not_measured'])}")
    return {"peers": results, "clocks": done.clocks}


def _paths(runner: Runner, geometry: str) -> dict[str, Any]:
    """``trtllm-b12x tune``: the families and the host's own path in turn, on layers of the installed TensorRT-LLM."""
    g = GEOMETRIES[geometry]
    if g.bias is not None or g.activation not in ("Swiglu", "Relu2"):
        raise StepError("no host loads such a layer in NVFP4, so there is no path of its own to compare with")
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise StepError("TensorRT-LLM is not installed, so its CUTLASS is not there")
    file = runner.path(f"paths-{geometry}", ".tune.json")
    command = [_PYTHON, "-m", "trtllm_b12x", "tune", "--experts", str(g.num_experts), "--top-k", str(g.top_k)]
    command += ["--hidden", str(g.hidden_size), "--intermediate", str(g.intermediate_size), "--activation", g.activation.lower()]
    done = runner.command(f"paths-{geometry}", [*command, "--json", str(file)])
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    if found["embedded_host"]:
        raise StepError("the installed TensorRT-LLM is not of a form that is known here: trtllm-b12x doctor says what differs")
    return {"tune": found, "clocks": done.clocks}
