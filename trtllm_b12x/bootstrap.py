"""Start the plugin in a process that imports TensorRT-LLM (``trtllm_b12x.pth``): wait for its MoE package, then rebind its names.

TensorRT-LLM builds the model in spawned MPI or Ray workers, which run no user code. A ``.pth`` file reaches them. It reads no
other file: it leaves a finder that calls ``startup`` once ``tensorrt_llm`` is imported. Every Python process compiles the line in
it, so it has no class and keeps what can wait in a string. ``eval`` gives the finder globals of its own: those of ``site`` would
live until the interpreter ends. From Python 3.15 on ``trtllm_b12x.start`` (PEP 829) takes its place. This module imports only
what the interpreter has already imported (not even ``__future__``), and nothing here raises.
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
