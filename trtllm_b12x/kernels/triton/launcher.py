"""The launch of a call: past the binder of Triton's JIT, which takes 30 us a kernel, where Triton's launchers are known."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from trtllm_b12x.decision import version_tuple
from trtllm_b12x.kernels import Geometry, MoECall

from . import jit_monitor
from .variant import Variant

_NEWEST = (3, 9)
"""Newest Triton that is known to launch by ``kernel.run(x, y, z, stream, function, packed_metadata, launch_metadata,
enter_hook, exit_hook, *arguments)``, as 3.5 does, and to take addresses for pointers (``runtime/jit.py``, ``driver.c``)."""

Launch = Callable[..., Any]
"""Takes a grid ``(x, y)``, a stream and the kernel's arguments without its constants."""


def launcher(variant: Variant, kernel: Any) -> Launch:
    """Return the launch of a compiled ``kernel``, which takes addresses; of None through Triton's JIT, which takes tensors."""
    if kernel is None:
        function, keywords = variant.function, {**variant.constants, **variant.options}
        return lambda grid, stream, *arguments: function[grid](*arguments, **keywords)
    constants = tuple(variant.constants[name] for name in variant.function.arg_names[len(variant.types) :])
    run = kernel.run  # loads the kernel on the current device
    head = kernel.function, kernel.packed_metadata, None, None, None
    return lambda grid, stream, *arguments: run(*grid, 1, stream, *head, *arguments, *constants)


def start(plan: Any, geometry: Geometry, layer: tuple[Any, Any], call: MoECall) -> None:
    """Launch the kernels of ``call`` by ``plan.launch(stream, layer, call, parts)``, with ``plan.scratch`` for the parts.

    Args:
        layer: the layer's tensors, and their addresses, which a ``plan.direct`` takes.
    """
    x, ids, router_weights, x_sf, swizzled, out = call
    memory = torch.empty(plan.scratch.nbytes, dtype=torch.uint8, device=x.device)
    x_sf = memory if x_sf is None else x_sf  # an address that no kernel reads
    if plan.direct:
        stream, base = torch._C._cuda_getCurrentRawStream(memory.get_device()), memory.data_ptr()
        x_ids_weights = x.data_ptr(), ids.data_ptr(), router_weights.data_ptr()
        addresses = (*x_ids_weights, x_sf.data_ptr(), int(swizzled), out.data_ptr())  # type: ignore[union-attr]
        plan.launch(stream, layer[1], addresses, [base + begin for begin in plan.scratch.begins])
        return
    with jit_monitor.through_jit(geometry):
        plan.launch(0, layer[0], (x, ids, router_weights, x_sf, int(swizzled), out), plan.scratch.cut(memory))


@cache
def _knobs() -> Any:
    from triton import knobs

    return knobs.runtime


def known() -> bool:
    """Tell whether this Triton's launchers are known."""
    import triton

    return version_tuple(triton.__version__)[:2] <= _NEWEST


def watched() -> bool:
    """Tell whether a profiler asks to see each launch, which Triton's JIT shows."""
    enter, leave = _knobs().launch_enter_hook, _knobs().launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
