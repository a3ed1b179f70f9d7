"""Read how a checkpoint is quantized."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trtllm_b12x import formats

from .files import CheckpointError, Section, read_json
from .storage import STORAGE


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

    @classmethod
    def from_files(cls, directory: Path, config: Section) -> Quantization:
        """
        Raises:
            CheckpointError: a key has the wrong type, or another tool quantized the model.
        """
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
        # nvidia-modelopt 0.47 with transformers 5.23 appends "\0" and a sentinel to names it renames back.
        patterns = tuple(str(pattern).split("\0")[0].rstrip(".") for pattern in excluded or ())
        layers = section.section("quantized_layers")
        entries = {name: layers.section(name) for name in layers}
        per_layer = {name: (entry.typed(str, "quant_algo"), entry.typed(int, "group_size")) for name, entry in entries.items()}
        return cls(section.path, section.typed(str, "quant_algo"), group_size, patterns, per_layer)

    def of_experts(self, layer: str) -> tuple[str, int | None]:
        """Return the algorithm of a layer's experts (``none`` if they are not quantized), and its group size."""
        if self.algo is None or self._excludes(layer):
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
    method = section.typed(str, "quant_method")
    for storage in STORAGE.values():
        if method in storage.quant_methods:
            return Section(section.path, {**storage.quant_methods[method], **section})
    if method is not None and "quant_algo" not in section:
        problem = f"quant_method is {method[:40]}, which is not an export of nvidia-modelopt"
        raise CheckpointError(section.path, problem, "export the unquantized model with nvidia-modelopt's NVFP4_DEFAULT_CFG")
    return section
