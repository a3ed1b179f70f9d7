"""Map each row of ``trtllm_b12x.decision.families`` to its kernel class, and to a torch class for where no card suits it."""

from __future__ import annotations

from .b12x.kernel import B12xKernel
from .base import Kernel
from .cuda.decode import CudaKernel, CudaMXFP4Kernel, CudaMXFP8Kernel, CudaW4A16Kernel
from .cuda.gemm import GemmKernel, GemmMXFP4Kernel, GemmMXFP8Kernel, GemmW4A16Kernel
from .plans import PlannedKernel
from .triton.decode import TritonKernel, TritonMXFP4Kernel, TritonMXFP8Kernel, TritonW4A16Kernel
from .triton.grouped import GroupedKernel, GroupedMXFP4Kernel, GroupedNVFP4Kernel, GroupedW4A16Kernel

_FAMILIES: tuple[tuple[type[PlannedKernel], ...], ...] = (
    (CudaKernel, CudaW4A16Kernel, CudaMXFP4Kernel, CudaMXFP8Kernel),
    (B12xKernel,),
    (TritonKernel, TritonW4A16Kernel, TritonMXFP4Kernel, TritonMXFP8Kernel),
    (GemmKernel, GemmW4A16Kernel, GemmMXFP4Kernel, GemmMXFP8Kernel),
    (GroupedNVFP4Kernel, GroupedW4A16Kernel, GroupedMXFP4Kernel, GroupedKernel),
)
KERNELS: dict[tuple[str, str], tuple[type[Kernel], type[Kernel] | None]] = {
    (kernel.features.name, kernel.number_format().name): (
        kernel,
        None if kernel.features.name in ("cuda", "gemm") else kernel.reference,
    )
    for family in _FAMILIES
    for kernel in family
}
"""Kernel class and torch class of each family and number format. Those of ``triton`` stand in for ``cuda`` and ``gemm`` too."""
