# SPDX-License-Identifier: Apache-2.0
"""Draw one MoE layer's tensors on any device, as the package hands them to FlashInfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x import kernels
from trtllm_b12x.engines.trtllm.embedded.ops import block_scale_interleave
from trtllm_b12x.formats import DEFAULT_LAYOUT
from trtllm_b12x.formats.layouts import mma_scale_view
from trtllm_b12x.formats.nvfp4 import NVFP4Weights, pack_fp4, round_to_e2m1, round_to_e4m3
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.reference import ReferenceKernel
from trtllm_b12x.tools.verify import draw_activations
from trtllm_b12x.tools.verify.reference import MoECall
from trtllm_b12x.tools.verify.reference_formats import move_off_ties

TILE = ReferenceKernel.features.tile
_OFF_TIES = 1.0413579
"""Calibrated scales are multiplied by it: no power of two, so that block scales of real numbers fall on no rounding tie."""


@dataclass(frozen=True)
class Shape:
    """One layer: E experts of which k per token, hidden size H, intermediate size I, SwiGLU or squared ReLU."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    gated: bool

    @property
    def padded(self) -> int:
        return -(-self.intermediate_size // TILE) * TILE

    @property
    def activation(self) -> str:
        return "silu" if self.gated else "relu2"

    @property
    def geometry(self) -> Geometry:
        """As the package has it, on the tile."""
        activation = "Swiglu" if self.gated else "Relu2"
        return Geometry(self.num_experts, self.top_k, self.hidden_size, self.padded, activation)


@dataclass
class Layer:
    shape: Shape
    checkpoint: dict[str, torch.Tensor]
    """By the host's names, for :mod:`trtllm_b12x.tools.verify.reference`."""
    weights: NVFP4Weights


def draw(shape: Shape, device: torch.device | str, seed: int = 0) -> Layer:
    """Normal weights of differing spread per expert, quantized as ModelOpt does; input scales calibrated on 64 tokens."""
    generator = torch.Generator(device=device).manual_seed(seed)
    names = ("w1", "w3", "w2") if shape.gated else ("w1", "w2")
    checkpoint: dict[str, torch.Tensor] = {}
    x = torch.randn(64, shape.hidden_size, device=device, generator=generator)
    fc1_scale = x.abs().max() * _OFF_TIES / 2688
    largest = torch.zeros((), device=device)
    for expert in range(shape.num_experts):
        spread = 0.02 * (1 + torch.rand((), device=device, generator=generator))
        plain = {}
        for name in names:
            size = (shape.intermediate_size, shape.hidden_size)
            plain[name] = torch.randn(size[::-1] if name == "w2" else size, device=device, generator=generator) * spread
        shared = max(plain[name].abs().max() for name in names if name != "w2") / 2688
        for name, weight in plain.items():
            scale = weight.abs().max() / 2688 if name == "w2" else shared
            for kind, tensor in _quantize_weight(weight, scale).items():
                checkpoint[f"{expert}.{name}.{kind}"] = tensor
        inner = x @ plain["w1"].T
        inner = torch.nn.functional.silu(inner) * (x @ plain["w3"].T) if shape.gated else inner.relu().square()
        largest = torch.maximum(largest, inner.abs().max())
    for expert in range(shape.num_experts):
        for name in names:
            scale = largest * _OFF_TIES / 2688 if name == "w2" else fc1_scale
            checkpoint[f"{expert}.{name}.input_scale"] = scale
    return Layer(shape, checkpoint, kernel_weights(shape, checkpoint))


def _quantize_weight(weight: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    blocks = weight.unflatten(-1, (-1, 16))
    block_scale = round_to_e4m3(blocks.abs().amax(-1) / (6 * scale))
    codes = round_to_e2m1(blocks / (block_scale.float() * scale).clamp(min=1e-30).unsqueeze(-1))
    return {"weight": pack_fp4(codes.flatten(-2)), "weight_scale": block_scale, "weight_scale_2": scale}


def kernel_weights(shape: Shape, checkpoint: dict[str, torch.Tensor], baked: bool = False) -> NVFP4Weights:
    """What the package binds: rows [up; gate], each half on the tile, exact scales.

    ``baked``: what peers bind instead (vLLM PR 48536): ``weight_scale_2`` multiplied into the E4M3 block scales, and the
    input scales alone as alphas.
    """
    halves = ("w3", "w1") if shape.gated else ("w1",)
    tile = shape.padded

    def stacked(kind: str, per_column: int, fc2: bool) -> torch.Tensor:
        first = checkpoint[f"0.w1.{kind}"].view(torch.uint8)
        rows, columns = (shape.hidden_size, tile) if fc2 else (len(halves) * tile, shape.hidden_size)
        out = torch.zeros(shape.num_experts, rows, columns // per_column, dtype=torch.uint8, device=first.device)
        for expert in range(shape.num_experts):
            for half, name in enumerate(("w2",) if fc2 else halves):
                tensor = checkpoint[f"{expert}.{name}.{kind}"]
                if baked and kind == "weight_scale":
                    tensor = round_to_e4m3(tensor.float() * checkpoint[f"{expert}.{name}.weight_scale_2"])
                tensor = tensor.view(torch.uint8)
                out[expert, half * tile : half * tile + tensor.shape[0], : tensor.shape[1]] = tensor
        return out

    def scales(fc2: bool) -> torch.Tensor:
        rows, columns = (shape.hidden_size, tile) if fc2 else (len(halves) * tile, shape.hidden_size)
        return mma_scale_view(block_scale_interleave(stacked("weight_scale", 16, fc2)), rows, columns)

    def scalars(name: str, kind: str) -> torch.Tensor:
        return torch.stack([checkpoint[f"{e}.{name}.{kind}"].float().reshape(()) for e in range(shape.num_experts)])

    fc1, fc2 = scalars("w1", "input_scale").max(), scalars("w2", "input_scale").max()
    ones = torch.ones(shape.num_experts, device=fc1.device)
    fc1_scale, down = (ones if baked else scalars(name, "weight_scale_2") for name in ("w1", "w2"))
    return NVFP4Weights(
        fc1_weight=stacked("weight", 2, fc2=False),
        fc1_weight_sf=scales(fc2=False),
        fc1_alpha=fc1_scale * fc1,
        fc2_weight=stacked("weight", 2, fc2=True),
        fc2_weight_sf=scales(fc2=True),
        fc2_alpha=down * fc2,
        fc2_divisor=fc2.expand(shape.num_experts).contiguous(),
        fc1_divisor=fc1.expand(shape.num_experts).contiguous(),
    )


def empty_layer(shape: Shape) -> Layer:
    """Tensors of the right sizes on the CPU, never touched: what building a kernel takes."""
    sizes = ((2 if shape.gated else 1) * shape.padded, shape.hidden_size), (shape.hidden_size, shape.padded)

    def empty(per_byte: int) -> list[torch.Tensor]:
        return [torch.empty(shape.num_experts, rows, columns // per_byte, dtype=torch.uint8) for rows, columns in sizes]

    ones = dict.fromkeys(("fc1_alpha", "fc2_alpha", "fc1_divisor", "fc2_divisor"), torch.ones(shape.num_experts))
    weights: Any = NVFP4Weights.on_storage(empty(2), empty(16), DEFAULT_LAYOUT, **ones)
    return Layer(shape, {}, weights)


def draw_call(layer: Layer, tokens: int, seed: int) -> MoECall:
    """Activations off rounding ties with outlier channels, random experts."""
    shape, device = layer.shape, layer.weights.fc1_weight.device
    generator = torch.Generator().manual_seed(seed)
    scale = float(layer.weights.fc1_divisor[0])
    x = move_off_ties(draw_activations(tokens, shape.hidden_size, scale * 6 * 448, 0.97, generator), scale)
    ids = torch.rand(tokens, shape.num_experts, generator=generator).argsort(1)[:, : shape.top_k].int()
    router_weights = torch.softmax(torch.randn(tokens, shape.top_k, generator=generator), 1)
    return MoECall(x.to(device), ids.contiguous().to(device), router_weights.contiguous().to(device))


def wrapper(shape: Shape, device: str, capacity: int) -> Any:
    """FlashInfer's own wrapper; it owns its workspaces, for ``capacity`` tokens, as a captured graph needs it."""
    import flashinfer

    return flashinfer.B12xMoEWrapper(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.padded,
        use_cuda_graph=True,
        max_num_tokens=capacity,
        activation=shape.activation,
        device=device,
    )


def arguments(weights: NVFP4Weights) -> dict[str, torch.Tensor]:
    """What ``B12xMoEWrapper.run`` takes beside the call's tensors, by its names: unfolded, the wrapper folds."""
    return {
        "w1_weight": weights.fc1_weight,
        "w1_weight_sf": weights.fc1_weight_sf,
        "w1_alpha": weights.fc1_alpha / weights.fc1_divisor,
        "w2_weight": weights.fc2_weight,
        "w2_weight_sf": weights.fc2_weight_sf,
        "w2_alpha": weights.fc2_alpha,
        "input_global_scale": weights.fc1_divisor,
        "fc2_input_scale": weights.fc2_divisor,
    }


def reference(layer: Layer, call: MoECall) -> torch.Tensor:
    """Compute the layer by the package's torch kernel."""
    kernel = ReferenceKernel()
    kernel.plan(layer.shape.geometry, call.x.shape[0], layer.weights.device)
    kernel.bind(layer.weights)
    return kernel.run(kernels.MoECall(call.x, call.token_selected_experts, call.token_final_scales))
