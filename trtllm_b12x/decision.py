"""Which kernels will serve this layer?  A pure function from facts to verdicts; it imports nothing of ours.

``None`` in any field means unknown: the rule about it abstains.  Facts become known in steps (selection sees the
quantization, construction the shapes, weight creation the layer's final quantization), and the same function is asked
each time.  :func:`decide` returns every reason that speaks against one family of kernels, not only the first; :func:`resolve`
asks about several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from packaging.version import InvalidVersion, Version


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
    force: bool = False
    """``TRTLLM_B12X=force``: a proved payload (``compile_proved``) is as good as a CUDA 13 one."""
    compile_proved: bool | None = None
    """FlashInfer's micro kernel was compiled and assembled with this payload."""
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
    only_deterministic: bool = False
    """``TRTLLM_B12X_DETERMINISTIC``."""
    gather_bf16: bool = False
    """``TRTLLM_B12X_GATHER_BF16``: attention-DP ranks gather tokens that are not quantized."""


class RejectReason(Enum):
    """Closed: tests and tools compare members, never texts.  The value says what to do where no command can be given."""

    DISABLED = "unset TRTLLM_B12X"
    HOST = "install a newer trtllm-b12x"
    SM = "nothing to do: SM120 and SM121 are served, no other card"
    TOOLKIT = "install a CUDA toolkit 13 (nvcc) and let CUDA_HOME name it"
    DSL_MISSING = "install the CuTe DSL with its CUDA 13 payload"
    DSL_PAYLOAD = "let the CuTe DSL load its CUDA 13 payload"
    FLASHINFER_MISSING = "install FlashInfer"
    FLASHINFER_TOO_OLD = "install a newer FlashInfer"
    FLASHINFER_BROKEN = "install FlashInfer anew"
    REQUIREMENT = "install what FlashInfer and the CuTe DSL require"
    TRITON = "install what compiles Triton's kernels"
    QUANTIZATION = "quantize the experts with nvidia-modelopt's NVFP4_DEFAULT_CFG, or leave the layer to CUTLASS"
    GROUP_SIZE = "export the checkpoint with NVFP4's group size of 16"
    PRE_QUANT_SCALE = "export without AWQ pre-quantization scales (NVFP4_DEFAULT_CFG)"
    DYNAMIC_QUANTIZATION = "leave force_dynamic_quantization off"
    ACTIVATION_DTYPE = "run the model in bfloat16 (dtype: bfloat16)"
    ACTIVATION = "nothing to do: CUTLASS serves this activation"
    ACTIVATION_CONSTANTS = "nothing to do: CUTLASS serves SwiGLU with alpha, beta or limit"
    HIDDEN_SIZE = "nothing to do: CUTLASS serves this hidden size"
    INTERMEDIATE_SIZE = "choose a moe_tensor_parallel_size that leaves a multiple of 16 per rank"
    BIAS = "nothing to do: CUTLASS serves experts with bias"
    ROUTER_WEIGHT_ON_INPUT = "nothing to do: CUTLASS serves apply_router_weight_on_input"
    EXPERT_PARALLEL = "set moe_expert_parallel_size: 1, or install flashinfer-python 0.7.2 or newer"
    ATTENTION_DP = "set TRTLLM_B12X_GATHER_BF16=1 to gather bf16 tokens, or leave decode to CUTLASS"
    ALLTOALL = "nothing to do: CUTLASS serves layers behind an all-to-all"
    LOAD_BALANCER = "remove moe_config.load_balancer"
    LORA = "nothing to do: CUTLASS serves LoRA"
    DETERMINISTIC = "install FlashInfer 0.7.2 or newer, or unset TRTLLM_B12X_DETERMINISTIC"
    KERNELS = "unset TRTLLM_B12X_KERNELS, or let it name kernels that run on this device"
    KERNEL_PLAN_FAILED = "run trtllm-b12x doctor --compile, and report the line if it passes"
    CUDA_GRAPHS = "nothing to do: CUTLASS serves captured graphs where the kernel cannot be captured"

    @property
    def mendable(self) -> bool:
        """The user can do something about it: worth a warning, not only information."""
        return not self.value.startswith("nothing to do")


