# SPDX-License-Identifier: Apache-2.0
"""Emulate the ``torch.ops.trtllm.*`` operators of TensorRT-LLM in torch, on any device, with the same layouts and rounding.

Sources: ``cpp/tensorrt_llm/kernels/quantization.cuh`` (``cvt_warp_fp16_to_fp4`` and the 128x4 scale layout),
``cpp/tensorrt_llm/thop/fp4Op.cpp``, ``moeOp.cpp`` (shape checks) and ``kernels/cutlass_kernels/moe_gemm/moe_kernels.cu``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_b12x.formats import mxfp4, mxfp8
from trtllm_b12x.formats.layouts import scales_of_tokens
from trtllm_b12x.formats.nvfp4 import BLOCK_SIZE, E2M1_MAX, dequantize, pack_fp4, round_to_e2m1, round_to_e4m3

from .config import ActivationType, is_gated_activation


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def fp4_quantize(
    x: torch.Tensor, global_scale: torch.Tensor, is_sf_swizzled_layout: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations ``[T, H]``, H a multiple of 16, to NVFP4. ``global_scale`` is one float32, 448 * 6 / amax.

    Return FP4 bytes ``[T, H/2]`` (uint8) and flat E4M3 block scales (uint8): ``T * H/16`` row by row, or
    padded to 128 rows and 4 columns in the 128x4 layout.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK_SIZE))
    scale = global_scale.float()
    # The kernel multiplies by reciprocals, in this order. A division would round some scales differently.
    block_scale = round_to_e4m3(scale * (blocks.abs().amax(-1) * (1.0 / torch.tensor(E2M1_MAX))))
    stored = block_scale.float()
    inverse = torch.where(stored > 0, 1.0 / (stored * (1.0 / scale)), torch.zeros_like(stored))
    codes = round_to_e2m1(blocks * inverse.unsqueeze(-1)).flatten(-2)
    scales = block_scale.view(torch.uint8)
    return pack_fp4(codes), block_scale_interleave(scales) if is_sf_swizzled_layout else scales.flatten()


def mxfp8_quantize(x: torch.Tensor, is_sf_swizzled_layout: bool = True, alignment: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations to MXFP8: float8_e4m3fn ``[T, columns]``, zero-padded to ``alignment``, and flat uint8 E8M0 scales.

    A scale is ``amax / 448``, rounded up to a power of two (``cvt_warp_fp16_to_mxfp8``), in the 128x4 layout or row by row.
    """
    codes, scales = mxfp8.quantize(torch.nn.functional.pad(x.float(), (0, -x.shape[1] % alignment)), scale_up=True)
    return codes, block_scale_interleave(scales) if is_sf_swizzled_layout else scales.flatten()


