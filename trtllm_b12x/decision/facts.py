"""What is known of a layer, of the ranks that share it, and of the machine; ``None`` in any field means unknown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Problem:
    """One MoE layer on one rank.  Names of algorithms and activations are the host's (``NVFP4``, ``Swiglu``, ``Relu2``)."""

    quant_algo: str | None = None
    """``"none"`` for an unquantized layer."""
    group_size: int | None = None
    activation_dtype: str | None = None
    activation: str | None = None
    activation_constants: bool | None = None
    """SwiGLU alpha, beta or limit are given."""
    pre_quant_scale: bool | None = None
    unequal_scales: bool | None = None
    """Gate and up of some expert differ in ``weight_scale_2``; known once weights are loaded."""
    dynamic_quantization: bool | None = None
    """The host recomputes the activations' scale at every call (``force_dynamic_quantization``)."""
    hidden_size: int | None = None
    intermediate_size: float | None = None
    """Per rank, before any padding; a fraction where the ranks do not divide the layer's."""
    num_experts: int | None = None
    top_k: int | None = None
    bias: bool | None = None
    apply_router_weight_on_input: bool | None = None


@dataclass(frozen=True)
class Deployment:
    """How the ranks share the layer."""

    ep_size: int | None = None
    attention_dp: bool | None = None
    """Ranks bring tokens of their own, which are gathered."""
    alltoall: bool | None = None
    load_balancer: str | None = None
    """``none``, ``static`` or ``dynamic``."""
    lora: bool | None = None
    cuda_graphs: bool | None = None


class PayloadFault(Enum):
    """Why the CuTe DSL payload that loads is not a CUDA 13 one."""

    CU13_MISSING = "nvidia-cutlass-dsl-libs-cu13 is not installed"
    SHADOWED = "nvidia-cutlass-dsl-libs-cu13 is installed, but its files were overwritten by nvidia-cutlass-dsl-libs-base"
    DRIVER = "nvidia-cutlass-dsl-libs-cu13 is installed, but the GPU driver is older than CUDA 13"
    DAMAGED = "files of the CuTe DSL are missing or are not those of its wheels"
    FOREIGN = "another package is imported as cutlass"
    IMPORT = "importing the CuTe DSL fails"
    CRASH = "importing the CuTe DSL kills the process"
    NO_ANSWER = "importing the CuTe DSL gave no answer this time"
    UNKNOWN = "the CuTe DSL loads another payload for a reason that could not be found"


@dataclass(frozen=True)
class Lacking:
    """What is not there, and how to get it."""

    what: str
    remedy: str
    """A command, or the variable that names it."""

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


@dataclass(frozen=True)
class Environment:
    """The card and the packages; versions are ``"none"`` where the package is not installed."""

    enabled: bool | None = None
    """``TRTLLM_B12X`` is not 0."""
    host: str | None = None
    """``none``: TensorRT-LLM is not installed; its generation; ``installed``: nobody looked; ``unsupported``: no adapter fits."""
    host_detail: str = ""
    """What differs from the nearest generation."""
    sm: int | None = None
    """major * 10 + minor of the first visible GPU; 0 where there is none."""
    toolkit_cuda: tuple[int, int] | None = None
    """The CUDA toolkit FlashInfer asks for; (0, 0) where there is none."""
    dsl: str | None = None
    """Version of nvidia-cutlass-dsl."""
    payload_cuda: tuple[int, int] | None = None
    """CUDA version of the payload that really loads; (0, 0) where none does."""
    payload_fault: PayloadFault | None = None
    payload_detail: str = ""
    """Wheels or the first line of the error."""
    payload_file: str = ""
    """``__init__.py`` of the ``cutlass`` that loads."""
    payload_kept: bool = False
    """The payload was read by an earlier process."""
    dsl_wheels: tuple[str, ...] = ()
    """Distributions of the CuTe DSL that are installed."""
    dsl_in_the_way: tuple[str, ...] = ()
    """Distributions whose ``cutlass`` hides the CuTe DSL's."""
    flashinfer: str | None = None
    """Of the copy that loads."""
    flashinfer_fault: str = ""
    """Why FlashInfer's kernels cannot be planned: what is damaged, or the first line of what its import raised."""
    mismatched: tuple[str, ...] = ()
    """``name version`` of flashinfer-cubin and flashinfer-jit-cache, where FlashInfer's import raises for their version."""
    unmet: tuple[str, ...] = ()
    """Requirements that FlashInfer and the CuTe DSL state themselves, ``requirement (version is installed)``."""
    missing: tuple[str, ...] = ()
    """Where an import failed, such requirements of which no version is installed."""
    unrecorded: tuple[str, ...] = ()
    """Distributions without RECORD, which pip cannot uninstall."""
    exact_scales: bool | None = None
    """FlashInfer's kernels take the activation's global scale by themselves (``input_global_scale``)."""
    expert_parallel: bool | None = None
    """Each of them skips negative ids."""
    tile: int | None = None
    """What its kernels' intermediate size is a multiple of."""
    triton_lacks: tuple[Lacking, ...] | None = None
    """What stands against compiling a Triton kernel for the card."""
    upcast: str = ""
    """Why Triton multiplies bfloat16 in place of block-scaled codes; empty where it does not, or where nobody looked."""
