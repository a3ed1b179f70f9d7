"""The Triton kernels of ``trtllm_b12x.kernels.routes``, which imports this where there is a GPU."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def jit(function: Any) -> Any:
    """Compile one kernel per pair of types; sizes and alignment do not specialize it."""
    code = function.__code__
    arguments = [name for name in code.co_varnames[: code.co_argcount] if name != "block"]
    return triton.jit(function, do_not_specialize=arguments, do_not_specialize_on_alignment=arguments)


@jit
def _derive(at, fc31, fc2, fc1_divisor, fc2_divisor, fc31_step, fc2_step, divided):
    # Divisions as torch rounds them, so that the bits are those of InputScales.derive.
    inside = at < divided
    one = tl.full(at.shape, 1.0, tl.float32)
    fc1 = tl.div_rn(one, tl.load(fc31 + at * fc31_step, mask=inside, other=1.0))
    tl.store(fc1_divisor + at, fc1, mask=inside)
    tl.store(fc2_divisor + at, tl.div_rn(one, tl.load(fc2 + at * fc2_step, mask=inside, other=1.0)), mask=inside)


@jit
def prepare(
    ids, router_weights, ids_out, router_weights_out, size, first, count, unrouted,
    fc31, fc2, fc1_divisor, fc2_divisor, fc31_step, fc2_step, divided, block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    _derive(at, fc31, fc2, fc1_divisor, fc2_divisor, fc31_step, fc2_step, divided)
    inside = at < size
    local = tl.load(ids + at, mask=inside, other=0).to(tl.int64) - first
    held = (local >= 0) & (local < count)
    scale = tl.load(router_weights + at, mask=inside, other=0).to(tl.float32)
    tl.store(ids_out + at, tl.where(held, local, unrouted).to(tl.int32), mask=inside)
    tl.store(router_weights_out + at, tl.where(held, scale, 0.0), mask=inside)
