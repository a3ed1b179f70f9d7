# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of ``routes.py``, which imports this module at the first launch."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

_ARGUMENTS = [
    "ids", "router_weights", "ids_out", "router_weights_out", "size", "first", "count", "unrouted",
    "fc31", "fc2", "fc1_divisor", "fc2_divisor", "fc31_step", "fc2_step", "divided",
]  # fmt: skip
"""Neither sizes nor alignment specialize the kernel: it is compiled once for each pair of types."""


@triton.jit(do_not_specialize=_ARGUMENTS, do_not_specialize_on_alignment=_ARGUMENTS)
def prepare(
    ids, router_weights, ids_out, router_weights_out, size, first, count, unrouted,
    fc31, fc2, fc1_divisor, fc2_divisor, fc31_step, fc2_step, divided, block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    # div_rn rounds divisions as torch does, so that the bits equal those of InputScales.derive.
    inside = at < divided
    one = tl.full(at.shape, 1.0, tl.float32)
    fc1 = tl.div_rn(one, tl.load(fc31 + at * fc31_step, mask=inside, other=1.0))
    tl.store(fc1_divisor + at, fc1, mask=inside)
    tl.store(fc2_divisor + at, tl.div_rn(one, tl.load(fc2 + at * fc2_step, mask=inside, other=1.0)), mask=inside)
    inside = at < size
    local = tl.load(ids + at, mask=inside, other=0).to(tl.int64) - first
    held = (local >= 0) & (local < count)
    scale = tl.load(router_weights + at, mask=inside, other=0).to(tl.float32)
    tl.store(ids_out + at, tl.where(held, local, unrouted).to(tl.int32), mask=inside)
    tl.store(router_weights_out + at, tl.where(held, scale, 0.0), mask=inside)
