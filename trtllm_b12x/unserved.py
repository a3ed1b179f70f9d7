"""Layers of a format that the host has no path for on this card, where it would say that no implementation can serve them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import formats
from .decision import Resolution
from .decision.announce import announce
from .host import Host, questions

BACKENDS = ("CUTLASS", "AUTO", "TRTLLM")
"""Settings that are meant to find whatever serves; other names mean one backend."""


def class_for(trtllm: Host, resolve: Callable[[questions.Question], Resolution], model_config: Any, override: Any) -> Any:
    """The host's class that ours is built in place of, where kernels of ours serve every call; else None, and a line says why.

    Args:
        resolve: of :mod:`trtllm_b12x.selection`.
        override: the layer's quantization, where it has one of its own.
    """
    if str(getattr(model_config, "moe_backend", "")).upper() not in BACKENDS:
        return None
    question = questions.of_model(model_config, override)
    row = formats.find(question[0].quant_algo or "") if question is not None else None
    if question is None or row is None or row.hosts_path:
        return None
    verdict = resolve(question)
    if verdict.served:
        return trtllm.CutlassFusedMoE
    announce(verdict, f"MoE layer in {row.name}", alone=True)
    return None


def answer(x: torch.Tensor, out: torch.Tensor | None, about: str, verdict: Resolution) -> torch.Tensor:
    """Of a call ``x (T, H)`` that no kernel serves: nothing, where there are no tokens.

    Raises:
        RuntimeError: there are some.
    """
    if x.shape[0]:
        raise RuntimeError(
            f"no kernel serves {x.shape[0]} tokens of the MoE layer of {about}, and TensorRT-LLM has no path for it on this "
            f"card: {verdict}"
        )
    return x if out is None else out
