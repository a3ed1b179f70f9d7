"""MXFP8 layers in torch, on the CPU and any GPU: the grouped kernels' rounding points, and those of the kernels for decode."""

from __future__ import annotations

import dataclasses

import torch

from trtllm_b12x.decision import Environment, families
from trtllm_b12x.formats.mxfp8 import BLOCK_SIZE, MXFP8Weights, dequantize, quantize

from .reference import ReferenceKernel


class MXFP8ReferenceKernel(ReferenceKernel):
    """W8A8: tokens and FC1's result (in bf16) to MXFP8, each route's share to bf16, sums in float32."""

    features = dataclasses.replace(families.grouped(Environment()), name="reference W8A8", graph_safe=False)
    multiple = BLOCK_SIZE
    weights: MXFP8Weights

    def _add(self, result: torch.Tensor, expert: int, token: torch.Tensor, x: torch.Tensor, router_weights: torch.Tensor) -> None:
        fc1 = self._rounded(x) @ self.weights.matrix(expert, "fc1_weight").T
        inner = self._activated(expert, fc1).to(torch.bfloat16)
        share = self._rounded(inner) @ self.weights.matrix(expert, "fc2_weight").T * router_weights.unsqueeze(-1)
        result.index_add_(0, token, self._share(share))

    @staticmethod
    def _rounded(values: torch.Tensor) -> torch.Tensor:
        return dequantize(*quantize(values))

    @staticmethod
    def _share(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.bfloat16).float()


class MXFP8UnquantizedReferenceKernel(MXFP8ReferenceKernel):
    """W8A16: activations as they are, bf16 between the products."""

    features = dataclasses.replace(families.triton_mxfp8(Environment()), name="reference W8A16", graph_safe=False)

    @staticmethod
    def _rounded(values: torch.Tensor) -> torch.Tensor:
        return values.float()

    @staticmethod
    def _share(values: torch.Tensor) -> torch.Tensor:
        return values
