"""Read how a checkpoint is quantized, and name formats that are not ModelOpt's NVFP4 or MXFP8."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trtllm_b12x import formats

from .files import CheckpointError, read_json, typed
from .storage import STORAGE

OTHER_ALGORITHMS = {
    "none": "not quantized",
    "W4A16_NVFP4": "W4A16_NVFP4: NVFP4 weights for activations in bf16, without the input scales that CUTLASS and b12x need",
    "NVFP4_AWQ": "NVFP4_AWQ: NVFP4 with AWQ pre-quantization scales, which CUTLASS serves",
    "W4A16_AWQ": "W4A16_AWQ: 4-bit integers with AWQ scales, which CUTLASS and vLLM serve",
    "W4A8_AWQ": "W4A8_AWQ: 4-bit integers with AWQ scales and FP8 activations, which CUTLASS serves",
    "FP8": "FP8 with one scale per tensor, which CUTLASS serves",
    "FP8_PB_WO": "FP8 with a scale per 128 x 128 block, which TensorRT-LLM serves",
    "FP8_BLOCK_SCALES": "FP8 with a scale per 128 x 128 block, which TensorRT-LLM serves",
    "MXFP4": "MXFP4 (blocks of 32, no second scale), which TensorRT-LLM serves",
}
"""ModelOpt's ``quant_algo`` to a description and to what serves it."""


@dataclass(frozen=True)
class Quantization:
    """``quantization`` of hf_quant_config.json, or ``quantization_config`` of config.json: the same facts under other keys."""

    path: Path
    """File that holds the section."""
    present: bool
    """Either file has such a section."""
    algo: str | None
    group_size: int | None
    exclude: tuple[str, ...]
    per_layer: Mapping[str, Mapping[str, Any]]

    @classmethod
    def from_files(cls, directory: Path, config: Mapping[str, Any]) -> Quantization:
        """
        Raises:
            CheckpointError: a key has the wrong type, or another tool quantized the model; the message names it.
        """
        path = directory / "hf_quant_config.json"
        if path.exists():
            section = typed(path, read_json(path), "quantization", dict)
            if section is None:
                raise CheckpointError(path, "has no quantization section")
            excluded, group_size = typed(path, section, "exclude_modules", list), typed(path, section, "group_size", int)
            present = True
        else:
            path = directory / "config.json"
            section = typed(path, config, "quantization_config", dict)
            present, section = section is not None, _with_method(path, section or {})
            keys = ("ignore", "modules_to_not_convert", "ignored_layers")
            excluded = [name for key in keys for name in typed(path, section, key, list) or ()]
            group_size = next((typed(path, weights, "group_size", int) for weights in _weight_groups(path, section)), None)
        # nvidia-modelopt 0.47 with transformers 5.23 appends "\0" and a sentinel to names it renames back.
        patterns = tuple(str(pattern).split("\0")[0].rstrip(".") for pattern in excluded or ())
        layers = typed(path, section, "quantized_layers", dict) or {}
        per_layer = {}
        for name in layers:
            entry = typed(path, layers, name, dict) or {}
            per_layer[name] = {key: typed(path, entry, key, kind) for key, kind in (("quant_algo", str), ("group_size", int))}
        return cls(path, present, typed(path, section, "quant_algo", str), group_size, patterns, per_layer)

    def of_experts(self, layers: Iterable[str]) -> dict[str, tuple[str, int | None]]:
        """Map each layer to its experts' algorithm (``none`` if not quantized) and group size."""
        return {layer: ("none", None) if self._excludes(layer) else self._algorithm(layer) for layer in layers}

    def _algorithm(self, layer: str) -> tuple[str, int | None]:
        if self.algo is None:
            return "none", None
        if self.algo != "MIXED_PRECISION":
            return self.algo, self.group_size or formats.group_size(self.algo)
        entries = {
            (entry.get("quant_algo"), entry.get("group_size"))
            for module, entry in self.per_layer.items()
            if module.startswith(f"{layer}.experts")
        }
        if len(entries) != 1:
            return ("MIXED_PRECISION" if entries else "none"), None
        algo, group_size = entries.pop()
        return str(algo), group_size or formats.group_size(str(algo))

    def _excludes(self, layer: str) -> bool:
        """Match as the host does: a pattern names the projection or any module around it, with wildcards or after "re:"."""
        parts = f"{layer}.experts.0.down_proj".split(".")
        modules = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return any(_matches(pattern, module) for pattern in self.exclude for module in modules)


def _matches(pattern: str, module: str) -> bool:
    if not pattern.startswith("re:"):
        return fnmatchcase(module, pattern)
    try:
        return re.fullmatch(pattern[3:], module) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def _with_method(path: Path, section: dict[str, Any]) -> dict[str, Any]:
    """Add the settings that ``quant_method`` stands for, as TensorRT-LLM does (model_config.py, load_hf_quant_config)."""
    method = typed(path, section, "quant_method", str)
    for algo, storage in STORAGE.items():
        if method in storage.quant_methods:
            section = {**storage.quant_methods[method], **section}
            expected = [1, formats.group_size(algo)]
            blocks = section.get("weight_block_size", expected)
            if blocks != expected:
                raise CheckpointError(
                    path,
                    f"weight_block_size is {str(blocks)[:40]}; TensorRT-LLM expects {expected} for {method}",
                    "quantize the model again",
                )
            return section
    if method is not None and "quant_algo" not in section:
        export = "export the unquantized model with nvidia-modelopt's NVFP4_DEFAULT_CFG for b12x"
        raise CheckpointError(path, _foreign_format(path, method, section), export)
    return section


def _weight_groups(path: Path, section: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = (typed(path, section, "config_groups", dict) or {}).values()
    return [typed(path, group, "weights", dict) or {} for group in groups if isinstance(group, dict)]


def _foreign_format(path: Path, method: str, section: Mapping[str, Any]) -> str:
    """Describe a ``quant_method`` that is not ModelOpt's, and what serves it."""
    if method == "compressed-tensors":
        weights = _weight_groups(path, section)
        groups = [group for group in (section.get("config_groups") or {}).values() if isinstance(group, dict)]
        names = " ".join(str(part.get("format")) for part in (section, *groups))
        if "nvfp4" in names or any(w.get("strategy") == "tensor_group" and w.get("num_bits") == 4 for w in weights):
            # model_config.py reads its configuration, but only two models' mappers know its tensor names (pull request 17726).
            return (
                "is NVFP4 as llm-compressor writes it (compressed-tensors). TensorRT-LLM does not load experts from its tensor "
                "names (weight_packed, weight_global_scale); vLLM serves it"
            )
        bits = next((str(w["num_bits"]) for w in weights if isinstance(w.get("num_bits"), int)), "unknown")
        return f"is compressed-tensors (llm-compressor) with weights of {bits} bits, not NVFP4; vLLM serves it"
    if method == "fp8":
        blocks = section.get("weight_block_size")
        size = " x ".join(map(str, blocks)) if isinstance(blocks, list) and blocks else ""
        scales = f"a scale per {size[:20]} block" if size else "one scale per tensor"
        return f"is FP8 with {scales}, not NVFP4; TensorRT-LLM serves it without b12x"
    known = {
        "mxfp4": "is MXFP4 (gpt-oss: blocks of 32, no second scale), not NVFP4; TensorRT-LLM serves it without b12x",
        "gptq": "is GPTQ (4-bit or 8-bit integers), not NVFP4; vLLM serves it",
        "awq": "is AWQ (4-bit integers), not NVFP4; vLLM serves it",
    }
    return known.get(method, f"is quantized by {method[:40]}, not by nvidia-modelopt")
