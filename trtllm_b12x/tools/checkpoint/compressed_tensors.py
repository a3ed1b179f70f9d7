# SPDX-License-Identifier: Apache-2.0
"""Read the ``config_groups`` of compressed-tensors (llm-compressor) as TensorRT-LLM does.

Rules and precedence are from ``update_quant_config_from_compressed_tensors`` (TensorRT-LLM, helper of
``_torch/model_config.py``, file id 57876829114).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .files import CheckpointError, Section
from .storage import storage_of

METHOD = "compressed-tensors"
_PATTERN = "re:"

MAPPED = frozenset({"laguna"})
"""``model_type`` whose weight mapper in TensorRT-LLM renames compressed-tensors NVFP4 (file id 52458855290). The mappers of
qwen3_moe, qwen3_5, nemotron_h and gemma4 do not (9329947851, 56570860004, 68795118873, 57461093125)."""


@dataclass(frozen=True)
class Group:
    """Quantization scheme, and the modules that use it."""

    name: str
    algo: str
    group_size: int | None
    targets: tuple[str, ...]
    fault: str = ""
    """How TensorRT-LLM refuses such a scheme; empty if it accepts the scheme."""


def groups_of(section: Section) -> tuple[Group, ...]:
    """Return the groups of a ``quantization_config``. Raise CheckpointError if there are no groups."""
    groups = section.section("config_groups")
    if not groups:
        raise CheckpointError(section.path, "quantization_config has no config_groups", "copy config.json from the export")
    return tuple(_group(name, groups.section(name), section.typed(str, "format")) for name in groups)


def _group(name: str, group: Section, common_format: str | None) -> Group:
    weights, packing = group.section("weights"), group.typed(str, "format") or common_format
    bits, kind, strategy = weights.typed(int, "num_bits"), weights.typed(str, "type"), weights.typed(str, "strategy")
    weight_only, size = group.get("input_activations") is None, weights.typed(int, "group_size")
    targets = tuple(map(str, group.typed(list, "targets") or ()))
    if packing == "mxfp4-pack-quantized" or ((bits, kind, strategy) == (4, "float", "group") and weight_only):
        return Group(name, "W4A16_MXFP4", size, targets)
    if (bits, kind, strategy) == (4, "float", "tensor_group"):
        if weight_only:
            fault = "raises TypeError: it expects input_activations, which NVFP4A16 leaves null"
            return Group(name, "W4A16_NVFP4", size, targets, fault)
        return Group(name, "NVFP4", size, targets)
    return Group(name, f"{METHOD} {bits}-bit {kind} by {strategy}", size, targets)


def group_of(module: str, groups: Sequence[Group], ignore: Iterable[str]) -> Group | None:
    """Return the group that a module belongs to, or None if it is not quantized. Exact targets come before patterns."""
    if any(matches(entry, module) for entry in ignore):
        return None
    owners = {target: group for group in groups for target in group.targets}
    ordered = sorted(owners, key=lambda target: (target.startswith(_PATTERN), target))
    # The target Linear matches modules that no other target names.
    return next((owners[target] for target in ordered if matches(target, module)), owners.get("Linear"))


def remarks(groups: Sequence[Group], modules: Iterable[str], model_type: str) -> list[str]:
    """Return why TensorRT-LLM does not load such a checkpoint. Each line continues a sentence that starts with TensorRT-LLM."""
    found = [f"{group.fault} (config group {group.name})" for group in groups if group.fault]
    if len(groups) > 1:
        names = list(modules)
        unmatched = sorted(t for group in groups for t in group.targets if not any(matches(t, name) for name in names))
        found += [f"raises ValueError: target {target[:80]} of config_groups matches no module" for target in unmatched]
    if model_type not in MAPPED and any(storage_of(group.algo).reciprocals for group in groups):
        names_of = "weight_packed, weight_global_scale and input_global_scale"
        found.append(f"has no known mapping of {names_of} in its weight mapper of {model_type or 'this model'}: loading fails")
    return found


def matches(
    target: str, module: str, plain: Callable[[str, str], bool] = str.__eq__, pattern: Callable[..., object] = re.match
) -> bool:
    """Return whether a module is a target: by ``pattern`` after "re:", else by ``plain``."""
    if not target.startswith(_PATTERN):
        return plain(module, target)
    try:
        return pattern(target.removeprefix(_PATTERN), module) is not None
    except (re.error, RecursionError, OverflowError):
        return False
