# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints with random weights, in the form of gpt-oss (MXFP4) and of Qwen3-MoE (NVFP4, W4A16_NVFP4 or MXFP8)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.integration.vllm import layers, whole

VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2048, 4, 8, 2, 64
COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 4,
    "num_key_value_heads": KV_HEADS,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}
QWEN3 = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "hidden_size": 512,
    "intermediate_size": 512,
    "mlp_only_layers": [],
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "num_experts": 32,
    "rms_norm_eps": 1e-6,
}
GPT_OSS = COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "hidden_size": 2880,  # which Marlin pads to 3072
    "initial_context_length": 4096,
    "intermediate_size": 384,
    "num_local_experts": 8,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
        "rope_theta": 150000.0,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}


def config_of(name: str, count: int = LAYERS) -> dict[str, Any]:
    """Return the configuration of ``gpt-oss``, or of Qwen3-MoE with experts in the format ``name``. ``count`` is of layers."""
    if name == "gpt-oss":
        return GPT_OSS | {"num_hidden_layers": count, "layer_types": ["sliding_attention", "full_attention"] * (count // 2)}
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": name,
        "ignore": ["lm_head", "*mlp.gate", "*self_attn*"],
        "producer": {"name": "modelopt", "version": "0.39.0"},
    }
    if "NVFP4" in name:
        activations = weights if name == "NVFP4" else None  # without them vLLM takes NVFP4 for W4A16_NVFP4
        quantization["config_groups"] = {"group_0": {"input_activations": activations, "weights": weights, "targets": ["Linear"]}}
    return QWEN3 | {"num_hidden_layers": count, "quantization_config": quantization}


def experts_of(name: str, number: int, seed: int = 0) -> layers.Experts:
    """Return the experts of layer ``number``, gate and up one after the other."""
    if name == "gpt-oss":
        sizes = GPT_OSS["num_local_experts"], GPT_OSS["hidden_size"], GPT_OSS["intermediate_size"]
        return layers.random_experts("MXFP4", *sizes, seed=seed + number, bias=True)
    sizes = QWEN3["num_experts"], QWEN3["hidden_size"], QWEN3["moe_intermediate_size"]
    return layers.random_experts(name, *sizes, seed=seed + number)


def write(name: str, folder: Path, seed: int = 0, count: int = LAYERS) -> Path:
    """Write a checkpoint: ``config.json`` and ``model.safetensors``."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(name, count), indent=1), encoding="utf-8")
    save_file({key: tensor.contiguous() for key, tensor in _tensors(name, seed, count)}, folder / "model.safetensors")
    return folder


def _tensors(name: str, seed: int, count: int) -> Iterator[tuple[str, torch.Tensor]]:
    config, generator = config_of(name), torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], HEADS * HEAD_DIM

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    yield "model.embed_tokens.weight", drawn(VOCABULARY, hidden)
    yield "lm_head.weight", drawn(VOCABULARY, hidden, scale=2 * hidden**-0.5)
    yield "model.norm.weight", ones.clone()
    for number in range(count):
        at = f"model.layers.{number}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", ones.clone()
        for letter, rows, columns in (
            ("q", inner, hidden),
            ("k", KV_HEADS * HEAD_DIM, hidden),
            ("v", KV_HEADS * HEAD_DIM, hidden),
            ("o", hidden, inner),
        ):
            yield f"{at}self_attn.{letter}_proj.weight", drawn(rows, columns, scale=columns**-0.5)
            if config["attention_bias"]:
                yield f"{at}self_attn.{letter}_proj.bias", drawn(rows, scale=0.1)
        if name == "gpt-oss":
            yield f"{at}self_attn.sinks", drawn(HEADS)
            yield from _gpt_oss_experts(at, config, drawn, experts_of(name, number, seed))
        else:
            for norm in ("q_norm", "k_norm"):
                yield f"{at}self_attn.{norm}.weight", ones[:HEAD_DIM].clone()
            yield f"{at}mlp.gate.weight", drawn(config["num_experts"], hidden, scale=4 * hidden**-0.5)
            for key, tensor in whole.checkpoint(experts_of(name, number, seed)):
                yield f"{at}mlp.{key}", tensor


def _gpt_oss_experts(at: str, config: dict[str, Any], drawn: Any, experts: layers.Experts) -> Iterator[tuple[str, torch.Tensor]]:
    count, hidden = config["num_local_experts"], config["hidden_size"]
    yield f"{at}mlp.router.weight", drawn(count, hidden, scale=4 * hidden**-0.5)
    yield f"{at}mlp.router.bias", drawn(count, scale=0.1)
    parameters = layers.by_turns(experts).parameters
    for theirs, ours in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        codes = parameters[f"{ours}_weight"]
        yield f"{at}mlp.experts.{theirs}_blocks", codes.view(*codes.shape[:2], -1, 16)
        yield f"{at}mlp.experts.{theirs}_scales", parameters[f"{ours}_weight_scale"]
        yield f"{at}mlp.experts.{theirs}_bias", parameters[f"{ours}_bias"]
