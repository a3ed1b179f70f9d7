# SPDX-License-Identifier: Apache-2.0
"""Find the TensorRT-LLM of this process. Only this package imports it; the other packages use a ``Host``.

``trtllm_b12x.engines.trtllm.contract`` compares TensorRT-LLM with the facts of each generation. Differences between
generations are then detected by which names exist, never by version.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from trtllm_b12x.core import locks
from trtllm_b12x.core.errors import first_line

from . import contract
from .calls import ContextCalls, EndsWithCachedState, EndsWithPostLoad, KeywordCalls
from .contract import UnsupportedHostError
from .load_hooks import CachedWeights, DirectWeights, StagedWeights

METHODS = {
    "NVFP4": "NVFP4CutlassFusedMoEMethod",
    "W4A16_NVFP4": "W4A16NVFP4CutlassFusedMoEMethod",
    "MXFP4": "W4A8MXFP4MXFP8CutlassFusedMoEMethod",
    "MXFP8": "MXFP8CutlassFusedMoEMethod",
}
"""TensorRT-LLM's quantization method for CUTLASS, by number format."""

_embedded = False
_loaded: Host | None = None
_failure = ""
"""Error of the last ``load``."""
_loading = locks.new()


@dataclass(frozen=True)
class Host:
    """TensorRT-LLM's classes and functions that this package uses, under their own names, and how generations differ."""

    generation: str
    """``embedded``, or a generation of ``trtllm_b12x.engines.trtllm.contract``."""
    create_moe: ModuleType
    CutlassFusedMoE: Any
    methods: Mapping[str, Any]
    """Classes of ``METHODS`` that this generation has, by format: MXFP8 from August 2026 on, W4A16_NVFP4 from June 2026 on."""
    TensorParallelMode: Any
    load_weight_shard: Callable[..., Any]
    ActivationType: Any
    Fp4QuantizedTensor: Any
    """Type of call inputs that are already quantized."""
    is_tuning: Callable[[], bool]
    """Return True while the autotuner of TensorRT-LLM runs."""
    reads_ids: Callable[[], bool]
    """Return True if TensorRT-LLM itself may read the ids of its next call; see ``_reads_ids``."""
    has_get_moe_cls: bool
    """True for A and B: ``get_moe_cls`` names classes, tests compare them exactly, and calls pass keywords. From C1 on, tables
    resolve the class and ``run_moe`` takes a context."""
    Layer: Any
    """Mixin for our layer with this generation's metaclass, calling convention and last weight loading hook."""
    Weights: Any
    """Mixin for our quantization method with this generation's weight loading order."""


def installed() -> bool:
    """Return True if ``tensorrt_llm`` can be imported and ``use_embedded`` was not called."""
    if _embedded or "tensorrt_llm" in sys.modules:
        return not _embedded
    spec = importlib.util.find_spec("tensorrt_llm")
    return spec is not None and spec.origin is not None  # a folder of that name has no origin


def use_embedded() -> None:
    """Use the embedded TensorRT-LLM even if the real one is installed. Command-line tools call this before ``load``."""
    global _embedded
    _embedded = True


def load() -> Host:
    """Return the ``Host`` of this process: TensorRT-LLM if installed, else the embedded one.

    Raise UnsupportedHostError, with the differences from the nearest generation, if no adapter fits.
    """
    global _loaded, _failure
    with _loading:
        try:
            if _loaded is None:
                _loaded = _tensorrt_llm() if installed() else _in_torch()
            return _loaded
        except UnsupportedHostError as error:
            failure = error
        except Exception as error:  # the import failed, or a name that the contract does not check is missing
            failure = UnsupportedHostError(f"TensorRT-LLM cannot be imported or adapted: {first_line(error)}")
        _failure = str(failure)
        raise failure


def lacks(form: str) -> bool:
    """Return True if TensorRT-LLM is loaded and has no quantization method for this number format."""
    return _loaded is not None and form not in _loaded.methods


def state() -> tuple[str, str]:
    """Return ``none``, a generation, ``unsupported`` with the differences, or ``installed`` (not imported, not examined)."""
    if not installed():
        return "none", ""
    if "tensorrt_llm" not in sys.modules:
        return ("unsupported", _failure) if _failure else ("installed", "")
    try:
        return load().generation, ""
    except UnsupportedHostError as error:
        return "unsupported", str(error)


