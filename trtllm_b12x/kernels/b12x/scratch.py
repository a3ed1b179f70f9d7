# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of a geometry: one for all eager calls, and one for each captured graph."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.kernels import Geometry

_SMALL = 1 << 16
"""Bytes. Planes that start from known values (barriers, counters) are smaller; larger ones are written before they are read."""
_ALIGNMENT = 256


@dataclass(frozen=True)
class Scratch:
    """FlashInfer's static workspace, and the routes of a call as the kernels take them.

    Barriers count in the workspace and restore its values, so that it is filled once. Only one launch may use it at a time.
    """

    workspace: Any
    """``Sm120StaticMoEWorkspace`` (moe_dispatch.py). Of several tensors on one storage only the first is used."""
    ids: torch.Tensor
    """``(capacity * top_k,)`` int32, written by ``kernels.routes``."""
    router_weights: torch.Tensor
    """``(capacity * top_k,)`` float32."""

    @staticmethod
    def allocate(dispatch: Any, geometry: Geometry, capacity: int, device: torch.device) -> Scratch:
        rows = capacity * geometry.top_k
        workspace = dispatch.allocate_sm120_static_workspace(
            state_E=geometry.num_experts,
            weight_E=geometry.num_experts,
            max_rows=rows,
            k=geometry.hidden_size,
            n=geometry.intermediate_size,
            num_topk=geometry.top_k,
            device=device,
        )
        return _with_routes(workspace, rows, device)

    def planes(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the workspace that are not views of others, small tensors first."""
        planes: dict[int, tuple[str, torch.Tensor]] = {}
        for name in (field.name for field in dataclasses.fields(self.workspace)):
            plane = getattr(self.workspace, name)
            if isinstance(plane, torch.Tensor):
                planes.setdefault(plane.data_ptr(), (name, plane))
        return dict(sorted(planes.values(), key=lambda named: named[1].nbytes > _SMALL))

    def pristine(self) -> torch.Tensor:
        """Return the small planes' initial values for ``another``, uint8, some kilobytes. Call it before the first launch."""
        small = [plane.reshape(-1).view(torch.uint8) for plane in self.planes().values() if plane.nbytes <= _SMALL]
        return torch.cat([torch.nn.functional.pad(plane, (0, -plane.nbytes % _ALIGNMENT)) for plane in small])

    def another(self, pristine: torch.Tensor) -> Scratch:
        """Return new memory of equal size, by two allocations and one copy. Under capture all three belong to the graph."""
        planes = self.planes()
        arena = torch.empty(sum(_rounded(plane.nbytes) for plane in planes.values()), dtype=torch.uint8, device=pristine.device)
        arena[: pristine.numel()].copy_(pristine)
        copies, offset = {}, 0
        for name, plane in planes.items():
            copies[name] = arena[offset : offset + plane.nbytes].view(plane.dtype).view(plane.shape)
            offset += _rounded(plane.nbytes)
        return _with_routes(dataclasses.replace(self.workspace, **copies), self.ids.numel(), pristine.device)

    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in (*self.planes().values(), self.ids, self.router_weights))


def _with_routes(workspace: Any, rows: int, device: torch.device) -> Scratch:
    routes = torch.empty(2, rows, dtype=torch.int32, device=device)
    return Scratch(workspace, routes[0], routes[1].view(torch.float32))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def fitting(geometry: Geometry, capacity: int) -> int:
    """Return the most tokens, up to ``capacity``, for which 32-bit offsets reach FlashInfer's largest plane (packed activations).

    It has ``(experts + rows / 32) x rows x hidden_size / 2`` bytes (``_check_memref_limit``, moe_dispatch.py:148 of 0.7.2.post1).
    """

    def nbytes(tokens: int) -> int:
        rows = tokens * geometry.top_k
        return (geometry.num_experts + -(-rows // 32)) * rows * geometry.hidden_size // 2

    return next((tokens for tokens in range(capacity, 1, -1) if nbytes(tokens) < 2**31), 1)
