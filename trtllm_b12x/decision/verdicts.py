# SPDX-License-Identifier: Apache-2.0
"""Define the results of a decision: reasons, verdicts on one family, and the resolution for one layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RejectReason(Enum):
    """Closed set of reasons. Tests and tools compare members, never texts. The value is the remedy if no command can be given."""

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
    NVRTC = "pip install nvidia-cuda-nvrtc, of the CUDA version that torch is built for"
    UPCAST = "install a Triton that has block-scaled products for this card"
    PREFILL = "unset TRTLLM_B12X_KERNELS, or let it name kernels that serve any number of tokens"
    QUANTIZATION = "quantize the experts with nvidia-modelopt's NVFP4_DEFAULT_CFG, or leave the layer to TensorRT-LLM"
    GROUP_SIZE = "export the checkpoint with the group size that its format prescribes, 16 for NVFP4 and W4A16_NVFP4"
    PRE_QUANT_SCALE = "export without AWQ pre-quantization scales (NVFP4_DEFAULT_CFG)"
    UNEQUAL_SCALES = "nothing to do: the cuda and triton kernels apply gate's and up's weight_scale_2 each"
    DYNAMIC_QUANTIZATION = "leave force_dynamic_quantization off"
    ACTIVATION_DTYPE = "run the model in bfloat16 (dtype: bfloat16)"
    ACTIVATION = "nothing to do: CUTLASS serves this activation"
    ACTIVATION_CONSTANTS = "nothing to do: CUTLASS serves SwiGLU with alpha, beta or limit"
    HIDDEN_SIZE = "nothing to do: CUTLASS serves this hidden size"
    INTERMEDIATE_SIZE = "choose a moe_tensor_parallel_size that leaves each rank whole blocks of scales, multiples of 16 in NVFP4"
    BIAS = "nothing to do: CUTLASS serves experts with bias"
    ROUTER_WEIGHT_ON_INPUT = "nothing to do: CUTLASS serves apply_router_weight_on_input"
    EXPERT_PARALLEL = "set moe_expert_parallel_size: 1, or install flashinfer-python 0.7.2 or newer"
    ATTENTION_DP = "nothing to do: these ranks gather quantized tokens, which CUTLASS takes"
    ALLTOALL = "nothing to do: CUTLASS serves layers behind an all-to-all"
    LOAD_BALANCER = "remove moe_config.load_balancer"
    LORA = "nothing to do: CUTLASS serves LoRA"
    KERNELS = (
        "let TRTLLM_B12X_KERNELS, or --kernels of verify, name kernels that run on this device; without either all are considered"
    )
    KERNEL_PLAN_FAILED = "run trtllm-b12x doctor --compile, and report the line if it passes"
    CUDA_GRAPHS = "nothing to do: CUTLASS serves captured graphs where the kernel cannot be captured"


@dataclass(frozen=True)
class KernelFeatures:
    """Capabilities of one kernel family, and the rules that bind it. A rule abstains if its field is None."""

    name: str
    activations: frozenset[str] = frozenset()
    """Names of TensorRT-LLM's ``ActivationType`` members. Empty if unknown."""
    tile: int = 128
    """Weights are padded so that the intermediate size is a multiple of this."""
    hidden_size_multiple: int = 1
    negative_ids: bool | None = None
    """True if a negative expert id is skipped as an unrouted slot, which expert parallelism needs."""
    graph_safe: bool | None = None
    deterministic: bool | None = None
    """True if two runs give bitwise equal results."""
    caveat: str = ""
    """Sentence that ``doctor`` and the log line after weight loading add when these kernels serve."""
    arithmetic: str = "KERNEL"
    """Rounding points of the kernels, as a member name of ``trtllm_b12x.tools.verify.reference.Arithmetic``."""
    quantizations: frozenset[str] = frozenset({"NVFP4"})
    """Names of TensorRT-LLM's ``QuantAlgo`` members."""
    group_size: int = 16
    """Number of elements that share a block scale."""
    dtypes: frozenset[str] = frozenset({"bfloat16"})
    oldest_sm: int = 120
    newest_sm: int = 121
    """Range of supported cards, as major * 10 + minor. Inside TensorRT-LLM the card must also be in ``SERVED_SM``."""
    quantized_input: bool = False
    """True if the kernels also accept input that TensorRT-LLM has already quantized."""
    most_tokens: int | None = None
    """Maximum number of tokens in one call. None means no limit."""
    most_routes: int | None = None
    """Maximum number of (token, expert) pairs in one call. None means no limit."""
    every_count: bool = False
    """True if the kernels serve calls of any size. A format that the engine cannot serve needs one such family."""
    measured_from: int = 0
    """Smallest token count served. If not 0, the family serves only the counts at which it was measured to be the fastest."""
    bound_by: frozenset[RejectReason] = frozenset(RejectReason) - {RejectReason.TRITON, RejectReason.NVRTC, RejectReason.UPCAST}
    """Rules that apply to this family. For example, FlashInfer's rules do not bind a family that does not use FlashInfer."""


