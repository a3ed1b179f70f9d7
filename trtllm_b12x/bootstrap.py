"""Start the plugin in a process that imports TensorRT-LLM (``trtllm_b12x.pth``): wait for its MoE package, then rebind its names.

The ``.pth`` itself reads no file: it leaves a finder that calls ``startup`` once ``tensorrt_llm`` is imported. What it costs
is its compilation, token by token, hence no class and one string for what can wait; and a function whose globals are ``site``'s
would keep these until the interpreter's last moment, which costs as much again, hence ``eval``. From Python 3.15 on
``trtllm_b12x.start`` (PEP 829) takes its place. Standard library only, no import (not even ``__future__``) that the interpreter
has not made already, and nothing here ever raises. TensorRT-LLM builds the model in spawned MPI or Ray workers,
which run no code of the user's: this is how they are reached.
"""

import os

from .core import hook

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType


def startup() -> None:
    """Watch imports of TensorRT-LLM unless ``TRTLLM_B12X`` says no. ``trtllm_b12x.start`` and the ``.pth`` call this."""
    if os.environ.get("TRTLLM_B12X", "").strip().lower() not in ("0", "false", "off", "no"):
        hook.start(patch)


def patch(module: "ModuleType") -> None:
    """Rebind the names of one of the host's modules."""
    from trtllm_b12x.engines.trtllm import promote

    promote.patch(module)
