"""Build the ``Host`` for the installed generation. Differences are detected by existing names, never by version.

``trtllm_b12x.engines.trtllm.contract`` has already compared the installed host with the facts of each generation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from trtllm_b12x.core.errors import first_line

from . import contract
from .calls import ContextCalls, EndsWithCachedState, EndsWithPostLoad, KeywordCalls
from .host import Host, UnsupportedHostError
from .load_hooks import CachedWeights, DirectWeights, StagedWeights


def embedded() -> Host:
    """Return the host for machines without TensorRT-LLM: generation A, implemented in torch."""
    from . import embedded as names

    return _host("embedded", names.create_moe, names.CutlassFusedMoE, names.quantization, names, lambda: False)


def tensorrt_llm() -> Host:
    """Return the adapter for the TensorRT-LLM of this process.

    Raises:
        UnsupportedHostError: see ``trtllm_b12x.engines.trtllm.host.load``.
    """
    try:
        importlib.import_module("tensorrt_llm")
    except Exception as error:
        raise UnsupportedHostError(f"importing tensorrt_llm fails: {first_line(error)}") from error
    generation = contract.recognize()
    package = contract.facts()[generation]["package"]
    # Use import_module: as a package attribute, create_moe is the function.
    backend, _, name = contract.CUTLASS.partition(".")
    create_moe, classes, quantization = (
        importlib.import_module(f"{package}.{module}") for module in ("create_moe", backend, "quantization")
    )
    utils = importlib.import_module("tensorrt_llm._torch.utils")
    tuner = importlib.import_module("tensorrt_llm._torch.autotuner").AutoTuner

    def is_tuning() -> bool:
        return bool(getattr(tuner.get(), "is_tuning_mode", False))

    return _host(generation, create_moe, getattr(classes, name), quantization, utils, is_tuning)


def _host(
    generation: str,
    create_moe: ModuleType,
    cutlass: Any,
    quantization: ModuleType,
    utils: Any,
    is_tuning: Callable[[], bool],
) -> Host:
    named = hasattr(create_moe, "get_moe_cls")
    calls = KeywordCalls if named else ContextCalls
    end = EndsWithCachedState if hasattr(cutlass, "cache_derived_state") else EndsWithPostLoad
    # ABC caches use equality: every plain layer would count as an instance of an equal subclass. On ABC hosts our
    # class therefore compares by identity. Those hosts compare backend classes only in create_moe_backend.
    metaclass = type(cutlass) if type(cutlass) is not type else type("CountsAsCutlass", (type,), _equality(cutlass))
    return Host(
        generation=generation,
        create_moe=create_moe,
        CutlassFusedMoE=cutlass,
        NVFP4CutlassFusedMoEMethod=quantization.NVFP4CutlassFusedMoEMethod,
        MXFP8CutlassFusedMoEMethod=getattr(quantization, "MXFP8CutlassFusedMoEMethod", None),
        TensorParallelMode=quantization.TensorParallelMode,
        load_weight_shard=quantization.load_weight_shard,
        ActivationType=utils.ActivationType,
        Fp4QuantizedTensor=utils.Fp4QuantizedTensor,
        is_tuning=is_tuning,
        has_get_moe_cls=named,
        Layer=metaclass("Layer", (calls, end), {}),
        Weights=_weights(generation),
    )


def _weights(generation: str) -> type:
    if generation in ("embedded", "A"):
        return DirectWeights
    return StagedWeights if generation == "B" else CachedWeights


def _equality(cutlass: type) -> dict[str, Any]:
    """Return the methods that make our class equal to the CUTLASS class in exact comparisons.

    A and B test ``moe_cls == CutlassFusedMoE``, ``moe_cls in (...)`` and ``backend.__class__ == CutlassFusedMoE`` to wrap and
    feed a backend. A plain subclass fails all three (``create_moe.py``, ``configurable_moe.py``, ``moe_scheduler.py``).
    Equality and hash agree, identity does not. Never use this class as a key of a dict, set or cache.
    """
    return {"__eq__": lambda cls, other: other is cutlass or other is cls, "__hash__": lambda cls: hash(cutlass)}
