"""The record of a layer's weights for each number format."""

from __future__ import annotations

from .mxfp4 import MXFP4Weights
from .mxfp8 import MXFP8Weights
from .nvfp4 import NVFP4Weights
from .weights import Weights


class W4A16NVFP4Weights(NVFP4Weights):
    """Fields as ``NVFP4Weights``. The input scales cancel: a checkpoint may have none, and activations are not quantized."""

    def typical_input(self) -> float:
        return 1.0


WEIGHTS: dict[str, type[Weights]] = {
    "MXFP4": MXFP4Weights,
    "MXFP8": MXFP8Weights,
    "NVFP4": NVFP4Weights,
    "W4A16_NVFP4": W4A16NVFP4Weights,
}
