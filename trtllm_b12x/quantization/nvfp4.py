"""``NVFP4Sm12xFusedMoEMethod``: the host's NVFP4 parameters, created on the kernels' tile, and the kernels' view of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch

from trtllm_b12x import host
from trtllm_b12x.core.log import logger
from trtllm_b12x.formats.layouts import interleave, interleaved_rows, mma_scale_view
from trtllm_b12x.formats.nvfp4 import InputScales, NVFP4Weights
from trtllm_b12x.host import questions
from trtllm_b12x.kernels import first_line

from . import Method

STORED = ("w3_w1_weight", "w2_weight", "w3_w1_weight_scale", "w2_weight_scale")
READ_BY_KERNELS = (*STORED, "fc31_alpha", "fc2_alpha")
"""The host's parameters whose memory the kernels are given."""
RATIO = "b12x_up_to_gate"
"""The one parameter that the host's layers do not have."""
SCALARS_READ_BY_KERNELS = ("fc31_input_scale", "fc2_input_scale", RATIO)
"""Parameters of which every call derives the divisors of its activations."""

_LARGEST = 2.0**100
"""Ratio that float32 has room for."""
_INPUT_SCALES = (0.01, 0.0005)
"""Of FC1 and FC2, where weights are drawn: amax / 2688 of activations."""


def _or_as_the_host(step: Callable[..., None]) -> Callable[..., None]:
    """What fails in ``step`` costs the layer its kernels and the exact scales of gate and up, not the load."""

    @functools.wraps(step)
    def guarded(self: NVFP4, module: Any, *args: Any) -> None:
        try:
            step(self, module, *args)
        except Exception as error:
            self.as_the_host(module, error)

    return guarded


