"""Serve formats for which TensorRT-LLM has no path on this card and would raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trtllm_b12x import formats
from trtllm_b12x.decision import Resolution
from trtllm_b12x.decision.announce import announce

from . import describe
from .host import Host

BACKENDS = ("CUTLASS", "AUTO", "TRTLLM")
"""Backend settings that accept any implementation. Other names select one backend."""


def class_for(trtllm: Host, resolve: Callable[[describe.Question], Resolution], model_config: Any, override: Any) -> Any:
    """Return the CUTLASS class if our kernels serve every call of such a layer. Else log why and return None.

    Args:
        resolve: function of ``trtllm_b12x.engines.trtllm.promote``.
        override: quantization of this layer, if it differs from the model.
    """
    if str(getattr(model_config, "moe_backend", "")).upper() not in BACKENDS:
        return None
    quantization = describe.quantization_of(model_config, override) or {}
    row = formats.find(quantization.get("quant_algo", ""))
    if row is None or row.hosts_path:
        return None
    verdict = resolve(describe.from_config(model_config, quantization))
    if verdict.served:
        return trtllm.CutlassFusedMoE
    announce(verdict, f"MoE layer in {row.name}", alone=True)
    return None


def answer(x: torch.Tensor, out: torch.Tensor | None, about: str, verdict: Resolution) -> torch.Tensor:
    """Return ``out`` or ``x`` for an empty batch of a layer that no kernel serves. ``x`` is ``(T, H)``.

    Raises:
        RuntimeError: T > 0.
    """
    if x.shape[0]:
        raise RuntimeError(
            f"no kernel serves {x.shape[0]} tokens of the MoE layer of {about}, and TensorRT-LLM has no path for it on this "
            f"card: {verdict}"
        )
    return x if out is None else out
