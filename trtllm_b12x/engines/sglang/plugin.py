# SPDX-License-Identifier: Apache-2.0
"""Replace SGLang's functions for experts and the hook that ends a load, all or none, and restore them."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from trtllm_b12x.core import hook, log, settings

from .. import rebinding
from . import facts

_keeps = functools.partial(rebinding.keeps, "SGLang")
_rebound: list[tuple[Callable[[Any], None], Any]] = []
"""Setter and SGLang's own function of each name that is rebound in this process."""


def register() -> None:
    """Install the plugin. SGLang calls this ``sglang.srt.plugins`` entry point in each of its processes; most build no model.

    Nothing is imported until SGLang imports the module that has its functions.
    """
    with _keeps("all its experts", logging.INFO):
        log.configure("sglang.trtllm_b12x")
        if settings.ENABLED():
            if facts.CUTLASS in sys.modules:
                install()
            else:
                hook.start(_imported, frozenset({facts.CUTLASS}))


def _imported(module: Any) -> None:
    with _keeps("all its experts", logging.INFO):
        install()


def install() -> None:
    """Rebind SGLang's functions in this process. Idempotent. If SGLang differs, raise UnknownEngineError and rebind nothing."""
    if _rebound:
        return
    facts.check()
    functions = facts.pool()._fused_funcs
    found: list[tuple[Callable[[Any], None], Any, Any]] = [
        (functools.partial(functions.__setitem__, key), functions[key], _fused(functions[key])) for key in facts.FUNCTIONS
    ]
    for module, name in facts.METHODS:
        kind = getattr(importlib.import_module(module), name)
        theirs = vars(kind)[facts.LOADED]
        found.append((functools.partial(setattr, kind, facts.LOADED), theirs, _loading(theirs)))
    for assign, theirs, ours in found:
        assign(ours)
        _rebound.append((assign, theirs))


def uninstall() -> None:
    """Restore SGLang's functions. Layers that hold ours call SGLang's own from now on."""
    for assign, theirs in _rebound:
        assign(theirs)
    _rebound.clear()
    hook.stop()


def _fused(theirs: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    from . import runner

    serve, untraced, is_compiling = runner.serve, torch.compiler.disable(runner.serve), torch.compiler.is_compiling

    @functools.wraps(theirs)
    def fused(dispatch_output: Any, quant_info: Any, runner_config: Any) -> Any:
        if _rebound:
            ours = (untraced if is_compiling() else serve)(dispatch_output, quant_info, runner_config, theirs)
            if ours is not None:
                return ours
        return theirs(dispatch_output, quant_info, runner_config)

    return fused


def _loading(theirs: Callable[..., Any]) -> Callable[..., Any]:
    from . import runner

    @functools.wraps(theirs)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if _rebound:
            with _keeps("the experts of a layer after an error of ours"):
                runner.loading(layer)
        theirs(self, layer)
        if _rebound:
            with _keeps("the experts of a layer after an error of ours"):
                runner.loaded(layer)

    return process_weights_after_loading
