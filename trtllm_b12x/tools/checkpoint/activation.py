"""Read the experts' activation from config.json. Each model family has its own keys."""

from __future__ import annotations

from .files import CheckpointError, Section

_NAMES = {(True, "silu"): "Swiglu", (True, "gelu_pytorch_tanh"): "Geglu", (False, "relu2"): "Relu2"}
"""(gated, ``hidden_act``) to the name in the host's ``ActivationType``."""

_CONSTANTS = ("swiglu_limit", "swiglu_limits", "swiglu_alpha", "swiglu_beta")
"""Keys of config.json that change SwiGLU (MiniMax-M3, gpt-oss, DeepSeek-V4)."""


def activation(config: Section, gated: bool) -> tuple[str, bool, tuple[float, float, float] | None]:
    """Return the activation's name, whether SwiGLU constants are set, and alpha, beta and limit if the host's are known.

    The name is that of the host's ``ActivationType``, or ``hidden_act`` as it is if the host has none. Raise CheckpointError if
    that is missing.
    """
    word = config.typed(str, "mlp_hidden_act", "hidden_act", "hidden_activation")
    if word is None:
        raise CheckpointError(config.path, "hidden_act is missing, so the experts' activation is unknown", "restore it")
    model = str(config.get("model_type", ""))
    alpha, limit = (config.typed(float, key) for key in ("swiglu_alpha", "swiglu_limit"))
    if gated and (word == "swigluoai" or model.startswith(("minimax_m3", "gpt_oss"))):
        # TensorRT-LLM: modeling_minimaxm3.py, modeling_gpt_oss.py (file id 65972516900). transformers writes "silu" for both.
        return "SwigluBias", True, (1.702 if alpha is None else alpha, 1.0, 7.0 if limit is None else limit)
    if gated and word == "silu" and model.startswith("deepseek_v4") and limit is not None:
        # TensorRT-LLM, modeling_deepseekv4.py (file id 60455498896): the limit alone.
        return "SwigluBias", True, (1.0, 0.0, limit)
    return _NAMES.get((gated, word), word), any(config.get(key) is not None for key in _CONSTANTS), None
