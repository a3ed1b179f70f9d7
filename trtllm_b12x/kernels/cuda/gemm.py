# SPDX-License-Identifier: Apache-2.0
"""Layers with many routes per expert (``gemm.cu``): grouped products of 16-bit activations, for calls of any size.

Kernels read the engine's own tensors in NVFP4, W4A16_NVFP4, MXFP4 and MXFP8, with the numerics of ``decode.py``. A call passes
scratch memory, or torch allocates it for the call. It holds each token's x, and each route's activation result and share of the
output, 2 bytes a value (48 MB for 8,192 routes of Qwen3-30B-A3B). Calls of more than 16,384 routes run in parts.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from trtllm_b12x.core.log import logger
from trtllm_b12x.decision import Environment, families
from trtllm_b12x.formats import constants
from trtllm_b12x.kernels import Geometry, Kernel, MoECall, driver
from trtllm_b12x.kernels import reference as in_torch
from trtllm_b12x.kernels.cards import card_of, warmup_command
from trtllm_b12x.kernels.plans import Plan
from trtllm_b12x.kernels.self_test import QUICK_EXPERTS, SelfTestResult, run_quick_self_test

from . import records
from .variant import NvrtcKernel, Variant, check_sizes, load, sizes_of_layer

SOURCE = "gemm.cu"
KERNELS = ("prepare", "fc1", "fc2", "sum")
_SIZES = ("workspace_bytes", "token_bytes", "route_bytes", "share_bytes", "halved_routes")
"""Bytes of scratch memory: fixed, per token, per route, per share; and maximum number of routes with two shares each."""
MOST_ROUTES = 16384
"""Maximum number of routes of a launch, the same as in ``gemm_routes.cuh``."""
_MOST_EXPERTS = 1024
_STAGES = 2
_PREPARING, _SUMMING = 2, 8
"""Blocks per multiprocessor of ``prepare`` and of ``sum``."""
_LARGE = 200 << 10
"""Minimum bytes of shared memory per multiprocessor (Hopper) for ``SHAPES``. Smaller cards take ``SMALL_SHAPES``."""


@dataclass(frozen=True)
class Shape:
    """Work split of ``fc1`` and ``fc2``."""

    routes: int
    """Maximum number of routes for which a weight is decoded once."""
    warps: int
    blocks: int
    """Blocks per multiprocessor."""

    def __str__(self) -> str:
        return f"{self.routes}x{self.warps}x{self.blocks}"


SHAPES = {bits: (Shape(16, 4, 5), Shape(32, 4, 4), Shape(64, 4, 3), Shape(96, 4, 2)) for bits in (4, 8)}
SMALL_SHAPES = {
    4: (Shape(16, 8, 2), Shape(32, 16, 1), Shape(64, 8, 1), Shape(96, 8, 1)),
    8: (Shape(16, 10, 1), Shape(32, 8, 1), Shape(64, 7, 1), Shape(96, 5, 1)),
}
"""Shapes by bits of a code, in ascending order of routes per expert. They were measured on an H200, ``SMALL_SHAPES`` because
they fit into SM12x's 99 KB."""
_ENDS = (8, 24, 48)
"""Maximum routes per expert for each shape but the last. ``proposals`` adds the neighboring shapes."""


@dataclass
class GemmPlan(Plan):
    functions: dict[Shape, dict[str, driver.Function]]
    sizes: dict[Shape, list[int]] = field(init=False)
    """Constants of each shape's module, see ``_SIZES``."""

    def __post_init__(self) -> None:
        self.sizes = {shape: list(map(of["fc1"].module.constant, _SIZES)) for shape, of in self.functions.items()}

    def bytes_of(self, shape: Shape, tokens: int, top_k: int) -> int:
        """Return a launch's bytes of scratch memory."""
        fixed, of_token, of_route, of_share, halved = self.sizes[shape]
        routes = tokens * top_k
        return fixed + tokens * of_token + routes * of_route + routes * of_share * (2 if routes <= halved else 1)


