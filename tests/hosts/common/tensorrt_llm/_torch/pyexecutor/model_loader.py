"""The order in which a model comes to be: built on meta tensors, or anew if that fails; moved; loaded by many threads; walked.

Source: ``ModelLoader.load`` of every generation (ids 57588011916 and 56800572848 of the code index), and ``MetaInitMode`` of
``models/modeling_utils.py`` (ids 1046435088 and 57359368733).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MetaInitMode(TorchDispatchMode):
    """What is created empty has no storage yet; what is created with values (``ones``, ``full``) is real.

    A tensor without storage goes into nothing but random initialization; anything else raises, and the model is built anew.
    """

    _EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
    _RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._EMPTY:
            return func(*args, **{**kwargs, "device": torch.device("meta")})
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            if func not in self._RANDOM:
                raise RuntimeError(f"a meta tensor in {func}")
            return args[0]
        return func(*args, **kwargs)


def load(build: Callable[[], nn.Module], weights: dict[str, dict[str, torch.Tensor]] | None) -> nn.Module:
    """``built_once`` of the model says that it was not built anew.

    ``weights``: attribute of the model to the tensors of that layer; None is ``LoadFormat.DUMMY``."""
    try:
        with MetaInitMode():
            model = build()
            _create_weights(model)
        model.built_once = True
        model._apply(lambda t: torch.full_like(t, 7, device="cpu") if t.is_meta else t)  # whatever the memory held
    except Exception:  # the host: "Fallback to regular model init"
        model = build()
        _create_weights(model)
        model.built_once = False
    if weights is None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data.uniform_(-1e-3, 1e-3)
    else:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda item: getattr(model, item[0]).load_weights([item[1]]), weights.items()))
    walk(model)
    return model


def _create_weights(model: nn.Module) -> None:
    """``__post_init__`` of the model: wrappers first, then what they hold."""
    for module in list(model.modules()):
        if hasattr(module, "create_weights"):
            module.create_weights()


def walk(model: nn.Module) -> None:
    for module in model.modules():
        hook: Any = getattr(module, "post_load_weights", None)
        if hook is not None and not getattr(module, "_weights_removed", False):
            hook()
