"""NVFP4 experts on bfloat16 or float16 activations (W4A16) in Triton, on the host's own tensors; it needs torch's Triton alone.

``decode_kernels.py``, ``epilogues.py`` and ``routing.py`` have the kernels, ``decode_tiles.py`` their sizes,
``decode_variants.py`` which of them a call takes, ``decode_launch.py`` how.  A call of few routes is two launches, FC1 with its
activation and FC2 with the weighted sum; of more, or of input that arrives quantized, three, the first of which sorts routes by
expert.  Nothing depends on values, nothing is shared between calls: scratch memory comes from torch's
allocator call by call, so calls on several streams and graphs that replay at a time do not meet.

Activations are not quantized: what the kernels multiply by is ``weight_scale_2`` alone, the host's alpha times the host's input
scale, which is the reciprocal of what that alpha contains.  Both are read by every call, as anybody may overwrite them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_b12x.decision import Environment, families
from trtllm_b12x.formats import constants
from trtllm_b12x.formats.nvfp4 import NVFP4Weights
from trtllm_b12x.formats.weights import Weights
from trtllm_b12x.kernels import Geometry, MoECall, routes
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.reference import ReferenceKernel, UnquantizedReferenceKernel

from . import decode_launch, launcher
from .decode_tiles import Tiles
from .decode_variants import Build, Step
from .jit import JitKernel, Plan
from .variant import Variant

_LARGEST_TOP_K = 64
_LARGEST_EXPERTS = 2048
_LAST_INDEX = 2**31 - 1


@dataclass
class _Plan(Plan):
    steps: dict[int, Step] = field(default_factory=dict)


class TritonKernel(JitKernel):
    """Our own kernels on one layer."""

    features = families.triton(Environment())
    reference: type[ReferenceKernel] = UnquantizedReferenceKernel
    word = 8
    """Codes in 32 bits."""
    _plan: _Plan

    def __init__(self, card: Card | None = None, overlap: bool | None = None) -> None:
        """
        Args:
            card: that tiles are chosen for, instead of the device's own.
            overlap: a launch begins before the one ahead of it has ended (programmatic dependent launch); None: where the card
                has it.
        """
        super().__init__(card)
        self._overlap = overlap

    # ---- plan --------------------------------------------------------------------------------------------------------

    def describe(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        super().describe(geometry, min(capacity, _most_tokens(geometry)), device)
        if geometry.top_k > _LARGEST_TOP_K or geometry.num_experts > _LARGEST_EXPERTS:
            raise ValueError(
                f"top {geometry.top_k} of {geometry.num_experts} experts: at most {_LARGEST_TOP_K} of {_LARGEST_EXPERTS}"
            )
        gpu, card = device.type == "cuda", self.card
        overlap = gpu and (card.capability >= 90 if self._overlap is None else self._overlap)
        self.build = Build(geometry, card, overlap, gpu, self.word)

    def variants(self) -> Iterator[Variant]:
        return self.build.every(self.capacity)

    def samples(self) -> Iterator[Variant]:
        """Yield the kernels that two tokens launch, and the most tokens."""
        for step in map(self.build.step, (2, self.capacity)):
            yield from self.build.variants(step, step.inline)

    def _identity(self) -> tuple[Any, ...]:
        return self.build, self.capacity

    def _planned(self, compiled: dict[tuple[Any, ...], Any] | None) -> _Plan:
        steps = {tokens: self.build.step(tokens) for tokens in range(1, self.capacity + 1)}
        return _Plan(compiled, steps=steps)

    def set_tiles(self, tokens: int, found: Tiles) -> None:
        """Launch ``tokens`` with these tiles, in this process; for the search."""
        self._plan.steps[tokens] = self.build.step(tokens, found)
        self._plan.compiled = None
        self._plan.calls.clear()

    # ---- bind --------------------------------------------------------------------------------------------------------

    def bind(self, weights: Any, first_expert: int = 0) -> None:
        """Take the layer's tensors.

        Raises:
            ValueError: a tensor has the wrong shape, dtype or layout, or the input scales are given as divisors alone.
        """
        check(self.geometry, weights)
        self._layers = {
            quantized: (layer, layer._replace(fc1=addresses(layer.fc1), fc2=addresses(layer.fc2)))
            for quantized, layer in self._of_layer(weights, first_expert).items()
        }
        self.weights, self.first_expert = weights, first_expert

    def _of_layer(self, weights: Any, first_expert: int) -> dict[bool, decode_launch.Layer]:
        """Return the tensors that calls read, by whether their input is quantized."""
        inputs, extra = weights.input_scales, weights.epilogue
        if inputs is None:
            raise ValueError("the kernels take the host's input scales, not their reciprocals")
        none = weights.fc2_alpha  # an address for what is not read
        swiglu_constants = swiglu(self.geometry, weights, none)
        bias1, bias2 = (none if bias is None else bias for bias in (extra.fc1_bias, extra.fc2_bias))
        fc1, fc2 = matrices(weights)
        head, tail = (*fc1, weights.fc1_alpha), (half_alphas(weights), bias1, *swiglu_constants)
        fc2 = (*fc2, weights.fc2_alpha, inputs.fc2_input_scale, bias2)
        steps = int(inputs.fc31_input_scale.numel() > 1), int(inputs.fc2_input_scale.numel() > 1)
        # Input that arrives quantized is in units of the input scale, which the alpha holds.
        one = constants.filled(1.0, (1,), none.device)
        return {
            False: decode_launch.Layer((*head, inputs.fc31_input_scale, *tail), fc2, first_expert, steps),
            True: decode_launch.Layer((*head, one, *tail), fc2, first_expert, (0, steps[1])),
        }

    def _tested_sizes(self) -> list[int]:
        """Each set of tiles at its fewest and most tokens."""
        sizes: dict[tuple[Tiles, bool], list[int]] = {}
        for tokens, step in self._plan.steps.items():
            sizes.setdefault((step.tiles, step.inline), []).append(tokens)
        return sorted({tokens for same in sizes.values() for tokens in (same[0], same[-1])})

    def summary(self) -> tuple[str, ...]:
        if self._plan.tested:
            return super().summary()
        return (*super().summary(), "not before the self-test, which waits for weights that are neither all zero nor not finite")

    def serves(self, tokens: int) -> bool:
        return self._plan.tested and tokens in self._plan.steps

    # ---- run ---------------------------------------------------------------------------------------------------------

    def _launch(self, call: MoECall) -> None:
        quantized = call.x_sf is not None
        launch = self._call(call.x.shape[0], quantized, call.ids.dtype, call.router_weights.dtype)
        launcher.start(launch, self.geometry, self._layers[quantized], call)

    def _call(self, tokens: int, quantized: bool, ids: torch.dtype, router_weights: torch.dtype) -> decode_launch.Call:
        """
        Raises:
            ValueError: no kernel is planned for so many tokens.
        """
        plan = self._plan
        direct = plan.compiled is not None and not launcher.watched()
        key = (tokens, quantized, ids, router_weights, direct)
        found = plan.calls.get(key)
        if found is None:
            step = plan.steps.get(tokens)
            if step is None:
                raise ValueError(f"no kernel is planned for {tokens} tokens, only for 1 to {self.capacity}")
            inline = (
                step.inline and not quantized and ids is routes.ID_TYPES[0] and router_weights is routes.ROUTER_WEIGHT_TYPES[0]
            )
            variants = self.build.variants(step, inline, quantized, ids, router_weights)
            found = decode_launch.call(self.build, step, variants, plan.compiled if direct else None)
            plan.calls[key] = found
        return found


def _most_tokens(geometry: Geometry) -> int:
    """Return the largest token count for which 32-bit offsets reach every route's row."""
    return _LAST_INDEX // (geometry.top_k * max(geometry.hidden_size, geometry.intermediate_size))


