"""Which kernel at how many tokens, and from where on it is the host's path: everything that wants to know asks here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decision import KernelFeatures
    from .kernels import Kernel

DEFAULT_CROSSOVER = 64
"""First token count that CUTLASS serves.  The value TensorRT-LLM's own b12x backend has fixed
(``_PREFILL_VIA_CUTLASS_THRESHOLD``, PR 13773); no measurement of ours stands behind it."""


def crossover(top_k: int = 1, families: Iterable[KernelFeatures] = ()) -> int:
    """Token count from which a call takes CUTLASS: kernels are asked to plan for fewer; a schedule has what came of it.

    Args:
        families: that serve the layer; it ends where the last of them does.
    """
    limits = [DEFAULT_CROSSOVER if f.most_routes is None else f.most_routes // top_k + 1 for f in families]
    return min(DEFAULT_CROSSOVER, max(limits, default=DEFAULT_CROSSOVER))


class Schedule:
    """Of one layer: a token count to the bound kernel that serves it, the first that does; to None where the host does."""

    def __init__(self, families: Mapping[str, Kernel]) -> None:
        self.families = families
        """In order."""
        self.kernels = tuple(families.values())
        self._table: tuple[Kernel | None, ...] | None = None
        """By token count, once that is settled."""

    def at(self, tokens: int) -> Kernel | None:
        if self._table is None:
            if not all(kernel.settled for kernel in self.kernels):
                return self._first(tokens)
            self._table = tuple(map(self._first, range(self.below)))
        return self._table[tokens] if tokens < len(self._table) else None

    def _first(self, tokens: int) -> Kernel | None:
        return next((kernel for kernel in self.kernels if kernel.serves(tokens)), None)

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
