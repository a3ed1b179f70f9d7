# SPDX-License-Identifier: Apache-2.0
"""Apply the rules of a decision, one per reason. A rule abstains if its facts are unknown."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from trtllm_b12x.formats.geometry import LayerShape

from .inputs import Deployment, Environment, PayloadFault
from .verdicts import SERVED_SM, KernelFeatures, RejectReason

Finding = tuple[RejectReason, str]

OLDEST_FLASHINFER = (0, 6, 18)
"""Oldest supported release; the newest TensorRT-LLM pins it. In 0.6.17 the static kernel drops half of a tile's rows and takes
its stream as an argument. 0.6.9 to 0.6.16 lack exact scales (``input_global_scale``) and a cooperative launch."""
EXPERT_PARALLEL_FLASHINFER = (0, 7, 2)
"""Oldest release whose kernels skip negative ids and are compiled for every token count."""
COMPLETE_FLASHINFER = "flashinfer-python>=0.7.2,<0.7.4"
OLDEST_DSL = (4, 6, 2)
"""Version required by flashinfer-python 0.6.18 and newer (its metadata)."""
COMPLETE_DSL = "4.8.1"
_NVFP4 = "NVFP4"


def version_tuple(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: (0, 7, 2) for ``0.7.2.post1`` and ``0.7.2+cu130``; empty if it is not a version.

    A pre-release loses its last number, so that it compares as older than the release.
    """
    try:
        parsed = Version(version)
    except InvalidVersion:
        return ()
    return parsed.release[:-1] if parsed.pre else parsed.release


def machine_findings(e: Environment) -> Iterator[Finding]:
    """Yield the faults of this machine."""
    if e.enabled is False:
        yield RejectReason.DISABLED, "TRTLLM_B12X=0"
    if e.host == "unsupported":
        unknown = "this version of trtllm-b12x has no adapter for the installed TensorRT-LLM"
        yield RejectReason.HOST, e.host_detail or unknown
    if e.sm is not None and e.sm not in SERVED_SM:
        yield RejectReason.SM, f"the GPU is SM{e.sm}" if e.sm else "no GPU is visible"
    # FlashInfer checks nvcc's version, or torch's (jit/cpp_ext.py, get_cuda_version; b12x_moe.py).
    if e.toolkit_cuda == (0, 0):
        yield RejectReason.TOOLKIT, "FlashInfer finds no CUDA toolkit: no nvcc, and torch is built without CUDA"
    elif e.toolkit_cuda is not None and e.toolkit_cuda < (13, 0):
        yield RejectReason.TOOLKIT, f"FlashInfer finds CUDA {e.toolkit_cuda[0]}.{e.toolkit_cuda[1]}, b12x needs 13"
    if e.dsl == "none":
        yield RejectReason.DSL_MISSING, "nvidia-cutlass-dsl is not installed"
    elif e.payload_cuda is not None and e.payload_cuda < (13, 0):
        # An older payload compiles invalid PTX and the server dies at model start (TensorRT-LLM issue 15853).
        loads = (
            f"the CuTe DSL {e.dsl} loads its CUDA {e.payload_cuda[0]}.{e.payload_cuda[1]} payload" if e.payload_cuda[0] else ""
        )
        fault = e.payload_fault or PayloadFault.UNKNOWN
        driver = "; update the driver to one of CUDA 13 (580 or newer)" if fault is PayloadFault.DRIVER else ""
        yield RejectReason.DSL_PAYLOAD, "; ".join(filter(None, (loads, fault.value, e.payload_detail))) + driver
    release = version_tuple(e.flashinfer or "")
    if e.flashinfer == "none":
        yield RejectReason.FLASHINFER_MISSING, "flashinfer-python is not installed"
    elif e.flashinfer is not None and release < OLDEST_FLASHINFER:
        oldest = ".".join(map(str, OLDEST_FLASHINFER))
        yield RejectReason.FLASHINFER_TOO_OLD, f"flashinfer-python {e.flashinfer} is older than {oldest}"
    if e.flashinfer_fault:
        yield RejectReason.FLASHINFER_BROKEN, e.flashinfer_fault
    if e.unmet:
        yield RejectReason.REQUIREMENT, f"not met: {', '.join(e.unmet)}"
    if e.triton_lacks:
        yield RejectReason.TRITON, "; ".join(item.what for item in e.triton_lacks)
    if e.nvrtc is False:
        yield RejectReason.NVRTC, "NVRTC, which compiles these kernels, is not installed"
    if e.upcast:
        yield RejectReason.UPCAST, e.upcast


