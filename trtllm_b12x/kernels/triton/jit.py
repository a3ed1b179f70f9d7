"""Base of the kernel families that Triton compiles.

A plan comes from Triton's cache (``cache.py``), into which processes compile what it lacks (``compile_pool.py``).
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trtllm_b12x.core import settings
from trtllm_b12x.core.log import logger
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.formats import BY_TURNS, GATE_UP, ROWS, UP_GATE, constants
from trtllm_b12x.formats.nvfp4 import NVFP4Weights
from trtllm_b12x.formats.weights import Weights
from trtllm_b12x.kernels import Geometry, MoECall, PlanError
from trtllm_b12x.kernels.cards import Card, card_of, warmup_command
from trtllm_b12x.kernels.plans import Plan, PlannedKernel
from trtllm_b12x.kernels.reference import ReferenceKernel
from trtllm_b12x.kernels.self_test import SelfTestResult, run_quick_self_test

from . import cache, launcher
from .launcher import LaunchPlan, LayerTensors, WorkspaceLayout
from .variant import Variant

ACTIVATIONS = ("Swiglu", "SwigluBias", "Geglu", "Relu2", "Silu", "Gelu")
"""Names of the host's ``ActivationType``, in the order of ``epilogues.py``'s constants. GELU is exact, alone and in Geglu, as in
CUTLASS (``moe_kernels.cu``); SwigluBias has alpha, beta and limit (gpt-oss)."""
ORDERS = (UP_GATE, GATE_UP, BY_TURNS)
"""Orders of FC1's rows, as ``decode_kernels.py`` numbers them."""
_PROOF_TOKENS = 63
"""Largest call whose kernels ``assembled`` compiles."""


@dataclass
class CompiledPlan(Plan):
    compiled: Mapping[tuple[Any, ...], Any] | None
    """Kernels by variant key; None if Triton's JIT or its interpreter launches."""
    calls: dict[tuple[Any, ...], LaunchPlan] = field(default_factory=dict)
    """Launches by tokens, form and types of a call."""


