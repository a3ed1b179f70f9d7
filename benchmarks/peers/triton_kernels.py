# SPDX-License-Identifier: Apache-2.0
"""OpenAI's triton_kernels on MXFP4 experts, W4A16, as vLLM calls it for gpt-oss.

A call routes from logits (top-k, softmax, sorting), then runs FC1 with fused SwiGLU, and FC2 with the router weights and the
sum over routes. Its weights are separate random MXFP4 codes. The logits give the ids and router weights of the other kernels.
The SwiGLU multiplies by ``up + 1``, on Qwen's layers too.

Read in vLLM 0.22.1: ``third_party/triton_kernels``, ``fused_moe/experts/gpt_oss_triton_kernels_moe.py`` (calls, capabilities) and
``quantization/utils/mxfp4_utils.py`` (layouts, ``split_k`` of 1 on Hopper).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import parts
from benchmarks.peers.layers import LIMIT
from trtllm_b12x.kernels import Geometry

_ABSENT = -30.0
"""Logit of an expert that the token is not routed to."""


def lacks(geometry: Geometry, vllm: Path | None) -> str:
    """Return why the layer cannot be measured, or an empty string."""
    if geometry.format not in ("NVFP4", "W4A16_NVFP4", "MXFP4") or geometry.activation not in ("Swiglu", "SwigluBias"):
        return f"this comparison has no {geometry.format} layer with {geometry.activation}"
    if geometry.top_k & (geometry.top_k - 1):  # its kernels call tl.arange(0, top_k), which needs a power of two
        return f"its routing does not support top {geometry.top_k}"
    if vllm is None:
        return parts.MISSING
    major, minor = torch.cuda.get_device_capability()
    if not (9, 0) <= (major, minor) < (11, 0):
        return f"vLLM runs it on capability 9.0 to 10.x, this is {major}.{minor}"
    return parts.load_triton_kernels(vllm)


def _module(name: str) -> Any:
    return importlib.import_module(f"triton_kernels.{name}")


class Matrix:
    """MXFP4 weights ``(E, K, N)`` in the layout for this GPU."""

    def __init__(self, experts: int, inner: int, columns: int, seed: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def drawn(first: int, last: int, size: int) -> torch.Tensor:
            values = torch.randint(first, last, (experts, columns, size), dtype=torch.uint8, device=device, generator=generator)
            return values.transpose(1, 2)

        self.codes, self.scales = drawn(0, 256, inner // 2), drawn(116, 121, -(-inner // 32))
        tensor, layout = _module("tensor"), _module("tensor_details.layout")
        values, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        self.weight = tensor.convert_layout(tensor.wrap_torch_tensor(self.codes, dtype=tensor.FP4), values, **options)
        blocks, options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
        scales = tensor.convert_layout(tensor.wrap_torch_tensor(self.scales), blocks, **options)
        self.precision = _module("matmul_ogs").PrecisionConfig(weight_scale=scales)

    def dense(self, expert: int) -> torch.Tensor:
        """Return one expert's ``(K, N)`` in float32."""
        one = slice(expert, expert + 1)
        upcast = _module("numerics_details.mxfp").upcast_from_mxfp_torch
        values: torch.Tensor = upcast(self.codes[one], self.scales[one], torch.float32, axis=1)[0]
        return values


class TritonKernelsLayer:
    """One layer with its own weights."""

    def __init__(self, geometry: Geometry, seed: int, device: str = "cuda") -> None:
        g = self.geometry = geometry
        columns = 2 * g.intermediate_size
        self.first = Matrix(g.num_experts, g.hidden_size, columns, 2 * seed, device)
        self.second = Matrix(g.num_experts, g.intermediate_size, g.hidden_size, 2 * seed + 1, device)
        self.bias_1, self.bias_2 = (
            torch.rand(g.num_experts, width, device=device) - 0.5 if g.bias is not None else None
            for width in (columns, g.hidden_size)
        )
        matmul = _module("matmul_ogs")
        self.constants = (1.702, LIMIT) if g.activation == "SwigluBias" else (1.0, 1e6)
        specs = matmul.FnSpecs("swiglu", _module("swiglu").swiglu_fn, ("alpha", "limit"))
        self.activation = matmul.FusedActivation(specs, self.constants, 2)
        stored = (self.first.codes, self.first.scales, self.second.codes, self.second.scales)
        self.expert_bytes = sum(part.nbytes for part in stored) / g.num_experts

    def prepare(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> tuple[Any, ...]:
        logits = torch.full((len(x), self.geometry.num_experts), _ABSENT, device=x.device)
        logits.scatter_(1, ids.long(), router_weights.float().log())
        return x, logits

    def output(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        data, gather, scatter = _module("routing").routing(logits, self.geometry.top_k)
        matmul = _module("matmul_ogs").matmul_ogs
        inner = matmul(
            x,
            self.first.weight,
            self.bias_1,
            data,
            gather_indx=gather,
            precision_config=self.first.precision,
            fused_activation=self.activation,
        )
        result: torch.Tensor = matmul(
            inner,
            self.second.weight,
            self.bias_2,
            data,
            scatter_indx=scatter,
            precision_config=self.second.precision,
            gammas=data.gate_scal,
        )
        return result

    def expected(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> torch.Tensor:
        (alpha, limit), result = self.constants, torch.zeros(x.shape, device=x.device)
        for e in ids.unique().tolist():
            token, slot = (ids == e).nonzero(as_tuple=True)
            inner = x[token].float() @ self.first.dense(e) + (0 if self.bias_1 is None else self.bias_1[e])
            gate, up = inner[:, 0::2].clamp(max=limit), inner[:, 1::2].clamp(-limit, limit)
            inner = gate * torch.sigmoid(alpha * gate) * (up + 1)
            output = inner @ self.second.dense(e) + (0 if self.bias_2 is None else self.bias_2[e])
            result.index_add_(0, token, output * router_weights[token, slot].unsqueeze(1))
        return result


def layers(geometry: Geometry, ours: Sequence[Any]) -> list[TritonKernelsLayer]:
    major, _ = torch.cuda.get_device_capability()
    constraints = {"split_k": 1} if major == 9 else {"is_persistent": True, "epilogue_subtile": 1}
    _module("matmul_ogs_details.opt_flags").update_opt_flags_constraints(constraints)
    return [TritonKernelsLayer(geometry, seed) for seed in range(len(ours))]
