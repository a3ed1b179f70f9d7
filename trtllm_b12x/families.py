"""The kernel families, the preferred one first: what each serves, and where its kernels are.  Nothing of theirs is imported here.

A family is a row: what it can do is data that the decision reads, what it needs of the machine is which rules bind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .decision import OLDEST_FLASHINFER, Environment, KernelFeatures


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
        versions=f"flashinfer-python>={'.'.join(map(str, OLDEST_FLASHINFER))}",
    )


FAMILIES: tuple[Family, ...] = (
    Family("b12x", b12x, "trtllm_b12x.kernels.b12x:B12xKernel", "trtllm_b12x.kernels.reference:ReferenceKernel"),
)
"""A card that several can serve has the first that ``TRTLLM_B12X_KERNELS`` leaves."""
