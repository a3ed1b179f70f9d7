"""Read the experts' activation from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import CheckpointError, typed

_NAMES = {(True, "silu"): "Swiglu", (True, "gelu_pytorch_tanh"): "Geglu", (False, "relu2"): "Relu2"}
"""(gated, ``hidden_act``) to the name in the host's ``ActivationType``."""

_CONSTANTS = ("swiglu_limit", "swiglu_limits", "swiglu_alpha", "swiglu_beta")
"""Keys of config.json that change SwiGLU (MiniMax-M3, gpt-oss, DeepSeek-V4)."""


@dataclass(frozen=True)
class Activation:
    name: str
    """Name in the host's ``ActivationType``, or ``hidden_act`` as it is if the host has none."""
    constants: bool = False
    """config.json sets SwiGLU limits or factors."""
    swiglu: tuple[float, float, float] | None = None
    """alpha, beta and limit of all experts, if it is known how the host reads them."""

    @classmethod
    def of(cls, path: Path, config: Mapping[str, Any], gated: bool) -> Activation:
        """
        Raises:
            CheckpointError: the activation is missing, or a constant is not a number.
        """
        words = (typed(path, config, key, str) for key in ("mlp_hidden_act", "hidden_act", "hidden_activation"))
        word = next((word for word in words if word is not None), None)
        if word is None:
            raise CheckpointError(path, "hidden_act is missing, so the experts' activation is unknown", "restore it")
        if gated and (word == "swigluoai" or str(config.get("model_type", "")).startswith("minimax_m3")):
            # MiniMax-M3: TensorRT-LLM, modeling_minimaxm3.py, MiniMaxM3MoE. transformers writes "silu" when it saves the model.
            alpha, limit = (typed(path, config, key, float) for key in ("swiglu_alpha", "swiglu_limit"))
            return cls("SwigluBias", True, (1.702 if alpha is None else alpha, 1.0, 7.0 if limit is None else limit))
        constants = any(config.get(key) is not None for key in _CONSTANTS)
        return cls(_NAMES.get((gated, word), word), constants)
