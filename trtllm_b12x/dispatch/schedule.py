# SPDX-License-Identifier: Apache-2.0
"""Map a token count to what serves it: a kernel, a kernel in parts, or the engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from .policy import DEFAULT_CROSSOVER, HOST, DispatchPolicy, FixedThreshold, MeasuredPolicy, described, stretches

if TYPE_CHECKING:
    import torch

    from trtllm_b12x.decision import KernelFeatures
    from trtllm_b12x.kernels import Kernel, MoECall

EVERY = 2**31 - 1
"""Capacity of a family that serves calls of any size."""


def default_crossover(top_k: int = 1, families: Iterable[KernelFeatures] = (), first: int | None = None) -> int:
    """Return the first token count that CUTLASS serves: ``first`` (64), or less if the last of ``families`` ends before it."""
    first = first or DEFAULT_CROSSOVER
    limits = []
    for family in families:
        ends = family.most_tokens, family.most_routes and family.most_routes // top_k
        limits.append(1 + min((end for end in ends if end is not None), default=first - 1))
    return min(first, max(limits, default=first))


class InParts:
    """Kernels that serve a call of more tokens than they are planned for, part by part."""

    def __init__(self, kernels: Sequence[Kernel], tokens: int) -> None:
        """Take the kernel of each part. All parts but the last have ``tokens``, a multiple of 128."""
        self.kernels, self.tokens = kernels, tokens
        self.features, self.geometry = kernels[0].features, kernels[0].geometry

    def run(self, call: MoECall) -> torch.Tensor:
        """Run the parts one after the other. They share ``call.scratch``."""
        whole, out = call.x.shape[0], call.out
        if out is None:
            out = call.x.new_empty(whole, self.geometry.hidden_size, dtype=self.geometry.dtype)
        for number, kernel in enumerate(self.kernels):
            first = number * self.tokens
            part = call.of_tokens(first, min(first + self.tokens, whole))
            kernel.run(part._replace(out=out[first : first + self.tokens]))
        return out


class Schedule:
    """The bound kernels of one layer and the policy that chooses among them and the engine."""

    def __init__(
        self, families: Mapping[str, Kernel], policy: DispatchPolicy | None = None, wrong_host: bool = False,
        routing: Mapping[str, Kernel] | None = None,
    ) -> None:  # fmt: skip
        """``wrong_host``: the engine's path is known to be wrong. ``routing``: kernels that take router logits, by family."""
        self.families, self.policy = families, policy or FixedThreshold()
        self.kernels = tuple(families.values())
        self.base = next((name for name, kernel in families.items() if kernel.features.every_count), "")
        """The family that serves calls of any size if the engine has no path, else empty."""
        self.hostless = wrong_host and not self.policy.asked
        """True if the last family that serves a count replaces the engine's wrong path. The user's own policy is obeyed."""
        by_form = isinstance(self.policy, MeasuredPolicy)
        paths = self.forms if by_form else families
        self.chosen = {n: kernel for n, kernel in paths.items() if self.policy.measured or not kernel.features.measured_from}
        """Candidates of the policy: kernels in the variants that were measured, or families; some wait for a measurement."""
        self._cache: dict[int, Kernel | InParts | None] = {}
        self.routing = routing or {}
        self._of_logits: dict[int, Kernel | None] = {}

    @functools.cached_property
    def forms(self) -> Mapping[str, Kernel]:
        """Every variant of every kernel, by name."""
        families = self.families.items()
        return {f"{name} {what}".rstrip(): form for name, kernel in families for what, form in kernel.forms().items()}

    def at(self, tokens: int) -> Kernel | InParts | None:
        """Return what serves this token count, or None if the engine does."""
        return self._cache[tokens] if tokens in self._cache else self._select(tokens)

    def with_logits(self, tokens: int) -> Kernel | None:
        """Return the kernel that serves this token count from router logits, or None if the engine has to route the call."""
        if not self.routing or tokens in self._of_logits:
            return self._of_logits.get(tokens)
        family, _, form = self.path(tokens).partition(" ")
        kernel = self.routing[family].forms().get(form) if family in self.routing else None
        found = kernel if kernel is not None and kernel.serves(tokens) else None
        if self.settled and all(kernel.settled for kernel in self.routing.values()):
            self._of_logits[tokens] = found
        return found

    def _select(self, tokens: int) -> Kernel | InParts | None:
        found: Kernel | InParts | None = self._named(tokens, lambda kernel: kernel.serves(tokens))[1]
        if found is None and self.hostless:
            found = self._in_parts(tokens)
        if self.settled:
            self._cache[tokens] = found
        return found

    def _named(self, tokens: int, serves: Callable[[Kernel], bool]) -> tuple[str, Kernel | None]:
        """Return the name and the kernel of what serves this token count; ``HOST`` and None for the engine.

        The policy decides. If it names the engine and the engine has no path, the family that serves every count takes its place.
        If the engine's path is wrong, the last family that serves the count does.
        """
        name = self.policy.select(tokens, [name for name, kernel in self.chosen.items() if serves(kernel)])
        if name:
            return name, self.chosen[name]
        others = [self.base] if self.base else [*self.families][::-1] if self.hostless else []
        return next(((name, self.families[name]) for name in others if serves(self.families[name])), (HOST, None))

    def _in_parts(self, tokens: int) -> InParts | None:
        """Return the parts in which the family for prompts serves more tokens than it is planned for; None if it does not."""
        size = self._part
        if not size or tokens <= size:
            return None
        step = -(-tokens // -(-tokens // size) // 128) * 128  # parts of about equal length
        parts = [self.at(min(step, tokens - first)) for first in range(0, tokens, step)]
        kernels = [part for part in parts if part is not None and not isinstance(part, InParts)]
        return InParts(kernels, step) if len(kernels) == len(parts) else None

    @property
    def _part(self) -> int:
        """Largest part of a longer call, in tokens: a multiple of 128, as the scales of quantized input require. 0 if none."""
        return max((k.capacity // 128 * 128 for k in self.kernels if k.features.measured_from), default=0) if self.hostless else 0

    @property
    def settled(self) -> bool:
        """True if every kernel is tested, so that the counts they serve no longer change."""
        return all(kernel.settled for kernel in self.kernels)

    def serves_all(self, max_tokens: int) -> bool:
        """Return whether a kernel serves every count from 1 to ``max_tokens``."""
        return bool(self.kernels) and all(self.at(tokens) is not None for tokens in range(1, max_tokens + 1))

    def path(self, tokens: int) -> str:
        """Return the name of what serves this token count once every kernel is tested, ``HOST`` for the engine."""
        settled = self.settled
        return self._named(tokens, lambda kernel: kernel.serves(tokens) if settled else tokens <= kernel.capacity)[0]

    @property
    def below(self) -> int:
        """First token count from which the engine serves every call; ``EVERY`` if there is no such count."""
        if self.base or self._part:
            return EVERY
        largest = max((kernel.capacity for kernel in self.kernels), default=0)
        return 1 + next((tokens for tokens in range(largest, 0, -1) if self.path(tokens) != HOST), 0)

    @property
    def summary(self) -> str:
        """Source of the policy, and what serves which counts."""
        if len(self.families) == 1 and self.base:
            return f"{self.base} at every count"
        largest = max((kernel.capacity for kernel in self.kernels if not kernel.features.every_count), default=0)
        last = [name for name, kernel in self.families.items() if self._part and kernel.features.measured_from][-1:]
        then = f"{last[0]} in parts" if last else "CUTLASS"
        return described(self.policy.source, stretches(self.path, largest), self.base or then)

    @property
    def limited(self) -> str:
        """Why the kernels serve fewer tokens than requested; empty if they serve as many."""
        return "; ".join(kernel.limited for kernel in self.kernels if kernel.limited)


EMPTY_SCHEDULE = Schedule({})
"""Schedule without a kernel at any count."""
