# SPDX-License-Identifier: Apache-2.0
"""Check that the installed TensorRT-LLM has everything that this package relies on, per generation.

``facts.json`` was extracted from the public source, file by file, with repository and commit (``tests/hosts/extract.py``). It
lists each function's parameters in order: ``name``, ``name=default``, and ``*`` before keyword-only ones.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from trtllm_b12x.environment import packages

GENERATIONS = ("A", "B", "C1", "C2")
"""Generations, oldest first: 1.2, 1.3, 1.3 with ``run_moe(ctx)``, and the new package path."""
CUTLASS = "fused_moe_cutlass.CutlassFusedMoE"
"""``module.class`` that our layer inherits."""

_BUILD = "create_moe.create_moe_backend"
_READ = ("moe_cls", "model_config", "dtype", "bias", "apply_router_weight_on_input")
"""Arguments of ``create_moe_backend`` that are read by name, at any position, in addition to one of ``_ACTIVATION``."""
_ACTIVATION = ("activation", "activation_type")
_BACKEND = ("_get_quant_method", "create_weights", "load_weights", "post_load_weights", "quantize_input", "run_moe")
_LOADS = ("w3_w1_weight", "w2_weight", "w3_w1_weight_scale_nvfp4", "w2_weight_scale_nvfp4")
_METHOD = ("create_weights", *(f"load_expert_{tensor}" for tensor in _LOADS), "load_quant_scales")
_STAGED_METHOD = ("_reconcile_and_compute_alphas", "_interleave_w2_weight_scale", "process_weights_after_loading")
_CACHED = ("transform_weights",)

LAYER, WEIGHTS, *_CALL = (
    tuple(names.split())
    for names in (
        "_using_dynamic_load_balancer apply_router_weight_on_input bias dtype ep_size expert_size_per_partition hidden_size "
        "initial_local_expert_ids intermediate_size intermediate_size_per_partition is_gated_activation layer_load_balancer "
        "num_experts parallel_size quant_config rank routing_method slot_start tp_rank tp_size use_dp",
        "fc2_alpha fc2_input_scale fc31_alpha fc31_input_scale w2_weight w2_weight_scale w3_w1_weight w3_w1_weight_scale",
        "comm_plan do_finalize lora_params output_dtype router_logits token_final_scales token_selected_experts x x_sf",
        "enable_alltoall input_sf_swizzled moe_output",
    )
)
"""Attributes read from a built layer. ``LAYER`` is checked on each layer, because the class does not show them. If one of
``WEIGHTS`` is missing when NVFP4 weights are loaded, TensorRT-LLM serves the layer."""
RECORDS = dict(zip(("MoERunContext", "MoECommPlan"), _CALL, strict=True))
"""Fields read from a call's records, by record name, from C1 on."""


class UnsupportedHostError(RuntimeError):
    """Error: TensorRT-LLM is installed but lacks something that this package relies on."""


def relied_on(generation: str) -> tuple[str, ...]:
    """List patched, overridden and called functions, also inherited ones: ``module.function`` or ``module.class.method``."""
    context, staged = generation.startswith("C"), generation != "A"
    functions = (*_BACKEND, *(("cache_derived_state",) if context else ()))
    method = (*_METHOD, *(_STAGED_METHOD if staged else ()), *(_CACHED if context else ()))
    return (
        _BUILD,
        *(() if context else ("create_moe.get_moe_cls",)),
        *(f"{CUTLASS}.{name}" for name in functions),
        *(f"quantization.NVFP4CutlassFusedMoEMethod.{name}" for name in method),
    )


@cache
def facts() -> dict[str, dict[str, Any]]:
    """Return the facts of each generation, oldest first."""
    text = Path(__file__).with_name("facts.json").read_text(encoding="utf-8")
    generations: dict[str, dict[str, Any]] = json.loads(text)
    return generations


def recognize() -> str:
    """Return the newest generation whose facts the installed TensorRT-LLM satisfies.

    Raise UnsupportedHostError, with the differences from the nearest generation, if no generation fits.
    """
    differences: dict[str, list[str]] = {}
    for generation in reversed(facts()):
        differences[generation] = list(_differences(generation))
        if not differences[generation]:
            return generation
    # A missing package counts as a larger difference than any number of functions.
    nearest = min(differences, key=lambda g: (differences[g][0].startswith("there is no tensorrt_llm."), len(differences[g])))
    version = getattr(importlib.import_module("tensorrt_llm"), "__version__", "?")
    raise UnsupportedHostError(
        f"no adapter fits TensorRT-LLM {version}; from the nearest known generation ({nearest}) it differs: "
        + "; ".join(differences[nearest])
    )