def block_scale_interleave(block_scales: torch.Tensor) -> torch.Tensor:
    """Convert row-major block scales, uint8 ``[M, K]`` or ``[E, M, K]``, to the 128x4 layout, a flat tensor padded with zeros.

    Byte ``(m, k)`` of a group goes to ``((m // 128 * (K / 4) + k // 4) * 32 + m % 32) * 16 + (m % 128) // 32 * 4 + k % 4``.
    """
    scales = block_scales if block_scales.dim() == 3 else block_scales.unsqueeze(0)
    groups, rows, columns = scales.shape
    padded = scales.new_zeros(groups, _round_up(rows, 128), _round_up(columns, 4))
    padded[:, :rows, :columns] = scales
    tiles = padded.view(groups, padded.shape[1] // 128, 4, 32, padded.shape[2] // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).flatten()


def block_scale_interleave_reverse(block_scales: torch.Tensor) -> torch.Tensor:
    """Convert the 128x4 layout to row-major: ``[M, K]`` or ``[E, M, K]`` uint8, M % 128 == 0, K % 4 == 0, same shape out."""
    scales = block_scales if block_scales.dim() == 3 else block_scales.unsqueeze(0)
    groups, rows, columns = scales.shape
    tiles = scales.reshape(groups, rows // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(block_scales.shape)


def fused_moe(
    x: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor | None,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: Sequence[torch.Tensor],
    input_sf: torch.Tensor | None,
    swizzled_input_sf: bool,
    ep_size: int,
    ep_rank: int,
    activation_type: ActivationType,
    out_tensor: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    fc1_expert_biases: torch.Tensor | None = None,
    fc2_expert_biases: torch.Tensor | None = None,
    tp_rank: int = 0,
    unpadded_hidden_size: int | None = None,
) -> torch.Tensor:
    """Run the CUTLASS grouped GEMM path: NVFP4 (six ``quant_scales``), MXFP4 with MXFP8 activations (four) or unquantized (none).

    Gate and up are split at half of FC1's rows, whatever those rows hold (``moeOp.cpp``): padding below ``[w3; w1]`` moves the
    split. Round to bf16 after each GEMM and after the activation. Sum the routes in float32, as the unfused finalize does.
    Return ``[T, unpadded_hidden_size]`` in ``output_dtype``, ``out_tensor`` itself if passed. Raise ValueError if shapes do not
    match, in the cases that the C++ op checks.

    Args:
        x: NVFP4: FP4 bytes ``[T, H/2]`` with ``input_sf`` (flat or ``[T, H/16]`` uint8); MXFP4: E4M3 ``[T, H]`` with ``input_sf``
            (flat or ``[T, H/32]``); unquantized: ``[T, H]``.
        token_selected_experts: ``[T, k]`` integers, global ids; ids of other ranks and out of range are skipped.
        token_final_scales: ``[T, k]`` float32, or None for ones.
        fc1_expert_weights: FP4 ``[E, R, H/16]`` int64, unquantized ``[E, R, H]``; rows ``[w3; w1]``, or only w1.
        fc2_expert_weights: FP4 ``[E, H, I/16]`` int64, unquantized ``[E, H, I]``.
        swiglu_alpha, swiglu_beta, swiglu_limit: ``[E]`` float32; if one is set, the activation is SwigluBias.
        fc1_expert_biases, fc2_expert_biases: ``[E, R]`` and ``[E, H]``; only ``tp_rank`` 0 adds the second, as in
            ``finalizeMoeRoutingKernelLauncher``.
    """
    nvfp4 = len(quant_scales) == 6
    constants = (swiglu_alpha, swiglu_beta, swiglu_limit)
    for name, tensor in zip(("swiglu_alpha", "swiglu_beta", "swiglu_limit"), constants, strict=True):
        if tensor is not None:
            if tensor.dtype is not torch.float32 or tensor.shape[0] != fc1_expert_weights.shape[0]:
                raise ValueError(f"{name} must be float32 and have num_experts_on_rank elements")
            activation_type = ActivationType.SwigluBias
    gated = is_gated_activation(activation_type)
    num_local = fc1_expert_weights.shape[0]
    inter_size = fc2_expert_weights.shape[2] * (16 if quant_scales else 1)
    if fc1_expert_weights.shape[1] != inter_size * (2 if gated else 1):
        raise ValueError(
            f"fc1_expert_weights has {fc1_expert_weights.shape[1]} rows, fc2_expert_weights an inner size of {inter_size}: "
            f"{'2 x' if gated else ''} inter_size expected"
        )
    tokens = token_selected_experts.shape[0]
    hidden = fc2_expert_weights.shape[1]
    rounded = output_dtype if quant_scales else x.dtype
    x_codes = x
    if quant_scales:
        block, dtype = (BLOCK_SIZE, torch.float8_e4m3fn) if nvfp4 else (mxfp4.BLOCK_SIZE, torch.uint8)
        scales1, scales2 = quant_scales[1::3] if nvfp4 else quant_scales[::2]
        sf1 = _expert_scales(scales1, fc1_expert_weights.shape[1], hidden, block).view(dtype)
        sf2 = _expert_scales(scales2, hidden, inter_size, block).view(dtype)
        assert input_sf is not None
        x_scales = scales_of_tokens(input_sf, tokens, hidden // block, swizzled_input_sf)
        x_codes = dequantize(x.view(torch.uint8), x_scales.view(dtype)) if nvfp4 else mxfp8.dequantize(x, x_scales)
    result = torch.zeros(tokens, hidden, dtype=torch.float32, device=x.device)
    for local in range(num_local):
        token, slot = (token_selected_experts == local + ep_rank * num_local).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        fc1, fc2 = fc1_expert_weights[local], fc2_expert_weights[local]
        if quant_scales:
            decode = dequantize if nvfp4 else mxfp4.dequantize
            fc1, fc2 = decode(fc1.view(torch.uint8), sf1[local]), decode(fc2.view(torch.uint8), sf2[local])
        fc1_scale, fc2_scale = (quant_scales[2][local], quant_scales[5][local]) if nvfp4 else (1.0, 1.0)
        inner = ((x_codes[token].float() @ fc1.float().T) * fc1_scale).to(rounded).float()
        if fc1_expert_biases is not None:
            inner = inner + fc1_expert_biases[local].float()
        local_constants = (None if tensor is None else tensor[local] for tensor in constants)
        inner = _activate(inner, activation_type, *local_constants).to(rounded).float()
        if nvfp4:
            packed, sf = fp4_quantize(inner, quant_scales[3].expand(num_local)[local], is_sf_swizzled_layout=False)
            inner = dequantize(packed, sf.view(torch.float8_e4m3fn).view(inner.shape[0], -1))
        elif quant_scales:
            codes, sf = mxfp8_quantize(inner, is_sf_swizzled_layout=False)
            inner = mxfp8.dequantize(codes, sf.view(inner.shape[0], -1))
        partial = ((inner @ fc2.float().T) * fc2_scale).to(rounded).float()
        if fc2_expert_biases is not None and tp_rank == 0:
            partial = partial + fc2_expert_biases[local].float()
        if token_final_scales is not None:
            partial = partial * token_final_scales[token, slot].float().unsqueeze(-1)
        result.index_add_(0, token, partial)
    result = result[:, :unpadded_hidden_size]
    if out_tensor is None:
        return result.to(output_dtype)
    if out_tensor.shape != result.shape or out_tensor.dtype != output_dtype:
        raise ValueError(
            f"out_tensor is {tuple(out_tensor.shape)} {out_tensor.dtype}, expected {tuple(result.shape)} {output_dtype}"
        )
    return out_tensor.copy_(result)


def _activate(
    fc1_output: torch.Tensor,
    activation_type: ActivationType,
    alpha: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    limit: torch.Tensor | None = None,
) -> torch.Tensor:
    if activation_type == ActivationType.Relu2:
        return torch.relu(fc1_output) ** 2
    up, gate = fc1_output.chunk(2, dim=-1)
    if activation_type == ActivationType.SwigluBias:
        if limit is not None:
            up, gate = torch.maximum(torch.minimum(up, limit), -limit), torch.minimum(gate, limit)
        return gate * torch.sigmoid(gate if alpha is None else alpha * gate) * (up if beta is None else up + beta)
    if activation_type == ActivationType.Swiglu:
        return torch.nn.functional.silu(gate) * up
    if activation_type == ActivationType.Geglu:
        return torch.nn.functional.gelu(gate) * up  # exact GELU, as in CUTLASS (``moe_kernels.cu``)
    raise ValueError(
        f"the embedded host computes Swiglu, SwigluBias, Geglu and Relu2, not {ActivationType(activation_type).name}"
    )


def _expert_scales(block_scales: torch.Tensor, rows: int, columns: int, block: int) -> torch.Tensor:
    """Convert int32 interleaved block scales ``[E, ...]`` to row-major bytes ``[E, rows, columns/block]``."""
    groups = block_scales.shape[0]
    padded = (_round_up(rows, 128), _round_up(columns // block, 4))
    plain = block_scale_interleave_reverse(block_scales.view(torch.uint8).reshape(groups, *padded))
    return plain[:, :rows, : columns // block].contiguous()
