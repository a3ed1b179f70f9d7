"""Will b12x serve this layer?  A pure function from facts to a verdict; it imports nothing of ours.

``None`` in any field means unknown: the rule about it abstains.  Facts become known in steps (selection sees the
quantization, construction the shapes, weight creation the layer's final quantization), and the same function is asked
each time.  :func:`decide` returns every reason that applies, not only the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

    tp_size: int | None = None
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
    IMPORT = "importing the CuTe DSL fails"
    CRASH = "importing the CuTe DSL kills the process"
    UNKNOWN = "the CuTe DSL loads another payload for a reason that could not be found"


@dataclass(frozen=True)
class Environment:
    """The card, the packages and what the kernels can do; versions are ``"none"`` where the package is not installed."""

    enabled: bool | None = None
    """``TRTLLM_B12X`` is not 0."""
    force: bool = False
    """``TRTLLM_B12X=force``: a proved payload (``compile_proved``) is as good as a CUDA 13 one."""
    compile_proved: bool | None = None
    """FlashInfer's micro kernel was compiled and assembled with this payload."""
    allow_baked_scales: bool = False
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
    flashinfer: str | None = None
    kernel: str | None = None
    activations: frozenset[str] | None = None
    hidden_size_multiple: int | None = None
    exact_scales: bool | None = None
    """The kernel takes the activation's global scale by itself (``input_global_scale``)."""
    expert_parallel: bool | None = None
    graph_safe: bool | None = None
    deterministic: bool | None = None
    """The kernel can be restricted to reruns that agree to the bit."""
    only_deterministic: bool = False
    """``TRTLLM_B12X_DETERMINISTIC``."""
    plan_error: str | None = None
    """First line of what planning the kernel raised."""
    gather_bf16: bool = False
    """``TRTLLM_B12X_GATHER_BF16``: attention-DP ranks gather tokens that are not quantized."""


class RejectReason(Enum):
    """Closed: tests and tools compare members, never texts.  The value says what to do where no command can be given."""

    DISABLED = "unset TRTLLM_B12X"
    HOST = "install a newer trtllm-b12x"
    SM = "nothing to do: b12x kernels exist for SM120 and SM121 only"
    TOOLKIT = "install a CUDA toolkit 13 (nvcc) and let CUDA_HOME name it"
    DSL_MISSING = "install the CuTe DSL with its CUDA 13 payload"
    DSL_PAYLOAD = "install the CUDA 13 payload of the CuTe DSL last"
    FLASHINFER_MISSING = "install FlashInfer"
    FLASHINFER_TOO_OLD = "install a FlashInfer with input_global_scale"
    FLASHINFER_SHAPE = "install flashinfer-python 0.7.2 or newer"
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
    KERNEL_PLAN_FAILED = "run trtllm-b12x doctor --compile, and report the line if it passes"
    CUDA_GRAPHS = "nothing to do: CUTLASS serves captured graphs where the kernel cannot be captured"

    @property
    def mendable(self) -> bool:
        """The user can do something about it: worth a warning, not only information."""
        return not self.value.startswith("nothing to do")


@dataclass(frozen=True)
class Rejection:
    reason: RejectReason
    detail: str
    commands: tuple[str, ...] = ()
    """Shell commands that mend it, to be run in order."""

    @property
    def remedy(self) -> str:
        return " && ".join(self.commands) or self.reason.value

    def __str__(self) -> str:
        return f"{self.reason.name}: {self.detail} ({self.remedy})"


@dataclass(frozen=True)
class Verdict:
    """Served if nothing speaks against it."""

    rejections: tuple[Rejection, ...] = ()
    warnings: tuple[str, ...] = ()
    """What a setting let pass, and what it costs."""

    @property
    def served(self) -> bool:
        return not self.rejections

    @property
    def reasons(self) -> tuple[RejectReason, ...]:
        return tuple(rejection.reason for rejection in self.rejections)

    def __str__(self) -> str:
        return "b12x" if self.served else "cutlass: " + "; ".join(map(str, self.rejections))


_Finding = str | tuple[str, tuple[str, ...]] | None
_Rule = Callable[[Problem, Deployment, Environment], "_Finding"]
"""Says what is wrong, and perhaps the commands that mend it, or None."""

COMPLETE_DSL = "4.8.1"
COMPLETE_FLASHINFER = "flashinfer-python>=0.7.2,<0.8"


