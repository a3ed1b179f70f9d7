"""Promotion: ``get_moe_cls`` answers with our class where the host would answer with ``CutlassFusedMoE``."""

from __future__ import annotations

import functools
import threading
from typing import Any

from . import environment, log, settings
from . import host as _host
from .decision import Problem, decide

_lock = threading.Lock()
_active = False


def install() -> None:
    """Patch the host of this process.  Idempotent, thread-safe.

    Nothing is patched with ``TRTLLM_B12X=0``.

    Patch: ``create_moe.get_moe_cls``.  Why: the host builds and wraps whatever class it returns, and has no registry for
    the CUTLASS name.  How: rebound as a module attribute, which ``create_moe`` looks up globally and ``ConfigurableMoE``
    imports at call time.  It can go when the host offers an entry point for backends.

    Raises:
        UnsupportedHostError: the host has no adapter.
    """
    global _active
    if settings.ENABLED() == "0":
        return
    with _lock:
        if not _active:
            log.configure()
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


_NO_SM12X_KERNEL = ("TRTLLMGenFusedMoE", "CuteDslFusedMoE")
"""Host classes whose NVFP4 kernels are for SM100 alone; named on SM12x they fail at run time (TensorRT-LLM PR 11997)."""


def _promoting(get_moe_cls: Any) -> Any:
    @functools.wraps(get_moe_cls)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        moe_cls = get_moe_cls(*args, **kwargs)
        if not _active or not (moe_cls is _host.load().CutlassFusedMoE or _has_no_kernel_here(moe_cls)):
            return moe_cls
        problem = problem_of(*args, **kwargs)
        if problem is None or not decide(problem).served:
            return moe_cls
        # Imported at the first promotion: the host's package is complete by then.
        from .fused_moe import FlashInferNvfp4Sm12xFusedMoE

        return FlashInferNvfp4Sm12xFusedMoE

    wrapper._trtllm_b12x_original = get_moe_cls  # type: ignore[attr-defined]
    return wrapper


def _has_no_kernel_here(moe_cls: type) -> bool:
    return moe_cls.__name__ in _NO_SM12X_KERNEL and not settings.KEEP_BACKEND() and environment.probe().sm in (120, 121)


def problem_of(*args: Any, **kwargs: Any) -> Problem | None:
    """What is known when only a class is asked for: the quantization, unless it is settled layer by layer.

    Takes the arguments of ``get_moe_cls``, which grew over the generations; None where they are none that we know.
    """
    model_config = args[0] if args else kwargs.get("model_config")
    override = args[1] if len(args) > 1 else kwargs.get("override_quant_config")
    try:
        quant_config = override if override is not None else model_config.quant_config  # type: ignore[union-attr]
        algo = None if quant_config is None else quant_config.quant_algo
    except AttributeError:
        return None
    name = "none" if algo is None else str(getattr(algo, "value", algo))
    return Problem(quant_algo=None if name == "MIXED_PRECISION" else name)
