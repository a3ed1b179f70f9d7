"""The kernel families, the preferred one first: what each serves, and where its kernels are.  Nothing of theirs is imported here.

A family is a row: what it can do is data that the decision reads, what it needs of the machine is which rules bind it.
One that has kernels for several number formats has a row for each, of one name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from .decision import FLASHINFERS, Environment, KernelFeatures, Rejection, RejectReason, Resolution, Verdict

STATIC_ROUTED_ROWS = 1024
"""Up to so many (token, expert) pairs FlashInfer takes its static kernel or a smaller one, beyond it the dynamic kernel, whose
warps may miss a claim (docs/flashinfer-dynamic-claim.md): until that is mended b12x ends there."""

ATOMIC_SUMS = (
    "b12x of FlashInfer before 0.7.0 adds with atomics, so two runs may differ in the last bits; "
    "TRTLLM_B12X_KERNELS=triton avoids that"
)


@dataclass(frozen=True)
class Family:
    """Kernels with one contract on weights."""

    name: str
    features: Callable[[Environment], KernelFeatures]
    """By what a machine has."""
    kernel: str
    """``module:class`` of its :class:`trtllm_b12x.kernels.Kernel`."""
    stand_in: str = ""
    """What computes the same in torch, where torch sees no card for it; empty: the family is not considered there."""


def b12x(e: Environment) -> KernelFeatures:
    return KernelFeatures(
        name="b12x",
        activations=frozenset({"Swiglu", "Relu2"}),
        tile=e.tile or 128,
        hidden_size_multiple=128,
        negative_ids=e.expert_parallel,
        graph_safe=True,
        # From 0.7.0 static keeps each route's result and adds them up in order, in the groups of 256 columns that make its tile.
        deterministic=None if e.tile is None else e.tile == 256,
        caveat="" if e.tile in (None, 256) else ATOMIC_SUMS,
        most_routes=STATIC_ROUTED_ROWS,
    )


def triton(e: Environment) -> KernelFeatures:
    """Whatever the machine has, so far as their rules let them run there at all."""
    return KernelFeatures(
        name="triton",
        activations=frozenset({"Swiglu", "SwigluBias", "Geglu", "Relu2", "Silu", "Gelu"}),
        # The kernels take any multiple of 16; hosts pad [up; gate] to 128 rows as one, and split it at half.
        tile=64,
        hidden_size_multiple=16,
        negative_ids=True,
        graph_safe=True,
        deterministic=True,
        arithmetic="UNQUANTIZED",
        dtypes=frozenset({"bfloat16", "float16"}),
        oldest_sm=80,
        newest_sm=129,
        quantized_input=True,
        bound_by=frozenset(RejectReason)
        - FLASHINFERS
        - {
            RejectReason.TOOLKIT,
            RejectReason.ACTIVATION_CONSTANTS,
            RejectReason.UNEQUAL_SCALES,
            RejectReason.ROUTER_WEIGHT_ON_INPUT,
            RejectReason.UPCAST,
        },
    )


def triton_mxfp8(e: Environment) -> KernelFeatures:
    """Decode of a format that hosts have no path for: prefill is :func:`grouped`'s, and what binds that binds both."""
    known = triton(e)
    return replace(
        known,
        quantizations=frozenset({"MXFP8"}),
        group_size=32,
        tile=32,
        hidden_size_multiple=128,
        dtypes=frozenset({"bfloat16"}),
        quantized_input=False,
        # Ranks of attention-DP gather what our layers hand on, and without a path of the host's that is always bf16.
        bound_by=known.bound_by - {RejectReason.ATTENTION_DP} | {RejectReason.ROUTER_WEIGHT_ON_INPUT},
    )


def grouped(e: Environment) -> KernelFeatures:
    """Prefill of MXFP8.  Hosts have no path for it, so these kernels serve also where Triton multiplies bfloat16, slowly."""
    return replace(triton_mxfp8(e), name="grouped", arithmetic="KERNEL", oldest_sm=89, every_count=True, caveat=e.upcast)


def grouped_nvfp4(e: Environment) -> KernelFeatures:
    """Beside the host's own path: they have no number of tokens of their own, but those at which the card found them quicker."""
    known = triton(e)
    return replace(
        known,
        name="grouped",
        hidden_size_multiple=64,
        arithmetic="KERNEL",
        dtypes=frozenset({"bfloat16"}),
        oldest_sm=89,
        measured_from=64,
        bound_by=known.bound_by | {RejectReason.UPCAST},
    )


FAMILIES: tuple[Family, ...] = (
    Family("b12x", b12x, "trtllm_b12x.kernels.b12x:B12xKernel", "trtllm_b12x.kernels.reference:ReferenceKernel"),
    Family(
        "triton", triton, "trtllm_b12x.kernels.triton:TritonKernel", "trtllm_b12x.kernels.reference:UnquantizedReferenceKernel"
    ),
    Family(
        "triton",
        triton_mxfp8,
        "trtllm_b12x.kernels.triton.mxfp8:TritonMXFP8Kernel",
        "trtllm_b12x.kernels.mxfp8:MXFP8UnquantizedReferenceKernel",
    ),
    Family(
        "grouped",
        grouped_nvfp4,
        "trtllm_b12x.kernels.grouped.nvfp4:GroupedNVFP4Kernel",
        "trtllm_b12x.kernels.reference:QuantizedReferenceKernel",
    ),
    Family("grouped", grouped, "trtllm_b12x.kernels.grouped:GroupedKernel", "trtllm_b12x.kernels.mxfp8:MXFP8ReferenceKernel"),
)
"""A card that several can serve has the first that ``TRTLLM_B12X_KERNELS`` leaves."""


def rows(names: Iterable[str], quant_algo: str | None = None) -> Iterator[Family]:
    """A row of each of these families: that for layers quantized so, if it has one; for what no family serves, its first."""
    served = {algorithm for family in FAMILIES for algorithm in family.features(Environment()).quantizations}
    for name in names:
        own = [family for family in FAMILIES if family.name == name]
        found = [family for family in own if quant_algo in family.features(Environment()).quantizations]
        if quant_algo not in served:
            found = own
        yield from found[:1]


def complete(resolution: Resolution, eligible: Mapping[str, KernelFeatures]) -> Resolution:
    """Of a format that hosts have no path for: nothing serves the layer unless some family serves calls of any size.

    Args:
        eligible: at least the resolution's families, by name.
    """
    if not resolution.served or any(eligible[name].every_count for name in resolution.families):
        return resolution
    detail = "the host has no path for prefill, and no family that has one is eligible"
    rejection = Rejection(RejectReason.PREFILL, detail)
    return Resolution(tuple((name, Verdict((*verdict.rejections, rejection))) for name, verdict in resolution.verdicts))
