"""``TritonMXFP8Kernel``: decode of MXFP8 layers, W8A16, by the launches of NVFP4's."""

from __future__ import annotations

from typing import Any

from trtllm_b12x.decision import Environment, families
from trtllm_b12x.formats import constants
from trtllm_b12x.kernels.reference import MXFP8UnquantizedReferenceKernel

from . import decode_launch
from .decode import TritonKernel, matrices, swiglu


class TritonMXFP8Kernel(TritonKernel):
    """Our own kernels on one layer of MXFP8."""

    features = families.triton_mxfp8(Environment())
    reference = MXFP8UnquantizedReferenceKernel
    word = 4

    def _of_layer(self, weights: Any, first_expert: int) -> dict[bool, decode_launch.Layer]:
        # Of scales that the format does not have, and of a bias, an address.
        none = constants.filled(1.0, (1,), weights.device)
        fc1, fc2 = matrices(weights)
        return {
            False: decode_launch.Layer(
                (*fc1, *[none] * 4, *swiglu(self.geometry, weights, none)), (*fc2, *[none] * 3), first_expert, (0, 0)
            )
        }
