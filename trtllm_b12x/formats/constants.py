# SPDX-License-Identifier: Apache-2.0
"""Keep device tensors that never change, one copy for the whole process.

A captured graph holds the addresses of its launches, and may outlive the kernel or the layer that made the call. These tensors
are therefore never freed, never written again, and never allocated in an engine's memory pool.
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
    """Return the tensor for ``key``, on ``device``. The first call creates it with ``make``."""
    with _lock:
        if key not in _tensors:
            _tensors[key] = outside_pools(make, device)
        return _tensors[key]


def outside_pools(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return ``make()``, called in a new thread on this thread's stream of ``device``. No graph capture may be running.

    An engine may load a model in a memory pool and discard the pool's contents later, as vLLM does at sleep level 2
    (v1/worker/gpu_worker.py, ``load_model``). From torch 2.9 on, ``torch.cuda.use_mem_pool`` applies to the thread that enters it
    (``_cuda_beginAllocateCurrentThreadToPool``).
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def call() -> torch.Tensor:
        if stream is not None:
            torch.cuda.set_stream(stream)  # also sets the device. A reset would start a context on another GPU
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