UNKNOWN = KernelFeatures("b12x")
"""Placeholder for kernels of unknown capabilities. Every default rule binds them."""
SERVED_SM = (120, 121)


@dataclass(frozen=True)
class Rejection:
    reason: RejectReason
    detail: str
    commands: tuple[str, ...] = ()
    """Shell commands, in the order to run. They fix every package problem, not only this one."""
    moves: tuple[str, ...] = ()
    """``name version`` of each installed package that the commands replace by another version."""
    advice: str = ""
    """Remedy if no command can be given. If empty, the value of ``reason`` is the remedy."""

    @property
    def remedy(self) -> str:
        return " && ".join(self.commands) or self.advice or self.reason.value

    @property
    def fixable(self) -> bool:
        """Return True if the user can fix this, so that it deserves a warning."""
        return not self.remedy.startswith("nothing to do")

    @property
    def finding(self) -> str:
        """Return the reason and its detail, without the remedy."""
        return f"{self.reason.name}: {self.detail}"

    def __str__(self) -> str:
        return joined((self,))


def joined(rejections: tuple[Rejection, ...]) -> str:
    """Join rejections into one text. Each remedy appears once."""
    findings = "; ".join(rejection.finding for rejection in rejections)
    moves = ", ".join(dict.fromkeys(move for rejection in rejections for move in rejection.moves))
    remedies = "; ".join(dict.fromkeys(rejection.remedy for rejection in rejections))
    return f"{findings} ({remedies}{f'; this moves {moves}' if moves else ''})"


@dataclass(frozen=True)
class Verdict:
    """Decision on one family. The family serves the layer if there are no rejections."""

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
    """Decision on one layer: each family considered, in order of preference, with its verdict.

    The layer is served if a family is eligible. ``rejections`` is then empty, and ``refused`` has the other families' reasons.
    """

    verdicts: tuple[tuple[str, Verdict], ...]

    @staticmethod
    def left_to_the_host(reason: RejectReason, detail: str) -> Resolution:
        """Build a resolution that rejects the layer for every family."""
        return Resolution((("", Verdict((Rejection(reason, detail),))),))

    @property
    def families(self) -> tuple[str, ...]:
        """Return the names of the eligible families, in order."""
        return tuple(name for name, verdict in self.verdicts if verdict.served)

    @property
    def refused(self) -> tuple[tuple[str, Rejection], ...]:
        """Return (family, rejection) pairs. A rejection that several families share appears once, with the first family."""
        first_family: dict[Rejection, str] = {}
        for name, verdict in self.verdicts:
            for rejection in verdict.rejections:
                first_family.setdefault(rejection, name)
        return tuple((name, rejection) for rejection, name in first_family.items())

    @property
    def served(self) -> bool:
        return bool(self.families)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """Return the reasons why CUTLASS serves the layer; empty if our kernels serve it."""
        return () if self.served else tuple(rejection for _, rejection in self.refused)

    @property
    def reasons(self) -> tuple[RejectReason, ...]:
        return tuple(dict.fromkeys(rejection.reason for rejection in self.rejections))

    @property
    def findings(self) -> str:
        """Return the distinct findings of ``rejections`` in one line, without remedies."""
        return "; ".join(dict.fromkeys(rejection.finding for rejection in self.rejections))

    def __str__(self) -> str:
        several = len(self.verdicts) > 1
        refusals = "; ".join(f"{name}: {rejection}" if several else str(rejection) for name, rejection in self.refused)
        if not self.served:
            return f"cutlass: {refusals}"
        return ", ".join(self.families) + (f"; not {refusals}" if refusals else "")
