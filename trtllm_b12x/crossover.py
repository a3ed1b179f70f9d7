"""Which kernel at how many tokens."""

from __future__ import annotations

DEFAULT_CROSSOVER = 64
"""First token count that CUTLASS serves.  The value TensorRT-LLM's own b12x backend has fixed
(``_PREFILL_VIA_CUTLASS_THRESHOLD``, PR 13773); no measurement of ours stands behind it."""


def crossover() -> int:
    """Token count from which a call takes CUTLASS; b12x serves ``0 < tokens < crossover()``."""
    return DEFAULT_CROSSOVER