def register_carrier(cls: type) -> None:
    """Register ``cls`` as a TensorRT-LLM model architecture, so that its MPI workers import ``cls``. Raise TensorRT-LLM's errors.

    Source: ``executor/proxy.py`` passes ``MODEL_CLASS_MAPPING``, later modules of external classes (PR 18284), to its workers.
    """
    if installed():
        models = importlib.import_module("tensorrt_llm._torch.models.modeling_utils")
        models.register_auto_model(cls.__name__)(cls)


def _in_torch() -> Host:
    """Return the embedded TensorRT-LLM for machines without the real one: generation A, implemented in torch."""
    from . import embedded as names

    return _host("embedded", names.create_moe, names.CutlassFusedMoE, names.quantization, names, lambda: False, lambda: True)


def _tensorrt_llm() -> Host:
    importlib.import_module("tensorrt_llm")
    generation = contract.recognize()
    package = contract.facts()[generation]["package"]
    # Use import_module: as a package attribute, create_moe is the function.
    create_moe, quantization = (importlib.import_module(f"{package}.{module}") for module in ("create_moe", "quantization"))
    utils = importlib.import_module("tensorrt_llm._torch.utils")
    tuner = importlib.import_module("tensorrt_llm._torch.autotuner").AutoTuner

    def is_tuning() -> bool:
        return bool(getattr(tuner.get(), "is_tuning_mode", False))

    reads_ids = functools.partial(_reads_ids, utils, f"{package}.moe_scheduler")
    return _host(generation, create_moe, contract.cutlass(package), quantization, utils, is_tuning, reads_ids)


def _reads_ids(utils: ModuleType, scheduler: str) -> bool:
    """Return True outside a forward of TensorRT-LLM's model engine, and while code other than the experts reads ids.

    Such code is route capture (``enable_return_routed_experts``), ``EXPERT_STATISTIC_ITER_RANGE``, or the calibrator of
    layer-wise benchmarks. Outside a forward, route capture checks that layers get ids (``route_capture.assert_capturable``).
    """
    if not getattr(utils, "get_model_extra_attrs", lambda: None)():
        return True
    names = vars(sys.modules[scheduler])
    active = [names[name]() for name in ("get_active_route_capture",) if name in names]
    active += [names[name].get() for name in ("RouteCapture", "ExpertStatistic") if name in names]
    return any(found is not None for found in active) or (
        "get_calibrator" in names and names["get_calibrator"]().mode.name != "NONE"
    )


def _host(
    generation: str, create_moe: ModuleType, cutlass: Any, quantization: ModuleType, utils: Any, is_tuning: Callable[[], bool],
    reads_ids: Callable[[], bool],
) -> Host:  # fmt: skip
    named = hasattr(create_moe, "get_moe_cls")
    calls = KeywordCalls if named else ContextCalls
    end = EndsWithCachedState if hasattr(cutlass, "cache_derived_state") else EndsWithPostLoad
    # ABC caches use equality: every plain layer would count as an instance of an equal subclass. On ABC versions our
    # class therefore compares by identity. These versions compare backend classes only in create_moe_backend.
    metaclass = type(cutlass) if type(cutlass) is not type else type("CutlassEqualMeta", (type,), _equality(cutlass))
    weights = {"embedded": DirectWeights, "A": DirectWeights, "B": StagedWeights}
    return Host(
        generation=generation,
        create_moe=create_moe,
        CutlassFusedMoE=cutlass,
        methods={form: getattr(quantization, name) for form, name in METHODS.items() if hasattr(quantization, name)},
        TensorParallelMode=quantization.TensorParallelMode,
        load_weight_shard=quantization.load_weight_shard,
        ActivationType=utils.ActivationType,
        Fp4QuantizedTensor=utils.Fp4QuantizedTensor,
        is_tuning=is_tuning,
        reads_ids=reads_ids,
        has_get_moe_cls=named,
        Layer=metaclass("Layer", (calls, end), {}),
        Weights=weights.get(generation, CachedWeights),
    )


def _equality(cutlass: type) -> dict[str, Any]:
    """Return the methods that make our class equal to the CUTLASS class in exact comparisons.

    A and B test ``moe_cls == CutlassFusedMoE``, ``moe_cls in (...)`` and ``backend.__class__ == CutlassFusedMoE`` to wrap and
    feed a backend. A plain subclass fails all three (``create_moe.py``, ``configurable_moe.py``, ``moe_scheduler.py``).
    Equality and hash agree, identity does not. Never use this class as a key of a dict, set or cache.
    """
    return {"__eq__": lambda cls, other: other is cutlass or other is cls, "__hash__": lambda cls: hash(cutlass)}
