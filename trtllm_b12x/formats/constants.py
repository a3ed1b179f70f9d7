"""Device tensors that never change, one copy for the whole process.

A captured graph holds the addresses of a launch for as long as it lives, which may be longer than the kernel or the layer that
made the call. So these tensors are never freed and never written again, and no pool of an engine holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from trtllm_b12x.core import locks

_lock = locks.new()
_tensors: dict[tuple[object, ...], torch.Tensor] = {}


def filled(value: float, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a float32 tensor of ``shape`` that holds ``value`` everywhere. Do not write to it."""
    return kept(("filled", value, shape, device), lambda: torch.full(shape, value, device=device, dtype=torch.float32), device)


def kept(key: tuple[object, ...], make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the tensor of this key, on ``device``. The first call makes it."""
    with _lock:
        if key not in _tensors:
            _tensors[key] = outside_pools(make, device)
        return _tensors[key]


def outside_pools(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return ``make()``, called in a thread of its own on this thread's stream of ``device``. No graph may be captured.

    An engine may load a model in a memory pool and discard what the pool holds later: vLLM does at sleep level 2
    (v1/worker/gpu_worker.py, ``load_model``). ``torch.cuda.use_mem_pool`` holds for the thread that enters it, from 2.9 on
    (``_cuda_beginAllocateCurrentThreadToPool``).
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def call() -> torch.Tensor:
        if stream is not None:
            torch.cuda.set_stream(stream)  # and its device; not reset, which would start a context on another GPU
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
