"""Map each row of ``trtllm_b12x.decision.families`` to its kernel class, and to a torch class for where no card suits it."""

from __future__ import annotations

from .b12x.kernel import B12xKernel
from .base import Kernel
from .cuda.decode import CudaKernel, CudaMXFP4Kernel, CudaMXFP8Kernel, CudaW4A16Kernel
from .reference import (
    MXFP4ReferenceKernel,
    MXFP4UnquantizedReferenceKernel,
    MXFP8ReferenceKernel,
    MXFP8UnquantizedReferenceKernel,
    QuantizedReferenceKernel,
    ReferenceKernel,
    UnquantizedReferenceKernel,
    W4A16ReferenceKernel,
    W4A16UnquantizedReferenceKernel,
)
from .triton.decode import TritonKernel, TritonMXFP4Kernel, TritonMXFP8Kernel, TritonW4A16Kernel
from .triton.grouped import GroupedKernel, GroupedMXFP4Kernel, GroupedNVFP4Kernel, GroupedW4A16Kernel

KERNELS: dict[tuple[str, str], tuple[type[Kernel], type[Kernel] | None]] = {
    ("cuda", "NVFP4"): (CudaKernel, None),
    ("cuda", "W4A16_NVFP4"): (CudaW4A16Kernel, None),
    ("cuda", "MXFP4"): (CudaMXFP4Kernel, None),
    ("cuda", "MXFP8"): (CudaMXFP8Kernel, None),
    ("b12x", "NVFP4"): (B12xKernel, ReferenceKernel),
    ("triton", "NVFP4"): (TritonKernel, UnquantizedReferenceKernel),
    ("triton", "W4A16_NVFP4"): (TritonW4A16Kernel, W4A16UnquantizedReferenceKernel),
    ("triton", "MXFP4"): (TritonMXFP4Kernel, MXFP4UnquantizedReferenceKernel),
    ("triton", "MXFP8"): (TritonMXFP8Kernel, MXFP8UnquantizedReferenceKernel),
    ("grouped", "NVFP4"): (GroupedNVFP4Kernel, QuantizedReferenceKernel),
    ("grouped", "W4A16_NVFP4"): (GroupedW4A16Kernel, W4A16ReferenceKernel),
    ("grouped", "MXFP4"): (GroupedMXFP4Kernel, MXFP4ReferenceKernel),
    ("grouped", "MXFP8"): (GroupedKernel, MXFP8ReferenceKernel),
}
"""Kernel class and torch class of each family and number format. The torch classes of ``triton`` stand in for ``cuda`` too."""
