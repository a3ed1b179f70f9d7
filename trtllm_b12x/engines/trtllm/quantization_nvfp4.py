# SPDX-License-Identifier: Apache-2.0
"""Create TensorRT-LLM's NVFP4 and W4A16_NVFP4 parameters, padded to the kernels' tile, and the kernels' view of them."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch

from trtllm_b12x.core import log
from trtllm_b12x.dispatch.layer import LIKE
from trtllm_b12x.formats.nvfp4 import InputScales

from . import guard
from .host import load
from .quantization import PaddedMethod

_HOST = load()
Weights: Any = _HOST.Weights
NVFP4CutlassFusedMoEMethod: Any = _HOST.methods["NVFP4"]
W4A16NVFP4CutlassFusedMoEMethod: Any = _HOST.methods.get("W4A16_NVFP4", object)

_ALPHAS = ("fc31_alpha", "fc2_alpha")
_SAME = 2e-5
"""Relative difference up to which TensorRT-LLM treats two scales as equal (``torch.allclose``), with float32's rounding."""
_INPUT_SCALES = (0.01, 0.0005)
"""Input scales of FC1 and FC2 for random weights: amax / 2688 of typical activations."""


class NVFP4Sm12xFusedMoEMethod(PaddedMethod, Weights, NVFP4CutlassFusedMoEMethod):
    """NVFP4 method with one set of tensors for CUTLASS and our kernels.

    The parameters are TensorRT-LLM's own (names, dtypes, meaning, 128x4-interleaved scales). Only the intermediate dimension
    differs: w3, w1 and the columns of w2 are each zero-padded to ``tile``, so every reader splits up and gate at half of the
    rows. TensorRT-LLM pads both halves together to 128 rows; with a tile of 64 both paddings are equal. With E local
    experts, T = round_up(I, tile), or to 128 without a gate, and r = 2 if gated: ``w3_w1_weight (E, r*T, H/16)`` int64,
    ``w2_weight (E, H, T/16)`` int64, ``w3_w1_weight_scale (E, r*T, H/64)`` and ``w2_weight_scale (E, H, T/64)`` int32. CUTLASS
    takes the sizes from the tensors (``moeOp.cpp``).

    Kernels need three more tensors. They are buffers of the module, rewritten in place: ``b12x_fc1_divisor`` and
    ``b12x_fc2_divisor`` ``(E,)`` float32, the input scales as divisors, and ``b12x_fc1_half_alphas (2, E)`` float32, FC1's
    alphas of up and gate. If a checkpoint has a ``weight_scale_2`` for each half, TensorRT-LLM keeps the larger for both
    (``fc31_alpha``). Our kernels multiply each half by its own alpha, as long as the larger of the two is ``fc31_alpha``. State
    dicts omit these buffers. A layer that gets only parameters, or another ``fc31_alpha``, thus computes TensorRT-LLM's result.
    """

    format = "NVFP4"
    # Every call derives the activation divisors from the last two.
    read_by_kernels = itemgetter(*PaddedMethod.stored, *_ALPHAS, "fc31_input_scale", "fc2_input_scale")

    def create_weights(self, module: Any) -> None:
        logical = module.intermediate_size_per_partition
        module.intermediate_size_per_partition = -(-logical // self.tile) * self.tile
        try:
            super().create_weights(module)
        finally:
            module.intermediate_size_per_partition = logical
        experts = module.expert_size_per_partition
        shapes = {"b12x_fc1_divisor": (experts,), "b12x_fc2_divisor": (experts,), "b12x_fc1_half_alphas": (2, experts)}
        for name, shape in shapes.items():
            module.register_buffer(name, torch.zeros(shape, dtype=torch.float32), persistent=False)

    def load_expert_w3_w1_weight_scale_nvfp4(
        self,
        module: Any,
        w1_weight_scale: torch.Tensor | None,
        w3_weight_scale: torch.Tensor | None,
        dst_w3_w1_weight_scale: torch.Tensor,
        expert_idx: int = -1,
    ) -> None:
        """Place both halves like the weights, in one 128x4 layout."""
        if w1_weight_scale is not None or w3_weight_scale is not None:
            place = functools.partial(self.load_expert_w3_w1_weight, module, w1_weight_scale, w3_weight_scale)
            self._place_scales(dst_w3_w1_weight_scale, place)

    def load_expert_w2_weight_scale_nvfp4(
        self, module: Any, w2_weight_scale: torch.Tensor | None, dst_w2_weight_scale: torch.Tensor
    ) -> None:
        if w2_weight_scale is not None:
            self._place_scales(dst_w2_weight_scale, functools.partial(self.load_expert_w2_weight, module, w2_weight_scale))

    def record_weight_scale_2(self, module: Any, pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Record ``weight_scale_2`` of gate and up, by local expert, once TensorRT-LLM has computed ``fc31_alpha`` from them."""
        with guard.host_takes_over(module):
            if not pairs or module.fc31_alpha.is_meta:
                return
            self._write_half_alphas(module, pairs)
            ratio = self.scale_ratio(module)
            if module.schedule.kernels and any((ratio > bound) != (module.scale_ratio > bound) for bound in (1, LIKE)):
                module._weights_are_ready()  # some reloads in TensorRT-LLM end without its post-load hooks

    @staticmethod
    @torch.inference_mode()  # buffers of a load in inference mode cannot be written outside it
    def _write_half_alphas(module: Any, pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        buffer, experts = module.b12x_fc1_half_alphas, list(pairs)
        scales = [[float(pair[half].reshape(())) for pair in pairs.values()] for half in (1, 0)]
        alphas, input_scales = module.fc31_alpha.data, module.fc31_input_scale.data
        common = alphas[experts]
        halves = torch.tensor(scales, dtype=torch.float32, device=buffer.device) / input_scales.expand_as(alphas)[experts]
        same = torch.isclose(halves, common.expand_as(halves), rtol=_SAME, atol=0)
        buffer[:, experts] = torch.where(same, common, halves)

    def scale_ratio(self, module: Any) -> float:
        halves, alpha = module.b12x_fc1_half_alphas, module.fc31_alpha.data
        larger, smaller = halves.amax(0), halves.amin(0)
        known = larger == alpha
        layer = f"MoE layer {getattr(module, 'layer_idx', '?')}"
        if module.is_gated_activation and not bool(known.all()):
            log.once(
                f"{layer}: gate and up share fc31_alpha, as in TensorRT-LLM: these weights came without a weight_scale_2 of each",
                logging.INFO,
                "gate and up share fc31_alpha",
            )
        return float(torch.where(known & (smaller != larger), larger / smaller, 1.0).max())

    @torch.no_grad()
    def fill(self, module: Any, generator: torch.Generator) -> None:
        super().fill(module, generator)
        sizes = module.hidden_size, module.intermediate_size_per_partition
        for fc, size, scale in zip(("fc31", "fc2"), sizes, _INPUT_SCALES, strict=True):
            getattr(module, f"{fc}_input_scale").data.fill_(1 / scale)
            getattr(module, f"{fc}_alpha").data.fill_(scale * 0.2 / math.sqrt(size))
        module.b12x_fc1_half_alphas.copy_(module.fc31_alpha.data.expand(2, -1))

    def kernel_weights(self, module: Any) -> Any:
        # FlashInfer divides activations by the checkpoint's ``input_scale``, TensorRT-LLM multiplies by its reciprocal.
        # TensorRT-LLM's alphas, ``weight_scale_2 * input_scale``, are also the kernels' alphas.
        divisors = module.b12x_fc1_divisor, module.b12x_fc2_divisor
        weights: Any = self._views(
            module,
            _ALPHAS,
            fc1_alpha=module.fc31_alpha.data,
            fc2_alpha=module.fc2_alpha.data,
            fc1_divisor=divisors[0],
            fc2_divisor=divisors[1],
            input_scales=InputScales(module.fc31_input_scale.data, module.fc2_input_scale.data, *divisors),
            fc1_half_alphas=module.b12x_fc1_half_alphas if module.is_gated_activation else None,
        )
        weights.derive()
        return weights


class W4A16NVFP4Sm12xFusedMoEMethod(NVFP4Sm12xFusedMoEMethod, W4A16NVFP4CutlassFusedMoEMethod):
    """W4A16_NVFP4 method with one set of tensors for our kernels and TensorRT-LLM, which dequantizes experts at every call.

    Names, shapes and dtypes are those of NVFP4. Block scales are row-major. TensorRT-LLM interleaves whole parameters and then
    reverses that (``process_weights_after_loading``, ``quantization.py`` of commit 02320c35); here each hook writes rows.
    TensorRT-LLM splits FC1 at half of its rows and pads below both halves, which misplaces sizes such as 224. Here each half is
    padded. A checkpoint may lack input scales. They then stay 1, and ``fcX_alpha`` is ``weight_scale_2``.
    """

    format = "W4A16_NVFP4"

    def _place_scales(self, destination: torch.Tensor, place: Callable[[torch.Tensor], None]) -> None:
        place(destination.view(torch.uint8))

    def process_weights_after_loading(self, module: Any) -> None:
        """Skip TensorRT-LLM's own method, which would reverse an interleaving that our hooks omit."""
        super(W4A16NVFP4CutlassFusedMoEMethod, self).process_weights_after_loading(module)
