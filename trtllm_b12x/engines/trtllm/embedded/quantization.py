# SPDX-License-Identifier: Apache-2.0
"""Create and load weights as ``fused_moe/quantization.py`` of TensorRT-LLM does for CUTLASS.

Hook names, their order, shapes and dtypes follow 1.2 and 1.3, with the row padding of 1.3 and, for ReLU2, the w1-only variant
of later versions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from trtllm_b12x.formats.nvfp4 import dequantize

from .config import MoEWeightLoadingMode
from .ops import block_scale_interleave

NVFP4_ROW_ALIGNMENT = 128


class TensorParallelMode(str, Enum):
    COLUMN = "column"
    ROW = "row"


def load_weight_shard(
    weight: torch.Tensor,
    tensor_parallel_size: int = 1,
    tensor_parallel_rank: int = 0,
    tensor_parallel_mode: TensorParallelMode | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return this rank's slice of ``weight`` (rows for COLUMN, columns for ROW), cut as in ``modules/linear.py``."""
    if tensor_parallel_mode is None or tensor_parallel_size <= 1:
        return weight.to(device)
    dim = 1 if tensor_parallel_mode is TensorParallelMode.ROW else 0
    width = math.ceil(weight.shape[dim] / tensor_parallel_size)
    start = tensor_parallel_rank * width
    return weight.narrow(dim, start, min(width, weight.shape[dim] - start)).to(device)


def _register(module: Any, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        module.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))


class FusedMoEMethodBase:
    def create_weights(
        self,
        module: Any,
        weight_dtype: torch.dtype,
        w3_w1_weight_shape: tuple[int, int, int],
        w2_weight_shape: tuple[int, int, int],
        *bias_shapes: tuple[int, int],
    ) -> None:
        fc1, fc2 = (torch.empty(shape, dtype=weight_dtype) for shape in (w3_w1_weight_shape, w2_weight_shape))
        if module.bias and not bias_shapes:
            raise NotImplementedError("the embedded host has expert bias in MXFP4 alone")
        bias1, bias2 = (torch.empty(shape, dtype=module.dtype) for shape in bias_shapes) if module.bias else (None, None)
        _register(module, w3_w1_weight=fc1, w2_weight=fc2, w3_w1_bias=bias1, w2_bias=bias2)

    def load_weights(self, module: Any, weights: Mapping[str, torch.Tensor], weight_loading_mode: MoEWeightLoadingMode) -> None:
        if weight_loading_mode is not MoEWeightLoadingMode.VANILLA:
            raise NotImplementedError(f"the embedded host loads per-expert tensors, not {weight_loading_mode}")
        for slot, expert in enumerate(module.initial_local_expert_ids):
            self.load_expert_w3_w1_weight(
                module, weights[f"{expert}.w1.weight"], _up(module, weights, expert, "weight"), module.w3_w1_weight.data[slot]
            )
            self.load_expert_w2_weight(module, weights[f"{expert}.w2.weight"], module.w2_weight.data[slot])
            if module.bias:
                gate, up, down = (weights[f"{expert}.{half}.bias"] for half in ("w1", "w3", "w2"))
                self.load_expert_w3_w1_weight(module, gate, up, module.w3_w1_bias.data[slot])
                self.load_expert_w2_weight(module, down, module.w2_bias.data[slot])
        self.load_quant_scales(module, weights)

    def post_load_weights(self, module: Any) -> None:
        self.setup_quant_scales(module)

    def load_quant_scales(self, module: Any, weights: Mapping[str, torch.Tensor]) -> None:
        pass

    def setup_quant_scales(self, module: Any) -> None:
        module.quant_scales = ()

    def load_expert_w3_w1_weight(
        self, module: Any, w1_weight: torch.Tensor, w3_weight: torch.Tensor, dst_w3_w1_weight: torch.Tensor
    ) -> None:
        rank = module.tp_size, module.tp_rank, TensorParallelMode.COLUMN, dst_w3_w1_weight.device
        halves = [load_weight_shard(half, *rank) for half in (w3_weight, w1_weight)]
        _copy_padded(torch.cat(halves), dst_w3_w1_weight)

    def load_expert_w2_weight(self, module: Any, w2_weight: torch.Tensor, dst_w2_weight: torch.Tensor) -> None:
        shard = load_weight_shard(w2_weight, module.tp_size, module.tp_rank, TensorParallelMode.ROW, dst_w2_weight.device)
        _copy_padded(shard, dst_w2_weight)