class GemmKernel(NvrtcKernel):
    """Grouped products of NVFP4 layers."""

    features = families.gemm(Environment())
    reference: ClassVar[type[in_torch.ReferenceKernel]] = in_torch.UnquantizedReferenceKernel
    held: Shape | None = None
    """Shape of every call, or None for the first of ``proposals``."""
    _plan: GemmPlan
    _launches: dict[Shape, list[tuple[Any, ...]]]
    """Launches of unquantized and of quantized input, by shape."""

    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Compile the shapes that calls of up to ``capacity`` tokens take, or share what another layer compiled."""
        self.describe(geometry, capacity, device)
        self._share((type(self), geometry, self.shapes(), str(device)), self._make_plan)

    def describe(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        super().describe(geometry, capacity, device)
        check_sizes(geometry, self.number_format())
        if geometry.num_experts > _MOST_EXPERTS:
            raise ValueError(f"gemm takes at most {_MOST_EXPERTS} experts, not {geometry.num_experts}")

    # ---- shapes

    def _known(self) -> tuple[Shape, ...]:
        return (SHAPES if self.card.shared_memory >= _LARGE else SMALL_SHAPES)[self.number_format().code_bits]

    def proposals(self, tokens: int) -> tuple[Shape, ...]:
        """Return the shapes for a call of ``tokens`` tokens. Without measurements, the first is used."""
        at, known = self._suiting(tokens), self._known()
        return known[at], *known[at + 1 : at + 2], *known[max(at - 1, 0) : at]

    def _suiting(self, tokens: int) -> int:
        g = self.geometry
        each = min(tokens, self._most_tokens) * g.top_k / (g.num_experts * g.ranks)
        return sum(each > end for end in _ENDS)

    def shapes(self) -> tuple[Shape, ...]:
        """Return the shapes that some call of up to ``capacity`` tokens takes."""
        return self._known()[: self._suiting(self.capacity) + 2]

    @property
    def _most_tokens(self) -> int:
        """Maximum number of tokens of a launch: a multiple of 128, the rows of a 128x4 tile of input scales, or less than 128."""
        most = MOST_ROUTES // self.geometry.top_k
        return most // 128 * 128 or most

    def variants(self) -> tuple[Variant, ...]:
        return tuple(map(self.variant, self.shapes()))

    def variant(self, shape: Shape) -> Variant:
        blocks = self.card.multiprocessors * shape.blocks
        sizes = sizes_of_layer(self.geometry, self.number_format())
        sizes |= {"HALVES1": 2, "HALVES2": 2, "NARROW": False, "TILES_A_TASK": 1, "STAGES": _STAGES, "GROUP_ROUTES": shape.routes}
        sizes |= {"WARPS": shape.warps, "PARTS1": shape.warps, "PARTS2": shape.warps, "BLOCKS_A_SM": shape.blocks}
        sizes["SCALED_X"] = self.number_format().group_size == 32
        # A power of two lets cards share cubins. With fewer blocks than a card has, the list of tiles is longer than needed.
        sizes["FEWEST_BLOCKS"] = 1 << (blocks.bit_length() - 1)
        return Variant(f"gemm, {shape}", SOURCE, shape.routes, tuple(sizes.items()))

    @classmethod
    def compile_ahead(cls, planned: Sequence[tuple[type[Kernel], int]], geometry: Geometry, device: torch.device) -> int:
        kernel = cls(card_of(device))
        kernel.describe(geometry, dict(planned)[cls], device)
        load(kernel.variants(), kernel.target, warmup_command(geometry, kernel.card))
        return 0

    def _make_plan(self) -> GemmPlan:
        started, shapes = time.monotonic(), self.shapes()
        with torch.cuda.device(self.device):
            torch.cuda.current_stream()  # makes the context that modules are loaded into
            modules = map(driver.Module, load(self.variants(), self.target, warmup_command(self.geometry, self.card)))
            plan = GemmPlan({shape: functions_of(module) for shape, module in zip(shapes, modules, strict=True)})
        logger.info("gemm kernels for %s: %d in %.1f s", self.geometry, len(shapes), time.monotonic() - started)
        return plan

    def bind(self, weights: Any, first_expert: int = 0) -> None:
        unused = constants.filled(0, (1,), weights.device)  # no launch waits, so none is stopped
        self._tensors, layers = records.layers_of(self.geometry, weights, unused, first_expert)
        self._launches = {
            shape: [
                tuple(functions[name].launcher(self._blocks(shape, name), layer, records.CALL) for name in KERNELS)
                for layer in layers
            ]
            for shape, functions in self._plan.functions.items()
        }
        self.weights, self.first_expert = weights, first_expert

    def _blocks(self, shape: Shape, name: str) -> int:
        return self.card.multiprocessors * {"prepare": _PREPARING, "sum": _SUMMING}.get(name, shape.blocks)

    # ---- what serves

    def forms(self) -> Mapping[str, GemmKernel]:
        return {str(shape): self._holding(shape) for shape in self._plan.functions}

    def _holding(self, shape: Shape) -> GemmKernel:
        kernel = copy.copy(self)
        kernel.held = shape
        return kernel

    def _test(self) -> list[SelfTestResult] | None:
        """Test each shape with one token, and with more routes per expert than a group has, if ``capacity`` allows that."""
        tested: dict[int, list[GemmKernel]] = {}
        for shape in self._plan.functions:
            experts = max(QUICK_EXPERTS, self.geometry.top_k)
            for tokens in (1, -(-(shape.routes + 9) * experts // self.geometry.top_k)):
                tested.setdefault(min(tokens, self.capacity), []).append(self._holding(shape))
        return run_quick_self_test(self, self.reference(), self.first_expert, tested)

    def serves(self, tokens: int) -> bool:
        tested = self._plan.tested or (self._plan.untestable and self.features.every_count)
        return tested and super().serves(tokens) and (self.held is None or self.held in self.proposals(tokens))

    def scratch_bytes(self, tokens: int) -> int:
        plan, top_k, tokens = self._plan, self.geometry.top_k, min(tokens, self.capacity, self._most_tokens)
        sizes = []
        for shape in plan.functions:
            # The largest call whose routes have two shares may need more memory than a larger call.
            halved = min(tokens, plan.sizes[shape][-1] // top_k)
            sizes += [plan.bytes_of(shape, count, top_k) for count in (tokens, halved)]
        return max(sizes)

    # ---- calls

    def _launch(self, call: MoECall) -> None:
        tokens, out = call.x.shape[0], call.out
        assert out is not None
        if not 0 < tokens <= self.capacity:
            raise ValueError(f"no kernel is planned for {tokens} tokens, only for 1 to {self.capacity}")
        parts = -(-tokens // self._most_tokens)
        step = tokens if parts == 1 else -(-tokens // parts // 128) * 128  # parts have about the same length
        for first in range(0, tokens, step):
            part = call if parts == 1 else call.of_tokens(first, min(first + step, tokens))
            self._launch_part(part, out[first : first + step] if parts > 1 else out)

    def _launch_part(self, call: MoECall, out: torch.Tensor) -> None:
        x, ids, router_weights, x_sf, swizzled, _, memory = call[:7]
        tokens, shape = x.shape[0], self.proposals(x.shape[0])[0] if self.held is None else self.held
        size = self._plan.bytes_of(shape, tokens, self.geometry.top_k)
        if memory is None or memory.nbytes < size:
            memory = torch.empty(size, dtype=torch.uint8, device=x.device)
        stream = torch._C._cuda_getCurrentRawStream(x.get_device())
        if stream and torch.cuda.is_current_stream_capturing():
            self._plan.functions[shape]["fc1"].module.keep()
        for launch in self._launches[shape][x_sf is not None]:
            launch(
                stream, x.data_ptr(), 0 if x_sf is None else x_sf.data_ptr(), ids.data_ptr(), router_weights.data_ptr(),
                0, out.data_ptr(), memory.data_ptr(), tokens, ids.dtype is torch.int64, router_weights.dtype is torch.bfloat16,
                1 if swizzled else 0,
            )  # fmt: skip


def functions_of(module: Any, kind: Any = driver.Function) -> dict[str, Any]:
    """Return the kernels of a module by name."""
    return {name: kind(module, name, f"{name}_") for name in KERNELS}


class GemmW4A16Kernel(GemmKernel):
    features = families.gemm_w4a16(Environment())
    reference = in_torch.W4A16ReferenceKernel


class GemmMXFP4Kernel(GemmKernel):
    features = families.gemm_mxfp4(Environment())
    reference = in_torch.MXFP4ReferenceKernel


class GemmMXFP8Kernel(GemmKernel):
    features = families.gemm_mxfp8(Environment())
    reference = in_torch.MXFP8UnquantizedReferenceKernel
