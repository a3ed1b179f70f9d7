"""Read from config.json which layers have experts, and the experts' activation. Each model family has its own keys."""

from __future__ import annotations

from typing import Any

from .files import CheckpointError, Section

_MAX_LAYERS = 10_000

_EVERY_LAYER = ("mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "minimax", "minimax_m2", "gpt_oss", "olmoe")
"""``model_type`` of families without dense layers, unless a key below lists some."""

_NAMES = {(True, "silu"): "Swiglu", (True, "gelu_pytorch_tanh"): "Geglu", (False, "relu2"): "Relu2"}
"""(gated, ``hidden_act``) to the name in the host's ``ActivationType``."""

_CONSTANTS = ("swiglu_limit", "swiglu_limits", "swiglu_alpha", "swiglu_beta")
"""Keys of config.json that change SwiGLU (MiniMax-M3, gpt-oss, DeepSeek-V4)."""


def activation(config: Section, gated: bool) -> tuple[str, bool, tuple[float, float, float] | None]:
    """Return the activation's name, whether SwiGLU constants are set, and alpha, beta and limit if the host's are known.

    The name is that of the host's ``ActivationType``, or ``hidden_act`` as it is if the host has none.

    Raises:
        CheckpointError: the activation is missing, or a constant is not a number.
    """
    word = config.typed(str, "mlp_hidden_act", "hidden_act", "hidden_activation")
    if word is None:
        raise CheckpointError(config.path, "hidden_act is missing, so the experts' activation is unknown", "restore it")
    if gated and (word == "swigluoai" or str(config.get("model_type", "")).startswith("minimax_m3")):
        # MiniMax-M3: TensorRT-LLM, modeling_minimaxm3.py, MiniMaxM3MoE. transformers writes "silu" when it saves the model.
        alpha, limit = (config.typed(float, key) for key in ("swiglu_alpha", "swiglu_limit"))
        return "SwigluBias", True, (1.702 if alpha is None else alpha, 1.0, 7.0 if limit is None else limit)
    return _NAMES.get((gated, word), word), any(config.get(key) is not None for key in _CONSTANTS), None


def moe_layers(config: Section) -> list[int] | None:
    """Return the indices of the MoE layers, ascending, or None if the model family is unknown.

    Sources: transformers 5.23, ``models/*/configuration_*.py`` and the decoder layers next to them.

    Raises:
        CheckpointError: a key has the wrong type, or there are more than 10,000 layers.
    """
    words = _word_per_layer(config)
    layers = config.typed(int, "num_hidden_layers")
    if layers is None:
        if words is None:
            return None
        layers = len(words)  # Nemotron-H
    if not 0 < layers <= _MAX_LAYERS:
        problem = f"num_hidden_layers is {str(layers)[:20]}, expected 1 to {_MAX_LAYERS}"
        raise CheckpointError(config.path, problem, "restore it")
    if words is not None:
        return [index for index, word in enumerate(words[:layers]) if word in ("moe", "sparse", "E")]
    listed = config.typed(list, "moe_layers")  # Llama 4
    if listed is not None:
        return sorted(index for index in listed if isinstance(index, int) and 0 <= index < layers)
    steps = [config.typed(int, key) for key in ("decoder_sparse_step", "interleave_moe_layer_step")]
    step = next(filter(None, steps), None)
    first, frequency = config.typed(int, "first_k_dense_replace"), config.get("moe_layer_freq")
    if step is not None:
        dense = config.typed(list, "mlp_only_layers") or ()
        return [index for index in range(layers) if (index + 1) % step == 0 and index not in dense]
    if isinstance(frequency, list):  # MiniMax-M3
        return [index for index, value in enumerate(frequency[:layers]) if value]
    if first is not None:  # DeepSeek, GLM, Kimi
        every = frequency if isinstance(frequency, int) and frequency > 0 else 1
        return [index for index in range(max(first, 0), layers) if index % every == 0]
    return list(range(layers)) if config.get("model_type") in _EVERY_LAYER else None


def _word_per_layer(config: Section) -> list[Any] | None:
    """Return one word or letter per layer: Nemotron-H; GLM and others since transformers 5."""
    for key in ("mlp_layer_types", "layers_block_type"):
        words = config.typed(list, key)
        if words is not None and any(word in ("moe", "sparse") for word in words):
            return list(words)
    letters = config.typed(str, "hybrid_override_pattern")
    return None if letters is None else list(letters)
