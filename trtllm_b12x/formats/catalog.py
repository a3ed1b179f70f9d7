# SPDX-License-Identifier: Apache-2.0
"""Map each number format to the record of a layer's weights."""

from __future__ import annotations

from .mxfp4 import MXFP4Weights
from .mxfp8 import MXFP8Weights
from .nvfp4 import NVFP4Weights, W4A16NVFP4Weights
from .weights import Weights

WEIGHTS: dict[str, type[Weights]] = {
    "MXFP4": MXFP4Weights,
    "MXFP8": MXFP8Weights,
    "NVFP4": NVFP4Weights,
    "W4A16_NVFP4": W4A16NVFP4Weights,
}
