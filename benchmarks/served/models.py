# SPDX-License-Identifier: Apache-2.0
"""Models that can be served: a checkpoint, or one of six configurations whose weights are random.

A configuration is the ``config.json`` of a published checkpoint with the quantization of its export. ``drawn.py`` fills it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
_QWEN36: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
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
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
_NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 4096,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 5376,
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 512,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 22,
    "num_hidden_layers": 88,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 5.0,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
"""Sizes as in ``benchmarks.floor``. The published export has its Mamba layers in FP8; here only the experts are quantized."""

_IGNORED = {
    "qwen3_moe": ["lm_head", "*mlp.gate"],
    "qwen3_5_moe_text": ["lm_head", "*mlp.gate", "*shared_expert_gate", "*linear_attn*", "*self_attn*", "*shared_expert.*"],
    "nemotron_h": [
        "lm_head",
        "*gate",
        "*in_proj",
        "*out_proj",
        "*conv1d",
        "*qkv_proj",
        "*o_proj",
        "*latent_proj",
        "*shared_experts*",
    ],
}
"""Modules that ModelOpt leaves in bfloat16, by ``model_type``."""
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}
_BITS = {"NVFP4": 4.5, "W4A16_NVFP4": 4.5, "MXFP4": 4.25, "MXFP8": 8.25}
_SHARE = 0.65
"""Share of the memory that weights may take. The rest is for the KV cache, graphs and activations."""


@dataclass(frozen=True)
class Drawn:
    """A configuration with random weights."""

    base: dict[str, Any]
    format: str


DRAWN = {
    "qwen3-30b-a3b-nvfp4": Drawn(_QWEN3, "NVFP4"),
    "qwen3-30b-a3b-w4a16": Drawn(_QWEN3, "W4A16_NVFP4"),
    "qwen3-30b-a3b-mxfp8": Drawn(_QWEN3, "MXFP8"),
    "qwen3.6-35b-a3b-w4a16": Drawn(_QWEN36, "W4A16_NVFP4"),
    "gpt-oss-20b": Drawn(_GPT_OSS, "MXFP4"),
    "nemotron-3-super": Drawn(_NEMOTRON, "NVFP4"),
}


def config(name: str, layers: int = 0, **more: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a configuration, with only its first ``layers`` layers unless ``layers`` is 0."""
    drawn = DRAWN[name]
    result = {**drawn.base, "dtype": "bfloat16", **more}
    count = result["num_hidden_layers"] = min(layers or result["num_hidden_layers"], result["num_hidden_layers"])
    kind = result["model_type"]
    if kind == "qwen3_5_moe_text":
        result["layer_types"] = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
    elif kind == "gpt_oss":
        result["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    elif kind == "nemotron_h":
        result["hybrid_override_pattern"] = result["hybrid_override_pattern"][:count]
    result["quantization_config"] = _MXFP4 if drawn.format == "MXFP4" else _modelopt(drawn.format, _IGNORED[kind])
    return result


def _modelopt(form: str, ignored: list[str]) -> dict[str, Any]:
    result = {
        "quant_method": "modelopt",
        "quant_algo": form,
        "ignore": ignored,
        "producer": {"name": "modelopt", "version": "0.39.0"},
    }
    if "NVFP4" in form:
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        inputs = weights if form == "NVFP4" else None
        result["config_groups"] = {"group_0": {"input_activations": inputs, "weights": weights, "targets": ["Linear"]}}
    return result


def layers_that_fit(name: str, memory: float) -> int:
    """Return how many layers of a configuration fit into ``memory`` bytes of GPU memory; at least 2."""
    c = config(name)
    experts = c.get("num_experts") or c.get("num_local_experts") or c["n_routed_experts"]
    width, matrices = c.get("moe_latent_size") or c["hidden_size"], 2 if c["model_type"] == "nemotron_h" else 3
    size = c.get("moe_intermediate_size") or c["intermediate_size"]
    layer = experts * matrices * width * size * _BITS[DRAWN[name].format] / 8
    dense = 2 * 4 * c["hidden_size"] * max(c["num_attention_heads"] * c["head_dim"], c["hidden_size"])  # bfloat16
    if "hybrid_override_pattern" in c:
        layer *= c["hybrid_override_pattern"].count("E") / c["num_hidden_layers"]
    available = _SHARE * memory - 2 * 2 * c["vocab_size"] * c["hidden_size"]
    return max(2, min(c["num_hidden_layers"], int(available / (layer + dense))))


def refusal(model: str) -> str:
    """Return why a name cannot be served, or an empty string."""
    if model in DRAWN:
        return ""
    if os.path.isdir(model):
        readable = os.access(Path(model) / "config.json", os.R_OK)
        return "" if readable else f"{model} has no config.json that you may read; name the folder of a checkpoint"
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) and not os.path.isabs(model):
        return ""
    return f"{model} is neither a checkpoint folder nor a Hugging Face name; with random weights there are {', '.join(DRAWN)}"


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def read(model: str) -> dict[str, Any]:
    """Return the configuration of a checkpoint, in a folder or by its Hugging Face name."""
    if (folder := Path(model)).is_dir():
        found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        older = folder / "hf_quant_config.json"  # ModelOpt before 0.35 writes this file
        if "quantization_config" not in found and older.is_file():
            found["quantization_config"] = json.loads(older.read_text(encoding="utf-8")).get("quantization", {})
        return found
    from transformers import AutoConfig

    return dict(AutoConfig.from_pretrained(model).to_dict())


def format_of(config: dict[str, Any]) -> str:
    """Return the number format of a checkpoint's experts as its configuration names it, or an empty string."""
    quantization = config.get("quantization_config") or text_config(config).get("quantization_config") or {}
    named = quantization.get("quant_algo") or quantization.get("quant_method") or ""
    return str(named).upper()


def write(name: str, folder: Path, layers: int, **more: Any) -> Path:
    """Write the ``config.json`` of a configuration with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name, layers, **more), indent=1) + "\n", encoding="utf-8")
    return folder
