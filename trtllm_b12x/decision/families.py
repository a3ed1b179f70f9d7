# SPDX-License-Identifier: Apache-2.0
"""Define the kernel families in order of preference, with their capabilities. Kernel classes are in ``kernels/catalog.py``.

A family has one row per number format. Its machine requirements are the rules that bind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from trtllm_b12x import formats

from .inputs import Environment
from .remedies import FLASHINFERS
from .verdicts import KernelFeatures, RejectReason

STATIC_ROUTED_ROWS = 1024
"""Maximum number of (token, expert) pairs for b12x. Up to 1024, FlashInfer uses its static kernel or a smaller one. Beyond it,
FlashInfer uses the dynamic kernel, whose warps may miss a claim (docs/flashinfer-dynamic-claim.md). A fix removes the limit."""

ATOMIC_SUMS = (
    "b12x of FlashInfer before 0.7.0 adds with atomics, so two runs may differ in the last bits; "
    "TRTLLM_B12X_KERNELS=triton avoids that"
)


Features = Callable[[Environment], KernelFeatures]
"""Function that returns the capabilities for a given machine."""


@dataclass(frozen=True)
class Family:
    """Kernels of one family for one number format."""

    name: str
    format: str
    features: Features


def b12x(e: Environment) -> KernelFeatures:
    return KernelFeatures(
        name="b12x",
        activations=frozenset({"Swiglu", "Relu2"}),
        tile=e.tile or 128,
        hidden_size_multiple=128,
        negative_ids=e.expert_parallel,
        graph_safe=True,
        # From 0.7.0 on, the static kernel stores each route's result and sums in order, in tiles of 256 columns.
        deterministic=None if e.tile is None else e.tile == 256,
        caveat="" if e.tile in (None, 256) else ATOMIC_SUMS,
        most_routes=STATIC_ROUTED_ROWS,
    )


def triton(e: Environment) -> KernelFeatures:
    """Return Triton's capabilities. They do not depend on the machine; the rules decide if Triton runs on it."""
    return KernelFeatures(
        name="triton",
        activations=frozenset({"Swiglu", "SwigluBias", "Geglu", "Relu2", "Silu", "Gelu"}),
        # The kernels take every multiple of 16. TensorRT-LLM pads [up; gate] together to 128 rows and splits it at half.
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
            RejectReason.NVRTC,
            RejectReason.UPCAST,
        },
    )


def _derived(
    family: Features,
    free_of: frozenset[RejectReason] = frozenset(),
    bound_by: frozenset[RejectReason] = frozenset(),
    **changes: Any,
) -> Features:
    """Return the capabilities of ``family`` with ``changes``, without the rules ``free_of`` and with the rules ``bound_by``."""

    def features(e: Environment) -> KernelFeatures:
        known = family(e)
        return replace(known, bound_by=known.bound_by - free_of | bound_by, **changes)

    return features


_ATTENTION_DP = frozenset({RejectReason.ATTENTION_DP})
_ROUTER_WEIGHT = frozenset({RejectReason.ROUTER_WEIGHT_ON_INPUT})

triton_w4a16 = _derived(
    triton, _ATTENTION_DP, quantizations=frozenset({"W4A16_NVFP4"}), hidden_size_multiple=64, quantized_input=False
)
"""W4A16_NVFP4 decode. Attention-DP ranks exchange 16-bit tokens."""
triton_mxfp4 = _derived(
    triton,
    frozenset({RejectReason.BIAS, RejectReason.INTERMEDIATE_SIZE}),
    _ROUTER_WEIGHT,
    quantizations=frozenset({"W4A8_MXFP4_MXFP8"}),
    group_size=32,
    tile=128,
    hidden_size_multiple=32,
    dtypes=frozenset({"bfloat16"}),
    quantized_input=False,
)
"""MXFP4 decode. The engine pads each rank's part, so every intermediate size is eligible."""
triton_mxfp8 = _derived(
    triton,
    _ATTENTION_DP,
    _ROUTER_WEIGHT,
    quantizations=frozenset({"MXFP8"}),
    group_size=32,
    tile=32,
    hidden_size_multiple=128,
    dtypes=frozenset({"bfloat16"}),
    quantized_input=False,
)
"""MXFP8 decode. Attention-DP ranks gather tokens, which our layers send in bf16 if TensorRT-LLM has no path."""

grouped_nvfp4 = _derived(
    triton,
    bound_by=frozenset({RejectReason.UPCAST}),
    name="grouped",
    hidden_size_multiple=64,
    arithmetic="KERNEL",
    dtypes=frozenset({"bfloat16"}),
    oldest_sm=89,
    measured_from=64,
)
"""NVFP4 prefill. CUTLASS also serves NVFP4, so these kernels serve only token counts measured to be faster."""


def grouped(e: Environment) -> KernelFeatures:
    """Return the capabilities for MXFP8 prefill. It has no other path, so slow bfloat16 products of Triton are accepted."""
    return replace(triton_mxfp8(e), name="grouped", arithmetic="KERNEL", oldest_sm=89, every_count=True, caveat=e.upcast)


cuda, cuda_w4a16, cuda_mxfp4, cuda_mxfp8 = (
    _derived(decode, frozenset({RejectReason.TRITON}), frozenset({RejectReason.NVRTC}), name="cuda", oldest_sm=90, most_tokens=64)
    for decode in (triton, triton_w4a16, triton_mxfp4, triton_mxfp8)
)
"""Decode in one launch, with the capabilities of ``triton``. The kernels serve up to 64 tokens without Triton."""

gemm, gemm_w4a16, gemm_mxfp4, gemm_mxfp8 = (
    _derived(decode, most_tokens=None, name="gemm", measured_from=9) for decode in (cuda, cuda_w4a16, cuda_mxfp4, cuda_mxfp8)
)
"""Grouped products of 16-bit activations, for many routes per expert. They serve token counts measured faster on the card."""

FAMILIES: tuple[Family, ...] = (
    Family("cuda", "NVFP4", cuda),
    Family("cuda", "W4A16_NVFP4", cuda_w4a16),
    Family("cuda", "MXFP4", cuda_mxfp4),
    Family("cuda", "MXFP8", cuda_mxfp8),
    Family("b12x", "NVFP4", b12x),
    Family("triton", "NVFP4", triton),
    Family("triton", "W4A16_NVFP4", triton_w4a16),
    Family("triton", "MXFP4", triton_mxfp4),
    Family("triton", "MXFP8", triton_mxfp8),
    Family("gemm", "NVFP4", gemm),
    Family("gemm", "W4A16_NVFP4", gemm_w4a16),
    Family("gemm", "MXFP4", gemm_mxfp4),
    Family("gemm", "MXFP8", gemm_mxfp8),
    Family("grouped", "NVFP4", grouped_nvfp4),
    Family("grouped", "MXFP8", grouped),
)
"""Rows in order of preference. A card uses the first suitable family that ``TRTLLM_B12X_KERNELS`` lists."""


def rows(names: Iterable[str], quant_algo: str | None = None) -> Iterator[Family]:
    """Yield each family's row for the format, or each family's first row if the format is unknown."""
    form = formats.find(quant_algo)
    for name in names:
        yield from [family for family in FAMILIES if family.name == name and (form is None or family.format == form.name)][:1]
