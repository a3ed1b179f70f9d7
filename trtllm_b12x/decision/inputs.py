# SPDX-License-Identifier: Apache-2.0
"""Define the inputs of a decision besides the layer: ranks and machine. ``None`` in any field means unknown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Deployment:
    """Parallelism of the layer and related engine options."""

    ep_size: int | None = None
    tp_size: int | None = None
    """Number of ranks that each hold a part of every expert."""
    attention_dp: bool | None = None
    """True if each rank has its own tokens, which are gathered before the experts."""
    alltoall: bool | None = None
    load_balancer: str | None = None
    """``none``, ``static`` or ``dynamic``."""
    lora: bool | None = None
    cuda_graphs: bool | None = None


class PayloadFault(Enum):
    """Reason why the loaded CuTe DSL payload is not a CUDA 13 one."""

    CU13_MISSING = "nvidia-cutlass-dsl-libs-cu13 is not installed"
    SHADOWED = "nvidia-cutlass-dsl-libs-cu13 is installed, but its files were overwritten by nvidia-cutlass-dsl-libs-base"
    DRIVER = "nvidia-cutlass-dsl-libs-cu13 is installed, but the GPU driver is older than CUDA 13"
    FOREIGN = "another package is imported as cutlass"
    IMPORT = "importing the CuTe DSL fails"
    CRASH = "importing the CuTe DSL kills the process"
    NO_ANSWER = "importing the CuTe DSL gave no answer this time"
    UNKNOWN = "the CuTe DSL loads another payload for a reason that could not be found"


@dataclass(frozen=True)
class Lacking:
    what: str
    remedy: str
    """Command to run, or environment variable to set."""

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


@dataclass(frozen=True)
class Environment:
    """Card, driver and packages of the machine. A version is ``"none"`` if the package is not installed."""

    enabled: bool | None = None
    """False if ``TRTLLM_B12X`` is 0."""
    host: str | None = None
    """State of TensorRT-LLM: ``none``, its generation, ``installed`` (not examined yet) or ``unsupported`` (no adapter fits)."""
    host_detail: str = ""
    """Difference from the nearest known generation."""
    sm: int | None = None
    """major * 10 + minor of the first visible GPU; 0 without one."""
    toolkit_cuda: tuple[int, int] | None = None
    """Version of the CUDA toolkit that FlashInfer finds; (0, 0) without a toolkit."""
    dsl: str | None = None
    payload_cuda: tuple[int, int] | None = None
    """CUDA version of the CuTe DSL payload that loads; (0, 0) if no payload loads."""
    payload_fault: PayloadFault | None = None
    payload_detail: str = ""
    """Installed wheels, or the first line of the error."""
    payload_file: str = ""
    """Path of ``__init__.py`` in the ``cutlass`` package that loads."""
    payload_kept: bool = False
    """True if the result comes from an earlier process."""
    dsl_wheels: tuple[str, ...] = ()
    flashinfer: str | None = None
    """Version of the copy that loads."""
    flashinfer_fault: str = ""
    """First line of the error that importing FlashInfer's kernels raised."""
    unmet: tuple[str, ...] = ()
    """Unmet requirements of FlashInfer and the CuTe DSL, as ``requirement (version is installed)``."""
    missing: tuple[str, ...] = ()
    """Requirements without an installed version. Filled only if an import failed."""
    expert_parallel: bool | None = None
    """True if every FlashInfer b12x kernel skips negative expert ids."""
    tile: int | None = None
    """FlashInfer's kernels need an intermediate size that is a multiple of this number."""
    triton_lacks: tuple[Lacking, ...] | None = None
    """Missing items that prevent compiling a Triton kernel for the card."""
    nvrtc: bool | None = None
    """False if NVRTC, which compiles kernels of family ``cuda``, is not installed."""
    upcast: str = ""
    """Reason why Triton multiplies bfloat16 instead of block-scaled codes. Empty if it multiplies codes or was not examined."""
