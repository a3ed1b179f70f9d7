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
    hidden_size: int | None = None
    intermediate_size: int | None = None
    """Per rank, before any padding."""
    num_experts: int | None = None
    top_k: int | None = None
    bias: bool | None = None
    apply_router_weight_on_input: bool | None = None


@dataclass(frozen=True)
class Deployment:
    """How the ranks share the layer."""

    tp_size: int | None = None
    ep_size: int | None = None
    load_balancer: bool | None = None
    lora: bool | None = None


@dataclass(frozen=True)
class Environment:
    """What the kernels of this process can do."""

    kernel: str | None = None
    activations: frozenset[str] | None = None
    hidden_size_multiple: int | None = None
    expert_parallel: bool | None = None


class RejectReason(Enum):
    """Closed: tests and tools compare members, never texts.  The value is the remedy."""

    QUANTIZATION = "quantize the experts with nvidia-modelopt's NVFP4_DEFAULT_CFG, or leave the layer to CUTLASS"
    GROUP_SIZE = "export the checkpoint with NVFP4's group size of 16"
    PRE_QUANT_SCALE = "export without AWQ pre-quantization scales (NVFP4_DEFAULT_CFG)"
    ACTIVATION_DTYPE = "run the model in bfloat16 (dtype: bfloat16)"
    ACTIVATION = "nothing to do: CUTLASS serves this activation"
    ACTIVATION_CONSTANTS = "nothing to do: CUTLASS serves SwiGLU with alpha, beta or limit"
    HIDDEN_SIZE = "nothing to do: CUTLASS serves this hidden size"
    INTERMEDIATE_SIZE = "choose a moe_tensor_parallel_size that leaves a multiple of 16 per rank"
    BIAS = "nothing to do: CUTLASS serves experts with bias"
    ROUTER_WEIGHT_ON_INPUT = "nothing to do: CUTLASS serves apply_router_weight_on_input"
    EXPERT_PARALLEL = "set moe_expert_parallel_size: 1, or install the kernels extra (flashinfer-python >= 0.7.2)"
    LOAD_BALANCER = "remove moe_config.load_balancer"
    LORA = "nothing to do: CUTLASS serves LoRA"

    @property
    def remedy(self) -> str:
        return self.value


@dataclass(frozen=True)
class Rejection:
    reason: RejectReason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason.name}: {self.detail} ({self.reason.remedy})"


@dataclass(frozen=True)
class Verdict:
    """Served if nothing speaks against it."""

    rejections: tuple[Rejection, ...] = ()

    @property
    def served(self) -> bool:
        return not self.rejections

    @property
    def reasons(self) -> tuple[RejectReason, ...]:
        return tuple(rejection.reason for rejection in self.rejections)

    def __str__(self) -> str:
        return "b12x" if self.served else "cutlass: " + "; ".join(map(str, self.rejections))


_Rule = Callable[[Problem, Deployment, Environment], str | None]
"""Says what is wrong, or None."""


def _quantization(p: Problem, d: Deployment, e: Environment) -> str | None:
    if p.quant_algo in (None, "NVFP4"):
        return None
    return f"the experts are {'not quantized' if p.quant_algo == 'none' else p.quant_algo}, not NVFP4"


def _group_size(p: Problem, d: Deployment, e: Environment) -> str | None:
    # 128 is the default of the host's QuantConfig, that is, unset: NVFP4 methods there never read it.
    if p.quant_algo != "NVFP4" or p.group_size in (None, 16, 128):
        return None
    return f"NVFP4 with group size {p.group_size}"


def _pre_quant_scale(p: Problem, d: Deployment, e: Environment) -> str | None:
    return "the experts carry AWQ pre-quantization scales" if p.pre_quant_scale else None


def _activation_dtype(p: Problem, d: Deployment, e: Environment) -> str | None:
    if p.activation_dtype in (None, "bfloat16"):
        return None
    return f"activations are {p.activation_dtype}, the kernels compute in bfloat16"


def _activation(p: Problem, d: Deployment, e: Environment) -> str | None:
    if p.activation is None or e.activations is None or p.activation in e.activations:
        return None
    return f"activation {p.activation}, the kernel has {', '.join(sorted(e.activations))}"


def _activation_constants(p: Problem, d: Deployment, e: Environment) -> str | None:
    return "SwiGLU with alpha, beta or limit" if p.activation_constants else None


def _hidden_size(p: Problem, d: Deployment, e: Environment) -> str | None:
    if p.hidden_size is None or e.hidden_size_multiple is None or p.hidden_size % e.hidden_size_multiple == 0:
        return None
    return f"hidden size {p.hidden_size} is no multiple of {e.hidden_size_multiple}"


def _intermediate_size(p: Problem, d: Deployment, e: Environment) -> str | None:
    # A block scale covers 16 columns of w2; a rank that starts inside a block has no scale of its own.
    if p.intermediate_size is None or p.intermediate_size % 16 == 0:
        return None
    return f"intermediate size {p.intermediate_size} per rank is no multiple of 16"


def _bias(p: Problem, d: Deployment, e: Environment) -> str | None:
    return "the experts have a bias" if p.bias else None


def _router_weight_on_input(p: Problem, d: Deployment, e: Environment) -> str | None:
    return "the router weight is applied to the input" if p.apply_router_weight_on_input else None


def _expert_parallel(p: Problem, d: Deployment, e: Environment) -> str | None:
    if d.ep_size in (None, 1) or e.expert_parallel is not False:
        return None
    return f"expert parallelism over {d.ep_size} ranks, and kernel {e.kernel} does not skip negative ids"


def _load_balancer(p: Problem, d: Deployment, e: Environment) -> str | None:
    return "a load balancer rewrites weights and scales in place" if d.load_balancer else None


def _lora(p: Problem, d: Deployment, e: Environment) -> str | None:
    return "LoRA on the experts" if d.lora else None


_RULES: dict[RejectReason, _Rule] = {
    RejectReason.QUANTIZATION: _quantization,
    RejectReason.GROUP_SIZE: _group_size,
    RejectReason.PRE_QUANT_SCALE: _pre_quant_scale,
    RejectReason.ACTIVATION_DTYPE: _activation_dtype,
    RejectReason.ACTIVATION: _activation,
    RejectReason.ACTIVATION_CONSTANTS: _activation_constants,
    RejectReason.HIDDEN_SIZE: _hidden_size,
    RejectReason.INTERMEDIATE_SIZE: _intermediate_size,
    RejectReason.BIAS: _bias,
    RejectReason.ROUTER_WEIGHT_ON_INPUT: _router_weight_on_input,
    RejectReason.EXPERT_PARALLEL: _expert_parallel,
    RejectReason.LOAD_BALANCER: _load_balancer,
    RejectReason.LORA: _lora,
}


def decide(problem: Problem, deployment: Deployment | None = None, environment: Environment | None = None) -> Verdict:
    """Apply every rule; a rule without its facts abstains."""
    facts = (problem, deployment or Deployment(), environment or Environment())

    def rejections() -> Iterator[Rejection]:
        for reason, rule in _RULES.items():
            detail = rule(*facts)
            if detail is not None:
                yield Rejection(reason, detail)

    return Verdict(tuple(rejections()))
