"""The door to TensorRT-LLM: the only package that imports it.

:func:`load` returns the module of names the rest of the package builds on (``CutlassFusedMoE``, ``create_moe``,
``NVFP4CutlassFusedMoEMethod``, ``Fp4QuantizedTensor``, ...), under the names the host gives them.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType


class UnsupportedHostError(RuntimeError):
    """TensorRT-LLM is installed, but this version of the package has no adapter for it."""


@cache
def load() -> ModuleType:
    """The host of this process: the embedded one where ``tensorrt_llm`` cannot be imported.

    Raises:
        UnsupportedHostError: ``tensorrt_llm`` is there; adapters for it are not part of this version.
    """
    if importlib.util.find_spec("tensorrt_llm") is not None:
        raise UnsupportedHostError(
            "tensorrt_llm is installed here, and this version of trtllm_b12x has no adapter for it yet: "
            "use an environment without tensorrt_llm to run the embedded host"
        )
    from . import embedded

    return embedded
