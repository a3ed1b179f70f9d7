# SPDX-License-Identifier: Apache-2.0
"""NVFP4 and W4A16_NVFP4 experts as ``ModelOptNvFp4FusedMoEMethod`` stores them for ``flashinfer_cutlass``."""

from __future__ import annotations

from typing import Any

import torch

from trtllm_b12x.core import log
from trtllm_b12x.formats import DEFAULT_LAYOUT
from trtllm_b12x.formats.nvfp4 import InputScales, NVFP4Weights
from trtllm_b12x.formats.weights import Epilogue

from .experts import Experts


class NVFP4Experts(Experts):
    """NVFP4 experts with our own alphas and SwiGLU constants, 8 E float32.

    SGLang applies gate's alpha to both FC1 halves and recreates the constants. Loads write ours in place for captured graphs.
    """

    format = "NVFP4"
    layout = DEFAULT_LAYOUT
    parameters = (
        *("w13_weight", "w2_weight", "w13_blockscale_swizzled", "w2_blockscale_swizzled"),
        *("w13_input_scale_quant", "w2_input_scale_quant", "g1_alphas_up", "g1_alphas", "g2_alphas"),
    )
    _own: torch.Tensor | None = None
    """``(8, E)`` float32: FC1's alphas of up, of gate, and the larger; the divisors of inputs; SwiGLU's constants."""

    def refusal(self, layer: Any) -> str:
        config = layer.moe_runner_config
        if not hasattr(layer, "_cutlass_swiglu_params") and (config.swiglu_limit or config.gemm1_clamp_limit):
            return "a limit of SwiGLU, which this version of SGLang does not hand to FlashInfer"
        return ""

    def constants(self, layer: Any) -> tuple[torch.Tensor, ...]:
        found: Any = vars(layer).get("_cutlass_swiglu_params")
        return () if found is None or found[2] is None else found

    def view(self, layer: Any, tensors: tuple[torch.Tensor, ...]) -> NVFP4Weights:
        w1, w2, codes_1, codes_2, scale_1, scale_2, up, gate, alpha_2, *constants = tensors
        if self._own is None or self._own.device != gate.device:
            self._own = torch.empty(8, *gate.shape, dtype=torch.float32, device=gate.device)
        larger, smaller = torch.maximum(up, gate), torch.minimum(up, gate)
        for row, values in zip(self._own, (up, gate, larger, gate, gate, *constants), strict=False):
            row.copy_(values)
        self.scale_ratio = float(torch.where(smaller > 0, larger / smaller, 1.0).max())
        if float(scale_1) == 1 == float(scale_2):
            log.once(
                "the checkpoint has no input scales: SGLang's flashinfer_cutlass, which serves prompts, rounds activations to "
                "FP4 by a scale of 1, with a relative error of about 0.17. Our kernels round none: 0.002"
            )
        inputs = InputScales(scale_1.view(-1), scale_2.view(-1), self._own[3], self._own[4])
        inputs.derive()
        found: Any = NVFP4Weights.on_storage(
            (w1, w2), (codes_1, codes_2), self.layout, fc1_alpha=self._own[2], fc2_alpha=alpha_2, input_scales=inputs,
            fc1_divisor=inputs.fc1_divisor, fc2_divisor=inputs.fc2_divisor,
            fc1_half_alphas=self._own[:2] if layer.moe_runner_config.is_gated else None,
            epilogue=Epilogue(None, None, *self._own[5 : 5 + len(constants)]),
        )  # fmt: skip
        return found
