# SPDX-License-Identifier: Apache-2.0
"""Small random MoE models in the forms that others than nvidia-modelopt publish.

Models are those of ``integration.exports`` as transformers saves them. compressed-tensors quantizes and writes its own form;
gpt-oss' and DeepSeek-V4's MXFP4 is quantized here and stored as the published files have it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.mxfp4 import quantize_weight

Tensors = dict[str, torch.Tensor]


def saved(model: Any, directory: Path) -> Path:
    """Write the unquantized model; experts' tensors have the published names."""
    model.save_pretrained(directory)
    return directory


def gpt_oss_form(original: Path, directory: Path) -> Path:
    """openai/gpt-oss: ``_blocks`` (E, 2I, H/32, 16), ``_scales`` and ``_bias``, rows of gate and up by turns."""

    def stored(name: str, tensor: torch.Tensor) -> Tensors:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor}
        parts = [quantize_weight(matrix.float().T.contiguous()) for matrix in tensor]
        blocks = torch.stack([part["weight"] for part in parts]).unflatten(-1, (-1, 16))
        return {f"{name}_blocks": blocks, f"{name}_scales": torch.stack([part["weight_scale"] for part in parts])}

    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return _converted(original, directory, stored, {"quant_method": "mxfp4", "modules_to_not_convert": plain})


def deepseek_v4_form(original: Path, directory: Path) -> Path:
    """deepseek-ai/DeepSeek-V4-Flash: routed experts ``weight`` I8 and ``scale`` F8_E8M0; the rest stays in bf16 here."""

    def stored(name: str, tensor: torch.Tensor) -> Tensors:
        if ".ffn.experts." not in name:
            return {name: tensor}
        parts = quantize_weight(tensor.float())
        scale = parts["weight_scale"].view(torch.float8_e8m0fnu)
        return {name: parts["weight"].view(torch.int8), name.replace(".weight", ".scale"): scale}

    section = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    return _converted(original, directory, stored, section, expert_dtype="fp4")


def _converted(
    original: Path, directory: Path, stored: Callable[[str, torch.Tensor], Tensors], section: Mapping[str, Any], **more: Any
) -> Path:
    """Write ``original`` with other tensors and a ``quantization_config``."""
    directory.mkdir()
    tensors: Tensors = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        tensors |= stored(name, tensor)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    config = json.loads((original / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **more, "quantization_config": section}))
    return directory


def qwen36_form(export: Path) -> Path:
    """Turn a W4A16_NVFP4 export into what nvidia/Qwen3.6-35B-A3B-NVFP4 is: MIXED_PRECISION with an entry for the experts of each
    layer, names of a multimodal model, and an input scale for each projection."""
    tensors = load_file(export / "model.safetensors")
    scales = {name.removesuffix("_scale_2"): tensor for name, tensor in tensors.items() if name.endswith("weight_scale_2")}
    inputs = {name.replace("weight", "input_scale"): torch.tensor(4.0 / 2688) for name in scales if ".experts." in name}
    renamed = {name.replace("model.", "model.language_model.", 1): t for name, t in (tensors | inputs).items()}
    save_file(renamed, export / "model.safetensors")
    layers = sorted({name.partition(".experts.")[0] for name in renamed if ".experts." in name})
    entries = {f"{layer}.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for layer in layers}
    file = export / "hf_quant_config.json"
    section = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": entries, "exclude_modules": []}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization": section}))
    return export


def compressed(original: Path, directory: Path, schemes: Mapping[str, Sequence[str]], ignore: Sequence[str] = ()) -> Path:
    """Quantize the experts of ``original`` with compressed-tensors, and write what its ``ModelCompressor`` writes.

    Args:
        schemes: preset of compressed-tensors (``NVFP4``, ``NVFP4A16`` ...) to the modules that get it.
        ignore: modules that stay as they are.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    tensors = load_file(original / "model.safetensors")
    experts = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if ".experts." in name}
    model = nn.Module()
    for name, tensor in experts.items():
        linear = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, dtype=torch.bfloat16)
        linear.weight.data.copy_(tensor)
        _put(model, name, linear)
    groups = {f"group_{n}": preset_name_to_scheme(name, list(targets)) for n, (name, targets) in enumerate(schemes.items())}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=list(ignore)))
    for _, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            _calibrate(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    directory.mkdir()
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    written = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file({**rest, **written}, directory / "model.safetensors")
    (directory / "config.json").write_text((original / "config.json").read_text())
    compressor.update_config(str(directory))
    return directory


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in dict(model.named_children()):
            model.add_module(part, nn.Module())
        model = model.get_submodule(part)
    model.add_module(last, module)


def _calibrate(linear: Any) -> None:
    """Set a Linear's scales as llm-compressor does for weights; inputs are taken to reach 4."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight, arguments = linear.weight.data, linear.quantization_scheme.weights
    blocks = weight.unflatten(-1, (-1, arguments.group_size))
    low, high = blocks.amin(-1), blocks.amax(-1)
    scale = None
    if hasattr(linear, "weight_global_scale"):
        scale = generate_gparam(weight.amin(), weight.amax())
        linear.weight_global_scale.data.copy_(scale)
    if hasattr(linear, "input_global_scale"):
        linear.input_global_scale.data.copy_(generate_gparam(torch.tensor(-4.0), torch.tensor(4.0)))
    linear.weight_scale.data.copy_(calculate_qparams(low, high, arguments, global_scale=scale)[0])
