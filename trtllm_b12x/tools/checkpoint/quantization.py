"""Read how a checkpoint is quantized, and name formats that are not ModelOpt's NVFP4 or MXFP8."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trtllm_b12x import formats

from .files import CheckpointError, Section, read_json
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
    per_layer: Mapping[str, tuple[str | None, int | None]]
    """Module to its algorithm and group size."""

    @classmethod
    def from_files(cls, directory: Path, config: Section) -> Quantization:
        """
        Raises:
            CheckpointError: a key has the wrong type, or another tool quantized the model; the message names it.
        """
        path, present = directory / "hf_quant_config.json", True
        if path.exists():
            content = read_json(path)
            section = content.section("quantization")
            if content.get("quantization") is None:
                raise CheckpointError(path, "has no quantization section")
            excluded, group_size = section.typed(list, "exclude_modules"), section.typed(int, "group_size")
        else:
            present = config.get("quantization_config") is not None
            section = _with_method(config.section("quantization_config"))
            keys = ("ignore", "modules_to_not_convert", "ignored_layers")
            excluded = [name for key in keys for name in section.typed(list, key) or ()]
            group_size = next((weights.typed(int, "group_size") for weights in _weight_groups(section)), None)
        # nvidia-modelopt 0.47 with transformers 5.23 appends "\0" and a sentinel to names it renames back.
        patterns = tuple(str(pattern).split("\0")[0].rstrip(".") for pattern in excluded or ())
        layers = section.section("quantized_layers")
        entries = {name: layers.section(name) for name in layers}
        per_layer = {name: (entry.typed(str, "quant_algo"), entry.typed(int, "group_size")) for name, entry in entries.items()}
        return cls(section.path, present, section.typed(str, "quant_algo"), group_size, patterns, per_layer)

    def of_experts(self, layers: Iterable[str]) -> dict[str, tuple[str, int | None]]:
        """Map each layer to its experts' algorithm (``none`` if not quantized) and group size."""
        return {layer: ("none", None) if self._excludes(layer) else self._algorithm(layer) for layer in layers}

    def _algorithm(self, layer: str) -> tuple[str, int | None]:
        if self.algo is None:
            return "none", None
        if self.algo != "MIXED_PRECISION":
            return self.algo, self.group_size or formats.group_size(self.algo)
        entries = {entry for module, entry in self.per_layer.items() if module.startswith(f"{layer}.experts")}
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


def _with_method(section: Section) -> Section:
    """Add the settings that ``quant_method`` stands for, as TensorRT-LLM does (model_config.py, load_hf_quant_config)."""
    path, method = section.path, section.typed(str, "quant_method")
    for algo, storage in STORAGE.items():
        if method in storage.quant_methods:
            section = Section(path, {**storage.quant_methods[method], **section})
            expected = [1, formats.group_size(algo)]
            blocks = section.get("weight_block_size", expected)
            if blocks != expected:
                problem = f"weight_block_size is {str(blocks)[:40]}; TensorRT-LLM expects {expected} for {method}"
                raise CheckpointError(path, problem, "quantize the model again")
            return section
    if method is not None and "quant_algo" not in section:
        export = "export the unquantized model with nvidia-modelopt's NVFP4_DEFAULT_CFG for b12x"
        raise CheckpointError(path, _foreign_format(method, section), export)
    return section


def _weight_groups(section: Section) -> list[Section]:
    groups = section.section("config_groups").values()
    return [Section(section.path, group).section("weights") for group in groups if isinstance(group, dict)]


def _foreign_format(method: str, section: Section) -> str:
    """Describe a ``quant_method`` that is not ModelOpt's, and what serves it."""
    if method == "compressed-tensors":
        weights = _weight_groups(section)
        groups = [group for group in section.section("config_groups").values() if isinstance(group, dict)]
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
