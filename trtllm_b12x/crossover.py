"""Which kernel at how many tokens."""

from __future__ import annotations

DEFAULT_CROSSOVER = 64
"""First token count that CUTLASS serves.  The value TensorRT-LLM's own b12x backend has fixed
(``_PREFILL_VIA_CUTLASS_THRESHOLD``, PR 13773); no measurement of ours stands behind it."""

STATIC_ROUTED_ROWS = 1024
"""Up to so many (token, expert) pairs FlashInfer takes its static kernel or a smaller one, beyond it the dynamic kernel, whose
warps may miss a claim (docs/flashinfer-dynamic-claim.md): until that is mended b12x ends there."""


def crossover(top_k: int = 1) -> int:
    """Token count from which a call takes CUTLASS; b12x serves ``0 < tokens < crossover(top_k)``."""
    return min(DEFAULT_CROSSOVER, STATIC_ROUTED_ROWS // top_k + 1)
