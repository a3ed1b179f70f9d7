"""What a number may be before a layer fails, and how sure that is.

Three kinds of bounds:

* Against the reference with the rounding points of the path that ran, an error is the path's own: what sound kernels leave
  (0.004) is far from what any mistake makes (0.05).  Between two correct implementations a float32 sum in another order moves one
  code or block scale in some thousand tokens; up to :data:`FLIPPED` tokens of a case may hold one.
* Against float32, and the ratio of two errors, are sums over codes that fell the other way: few, of very different size, and as
  many as the layer's size and the tokens drawn make them.  There a bound is what the mean over many tokens may be, and the tokens
  themselves say how far the mean of so few lies from it: :func:`exceeds`.
* What quantization costs, and how far the weights are from the original's, is wrong by far or not at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SIGMAS = 6.0
"""For independent tokens whose excess is symmetric (or leans to large values, which is safer) the probability of
``sum > z * sqrt(sum of squares)`` is below ``exp(-z**2 / 2)`` (Hoeffding, given the magnitudes): 1.5e-8 per number, 2e-5 for the
1,200 numbers of a run over 100 layers."""

FLIPPED = 2
"""Tokens of a case that may hold a code or a block scale that fell the other way, one in eight at most."""

FLIP = 0.5
"""Relative L2 that one such code or scale can make of a token: a lost or stale one has 1 and more."""


@dataclass(frozen=True)
class Tolerances:
    """Relative L2 bounds."""

    kernel: float = 0.005
    """Any call against the reference with the rounding points of what served it."""
    none: float = 0.05
    """Any call against float32, in the mean."""
    ratio: float = 1.03
    """Error against unquantized activations, over that of the float32 reference with quantized ones, in the mean."""
    reference: float = 0.7
    """What quantizing calibrated activations may cost the float32 reference (0.13 to 0.2 seen; calls of a single token: 0.5)."""
    weight: float = 0.2
    """Of a matrix from the original's (0.095 for max calibration; another expert's 1.4)."""
    original: float = 0.75
    """Outputs of calibrated activations from the original's (0.25 seen)."""


def relative_l2(value: torch.Tensor, reference: torch.Tensor) -> float:
    """``|value - reference| / |reference|``; NaN or inf anywhere makes it infinite, so that no bound admits it."""
    if not bool(value.isfinite().all() & reference.isfinite().all()):
        return math.inf
    norm = float(reference.double().norm())
    difference = float((value.double() - reference.double()).norm())
    return difference / norm if norm else (math.inf if difference else 0.0)


def squares(values: torch.Tensor) -> torch.Tensor:
    """``(T, H)`` to the squared norm of each token, float64."""
    return values.double().square().sum(-1)


def exceeds(error: torch.Tensor, limit: torch.Tensor) -> bool:
    """Whether squared errors ``(T,)`` are above their limits ``(T,)`` in the mean, beyond what their own scatter explains.

    Fewer than 37 tokens can never say so.  What is not finite does at once.
    """
    if not bool(error.isfinite().all()):
        return True
    excess = error - limit
    return float(excess.sum()) > SIGMAS * float(excess.square().sum().sqrt())


def misses(error: torch.Tensor, norm: torch.Tensor, bound: float) -> bool:
    """Whether squared errors ``(T,)`` over squared norms ``(T,)`` are beyond ``bound``, but for flipped codes."""
    if not bool(error.isfinite().all()):
        return True
    limit = bound**2
    if float(error.sum()) <= limit * float(norm.sum()):
        return False
    worst = (error - limit * norm).topk(min(FLIPPED, len(error) // 8)).indices
    if bool((error[worst] > FLIP**2 * norm[worst]).any()):
        return True
    rest = torch.ones_like(error, dtype=torch.bool)
    rest[worst] = False
    return float(error[rest].sum()) > limit * float(norm[rest].sum())
