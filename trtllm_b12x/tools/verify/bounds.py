"""Error bounds of a layer, as relative L2.

Against the reference with the same rounding points a sound kernel is off by 0.004, any mistake by 0.05 and more. A float32 sum in
another order flips one code or block scale in some thousand tokens. Against float32 the error is a sum over the codes that round
differently, so the bound for few tokens is wider. In 160 sound layers of 128 x 16 to 256 x 128 no sample of 64 tokens had an
error above 0.08 or a ratio above 1.08, and no sample of 8 tokens one above 0.19 or 1.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FLIPPED = 2
"""Tokens of a case in which a code or block scale may flip; at most one in eight."""

FLIP = 0.5
"""Relative L2 of a token in which one code or block scale flipped. A lost or stale token has 1 or more."""


@dataclass(frozen=True)
class Tolerances:
    kernel: float = 0.005
    """Against the reference with the rounding points of the kernel."""
    unquantized: float = 0.004
    """The same for kernels that keep activations in 16 bits (0.0024 seen)."""
    none: float = 0.05
    """Against float32, over many tokens."""
    ratio: float = 1.03
    """Error against unquantized activations over the reference's own error, over many tokens."""
    reference: float = 0.7
    """Cost of quantizing calibrated activations, in the reference itself (0.13 to 0.2 seen; calls of a single token: 0.5)."""
    weight: float = 0.2
    """Distance of a matrix from the original's (0.095 for max calibration; another expert's 1.4)."""
    original: float = 0.75
    """Distance of the outputs of calibrated activations from the original's (0.25 seen)."""

    def of(self, tokens: int) -> tuple[float, float]:
        """Return the bounds of the error against float32, and of the ratio, for a sample of so many tokens."""
        return self.none + 0.6 / math.sqrt(tokens), self.ratio + 8 / tokens


def relative_l2(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ``|value - reference| / |reference|``. If either holds NaN or inf the error is infinite, beyond every bound."""
    if not bool(value.isfinite().all() & reference.isfinite().all()):
        return math.inf
    norm = float(reference.double().norm())
    difference = float((value.double() - reference.double()).norm())
    return difference / norm if norm else (math.inf if difference else 0.0)


def exceeds(value: torch.Tensor, reference: torch.Tensor, bound: float) -> bool:
    """Return whether ``value (T, H)`` is farther than ``bound`` from ``reference``, leaving out tokens with a flipped code."""
    if relative_l2(value, reference) <= bound:
        return False
    error, norm = ((part.double()).square().sum(-1) for part in (value - reference, reference))
    worst = (error - bound**2 * norm).topk(min(FLIPPED, len(error) // 8)).indices
    if not bool(error.isfinite().all()) or bool((error[worst] > FLIP**2 * norm[worst]).any()):
        return True
    rest = torch.ones_like(error, dtype=torch.bool)
    rest[worst] = False
    return float(error[rest].sum()) > bound**2 * float(norm[rest].sum())
