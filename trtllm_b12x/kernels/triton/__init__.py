"""NVFP4 experts on bfloat16 or float16 activations (W4A16) in Triton, on the host's own tensors; it needs torch's Triton alone.

``source.py`` has the kernels, ``tiles.py`` their sizes, ``examination.py`` the test on the card.  A call of few routes is two
launches, FC1 with its activation and FC2 with the weighted sum; of more, or of input that arrives quantized, three, the first of
which sorts routes by expert.  Nothing depends on values, nothing is shared between calls: scratch memory comes from torch's
allocator call by call, so calls on several streams and graphs that replay at a time do not meet.

Activations are not quantized: what the kernels multiply by is ``weight_scale_2`` alone, the host's alpha times the host's input
scale, which is the reciprocal of what that alpha contains.  Both are read by every call, as anybody may overwrite them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_b12x import families, locks, process
from trtllm_b12x.decision import Environment
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.kernels import Geometry, Kernel, KernelWeights, PlanError, first_line
from trtllm_b12x.log import logger

from .examination import faults
from .tiles import INLINE_ROUTES, Card, Tiles, blocks, tiles

__all__ = ["ACTIVATIONS", "Card", "Epilogue", "Form", "TritonKernel"]

ACTIVATIONS = ("Swiglu", "SwigluBias", "Geglu", "Relu2", "Silu", "Gelu")
"""By the host's ``ActivationType``, in the order of ``source.py``'s constants.  GELU is the exact one, alone and in Geglu, as
CUTLASS has it (``moe_kernels.cu``); SwigluBias has alpha, beta and limit (gpt-oss)."""

_LARGEST_TOP_K = 64
_LARGEST_EXPERTS = 2048
_LAST_INDEX = 2**31 - 1
_BLOCK = 1024
"""Elements a program sets or sorts at a time."""


@dataclass(frozen=True)
class Form:
    """What the kernels can do beside what a layer hands on today; each makes kernels of its own."""

    bias: torch.dtype | None = None
    """Of FC1's and FC2's bias; None: they have none."""
    weight_on_input: bool = False
    """The router's weight scales FC1's product, not FC2's."""
    quantized: bool = False
    """Calls may bring NVFP4 input."""
    swizzled: bool = True
    """Its scales are 128x4-interleaved."""


@dataclass(frozen=True)
class Epilogue:
    """Tensors of a layer that :class:`KernelWeights` has no place for; E local experts, I intermediate size, r = 2 if gated."""

    w1_bias: torch.Tensor | None = None
    """``(E, r*I)``, rows [up; gate], any float type."""
    w2_bias: torch.Tensor | None = None
    """``(E, H)``."""
    swiglu_alpha: torch.Tensor | None = None
    """``(E,)`` float32; without it 1."""
    swiglu_beta: torch.Tensor | None = None
    """0."""
    swiglu_limit: torch.Tensor | None = None
    """Infinity."""


@dataclass(frozen=True)
class _Step:
    """How calls of one token count are launched."""

    tiles: Tiles
    blocks: int
    """Programs along routes, where they are sorted."""
    inline: bool
    """Routes need not be sorted."""


