"""Which kernel at how many tokens, and from where on it is the host's path: everything that wants to know asks here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .kernels import Kernel

DEFAULT_CROSSOVER = 64
"""First token count that CUTLASS serves.  The value TensorRT-LLM's own b12x backend has fixed
(``_PREFILL_VIA_CUTLASS_THRESHOLD``, PR 13773); no measurement of ours stands behind it."""

STATIC_ROUTED_ROWS = 1024
"""Up to so many (token, expert) pairs FlashInfer takes its static kernel or a smaller one, beyond it the dynamic kernel, whose
warps may miss a claim (docs/flashinfer-dynamic-claim.md): until that is mended b12x ends there."""


def crossover(top_k: int = 1) -> int:
    """Token count from which a call takes CUTLASS: kernels are asked to plan for fewer; a schedule has what came of it."""
    return min(DEFAULT_CROSSOVER, STATIC_ROUTED_ROWS // top_k + 1)


class Schedule:
    """Of one layer: a token count to the bound kernel that serves it, the first that does; to None where the host does."""

    def __init__(self, families: Mapping[str, Kernel]) -> None:
        self.families = families
        """In order."""
        self.kernels = tuple(families.values())

    def at(self, tokens: int) -> Kernel | None:
        for kernel in self.kernels:
            if kernel.serves(tokens):
                return kernel
        return None

    def serves_all(self, most: int) -> bool:
        """Every count from 1 to ``most``."""
        return bool(self.kernels) and all(self.at(tokens) is not None for tokens in range(1, most + 1))

    @property
    def below(self) -> int:
        """First token count from which every call is the host's."""
        return 1 + max((kernel.capacity for kernel in self.kernels), default=0)

    @property
    def limited(self) -> str:
        """Why that is less than what was asked for; empty if it is not, or if there is no reason for it."""
        return "; ".join(kernel.limited for kernel in self.kernels if kernel.limited)


HOSTS = Schedule({})
"""No kernel at any count."""
