# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in ModelOpt's format, written without ModelOpt: any shape, in milliseconds.  Real exports: integration.exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trtllm_b12x.formats.nvfp4 import pack_fp4, round_to_e2m1
from trtllm_b12x.tools.verify.reference_formats import dequantize_nvfp4


def quantize_weight(weight: torch.Tensor, scale_2: float | None = None) -> dict[str, torch.Tensor]:
    """float32 ``(rows, K)`` to ModelOpt's tensors; ``weight_scale_2 = amax / (6 * 448)`` unless given."""
    scale = torch.tensor(float(weight.abs().max()) / 2688 if scale_2 is None else scale_2)
    blocks = weight.view(weight.shape[0], -1, 16)
    block_scale = (blocks.abs().amax(-1) / (6 * scale)).nan_to_num(0).clamp(max=448).to(torch.float8_e4m3fn)
    safe = (block_scale.float() * scale).clamp(min=1e-30).unsqueeze(-1)
    codes = round_to_e2m1((blocks / safe).view(weight.shape))
    return {"weight": pack_fp4(codes), "weight_scale": block_scale, "weight_scale_2": scale}


def random_experts(
    num_experts: int, hidden_size: int, intermediate_size: int, gated: bool = True, seed: int = 0, up_to_gate: float = 1.0
) -> dict[str, torch.Tensor]:
    """One layer by the host's names, ``"{expert}.w1.weight"`` and so on; input scales differ from expert to expert.

    ``up_to_gate``: how many times larger w3's ``weight_scale_2`` is than w1's; 1.0 shares one, as ModelOpt does.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for expert in range(num_experts):
        names = ("w1", "w3", "w2") if gated else ("w1", "w2")
        plain = {
            name: torch.randn(
                *((hidden_size, intermediate_size) if name == "w2" else (intermediate_size, hidden_size)), generator=generator
            )
            * 0.03
            * (1 + torch.rand((), generator=generator))
            for name in names
        }
        shared = max(float(plain[name].abs().max()) for name in names if name != "w2") / 2688
        for name, weight in plain.items():
            scale_2 = None if name == "w2" else shared
            if name == "w3":
                weight, scale_2 = weight * up_to_gate, shared * up_to_gate
            for kind, tensor in quantize_weight(weight, scale_2).items():
                tensors[f"{expert}.{name}.{kind}"] = tensor
            amax = (2.0 if name == "w2" else 4.0) * (0.5 + 0.5 * expert / num_experts)
            tensors[f"{expert}.{name}.input_scale"] = torch.tensor(amax / 2688)
    return tensors


def write_checkpoint(
    directory: Path,
    layers: list[dict[str, torch.Tensor]],
    top_k: int,
    *,
    gated: bool = True,
    shards: int = 1,
    exclude: tuple[str, ...] = (),
    config: dict[str, Any] | None = None,
    quantization: dict[str, Any] | None = None,
) -> Path:
    """Qwen3-MoE naming if gated, Nemotron-H naming else; ``hf_quant_config.json`` beside ``config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    own = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"} if gated else {"w1": "up_proj", "w2": "down_proj"}
    tensors = {}
    for index, layer in enumerate(layers):
        prefix = f"model.layers.{index}.mlp" if gated else f"backbone.layers.{index}.mixer"
        for key, tensor in layer.items():
            expert, name, kind = key.split(".")
            tensors[f"{prefix}.experts.{expert}.{own[name]}.{kind}"] = tensor.clone()
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
    else:
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {name: tensors[name] for name in names[shard::shards]}
            save_file(part, directory / file)
            weight_map.update(dict.fromkeys(part, file))
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    settings: dict[str, Any] = {"num_experts_per_tok": top_k}
    settings["hidden_act" if gated else "mlp_hidden_act"] = "silu" if gated else "relu2"
    (directory / "config.json").write_text(json.dumps({**settings, **(config or {})}))
    section = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": list(exclude), **(quantization or {})}
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    return directory


def dequantized(tensors: dict[str, torch.Tensor], expert: int, name: str) -> torch.Tensor:
    """float32 ``(rows, K)`` of one projection."""
    prefix = f"{expert}.{name}."
    return dequantize_nvfp4(tensors[prefix + "weight"], tensors[prefix + "weight_scale"], tensors[prefix + "weight_scale_2"])


def unquantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the tensors stand for, as a layer of plain weights."""
    names = [key.removesuffix(".weight").split(".") for key in tensors if key.endswith(".weight")]
    return {f"{expert}.{name}.weight": dequantized(tensors, int(expert), name) for expert, name in names}


def plain_projections(layer: int, num_experts: int, hidden_size: int, intermediate_size: int) -> dict[str, torch.Tensor]:
    """Unquantized bf16 tensors of a layer, by the names in the checkpoint."""
    shapes = dict.fromkeys(("gate_proj", "up_proj"), (intermediate_size, hidden_size)) | {
        "down_proj": (hidden_size, intermediate_size)
    }
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": torch.randn(shape).bfloat16()
        for expert in range(num_experts)
        for name, shape in shapes.items()
    }