def _up(module: Any, weights: Mapping[str, torch.Tensor], expert: int, kind: str) -> torch.Tensor:
    """Return w3. Without a gate, return w1 with zero rows, as TensorRT-LLM's Nemotron-H weight mapper makes it."""
    if module.is_gated_activation:
        return weights[f"{expert}.w3.{kind}"]
    return weights[f"{expert}.w1.{kind}"][:0]


def _copy_padded(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy bytes into the upper left corner of a 2-D ``destination`` of any dtype. Zero the rest."""
    target = destination.view(torch.uint8)
    data = source.contiguous().view(torch.uint8)
    if target.shape != data.shape:
        target.zero_()
    target[: data.shape[0], : data.shape[1]].copy_(data)


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    def create_weights(self, module: Any) -> None:  # type: ignore[override]
        size = module.intermediate_size_per_partition
        experts, hidden, rows = module.expert_size_per_partition, module.hidden_size, size * (1 + module.is_gated_activation)
        super().create_weights(module, module.dtype, (experts, rows, hidden), (experts, hidden, size))
        self.setup_quant_scales(module)


class MXFP8CutlassFusedMoEMethod(FusedMoEMethodBase):
    """Base of our MXFP8 method. TensorRT-LLM creates such parameters only for SM100 and SM103."""


class NVFP4CutlassFusedMoEMethod(FusedMoEMethodBase):
    """Method for FP4 codes, 128x4-interleaved block scales, reciprocal input scales and alphas.

    Shapes and dtypes are those of ``NVFP4Sm12xFusedMoEMethod`` with T = round_up(r * I, 128) / r. Zero rows follow the rows
    [w3; w1], and zero columns end w2. ``fcX_input_scale`` is 1 / max of ``input_scale`` over all experts of the
    model, ``fcX_alpha`` is ``weight_scale_2 / fcX_input_scale``.
    """

    def create_weights(self, module: Any) -> None:  # type: ignore[override]
        module.scaling_vector_size = 16
        experts, hidden = module.expert_size_per_partition, module.hidden_size
        ratio = 1 + module.is_gated_activation
        rows = -(-module.intermediate_size_per_partition * ratio // NVFP4_ROW_ALIGNMENT) * NVFP4_ROW_ALIGNMENT
        inner = rows // ratio
        _register(
            module,
            w3_w1_weight_scale=torch.ones(experts, rows, hidden // 64, dtype=torch.int32),
            w2_weight_scale=torch.ones(experts, hidden, inner // 64, dtype=torch.int32),
            fc31_input_scale=torch.tensor(1.0, dtype=torch.float32),
            fc2_input_scale=torch.tensor(1.0, dtype=torch.float32),
            fc31_alpha=torch.ones(experts, dtype=torch.float32),
            fc2_alpha=torch.ones(experts, dtype=torch.float32),
        )
        super().create_weights(module, torch.int64, (experts, rows, hidden // 16), (experts, hidden, inner // 16))
        self.setup_quant_scales(module)

    def load_quant_scales(self, module: Any, weights: Mapping[str, torch.Tensor]) -> None:
        halves = ("w1", "w3") if module.is_gated_activation else ("w1",)
        every = range(module.num_experts)
        if "0.w2.input_scale" in weights:  # without input scales the parameters stay 1, as in 2026's versions
            # Read the scales of all experts, because every rank must quantize the same tokens identically.
            fc31 = torch.stack([weights[f"{e}.{w}.input_scale"].reshape(()) for e in every for w in halves])
            pairs = fc31.view(-1, len(halves))
            assert torch.allclose(pairs, pairs[:, :1]), "w1_input_scale != w3_input_scale"
            fc2 = torch.stack([weights[f"{e}.w2.input_scale"].reshape(()) for e in every])
            module.fc31_input_scale.data.copy_(fc31.float().max().reciprocal())
            module.fc2_input_scale.data.copy_(fc2.float().max().reciprocal())
        alpha1, alpha2 = module.fc31_alpha.data, module.fc2_alpha.data
        for slot, expert in enumerate(module.initial_local_expert_ids):
            up = _up(module, weights, expert, "weight_scale")
            gate, down = (weights[f"{expert}.{w}.weight_scale"] for w in ("w1", "w2"))
            self.load_expert_w3_w1_weight_scale_nvfp4(module, gate, up, module.w3_w1_weight_scale.data[slot])
            self.load_expert_w2_weight_scale_nvfp4(module, down, module.w2_weight_scale.data[slot])
            # As in TensorRT-LLM: use the larger of the two and keep the block scales.
            scale_2 = torch.stack([weights[f"{expert}.{w}.weight_scale_2"].reshape(()).float() for w in halves]).max()
            alpha1[slot].copy_(1.0 / (module.fc31_input_scale.data * (1.0 / scale_2.to(alpha1.device))))
            scale_2 = weights[f"{expert}.w2.weight_scale_2"].reshape(()).float().to(alpha2.device)
            alpha2[slot].copy_(1.0 / (module.fc2_input_scale.data * (1.0 / scale_2)))

    def setup_quant_scales(self, module: Any) -> None:
        # ``ops.fused_moe`` takes this order: input scale, block scales and alpha of FC1, then those of FC2.
        fc1 = module.fc31_input_scale, module.w3_w1_weight_scale, module.fc31_alpha
        module.quant_scales = (*fc1, module.fc2_input_scale, module.w2_weight_scale, module.fc2_alpha)

    def load_expert_w3_w1_weight_scale_nvfp4(
        self, module: Any, w1_weight_scale: torch.Tensor, w3_weight_scale: torch.Tensor, dst_w3_w1_weight_scale: torch.Tensor
    ) -> None:
        # The rows match those of the weights, so copy them in the same way, then interleave.
        self.load_expert_w3_w1_weight(module, w1_weight_scale, w3_weight_scale, dst_w3_w1_weight_scale)
        self._order_scales(dst_w3_w1_weight_scale)

    def load_expert_w2_weight_scale_nvfp4(
        self, module: Any, w2_weight_scale: torch.Tensor, dst_w2_weight_scale: torch.Tensor
    ) -> None:
        self.load_expert_w2_weight(module, w2_weight_scale, dst_w2_weight_scale)
        self._order_scales(dst_w2_weight_scale)

    def _order_scales(self, block_scales: torch.Tensor) -> None:
        _interleave(block_scales)


class W4A16NVFP4CutlassFusedMoEMethod(NVFP4CutlassFusedMoEMethod):
    """Method for NVFP4 weights with row-major block scales and 16-bit activations. Every call dequantizes the experts."""

    def _order_scales(self, block_scales: torch.Tensor) -> None:
        """Leave the scales row-major."""

    def dequant_active_experts_to_hp(
        self, module: Any, token_selected_experts: torch.Tensor, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write every expert, ``(E, rows, K)``. TensorRT-LLM writes only experts with tokens (``triton_dequant_nvfp4.py``)."""
        found = []
        for name, fc in (("w3_w1", "fc31"), ("w2", "fc2")):
            codes, scales = (getattr(module, f"{name}_{kind}").data for kind in ("weight", "weight_scale"))
            scale_2 = getattr(module, f"{fc}_alpha").data * getattr(module, f"{fc}_input_scale").data
            values = dequantize(codes.view(torch.uint8), scales.view(torch.float8_e4m3fn))
            found.append((values * scale_2.view(-1, 1, 1)).to(out_dtype))
        return found[0], found[1]


class MXFP4Tensors:
    """Mixin with the parameters and load hooks of ``W4A8MXFP4MXFP8CutlassFusedMoEMethod``, for any ``FusedMoEMethodBase``.

    Shapes and dtypes are those of ``MXFP4Sm12xFusedMoEMethod``. Rows and columns are padded before they are cut for tensor
    parallelism (1.2, file 287529276; commit 02320c35).
    """

    weight_alignment = 128

    def create_weights(self, module: Any) -> None:
        module.scaling_vector_size = 32
        experts, align = module.expert_size_per_partition, self.weight_alignment
        size, hidden = (-(-value // align) * align for value in (module.intermediate_size_per_partition, module.hidden_size))
        _register(
            module,
            fake_input_scale=torch.empty(experts, dtype=torch.float32),
            w3_w1_weight_scale=torch.empty(experts, 2 * size, hidden // 128, dtype=torch.int32),
            w2_weight_scale=torch.empty(experts, hidden, size // 128, dtype=torch.int32),
        )
        weights = (experts, 2 * size, hidden // 16), (experts, hidden, size // 16)
        super().create_weights(module, torch.int64, *weights, (experts, 2 * size), (experts, hidden))  # type: ignore[misc]
        self.setup_quant_scales(module)

    def load_expert_w3_w1_weight(
        self, module: Any, w1_weight: torch.Tensor, w3_weight: torch.Tensor, dst_w3_w1_weight: torch.Tensor
    ) -> None:
        for half, destination in zip((w3_weight, w1_weight), dst_w3_w1_weight.chunk(2), strict=True):
            _copy_shard(module, half, 0, destination)

    def load_expert_w2_weight(self, module: Any, w2_weight: torch.Tensor, dst_w2_weight: torch.Tensor) -> None:
        _copy_shard(module, w2_weight, 1, dst_w2_weight)

    def load_quant_scales(self, module: Any, weights: Mapping[str, torch.Tensor]) -> None:
        module.fake_input_scale.data.fill_(1.0)
        for slot, expert in enumerate(module.initial_local_expert_ids):
            gate, up, down = (weights[f"{expert}.{half}.weight_scale"] for half in ("w1", "w3", "w2"))
            self.load_expert_w3_w1_weight(module, gate, up, module.w3_w1_weight_scale.data[slot])
            self.load_expert_w2_weight(module, down, module.w2_weight_scale.data[slot])
            _interleave(module.w3_w1_weight_scale.data[slot])
            _interleave(module.w2_weight_scale.data[slot])

    def setup_quant_scales(self, module: Any) -> None:
        fake = module.fake_input_scale
        module.quant_scales = (module.w3_w1_weight_scale, fake, module.w2_weight_scale, fake)


def _copy_shard(module: Any, tensor: torch.Tensor, dim: int, destination: torch.Tensor) -> None:
    """Copy this rank's part of a padded matrix or bias. FC2's bias is not cut."""
    if tensor.dim() == 2:
        tensor, destination = tensor.view(torch.uint8), destination.view(torch.uint8)
    sizes, start = list(destination.shape), 0
    if dim < tensor.dim():
        start = module.tp_rank * sizes[dim]
        sizes[dim] *= module.tp_size
    padding = [side for size, own in zip(reversed(sizes), reversed(tensor.shape), strict=True) for side in (0, size - own)]
    padded = nn.functional.pad(tensor, padding)
    destination.copy_(padded.narrow(dim, start, destination.shape[dim]) if dim < tensor.dim() else padded)


class W4A8MXFP4MXFP8CutlassFusedMoEMethod(MXFP4Tensors, FusedMoEMethodBase):  # type: ignore[misc]
    """Method for FP4 codes with E8M0 scales of 32 elements, and activations in MXFP8."""


def _interleave(block_scales: torch.Tensor) -> None:
    interleaved = block_scale_interleave(block_scales.view(torch.uint8))
    block_scales.copy_(interleaved.view(block_scales.dtype).reshape(block_scales.shape))