def check(geometry: Geometry, weights: Weights) -> None:
    """Raise ValueError, naming the tensor, where one does not lie as the kernels read it."""
    weights.check(geometry)
    for name, tensor in weights.tensors().items():
        plain = tensor.permute(5, 2, 4, 0, 1, 3) if name.endswith("_sf") else tensor
        if not plain.is_contiguous() or ("weight" in name and tensor.data_ptr() % 16):
            raise ValueError(f"{name} is not contiguous, or not at a multiple of 16 bytes")


def addresses(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def swiglu(geometry: Geometry, weights: Weights, none: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """alpha, beta and limit as kernels are given them; ``none``, an address of float32, where they read none."""
    if geometry.activation != "SwigluBias":
        return (none,) * 3
    return weights.epilogue.swiglu(geometry.num_experts, weights.device)


def half_alphas(weights: NVFP4Weights) -> torch.Tensor:
    """Return ``fc1_half_alphas`` as kernels are given them: zeros if there are none, which no alpha but zero equals."""
    none = constants.filled(0.0, (2, weights.fc1_alpha.numel()), weights.device)
    return none if weights.fc1_half_alphas is None else weights.fc1_half_alphas


def matrices(weights: Any) -> Iterator[tuple[torch.Tensor, ...]]:
    """FC1's and FC2's codes in int32 words, and block scales as they lie in memory, uint8."""
    for weight, block_scales in ((weights.fc1_weight, weights.fc1_weight_sf), (weights.fc2_weight, weights.fc2_weight_sf)):
        yield weight.view(torch.int32), block_scales.permute(5, 2, 4, 0, 1, 3).view(torch.uint8)
