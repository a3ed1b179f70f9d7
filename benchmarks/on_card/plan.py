# SPDX-License-Identifier: Apache-2.0
"""The steps of a run, in order, in each engine."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.on_card import greedy, host, in_vllm
from benchmarks.on_card.steps import Runner, Step, StepError

PYTHON = sys.executable


@dataclass(frozen=True)
class Engine:
    """Names and functions that differ between engines."""

    title: str
    module: str
    look: Callable[[], list[Step]]
    """Return the steps that the runs of every model need."""
    layer: Callable[[str], Step | None]
    """Return the step that times our kernels beside the engine's own kernels in a layer of this geometry, or None."""
    runs: Callable[[str, Sequence[int], Sequence[str]], list[Step]]
    """Return the steps that time a model: at these numbers of requests at a time (empty: all), and on these other backends."""
    requests: Callable[[str], set[int]]
    """Return the numbers of requests at a time that a model can be measured with."""
    options: Callable[[str], dict[str, Any]]
    """Return the options with which a model answers greedy prompts."""
    backends: Callable[[], dict[str, str]]
    """Map other backends that a user may name to the reason why they are not measured here, or to an empty string."""


ENGINES = {
    "tensorrt-llm": Engine(
        "TensorRT-LLM", "tensorrt_llm", host.look, host.layer, host.runs, host.requests, host.answer_options, host.backends
    ),
    "vllm": Engine(
        "vLLM", "vllm", list, in_vllm.layer, in_vllm.runs, lambda model: set(in_vllm.REQUESTS), in_vllm.options, in_vllm.backends
    ),
}


def steps(
    engine: str, models: Sequence[str], geometries: Sequence[str], requests: Sequence[int] = (), vllm: str = ""
) -> list[Step]:
    """Return all steps.

    Args:
        engine: name in ``ENGINES``.
        requests: numbers of requests at a time to run; empty: all.
        vllm: folder with parts of vLLM's wheel; empty: the installed vLLM.
    """
    in_engine = ENGINES[engine]
    found = [Step("doctor", "doctor: which kernels will serve here", {}, _doctor, 0.5)]
    for name in geometries:
        asked = {"geometry": name, "vllm": vllm}
        measure = functools.partial(_kernels, geometry=name, vllm=vllm)
        found.append(Step(f"kernels-{name}", f"kernels of a layer of {name}", asked, measure, 3))
    found += [step for name in geometries if (step := in_engine.layer(name)) is not None]
    found += in_engine.look() if models else []
    others = [name for name, why in in_engine.backends().items() if not why]
    for model in models:
        found += in_engine.runs(model, requests, others)
        found += [_answers(engine, model, with_it) for with_it in (True, False)]
    return found


def _answers(engine: str, model: str, with_it: bool) -> Step:
    label, which = Path(model).name, "with" if with_it else "without"
    name, options = f"answers-{label}-{which}", ENGINES[engine].options(model)
    asked = {"model": model, "options": options, "prompts": greedy.PROMPTS, "max_tokens": greedy.MAX_TOKENS, "with": with_it}
    title = f"{label}, {len(greedy.PROMPTS)} greedy prompts, {which} the package"
    measure = functools.partial(greedy.ask, name=name, engine=engine, model=model, options=options, with_it=with_it)
    return Step(name, title, asked, measure, 3)


def _doctor(runner: Runner) -> dict[str, Any]:
    """Run ``doctor``. Exit status 1 means that no kernel will serve, which is a valid result."""
    done = runner.command("doctor", [PYTHON, "-m", "trtllm_b12x", "doctor", "--json"], ok=(0, 1))
    text = done.log.read_text(encoding="utf-8", errors="replace")
    start, end = text.find("\n{"), text.rfind("\n}")
    try:
        report: dict[str, Any] = json.loads(text[start : end + 2])
    except ValueError:
        raise StepError(f"doctor wrote no JSON: {done.log}") from None
    return {"active": report["active"], "facts": report["facts"], "verdicts": report["verdicts"]}


def _kernels(runner: Runner, geometry: str, vllm: str) -> dict[str, Any]:
    """Run ``benchmarks.peers`` as a user would. Exit status 1 means that a kernel was not measured."""
    file = runner.path(f"kernels-{geometry}", ".peers.json")
    file.unlink(missing_ok=True)
    command = [PYTHON, "-m", "benchmarks.peers", str(file), "--geometry", geometry, *(["--vllm", vllm] if vllm else [])]
    done = runner.command(f"kernels-{geometry}", command, ok=(0, 1))
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for suffix in (".json", ".md", ".png"):
        file.with_suffix(suffix).unlink(missing_ok=True)
    if not results["lines"]:
        raise StepError(f"no kernel was measured: {'; '.join(results['not_measured'])}")
    return {"peers": results, "clocks": done.clocks}