class NVFP4(Method):
    """One set of tensors for CUTLASS and the kernels.

    The parameters are the host's own (names, dtypes, meaning, 128x4-interleaved scales).  Only their intermediate
    dimension differs: w3, w1 and w2's columns are each padded with zeros to ``tile``, so that half of the rows is
    the border between up and gate for every reader.  Hosts pad the rows of both halves to 128 as one, so that with a tile of 64
    nothing differs.  With E local experts, T = round_up(I, tile), or to 128 without a gate, and r = 2 if gated:
    ``w3_w1_weight (E, r*T, H/16)`` int64, ``w2_weight (E, H, T/16)`` int64, ``w3_w1_weight_scale (E, r*T, H/64)`` and
    ``w2_weight_scale (E, H, T/64)`` int32.  The host's CUTLASS operator takes the sizes from the tensors
    (``moeOp.cpp``), so it accepts them as they are.

    What b12x needs beyond views of these is the input scales as divisors, kept in buffers of the module for its
    whole life and rewritten in place: ``b12x_fc1_divisor`` and ``b12x_fc2_divisor``, both ``(E,)`` float32.

    One parameter is ours: ``b12x_up_to_gate (E,)`` float32, up's ``weight_scale_2`` over gate's, nearly always 1.  The host
    keeps the larger of the two for both halves.  FC1 has one alpha per expert, but up enters SwiGLU linearly (with a beta or
    limit it does not: such layers are left as the host has them): gate's
    scale goes into ``fc31_alpha``, and the ratio u into the quantization of the product, which comes out smaller by u and
    is divided by a scale smaller by u.  Codes and ``fc2_alpha`` stay what they were, for b12x and for CUTLASS
    (``b12x_fc2_act_global (E,)``, read only then).  It is a parameter because hosts hand weights on by ``named_parameters``
    (TensorRT-LLM's ModelExpress loader), and is 1 from the moment it has memory: whoever
    writes it, a load, a transfer or ``load_state_dict``, writes it for good.
    """

    format = "NVFP4"
    stored = STORED
    read_by_kernels = itemgetter(*READ_BY_KERNELS, *SCALARS_READ_BY_KERNELS)
    neutral = MappingProxyType({RATIO: 1.0})

    def __init__(self, tile: int) -> None:
        super().__init__(tile)
        self._gate_and_up: dict[int, tuple[float, float]] = {}
        self.ratio = False
        """Some expert's gate and up differ in ``weight_scale_2``, as of the last hook."""

    def create_weights(self, module: Any) -> None:
        logical = module.intermediate_size_per_partition
        module.intermediate_size_per_partition = -(-logical // self.tile) * self.tile
        try:
            super().create_weights(module)
        finally:
            module.intermediate_size_per_partition = logical
        experts = module.expert_size_per_partition
        ratio = torch.nn.Parameter(torch.ones(experts, dtype=torch.float32), requires_grad=False)
        module.register_parameter("b12x_up_to_gate", ratio)
        for name in ("b12x_fc1_divisor", "b12x_fc2_divisor", "b12x_fc2_act_global"):
            module.register_buffer(name, torch.ones(experts, dtype=torch.float32), persistent=False)

    # ---- loading, one expert at a time -------------------------------------------------------------------------------

    def load_expert_w3_w1_weight_scale_nvfp4(
        self,
        module: Any,
        w1_weight_scale: torch.Tensor | None,
        w3_weight_scale: torch.Tensor | None,
        dst_w3_w1_weight_scale: torch.Tensor,
        expert_idx: int = -1,
    ) -> None:
        """Scales have the weights' rows, so they are placed alike, in the 128x4 layout of both halves as one."""
        if w1_weight_scale is not None or w3_weight_scale is not None:
            rows = interleaved_rows(dst_w3_w1_weight_scale).flatten(0, 2).flatten(1)
            self.load_expert_w3_w1_weight(module, w1_weight_scale, w3_weight_scale, rows)
            interleave(rows, dst_w3_w1_weight_scale)

    def load_expert_w2_weight_scale_nvfp4(
        self, module: Any, w2_weight_scale: torch.Tensor | None, dst_w2_weight_scale: torch.Tensor
    ) -> None:
        if w2_weight_scale is not None:
            rows = interleaved_rows(dst_w2_weight_scale).flatten(0, 2).flatten(1)
            self.load_expert_w2_weight(module, w2_weight_scale, rows)
            interleave(rows, dst_w2_weight_scale)

    # ---- scalars -----------------------------------------------------------------------------------------------------

    @_or_as_the_host
    def remember(self, module: Any, slot: int, gate: torch.Tensor, up: torch.Tensor) -> None:
        """``weight_scale_2`` of one local expert as the checkpoint has them; the host keeps the larger of the two."""
        self._gate_and_up[slot] = (float(gate.reshape(())), float(up.reshape(())))  # no reference to the loader's buffers

    @_or_as_the_host
    def before_quant_scales(self, module: Any) -> None:
        """gate's scale into FC1's alpha, once the host has made its alphas, and up's over gate's into ``b12x_up_to_gate``.

        Where one of the two is zero, or so small beside the other that float32 has no number for the ratio, so is the
        product.
        """
        if module.b12x_up_to_gate.is_meta or self.fault:
            self._gate_and_up = {}
            return
        if not self._gate_and_up:
            return
        ratios, alphas = module.b12x_up_to_gate.data.clone(), module.fc31_alpha.data.clone()
        for slot, (gate, up) in self._gate_and_up.items():
            ratio = 1.0 if gate == up else _ratio(gate, up)
            ratios[slot] = ratio or 1.0
            if gate != up:
                alphas[slot] = gate / module.fc31_input_scale.data if ratio else 0.0
        module.b12x_up_to_gate.data.copy_(ratios)
        module.fc31_alpha.data.copy_(alphas)
        self._gate_and_up = {}

    def as_the_host(self, module: Any, error: Exception) -> None:
        """Undo what the host would not have done: the larger scale for both halves, hence no ratio, and no b12x."""
        pending, self._gate_and_up = self._gate_and_up, {}
        if not self.fault:
            self.fault = first_line(error)
            logger.debug("scales of a MoE layer", exc_info=error)
        module.retire_kernels()
        ratio = getattr(module, RATIO, None)
        if ratio is None or ratio.is_meta:
            return
        larger = ratio.data.clamp(min=1)
        for slot in pending:  # their alphas are still the host's
            larger[slot] = 1
        module.fc31_alpha.data.mul_(larger)
        ratio.data.fill_(1)
        self.ratio = False
        super().setup_quant_scales(module)

    @_or_as_the_host
    def refresh(self, module: Any) -> None:
        self.before_quant_scales(module)
        self.setup_quant_scales(module)
        self.after_quant_scales(module)

    @_or_as_the_host
    def after_quant_scales(self, module: Any) -> None:
        if not module.b12x_up_to_gate.is_meta:
            self.input_scales(module).derive()

    def setup_quant_scales(self, module: Any) -> None:
        super().setup_quant_scales(module)
        if hasattr(module, RATIO):  # the host calls this in create_weights too
            self._set_up_ratio(module)

    @_or_as_the_host
    def _set_up_ratio(self, module: Any) -> None:
        self.ratio = self.has_ratio(module)
        if self.ratio and questions.activation_constants(lambda name: getattr(module, name, None)):
            raise ValueError(
                "gate and up differ in weight_scale_2, and with a beta or limit SwiGLU is not linear in up; export the "
                "checkpoint with one scale for both, as nvidia-modelopt does"
            )
        if self.ratio:
            self.derive_for_cutlass(module)
            module.quant_scales = module.quant_scales._replace(fc2_act_global=module.b12x_fc2_act_global)

    def has_ratio(self, module: Any) -> bool:
        """Some expert's gate and up differ in ``weight_scale_2``.  Synchronizes."""
        return not self.is_neutral(module, RATIO)

    @staticmethod
    def input_scales(module: Any) -> InputScales:
        """FlashInfer divides activations by the checkpoint's ``input_scale``, the host multiplies by its reciprocal.

        The host's alphas, ``weight_scale_2 * input_scale``, are the kernels' own.
        """
        return InputScales(
            fc31_input_scale=module.fc31_input_scale.data,
            fc2_input_scale=module.fc2_input_scale.data,
            up_to_gate=module.b12x_up_to_gate.data,
            fc1_divisor=module.b12x_fc1_divisor,
            fc2_divisor=module.b12x_fc2_divisor,
        )

    def before_hosts_call(self, module: Any) -> None:
        """Not into a CUDA graph: there it would cost every replay, for what changes with the weights alone."""
        if self.ratio and not (module._parameters[RATIO].is_cuda and torch.cuda.is_current_stream_capturing()):
            self.derive_for_cutlass(module)

    @torch.inference_mode()  # as InputScales.derive
    def derive_for_cutlass(self, module: Any) -> None:
        """FC2's input scale of each expert for the host's operator, where gate and up differ."""
        parameters, buffers = module._parameters, module._buffers  # a module's attributes take a microsecond each
        torch.mul(parameters["fc2_input_scale"], parameters[RATIO], out=buffers["b12x_fc2_act_global"])

    @torch.no_grad()
    def fill(self, module: Any, generator: torch.Generator) -> None:
        """Codes of every value and block scales from 0.5 to 2."""
        for name in STORED:
            low, high = (0x30, 0x41) if name.endswith("_scale") else (0, 256)
            getattr(module, name).data.view(torch.uint8).random_(low, high, generator=generator)
        sizes = module.hidden_size, module.intermediate_size_per_partition
        for fc, size, scale in zip(("fc31", "fc2"), sizes, _INPUT_SCALES, strict=True):
            getattr(module, f"{fc}_input_scale").data.fill_(1 / scale)
            getattr(module, f"{fc}_alpha").data.fill_(scale * 0.2 / math.sqrt(size))

    def intermediate_size(self, module: Any) -> int:
        return 2 * int(module.w2_weight.data.view(torch.uint8).shape[2])

    def kernel_weights(self, module: Any) -> NVFP4Weights:
        self.readable(module, READ_BY_KERNELS)
        fc1 = module.w3_w1_weight.data.view(torch.uint8)
        fc2 = module.w2_weight.data.view(torch.uint8)
        return NVFP4Weights(
            fc1_weight=fc1,
            fc1_weight_sf=mma_scale_view(module.w3_w1_weight_scale.data, rows=fc1.shape[1], columns=2 * fc1.shape[2]),
            fc1_alpha=module.fc31_alpha.data,
            fc2_weight=fc2,
            fc2_weight_sf=mma_scale_view(module.w2_weight_scale.data, rows=fc2.shape[1], columns=2 * fc2.shape[2]),
            fc2_alpha=module.fc2_alpha.data,
            fc1_divisor=module.b12x_fc1_divisor,
            fc2_divisor=module.b12x_fc2_divisor,
            input_scales=self.input_scales(module),
        )


def _ratio(gate: float, up: float) -> float:
    """up over gate; 0 where either is, beside the other."""
    if not math.isfinite(gate + up):
        return math.nan
    ratio = up / gate if gate and up else 0.0
    return ratio if 1 / _LARGEST <= abs(ratio) <= _LARGEST else 0.0


@functools.cache
def method_class() -> type[NVFP4]:
    """``NVFP4Sm12xFusedMoEMethod``: :class:`NVFP4` on this process's host.

    Raises:
        UnsupportedHostError: see :func:`trtllm_b12x.host.load`.
    """
    trtllm = host.load()
    return host.derive(f"{__name__}:NVFP4Sm12xFusedMoEMethod", NVFP4, trtllm.Weights, trtllm.NVFP4CutlassFusedMoEMethod)


def __getattr__(name: str) -> Any:
    if name == "NVFP4Sm12xFusedMoEMethod":
        return method_class()
    raise AttributeError(name)
