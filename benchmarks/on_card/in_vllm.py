# SPDX-License-Identifier: Apache-2.0
"""Serve a model in vLLM: ``benchmarks.served`` with the package, without it, and on the backends that a user may name."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.on_card.host import MAX_SEQ_LEN
from benchmarks.on_card.steps import DONE, Runner, Step, StepError, need_package

PYTHON = sys.executable
NOT_INSTALLED = "vLLM is not installed: run this with its Python, or in its container"
_START_MINUTES = 5
"""Estimated minutes of one start with its measurements. Every side is started twice."""
REQUESTS = (1, 2, 4, 8, 16, 32, 64)
LAYERS = ("Qwen3-30B-A3B", "Qwen3.6-35B-A3B")
"""Geometries that ``benchmarks.vllm`` times."""
BACKENDS = {"marlin": "", "flashinfer_b12x": "flashinfer", "b12x": "b12x"}
"""Values of vLLM's ``--moe-backend`` on SM12x (``config/kernel.py`` of 0.33.0), and the module that each needs besides vLLM."""


def backends() -> dict[str, str]:
    """Return each backend with the reason why it cannot be measured, or an empty string. vLLM is not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return dict.fromkeys(BACKENDS, NOT_INSTALLED)
    try:
        text = (Path(spec.origin).parent / "config" / "kernel.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = set(re.findall(r'"(\w+)"', text.partition("MoEBackend = Literal[")[2].partition("]")[0]))
    found = {}
    for name, module in BACKENDS.items():
        missing = module and importlib.util.find_spec(module) is None
        why = f"{module} is not installed" if missing else ""
        found[name] = why if name in names else f"this vLLM has no --moe-backend {name}"
    return found


def layer(geometry: str) -> Step | None:
    """Return the step that times a layer as vLLM calls it, with our experts and on Marlin."""
    if geometry not in LAYERS:
        return None
    measure = functools.partial(_layer, geometry=geometry)
    return Step(f"vllm-{geometry}", f"our experts and Marlin in vLLM's layer of {geometry}", {"geometry": geometry}, measure, 4)


def _layer(runner: Runner, geometry: str) -> dict[str, Any]:
    _need_vllm()
    folder = runner.path(f"vllm-{geometry}", "")
    command = [PYTHON, "-m", "benchmarks.vllm", str(folder), "--model", geometry]
    done = runner.command(f"vllm-{geometry}", command)
    file = folder / "vllm.json"
    if not file.exists():  # benchmarks.vllm continues after a failed layer, and writes after every row
        raise StepError(f"no layer was measured: {done.log}")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    shutil.rmtree(folder)
    return {"vllm": found, "clocks": done.clocks}


def _need_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise StepError(NOT_INSTALLED)


def runs(model: str, requests: Sequence[int], others: Sequence[str]) -> list[Step]:
    """Return the step that serves a model on all sides: ``benchmarks.served`` takes turns between them."""
    counts, label = sorted(requests or REQUESTS), Path(model).name
    name = f"served-{label}"
    measure = functools.partial(_serve, name=name, model=model, requests=counts, others=others)
    beside = f" and on {', '.join(others)}" if others else ""
    title = f"{label} with and without the package{beside}, {', '.join(map(str, counts))} requests"
    asked = {"model": model, "requests": counts, "others": list(others)}
    return [Step(name, title, asked, measure, _START_MINUTES * 2 * (2 + len(others)))]


def _serve(runner: Runner, name: str, model: str, requests: Sequence[int], others: Sequence[str]) -> dict[str, Any]:
    """Run ``benchmarks.served``, which goes on where it was interrupted. Exit status 1 means that a part was not measured.

    Raises:
        StepError: no token count was measured on two sides.
    """
    need_package(runner)
    _need_vllm()
    out = runner.out / "served" / Path(model).name
    local = str(Path(model).absolute()) if Path(model).is_dir() else model
    command = [PYTHON, "-m", "benchmarks.served", str(out), local, "--requests", ",".join(map(str, requests)), "--json"]
    command += ["--again"] if runner.state(name) == DONE else []  # measured before, so the caller wants it measured again
    for backend in others:
        command += ["--without-backend", backend]
    done = runner.command(name, command, ok=(0, 1))
    try:
        (found,) = json.loads((out / "served.json").read_text(encoding="utf-8"))["models"]
        times = [one for one in found["requests"].values() if {"with_ms", "without_ms"} <= one.keys()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StepError(f"{out / 'served.json'}: {type(error).__name__}: {error} ({done.log})") from None
    if not times:
        raise StepError(f"not measured with and without the package: {'; '.join(not_measured(found))}")
    return {"served": found, "clocks": done.clocks, "command": command}


def not_measured(model: dict[str, Any]) -> list[str]:
    """Return the parts of a model that ``benchmarks.served`` did not measure, with the reasons."""
    return [f"{row['what']}: {row['why']}" for row in model.get("not_measured", [])]


def options(model: str) -> dict[str, Any]:
    """Return options of ``vllm.LLM`` for greedy prompts: little memory and few graphs, without prefix caching."""
    return {"max_model_len": MAX_SEQ_LEN, "max_num_seqs": 8, "enable_prefix_caching": False}
