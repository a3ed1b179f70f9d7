"""What a decision says: reasons, what speaks against a family of kernels, and what the families of a layer come to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
    UPCAST = "install a Triton that has block-scaled products for this card"
    PREFILL = "unset TRTLLM_B12X_KERNELS, or let it name kernels that serve any number of tokens"
    QUANTIZATION = "quantize the experts with nvidia-modelopt's NVFP4_DEFAULT_CFG, or leave the layer to CUTLASS"
    GROUP_SIZE = "export the checkpoint with the group size that its format prescribes, 16 for NVFP4"
    PRE_QUANT_SCALE = "export without AWQ pre-quantization scales (NVFP4_DEFAULT_CFG)"
    UNEQUAL_SCALES = "nothing to do: the triton kernels apply gate's and up's weight_scale_2 each"
    DYNAMIC_QUANTIZATION = "leave force_dynamic_quantization off"
    ACTIVATION_DTYPE = "run the model in bfloat16 (dtype: bfloat16)"
    ACTIVATION = "nothing to do: CUTLASS serves this activation"
    ACTIVATION_CONSTANTS = "nothing to do: CUTLASS serves SwiGLU with alpha, beta or limit"
    HIDDEN_SIZE = "nothing to do: CUTLASS serves this hidden size"
    INTERMEDIATE_SIZE = "choose a moe_tensor_parallel_size that leaves each rank whole blocks of scales, multiples of 16 in NVFP4"
    BIAS = "nothing to do: CUTLASS serves experts with bias"
    ROUTER_WEIGHT_ON_INPUT = "nothing to do: CUTLASS serves apply_router_weight_on_input"
    EXPERT_PARALLEL = "set moe_expert_parallel_size: 1, or install flashinfer-python 0.7.2 or newer"
    ATTENTION_DP = "nothing to do: these ranks gather quantized tokens, which CUTLASS and the triton kernels take"
    ALLTOALL = "nothing to do: CUTLASS serves layers behind an all-to-all"
    LOAD_BALANCER = "remove moe_config.load_balancer"
    LORA = "nothing to do: CUTLASS serves LoRA"
    KERNELS = "unset TRTLLM_B12X_KERNELS, or let it name kernels that run on this device"
    KERNEL_PLAN_FAILED = "run trtllm-b12x doctor --compile, and report the line if it passes"
    CUDA_GRAPHS = "nothing to do: CUTLASS serves captured graphs where the kernel cannot be captured"


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
    """Two runs agree to the bit."""
    caveat: str = ""
    """Sentence that ``doctor`` and the line after load add where these kernels serve."""
    arithmetic: str = "KERNEL"
    """Where they round: a member of :class:`trtllm_b12x.strict_reference.Arithmetic`."""
    quantizations: frozenset[str] = frozenset({"NVFP4"})
    """Names of the host's ``QuantAlgo`` members."""
    group_size: int = 16
    """Elements that share a block scale."""
    dtypes: frozenset[str] = frozenset({"bfloat16"})
    """Of activations."""
    oldest_sm: int = 120
    newest_sm: int = 121
    """Cards they run on, major * 10 + minor; inside TensorRT-LLM it is one of :data:`SERVED_SM` besides."""
    quantized_input: bool = False
    """They take input that the host has quantized, too."""
    most_routes: int | None = None
    """(token, expert) pairs of a call, at most."""
    every_count: bool = False
    """They serve calls of any size: layers of a format that the host has no path for need such a family."""
    measured_from: int = 0
    """They serve from so many tokens on, and only what they were measured to be the quickest at; 0: without that, too."""
    bound_by: frozenset[RejectReason] = frozenset(RejectReason) - {RejectReason.TRITON, RejectReason.UPCAST}
    """Rules that speak against them; a family is free of every other, as one that needs no FlashInfer of its rules."""


UNKNOWN = KernelFeatures("b12x")
"""Nothing is known of the kernels, and every rule of theirs binds them."""
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

    @property
    def mendable(self) -> bool:
        """The user can do something about it: worth a warning, not only information."""
        return not self.remedy.startswith("nothing to do")

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
