"""Which layers the configuration makes MoE layers, family by family, told by the keys that are there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import CheckpointError, typed

_MAX_LAYERS = 10_000

_EVERY_LAYER = ("mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "minimax", "minimax_m2", "gpt_oss", "olmoe")
"""``model_type`` of families without a dense layer, unless a key below says otherwise."""


def moe_layers(path: Path, config: Mapping[str, Any]) -> list[int] | None:
    """Indices of the MoE layers below ``num_hidden_layers``, ascending; None where the family's pattern is not known.

    Sources: transformers 5.23, ``models/*/configuration_*.py`` and the decoder layers beside them.

    Raises:
        CheckpointError: a key has the wrong type, or there are more than 10,000 layers.
    """
    kinds = _kinds(path, config)
    layers = typed(path, config, "num_hidden_layers", int)
    if layers is None:
        if kinds is None:
            return None
        layers = len(kinds)  # Nemotron-H
    if not 0 < layers <= _MAX_LAYERS:
        raise CheckpointError(f"{path}: num_hidden_layers is {str(layers)[:20]}, from 1 to {_MAX_LAYERS} is meant; restore it")
    if kinds is not None:
        return [index for index, kind in enumerate(kinds[:layers]) if kind in ("moe", "sparse", "E")]
    listed = typed(path, config, "moe_layers", list)  # Llama 4
    if listed is not None:
        return sorted(index for index in listed if isinstance(index, int) and 0 <= index < layers)
    steps = {key: typed(path, config, key, int) for key in ("decoder_sparse_step", "interleave_moe_layer_step")}
    step = next((value for value in steps.values() if value), None)
    first = typed(path, config, "first_k_dense_replace", int)
    frequency = config.get("moe_layer_freq")
    if step is not None:
        dense = typed(path, config, "mlp_only_layers", list) or ()
        return [index for index in range(layers) if (index + 1) % step == 0 and index not in dense]
    if isinstance(frequency, list):  # MiniMax-M3
        return [index for index, value in enumerate(frequency[:layers]) if value]
    if first is not None:  # DeepSeek, GLM, Kimi
        every = frequency if isinstance(frequency, int) and frequency > 0 else 1
        return [index for index in range(max(first, 0), layers) if index % every == 0]
    return list(range(layers)) if config.get("model_type") in _EVERY_LAYER else None


def _kinds(path: Path, config: Mapping[str, Any]) -> list[Any] | None:
    """One word, or one letter, per layer: Nemotron-H; GLM and others since transformers 5."""
    for key in ("mlp_layer_types", "layers_block_type"):
        kinds = typed(path, config, key, list)
        if kinds is not None and any(kind in ("moe", "sparse") for kind in kinds):
            return list(kinds)
    letters = typed(path, config, "hybrid_override_pattern", str)
    return None if letters is None else list(letters)
