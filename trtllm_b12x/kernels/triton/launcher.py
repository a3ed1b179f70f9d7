"""Launch the kernels of a call: past the binder of Triton's JIT, which takes 30 us a kernel, if Triton's launchers are known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

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


class LayerTensors(NamedTuple):
    """The tensors of a layer that kernels read, or their addresses, in the order of the kernels' arguments."""

    fc1: tuple[Any, ...]
    fc2: tuple[Any, ...]
    first_expert: int
    steps: tuple[int, int]
    """From one expert's input scale to the next, of FC1 and FC2: 0 or 1."""
    quantize: tuple[Any, ...] = ()
    """Arguments of the kernel that quantizes tokens."""

    def addresses(self) -> LayerTensors:
        fc1, fc2, quantize = (tuple(map(torch.Tensor.data_ptr, part)) for part in (self.fc1, self.fc2, self.quantize))
        return LayerTensors(fc1, fc2, self.first_expert, self.steps, quantize)


class WorkspaceLayout(NamedTuple):
    """One allocation, and its parts at multiples of 128 bytes."""

    nbytes: int
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, *parts: tuple[int, torch.dtype]) -> WorkspaceLayout:
        """Place parts of so many bytes one after the other. A part of -1 bytes is the one before it, as another dtype."""
        begins, ends = [0], [0]
        for size, _ in parts:
            begins.append(begins[-1] if size < 0 else -(-ends[-1] // 128) * 128)
            ends.append(ends[-1] if size < 0 else begins[-1] + size)
        return cls(max(ends[-1], 1), tuple(begins[1:]), tuple(ends[1:]), tuple(dtype for _, dtype in parts))

    def cut(self, memory: torch.Tensor) -> list[torch.Tensor]:
        spans = zip(self.begins, self.ends, self.dtypes, strict=True)
        return [memory[begin:end].view(dtype) for begin, end, dtype in spans]


@dataclass(frozen=True)
class LaunchPlan(ABC):
    """State that calls of one token count and form share: kernels with their grids, and the layout of scratch memory."""

    tokens: int
    workspace: WorkspaceLayout
    quantized: bool
    """The input arrives quantized."""
    launches: tuple[tuple[Launch, tuple[int, int]], ...]
    direct: bool
    """Launches take addresses and a stream."""

    @abstractmethod
    def launch(self, stream: int, layer: LayerTensors, call: Any, parts: Any) -> None:
        """Launch the kernels of ``call``, which has the fields of a MoECall, as tensors or addresses."""

    def start(self, geometry: Geometry, layer: tuple[LayerTensors, LayerTensors], call: MoECall) -> None:
        """Allocate scratch memory and launch the kernels of a prepared call.

        Args:
            layer: tensors, and their addresses.
        """
        x, ids, router_weights, x_sf, swizzled, out = call
        memory = torch.empty(self.workspace.nbytes, dtype=torch.uint8, device=x.device)
        x_sf = memory if x_sf is None else x_sf  # an address that no kernel reads
        if self.direct:
            stream, base = torch._C._cuda_getCurrentRawStream(memory.get_device()), memory.data_ptr()
            routes, result = (ids.data_ptr(), router_weights.data_ptr()), out.data_ptr()  # type: ignore[union-attr]
            addresses = (x.data_ptr(), *routes, x_sf.data_ptr(), int(swizzled), result)
            self.launch(stream, layer[1], addresses, [base + begin for begin in self.workspace.begins])
            return
        with jit_monitor.may_compile(geometry):
            self.launch(0, layer[0], (x, ids, router_weights, x_sf, int(swizzled), out), self.workspace.cut(memory))


def launcher(variant: Variant, kernel: Any) -> Launch:
    """Return the launch of a compiled ``kernel``, which takes addresses; of None through Triton's JIT, which takes tensors."""
    if kernel is None:
        function, keywords = variant.function, {**variant.constants, **variant.options}
        return lambda grid, stream, *arguments: function[grid](*arguments, **keywords)
    constants = tuple(variant.constants[name] for name in variant.function.arg_names[len(variant.types) :])
    run = kernel.run  # loads the kernel on the current device
    head = kernel.function, kernel.packed_metadata, None, None, None
    return lambda grid, stream, *arguments: run(*grid, 1, stream, *head, *arguments, *constants)


@cache
def _knobs() -> Any:
    from triton import knobs

    return knobs.runtime


def known() -> bool:
    """Return True if this Triton's launchers are known."""
    import triton

    return version_tuple(triton.__version__)[:2] <= _NEWEST


def watched() -> bool:
    """Return True if a profiler asks to see each launch. Triton's JIT shows it."""
    enter, leave = _knobs().launch_enter_hook, _knobs().launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