def layer_findings(p: LayerShape, d: Deployment, f: KernelFeatures) -> Iterator[Finding]:
    """Yield why kernels with these capabilities cannot serve the layer."""
    if p.quant_algo not in (None, *f.quantizations):
        name = "not quantized" if p.quant_algo == "none" else p.quant_algo
        yield RejectReason.QUANTIZATION, f"the experts are {name}, not {' or '.join(sorted(f.quantizations))}"
    # 128 is TensorRT-LLM's QuantConfig default, i.e. unset. NVFP4 methods ignore the field or (2026) reject other values.
    # TensorRT-LLM's W4A16_NVFP4 method ignores the field (commit 02320c35): half of the scales are zero with groups of 32.
    if p.quant_algo in f.quantizations and p.group_size not in (None, f.group_size, 128):
        yield RejectReason.GROUP_SIZE, f"{p.quant_algo} with group size {p.group_size}, not {f.group_size}"
    if p.pre_quant_scale:
        yield RejectReason.PRE_QUANT_SCALE, "the experts carry AWQ pre-quantization scales"
    if p.unequal_scales:
        yield RejectReason.UNEQUAL_SCALES, "gate and up have different weight_scale_2, the kernels take one for both"
    if p.dynamic_quantization:
        yield RejectReason.DYNAMIC_QUANTIZATION, "the host rewrites alphas and input scales at every call"
    if p.dtype not in (None, *f.dtypes):
        dtypes = " or ".join(sorted(f.dtypes))
        yield RejectReason.ACTIVATION_DTYPE, f"activations are {p.dtype}, the kernels compute in {dtypes}"
    if f.activations and p.activation not in (None, *f.activations):
        yield RejectReason.ACTIVATION, f"activation {p.activation}, the kernel has {', '.join(sorted(f.activations))}"
    if p.activation_constants:
        yield RejectReason.ACTIVATION_CONSTANTS, "SwiGLU with alpha, beta or limit"
    if p.hidden_size is not None and p.hidden_size % f.hidden_size_multiple:
        yield RejectReason.HIDDEN_SIZE, f"hidden size {p.hidden_size} is not a multiple of {f.hidden_size_multiple}"
    # A block scale covers group_size columns of w2. A rank that starts inside a block has no scale for its part.
    size = _size_per_rank(p, d)
    if size is not None and size % f.group_size:
        yield RejectReason.INTERMEDIATE_SIZE, f"intermediate size {size:g} per rank is not a multiple of {f.group_size}"
    if p.bias:
        yield RejectReason.BIAS, "the experts have a bias"
    if p.apply_router_weight_on_input:
        yield RejectReason.ROUTER_WEIGHT_ON_INPUT, "the router weight is applied to the input"


def deployment_findings(d: Deployment, f: KernelFeatures) -> Iterator[Finding]:
    """Yield why kernels with these capabilities cannot serve these ranks and engine options."""
    if d.ep_size not in (None, 1) and f.negative_ids is False:
        skips = f"kernel {f.name} does not skip negative ids"
        yield RejectReason.EXPERT_PARALLEL, f"expert parallelism over {d.ep_size} ranks, and {skips}"
    if d.attention_dp and not f.quantized_input:
        yield RejectReason.ATTENTION_DP, "attention-DP ranks gather tokens that the host has quantized, the kernels take bf16"
    if d.alltoall:
        yield RejectReason.ALLTOALL, "ids from an all-to-all hold padding, and tokens come quantized"
    if d.load_balancer not in (None, "none"):
        yield RejectReason.LOAD_BALANCER, f"a {d.load_balancer} load balancer moves experts between slots"
    if d.lora:
        yield RejectReason.LORA, "LoRA on the experts"
    if d.cuda_graphs and f.graph_safe is False:
        yield RejectReason.CUDA_GRAPHS, f"kernel {f.name} cannot be captured in a CUDA graph"


def _size_per_rank(p: LayerShape, d: Deployment) -> float | None:
    """Return the intermediate size of a rank, before padding. It is a fraction if the ranks do not divide the layer's size."""
    return None if p.intermediate_size is None else p.intermediate_size / (d.tp_size or 1)


def refused_by_hosts(shape: LayerShape, deployment: Deployment, served: bool) -> list[str]:
    """List which TensorRT-LLM versions refuse this layer before our rules run, and why. Only tools outside the server call it.

    ``served`` is True if our kernels serve the layer. Our layer then pads its size.
    """
    if shape.quant_algo != _NVFP4:
        return []
    faults, size = [], _size_per_rank(shape, deployment)
    # TensorRT-LLM pads [up; gate] together to 128 rows, split at half: nvfp4_fc1_row_alignment_rejection (impl_contract.py).
    if not served and shape.activation == "Swiglu" and size is not None and size % 64:
        faults.append(f"intermediate size {size:g} per rank is not a multiple of 64; choose another moe_tensor_parallel_size")
    # create_weights (quantization.py) raises NotImplementedError for other block widths. Older versions ignore it.
    if shape.group_size not in (None, 16):
        faults.append(f"NVFP4 with group size {shape.group_size}; {RejectReason.GROUP_SIZE.value}")
    return [f"TensorRT-LLM from August 2026 on refuses it: {fault}" for fault in faults]
