# SPDX-License-Identifier: Apache-2.0
"""Rebind the vLLM functions that choose experts, all or none, and restore them."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from trtllm_b12x.core import log, settings

from .. import rebinding
from . import facts

if TYPE_CHECKING:
    from trtllm_b12x.formats.geometry import Scoring

_ITS_OWN = "its own experts after an error of ours"
_keeps = functools.partial(rebinding.keeps, "vLLM")
_rebound: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""Names that are rebound in this process, with vLLM's function and ours."""


def register() -> None:
    """Install the plugin in a vLLM process. vLLM calls this entry point of ``vllm.general_plugins`` before it builds a model."""
    with _keeps("all its experts", logging.INFO):
        log.configure("vllm.trtllm_b12x")
        if settings.ENABLED():
            install()


def install() -> None:
    """Rebind ``facts.REBOUND`` in this process. Idempotent. If vLLM differs, raise UnknownEngineError and rebind nothing."""
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
    """Restore vLLM's functions. Existing layers stay as they are."""
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
        with _keeps(_ITS_OWN):
            return choose(theirs, signature.bind(*args, **kwargs).arguments, unnamed)
        return theirs

    return select


def _recording(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def convert(*args: Any, **kwargs: Any) -> Any:
        with _keeps("one scale for gate and up after an error of ours"):
            from . import weights

            weights.record_halves(signature.bind(*args, **kwargs).arguments["layer"])
        return original(*args, **kwargs)

    return convert


def choose(theirs: Any, call: dict[str, Any], unnamed: tuple[str, str | None]) -> Any:
    """Return our backend and experts class, or vLLM's choice ``theirs``. Log one line that says which and why.

    The backend decides the width of x that vLLM's compiled graph sends between ranks. So all ranks make the same choice, and
    vLLM's compile-cache key has it. ``call`` has the arguments of vLLM's function, ``unnamed`` the keys that they do not name.
    """
    from . import machine

    ours, config = None, call["config"]
    with _keeps(_ITS_OWN):
        ours = _eligible(theirs, call, unnamed)
    if machine.agreed(None if ours is None else ours.slot, config):
        return _taken(theirs, ours, config)
    if ours is not None:
        _left(theirs, config, ours.slot.format, "another rank does not run our kernels, as its log says")
    return theirs


def _eligible(theirs: Any, call: dict[str, Any], unnamed: tuple[str, str | None]) -> Any:
    """Return our experts class if it can serve the layer; else log one line and return None."""
    from . import experts, problem

    (backend, their_class), config = theirs, call["config"]
    weight, activation = experts.named_keys(unnamed)
    keys = call.get("weight_key", weight), call.get("activation_key") or activation
    slots = [slot for slot in facts.SLOTS if slot.enum == type(backend).__name__ and experts.named_keys(slot.keys) == keys]
    if not slots:
        _left(theirs, config, "", "no kernels for {} by {}".format(*keys))
        return None
    fitting = [slot for slot in slots if backend.name in slot.instead]
    slot = next((slot for slot in fitting if problem.convertible(config, slot)), (fitting or slots)[0])
    method = next((type(names["self"]) for names in _callers() if "self" in names), None)
    scoring = None
    with _keeps("its router after an error of ours"):
        scoring = _scoring(method, config)
    ours: Any = experts.experts_class(slot, their_class, scoring)
    modular = experts.mk.FusedMoEActivationFormat
    batched = config.moe_parallel_config.use_batched_activation_format
    asked = *keys, modular.BatchedExperts if batched else modular.Standard
    reason = ours.refusal(config, *asked)
    if config.moe_backend != "auto":
        if not reason:
            _left(theirs, config, slot.format, f"drop --moe-backend {config.moe_backend} to let kernels of trtllm-b12x serve")
        return None
    if not reason and not fitting:
        reason = f"our kernels stand in for {' or '.join(slot.instead)}"
    if not reason and not problem.convertible(config, slot):
        reason = f"this vLLM converts no weights for {slot.backend}, which our kernels stand in"
    if not reason and slot.oracle == "nvfp4" and method is not None and not calls_hook(method):
        reason = "vLLM's method for this checkpoint does not multiply alphas by input scales"
    if not reason and not all(isinstance(holder.additional_config, dict) for holder in _configs()):
        reason = "additional_config is not a dict, so that the key of vLLM's compile cache cannot have our choice"
    reason = reason or ours.is_supported_config(ours, config, *asked)[1] or ""
    if reason:
        _left(theirs, config, slot.format, reason)
        return None
    if scoring is None:
        return ours
    from .monolithic import monolithic_class

    return monolithic_class(ours)


def _taken(theirs: Any, ours: Any, config: Any) -> Any:
    """Return our backend and class. Add them to vLLM's compile-cache key and log them."""
    from . import machine

    slot, backend, modular = ours.slot, theirs[0], getattr(ours, "modular", ours)
    entry = [slot.format, slot.backend, config.num_experts, config.hidden_dim, config.intermediate_size]
    for holder in _configs():
        entries = holder.additional_config.setdefault("trtllm_b12x", [])
        if entry not in entries:
            entries.append(entry)
            entries.sort()
    beyond = f", with vLLM's {backend.name} for many tokens" if slot.pair else f", in place of vLLM's {backend.name}"
    took = f"kernels ready in {machine.rehearsed(modular, config).seconds:.1f} s"
    log.once(f"{slot.format} experts run on trtllm-b12x{beyond} ({_sizes(config)}): {took}", logging.INFO)
    return type(backend)[slot.backend], ours


def _left(theirs: Any, config: Any, form: str, why: str) -> None:
    log.once(f"vLLM's {theirs[0].name} keeps the {form} experts ({_sizes(config)}): {why}".replace("  ", " "), logging.INFO)


def _sizes(config: Any) -> str:
    return f"{config.num_experts} of {config.hidden_dim} x {config.intermediate_size_per_partition}"


def _callers() -> Iterator[dict[str, Any]]:
    """Yield the local variables of the callers, the nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


def _configs() -> list[Any]:
    """Return the configurations whose hashes are in the compile-cache keys of this layer, with repeats.

    They are the current configuration and those of modules under construction. A model gives its inner language model a copy
    (``VllmConfig.with_hf_config``), which ``support_torch_compile`` hashes at the first call.
    """
    from vllm.config import VllmConfig, get_current_vllm_config_or_none

    found = get_current_vllm_config_or_none(), *(names.get("vllm_config") for names in _callers())
    return [config for config in found if isinstance(config, VllmConfig)]


def _scoring(method: type | None, config: Any) -> Scoring | None:
    """Return how a layer routes; None if its method cannot call experts with router logits or other code reads its ids."""
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    apply = getattr(method, "apply_monolithic", FusedMoEMethodBase.apply_monolithic)
    # The flag is in the model's configuration in 0.28, in that of auxiliary outputs in 0.33.
    parts = (getattr(holder, name, None) for holder in _configs() for name in ("model_config", "aux_output_config"))
    returned = any(getattr(part, "enable_return_routed_experts", False) for part in parts)
    layer = next((names["self"] for names in _callers() if hasattr(names.get("self"), "custom_routing_function")), None)
    if apply is FusedMoEMethodBase.apply_monolithic or returned or layer is None or not facts.hands_over_logits():
        return None
    from .monolithic import scoring_of

    return scoring_of(config, layer)


def calls_hook(method: type) -> bool:
    """Return whether a method of vLLM calls the experts' ``process_weights_after_loading``. Quark's NVFP4 method never does."""
    codes = [getattr(value, "__code__", None) for kind in method.__mro__ for value in vars(kind).values()]
    return any(code and {"fused_experts", "process_weights_after_loading"} <= {*code.co_names} for code in codes)
