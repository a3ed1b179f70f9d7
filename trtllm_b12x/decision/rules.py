"""Define the rules of a decision: one function per reason. A rule abstains if its facts are unknown."""

from __future__ import annotations

from collections.abc import Callable

from packaging.version import InvalidVersion, Version

from trtllm_b12x.formats.geometry import LayerShape

from .inputs import Deployment, Environment, PayloadFault
from .verdicts import SERVED_SM, KernelFeatures, RejectReason

_Rule = Callable[[LayerShape, Deployment, Environment, KernelFeatures], str | None]
"""Rule that returns what speaks against the layer, or None."""

OLDEST_FLASHINFER = (0, 6, 18)
"""Oldest supported release; the newest TensorRT-LLM pins it. In 0.6.17 the static kernel drops half of a tile's rows and takes
its stream as an argument. 0.6.9 to 0.6.16 have neither exact scales nor a cooperative launch."""
EXPERT_PARALLEL_FLASHINFER = (0, 7, 2)
"""Oldest release whose kernels skip negative ids and are compiled for every token count."""
COMPLETE_FLASHINFER = "flashinfer-python>=0.7.2,<0.8"
OLDEST_DSL = (4, 6, 2)
"""Version required by flashinfer-python 0.6.18 and newer (its metadata)."""
COMPLETE_DSL = "4.8.1"


