"""NVFP4 experts on bfloat16 or float16 activations (W4A16) in Triton, on the host's own tensors; it needs torch's Triton alone.

``products.py`` and ``routing.py`` have the kernels, ``tiles.py`` their sizes, ``variants.py`` which of them a call takes,
``launch.py`` how, ``examination.py`` the test on the card.  A call of few routes is two launches, FC1 with its activation and FC2
with the weighted sum; of more, or of input that arrives quantized, three, the first of which sorts routes by expert.  Nothing
depends on values, nothing is shared between calls: scratch memory comes from torch's allocator call by call, so calls on several
streams and graphs that replay at a time do not meet.

Activations are not quantized: what the kernels multiply by is ``weight_scale_2`` alone, the host's alpha times the host's input
scale, which is the reciprocal of what that alpha contains.  Both are read by every call, as anybody may overwrite them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_b12x import families, locks, process
from trtllm_b12x.decision import Environment
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.kernels import Epilogue, Geometry, Kernel, PlanError, Weights, first_line
from trtllm_b12x.kernels.reference import ReferenceKernel, UnquantizedReferenceKernel
from trtllm_b12x.log import logger

from . import launch
from .examination import faults
from .precompile import fill_cache
from .tiles import Card, Tiles
from .variants import ACTIVATIONS, ID_TYPES, SCALE_TYPES, Build, Step, function

__all__ = ["ACTIVATIONS", "Card", "Epilogue", "TritonKernel"]

_LARGEST_TOP_K = 64
_LARGEST_EXPERTS = 2048
_LAST_INDEX = 2**31 - 1


@dataclass
class _Plan:
    """What layers of one geometry share on one device."""

    steps: dict[int, Step]
    compiled: dict[tuple[Any, ...], Any] | None = None
    """By variant; None where calls go through Triton's JIT."""
    calls: dict[tuple[Any, ...], launch.Call] = field(default_factory=dict)
    """By tokens, inline, quantized input, types of ids and scales, and whether past the JIT."""
    tested: bool = False


_plans: dict[tuple[Any, ...], _Plan] = {}
_lock = locks.new()


@process.kept
def _forget() -> None:
    with _lock:
        _plans.clear()


