"""NVFP4 as nvidia-modelopt stores it: FP4 codes, E4M3 scales of 16, and two numbers for each matrix."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch

from .kinds import Blocks, Kind

_MAGNITUDES = 0x7777777777777777
_LOWEST_BITS = 0x1111111111111111
_SMALLEST_NORMAL = 0x08


class _NVFP4(Kind):
    dtypes = MappingProxyType({"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"})
    columns = MappingProxyType({"weight": 2, "weight_scale": 16})
    group_size = 16
    settings = MappingProxyType({"nvfp4": {"quant_algo": "NVFP4", "ignore": ["*.mlp.gate", "lm_head"]}})
    full_code = "a code of magnitude 6"
    damaged = "random bytes 88 %, transposed 85 %"

    def told_by(self, kinds: set[str]) -> bool:
        return "weight_scale_2" in kinds

    def fault(self, kind: str, tensor: torch.Tensor) -> str:
        if kind == "weight_scale":
            # 0x7F is E4M3's NaN; block-scaled tensor cores read the scale without its sign.
            return "holds NaN or a negative value" if bool((tensor.view(torch.uint8) >= 0x7F).any()) else ""
        bad = kind in self.scalars and not bool(tensor.isfinite().all() & (tensor >= 0).all())
        return f"is {tensor.flatten()[0].item()}" if bad else ""

    def blocks(self, get: Callable[[str], torch.Tensor]) -> Blocks:
        """Where the E4M3 scale is normal it is within 1/16 of amax / 6: the largest value is above 5.6, and above 5 is 6."""
        codes, scales = get("weight").clone().view(torch.int64), get("weight_scale").view(torch.uint8)
        used = (codes & _MAGNITUDES) != 0
        sixes = (codes & (codes >> 1) & (codes >> 2) & _LOWEST_BITS) != 0
        counted = used & (scales >= _SMALLEST_NORMAL)
        zero = float(get("weight_scale_2")) == 0
        empty = 1.0 if zero else 1 - int((used & (scales != 0)).sum()) / used.numel()
        return Blocks(int(counted.sum()), int((counted & sixes).sum()), empty)

    def evenly_spread(self, weight: torch.Tensor) -> bool:
        packed = weight.flatten().int()
        shares = torch.bincount(torch.cat((packed & 7, (packed >> 4) & 7)), minlength=8).double() / (2 * len(packed))
        return float((shares - 0.125).abs().max()) <= 0.01


NVFP4 = _NVFP4()
