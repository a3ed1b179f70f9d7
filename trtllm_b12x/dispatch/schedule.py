"""Map a token count to the kernel that serves it, or to the host."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .policy import DEFAULT_CROSSOVER, DispatchPolicy, FixedThreshold, MeasuredPolicy

if TYPE_CHECKING:
    from trtllm_b12x.decision import KernelFeatures
    from trtllm_b12x.kernels import Kernel

EVERY = 2**31 - 1
"""Capacity of a family that serves calls of any size."""


def default_crossover(top_k: int = 1, families: Iterable[KernelFeatures] = (), first: int | None = None) -> int:
    """Return from how many tokens CUTLASS serves: ``first`` (64), or less, where the last of ``families`` ends."""
    first = first or DEFAULT_CROSSOVER
    limits = []
    for family in families:
        ends = family.most_tokens, family.most_routes and family.most_routes // top_k
        limits.append(1 + min((end for end in ends if end is not None), default=first - 1))
    return min(first, max(limits, default=first))


class Schedule:
    """The bound kernels of one layer and the policy that chooses among them and the host."""

    def __init__(self, families: Mapping[str, Kernel], policy: DispatchPolicy | None = None, hostless: bool = False) -> None:
        """``hostless``: the host's path is wrong; where the policy names it, the last family that serves the count does."""
        self.families, self.hostless = families, hostless
        self.kernels = tuple(families.values())
        self.policy = policy or FixedThreshold()
        self.base = next((name for name, kernel in families.items() if kernel.features.every_count), "")
        """The family that serves calls of any size if the host has no path, else empty."""
        by_form = isinstance(self.policy, MeasuredPolicy)
        paths = self.forms if by_form else families
        self.chosen = {n: kernel for n, kernel in paths.items() if self.policy.measured or not kernel.features.measured_from}
        """What the policy chooses from: kernels in the forms that were measured, or families; some wait for a measurement."""
        self._cache: dict[int, Kernel | None] = {}

    @functools.cached_property
    def forms(self) -> Mapping[str, Kernel]:
        """Every form of every kernel, by name."""
        families = self.families.items()
        return {f"{name} {what}".rstrip(): form for name, kernel in families for what, form in kernel.forms().items()}

    def at(self, tokens: int) -> Kernel | None:
        """Return the kernel that serves so many tokens, or None if the host does."""
        return self._cache[tokens] if tokens in self._cache else self._select(tokens)

    def _select(self, tokens: int) -> Kernel | None:
        name = self.policy.select(tokens, [name for name, kernel in self.chosen.items() if kernel.serves(tokens)])
        kernel = self.chosen.get(name) if name else self.families.get(self.base)
        if kernel is None and self.hostless:
            kernel = next((k for k in reversed(self.kernels) if k.serves(tokens)), None)
        if kernel is not None and not kernel.serves(tokens):
            kernel = None
        if self.settled:
            self._cache[tokens] = kernel
        return kernel

    @property
    def settled(self) -> bool:
        """Every kernel is tested, so that the counts they serve no longer change."""
        return all(kernel.settled for kernel in self.kernels)

    def serves_all(self, max_tokens: int) -> bool:
        """Return whether a kernel serves every count from 1 to ``max_tokens``."""
        return bool(self.kernels) and all(self.at(tokens) is not None for tokens in range(1, max_tokens + 1))

    @property
    def below(self) -> int:
        """First token count from which the host serves every call; ``EVERY`` if it serves none."""
        if self.base:
            return EVERY
        if self.hostless:
            return 1 + max(kernel.capacity for kernel in self.kernels)
        forms = {name: kernel for name, kernel in self.chosen.items() if not kernel.features.every_count}
        for tokens in range(max((kernel.capacity for kernel in forms.values()), default=0), 0, -1):
            serving = [n for n, kernel in forms.items() if (kernel.serves(tokens) if self.settled else tokens <= kernel.capacity)]
            if self.policy.select(tokens, serving):
                return tokens + 1
        return 1

    @property
    def summary(self) -> str:
        if len(self.families) == 1 and self.base:
            return f"{self.base} at every count"
        return self.policy.summary(self.base or "CUTLASS")

    @property
    def limited(self) -> str:
        """Why the kernels serve fewer tokens than was asked for; empty if they do not."""
        return "; ".join(kernel.limited for kernel in self.kernels if kernel.limited)


HOSTS = Schedule({})
"""No kernel at any count."""
