# SPDX-License-Identifier: Apache-2.0
"""Probe (``probe.cu``) whether a GPU's tensor cores multiply bfloat16 subnormals, which no manual says."""

from __future__ import annotations

import ctypes
import functools
import struct

import torch

from trtllm_b12x.core.log import logger
from trtllm_b12x.kernels import driver

from .variant import Compilation

PROBE = Compilation("probe", "probe.cu")


class _Powers(ctypes.Structure):
    _fields_ = [("first", ctypes.c_int), ("second", ctypes.c_int)]


@functools.cache
def takes_subnormals(device: torch.device, cubin: bytes) -> bool:
    """Return whether mma.sync multiplies bfloat16 subnormals as they are on the current device."""
    taken = right(driver.Function(driver.Module(cubin), "probe"), device, torch.cuda.current_stream().cuda_stream)
    if not taken:
        logger.info("this GPU's tensor cores take bfloat16 subnormals as zero: kernels with one more instruction are compiled")
    return taken


def right(function: driver.Function, device: torch.device, stream: int) -> bool:
    """Launch the probe on the current stream. Return whether all sums are right."""
    found = torch.zeros(32, dtype=torch.int32, device=device)
    function.launcher(1, _Powers(60, 68), struct.Struct("P"))(stream, found.data_ptr())
    return found.tolist() == [4] * 32
