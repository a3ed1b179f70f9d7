"""One call of one compiled kernel: its arguments, and the one launch that makes a host's routes the kernel's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_b12x.formats.nvfp4 import InputScales, NVFP4Weights
from trtllm_b12x.kernels import routes

from .scratch import Scratch


@dataclass(frozen=True)
class Kind:
    """One of FlashInfer's kernels, as data."""

    name: str
    skips_negative_ids: bool
    """micro and direct micro compute expert 0 for a negative id and multiply by 0, which is NaN where expert 0 overflows."""
    atomic_sums: bool
    """Adds one bf16 per route and 128 columns to the output, in any order."""


DIRECT_MICRO = Kind("direct_micro", skips_negative_ids=False, atomic_sums=False)
MICRO = Kind("micro", skips_negative_ids=False, atomic_sums=True)
STATIC = Kind("static", skips_negative_ids=True, atomic_sums=False)

_Value = Callable[[Scratch, NVFP4Weights], Any]


def _address(get: Callable[[Any], torch.Tensor]) -> Callable[[Any], int]:
    return lambda of: get(of).data_ptr()


def _of_workspace(get: Callable[[Any], Any]) -> _Value:
    return lambda scratch, weights: get(scratch.workspace)


def _of_weights(get: Callable[[NVFP4Weights], Any]) -> _Value:
    return lambda scratch, weights: get(weights)


_TENSORS: dict[str, str | _Value] = {
    # Arguments of static and micro (moe_dispatch.py:1774 of 0.7.2.post1) to where they come from; pointers go as integers.
    "a_input": "x",
    "topk_ids": "ids",
    "topk_weights": "router_weights",
    "scatter_output": "out",
    "packed_a": _of_workspace(lambda ws: ws.packed_input.permute(1, 2, 0).view(torch.float4_e2m1fn_x2)),
    "sfa_ptr": _of_workspace(_address(lambda ws: ws.packed_input_scale)),
    "packed_a_storage": _of_workspace(lambda ws: ws.packed_input.view(-1)),
    "route_output_scratch": _of_workspace(lambda ws: ws.route_output_scratch.view(-1)),
    "scale_storage": _of_workspace(lambda ws: ws.packed_input_scale.view(-1)),
    "barrier_count": _of_workspace(lambda ws: ws.barrier_count),
    "barrier_epoch": _of_workspace(lambda ws: ws.barrier_epoch),
    "b_w13": _of_weights(lambda w: w.fc1_weight.permute(1, 2, 0).view(torch.float4_e2m1fn_x2)),
    "sfb_w13_ptr": _of_weights(_address(lambda w: w.fc1_weight_sf)),
    "b_down": _of_weights(lambda w: w.fc2_weight.permute(1, 2, 0).view(torch.float4_e2m1fn_x2)),
    "sfb_down_ptr": _of_weights(_address(lambda w: w.fc2_weight_sf)),
    "row_counts": _of_workspace(lambda ws: ws.row_counts),
    "active_expert_count": _of_workspace(lambda ws: ws.active_expert_count),
    "weight_expert_ids": _of_workspace(lambda ws: ws.weight_expert_ids),
    "global_to_local_expert": _of_workspace(lambda ws: ws.global_to_local_expert),
    "virt_route_scratch": _of_workspace(lambda ws: ws.virt_route_scratch),
    "input_global_scale": _of_weights(lambda w: w.fc1_divisor),
    "alpha": _of_weights(lambda w: w.fc1_alpha),
    "down_alpha": _of_weights(lambda w: w.fc2_alpha),
    "global_scale": _of_weights(lambda w: w.fc2_divisor),
    "token_map": _of_workspace(lambda ws: ws.token_map),
    "token_weights": _of_workspace(lambda ws: ws.token_weights),
}
_POINTERS: dict[str, str | _Value] = {
    # Arguments of direct micro (moe_direct_micro_kernel.py:4858 of 0.7.2.post1): addresses, two barriers, two numbers.
    "x_ptr": "x",
    "tid_ptr": "ids",
    "tw_ptr": "router_weights",
    "out_ptr": "out",
    "m_val": "constant",
    "grid_x": "constant",
    "w1_ptr": _of_weights(_address(lambda w: w.fc1_weight)),
    "w1s_ptr": _of_weights(_address(lambda w: w.fc1_weight_sf)),
    "w1a_ptr": _of_weights(_address(lambda w: w.fc1_alpha)),
    "a1_ptr": _of_weights(_address(lambda w: w.fc1_divisor)),
    "a2_ptr": _of_weights(_address(lambda w: w.fc2_divisor)),
    "inter_ptr": _of_workspace(_address(lambda ws: ws.dm_intermediate)),
    "w2_ptr": _of_weights(_address(lambda w: w.fc2_weight)),
    "w2s_ptr": _of_weights(_address(lambda w: w.fc2_weight_sf)),
    "w2a_ptr": _of_weights(_address(lambda w: w.fc2_alpha)),
    "barrier_count": _of_workspace(lambda ws: ws.dm_barrier_count[:1]),  # compiled for one element, used as an array
    "barrier_epoch": _of_workspace(lambda ws: ws.dm_barrier_epoch[:1]),
}


