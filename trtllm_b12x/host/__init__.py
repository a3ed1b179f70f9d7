"""The door to TensorRT-LLM: the only package that imports it.

:func:`load` returns the names the rest of the package builds on (``CutlassFusedMoE``, ``create_moe``,
``NVFP4CutlassFusedMoEMethod``, ...), under the names the host gives them, and what differs between its generations.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from types import SimpleNamespace

from trtllm_b12x import locks

_embedded = False
_failure = ""
"""Of the last :func:`load`."""
_loading = locks.new()


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


def load() -> SimpleNamespace:
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
            from trtllm_b12x.bootstrap import first_line  # the embedded host must do without it

            failure = UnsupportedHostError(f"TensorRT-LLM cannot be adapted: {first_line(error)}")
        _failure = str(failure)
        raise failure


@cache
def _load() -> SimpleNamespace:
    from . import adapters

    return adapters.tensorrt_llm() if installed() else adapters.embedded()


def state() -> tuple[str, str]:
    """``none``, a generation, ``unsupported`` with what differs, or ``installed`` where nobody has looked yet.

    Looking imports TensorRT-LLM; that is left to :func:`load`.
    """
    if not installed():
        return "none", ""
    if "tensorrt_llm" not in sys.modules:
        return ("unsupported", _failure) if _failure else ("installed", "")
    try:
        return str(load().generation), ""
    except UnsupportedHostError as error:
        return "unsupported", str(error)


def register_carrier(cls: type) -> None:
    """Register ``cls`` as a model architecture of TensorRT-LLM, which its MPI workers then import; raises what the host raises.

    Source: ``executor/proxy.py`` hands ``MODEL_CLASS_MAPPING``, later the modules of external classes (PR 18284), to its workers.
    """
    if installed():
        models = importlib.import_module("tensorrt_llm._torch.models.modeling_utils")
        models.register_auto_model(cls.__name__)(cls)
