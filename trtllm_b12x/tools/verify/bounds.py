# SPDX-License-Identifier: Apache-2.0
"""Error bounds of a layer, as relative L2.

Against the reference with the same rounding points, a sound kernel has an error of 0.004, a faulty kernel of 0.05 or more. A
float32 sum in a different order flips one code or block scale in some thousand tokens. Against float32 the error is a sum over
the codes that round differently, so the bound for few tokens is wider. In 160 sound layers of 128 x 16 to 256 x 128, samples of
64 tokens had errors up to 0.08 and ratios up to 1.08. Samples of 8 tokens had errors up to 0.19 and ratios up to 1.5.
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
    """Error against the reference with the rounding points of the kernel."""
    unquantized: float = 0.004
    """The same error for kernels that keep activations in 16 bits (0.0024 seen)."""
    none: float = 0.05
    """Error against float32, over many tokens."""
    ratio: float = 1.03
    """Error against unquantized activations over the reference's own error, over many tokens."""
    reference: float = 0.7
    """Cost of quantizing calibrated activations, in the reference itself (0.13 to 0.2 seen; calls of a single token: 0.5)."""
    weight: float = 0.2
    """Distance of a matrix from the original matrix (0.095 for max calibration, 1.4 for another expert's matrix)."""
    original: float = 0.75
    """Distance of outputs from the original model's outputs, for calibrated activations (0.25 seen)."""

    def of(self, tokens: int) -> tuple[float, float]:
        """Return the bounds on the error against float32 and on the ratio, for a sample of ``tokens`` tokens."""
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