@dataclass(frozen=True)
class Signature:
    """A kind's arguments, by the names in FlashInfer's own kernel.

    Raises:
        ValueError: it takes one that is not known here.
    """

    kind: Kind
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in self.table]
        if unknown:
            raise ValueError(
                f"FlashInfer's {self.kind.name} kernel takes {', '.join(unknown)}, which this trtllm-b12x does not know"
            )

    @property
    def table(self) -> dict[str, str | _Value]:
        return _POINTERS if self.kind is DIRECT_MICRO else _TENSORS

    def bind(self, scratch: Scratch, weights: NVFP4Weights) -> list[Any]:
        """Everything but what comes with a call and what a launch has as a constant."""
        sources = (self.table[name] for name in self.names)
        return [None if isinstance(source, str) else source(scratch, weights) for source in sources]


_Routes = tuple[torch.Tensor, torch.Tensor]
_Route = Callable[[Scratch, routes.Table, torch.Tensor, torch.Tensor, InputScales | None], _Routes]
"""(scratch, table, ids, router weights, input scales) to the kernel's ids and router weights, divisors derived; one launch."""


def as_they_come(
    scratch: Scratch, table: routes.Table, ids: torch.Tensor, router_weights: torch.Tensor, input_scales: InputScales | None
) -> _Routes:
    rows = ids.numel()
    into = scratch.ids[:rows], scratch.router_weights[:rows]
    routes.prepare(table, ids, router_weights, into, input_scales)
    return into


def one_expert_a_slot(
    scratch: Scratch, table: routes.Table, ids: torch.Tensor, router_weights: torch.Tensor, input_scales: InputScales | None
) -> _Routes:
    """Micro on one token with a gate: every slot is an expert of its own, whose id is looked up.  Of FlashInfer's four helper
    launches three make constants."""
    rows = ids.numel()
    routes.prepare(table, ids, router_weights, (scratch.workspace.weight_expert_ids, scratch.router_weights), input_scales)
    return scratch.slots[:rows], scratch.router_weights[:rows]


def compacted(
    scratch: Scratch, table: routes.Table, ids: torch.Tensor, router_weights: torch.Tensor, input_scales: InputScales | None
) -> _Routes:
    """Micro on several tokens: experts that occur are numbered, as FlashInfer's Triton kernel does."""
    rows, ws = ids.numel(), scratch.workspace
    numbers = ws.compact_topk_ids[:rows]
    into = numbers, ws.weight_expert_ids, ws.active_expert_count, scratch.router_weights
    routes.compact(table, ids, router_weights, into, input_scales)
    return numbers, scratch.router_weights[:rows]


@dataclass(frozen=True)
class Launch:
    """A compiled kernel, and what its arguments are for one number of tokens."""

    function: Any
    signature: Signature
    route: _Route = as_they_come
    constants: dict[str, Any] = field(default_factory=dict)
    """By name of the argument."""

    @functools.cached_property
    def _of_the_call(self) -> tuple[int, ...]:
        """Places of x, ids, router_weights and out among the arguments."""
        sources = [self.signature.table[name] for name in self.signature.names]
        return tuple(sources.index(name) for name in ("x", "ids", "router_weights", "out"))

    @functools.cached_property
    def _constants(self) -> list[tuple[int, Any]]:
        return [(self.signature.names.index(name), value) for name, value in self.constants.items()]

    def __call__(
        self,
        bound: list[Any],
        scratch: Scratch,
        table: routes.Table,
        input_scales: InputScales | None,
        x: torch.Tensor,
        ids: torch.Tensor,
        router_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """``bound`` by :meth:`Signature.bind`; ids of any integer and router weights of any float type, both contiguous."""
        ids, router_weights = self.route(scratch, table, ids, router_weights, input_scales)
        given = bound.copy()
        for place, value in self._constants:
            given[place] = value
        call: tuple[Any, ...] = (x, ids, router_weights, out)
        if self.signature.kind is DIRECT_MICRO:
            call = tuple(tensor.data_ptr() for tensor in call)
        for place, value in zip(self._of_the_call, call, strict=True):
            given[place] = value
        self.function(*given)