def interpreted() -> bool:
    """Return True if Triton's kernels run on the CPU, in Python."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class JitKernel(PlannedKernel):
    """Our own kernels on one layer."""

    reference: type[ReferenceKernel]
    """Torch kernel that the self-test compares with."""
    first_expert: int
    instruction = "mma.sync"
    adds_bias = True
    _plan: CompiledPlan
    _layers: dict[bool, tuple[LayerTensors, LayerTensors]]
    """Tensors of the layer and their addresses, by whether the input arrives quantized."""

    def __init__(self, card: Card | None = None) -> None:
        """
        Args:
            card: that kernels are chosen for, instead of the device's own.
        """
        self._card = card

    @classmethod
    def available(cls) -> bool:
        return toolchain.version() != "none"

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        if device.type != "cuda":
            return interpreted()
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor >= cls.features.oldest_sm

    # ---- plan --------------------------------------------------------------------------------------------------------

    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Compile every kernel for 1 to ``capacity`` tokens, or share what another layer compiled."""
        self.describe(geometry, capacity, device)
        self._share((type(self), *self._identity(), str(device)), self._make_plan)

    def describe(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Set the sizes that ``variants`` depends on; compile nothing.

        Raises:
            ValueError: no kernel of the family serves ``geometry``.
        """
        self.check(geometry, (self.features.hidden_size_multiple, self.features.group_size))
        self.geometry, self.capacity, self.device = geometry, capacity, device
        self.card = self._card or card_of(device)

    @abstractmethod
    def variants(self) -> Iterator[Variant]:
        """Yield every kernel that a call may launch, some more than once. Call ``describe`` first."""

    @classmethod
    def assembled(cls, geometry: Geometry, card: Card, directory: Path) -> Iterator[str]:
        kernel = cls(card)
        kernel.describe(geometry, _PROOF_TOKENS, torch.device("cuda"))
        one_of_each = {variant.name: variant for variant in kernel.variants()}
        return (variant.compile_for(card.capability).asm["ptx"] for variant in one_of_each.values())

    @abstractmethod
    def _identity(self) -> tuple[Any, ...]:
        """Return the key that tells plans of a family apart, besides the device."""

    def _make_plan(self) -> CompiledPlan:
        if self.device.type != "cuda":
            if not interpreted():
                raise PlanError(f"Triton's kernels do not run on {self.device}")
            return CompiledPlan(None)
        if settings.FREEZE() and not launcher.known():
            raise PlanError(f"Triton {toolchain.version()} launches through its JIT, which may compile: {settings.FREEZE.name}=1")
        name, capability = self.features.name, self.card.capability
        started, variants = time.monotonic(), list({variant.key: variant for variant in self.variants()}.values())
        logger.info("%s kernels for %s: compiling, or loading from Triton's cache", name, self.geometry)
        with torch.cuda.device(self.device):
            remedy = warmup_command(self.geometry, self.card)
            compiled, processes = cache.load(variants, capability, remedy, self._variants_planned_next())
        took = time.monotonic() - started
        logger.info("%s kernels for %s: %d in %.1f s by %d processes", name, self.geometry, len(variants), took, processes or 1)
        return CompiledPlan(compiled if launcher.known() else None)

    def _variants_planned_next(self) -> Iterator[Variant]:
        for kind, capacity in self.planned_next:
            if issubclass(kind, JitKernel):
                kernel = kind(self._card)
                with suppress(ValueError):  # its own plan raises it again
                    kernel.describe(self.geometry, capacity, self.device)
                    yield from kernel.variants()

    # ---- bind --------------------------------------------------------------------------------------------------------

    def bind(self, weights: Any, first_expert: int = 0) -> None:
        check(self.geometry, weights)
        layers = self._layer_tensors(weights, first_expert)
        self._layers = {quantized: (layer, layer.addresses()) for quantized, layer in layers.items()}
        self.weights, self.first_expert = weights, first_expert

    @abstractmethod
    def _layer_tensors(self, weights: Any, first_expert: int) -> dict[bool, LayerTensors]:
        """Return the tensors that calls read, by whether the input arrives quantized."""

    # ---- test --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _tested_sizes(self) -> Sequence[int]:
        """Return token counts that reach every kernel."""

    def _test(self) -> list[SelfTestResult] | None:
        return run_quick_self_test(self, self.reference(), self.first_expert, self._tested_sizes())

    def serves(self, tokens: int) -> bool:
        # Weights that are all zero or not finite are served too where the host has no path for them.
        return (self._plan.tested or (self._plan.untestable and self.features.every_count)) and super().serves(tokens)

    # ---- run ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _workspace(self, tokens: int, quantized: bool, sorts: bool) -> WorkspaceLayout:
        """Return the scratch memory of calls of so many tokens."""

    def scratch_bytes(self, tokens: int) -> int:
        return self._workspace(min(tokens, self.capacity), False, True).nbytes

    def _launch(self, call: MoECall) -> None:
        plan, quantized = self._plan, call.x_sf is not None
        key = (call.x.shape[0], quantized, call.ids.dtype, call.router_weights.dtype)
        launch_plan = plan.calls.get(key)
        if launch_plan is None:
            if not 0 < key[0] <= self.capacity:
                raise ValueError(f"no kernel is planned for {key[0]} tokens, only for 1 to {self.capacity}")
            launch_plan = plan.calls[key] = self._launch_plan(*key, plan.compiled is not None)
        launch_plan.start(self._layers[quantized], call)

    @abstractmethod
    def _launch_plan(
        self, tokens: int, quantized: bool, ids: torch.dtype, router_weights: torch.dtype, direct: bool
    ) -> LaunchPlan:
        """Prepare the launches of calls of this form, past Triton's JIT if ``direct``."""

    def _launchers(self, variants: Sequence[Variant], grids: Sequence[tuple[int, int]], direct: bool) -> list[launcher.Launch]:
        compiled = self._plan.compiled if direct else None
        calls = zip(variants, grids, strict=True)
        return [launcher.launcher(variant, grid, compiled and compiled[variant.key]) for variant, grid in calls]


# ---- a layer's tensors ---------------------------------------------------------------------------------------------------


def check(geometry: Geometry, weights: Weights) -> None:
    """Raise ValueError, naming the tensor, if one is not laid out as the kernels read it."""
    weights.check(geometry)
    for name, tensor in weights.tensors().items():
        plain = scales_in_memory(weights, name) if name.endswith("_sf") else tensor
        if not plain.is_contiguous() or ("weight" in name and tensor.data_ptr() % 16):
            raise ValueError(f"{name} is not contiguous, or not at a multiple of 16 bytes")


class Scalars(NamedTuple):
    """Scales of a layer besides its block scales, float32. A format without them gets an address that no kernel reads."""

    fc1_alpha: torch.Tensor
    fc1_half_alphas: torch.Tensor
    """Zeros if no load has recorded them: no alpha but zero equals those."""
    fc1_input: torch.Tensor
    """``fc31_input_scale``: the host multiplies FC1's input by it."""
    fc2_alpha: torch.Tensor
    fc2_input: torch.Tensor
    steps: tuple[int, int]
    """From one expert's input scale to the next."""


def scalars_of(weights: Any) -> Scalars:
    """
    Raises:
        ValueError: the input scales are given as divisors alone.
    """
    if not isinstance(weights, NVFP4Weights):
        none = constants.filled(1.0, (1,), weights.device)
        return Scalars(none, none, none, none, none, (0, 0))
    inputs, halves = weights.input_scales, weights.fc1_half_alphas
    if inputs is None:
        raise ValueError("the kernels take the host's input scales, not their reciprocals")
    if halves is None:
        halves = constants.filled(0.0, (2, weights.fc1_alpha.numel()), weights.device)
    fc1, fc2 = inputs.fc31_input_scale, inputs.fc2_input_scale
    return Scalars(weights.fc1_alpha, halves, fc1, weights.fc2_alpha, fc2, (int(fc1.numel() > 1), int(fc2.numel() > 1)))


def swiglu(geometry: Geometry, weights: Weights, none: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return alpha, beta and limit as kernels take them; ``none``, an address of float32, if they read none."""
    if geometry.activation != "SwigluBias":
        return (none,) * 3
    return weights.epilogue.swiglu(geometry.num_experts, weights.device)


def scales_in_memory(weights: Weights, name: str) -> torch.Tensor:
    """Return block scales as they lie in memory, uint8."""
    scales = weights.tensors()[name].view(torch.uint8)
    return scales if weights.layout.scales == ROWS else scales.permute(5, 2, 4, 0, 1, 3)
