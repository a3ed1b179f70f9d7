"""Which kernel at how many tokens, and from where on it is the host's path: everything that wants to know asks here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .crossover.table import Fixed, Split

if TYPE_CHECKING:
    from .decision import KernelFeatures
    from .kernels import Kernel

DEFAULT_CROSSOVER = 64
"""First token count that CUTLASS serves, or what is in its place.  The value TensorRT-LLM's own b12x backend has fixed
(``_PREFILL_VIA_CUTLASS_THRESHOLD``, PR 13773); where the card can be asked, it is (:mod:`trtllm_b12x.crossover`)."""


EVERY = 2**31 - 1
"""Tokens of a family that serves calls of any size."""


def crossover(top_k: int = 1, families: Iterable[KernelFeatures] = (), first: int | None = None) -> int:
    """Token count from which a call takes CUTLASS: kernels are asked to plan for fewer; a schedule has what came of it.

    Args:
        families: that serve the layer; it ends where the last of them does.
        first: instead of :data:`DEFAULT_CROSSOVER`.
    """
    first = first or DEFAULT_CROSSOVER
    limits = [first if f.most_routes is None else f.most_routes // top_k + 1 for f in families]
    return min(first, max(limits, default=first))


class Schedule:
    """Of one layer: a token count to the bound kernel that serves it, as its split has it; to None where the host does."""

    def __init__(self, families: Mapping[str, Kernel], split: Split | None = None) -> None:
        """
        Args:
            split: among the families that serve a count, and the host; default the first family, below
                :data:`DEFAULT_CROSSOVER`.
        """
        self.families = families
        """In order."""
        self.kernels = tuple(families.values())
        self.split = split or Fixed(DEFAULT_CROSSOVER)
        self.base = next((name for name, kernel in families.items() if kernel.features.every_count), "")
        """The family that serves calls of any size, in the place of a host that has no path; empty where there is none."""
        measured = self.split.measured
        self.chosen = {name: kernel for name, kernel in families.items() if measured or not kernel.features.measured_from}
        """Families that the split chooses from; others wait for a measurement."""
        self._known: dict[int, Kernel | None] = {}
        """What :meth:`at` has answered, by token count, since that is settled."""

    def at(self, tokens: int) -> Kernel | None:
        if tokens in self._known:
            return self._known[tokens]
        found = self._pick(tokens)
        if self.settled:
            self._known[tokens] = found
        return found

    def _pick(self, tokens: int) -> Kernel | None:
        name = self.split.pick(tokens, [name for name, kernel in self.chosen.items() if kernel.serves(tokens)])
        return self._any(tokens) if name is None else self.families[name]

    def _any(self, tokens: int) -> Kernel | None:
        kernel = self.families[self.base] if self.base else None
        return kernel if kernel is not None and kernel.serves(tokens) else None

    @property
    def settled(self) -> bool:
        """What the kernels say of the counts that they serve is final."""
        return all(kernel.settled for kernel in self.kernels)

    def serves_all(self, most: int) -> bool:
        """Every count from 1 to ``most``."""
        return bool(self.kernels) and all(self.at(tokens) is not None for tokens in range(1, most + 1))

    @property
    def _capacity(self) -> int:
        """Of the families that have one."""
        return max((kernel.capacity for kernel in self.chosen.values() if not kernel.features.every_count), default=0)

    @property
    def below(self) -> int:
        """First token count from which every call is the host's; :data:`EVERY` where none is."""
        if self.base:
            return EVERY
        names = list(self.chosen)
        counts = range(self._capacity, 0, -1)
        return 1 + next((tokens for tokens in counts if self.split.pick(tokens, self._planned(tokens, names))), 0)

    def _planned(self, tokens: int, names: list[str]) -> list[str]:
        return [name for name in names if tokens <= self.families[name].capacity]

    @property
    def summary(self) -> str:
        """Where the split comes from, and what it says."""
        if len(self.families) == 1 and self.base:
            return f"{self.base} at every count"
        return self.split.summary(self.base or "CUTLASS")

    @property
    def limited(self) -> str:
        """Why that is less than what was asked for; empty if it is not, or if there is no reason for it."""
        return "; ".join(kernel.limited for kernel in self.kernels if kernel.limited)


HOSTS = Schedule({})
"""No kernel at any count."""
