"""The door to TensorRT-LLM: the only package that imports it.  What the rest of the package builds on is a :class:`Host`."""

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

_Ours = TypeVar("_Ours")
_embedded = False
_failure = ""
"""Of the last :func:`load`."""
_loading = locks.new()


@dataclass(frozen=True)
class Host:
    """What is built on, by the names that TensorRT-LLM gives it, and what differs between its generations."""

    generation: str
    """``embedded``, or one of :mod:`trtllm_b12x.host.contract`."""
    create_moe: ModuleType
    CutlassFusedMoE: Any
    """The class that our layer inherits."""
    NVFP4CutlassFusedMoEMethod: Any
    TensorParallelMode: Any
    load_weight_shard: Callable[..., Any]
    ActivationType: Any
    Fp4QuantizedTensor: Any
    """Input of a call that is quantized already."""
    is_tuning: Callable[[], bool]
    """The host's autotuner is running."""
    has_get_moe_cls: bool
    """A and B name classes by ``get_moe_cls``, compare them exactly and hand out keywords; from C1 on a class is resolved from
    tables and ``run_moe`` takes a context."""
    Layer: Any
    """Mixed into our layer: the forms of a call."""
    Weights: Any
    """Mixed into our quantization method: when what is loaded."""
    MXFP8CutlassFusedMoEMethod: Any = None
    """None on hosts of before August 2026, which do not know the format."""


class UnsupportedHostError(RuntimeError):
    """TensorRT-LLM is installed, but what the package relies on is not all there."""


def installed() -> bool:
    """``tensorrt_llm`` can be imported, and nobody chose the embedded host."""
    if _embedded or "tensorrt_llm" in sys.modules:
        return not _embedded
    spec = importlib.util.find_spec("tensorrt_llm")
    return spec is not None and spec.origin is not None  # a folder of that name in the working directory has none


def use_embedded() -> None:
    """Take the embedded host also where TensorRT-LLM is installed: for command-line tools, before anything is loaded."""
    global _embedded
    _embedded = True


def load() -> Host:
    """The host of this process: TensorRT-LLM where it is installed, else the embedded one.

    Raises:
        UnsupportedHostError: no adapter fits what is there; the message says what differs from the nearest.
    """
    global _failure
    with _loading:
        try:
            return _load()
        except UnsupportedHostError as error:
            failure = error
        except Exception as error:  # a name that no function of the contract stands for
            from trtllm_b12x.core.errors import first_line  # the embedded host must do without it

            failure = UnsupportedHostError(f"TensorRT-LLM cannot be adapted: {first_line(error)}")
        _failure = str(failure)
        raise failure


@cache
def _load() -> Host:
    from . import adapters

    return adapters.tensorrt_llm() if installed() else adapters.embedded()


def derive(place: str, ours: type[_Ours], *hosts: type, **attributes: Any) -> type[_Ours]:
    """``ours`` before classes of the host, named ``module:name``, where others find it (pickle does)."""
    module, _, name = place.partition(":")
    members = {"__module__": module, "__doc__": ours.__doc__, **attributes}
    made: type[_Ours] = types.new_class(name, (ours, *hosts), exec_body=lambda body: body.update(members))
    return made


def state() -> tuple[str, str]:
    """``none``, a generation, ``unsupported`` with what differs, or ``installed`` where nobody has looked yet.

    Looking imports TensorRT-LLM; that is left to :func:`load`.
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
    """Register ``cls`` as a model architecture of TensorRT-LLM, which its MPI workers then import; raises what the host raises.

    Source: ``executor/proxy.py`` hands ``MODEL_CLASS_MAPPING``, later the modules of external classes (PR 18284), to its workers.
    """
    if installed():
        models = importlib.import_module("tensorrt_llm._torch.models.modeling_utils")
        models.register_auto_model(cls.__name__)(cls)
