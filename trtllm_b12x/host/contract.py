"""What the package relies on in each host generation, and whether the installed host has it.

``facts.json`` was extracted from the public source, file by file, with repository and commit (``tests/hosts/extract.py``).
A function is given by its parameters in order, ``name``, ``name=default``, ``*`` before the keyword-only ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from . import UnsupportedHostError

GENERATIONS = ("A0", "A", "B", "C1", "C2")
"""Oldest first: 1.2 (early and late), 1.3, 1.3 with ``run_moe(ctx)``, and the package's new place."""

_BUILD = "create_moe.create_moe_backend"
_READ = ("moe_cls", "model_config", "dtype", "bias", "apply_router_weight_on_input")
"""What is read of a call of :data:`_BUILD`, by name and wherever it stands, beside one of :data:`_ACTIVATION`."""
_ACTIVATION = ("activation", "activation_type")
_BACKEND = ("_get_quant_method", "create_weights", "load_weights", "post_load_weights", "quantize_input", "run_moe")
_METHOD = (
    "create_weights",
    "load_expert_w3_w1_weight",
    "load_expert_w2_weight",
    "load_expert_w3_w1_weight_scale_nvfp4",
    "load_expert_w2_weight_scale_nvfp4",
    "load_quant_scales",
    "post_load_weights",
    "setup_quant_scales",
)
_STAGED_METHOD = (
    "_reconcile_and_compute_alphas",
    "_interleave_w2_weight_scale",
    "process_weights_after_loading",
)
_CACHED = ("transform_weights", "cache_derived_state")


def relied_on(generation: str) -> tuple[str, ...]:
    """Functions that are patched, overridden or called: ``module.function``, or ``module.class.method``, inherited ones too."""
    context, staged = generation.startswith("C"), generation not in ("A0", "A")
    backend = (*_BACKEND, *(("cache_derived_state",) if context else ()))
    method = (*_METHOD, *(_STAGED_METHOD if staged else ()), *(_CACHED if context else ()))
    return (
        _BUILD,
        *(() if context else ("create_moe.get_moe_cls",)),
        *(f"fused_moe_cutlass.CutlassFusedMoE.{name}" for name in backend),
        *(f"quantization.NVFP4CutlassFusedMoEMethod.{name}" for name in method),
    )


@cache
def facts() -> dict[str, dict[str, Any]]:
    """Generation to its facts, oldest first."""
    text = Path(__file__).with_name("facts.json").read_text(encoding="utf-8")
    generations: dict[str, dict[str, Any]] = json.loads(text)
    return generations


def recognize() -> str:
    """The newest generation whose facts the installed host satisfies.

    Raises:
        UnsupportedHostError: none; the message names what differs from the nearest.
    """
    found: dict[str, list[str]] = {}
    for generation, known in reversed(facts().items()):
        if not _is_there(known["package"]):
            found[generation] = [f"there is no {known['package']}"]
            continue
        found[generation] = list(_differences(generation))
        if not found[generation]:
            return generation
    # No package at all is farther away than any number of functions.
    nearest = min(found, key=lambda g: (found[g][0].startswith("there is no tensorrt_llm."), len(found[g])))
    version = getattr(importlib.import_module("tensorrt_llm"), "__version__", "?")
    raise UnsupportedHostError(
        f"no adapter fits TensorRT-LLM {version}; from the nearest known generation ({nearest}) it differs: "
        + "; ".join(found[nearest])
    )


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even its parent
        return False


def _differences(generation: str) -> Iterator[str]:
    known = facts()[generation]
    if _STAGED_METHOD[0] not in " ".join(relied_on(generation)):
        yield from _staging(known["package"])
    for name in relied_on(generation):
        module, _, path = name.partition(".")
        try:
            found: Any = importlib.import_module(f"{known['package']}.{module}")
            for part in path.split("."):
                found = getattr(found, part)
            actual = list(inspect.signature(found).parameters.values())
        except (ImportError, AttributeError, TypeError, ValueError):
            yield f"{name} is missing"
            continue
        lacking = _unread(actual) if name == _BUILD else _lacking(known["functions"][name], actual)
        yield from (f"{name}: {difference}" for difference in lacking)


def _staging(package: str) -> Iterator[str]:
    """What a host has that stages weights: with one hook of it renamed, it must not pass for one that does not."""
    try:
        method = importlib.import_module(f"{package}.quantization").NVFP4CutlassFusedMoEMethod
    except (ImportError, AttributeError):
        return  # reported by name
    for name in _STAGED_METHOD:
        if "NVFP4" in getattr(getattr(method, name, None), "__qualname__", ""):
            yield f"quantization.{method.__name__}.{name} is there: weights are staged"


def _unread(actual: list[inspect.Parameter]) -> Iterator[str]:
    there = {parameter.name for parameter in actual}
    yield from (f"no parameter {name}" for name in _READ if name not in there)
    if there.isdisjoint(_ACTIVATION):
        yield f"no parameter {' or '.join(_ACTIVATION)}"


def _lacking(recorded: list[str], actual: list[inspect.Parameter]) -> Iterator[str]:
    """Recorded parameters must be there, positional ones in their place; new ones must be optional."""
    there = {parameter.name: parameter for parameter in actual}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = []
    for word in recorded:
        name, _, default = word.partition("=")
        if name.startswith("*"):
            continue
        names.append(name)
        if name not in there:
            yield f"no parameter {name}"
        elif default and there[name].default is inspect.Parameter.empty:
            yield f"parameter {name} has no default"
    for parameter in actual:
        new = parameter.name not in names and parameter.kind not in several
        if new and parameter.default is inspect.Parameter.empty:
            yield f"new parameter {parameter.name} without a default"
    positional = recorded[: recorded.index("*")] if "*" in recorded else [w for w in recorded if not w.startswith("*")]
    order = [word.partition("=")[0] for word in positional]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    have = [parameter.name for parameter in actual if parameter.kind in kinds]
    if all(name in there for name in order) and have[: len(order)] != order:
        yield f"its parameters are ({', '.join(have)}), not ({', '.join(order)}, ...)"
