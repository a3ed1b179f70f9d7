"""How a call is launched: past the binder of Triton's JIT, which takes 30 us a kernel, where the launcher behind it is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from trtllm_b12x.decision import version_tuple
from trtllm_b12x.kernels.jit.variant import Variant

from .variants import Build, Step

_KNOWN = frozenset({(3, 5), (3, 6), (3, 7), (3, 8), (3, 9)})
"""Releases of Triton whose ``JITFunction.run`` ends in ``kernel.run(x, y, z, stream, function, packed_metadata, launch_metadata,
enter_hook, exit_hook, *arguments)`` with every argument, constants too (``runtime/jit.py``), and whose launcher takes an address
for a pointer (``backends/nvidia/driver.py``, ``driver.c``)."""

Launch = Callable[..., Any]
"""Of a kernel with its grid and constants: takes the stream and the other arguments."""


class Memory(NamedTuple):
    """Scratch memory of a call, one allocation: its size and where its parts begin, in bytes."""

    nbytes: int
    staged: int
    """``(tokens, H)`` of FC1's input type, for input that arrives quantized."""
    h: int
    """``(routes, I)`` bfloat16."""
    partial: int
    """``(routes, H)`` float32."""
    numbers: int
    """int32; see :func:`trtllm_b12x.kernels.triton.routing.route_kernel`."""


class Layer(NamedTuple):
    """What a call reads of a layer, tensors or addresses."""

    fc1: tuple[Any, ...]
    fc2: tuple[Any, ...]
    first_expert: int
    steps: tuple[int, int]
    """From one expert's input scale to the next's."""


class Given(NamedTuple):
    """A call's own tensors, or their addresses."""

    x: Any
    x_sf: Any
    ids: Any
    router_weights: Any
    out: Any
    staged: Any
    h: Any
    partial: Any
    numbers: Any


@dataclass(frozen=True)
class Call:
    """What calls of one token count and form have in common."""

    step: Step
    memory: Memory
    tiles: int
    """Of the hidden size."""
    local_experts: int
    quantized: bool
    route: Launch | None
    fc1: Launch
    fc2: Launch
    direct: bool
    """Launches take addresses and a stream."""

    def launch(self, stream: int, layer: Layer, given: Given, swizzled: bool) -> None:
        x, x_sf, ids, router_weights, out, staged, h, partial, numbers = given
        tokens, blocks, first, step = self.step.tokens, self.step.blocks, layer.first_expert, layer.steps
        if self.route is not None:
            size = self.step.tiles.routes
            sizes = tokens, blocks, first, self.tiles, size, int(swizzled)
            self.route(stream, x, x_sf, ids, router_weights, staged, out, numbers, *sizes)
            ids, router_weights, first = numbers, partial, 0
            if self.quantized:
                x = staged
        count = self.local_experts
        self.fc1(stream, x, *layer.fc1, ids, router_weights, out, h, numbers, tokens, blocks, first, count, step[0])
        self.fc2(stream, h, *layer.fc2, ids, router_weights, out, partial, numbers, tokens, blocks, first, count, step[1])

    def parts(self, memory: torch.Tensor, g: Any) -> tuple[Any, ...]:
        """Of scratch memory, as :class:`Given` ends with: tensors, or addresses where launches are direct."""
        m = self.memory
        if self.direct:
            base = memory.data_ptr()
            return base + m.staged, base + m.h, base + m.partial, base + m.numbers
        ends = (m.h, m.partial, m.numbers, m.nbytes)
        types = (g.dtype, torch.bfloat16, torch.float32, torch.int32)
        return tuple(memory[start:end].view(kind) for start, end, kind in zip(m[1:], ends, types, strict=True))


def call(build: Build, step: Step, variants: tuple[Variant, ...], compiled: Mapping[tuple[Any, ...], Any] | None) -> Call:
    """
    Args:
        variants: of the call (:meth:`Build.variants`).
        compiled: kernels by :attr:`Variant.key`; None: through Triton's JIT, or its interpreter.
    """
    g = build.geometry
    *route, fc1, fc2 = variants
    quantized = any(v.constants["QUANTIZED"] for v in route)
    across = step.blocks if route else step.tokens * g.top_k

    def launch(variant: Variant, *grid: int) -> Launch:
        return _through_jit(variant, grid) if compiled is None else _directly(variant, grid, compiled[variant.key])

    launches = (
        launch(route[0], 1 + step.tokens, 1) if route else None,
        launch(fc1, -(-g.intermediate_size // fc1.constants["BN"]), across),
        launch(fc2, -(-g.hidden_size // fc2.constants["BN"]), step.tokens if fc2.name == "fc2_token_kernel" else across),
    )
    memory = _memory(build, step, not route, quantized)
    return Call(step, memory, build.columns(step), g.num_experts, quantized, *launches, compiled is not None)


def _memory(build: Build, step: Step, inline: bool, quantized: bool) -> Memory:
    g, routes = build.geometry, step.tokens * build.geometry.top_k
    numbers = step.tokens * (build.columns(step) + 2)
    if not inline:
        numbers += routes + (2 + step.tiles.routes) * step.blocks + g.num_experts
    staged = 2 * step.tokens * g.hidden_size if quantized else 16  # there, though nobody reads it
    sizes = (staged, 2 * routes * g.intermediate_size, 4 * routes * g.hidden_size, 4 * numbers)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 16) * 16)
    return Memory(starts[-1], *starts[:-1])


def _through_jit(variant: Variant, grid: tuple[int, ...]) -> Launch:
    start, constants = variant.function[grid], {**variant.constants, **variant.options}
    return lambda stream, *arguments: start(*arguments, **constants)


def _directly(variant: Variant, grid: tuple[int, ...], compiled: Any) -> Launch:
    names = variant.function.arg_names[len(variant.types) :]
    constants = tuple(variant.constants[name] for name in names)
    run = compiled.run  # loads the kernel on the current device, and makes its launcher
    head, (x, y) = (compiled.function, compiled.packed_metadata, None, None, None), grid
    return lambda stream, *arguments: run(x, y, 1, stream, *head, *arguments, *constants)


@cache
def _knobs() -> Any:
    from triton import knobs

    return knobs.runtime


def known() -> bool:
    """This Triton's launchers are."""
    import triton

    return version_tuple(triton.__version__)[:2] in _KNOWN


def watched() -> bool:
    """Somebody is to be told of each launch (a profiler): through the JIT, which does."""
    runtime = _knobs()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