@dataclass
class _Plan:
    """What layers of one geometry and form share on one device."""

    steps: dict[int, _Step]
    launches: dict[tuple[int, bool, bool], dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Tokens, inline, quantized input: name of a kernel to its constants and options."""
    compiled: int = 0
    tested: bool = False


_plans: dict[tuple[Any, ...], _Plan] = {}
_failed: dict[tuple[Any, ...], str] = {}
_lock = locks.new()


@process.kept
def _forget() -> None:
    with _lock:
        _plans.clear()
        _failed.clear()


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

    def __init__(self, form: Form | None = None, card: Card | None = None, overlap: bool | None = None) -> None:
        """
        Args:
            card: what tiles are chosen for, instead of the device's own.
            overlap: a launch begins before the one ahead of it has ended (programmatic dependent launch); None: where the card
                has it.
        """
        self.form, self._card, self._overlap = form or Form(), card, overlap

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
        self._key = (geometry, self.capacity, str(device), self.form, self.card, self.overlap)
        with _lock:
            if self._key in _failed:
                raise PlanError(_failed[self._key])
            if self._key not in _plans:
                try:
                    _plans[self._key] = self._make_plan()
                except Exception as error:
                    self._fail(first_line(error), error)
            self._plan = _plans[self._key]

    def _fail(self, message: str, error: Exception | None = None) -> None:
        """For every layer of the geometry."""
        _plans.pop(self._key, None)
        if not isinstance(error, torch.OutOfMemoryError):  # memory may be there for the next layer, or load
            _failed[self._key] = message
        raise PlanError(message) from error

    def describe(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """What :meth:`variants` goes by; compiles nothing.

        Raises:
            ValueError: no kernel of the family serves ``geometry``.
        """
        _refuse(geometry)
        self.geometry, self.capacity, self._device = geometry, min(capacity, _most_tokens(geometry)), device
        self.card = self._card or card_of(device)
        self.ptx = device.type == "cuda"
        self.overlap = self.ptx and (self.card.capability >= 90 if self._overlap is None else self._overlap)

    def _make_plan(self) -> _Plan:
        if self._device.type != "cuda" and not interpreted():
            raise PlanError(f"Triton's kernels do not run on {self._device}")
        plan = _Plan({tokens: self.step(tokens) for tokens in range(1, self.capacity + 1)})
        if self._device.type == "cuda":
            lacking = toolchain.lacking(self.card.capability)
            if lacking:
                raise PlanError("; ".join(map(str, lacking)))
            started = time.monotonic()
            logger.info("triton kernels for %s: compiling, or loading from Triton's cache", self.geometry)
            with torch.cuda.device(self._device), torch.inference_mode(False):
                plan.compiled = self._compile(plan)
            logger.info("triton kernels for %s: %d in %.1f s", self.geometry, plan.compiled, time.monotonic() - started)
        return plan

    def step(self, tokens: int, found: Tiles | None = None) -> _Step:
        """How ``tokens`` are launched, by the rule or with other tiles."""
        chosen = found or tiles(self.geometry, tokens, self.card, self.geometry.ranks)
        inline = tokens * self.geometry.top_k <= INLINE_ROUTES
        return _Step(chosen, blocks(self.geometry, tokens, chosen.routes), inline)

    def set_tiles(self, tokens: int, found: Tiles) -> None:
        """Launch ``tokens`` with these tiles, in this process; for the search."""
        self._plan.steps[tokens] = self.step(tokens, found)
        self._plan.launches = {key: value for key, value in self._plan.launches.items() if key[0] != tokens}

    def _compile(self, plan: _Plan) -> int:
        """All variants, for ids and scales as hosts have them; each is compiled once per process and kept in Triton's cache."""
        from . import source

        seen: set[tuple[Any, ...]] = set()
        int_types, float_types = (torch.int32, torch.int64), (torch.float32, torch.bfloat16)
        for tokens, step in plan.steps.items():
            forms = [(step.inline, False)] + [(False, False)] * step.inline + [(False, True)] * self.form.quantized
            for inline, quantized in forms:
                for name, key, constants, options in self.variants(step, inline, quantized):
                    if key in seen:
                        continue
                    seen.add(key)
                    kernel = getattr(source, name)
                    types = [(i, f) for i in int_types for f in float_types]
                    if name != "route_kernel":  # the others get them in one form
                        types = types[:1]
                    for ids, scales in types:
                        given = self.argument_types(name, quantized, ids, scales, tokens)
                        kernel.warmup(*given, grid=(1,), **constants, **options)
        return len(seen)

    def argument_types(self, name: str, quantized: bool, ids: torch.dtype, scales: torch.dtype, tokens: int) -> list[Any]:
        """The arguments of a kernel up to its constants, as types."""
        x, byte, f, i = self.geometry.dtype, torch.uint8, torch.float32, torch.int32
        if name == "route_kernel":
            return [byte if quantized else x, byte, ids, scales, x, x, i, tokens, 1, 0]
        bias = self.form.bias or f
        if name == "fc1_kernel":
            return [x, i, byte, f, f, f, bias, f, f, f, ids, scales, x, torch.bfloat16, i, tokens, 1, 0, 1, 0]
        return [torch.bfloat16, i, byte, f, f, bias, ids, scales, x, f, i, tokens, 1, 0, 1, 0]

    def variants(
        self, step: _Step, inline: bool, quantized: bool
    ) -> list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]]:
        """Kernels of a call: name, what tells it from others, constants, and options of the compiler."""
        g, form, found = self.geometry, self.form, step.tiles
        slots = 1 << max(g.top_k - 1, 1).bit_length()
        columns = -(-g.hidden_size // found.fc2.rows)
        # Constants that a variant does not use do not make another.
        common = {"TOP_K": g.top_k, "BM": found.routes, "PDL": self.overlap}
        product = {"H": g.hidden_size, "SIZE": g.intermediate_size, "TILES": columns, "BIAS": form.bias is not None}
        product |= {"SORTED": not inline, "ROUTES": INLINE_ROUTES, "PTX": self.ptx, "SCALED_INPUT": form.weight_on_input}
        kernels: list[tuple[str, dict[str, Any], Any]] = []
        if not inline:
            constants = {"H": g.hidden_size, "SLOTS": slots, "EXPERTS": g.num_experts, "TILES": columns, "BLOCK": _BLOCK}
            constants |= {
                "PADDED_EXPERTS": 1 << (g.num_experts - 1).bit_length(),
                "QUANTIZED": quantized,
                "SWIZZLED": form.swizzled,
            }
            kernels.append(("route_kernel", constants, None))
        first = {
            "BN": found.fc1.rows,
            "BK": found.fc1.columns,
            "ACTIVATION": ACTIVATIONS.index(g.activation),
            "GATED": g.gated,
        }
        first |= {"QUANTIZED": quantized, "SLOTS": slots, "BLOCK": _BLOCK}
        kernels.append(("fc1_kernel", product | first, found.fc1))
        kernels.append(("fc2_kernel", product | {"BN": found.fc2.rows, "BK": found.fc2.columns}, found.fc2))
        made = []
        for name, constants, tile in kernels:
            constants = {**common, **constants}
            options = {"num_warps": tile.num_warps if tile else 4, "num_stages": tile.num_stages if tile else 1}
            options["enable_fp_fusion"] = True  # the default until Triton 3.10
            if self._device.type == "cuda":
                options["launch_pdl"] = self.overlap
            key = (name, *sorted(constants.items()), *sorted(options.items()))
            made.append((name, key, constants, options))
        return made

    # ---- bind --------------------------------------------------------------------------------------------------------

    def bind(self, weights: KernelWeights, first_expert: int = 0, epilogue: Epilogue | None = None) -> None:
        """Take the layer's tensors.

        Raises:
            ValueError: a tensor has the wrong shape, dtype or layout, or the plan's form has no place for it; or the input scales
                are given as divisors alone.
        """
        check(self.geometry, weights)
        inputs = weights.input_scales
        if inputs is None:
            raise ValueError("the kernels take the host's input scales, not their reciprocals")
        given = epilogue or Epilogue()
        self._check(given)
        self.weights, self.first_expert, self.epilogue = weights, first_expert, given
        experts, device = self.geometry.num_experts, weights.w1_weight.device

        def filled(tensor: torch.Tensor | None, value: float) -> torch.Tensor:
            return torch.full((experts,), value, dtype=torch.float32, device=device) if tensor is None else tensor

        none = weights.w2_alpha  # an address for what is not read
        constants = [none] * 3
        if self.geometry.activation == "SwigluBias":
            constants = [
                filled(given.swiglu_alpha, 1.0),
                filled(given.swiglu_beta, 0.0),
                filled(given.swiglu_limit, float("inf")),
            ]
        w1_bias = none if given.w1_bias is None else given.w1_bias
        w2_bias = none if given.w2_bias is None else given.w2_bias
        w1, w2 = (weight.view(torch.int32) for weight in (weights.w1_weight, weights.w2_weight))
        self._fc1 = (
            w1,
            _bytes(weights.w1_weight_sf),
            weights.folded_w1_alpha,
            inputs.fc31_input_scale,
            inputs.up_to_gate,
            w1_bias,
            *constants,
        )
        self._fc2 = (w2, _bytes(weights.w2_weight_sf), weights.w2_alpha, inputs.fc2_input_scale, w2_bias)
        self._steps = int(inputs.fc31_input_scale.numel() > 1), int(inputs.fc2_input_scale.numel() > 1)

    def _check(self, given: Epilogue) -> None:
        g = self.geometry
        rows = (2 if g.gated else 1) * g.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"w1_bias": (g.num_experts, rows), "w2_bias": (g.num_experts, g.hidden_size)}
        for name in ("w1_bias", "w2_bias", "swiglu_alpha", "swiglu_beta", "swiglu_limit"):
            tensor = getattr(given, name)
            shape = shapes.get(name, (g.num_experts,))
            if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous() or not tensor.is_floating_point()):
                raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, the kernel takes contiguous floats {shape}")
        types = {None if bias is None else bias.dtype for bias in (given.w1_bias, given.w2_bias)}
        if types != {self.form.bias}:
            raise ValueError(f"biases are of types {types}, planned for {self.form.bias}")

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
            found = faults(self, sorted({tokens for same in sizes.values() for tokens in (same[0], same[-1])}))
        except Exception as error:
            with _lock:
                self._fail(first_line(error), error)
        finally:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # the host sizes its KV cache by what is free
        if found:
            with _lock:
                self._fail("; ".join(found))
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
        x_sf: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Experts on ``x``.

        Args:
            x: ``(tokens, H)`` of the form's type, or, with ``x_sf``, FP4 bytes ``(tokens, H/2)``, in units of the layer's scale.
            token_selected_experts: ``(tokens, top_k)`` integers of any type, global ids; others than this rank's are skipped.
            token_final_scales: ``(tokens, top_k)`` floats of any type.
            out: ``(tokens, H)`` to write into, of any 16-bit float type or float32.
            x_sf: E4M3 bytes of the input's blocks of 16, in the form's layout.
        """
        from . import source

        tokens, g = x.shape[0], self.geometry
        step = self._plan.steps.get(tokens)
        if step is None:
            raise ValueError(f"no kernel is planned for {tokens} tokens, only for 1 to {self.capacity}")
        quantized = x_sf is not None
        if quantized and not self.form.quantized:
            raise ValueError(f"x comes with x_sf, which was not planned ({self.form})")
        if not quantized and (x.dtype != g.dtype or x.shape[1] != g.hidden_size):
            raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, the kernel takes {g.hidden_size} columns of {g.dtype}")
        x, ids, scales = _aligned(x), token_selected_experts.contiguous(), token_final_scales.contiguous()
        direct = out is not None and out.is_contiguous() and out.data_ptr() % 16 == 0
        result = out if direct else torch.empty(tokens, g.hidden_size, dtype=g.dtype, device=x.device)
        assert result is not None
        routes = tokens * g.top_k
        inline = step.inline and not quantized and ids.dtype == torch.int32 and scales.dtype == torch.float32
        columns = -(-g.hidden_size // step.tiles.fc2.rows)
        h = torch.empty(routes, g.intermediate_size, dtype=torch.bfloat16, device=x.device)
        partial = torch.empty(routes, g.hidden_size, dtype=torch.float32, device=x.device)
        numbers = tokens * columns + (0 if inline else 3 * routes + 3 * step.blocks + 2 * g.num_experts)
        workspace = torch.empty(numbers, dtype=torch.int32, device=x.device)
        launches = self._plan.launches.get((tokens, inline, quantized))
        if launches is None:
            made = self.variants(step, inline, quantized)
            launches = {name: {**constants, **options} for name, _, constants, options in made}
            self._plan.launches[tokens, inline, quantized] = launches
        local = (0, g.num_experts)
        if not inline:
            staged = torch.empty(tokens, g.hidden_size, dtype=g.dtype, device=x.device) if quantized else x
            given = x.view(torch.uint8) if quantized else x
            x_bytes = _bytes_of_input(x_sf) if x_sf is not None else given.view(torch.uint8)
            source.route_kernel[(1 + tokens,)](
                given,
                x_bytes,
                ids,
                scales,
                staged,
                result,
                workspace,
                tokens,
                step.blocks,
                self.first_expert,
                **launches["route_kernel"],
            )
            x = staged
            routing: tuple[Any, ...] = (workspace, partial, tokens, step.blocks, *local)
        else:
            routing = (ids, scales, tokens, step.blocks, self.first_expert, g.num_experts)
        across = step.blocks if not inline else routes
        ids_given, scales_given = routing[:2]
        grid = (-(-g.intermediate_size // step.tiles.fc1.rows), across)
        source.fc1_kernel[grid](
            x, *self._fc1, ids_given, scales_given, result, h, workspace, *routing[2:], self._steps[0], **launches["fc1_kernel"]
        )
        source.fc2_kernel[(columns, across)](
            h,
            *self._fc2,
            ids_given,
            scales_given,
            result,
            partial,
            workspace,
            *routing[2:],
            self._steps[1],
            **launches["fc2_kernel"],
        )
        if out is None or direct:
            return result
        return out.copy_(result)


def _refuse(geometry: Geometry) -> None:
    """Raise ValueError where no kernel of the family serves ``geometry``."""
    if geometry.activation not in ACTIVATIONS:
        raise ValueError(f"activation {geometry.activation} is none of {', '.join(ACTIVATIONS)}")
    if geometry.hidden_size % 16 or geometry.intermediate_size % 16:
        sizes = f"hidden size {geometry.hidden_size} and intermediate size {geometry.intermediate_size}"
        raise ValueError(f"{sizes} must be multiples of 16")
    if geometry.top_k > _LARGEST_TOP_K or geometry.num_experts > _LARGEST_EXPERTS:
        raise ValueError(
            f"top {geometry.top_k} of {geometry.num_experts} experts: at most {_LARGEST_TOP_K} of {_LARGEST_EXPERTS}"
        )


def _most_tokens(geometry: Geometry) -> int:
    """What 32-bit offsets of a route's row reach."""
    return _LAST_INDEX // (geometry.top_k * max(geometry.hidden_size, geometry.intermediate_size))


def check(geometry: Geometry, weights: KernelWeights) -> None:
    """Raise ValueError, naming the tensor, where one does not lie as the kernels read it."""
    weights.check(geometry)
    for name, tensor in weights.tensors().items():
        plain = tensor.permute(5, 2, 4, 0, 1, 3) if name.endswith("_sf") else tensor
        if not plain.is_contiguous() or ("weight" in name and tensor.data_ptr() % 16):
            raise ValueError(f"{name} is not contiguous, or not at a multiple of 16 bytes")


def _bytes(scales: torch.Tensor) -> torch.Tensor:
    """Block scales as they lie in memory, uint8."""
    return scales.permute(5, 2, 4, 0, 1, 3).view(torch.uint8)


def _bytes_of_input(scales: torch.Tensor) -> torch.Tensor:
    return scales.contiguous().view(torch.uint8)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
