"""Access TensorRT-LLM. Only this package imports it; the others use a ``Host``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

from trtllm_b12x.core import locks
from trtllm_b12x.core.errors import first_line

_Ours = TypeVar("_Ours")
_embedded = False
_failure = ""
"""Error of the last ``load``."""
_loading = locks.new()


@dataclass(frozen=True)
class Host:
    """Classes and functions of TensorRT-LLM that this package uses, under their names there, and how generations differ."""

    generation: str
    """``embedded``, or a generation of ``trtllm_b12x.engines.trtllm.contract``."""
    create_moe: ModuleType
    CutlassFusedMoE: Any
    """Base class of our layer."""
    NVFP4CutlassFusedMoEMethod: Any
    TensorParallelMode: Any
    load_weight_shard: Callable[..., Any]
    ActivationType: Any
    Fp4QuantizedTensor: Any
    """Type of call inputs that are already quantized."""
    is_tuning: Callable[[], bool]
    """Function that returns True while the autotuner of TensorRT-LLM runs."""
    has_get_moe_cls: bool
    """True for A and B: ``get_moe_cls`` names classes, tests compare them exactly, and calls pass keywords. From C1 on, tables
    resolve the class and ``run_moe`` takes a context."""
    Layer: Any
    """Mixin for our layer: calling convention of this generation."""
    Weights: Any
    """Mixin for our quantization method: order in which weights are loaded."""
    MXFP8CutlassFusedMoEMethod: Any = None
    """None on hosts before August 2026, which do not know the format."""


class UnsupportedHostError(RuntimeError):
    """Error: TensorRT-LLM is installed but lacks something that this package relies on."""


def installed() -> bool:
    """Return True if ``tensorrt_llm`` can be imported and the embedded host was not chosen."""
    if _embedded or "tensorrt_llm" in sys.modules:
        return not _embedded
    spec = importlib.util.find_spec("tensorrt_llm")
    return spec is not None and spec.origin is not None  # a folder of that name has no origin


def use_embedded() -> None:
    """Use the embedded host even if TensorRT-LLM is installed. For command-line tools, before anything is loaded."""
    global _embedded
    _embedded = True


def load() -> Host:
    """Return the host of this process: TensorRT-LLM if installed, else the embedded host.

    Raises:
        UnsupportedHostError: no adapter fits. The message lists the differences from the nearest generation.
    """
    global _failure
    with _loading:
        try:
            return _load()
        except UnsupportedHostError as error:
            failure = error
        except Exception as error:  # a name that the contract does not check
            failure = UnsupportedHostError(f"TensorRT-LLM cannot be adapted: {first_line(error)}")
        _failure = str(failure)
        raise failure


@cache
def _load() -> Host:
    from . import adapters

    return adapters.tensorrt_llm() if installed() else adapters.embedded()


def derive(place: str, ours: type[_Ours], *hosts: type, **attributes: Any) -> type[_Ours]:
    """Create a subclass of ``ours`` and the host classes, named ``module:name`` so that pickle can find it."""
    module, _, name = place.partition(":")
    members = {"__module__": module, "__doc__": ours.__doc__, **attributes}
    made: type[_Ours] = types.new_class(name, (ours, *hosts), exec_body=lambda body: body.update(members))
    return made


def state() -> tuple[str, str]:
    """Return ``none``, a generation, ``unsupported`` with the differences, or ``installed`` if not examined yet.

    This function does not import TensorRT-LLM; ``load`` does.
    """
    if not installed():
        return "none", ""
    if "tensorrt_llm" not in sys.modules:
        return ("unsupported", _failure) if _failure else ("installed", "")
    try:
        return load().generation, ""
    except UnsupportedHostError as error:
        return "unsupported", str(error)


def register_carrier(cls: type) -> None:
    """Register ``cls`` as a model architecture of TensorRT-LLM, so that its MPI workers import it. Raises the errors of the host.

    Source: ``executor/proxy.py`` passes ``MODEL_CLASS_MAPPING``, later modules of external classes (PR 18284), to its workers.
    """
    if installed():
        models = importlib.import_module("tensorrt_llm._torch.models.modeling_utils")
        models.register_auto_model(cls.__name__)(cls)
