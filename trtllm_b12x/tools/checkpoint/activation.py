# SPDX-License-Identifier: Apache-2.0
"""Read the experts' activation from config.json."""

from __future__ import annotations

import math

from .files import CheckpointError, Section

_ACTIVATIONS = {(True, "silu"): "Swiglu", (True, "gelu_pytorch_tanh"): "Geglu", (False, "relu2"): "Relu2"}
"""(gated, ``hidden_act``) to the name in TensorRT-LLM's ``ActivationType``."""


def activation(config: Section, gated: bool, index: int) -> tuple[str, bool, tuple[float, float, float] | None]:
    """Return the activation's name, whether SwiGLU constants are set, and alpha, beta and limit if the formula is known.

    The name is from TensorRT-LLM's ``ActivationType``, or ``hidden_act`` unchanged if TensorRT-LLM has no such activation. Raise
    CheckpointError if ``hidden_act`` is missing.
    """
    word = config.typed(str, "mlp_hidden_act", "hidden_act", "hidden_activation")
    if word is None:
        raise CheckpointError(config.path, "hidden_act is missing, so the experts' activation is unknown", "restore it")
    model = str(config.get("model_type", ""))
    alpha, beta, limit = (config.typed(float, f"swiglu_{name}") for name in ("alpha", "beta", "limit"))
    if gated and (word == "swigluoai" or model.startswith(("minimax_m3", "gpt_oss"))):
        # TensorRT-LLM: modeling_minimaxm3.py, modeling_gpt_oss.py (file id 65972516900). transformers writes "silu" for both.
        return "SwigluBias", True, (1.702 if alpha is None else alpha, 1.0, 7.0 if limit is None else limit)
    name = _ACTIVATIONS.get((gated, word), word)
    limits = config.typed(list, "swiglu_limits")
    if limits and any(limits[index : index + 1]):
        return name, True, None  # Step 3.5 clamps after SiLU, EXAONE before
    if name != "Swiglu" or not (alpha or beta or limit):
        return name, bool(alpha or beta or limit), None
    # transformers clamps gate and up before SiLU in every model with this key: DeepSeek-V4 (TensorRT-LLM's file id 60455498896),
    # GLM-5, Hunyuan 4, where 0 means no limit.
    return "SwigluBias", True, (1.0 if alpha is None else alpha, beta or 0.0, limit or math.inf)
