"""Calls of one token count: which kernels are launched in which order, and their scratch memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .decode_variants import Build, Step
from .launcher import Launch, launcher
from .scratch import Scratch
from .variant import Variant


class Layer(NamedTuple):
    """The tensors of a layer that a call reads, or their addresses."""

    fc1: tuple[Any, ...]
    fc2: tuple[Any, ...]
    first_expert: int
    steps: tuple[int, int]
    """From one expert's input scale to the next's."""


@dataclass(frozen=True)
class Call:
    """The state that calls of one token count and form share."""

    step: Step
    scratch: Scratch
    """Parts: ``(tokens, H)`` of FC1's input type for input that arrives quantized, ``(routes, I)`` bfloat16, ``(routes, H)``
    float32, and int32 for :func:`trtllm_b12x.kernels.triton.routing.route_kernel`."""
    tiles: int
    """Number of tiles of the hidden size."""
    local_experts: int
    quantized: bool
    grids: tuple[tuple[int, int], ...]
    route: Launch | None
    fc1: Launch
    fc2: Launch
    direct: bool
    """Launches take addresses and a stream."""

    def launch(self, stream: int, layer: Layer, call: Any, parts: Any) -> None:
        (x, ids, router_weights, x_sf, swizzled, out), (staged, h, partial, numbers) = call, parts
        tokens, blocks, first, step = self.step.tokens, self.step.blocks, layer.first_expert, layer.steps
        route, fc1, fc2 = self.grids
        if self.route is not None:
            places = self.tiles, self.step.tiles.routes, swizzled
            self.route(route, stream, x, x_sf, ids, router_weights, staged, out, numbers, tokens, blocks, first, *places)
            ids, router_weights, first = numbers, partial, 0
            if self.quantized:
                x = staged
        sizes = tokens, blocks, first, self.local_experts
        self.fc1(fc1, stream, x, *layer.fc1, ids, router_weights, out, h, numbers, *sizes, step[0])
        self.fc2(fc2, stream, h, *layer.fc2, ids, router_weights, out, partial, numbers, *sizes, step[1])


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
    rows = step.tokens if fc2.name == "fc2_token_kernel" else across
    grids = (
        (1 + step.tokens, 1),
        (-(-g.intermediate_size // fc1.constants["BN"]), across),
        (-(-g.hidden_size // fc2.constants["BN"]), rows),
    )
    *sort, first, second = (launcher(variant, compiled and compiled[variant.key]) for variant in variants)
    scratch = _scratch(build, step, not route, quantized)
    launches = sort[0] if sort else None, first, second
    return Call(step, scratch, build.columns(step), g.num_experts, quantized, grids, *launches, compiled is not None)


def _scratch(build: Build, step: Step, inline: bool, quantized: bool) -> Scratch:
    g, routes = build.geometry, step.tokens * build.geometry.top_k
    numbers = step.tokens * (build.columns(step) + 2)
    if not inline:
        numbers += routes + (2 + step.tiles.routes) * step.blocks + g.num_experts
    return Scratch.of(
        (2 * step.tokens * g.hidden_size if quantized else 16, g.dtype),  # an address that nobody reads
        (2 * routes * g.intermediate_size, torch.bfloat16),
        (4 * routes * g.hidden_size, torch.float32),
        (4 * numbers, torch.int32),
    )
