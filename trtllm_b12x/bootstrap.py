# SPDX-License-Identifier: Apache-2.0
"""Start the plugin in a process that imports TensorRT-LLM: wait for its MoE package, then rebind names of the package.

TensorRT-LLM builds the model in spawned MPI or Ray workers, which run no user code. ``trtllm_b12x.pth`` reaches them. It reads
no other file and adds a finder that calls ``startup`` once ``tensorrt_llm`` is imported. Every Python process compiles its line,
so the line has no class and keeps later code in a string. ``eval`` gives the finder its own globals: those of ``site`` would live
until the interpreter ends. From Python 3.15 on, ``trtllm_b12x.start`` (PEP 829) replaces the ``.pth`` file. This module imports
only modules that the interpreter has already imported (not even ``__future__``), and raises no exception.
"""

import os

from .core import hook

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType


def startup() -> None:
    """Watch imports of TensorRT-LLM unless ``TRTLLM_B12X`` is off. ``trtllm_b12x.start`` and the ``.pth`` file call this."""
    if os.environ.get("TRTLLM_B12X", "").strip().lower() not in ("0", "false", "off", "no"):
        hook.start(patch)


def patch(module: "ModuleType") -> None:
    """Rebind the names in one of TensorRT-LLM's modules."""
    from trtllm_b12x.engines.trtllm import promote

    promote.patch(module)
