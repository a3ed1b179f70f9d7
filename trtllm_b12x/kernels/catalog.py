# SPDX-License-Identifier: Apache-2.0
"""Map each row of ``trtllm_b12x.decision.families`` to its kernel class, and to a torch class for machines without its card."""

from __future__ import annotations

from .b12x.kernel import B12xKernel
from .base import Kernel
from .cuda.decode import CudaKernel, CudaMXFP4Kernel, CudaMXFP8Kernel, CudaW4A16Kernel
from .cuda.gemm import GemmKernel, GemmMXFP4Kernel, GemmMXFP8Kernel, GemmW4A16Kernel
from .plans import PlannedKernel
from .triton.decode import TritonKernel, TritonMXFP4Kernel, TritonMXFP8Kernel, TritonW4A16Kernel
from .triton.grouped import GroupedKernel, GroupedNVFP4Kernel

_FAMILIES: tuple[tuple[type[PlannedKernel], ...], ...] = (
    (CudaKernel, CudaW4A16Kernel, CudaMXFP4Kernel, CudaMXFP8Kernel),
    (B12xKernel,),
    (TritonKernel, TritonW4A16Kernel, TritonMXFP4Kernel, TritonMXFP8Kernel),
    (GemmKernel, GemmW4A16Kernel, GemmMXFP4Kernel, GemmMXFP8Kernel),
    (GroupedNVFP4Kernel, GroupedKernel),
)
_KERNELS = {(kernel.features.name, kernel.number_format().name): kernel for family in _FAMILIES for kernel in family}
KERNELS: dict[tuple[str, str], tuple[type[Kernel], type[Kernel] | None]] = {
    (name, form): (kernel, None if name == "cuda" or (name == "gemm" and ("grouped", form) in _KERNELS) else kernel.reference)
    for (name, form), kernel in _KERNELS.items()
}
"""Kernel class and torch class of each family and number format.

The torch classes of ``triton`` stand in for ``cuda``, also where calls have router logits. Those of ``triton`` and ``grouped``
stand in for ``gemm`` where ``grouped`` serves.
"""