def version_tuple(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: (0, 7, 2) for ``0.7.2.post1`` and ``0.7.2+cu130``; empty if it is not a version.

    A pre-release loses its last number, so that it compares as older than the release.
    """
    try:
        found = Version(version)
    except InvalidVersion:
        return ()
    return found.release[:-1] if found.pre else found.release


def _host(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if e.host != "unsupported":
        return None
    return e.host_detail or "this version of trtllm-b12x has no adapter for the installed TensorRT-LLM"


def _sm(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if e.sm is None or e.sm in SERVED_SM:
        return None
    return f"the GPU is SM{e.sm}" if e.sm else "no GPU is visible"


def _toolkit(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    """Apply the check of FlashInfer: nvcc's version, or torch's (jit/cpp_ext.py, get_cuda_version; b12x_moe.py)."""
    if e.toolkit_cuda is None or e.toolkit_cuda >= (13, 0):
        return None
    if e.toolkit_cuda == (0, 0):
        return "FlashInfer finds no CUDA toolkit: no nvcc, and torch is built without CUDA"
    return f"FlashInfer finds CUDA {e.toolkit_cuda[0]}.{e.toolkit_cuda[1]}, b12x needs 13"


def _dsl_payload(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    """Reject a CUDA 12 payload: it compiles invalid PTX and the server dies at model start (TensorRT-LLM issue 15853)."""
    if e.payload_cuda is None or e.payload_cuda >= (13, 0) or e.dsl == "none":
        return None
    found = f"the CuTe DSL {e.dsl} loads its CUDA {e.payload_cuda[0]}.{e.payload_cuda[1]} payload" if e.payload_cuda[0] else ""
    fault = e.payload_fault or PayloadFault.UNKNOWN
    detail = "; ".join(part for part in (found, fault.value, e.payload_detail) if part)
    if fault is PayloadFault.DRIVER:
        return detail + "; update the driver to one of CUDA 13 (580 or newer)"
    return detail


def _flashinfer_too_old(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if e.flashinfer in (None, "none"):
        return None
    if version_tuple(e.flashinfer or "") < OLDEST_FLASHINFER:
        return f"flashinfer-python {e.flashinfer} is older than {'.'.join(map(str, OLDEST_FLASHINFER))}"
    return None


def _flashinfer_broken(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if e.mismatched:
        return f"import of flashinfer-python {e.flashinfer} raises: {', '.join(e.mismatched)} is of another version"
    if not e.flashinfer_fault and e.exact_scales is False and version_tuple(e.flashinfer or "") >= OLDEST_FLASHINFER:
        return f"flashinfer-python {e.flashinfer} has no B12xMoEWrapper that takes input_global_scale"
    return e.flashinfer_fault or None


def _quantization(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if p.quant_algo is None or p.quant_algo in f.quantizations:
        return None
    if p.quant_algo == "W4A16_NVFP4":
        what = "the experts are W4A16_NVFP4: NVFP4 weights for bf16 activations"
        if f.arithmetic == "UNQUANTIZED":
            return f"{what}, whose block scales the host keeps in another layout"
        return f"{what}, the kernels quantize activations to FP4"
    what = "not quantized" if p.quant_algo == "none" else p.quant_algo
    return f"the experts are {what}, not {' or '.join(sorted(f.quantizations))}"


def _group_size(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    # 128 is the QuantConfig default of the host, i.e. unset. NVFP4 methods ignore the field or (2026) reject other values.
    if p.quant_algo not in f.quantizations or p.group_size in (None, f.group_size, 128):
        return None
    return f"{p.quant_algo} with group size {p.group_size}"


def _dtype(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if p.dtype is None or p.dtype in f.dtypes:
        return None
    return f"activations are {p.dtype}, the kernels compute in {' or '.join(sorted(f.dtypes))}"


def _activation(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if p.activation is None or not f.activations or p.activation in f.activations:
        return None
    return f"activation {p.activation}, the kernel has {', '.join(sorted(f.activations))}"


def _hidden_size(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if p.hidden_size is None or p.hidden_size % f.hidden_size_multiple == 0:
        return None
    return f"hidden size {p.hidden_size} is no multiple of {f.hidden_size_multiple}"


def _size_per_rank(p: LayerShape, d: Deployment) -> float | None:
    """Return the intermediate size of a rank, before padding. It is a fraction if the ranks do not divide the layer's size."""
    return None if p.intermediate_size is None else p.intermediate_size / (d.tp_size or 1)


def _intermediate_size(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    # A block scale covers group_size columns of w2. A rank that starts inside a block has no scale for its part.
    size = _size_per_rank(p, d)
    if size is None or size % f.group_size == 0:
        return None
    return f"intermediate size {size:g} per rank is no multiple of {f.group_size}"


def _expert_parallel(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if d.ep_size in (None, 1) or f.negative_ids is not False:
        return None
    return f"expert parallelism over {d.ep_size} ranks, and kernel {f.name} does not skip negative ids"


def _attention_dp(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if not d.attention_dp or f.quantized_input:
        return None
    return "attention-DP ranks gather tokens that the host has quantized, the kernels take bf16"


def _load_balancer(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if d.load_balancer in (None, "none"):
        return None
    return f"a {d.load_balancer} load balancer moves experts between slots"


def _cuda_graphs(p: LayerShape, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if not d.cuda_graphs or f.graph_safe is not False:
        return None
    return f"kernel {f.name} cannot be captured in a CUDA graph"


RULES: dict[RejectReason, _Rule] = {
    RejectReason.DISABLED: lambda p, d, e, f: "TRTLLM_B12X=0" if e.enabled is False else None,
    RejectReason.HOST: _host,
    RejectReason.SM: _sm,
    RejectReason.TOOLKIT: _toolkit,
    RejectReason.DSL_MISSING: lambda p, d, e, f: "nvidia-cutlass-dsl is not installed" if e.dsl == "none" else None,
    RejectReason.DSL_PAYLOAD: _dsl_payload,
    RejectReason.FLASHINFER_MISSING: lambda p, d, e, f: "flashinfer-python is not installed" if e.flashinfer == "none" else None,
    RejectReason.FLASHINFER_TOO_OLD: _flashinfer_too_old,
    RejectReason.FLASHINFER_BROKEN: _flashinfer_broken,
    RejectReason.REQUIREMENT: lambda p, d, e, f: f"not met: {', '.join(e.unmet)}" if e.unmet else None,
    RejectReason.TRITON: lambda p, d, e, f: "; ".join(item.what for item in e.triton_lacks or ()) or None,
    RejectReason.UPCAST: lambda p, d, e, f: e.upcast or None,
    RejectReason.QUANTIZATION: _quantization,
    RejectReason.GROUP_SIZE: _group_size,
    RejectReason.PRE_QUANT_SCALE: lambda p, d, e, f: (
        "the experts carry AWQ pre-quantization scales" if p.pre_quant_scale else None
    ),
    RejectReason.UNEQUAL_SCALES: lambda p, d, e, f: (
        "gate and up have different weight_scale_2, the kernels take one for both" if p.unequal_scales else None
    ),
    RejectReason.DYNAMIC_QUANTIZATION: lambda p, d, e, f: (
        "the host rewrites alphas and input scales at every call" if p.dynamic_quantization else None
    ),
    RejectReason.ACTIVATION_DTYPE: _dtype,
    RejectReason.ACTIVATION: _activation,
    RejectReason.ACTIVATION_CONSTANTS: lambda p, d, e, f: "SwiGLU with alpha, beta or limit" if p.activation_constants else None,
    RejectReason.HIDDEN_SIZE: _hidden_size,
    RejectReason.INTERMEDIATE_SIZE: _intermediate_size,
    RejectReason.BIAS: lambda p, d, e, f: "the experts have a bias" if p.bias else None,
    RejectReason.ROUTER_WEIGHT_ON_INPUT: lambda p, d, e, f: (
        "the router weight is applied to the input" if p.apply_router_weight_on_input else None
    ),
    RejectReason.EXPERT_PARALLEL: _expert_parallel,
    RejectReason.ATTENTION_DP: _attention_dp,
    RejectReason.ALLTOALL: lambda p, d, e, f: (
        "ids from an all-to-all hold padding, and tokens come quantized" if d.alltoall else None
    ),
    RejectReason.LOAD_BALANCER: _load_balancer,
    RejectReason.LORA: lambda p, d, e, f: "LoRA on the experts" if d.lora else None,
    RejectReason.CUDA_GRAPHS: _cuda_graphs,
}


def _fc1_rows(p: LayerShape, d: Deployment) -> str | None:
    """Apply nvfp4_fc1_row_alignment_rejection (impl_contract.py): hosts pad [up; gate] to 128 rows together, split at half."""
    size = _size_per_rank(p, d)
    if p.activation != "Swiglu" or size is None or size % 64 == 0:
        return None
    return f"intermediate size {size:g} per rank is no multiple of 64; choose another moe_tensor_parallel_size"


def _block_width(p: LayerShape, d: Deployment) -> str | None:
    """Reject other block widths: create_weights (quantization.py) raises NotImplementedError. Older hosts ignore the field."""
    if p.group_size in (None, 16):
        return None
    return f"NVFP4 with group size {p.group_size}; {RejectReason.GROUP_SIZE.value}"


_HOSTS_REFUSE = {("NVFP4", "TensorRT-LLM from August 2026 on"): (_fc1_rows, _block_width)}
"""Map (format, TensorRT-LLM versions) to the layers that these versions refuse to build, before any rule of this package."""


def refused_by_hosts(shape: LayerShape, deployment: Deployment) -> list[str]:
    """List which TensorRT-LLM versions refuse this layer, and why. For tools that run outside the server that will load it."""
    rows = ((who, rules) for (algorithm, who), rules in _HOSTS_REFUSE.items() if algorithm == shape.quant_algo)
    found = ((who, rule(shape, deployment)) for who, rules in rows for rule in rules)
    return [f"{who} refuses it: {wrong}" for who, wrong in found if wrong is not None]