def version_tuple(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``0.7.2.post1`` to (0, 7, 2)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _disabled(p: Problem, d: Deployment, e: Environment) -> _Finding:
    return "TRTLLM_B12X=0" if e.enabled is False else None


def _host(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if e.host != "unsupported":
        return None
    return e.host_detail or "this version of trtllm-b12x has no adapter for the installed TensorRT-LLM"


def _sm(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if e.sm in (None, 120, 121):
        return None
    return f"the GPU is SM{e.sm}" if e.sm else "no GPU is visible"


def _toolkit(p: Problem, d: Deployment, e: Environment) -> _Finding:
    """FlashInfer's own check: nvcc's version, or torch's (jit/cpp_ext.py, get_cuda_version; b12x_moe.py)."""
    if e.toolkit_cuda is None or e.toolkit_cuda >= (13, 0):
        return None
    if e.toolkit_cuda == (0, 0):
        return "FlashInfer finds no CUDA toolkit: no nvcc, and torch is built without CUDA"
    return f"FlashInfer finds CUDA {e.toolkit_cuda[0]}.{e.toolkit_cuda[1]}, b12x needs 13"


def _dsl_missing(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if e.dsl != "none":
        return None
    packages = f"nvidia-cutlass-dsl=={COMPLETE_DSL} nvidia-cutlass-dsl-libs-cu13=={COMPLETE_DSL}"
    return "nvidia-cutlass-dsl is not installed", (f"pip install {packages}",)


def _dsl_payload(p: Problem, d: Deployment, e: Environment) -> _Finding:
    """Environments where the CUDA 12 payload loads compile invalid PTX and die at model start (TensorRT-LLM issue 15853)."""
    if e.payload_cuda is None or e.payload_cuda >= (13, 0) or e.dsl == "none":
        return None
    if e.force and e.compile_proved:
        return None
    found = f"the CuTe DSL {e.dsl} loads its CUDA {e.payload_cuda[0]}.{e.payload_cuda[1]} payload" if e.payload_cuda[0] else ""
    fault = e.payload_fault or PayloadFault.UNKNOWN
    detail = "; ".join(part for part in (found, fault.value, e.payload_detail) if part)
    cu13 = f"nvidia-cutlass-dsl-libs-cu13=={e.dsl}"
    if fault is PayloadFault.DRIVER:
        return detail + "; update the driver to one of CUDA 13 (580 or newer)"
    if fault is PayloadFault.CU13_MISSING:
        return detail, (f"pip install {cu13}",)
    if fault is PayloadFault.SHADOWED:
        return detail, (f"pip install --force-reinstall --no-deps {cu13}",)
    # Files of several wheels may be damaged; cu13 last, so that its files stay (before DSL 4.6 the wheels share paths).
    rest = f"pip install --force-reinstall --no-deps nvidia-cutlass-dsl=={e.dsl} nvidia-cutlass-dsl-libs-base=={e.dsl}"
    if version_tuple(e.dsl or "") >= (4, 6):
        rest += f" nvidia-cutlass-dsl-libs-core=={e.dsl}"
    return detail, (rest, f"pip install --force-reinstall --no-deps {cu13}")


def _flashinfer_missing(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if e.flashinfer != "none":
        return None
    return "flashinfer-python is not installed", (f'pip install "{_flashinfer_for(e)}"',)


def _flashinfer_too_old(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if e.exact_scales is not False or e.flashinfer in (None, "none"):
        return None
    assert e.flashinfer is not None
    if _baked_scales(e):
        return None
    wanted = _flashinfer_for(e)
    pinned = (
        "" if e.host in (None, "none") else "; TensorRT-LLM pins it and uses it for attention and sampling: this moves the pin"
    )
    return f"flashinfer-python {e.flashinfer} has no exact weight scales{pinned}", (f'pip install "{wanted}"',)


def _baked_scales(e: Environment) -> bool:
    """b12x exists from 0.6.9.  Its kernels take exact scales, also where the API of those versions has no place for them."""
    admitted = e.allow_baked_scales and e.exact_scales is False and e.flashinfer not in (None, "none")
    return admitted and version_tuple(e.flashinfer or "") >= (0, 6, 9)


def _flashinfer_for(e: Environment) -> str:
    """0.6.17 is the one release with exact scales that accepts the CuTe DSL before 4.6.2 (its own requirements)."""
    if e.dsl not in (None, "none") and version_tuple(e.dsl or "") < (4, 6, 2):
        return "flashinfer-python==0.6.17"
    return COMPLETE_FLASHINFER


def _flashinfer_shape(p: Problem, d: Deployment, e: Environment) -> _Finding:
    """A layer whose static and dynamic kernels read out of bounds (FlashInfer issue 5446)."""
    if e.flashinfer in (None, "none"):
        return None
    shape = (p.num_experts, p.top_k, p.hidden_size, p.intermediate_size)
    if shape == (512, 10, 2560, 640) and version_tuple(e.flashinfer or "") in ((0, 6, 18), (0, 7, 0)):
        command = f'pip install "{COMPLETE_FLASHINFER}"'
        return f"512 experts, top 10, 2560 x 640 reads out of bounds on flashinfer-python {e.flashinfer}", (command,)
    return None


def _quantization(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if p.quant_algo in (None, "NVFP4"):
        return None
    return f"the experts are {'not quantized' if p.quant_algo == 'none' else p.quant_algo}, not NVFP4"


def _group_size(p: Problem, d: Deployment, e: Environment) -> _Finding:
    # 128 is the default of the host's QuantConfig, that is, unset: NVFP4 methods there never read it.
    if p.quant_algo != "NVFP4" or p.group_size in (None, 16, 128):
        return None
    return f"NVFP4 with group size {p.group_size}"


def _pre_quant_scale(p: Problem, d: Deployment, e: Environment) -> _Finding:
    return "the experts carry AWQ pre-quantization scales" if p.pre_quant_scale else None


def _dynamic_quantization(p: Problem, d: Deployment, e: Environment) -> _Finding:
    return "the host rewrites alphas and input scales at every call" if p.dynamic_quantization else None


def _activation_dtype(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if p.activation_dtype in (None, "bfloat16"):
        return None
    return f"activations are {p.activation_dtype}, the kernels compute in bfloat16"


def _activation(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if p.activation is None or e.activations is None or p.activation in e.activations:
        return None
    return f"activation {p.activation}, the kernel has {', '.join(sorted(e.activations))}"


def _activation_constants(p: Problem, d: Deployment, e: Environment) -> _Finding:
    return "SwiGLU with alpha, beta or limit" if p.activation_constants else None


def _hidden_size(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if p.hidden_size is None or e.hidden_size_multiple is None or p.hidden_size % e.hidden_size_multiple == 0:
        return None
    return f"hidden size {p.hidden_size} is no multiple of {e.hidden_size_multiple}"


def _intermediate_size(p: Problem, d: Deployment, e: Environment) -> _Finding:
    # A block scale covers 16 columns of w2; a rank that starts inside a block has no scale of its own.
    if p.intermediate_size is None or p.intermediate_size % 16 == 0:
        return None
    return f"intermediate size {p.intermediate_size:g} per rank is no multiple of 16"


def _bias(p: Problem, d: Deployment, e: Environment) -> _Finding:
    return "the experts have a bias" if p.bias else None


def _router_weight_on_input(p: Problem, d: Deployment, e: Environment) -> _Finding:
    return "the router weight is applied to the input" if p.apply_router_weight_on_input else None


def _expert_parallel(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if d.ep_size in (None, 1) or e.expert_parallel is not False:
        return None
    return f"expert parallelism over {d.ep_size} ranks, and kernel {e.kernel} does not skip negative ids"


def _attention_dp(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if not d.attention_dp or e.gather_bf16:
        return None
    return "attention-DP ranks gather tokens that the host has quantized, the kernels take bf16"


def _alltoall(p: Problem, d: Deployment, e: Environment) -> _Finding:
    return "ids from an all-to-all hold padding, and tokens come quantized" if d.alltoall else None


def _load_balancer(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if d.load_balancer in (None, "none"):
        return None
    return f"a {d.load_balancer} load balancer moves experts between slots"


def _cuda_graphs(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if not d.cuda_graphs or e.graph_safe is not False:
        return None
    return f"kernel {e.kernel} cannot be captured in a CUDA graph"


def _lora(p: Problem, d: Deployment, e: Environment) -> _Finding:
    return "LoRA on the experts" if d.lora else None


def _deterministic(p: Problem, d: Deployment, e: Environment) -> _Finding:
    if not e.only_deterministic or e.deterministic is not False:
        return None
    finding = f"no kernel of flashinfer-python {e.flashinfer} that serves every call adds up in a fixed order"
    return finding, (f'pip install "{COMPLETE_FLASHINFER}"',)


_RULES: dict[RejectReason, _Rule] = {
    RejectReason.DISABLED: _disabled,
    RejectReason.HOST: _host,
    RejectReason.SM: _sm,
    RejectReason.TOOLKIT: _toolkit,
    RejectReason.DSL_MISSING: _dsl_missing,
    RejectReason.DSL_PAYLOAD: _dsl_payload,
    RejectReason.FLASHINFER_MISSING: _flashinfer_missing,
    RejectReason.FLASHINFER_TOO_OLD: _flashinfer_too_old,
    RejectReason.FLASHINFER_SHAPE: _flashinfer_shape,
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
    RejectReason.KERNEL_PLAN_FAILED: lambda p, d, e: e.plan_error,
    RejectReason.CUDA_GRAPHS: _cuda_graphs,
}


def decide(problem: Problem, deployment: Deployment | None = None, environment: Environment | None = None) -> Verdict:
    """Apply every rule; a rule without its facts abstains."""
    facts = (problem, deployment or Deployment(), environment or Environment())

    def rejections() -> Iterator[Rejection]:
        for reason, rule in _RULES.items():
            finding = rule(*facts)
            if isinstance(finding, str):
                yield Rejection(reason, finding)
            elif finding is not None:
                yield Rejection(reason, *finding)

    warnings = []
    if _baked_scales(facts[2]):
        warnings.append(
            f"flashinfer-python {facts[2].flashinfer} decodes subnormal block scales wrongly; the self-test still judges"
        )
    return Verdict(tuple(rejections()), tuple(warnings))
