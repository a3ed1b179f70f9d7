"""W4A16_NVFP4: the numbers of NVFP4 for weights alone. TensorRT-LLM keeps the block scales in rows."""

from __future__ import annotations

from .nvfp4 import NVFP4Weights


class W4A16NVFP4Weights(NVFP4Weights):
    """Fields as ``NVFP4Weights``. The input scales cancel: a checkpoint may have none, and activations are not quantized."""

    def typical_input(self) -> float:
        return 1.0
