"""Rebind the names of vLLM that choose experts, all or none, and undo it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from trtllm_b12x.core import log, settings
from trtllm_b12x.core.errors import first_line

from . import facts

_rebound: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""Names that are rebound in this process, with vLLM's function and ours."""


@contextlib.contextmanager
def _vllm_keeps(what: str, level: int = logging.WARNING) -> Iterator[None]:
    """After an error in the block vLLM goes on as without us, and one line says so."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):
            log.once(f"vLLM keeps {what}: {first_line(error)}", level)


def register() -> None:
    """Start in a process of vLLM, which calls this entry point of ``vllm.general_plugins`` before it builds a model."""
    with _vllm_keeps("all its experts", logging.INFO):
        log.configure("vllm.trtllm_b12x")
        if settings.ENABLED():
            install()


def install(sm: int | None = None) -> None:
    """Rebind ``facts.REBOUND`` in this process. Idempotent. If vLLM differs, raise UnknownVLLMError and rebind nothing.

    ``sm`` is a card to assume, such as 120, for tests and benchmarks on another one.
    """
    from . import machine

    if sm is not None:
        machine.assumed_sm = sm
    if _rebound:
        return
    facts.check()
    found = {}
    for name in facts.REBOUND:
        original = getattr(importlib.import_module(name.module), name.name)
        found[name.name] = original, _wrapped(original, name.keys) if name.chooses else _recording(original)
    _rebound.update(found)
    for original, ours in found.values():
        _replace(original, ours)


def uninstall() -> None:
    """Give vLLM its functions back. Layers that exist stay as they are."""
    for original, ours in _rebound.values():
        _replace(ours, original)
    _rebound.clear()


def _replace(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Bind ``new`` in every module of vLLM that has bound ``old``."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.startswith("vllm.") and vars(module).get(old.__name__) is old:
            setattr(module, old.__name__, new)


def _wrapped(original: Callable[..., Any], unnamed: tuple[str, str | None]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def select(*args: Any, **kwargs: Any) -> Any:
        theirs = original(*args, **kwargs)
        with _vllm_keeps("its own experts after an error of ours"):
            call = signature.bind(*args, **kwargs).arguments
            from . import experts

            weight, activation = experts.named_keys(unnamed)
            return choose(theirs, call["config"], call.get("weight_key", weight), call.get("activation_key") or activation)
        return theirs

    return select


def _recording(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def convert(*args: Any, **kwargs: Any) -> Any:
        with _vllm_keeps("one scale for gate and up after an error of ours"):
            from . import weights

            weights.record_halves(signature.bind(*args, **kwargs).arguments["layer"])
        return original(*args, **kwargs)

    return convert


def choose(theirs: Any, config: Any, weight_key: Any, activation_key: Any) -> Any:
    """Return our backend and experts class in place of vLLM's choice ``theirs``, or that choice. One line says which and why."""
    from . import experts

    backend, their_class = theirs
    slots = [slot for slot in facts.SLOTS if slot.enum == type(backend).__name__]
    slots = [slot for slot in slots if experts.named_keys(slot.keys) == (weight_key, activation_key)]
    if not slots:
        return _left(theirs, "", f"no kernels for {weight_key} by {activation_key}")
    slot = next((slot for slot in slots if slot.instead == backend.name), slots[0])
    ours = experts.experts_class(slot, their_class)
    modular = experts.mk.FusedMoEActivationFormat
    batched = config.moe_parallel_config.use_batched_activation_format
    keys = weight_key, activation_key, modular.BatchedExperts if batched else modular.Standard
    reason = ours.refusal(config, *keys)
    if config.moe_backend != "auto":
        drop = f"drop --moe-backend {config.moe_backend} to let kernels of trtllm-b12x serve"
        return theirs if reason else _left(theirs, slot.format, drop)
    if not reason and slot.instead != backend.name:
        reason = "our kernels read no weights in the layout of this backend"
    reason = reason or ours.is_supported_config(ours, config, *keys)[1] or ""
    if reason:
        return _left(theirs, slot.format, reason)
    beyond = f", with vLLM's {backend.name} for many tokens" if slot.pair else f", in place of vLLM's {backend.name}"
    log.once(f"{slot.format} experts run on trtllm-b12x{beyond}", logging.INFO)
    return type(backend)[slot.backend], ours


def _left(theirs: Any, form: str, why: str) -> Any:
    log.once(f"vLLM's {theirs[0].name} keeps the {form} experts: {why}".replace("  ", " "), logging.INFO)
    return theirs
