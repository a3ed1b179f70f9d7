"""The order in which a model comes to be: built on meta tensors, or anew if that fails; moved; loaded by many threads; walked.

Source: ``ModelLoader.load`` of every generation (ids 57588011916 and 56800572848 of the code index).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn


def load(build: Callable[[], nn.Module], weights: dict[str, dict[str, torch.Tensor]] | None) -> nn.Module:
    """``weights``: attribute of the model to the tensors of that layer; None is ``LoadFormat.DUMMY``."""
    try:
        with torch.device("meta"):
            model = build()
        _create_weights(model, "meta")
        model._apply(lambda t: torch.full_like(t, 7, device="cpu") if t.is_meta else t)  # whatever the memory held
    except Exception:  # the host: "Fallback to regular model init"
        model = build()
        _create_weights(model, "cpu")
    if weights is None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data.uniform_(-1e-3, 1e-3)
    else:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda item: getattr(model, item[0]).load_weights([item[1]]), weights.items()))
    walk(model)
    return model


def _create_weights(model: nn.Module, device: str) -> None:
    """``__post_init__`` of the model: wrappers first, then what they hold."""
    with torch.device(device):
        for module in list(model.modules()):
            if hasattr(module, "create_weights"):
                module.create_weights()


def walk(model: nn.Module) -> None:
    for module in model.modules():
        hook: Any = getattr(module, "post_load_weights", None)
        if hook is not None and not getattr(module, "_weights_removed", False):
            hook()
