"""MXFP8 as nvidia-modelopt and others store it: E4M3 elements, E8M0 scales of 32, and nothing else."""

from __future__ import annotations

from types import MappingProxyType

import torch

from .kinds import Kind

_NAN_SCALE = 0xFF
_NAN_CODE = 0x7F


class _MXFP8(Kind):
    dtypes = MappingProxyType({"weight": "F8_E4M3", "weight_scale": "U8"})
    columns = MappingProxyType({"weight": 1, "weight_scale": 32})
    # MiniMax-M3-MXFP8, and what trainers hand on; TensorRT-LLM takes either.
    others = MappingProxyType({"weight_scale_inv": "weight_scale"})
    group_size = 32
    settings = MappingProxyType({"mxfp8": {"quant_algo": "MXFP8"}})

    def fault(self, kind: str, tensor: torch.Tensor) -> str:
        data = tensor.view(torch.uint8)
        nan = (data & 0x7F) == _NAN_CODE if kind == "weight" else data == _NAN_SCALE
        return "holds NaN" if bool(nan.any()) else ""


MXFP8 = _MXFP8()
