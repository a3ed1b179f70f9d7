"""Map each row of ``trtllm_b12x.decision.families`` to its kernel class, and to a torch class for where no card suits it."""

from __future__ import annotations

from .b12x.kernel import B12xKernel
from .base import Kernel
from .cuda.decode import CudaKernel, CudaMXFP4Kernel, CudaMXFP8Kernel, CudaW4A16Kernel
from .plans import PlannedKernel
from .triton.decode import TritonKernel, TritonMXFP4Kernel, TritonMXFP8Kernel, TritonW4A16Kernel
from .triton.grouped import GroupedKernel, GroupedMXFP4Kernel, GroupedNVFP4Kernel, GroupedW4A16Kernel

_CLASSES: dict[tuple[str, str], type[PlannedKernel]] = {
    ("cuda", "NVFP4"): CudaKernel,
    ("cuda", "W4A16_NVFP4"): CudaW4A16Kernel,
    ("cuda", "MXFP4"): CudaMXFP4Kernel,
    ("cuda", "MXFP8"): CudaMXFP8Kernel,
    ("b12x", "NVFP4"): B12xKernel,
    ("triton", "NVFP4"): TritonKernel,
    ("triton", "W4A16_NVFP4"): TritonW4A16Kernel,
    ("triton", "MXFP4"): TritonMXFP4Kernel,
    ("triton", "MXFP8"): TritonMXFP8Kernel,
    ("grouped", "NVFP4"): GroupedNVFP4Kernel,
    ("grouped", "W4A16_NVFP4"): GroupedW4A16Kernel,
    ("grouped", "MXFP4"): GroupedMXFP4Kernel,
    ("grouped", "MXFP8"): GroupedKernel,
}
KERNELS: dict[tuple[str, str], tuple[type[Kernel], type[Kernel] | None]] = {
    key: (kernel, None if key[0] == "cuda" else kernel.reference) for key, kernel in _CLASSES.items()
}
"""Kernel class and torch class of each family and number format. The torch classes of ``triton`` stand in for ``cuda`` too."""
