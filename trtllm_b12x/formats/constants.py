"""Device tensors that never change, one copy for the whole process.

A captured graph holds the addresses of a launch for as long as it lives, which may be longer than the kernel or the layer that
made the call. So these tensors are never freed and never written again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtllm_b12x.core import locks

_lock = locks.new()
_tensors: dict[tuple[object, ...], torch.Tensor] = {}


def filled(value: float, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a float32 tensor of ``shape`` that holds ``value`` everywhere. Do not write to it."""
    return kept(("filled", value, shape, device), lambda: torch.full(shape, value, dtype=torch.float32, device=device))


def kept(key: tuple[object, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the tensor of this key. The first call makes it."""
    with _lock:
        if key not in _tensors:
            with torch.inference_mode(False):
                _tensors[key] = make()
        return _tensors[key]