@dataclass(frozen=True)
class KernelFeatures:
    """What the kernels of one family serve, and which rules bind them; where it is None, a rule abstains."""

    name: str
    activations: frozenset[str] = frozenset()
    """Names of the host's ``ActivationType`` members; none: not known."""
    tile: int = 128
    """The intermediate size they take is a multiple of this: weights are padded to it."""
    hidden_size_multiple: int = 1
    negative_ids: bool | None = None
    """A negative expert id is an unrouted slot, hence expert parallelism."""
    graph_safe: bool | None = None
    deterministic: bool | None = None
    """They can be restricted to kernels whose reruns agree to the bit (``TRTLLM_B12X_DETERMINISTIC``)."""
    versions: str = ""
    """Of flashinfer-python, as a requirement; empty where it does not matter."""
    arithmetic: str = "KERNEL"
    """Where they round: a member of :class:`trtllm_b12x.strict_reference.Arithmetic`."""
    quantizations: frozenset[str] = frozenset({"NVFP4"})
    """Names of the host's ``QuantAlgo`` members."""
    dtypes: frozenset[str] = frozenset({"bfloat16"})
    """Of activations."""
    oldest_sm: int = 120
    newest_sm: int = 121
    """Cards they run on, major * 10 + minor; inside TensorRT-LLM it is one of :data:`SERVED_SM` besides."""
    most_routes: int | None = None
    """(token, expert) pairs of a call, at most."""
    bound_by: frozenset[RejectReason] = frozenset(RejectReason) - {RejectReason.TRITON}
    """Rules that speak against them; a family is free of every other, as one that needs no FlashInfer of its rules."""


SERVED_SM = (120, 121)


@dataclass(frozen=True)
class Rejection:
    reason: RejectReason
    detail: str
    commands: tuple[str, ...] = ()
    """Shell commands, to be run in order.  They mend everything that packages cause, not this alone."""
    moves: tuple[str, ...] = ()
    """``name version`` of what they replace by another version."""
    advice: str = ""
    """What to do where no command can be given; empty: what the reason says."""

    @property
    def remedy(self) -> str:
        return " && ".join(self.commands) or self.advice or self.reason.value

    def __str__(self) -> str:
        moves = f"; this moves {', '.join(self.moves)}" if self.moves else ""
        return f"{self.reason.name}: {self.detail} ({self.remedy}{moves})"


@dataclass(frozen=True)
class Verdict:
    """On one family: it serves the layer if nothing speaks against it."""

    rejections: tuple[Rejection, ...] = ()

    @property
    def served(self) -> bool:
        return not self.rejections

    @property
    def reasons(self) -> tuple[RejectReason, ...]:
        return tuple(rejection.reason for rejection in self.rejections)

    def __str__(self) -> str:
        return "; ".join(map(str, self.rejections))


@dataclass(frozen=True)
class Resolution:
    """On one layer: each family that was considered, the preferred one first, with the verdict on it.

    The layer is served if any family is eligible; then ``rejections`` is empty, and ``refused`` says why not the others.
    """

    verdicts: tuple[tuple[str, Verdict], ...]

    @staticmethod
    def left_to_the_host(reason: RejectReason, detail: str) -> Resolution:
        """Whatever the family."""
        return Resolution((("", Verdict((Rejection(reason, detail),))),))

    @property
    def families(self) -> tuple[str, ...]:
        """Those that are eligible, in order."""
        return tuple(name for name, verdict in self.verdicts if verdict.served)

    @property
    def refused(self) -> tuple[tuple[str, Rejection], ...]:
        """Family and rejection, each rejection once, with the first family that it is about."""
        found: dict[Rejection, str] = {}
        for name, verdict in self.verdicts:
            for rejection in verdict.rejections:
                found.setdefault(rejection, name)
        return tuple((name, rejection) for rejection, name in found.items())

    @property
    def served(self) -> bool:
        return bool(self.families)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """What keeps the layer with the host."""
        return () if self.served else tuple(rejection for _, rejection in self.refused)

    @property
    def reasons(self) -> tuple[RejectReason, ...]:
        return tuple(dict.fromkeys(rejection.reason for rejection in self.rejections))

    def __str__(self) -> str:
        several = len(self.verdicts) > 1
        found = "; ".join(f"{name}: {rejection}" if several else str(rejection) for name, rejection in self.refused)
        if not self.served:
            return f"cutlass: {found}"
        return ", ".join(self.families) + (f"; not {found}" if found else "")


