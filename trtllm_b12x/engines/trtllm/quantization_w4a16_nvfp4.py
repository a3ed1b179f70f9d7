"""``W4A16NVFP4Sm12xFusedMoEMethod``: the host's W4A16_NVFP4 parameters on the kernels' tile, with block scales in rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .host import load
from .quantization_nvfp4 import NVFP4Sm12xFusedMoEMethod

W4A16NVFP4CutlassFusedMoEMethod: Any = load().methods.get("W4A16_NVFP4", object)


class W4A16NVFP4Sm12xFusedMoEMethod(NVFP4Sm12xFusedMoEMethod, W4A16NVFP4CutlassFusedMoEMethod):
    """W4A16_NVFP4 method with one set of tensors for the host, which dequantizes experts at every call, and our kernels.

    Names, shapes and dtypes are those of NVFP4. Block scales lie in rows: the host interleaves them and then reverses that, over
    whole parameters (``process_weights_after_loading``, ``quantization.py`` of commit 02320c35). Here each hook writes rows.
    The host splits FC1 at half of its rows, and pads below both halves, so that it misplaces sizes such as 224; here each half is
    padded. A checkpoint may lack input scales. They then stay 1, and ``fcX_alpha`` is ``weight_scale_2``.
    """

    format = "W4A16_NVFP4"

    def _place_scales(self, destination: torch.Tensor, place: Callable[[torch.Tensor], None]) -> None:
        place(destination.view(torch.uint8))

    def process_weights_after_loading(self, module: Any) -> None:
        """Skip the host's own method, which would reverse an interleaving that has not been done."""
        super(W4A16NVFP4CutlassFusedMoEMethod, self).process_weights_after_loading(module)
