# SPDX-License-Identifier: Apache-2.0
"""One call of one compiled kernel: its arguments by FlashInfer's names, and the launch that prepares the engine's routes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_b12x.formats.nvfp4 import InputScales, NVFP4Weights
from trtllm_b12x.kernels import MoECall
from trtllm_b12x.kernels.routes import ExpertRange

from . import routes
from .scratch import Scratch

_OF_THE_CALL = ("x", "ids", "router_weights", "out")
_COMPILED_IN = ("self", "max_active_clusters", "stream")
Source = str | Callable[[Any, NVFP4Weights], Any]
"""Source of an argument: a field of the call, ``constant`` (a value per token count), or a function of workspace and weights."""


def _fp4(plane: torch.Tensor) -> torch.Tensor:
    return plane.permute(1, 2, 0).view(torch.float4_e2m1fn_x2)


_TENSORS: dict[str, Source] = {
    # Arguments of static (moe_dispatch.py:1774 of 0.7.2.post1); pointers are integers.
    "a_input": "x",
    "topk_ids": "ids",
    "topk_weights": "router_weights",
    "scatter_output": "out",
    "packed_a": lambda ws, w: _fp4(ws.packed_input),
    "sfa_ptr": lambda ws, w: ws.packed_input_scale.data_ptr(),
    "packed_a_storage": lambda ws, w: ws.packed_input.view(-1),
    "route_output_scratch": lambda ws, w: ws.route_output_scratch.view(-1),
    "scale_storage": lambda ws, w: ws.packed_input_scale.view(-1),
    "barrier_count": lambda ws, w: ws.barrier_count,
    "barrier_epoch": lambda ws, w: ws.barrier_epoch,
    "b_w13": lambda ws, w: _fp4(w.fc1_weight),
    "sfb_w13_ptr": lambda ws, w: w.fc1_weight_sf.data_ptr(),
    "b_down": lambda ws, w: _fp4(w.fc2_weight),
    "sfb_down_ptr": lambda ws, w: w.fc2_weight_sf.data_ptr(),
    "row_counts": lambda ws, w: ws.row_counts,
    "active_expert_count": lambda ws, w: ws.active_expert_count,
    "weight_expert_ids": lambda ws, w: ws.weight_expert_ids,
    "global_to_local_expert": lambda ws, w: ws.global_to_local_expert,
    "virt_route_scratch": lambda ws, w: ws.virt_route_scratch,
    "input_global_scale": lambda ws, w: w.fc1_divisor,
    "alpha": lambda ws, w: w.fc1_alpha,
    "down_alpha": lambda ws, w: w.fc2_alpha,
    "global_scale": lambda ws, w: w.fc2_divisor,
    "token_map": lambda ws, w: ws.token_map,
    "token_weights": lambda ws, w: ws.token_weights,
}
_ADDRESSES: dict[str, Source] = {
    # Arguments of direct micro (moe_direct_micro_kernel.py:4858 of 0.7.2.post1): addresses, two barriers, two numbers.
    "x_ptr": "x",
    "tid_ptr": "ids",
    "tw_ptr": "router_weights",
    "out_ptr": "out",
    "m_val": "constant",
    "grid_x": "constant",
    "w1_ptr": lambda ws, w: w.fc1_weight.data_ptr(),
    "w1s_ptr": lambda ws, w: w.fc1_weight_sf.data_ptr(),
    "w1a_ptr": lambda ws, w: w.fc1_alpha.data_ptr(),
    "a1_ptr": lambda ws, w: w.fc1_divisor.data_ptr(),
    "a2_ptr": lambda ws, w: w.fc2_divisor.data_ptr(),
    "inter_ptr": lambda ws, w: ws.dm_intermediate.data_ptr(),
    "w2_ptr": lambda ws, w: w.fc2_weight.data_ptr(),
    "w2s_ptr": lambda ws, w: w.fc2_weight_sf.data_ptr(),
    "w2a_ptr": lambda ws, w: w.fc2_alpha.data_ptr(),
    "barrier_count": lambda ws, w: ws.dm_barrier_count[:1],  # compiled for one element, used as an array
    "barrier_epoch": lambda ws, w: ws.dm_barrier_epoch[:1],
}


@dataclass(frozen=True, eq=False)
class B12xKernelKind:
    name: str
    kernel_class: str
    arguments: Mapping[str, Source]
    """Source of every argument in all of its releases, by the argument's name."""
    skips_negative_ids: bool = True
    takes_addresses: bool = False


DIRECT_MICRO = B12xKernelKind("direct_micro", "MoEDirectMicroKernel", _ADDRESSES, False, True)
"""For a negative id the kernel computes expert 0 and multiplies by 0, which gives NaN if expert 0 overflows."""
STATIC = B12xKernelKind("static", "MoEStaticKernel", _TENSORS)


class Signature:
    """The run-time arguments of a kind, in the order of the installed FlashInfer's kernel."""

    def __init__(self, kind: B12xKernelKind, dispatch: Any) -> None:
        """Raise ValueError if the kernel takes an unknown argument."""
        kernel = getattr(dispatch, kind.kernel_class)
        self.kind = kind
        self.names = [name for name in inspect.signature(kernel.__call__).parameters if name not in _COMPILED_IN]
        unknown = ", ".join(name for name in self.names if name not in kind.arguments)
        if unknown:
            raise ValueError(f"FlashInfer's {kind.name} kernel takes {unknown}, which this trtllm-b12x does not know")
        sources = [kind.arguments[name] for name in self.names]
        self.places = [sources.index(name) for name in _OF_THE_CALL]

    def bind(self, scratch: Scratch, weights: NVFP4Weights) -> list[Any]:
        """Return the arguments, with None for arguments that depend on the call or the token count."""
        sources = (self.kind.arguments[name] for name in self.names)
        return [None if isinstance(source, str) else source(scratch.workspace, weights) for source in sources]


@dataclass(frozen=True)
class Candidate:
    """A compiled kernel for one token count."""

    function: Any
    signature: Signature
    variant: int
    """Kernels of one variant are the same code."""
    constants: dict[int, Any] = field(default_factory=dict)
    """Values for this token count, by index of the argument."""

    @property
    def kind(self) -> B12xKernelKind:
        return self.signature.kind

    def launch(
        self, bound: list[Any], scratch: Scratch, table: ExpertRange, input_scales: InputScales | None, call: MoECall
    ) -> None:
        """Launch a prepared call, with ``bound`` from ``Signature.bind``."""
        rows = call.ids.numel()
        routed = scratch.ids[:rows], scratch.router_weights[:rows]
        routes.prepare(table, call.ids, call.router_weights, routed, input_scales)
        arguments: list[Any] = bound.copy()
        for place, value in self.constants.items():
            arguments[place] = value
        as_address = self.signature.kind.takes_addresses
        for place, tensor in zip(self.signature.places, (call.x, *routed, call.out), strict=True):
            arguments[place] = tensor.data_ptr() if as_address and tensor is not None else tensor
        self.function(*arguments)