def _differences(generation: str) -> Iterator[str]:
    known = facts()[generation]
    if packages.origin(known["package"]) is None:
        yield f"there is no {known['package']}"
        return
    if _STAGED_METHOD[0] not in " ".join(relied_on(generation)):
        yield from _staging(known["package"])
    for name in relied_on(generation):
        module, _, path = name.partition(".")
        try:
            function = attrgetter(path)(importlib.import_module(f"{known['package']}.{module}"))
            actual = list(inspect.signature(getattr(function, "__func__", function)).parameters.values())
        except (ImportError, AttributeError, TypeError, ValueError):
            yield f"{name} is missing"
            continue
        differences = _unread(actual) if name == _BUILD else _missing(known["functions"][name], actual)
        yield from (f"{name}: {difference}" for difference in differences)
    if generation.startswith("C"):
        yield from _fields(known["package"])
        yield from _tables(known["package"])


def cutlass(package: str) -> Any:
    module, _, name = CUTLASS.partition(".")
    return getattr(importlib.import_module(f"{package}.{module}"), name)


def _tables(package: str) -> Iterator[str]:
    """Yield a difference if ``moe_resolution`` does not map CUTLASS to its class. Promoting that class would have no effect."""
    try:
        parent, resolution = cutlass(package), importlib.import_module(f"{package}.moe_resolution")
        if parent not in resolution.BACKEND_FAMILY["CUTLASS"] or parent not in resolution.IMPL_PRIORITY:
            yield f"moe_backend CUTLASS does not lead to {parent.__name__}"
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        yield f"moe_resolution is another: {type(error).__name__}: {error}"


def _fields(package: str) -> Iterator[str]:
    for record, names in RECORDS.items():
        try:
            fields = {f.name for f in dataclasses.fields(getattr(importlib.import_module(f"{package}.impl_contract"), record))}
        except (ImportError, AttributeError, TypeError):
            yield f"impl_contract.{record} is missing"
            continue
        yield from (f"impl_contract.{record} has no field {name}" for name in names if name not in fields)


def _staging(package: str) -> Iterator[str]:
    """Yield existing staging hooks. A version that stages weights under a renamed hook must not count as one without staging."""
    try:
        method = importlib.import_module(f"{package}.quantization").NVFP4CutlassFusedMoEMethod
    except (ImportError, AttributeError):
        return  # ``_differences`` reports the missing name
    for name in _STAGED_METHOD:
        if "NVFP4" in getattr(getattr(method, name, None), "__qualname__", ""):
            yield f"quantization.{method.__name__}.{name} is there: weights are staged"


def _unread(actual: list[inspect.Parameter]) -> Iterator[str]:
    parameters = {parameter.name for parameter in actual}
    yield from (f"no parameter {name}" for name in _READ if name not in parameters)
    if parameters.isdisjoint(_ACTIVATION):
        yield f"no parameter {' or '.join(_ACTIVATION)}"


def _missing(recorded: list[str], actual: list[inspect.Parameter]) -> Iterator[str]:
    """Compare a signature with the recorded one. Recorded parameters must exist, in the same order; new ones must be optional."""
    parameters = {parameter.name: parameter for parameter in actual}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = []
    for word in recorded:
        name, _, default = word.partition("=")
        if name.startswith("*"):
            continue
        names.append(name)
        if name not in parameters:
            yield f"no parameter {name}"
        elif default and parameters[name].default is inspect.Parameter.empty:
            yield f"parameter {name} has no default"
    for parameter in actual:
        new = parameter.name not in names and parameter.kind not in several
        if new and parameter.default is inspect.Parameter.empty:
            yield f"new parameter {parameter.name} without a default"
    positional = recorded[: recorded.index("*")] if "*" in recorded else [w for w in recorded if not w.startswith("*")]
    order = [word.partition("=")[0] for word in positional]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    have = [parameter.name for parameter in actual if parameter.kind in kinds]
    if all(name in parameters for name in order) and have[: len(order)] != order:
        yield f"its parameters are ({', '.join(have)}), not ({', '.join(order)}, ...)"
