# SPDX-License-Identifier: Apache-2.0
"""Define ``MXFP4Sm12xFusedMoEMethod``: TensorRT-LLM's unchanged MXFP4 parameters, and the kernels' view of them."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch

from trtllm_b12x.formats import constants
from trtllm_b12x.formats.mxfp4 import LARGEST_SCALE, largest_scale
from trtllm_b12x.formats.weights import Epilogue, Weights

from .host import load
from .quantization import Method

W4A8MXFP4MXFP8CutlassFusedMoEMethod: Any = load().methods.get("MXFP4", object)

_BIASES = ("w3_w1_bias", "w2_bias")


class MXFP4Sm12xFusedMoEMethod(Method, W4A8MXFP4MXFP8CutlassFusedMoEMethod):
    """MXFP4 method for our kernels. TensorRT-LLM creates and loads the tensors, and reads them with MXFP8 activations.

    With E local experts, T = round_up(I, 128) and Hp = round_up(H, 128): ``w3_w1_weight (E, 2T, Hp/16)`` and ``w2_weight (E, Hp,
    T/16)`` int64; ``w3_w1_weight_scale (E, 2T, Hp/128)`` and ``w2_weight_scale (E, Hp, T/128)`` int32, four E8M0 each, 128x4-
    interleaved per expert; ``w3_w1_bias (E, 2T)`` and ``w2_bias (E, Hp)``. Each half is padded to ``tp_size * T`` before it is
    cut, so that a rank may hold more real rows than I, or none (``MXFP4WeightCutlassFusedMoEMethod``, ``quantization.py`` of
    commit 02320c35).
    """

    format = "MXFP4"
    read_by_kernels = itemgetter(*Method.stored)

    @torch.no_grad()
    def fill(self, module: Any, generator: torch.Generator) -> None:
        super().fill(module, generator)
        module.fake_input_scale.fill_(1.0)
        for name in _BIASES if module.bias else ():
            getattr(module, name).data.normal_(0, 0.1, generator=generator)

    def create_weights(self, module: Any) -> None:
        super().create_weights(module)
        if module.bias:
            self.read_by_kernels = itemgetter(*self.stored, *_BIASES)

    def check(self, module: Any) -> None:
        for name in self.stored[2:]:
            if largest_scale(getattr(module, name).data) > LARGEST_SCALE:
                raise ValueError(
                    f"{name} holds scales above 2**{LARGEST_SCALE - 127}, the largest that the decode kernels multiply by"
                )

    def kernel_weights(self, module: Any) -> Weights:
        return self._views(module, _BIASES, epilogue=self._biases(module)) if module.bias else self._views(module)

    def _biases(self, module: Any) -> Epilogue:
        """Return the biases. Only tensor-parallel rank 0 applies FC2's bias (``finalizeMoeRoutingKernelLauncher``)."""
        fc1, fc2 = module.w3_w1_bias.data, module.w2_bias.data
        if module.tp_rank:
            form = {"dtype": fc2.dtype, "device": fc2.device}
            shape = tuple(fc2.shape)
            fc2 = constants.kept(("zeros", shape, *form.values()), lambda: torch.zeros(shape, **form), fc2.device)
        return Epilogue(fc1_bias=fc1, fc2_bias=fc2)