def interpreted() -> bool:
    """Triton's kernels run on the CPU, in Python."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card(4, 228 << 10, 90)
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_multiprocessor", 100 << 10)
    return Card(found.multi_processor_count, shared, 10 * found.major + found.minor)


class TritonKernel(Kernel):
    """Our own kernels on one layer."""

    features = families.triton(Environment())
    reference: type[ReferenceKernel] = UnquantizedReferenceKernel
    """What it is compared with."""
    word = 8
    """Codes in 32 bits."""

    def __init__(self, card: Card | None = None, overlap: bool | None = None) -> None:
        """
        Args:
            card: what tiles are chosen for, instead of the device's own.
            overlap: a launch begins before the one ahead of it has ended (programmatic dependent launch); None: where the card
                has it.
        """
        self._card, self._overlap = card, overlap

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
        self._key = (self.build, self.capacity, str(device))
        with _lock:
            if self._key not in _plans:
                try:
                    _plans[self._key] = self._make_plan()
                except Exception as error:
                    raise PlanError(first_line(error)) from error
            self._plan = _plans[self._key]

    def describe(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """What :attr:`build` goes by; compiles nothing.

        Raises:
            ValueError: no kernel of the family serves ``geometry``.
        """
        self._refuse(geometry)
        self.geometry, self.capacity, self._device = geometry, min(capacity, _most_tokens(geometry)), device
        card, gpu = self._card or card_of(device), device.type == "cuda"
        self.build = Build(
            geometry, card, gpu and (card.capability >= 90 if self._overlap is None else self._overlap), gpu, self.word
        )

    def _make_plan(self) -> _Plan:
        if self._device.type != "cuda" and not interpreted():
            raise PlanError(f"Triton's kernels do not run on {self._device}")
        plan = _Plan({tokens: self.build.step(tokens) for tokens in range(1, self.capacity + 1)})
        if self._device.type == "cuda":
            capability = self.build.card.capability
            lacking = toolchain.lacking(capability)
            if lacking:
                raise PlanError("; ".join(map(str, lacking)))
            started = time.monotonic()
            logger.info("triton kernels for %s: compiling, or loading from Triton's cache", self.geometry)
            variants = list(self.build.every(self.capacity))
            processes = fill_cache(variants, capability)
            with torch.cuda.device(self._device), torch.inference_mode(False):
                compiled = {v.key: function(v.name).warmup(*v.types, grid=(1,), **v.constants, **v.options) for v in variants}
                if launch.known():
                    for kernel in compiled.values():
                        kernel.run  # noqa: B018 (loads it)
                    plan.compiled = compiled
            took = time.monotonic() - started
            logger.info("triton kernels for %s: %d in %.1f s by %d processes", self.geometry, len(variants), took, processes or 1)
        return plan

    def set_tiles(self, tokens: int, found: Tiles) -> None:
        """Launch ``tokens`` with these tiles, in this process; for the search."""
        self._plan.steps[tokens] = self.build.step(tokens, found)
        self._plan.compiled = None
        self._plan.calls.clear()

    def _refuse(self, geometry: Geometry) -> None:
        """Raise ValueError where no kernel of the family serves ``geometry``."""
        known = self.features
        if geometry.activation not in known.activations:
            raise ValueError(f"activation {geometry.activation} is none of {', '.join(sorted(known.activations))}")
        if geometry.hidden_size % known.hidden_size_multiple or geometry.intermediate_size % known.group_size:
            sizes = f"hidden size {geometry.hidden_size} and intermediate size {geometry.intermediate_size}"
            raise ValueError(f"{sizes} must be multiples of {known.hidden_size_multiple} and {known.group_size}")
        if geometry.top_k > _LARGEST_TOP_K or geometry.num_experts > _LARGEST_EXPERTS:
            raise ValueError(
                f"top {geometry.top_k} of {geometry.num_experts} experts: at most {_LARGEST_TOP_K} of {_LARGEST_EXPERTS}"
            )

    # ---- bind --------------------------------------------------------------------------------------------------------

    def bind(self, weights: Any, first_expert: int = 0) -> None:
        """Take the layer's tensors.

        Raises:
            ValueError: a tensor has the wrong shape, dtype or layout, or the input scales are given as divisors alone.
        """
        check(self.geometry, weights)
        self._layers = self._of_layer(weights, first_expert)
        self.weights, self.first_expert = weights, first_expert
        self._addresses = {
            quantized: layer._replace(
                fc1=tuple(tensor.data_ptr() for tensor in layer.fc1), fc2=tuple(tensor.data_ptr() for tensor in layer.fc2)
            )
            for quantized, layer in self._layers.items()
        }

    def _of_layer(self, weights: Any, first_expert: int) -> dict[bool, launch.Layer]:
        """What calls read, by whether their input is quantized."""
        inputs, extra = weights.input_scales, weights.epilogue
        if inputs is None:
            raise ValueError("the kernels take the host's input scales, not their reciprocals")
        experts, device = self.geometry.num_experts, weights.w1_weight.device

        def filled(tensor: torch.Tensor | None, value: float) -> torch.Tensor:
            return torch.full((experts,), value, dtype=torch.float32, device=device) if tensor is None else tensor

        none = weights.w2_alpha  # an address for what is not read
        constants = [none] * 3
        if self.geometry.activation == "SwigluBias":
            given = ((extra.swiglu_alpha, 1.0), (extra.swiglu_beta, 0.0), (extra.swiglu_limit, float("inf")))
            constants = [filled(tensor, value) for tensor, value in given]
        w1_bias = none if extra.w1_bias is None else extra.w1_bias
        w2_bias = none if extra.w2_bias is None else extra.w2_bias
        w1, w2 = (weight.view(torch.int32) for weight in (weights.w1_weight, weights.w2_weight))
        head, tail = (w1, scale_bytes(weights.w1_weight_sf), weights.folded_w1_alpha), (inputs.up_to_gate, w1_bias, *constants)
        fc2 = (w2, scale_bytes(weights.w2_weight_sf), weights.w2_alpha, inputs.fc2_input_scale, w2_bias)
        steps = int(inputs.fc31_input_scale.numel() > 1), int(inputs.fc2_input_scale.numel() > 1)
        # Input that arrives quantized is in units of the input scale, which the alpha holds.
        one = torch.ones(1, dtype=torch.float32, device=device)
        return {
            False: launch.Layer((*head, inputs.fc31_input_scale, *tail), fc2, first_expert, steps),
            True: launch.Layer((*head, one, *tail), fc2, first_expert, (0, steps[1])),
        }

    def self_test(self) -> None:
        """Each set of tiles at its fewest and most tokens, once per plan; until then nothing serves.

        Raises:
            PlanError: a kernel is wrong; the message has the numbers.
        """
        if self._plan.tested:
            return
        sizes: dict[tuple[Tiles, bool], list[int]] = {}
        for tokens, step in self._plan.steps.items():
            sizes.setdefault((step.tiles, step.inline), []).append(tokens)
        try:
            sized = sorted({tokens for same in sizes.values() for tokens in (same[0], same[-1])})
            found = faults(self, self.reference, self.first_expert, sized)
            if found:
                raise PlanError("; ".join(found))
        except Exception as error:
            with _lock:
                _plans.pop(self._key, None)
            raise PlanError(first_line(error)) from error
        finally:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # the host sizes its KV cache by what is free
        if found is None:
            logger.info("triton kernels for %s: not tested yet, the weights are all zero or not finite", self.geometry)
        self._plan.tested = found is not None

    def summary(self) -> tuple[str, ...]:
        if self._plan.tested:
            return super().summary()
        return (*super().summary(), "not before the self-test, which waits for weights that are neither all zero nor not finite")

    @property
    def settled(self) -> bool:
        return self._plan.tested

    def serves(self, tokens: int) -> bool:
        return self._plan.tested and tokens in self._plan.steps

    def launches(self, tokens: int) -> Hashable:
        step = self._plan.steps[tokens]
        return step.tiles, step.inline

    @property
    def device(self) -> torch.device:
        return self._device

    # ---- run ---------------------------------------------------------------------------------------------------------

    def run(
        self,
        x: torch.Tensor,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        g = self.geometry
        if x.dtype != g.dtype or x.shape[1] != g.hidden_size:
            raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, the kernel takes {g.hidden_size} columns of {g.dtype}")
        return self._run(x, None, False, token_selected_experts, token_final_scales, out)

    def run_quantized(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor,
        swizzled: bool,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens, hidden = x.shape[0], self.geometry.hidden_size
        x, x_sf = x.view(torch.uint8), x_sf.contiguous().view(torch.uint8)
        blocks = -(-tokens // 128) * -(-hidden // 64) * 512 if swizzled else tokens * hidden // 16
        if x.shape[1] != hidden // 2 or x_sf.numel() < blocks:
            shapes = f"{tuple(x.shape)} bytes with {x_sf.numel()} scales"
            raise ValueError(f"x is {shapes}, the kernel takes {hidden // 2} bytes of FP4 a token and {blocks} scales")
        return self._run(x, x_sf, swizzled, token_selected_experts, token_final_scales, out)

    def _run(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        swizzled: bool,
        ids: torch.Tensor,
        scales: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        tokens, g, quantized = x.shape[0], self.geometry, x_sf is not None
        x, ids, scales = _aligned(x), _of(ids, ID_TYPES), _of(scales, SCALE_TYPES)
        usable = out is not None and out.dtype is g.dtype and out.is_contiguous() and out.data_ptr() % 16 == 0
        result = out if usable else torch.empty(tokens, g.hidden_size, dtype=g.dtype, device=x.device)
        assert result is not None
        call = self._call(tokens, quantized, ids.dtype, scales.dtype)
        memory = torch.empty(call.memory.nbytes, dtype=torch.uint8, device=x.device)
        tensors = (x, x if x_sf is None else x_sf, ids, scales, result)
        if call.direct:
            layer = self._addresses[quantized]
            own: tuple[Any, ...] = tuple(map(torch.Tensor.data_ptr, tensors))
            stream = torch._C._cuda_getCurrentRawStream(x.get_device())
        else:
            layer, own, stream = self._layers[quantized], tensors, 0
        call.launch(stream, layer, launch.Given(*own, *call.parts(memory, g)), swizzled)
        if out is None or usable:
            return result
        return out.copy_(result)

    def _call(self, tokens: int, quantized: bool, ids: torch.dtype, scales: torch.dtype) -> launch.Call:
        """
        Raises:
            ValueError: no kernel is planned for so many tokens.
        """
        plan = self._plan
        direct = plan.compiled is not None and not launch.watched()
        key = (tokens, quantized, ids, scales, direct)
        found = plan.calls.get(key)
        if found is None:
            step = plan.steps.get(tokens)
            if step is None:
                raise ValueError(f"no kernel is planned for {tokens} tokens, only for 1 to {self.capacity}")
            inline = step.inline and not quantized and (ids, scales) == (ID_TYPES[0], SCALE_TYPES[0])
            variants = self.build.variants(step, inline, quantized, ids, scales)
            found = launch.call(self.build, step, variants, plan.compiled if direct else None)
            plan.calls[key] = found
        return found


def _most_tokens(geometry: Geometry) -> int:
    """What 32-bit offsets of a route's row reach."""
    return _LAST_INDEX // (geometry.top_k * max(geometry.hidden_size, geometry.intermediate_size))


def check(geometry: Geometry, weights: Weights) -> None:
    """Raise ValueError, naming the tensor, where one does not lie as the kernels read it."""
    weights.check(geometry)
    for name, tensor in weights.tensors().items():
        plain = tensor.permute(5, 2, 4, 0, 1, 3) if name.endswith("_sf") else tensor
        if not plain.is_contiguous() or ("weight" in name and tensor.data_ptr() % 16):
            raise ValueError(f"{name} is not contiguous, or not at a multiple of 16 bytes")


def scale_bytes(scales: torch.Tensor) -> torch.Tensor:
    """Block scales as they lie in memory, uint8."""
    return scales.permute(5, 2, 4, 0, 1, 3).view(torch.uint8)


def _of(tensor: torch.Tensor, kinds: tuple[torch.dtype, ...]) -> torch.Tensor:
    """Contiguous, of a type that kernels are compiled for: another is converted by a launch of its own, none compiled."""
    return (tensor if tensor.dtype in kinds else tensor.to(kinds[0])).contiguous()


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