_Rule = Callable[[Problem, Deployment, Environment, KernelFeatures], str | None]
"""Says what is wrong, or None."""

OLDEST_FLASHINFER = (0, 6, 18)
"""The oldest release that is served; the newest TensorRT-LLM pins it.  0.6.17's static kernel drops half of a tile's rows and
takes its stream as an argument; 0.6.9 to 0.6.16 have neither exact scales nor a cooperative launch."""
EXPERT_PARALLEL_FLASHINFER = (0, 7, 2)
"""The oldest whose kernels skip negative ids and are compiled for every token count."""
COMPLETE_FLASHINFER = "flashinfer-python>=0.7.2,<0.8"
OLDEST_DSL = (4, 6, 2)
"""What flashinfer-python from 0.6.18 on requires (its metadata)."""
COMPLETE_DSL = "4.8.1"


def version_tuple(version: str) -> tuple[int, ...]:
    """The release of a version: ``0.7.2.post1`` and ``0.7.2+cu130`` to (0, 7, 2); without its last number before that release.

    Nothing of what is no version.
    """
    try:
        found = Version(version)
    except InvalidVersion:
        return ()
    return found.release[:-1] if found.pre else found.release


def _disabled(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    return "TRTLLM_B12X=0" if e.enabled is False else None


def _host(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if e.host != "unsupported":
        return None
    return e.host_detail or "this version of trtllm-b12x has no adapter for the installed TensorRT-LLM"


def _sm(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if e.sm is None or e.sm in SERVED_SM:
        return None
    return f"the GPU is SM{e.sm}" if e.sm else "no GPU is visible"


def _toolkit(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    """FlashInfer's own check: nvcc's version, or torch's (jit/cpp_ext.py, get_cuda_version; b12x_moe.py)."""
    if e.toolkit_cuda is None or e.toolkit_cuda >= (13, 0):
        return None
    if e.toolkit_cuda == (0, 0):
        return "FlashInfer finds no CUDA toolkit: no nvcc, and torch is built without CUDA"
    return f"FlashInfer finds CUDA {e.toolkit_cuda[0]}.{e.toolkit_cuda[1]}, b12x needs 13"


def _dsl_missing(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    return "nvidia-cutlass-dsl is not installed" if e.dsl == "none" else None


def _dsl_payload(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    """Environments where the CUDA 12 payload loads compile invalid PTX and die at model start (TensorRT-LLM issue 15853)."""
    if e.payload_cuda is None or e.payload_cuda >= (13, 0) or e.dsl == "none":
        return None
    if e.force and e.compile_proved:
        return None
    found = f"the CuTe DSL {e.dsl} loads its CUDA {e.payload_cuda[0]}.{e.payload_cuda[1]} payload" if e.payload_cuda[0] else ""
    fault = e.payload_fault or PayloadFault.UNKNOWN
    detail = "; ".join(part for part in (found, fault.value, e.payload_detail) if part)
    if fault is PayloadFault.DRIVER:
        return detail + "; update the driver to one of CUDA 13 (580 or newer)"
    return detail


def _flashinfer_missing(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    return "flashinfer-python is not installed" if e.flashinfer == "none" else None


def _flashinfer_too_old(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if e.flashinfer in (None, "none"):
        return None
    if version_tuple(e.flashinfer or "") < OLDEST_FLASHINFER:
        return f"flashinfer-python {e.flashinfer} is older than {'.'.join(map(str, OLDEST_FLASHINFER))}"
    return None


def _flashinfer_broken(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if e.mismatched:
        return f"import of flashinfer-python {e.flashinfer} raises: {', '.join(e.mismatched)} is of another version"
    if not e.flashinfer_fault and e.exact_scales is False and version_tuple(e.flashinfer or "") >= OLDEST_FLASHINFER:
        return f"flashinfer-python {e.flashinfer} has no B12xMoEWrapper that takes input_global_scale"
    return e.flashinfer_fault or None


def _requirement(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    return f"not met: {', '.join(e.unmet)}" if e.unmet else None


def _triton(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    return "; ".join(item.what for item in e.triton_lacks or ()) or None


def _quantization(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if p.quant_algo is None or p.quant_algo in f.quantizations:
        return None
    if p.quant_algo == "W4A16_NVFP4":
        what = "the experts are W4A16_NVFP4: NVFP4 weights for bf16 activations"
        if f.arithmetic == "UNQUANTIZED":
            return f"{what}, whose block scales the host keeps in another layout"
        return f"{what}, the kernels quantize activations to FP4"
    what = "not quantized" if p.quant_algo == "none" else p.quant_algo
    return f"the experts are {what}, not {' or '.join(sorted(f.quantizations))}"


def _group_size(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    # 128 is the default of the host's QuantConfig, that is, unset: NVFP4 methods do not read it, or (2026) refuse what they read.
    if p.quant_algo != "NVFP4" or p.group_size in (None, 16, 128):
        return None
    return f"NVFP4 with group size {p.group_size}"


def _pre_quant_scale(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    return "the experts carry AWQ pre-quantization scales" if p.pre_quant_scale else None


def _dynamic_quantization(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    return "the host rewrites alphas and input scales at every call" if p.dynamic_quantization else None


def _activation_dtype(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if p.activation_dtype is None or p.activation_dtype in f.dtypes:
        return None
    return f"activations are {p.activation_dtype}, the kernels compute in {' or '.join(sorted(f.dtypes))}"


def _activation(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if p.activation is None or not f.activations or p.activation in f.activations:
        return None
    return f"activation {p.activation}, the kernel has {', '.join(sorted(f.activations))}"


def _activation_constants(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    return "SwiGLU with alpha, beta or limit" if p.activation_constants else None


def _hidden_size(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if p.hidden_size is None or p.hidden_size % f.hidden_size_multiple == 0:
        return None
    return f"hidden size {p.hidden_size} is no multiple of {f.hidden_size_multiple}"


def _intermediate_size(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    # A block scale covers 16 columns of w2; a rank that starts inside a block has no scale of its own.
    if p.intermediate_size is None or p.intermediate_size % 16 == 0:
        return None
    return f"intermediate size {p.intermediate_size:g} per rank is no multiple of 16"


def _bias(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    return "the experts have a bias" if p.bias else None


def _router_weight_on_input(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    return "the router weight is applied to the input" if p.apply_router_weight_on_input else None


def _expert_parallel(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if d.ep_size in (None, 1) or f.negative_ids is not False:
        return None
    return f"expert parallelism over {d.ep_size} ranks, and kernel {f.name} does not skip negative ids"


def _attention_dp(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if not d.attention_dp or e.gather_bf16:
        return None
    return "attention-DP ranks gather tokens that the host has quantized, the kernels take bf16"


def _alltoall(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    return "ids from an all-to-all hold padding, and tokens come quantized" if d.alltoall else None


def _load_balancer(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if d.load_balancer in (None, "none"):
        return None
    return f"a {d.load_balancer} load balancer moves experts between slots"


def _cuda_graphs(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if not d.cuda_graphs or f.graph_safe is not False:
        return None
    return f"kernel {f.name} cannot be captured in a CUDA graph"


def _lora(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    return "LoRA on the experts" if d.lora else None


def _deterministic(p: Problem, d: Deployment, e: Environment, f: KernelFeatures) -> str | None:
    if not e.only_deterministic or f.deterministic is not False:
        return None
    return f"no kernel of flashinfer-python {e.flashinfer} that serves every call adds up in a fixed order"


_RULES: dict[RejectReason, _Rule] = {
    RejectReason.DISABLED: _disabled,
    RejectReason.HOST: _host,
    RejectReason.SM: _sm,
    RejectReason.TOOLKIT: _toolkit,
    RejectReason.DSL_MISSING: _dsl_missing,
    RejectReason.DSL_PAYLOAD: _dsl_payload,
    RejectReason.FLASHINFER_MISSING: _flashinfer_missing,
    RejectReason.FLASHINFER_TOO_OLD: _flashinfer_too_old,
    RejectReason.FLASHINFER_BROKEN: _flashinfer_broken,
    RejectReason.REQUIREMENT: _requirement,
    RejectReason.TRITON: _triton,
    RejectReason.QUANTIZATION: _quantization,
    RejectReason.GROUP_SIZE: _group_size,
    RejectReason.PRE_QUANT_SCALE: _pre_quant_scale,
    RejectReason.DYNAMIC_QUANTIZATION: _dynamic_quantization,
    RejectReason.ACTIVATION_DTYPE: _activation_dtype,
    RejectReason.ACTIVATION: _activation,
    RejectReason.ACTIVATION_CONSTANTS: _activation_constants,
    RejectReason.HIDDEN_SIZE: _hidden_size,
    RejectReason.INTERMEDIATE_SIZE: _intermediate_size,
    RejectReason.BIAS: _bias,
    RejectReason.ROUTER_WEIGHT_ON_INPUT: _router_weight_on_input,
    RejectReason.EXPERT_PARALLEL: _expert_parallel,
    RejectReason.ATTENTION_DP: _attention_dp,
    RejectReason.ALLTOALL: _alltoall,
    RejectReason.LOAD_BALANCER: _load_balancer,
    RejectReason.LORA: _lora,
    RejectReason.DETERMINISTIC: _deterministic,
    RejectReason.CUDA_GRAPHS: _cuda_graphs,
}


FLASHINFERS = frozenset(
    {
        RejectReason.DSL_MISSING,
        RejectReason.DSL_PAYLOAD,
        RejectReason.FLASHINFER_MISSING,
        RejectReason.FLASHINFER_TOO_OLD,
        RejectReason.FLASHINFER_BROKEN,
        RejectReason.REQUIREMENT,
    }
)
"""Of what FlashInfer's kernels are made of: reasons that pip mends."""
_NEWER_FLASHINFER = {RejectReason.EXPERT_PARALLEL, RejectReason.DETERMINISTIC}
"""Reasons that a newer FlashInfer mends, where FlashInfer is what serves."""


def _fc1_rows(p: Problem) -> str | None:
    """impl_contract.py, nvfp4_fc1_row_alignment_rejection: such hosts pad [up; gate] to 128 rows as one, and split it at half."""
    if p.quant_algo != "NVFP4" or p.activation != "Swiglu" or p.intermediate_size is None or p.intermediate_size % 64 == 0:
        return None
    return f"intermediate size {p.intermediate_size:g} per rank is no multiple of 64; choose another moe_tensor_parallel_size"


def _block_width(p: Problem) -> str | None:
    """quantization.py, create_weights raises NotImplementedError; hosts before never read it."""
    if p.quant_algo != "NVFP4" or p.group_size in (None, 16):
        return None
    return f"NVFP4 with group size {p.group_size}; {RejectReason.GROUP_SIZE.value}"


_HOSTS_REFUSE = {"TensorRT-LLM from August 2026 on": (_fc1_rows, _block_width)}
"""What hosts do not build at all, before any rule of ours is asked."""


def refused_by_hosts(problem: Problem) -> list[str]:
    """For tools that do not run inside the host that will load the model: which hosts refuse this layer, and why."""
    found = ((who, rule(problem)) for who, rules in _HOSTS_REFUSE.items() for rule in rules)
    return [f"{who} refuses it: {wrong}" for who, wrong in found if wrong is not None]


UNKNOWN = KernelFeatures("b12x")
"""Nothing is known of the kernels, and every rule binds them."""


@functools.lru_cache(maxsize=256)
def decide(
    problem: Problem,
    deployment: Deployment | None = None,
    environment: Environment | None = None,
    features: KernelFeatures = UNKNOWN,
    plan_error: str | None = None,
) -> Verdict:
    """Apply every rule that binds the family; a rule without its facts abstains.  A model's layers mostly ask the same: kept.

    Args:
        plan_error: first line of what planning its kernels raised.
    """
    environment = environment or Environment()
    facts = (problem, deployment or Deployment(), environment, features)
    findings = {
        reason: finding
        for reason, rule in _RULES.items()
        if reason in features.bound_by and (finding := rule(*facts)) is not None
    }
    if plan_error is not None:
        findings[RejectReason.KERNEL_PLAN_FAILED] = plan_error
    newer = RejectReason.FLASHINFER_TOO_OLD in features.bound_by and environment.flashinfer is not None
    newer = newer and not _NEWER_FLASHINFER.isdisjoint(findings)
    repair = _repair(environment, newer) if newer or not FLASHINFERS.isdisjoint(findings) else ((), ())
    mended = FLASHINFERS | _NEWER_FLASHINFER if newer else FLASHINFERS
    triton = "; ".join(item.remedy for item in environment.triton_lacks or ())
    return Verdict(
        tuple(
            Rejection(r, text, *(repair if r in mended else ((), ())), advice=triton if r is RejectReason.TRITON else "")
            for r, text in findings.items()
        )
    )


def resolve(
    problem: Problem,
    deployment: Deployment | None,
    environment: Environment | None,
    families: Iterable[tuple[str, KernelFeatures]],
    plan_errors: Mapping[str, str] = MappingProxyType({}),
) -> Resolution:
    """:func:`decide` for each family, in their order."""
    facts = (problem, deployment, environment)
    found = tuple((name, decide(*facts, features, plan_errors.get(name))) for name, features in families)
    if found:
        return Resolution(found)
    return Resolution.left_to_the_host(RejectReason.KERNELS, "no kernels that are considered run on this device")


def _repair(e: Environment, newer_flashinfer: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Commands that mend all that packages cause, and ``name version`` of what they move.  What is good enough stays."""
    moves, install, reinstall, nothing = [], [], [], (Problem(), Deployment())
    pinned = "" if e.host in (None, "none") else " (TensorRT-LLM pins and uses it)"
    unmet = {_name(requirement) for requirement in e.unmet}

    flashinfer_moves = newer_flashinfer or e.flashinfer == "none" or _flashinfer_too_old(*nothing, e, UNKNOWN) is not None
    if flashinfer_moves:
        install.append(COMPLETE_FLASHINFER)
        moves += [f"flashinfer-python {e.flashinfer}{pinned}"] if e.flashinfer != "none" else []
    elif _flashinfer_broken(*nothing, e, UNKNOWN) and not e.mismatched and not e.missing:
        reinstall.append(f"flashinfer-python=={e.flashinfer}")

    too_old = version_tuple(e.dsl or "") < OLDEST_DSL
    mixed = any(name.startswith("nvidia-cutlass-dsl-") for name in unmet)
    fault = e.payload_fault
    if e.dsl == "none" or "nvidia-cutlass-dsl" in unmet or mixed or (flashinfer_moves and e.dsl is not None and too_old):
        version = COMPLETE_DSL if e.dsl == "none" or too_old or "nvidia-cutlass-dsl" in unmet else e.dsl
        install.append(f"nvidia-cutlass-dsl[cu13]=={version}")
        moves += [f"nvidia-cutlass-dsl {e.dsl}{pinned}"] if e.dsl not in ("none", version) else []
    elif fault is PayloadFault.CU13_MISSING:
        install.append(f"nvidia-cutlass-dsl-libs-cu13=={e.dsl}")
    elif _dsl_payload(*nothing, e, UNKNOWN) and not e.missing and not e.dsl_in_the_way and fault not in _NOT_PIPS:
        # Before DSL 4.6 wheels share paths: cu13 last, and alone where it was only written over.
        wheels = e.dsl_wheels or ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13")
        shadowed = fault is PayloadFault.SHADOWED
        reinstall += [f"{name}=={e.dsl}" for name in wheels if name.endswith("-cu13") or not shadowed]
    others = [] if flashinfer_moves else [text for text in e.unmet if not text.startswith("nvidia-cutlass-dsl")]
    install += [text.split()[0] for text in others]
    moves += [f"{_name(text)} {text.split()[1].strip('(')}{pinned}" for text in others]
    install += e.missing

    commands = []
    # FlashInfer 0.7.2 and newer ignore kernel wheels of another version.
    remove = [*e.dsl_in_the_way, *(wheel.split()[0] for wheel in e.mismatched if not flashinfer_moves)]
    if remove:
        commands.append(f"pip uninstall -y {' '.join(remove)}")
    for name in (name for name in e.unrecorded if name not in {_name(r) for r in reinstall}):
        if any(_name(r) == name for r in install):  # pip cannot replace it as it is
            reinstall.append(f"{name}=={e.flashinfer if name == 'flashinfer-python' else e.dsl}")
    if reinstall:
        how = "--ignore-installed" if e.unrecorded else "--force-reinstall"
        commands.append(f"pip install {how} --no-deps {' '.join(reinstall)}")
    if install:
        commands.append("pip install " + " ".join(f'"{requirement}"' for requirement in install))
    return tuple(commands), tuple(moves)


_NOT_PIPS = (PayloadFault.DRIVER, PayloadFault.NO_ANSWER, PayloadFault.FOREIGN)


def _name(requirement: str) -> str:
    """The distribution of a requirement, a ``name==version`` or a ``name version``."""
    for end, character in enumerate(requirement):
        if not (character.isalnum() or character in "-_."):
            return requirement[:end]
    return requirement
