"""Promotion: ``get_moe_cls`` answers with our class where the host would answer with ``CutlassFusedMoE``."""

from __future__ import annotations

import functools
import threading
from typing import Any

from . import host as _host
from .decision import Problem, decide

_lock = threading.Lock()
_active = False


def install() -> None:
    """Patch the host of this process.  Idempotent, thread-safe.

    Patch: ``create_moe.get_moe_cls``.  Why: the host builds and wraps whatever class it returns, and has no registry for
    the CUTLASS name.  How: rebound as a module attribute, which ``create_moe`` looks up globally and ``ConfigurableMoE``
    imports at call time.  It can go when the host offers an entry point for backends.

    Raises:
        UnsupportedHostError: the host has no adapter.
    """
    global _active
    with _lock:
        _active = True
        module = _host.load().create_moe
        if not hasattr(module.get_moe_cls, "_trtllm_b12x_original"):
            module.get_moe_cls = _promoting(module.get_moe_cls)


def uninstall() -> None:
    """Give the host its function back; names that others bound meanwhile ask the switch and answer as the host."""
    global _active
    with _lock:
        _active = False
        module = _host.load().create_moe
        module.get_moe_cls = getattr(module.get_moe_cls, "_trtllm_b12x_original", module.get_moe_cls)


def _promoting(get_moe_cls: Any) -> Any:
    @functools.wraps(get_moe_cls)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        moe_cls = get_moe_cls(*args, **kwargs)
        if not _active or moe_cls is not _host.load().CutlassFusedMoE or not decide(_problem(*args, **kwargs)).served:
            return moe_cls
        # Imported at the first promotion: the host's package is complete by then.
        from .fused_moe import FlashInferNvfp4Sm12xFusedMoE

        return FlashInferNvfp4Sm12xFusedMoE

    wrapper._trtllm_b12x_original = get_moe_cls  # type: ignore[attr-defined]
    return wrapper


def _problem(model_config: Any, override_quant_config: Any = None, **_: Any) -> Problem:
    """What is known when only a class is asked for: the quantization, unless it is settled layer by layer."""
    quant_config = override_quant_config or model_config.quant_config
    algo = quant_config.quant_algo if quant_config is not None else None
    name = "none" if algo is None else str(getattr(algo, "value", algo))
    return Problem(quant_algo=None if name == "MIXED_PRECISION" else name)
