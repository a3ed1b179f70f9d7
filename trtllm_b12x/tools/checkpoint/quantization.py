# SPDX-License-Identifier: Apache-2.0
"""Read how a checkpoint is quantized."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trtllm_b12x import formats

from . import compressed_tensors
from .files import CheckpointError, Section, read_json
from .storage import STORAGE, algorithm

BLOCK_FP8 = "FP8_BLOCK_SCALES"
"""TensorRT-LLM's name for blocks of 128 x 128 in FP8. DeepSeek-V4 declares it, and stores its routed experts in FP4."""


@dataclass(frozen=True)
class Quantization:
    """``quantization`` of hf_quant_config.json, or ``quantization_config`` of config.json: the same facts under other keys."""

    path: Path
    """File that holds the section."""
    algo: str | None
    group_size: int | None
    exclude: tuple[str, ...]
    per_layer: Mapping[str, tuple[str | None, int | None]]
    """Module to its algorithm and group size."""
    groups: tuple[compressed_tensors.Group, ...] = ()
    """Schemes of compressed-tensors; empty for other producers."""
    experts: str | None = None
    """Format of routed experts if it differs from the rest: ``mxfp4`` in FP8 models (MiMo-V2, Ling)."""

    @classmethod
    def from_files(cls, directory: Path, config: Section) -> Quantization:
        """Read how a model is quantized. Raise CheckpointError if a key has the wrong type, or the method is unknown."""
        path = directory / "hf_quant_config.json"
        if path.exists():
            section = read_json(path).section("quantization")
            if not section:
                raise CheckpointError(path, "has no quantization section")
            excluded, group_size = section.typed(list, "exclude_modules"), section.typed(int, "group_size")
        else:
            section = _with_method(config.section("quantization_config"))
            keys = ("ignore", "modules_to_not_convert", "ignored_layers")
            excluded = [name for key in keys for name in section.typed(list, key) or ()]
            groups = section.section("config_groups")
            group_size = next((groups.section(name).section("weights").typed(int, "group_size") for name in groups), None)
        schemes: tuple[compressed_tensors.Group, ...] = ()
        if section.get("quant_method") == compressed_tensors.METHOD and "quant_algo" not in section:
            schemes = compressed_tensors.groups_of(section)
        # nvidia-modelopt 0.47 with transformers 5.23 appends "\0" and a sentinel to names it renames back.
        patterns = tuple(str(pattern).split("\0")[0].rstrip(".") for pattern in excluded or ())
        layers = section.section("quantized_layers")
        entries = {name: layers.section(name) for name in layers}
        per_layer = {name: (entry.typed(str, "quant_algo"), entry.typed(int, "group_size")) for name, entry in entries.items()}
        algo = section.typed(str, "quant_algo") if not schemes else schemes[0].algo if len(schemes) == 1 else "MIXED_PRECISION"
        experts = section.typed(str, "store_dtype", "routed_experts_quant_method")
        return cls(section.path, algo, group_size, patterns, per_layer, schemes, experts)

    def of_experts(self, layer: str, modules: Iterable[str]) -> tuple[str, int | None]:
        """Return algorithm (``none``: not quantized) and group size of a layer's experts, whose tensors ``modules`` hold."""
        if self.algo is None or (len(self.groups) < 2 and self._excludes(layer)):
            return "none", None
        entries: set[tuple[str | None, int | None]] = {(self.algo, self.group_size)}
        if len(self.groups) > 1:
            owners = {compressed_tensors.group_of(module, self.groups, self.exclude) for module in modules}
            entries = {("none", None) if owner is None else (owner.algo, owner.group_size) for owner in owners}
        elif self.algo == "MIXED_PRECISION":
            prefix = _plain(f"{layer}.experts")
            entries = {entry for module, entry in self.per_layer.items() if _plain(module).startswith(prefix)}
        if len(entries) != 1:
            return ("MIXED_PRECISION" if entries else "none"), None
        label, group_size = entries.pop()
        algo = algorithm(str(label))
        return algo, group_size or formats.group_size(algo)

    def remarks(self, modules: Iterable[str], model_type: str) -> list[str]:
        """Return lines on why TensorRT-LLM does not load such a checkpoint on SM120 and SM121; empty if it loads the checkpoint.

        ``modules`` are the names of all modules with tensors, ``model_type`` is from config.json.
        """
        labels = {self.algo, *(algo for algo, _ in self.per_layer.values()), *(group.algo for group in self.groups)}
        fates = {label: fate for storage in STORAGE.values() for label, fate in storage.labels.items()}
        found = [f"{fate} ({label})" for label, fate in fates.items() if label in labels]
        if self.groups:
            found += compressed_tensors.remarks(self.groups, modules, model_type)
        return [f"{self.path.name}: TensorRT-LLM {each}" for each in found]

    def _excludes(self, layer: str) -> bool:
        """Match as TensorRT-LLM does: a pattern names the projection or a module around it, with wildcards or after "re:"."""
        parts = f"{layer}.experts.0.down_proj".split(".")
        modules = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        by = fnmatchcase, re.fullmatch
        return any(compressed_tensors.matches(pattern, module, *by) for pattern in self.exclude for module in modules)


def _plain(module: str) -> str:
    """Drop the nesting of multimodal models, which configurations and tensors name differently."""
    return module.replace("language_model.", "")


def _with_method(section: Section) -> Section:
    """Add the settings that ``quant_method`` stands for, as TensorRT-LLM does (model_config.py, load_hf_quant_config)."""
    method = section.typed(str, "quant_method")
    for storage in STORAGE.values():
        if method in storage.quant_methods:
            return Section(section.path, {**storage.quant_methods[method], **section})
    if method == "fp8" and section.get("weight_block_size") is not None:
        return Section(section.path, {"quant_algo": BLOCK_FP8, **section})
    if method not in (None, compressed_tensors.METHOD) and "quant_algo" not in section:
        problem = f"quant_method is {method[:40]}, which verify does not read"
        raise CheckpointError(section.path, problem, "export the unquantized model with nvidia-modelopt's NVFP4_DEFAULT_CFG")
    return section
