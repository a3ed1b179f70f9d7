"""What differs between the host's generations, each difference told by what is there, never by a version.

:mod:`trtllm_b12x.host.contract` has compared the installed host with the facts of each generation before.
"""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

from trtllm_b12x.bootstrap import first_line

from . import UnsupportedHostError, contract
from .calls import ContextCalls, EndsWithCachedState, EndsWithPostLoad, KeywordCalls
from .leaves import Candidate, tables
from .weights import CachedWeights, DirectWeights, StagedWeights


def embedded() -> SimpleNamespace:
    """The host for machines without TensorRT-LLM: generation A in torch."""
    from . import embedded as names

    exported = {name: getattr(names, name) for name in names.__all__}
    return _with_differences(SimpleNamespace(**exported, leaves=()), generation="embedded", is_tuning=lambda: False)


def tensorrt_llm() -> SimpleNamespace:
    """TensorRT-LLM of this process.

    Raises:
        UnsupportedHostError: see :func:`trtllm_b12x.host.load`.
    """
    try:
        importlib.import_module("tensorrt_llm")
    except Exception as error:
        raise UnsupportedHostError(f"importing tensorrt_llm fails: {first_line(error)}") from error
    generation = contract.recognize()
    package = contract.facts()[generation]["package"]
    # By import_module: as an attribute of its package, create_moe is the function.
    backend, _, cutlass = contract.backend(generation).partition(".")
    create_moe, classes, quantization = (
        importlib.import_module(f"{package}.{name}") for name in ("create_moe", backend, "quantization")
    )
    utils = importlib.import_module("tensorrt_llm._torch.utils")
    tuner = importlib.import_module("tensorrt_llm._torch.autotuner").AutoTuner
    names = SimpleNamespace(
        create_moe=create_moe,
        CutlassFusedMoE=getattr(classes, cutlass),
        leaves=tuple(classes.CUTLASS_LEAVES) if generation == "C3" else (),
        tables=partial(tables, package, getattr(classes, cutlass)),
        NVFP4CutlassFusedMoEMethod=quantization.NVFP4CutlassFusedMoEMethod,
        MoEWeightLoadingMode=quantization.MoEWeightLoadingMode,
        TensorParallelMode=quantization.TensorParallelMode,
        load_weight_shard=quantization.load_weight_shard,
        ActivationType=utils.ActivationType,
        Fp4QuantizedTensor=utils.Fp4QuantizedTensor,
    )
    return _with_differences(names, generation=generation, is_tuning=lambda: bool(getattr(tuner.get(), "is_tuning_mode", False)))


def _with_differences(names: SimpleNamespace, **facts: Any) -> SimpleNamespace:
    cutlass = names.CutlassFusedMoE
    named = hasattr(names.create_moe, "get_moe_cls")
    calls = KeywordCalls if named else ContextCalls
    end = EndsWithCachedState if hasattr(cutlass, "cache_derived_state") else EndsWithPostLoad
    # An ABC's caches are keyed by equality: with an equal subclass every plain layer would be an instance of it, so there our
    # class keeps normal identity.  Those hosts compare the classes of backends nowhere but in create_moe_backend.
    metaclass = type(cutlass) if type(cutlass) is not type else type("CountsAsCutlass", (type,), _equality(cutlass))
    return SimpleNamespace(
        **vars(names),
        **facts,
        # A and B name classes by get_moe_cls, compare them exactly and hand out keywords; from C1 on a class is resolved from
        # tables and run_moe takes a context.
        has_get_moe_cls=named,
        # The class is chosen, ours too, before a backend is built.
        chooses_first=named or bool(names.leaves),
        Layer=metaclass("Layer", (calls, end, *((Candidate,) if names.leaves else ())), {}),
        Weights=_weights(facts["generation"]),
    )


def _weights(generation: str) -> type:
    if generation in ("embedded", "A0", "A"):
        return DirectWeights
    return StagedWeights if generation == "B" else CachedWeights


def _equality(cutlass: type) -> dict[str, Any]:
    """Makes a class equal to the host's own wherever the host compares classes exactly.

    A and B ask ``moe_cls == CutlassFusedMoE``, ``moe_cls in (...)`` and ``backend.__class__ == CutlassFusedMoE`` to wrap and feed
    a backend; a plain subclass fails all three (``create_moe.py``, ``configurable_moe.py``, ``moe_scheduler.py``).  Equality and
    hash agree, identity stays: never key a dict, set or cache by this class.
    """
    return {"__eq__": lambda cls, other: other is cutlass or other is cls, "__hash__": lambda cls: hash(cutlass)}
