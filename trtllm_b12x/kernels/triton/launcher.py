# SPDX-License-Identifier: Apache-2.0
"""Launch a call's kernels. If Triton's launchers are known, bypass the binder of Triton's JIT, which takes 30 us per kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from trtllm_b12x.decision import version_tuple
from trtllm_b12x.kernels import MoECall

from .variant import Variant

_NEWEST = (3, 9)
"""Newest Triton that is known to launch by ``kernel.run(x, y, z, stream, function, packed_metadata, launch_metadata,
enter_hook, exit_hook, *arguments)``, as 3.5 does, and to take addresses for pointers (``runtime/jit.py``, ``driver.c``)."""

Launch = Callable[..., Any]
"""Function of a stream and the kernel's arguments without its constants."""


class LayerTensors(NamedTuple):
    """The tensors of a layer that kernels read, or their addresses, in the order of the kernels' arguments."""

    fc1: tuple[Any, ...]
    fc2: tuple[Any, ...]
    first_expert: int
    steps: tuple[int, int]
    """Distance from one expert's input scale to the next, of FC1 and FC2: 0 or 1."""
    quantize: tuple[Any, ...] = ()
    """Arguments of the kernel that quantizes tokens."""

    def addresses(self) -> LayerTensors:
        fc1, fc2, quantize = (tuple(map(torch.Tensor.data_ptr, part)) for part in (self.fc1, self.fc2, self.quantize))
        return LayerTensors(fc1, fc2, self.first_expert, self.steps, quantize)


class WorkspaceLayout(NamedTuple):
    """One allocation, and the offsets of its parts, which are multiples of 128 bytes."""

    nbytes: int
    begins: tuple[int, ...]
    parts: tuple[tuple[int, torch.dtype], ...]
    """Bytes and dtype of each part."""

    @classmethod
    def of(cls, *parts: tuple[int, torch.dtype]) -> WorkspaceLayout:
        *begins, nbytes = accumulate((-(-size // 128) * 128 for size, _ in parts), initial=0)
        return cls(max(nbytes, 1), tuple(begins), parts)

    def cut(self, memory: torch.Tensor) -> list[torch.Tensor]:
        places = zip(self.begins, self.parts, strict=True)
        return [memory[begin : begin + size].view(dtype) for begin, (size, dtype) in places]


@dataclass(frozen=True)
class LaunchPlan:
    """State that calls with equal token count, quantized input and dtypes share."""

    workspace: WorkspaceLayout
    direct: bool
    """True if launches take addresses and a stream."""
    launch: Callable[[int, LayerTensors, Any, Any], None]
    """Function of a stream, the layer, the fields of a MoECall and the parts of the workspace, as tensors or addresses."""

    def start(self, layer: tuple[LayerTensors, LayerTensors], call: MoECall) -> None:
        """Launch a prepared call's kernels. Allocate scratch memory if the call has too little. ``layer``: tensors, addresses."""
        x, ids, router_weights, x_sf, swizzled, out, memory = call[:7]
        if memory is None or memory.nbytes < self.workspace.nbytes:
            memory = torch.empty(self.workspace.nbytes, dtype=torch.uint8, device=x.device)
        x_sf = memory if x_sf is None else x_sf  # an address that no kernel reads
        if self.direct:
            stream, base = torch._C._cuda_getCurrentRawStream(memory.get_device()), memory.data_ptr()
            routes, result = (ids.data_ptr(), router_weights.data_ptr()), out.data_ptr()  # type: ignore[union-attr]
            addresses = (x.data_ptr(), *routes, x_sf.data_ptr(), int(swizzled), result)
            self.launch(stream, layer[1], addresses, [base + begin for begin in self.workspace.begins])
            return
        self.launch(0, layer[0], (x, ids, router_weights, x_sf, int(swizzled), out), self.workspace.cut(memory))


def launcher(variant: Variant, grid: tuple[int, int], kernel: Any) -> Launch:
    """Return a launch of the compiled ``kernel`` by addresses. If ``kernel`` is None, Triton's JIT launches and takes tensors."""
    if kernel is None:
        function, keywords = variant.function, {**variant.constants, **variant.options}
        return lambda stream, *arguments: function[grid](*arguments, **keywords)
    constants = tuple(variant.constants[name] for name in variant.function.arg_names[len(variant.types) :])
    run = kernel.run  # loads the kernel on the current device
    head = kernel.function, kernel.packed_metadata, None, None, None
    return lambda stream, *arguments: run(*grid, 1, stream, *head, *arguments, *constants)


def known() -> bool:
    import triton

    return version_tuple(triton.__version__)[:2] <= _NEWEST
