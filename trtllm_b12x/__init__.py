"""FlashInfer's b12x NVFP4 mixture-of-experts kernels inside TensorRT-LLM's CUTLASS backend, on SM120 and SM121."""

from __future__ import annotations

__version__ = "0.1.0"


def install() -> None:
    """Promote the CUTLASS backend of this process's host; see :func:`trtllm_b12x.selection.install`."""
    from . import selection

    selection.install()


def uninstall() -> None:
    """Undo :func:`install`."""
    from . import selection

    selection.uninstall()
