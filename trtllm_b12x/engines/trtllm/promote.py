# SPDX-License-Identifier: Apache-2.0
"""Promote layers: rebind functions of TensorRT-LLM so that it builds our MoE layer. Each patch says why, how, and when it can go.

All patches are module attributes that TensorRT-LLM looks up when it builds a layer. References that other modules took earlier
check the same switch, so ``uninstall`` also disables them.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from trtllm_b12x import environment, formats
from trtllm_b12x.core import errors, hook, log, process, settings
from trtllm_b12x.decision import RejectReason, Resolution, Verdict, decide
from trtllm_b12x.decision.announce import announce
from trtllm_b12x.formats.geometry import LayerShape

from . import describe, guard, host, patches, status
from .host import Host


def install() -> None:
    """Promote in this process, before or after TensorRT-LLM is imported. Idempotent and thread-safe.

    ``TRTLLM_B12X=0`` patches nothing. This function does not import TensorRT-LLM. If TensorRT-LLM is not installed, the
    embedded one is patched. An unknown TensorRT-LLM stays unpatched, with a warning.
    """
    if not settings.ENABLED():
        return
    if not host.installed():
        patch(host.load().create_moe)
        return
    _turn_on()
    hook.start(patch)
    for name in hook.WATCHED & set(sys.modules):
        module = sys.modules[name]
        # The loader patches a module that is still being imported, once it is complete.
        if not getattr(module.__spec__, "_initializing", False):
            hook.hand_over(module, patch)


def _turn_on() -> None:
    with patches.lock:
        if not patches.active:
            log.configure()
        patches.active = True
        process.in_server = host.installed()


def uninstall() -> None:
    """Restore the rebound names. References that others took meanwhile then call the original function.

    Existing layers are unchanged. Before this call, build every class that ``get_moe_cls`` has returned: the original
    ``create_moe_backend`` does not accept ours.
    """
    with patches.lock:
        patches.active, patches.refused, hook.failure = False, "", ""
        patches.restore()


def patch(module: ModuleType) -> None:
    """Rebind all names of one TensorRT-LLM module (``core.hook.WATCHED``). Raise ValueError if the module lacks one.

    ``create_moe.get_moe_cls`` (generations A and B). Why: TensorRT-LLM builds and wraps any class that it returns, and
    has no registry for the CUTLASS name. How: rebind the module attribute, which ``create_moe`` looks up globally and
    ``ConfigurableMoE`` imports at call time, and every earlier reference in TensorRT-LLM modules. It can go when TensorRT-LLM
    offers an entry point for backends. Upstream decided against promoting CUTLASS (PR 13773).

    ``create_moe.create_moe_backend`` (every generation). Why: only this function knows a layer's activation, bias and router
    weight. It refuses every class that it does not name, also from C1 on, where ``moe_resolution`` replaces ``get_moe_cls``. How:
    as above; during the call, its name for the CUTLASS class refers to our class. It can go with the patch of ``get_moe_cls``.

    ``create_moe.resolve_moe_cls`` (from C1 on). Why: it raises if no TensorRT-LLM class serves the format on this card, or
    if gate and up of NVFP4 do not fill tiles of 128 rows (PR 18520). How: catch the error and return our base class; for such a
    size, only if it accepts the padded one. It can go when ``moe_resolution`` accepts classes from other packages.
    """
    if not settings.ENABLED():
        return
    _turn_on()
    with patches.lock:
        backend = getattr(module, "create_moe_backend", None)
        if not callable(backend) or "moe_cls" not in inspect.signature(backend).parameters:
            raise ValueError("it has no create_moe_backend(moe_cls, ...)")
        if not hasattr(module, "CutlassFusedMoE"):
            raise ValueError("it does not name CutlassFusedMoE")
        wrappers: dict[str, Callable[[Any], Any]] = {"create_moe_backend": functools.partial(_building, vars(module))}
        if hasattr(module, "get_moe_cls"):
            wrappers["get_moe_cls"] = _promoting
        else:
            wrappers["resolve_moe_cls"] = _resolving
        if not all(callable(vars(module).get(name)) for name in wrappers):
            raise ValueError(f"it has no {' or no '.join(wrappers)}")
        for name, wrapper in wrappers.items():
            original = vars(module)[name]
            if hasattr(original, "_trtllm_b12x"):  # one of our wrappers
                continue
            replacement = wrapper(original)
            replacement._trtllm_b12x = True
            patches.put(module, name, replacement)
            # A gate and a layer of the same model must call the same function.
            for path, other in list(sys.modules.items()):
                if path.startswith("tensorrt_llm.") and isinstance(other, ModuleType) and vars(other).get(name) is original:
                    patches.put(other, name, replacement)


def _adapter() -> Host | None:
    """Return the ``Host`` of this TensorRT-LLM while promotion is on, or None if TensorRT-LLM stays unpatched."""
    if not patches.active or patches.refused:
        return None
    with patches.building:
        if patches.refused:
            return None
        try:
            return host.load()
        except host.UnsupportedHostError as error:
            patches.refused = str(error)
            patches.restore()  # no layer was promoted yet
            log.logger.warning("%s; the host's own classes run (trtllm-b12x doctor shows what differs)", error)
            return None


def _resolve(model_config: Any, quantization: dict[str, Any], arguments: dict[str, Any] | None = None) -> Resolution:
    from . import machine  # torch is imported by now

    return machine.resolve(describe.from_config(model_config, quantization, arguments))


def _our_class() -> Any:
    # Import at the first promotion: TensorRT-LLM is half-initialized when the import hook runs.
    with patches.building:
        from .fused_moe import FlashInferNvfp4Sm12xFusedMoE

        return FlashInferNvfp4Sm12xFusedMoE


_NO_SM12X_KERNEL = "CuteDslFusedMoE"
"""Name of the class whose NVFP4 kernels exist only for SM100. Used on SM12x, it fails at run time (TensorRT-LLM PR 11997).

``TRTLLMGenFusedMoE`` fails too, but models compare ``model_config.moe_backend`` with TRTLLM for features that CUTLASS lacks.
Decoder layers of DeepSeek-V3, Qwen3-MoE, Qwen3-Next and GLM4-MoE then pass ``do_finalize=False`` and unpack a list.
``DeepseekV3Gate`` then makes its bias bfloat16 (``models/modeling_*.py``). Models compare with no other name.
"""
_NAMED_BY_MODELS = "TRTLLMGenFusedMoE"

_HOSTS_B12X = "CuteDslB12xFusedMoE"
"""b12x class of TensorRT-LLM (PR 13773). It compiles with any CuTe DSL payload and fails with a wrong one (issue 15853)."""

ANY_IMPLEMENTATION = ("CUTLASS", "AUTO", "TRTLLM")
"""Values of ``moe_backend`` that accept any class. Other values select one class."""

_PAYLOAD = (RejectReason.DSL_MISSING, RejectReason.DSL_PAYLOAD, RejectReason.TOOLKIT)


def _or_host(choice: Any, choose: Callable[[], Any]) -> Any:
    """Return ``choose()``. If it raises, turn promotion off and return TensorRT-LLM's ``choice``."""
    try:
        return choose()
    except Exception as error:
        refuse(error)
        return choice


def _promoting(get_moe_cls: Any) -> Any:
    @functools.wraps(get_moe_cls)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        moe_cls = get_moe_cls(*args, **kwargs)
        return _or_host(moe_cls, lambda: _class_for(moe_cls, *_config_of(args, kwargs)))

    return wrapper


def _resolving(resolve_moe_cls: Any) -> Any:
    @functools.wraps(resolve_moe_cls)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return resolve_moe_cls(*args, **kwargs)
        except ValueError as error:
            refusal = error  # Python deletes ``error`` at the end of this block
            moe_cls = _or_host(None, lambda: _class_without_host_path(*_config_of(args, kwargs)))
        moe_cls = moe_cls or _or_host(None, lambda: _class_of_padded_size(resolve_moe_cls, args, kwargs, refusal))
        if moe_cls is None:
            raise refusal
        return moe_cls

    return wrapper


def _config_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the ``ModelConfig`` of a call, and the layer's own quantization, if any."""
    model_config = args[0] if args else kwargs.get("model_config")
    return model_config, args[1] if len(args) > 1 else kwargs.get("override_quant_config")


def _class_for(moe_cls: Any, model_config: Any, override: Any) -> Any:
    trtllm = _adapter()
    if trtllm is None:
        return moe_cls
    moe_cls = _without_broken_b12x(moe_cls, trtllm)
    quantization = describe.quantization_of(model_config, override)
    named = moe_cls is not trtllm.CutlassFusedMoE
    if quantization is None or (named and moe_cls.__name__ not in (_NO_SM12X_KERNEL, _NAMED_BY_MODELS)):
        return moe_cls
    if named and environment.probe(host.state()).sm not in (120, 121):
        return moe_cls
    verdict = _resolve(model_config, quantization)
    if moe_cls.__name__ == _NAMED_BY_MODELS:
        if verdict.served:
            _warn_of_trtllm(model_config)
        return moe_cls
    if verdict.served:
        return _our_class()
    announce(verdict, f"moe_backend {getattr(model_config, 'moe_backend', '?')}", _rank(model_config))
    return moe_cls


def _class_without_host_path(model_config: Any, override: Any) -> Any:
    """Return the CUTLASS class if TensorRT-LLM refuses the layer and our kernels serve all its calls. Else log the reason."""
    trtllm = _adapter()
    if trtllm is None or str(getattr(model_config, "moe_backend", "")).upper() not in ANY_IMPLEMENTATION:
        return None
    quantization = describe.quantization_of(model_config, override) or {}
    row = formats.find(quantization.get("quant_algo", ""))
    if row is None or row.hosts_path:
        return None
    verdict = _resolve(model_config, quantization)
    if verdict.served:
        return trtllm.CutlassFusedMoE
    announce(verdict, f"MoE layer in {row.name}", alone=True)
    return None


def _class_of_padded_size(resolve_moe_cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], refusal: Exception) -> Any:
    """Return the CUTLASS class if TensorRT-LLM refuses an NVFP4 layer only for its size and our padded layer serves it."""
    trtllm, (model_config, override), size = _adapter(), _config_of(args, kwargs), kwargs.get("intermediate_size")
    quantization = describe.quantization_of(model_config, override) or {}
    tile = 64 * max(1, int(getattr(getattr(model_config, "mapping", None), "moe_tp_size", 1)))  # rows per gate and per up
    if trtllm is None or not size or size % tile == 0 or quantization.get("quant_algo") != "NVFP4":
        return None
    verdict = _resolve(model_config, quantization, kwargs)
    if not verdict.served:
        announce(verdict, "MoE layer in NVFP4", alone=True)
        return None
    try:
        moe_cls = resolve_moe_cls(*args, **{**kwargs, "intermediate_size": -(-size // tile) * tile})
    except ValueError:  # TensorRT-LLM refuses the layer for another reason, too
        return None
    if moe_cls is not trtllm.CutlassFusedMoE:
        return None
    patches.refused_sizes[size] = refusal
    return moe_cls


def _building(names: dict[str, Any], create_moe_backend: Any) -> Any:
    """Wrap ``create_moe_backend``. ``names`` is the namespace of its module."""
    signature = inspect.signature(create_moe_backend)

    @functools.wraps(create_moe_backend)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError:
            return create_moe_backend(*args, **kwargs)  # raises the error itself
        host_class = getattr(call.arguments["moe_cls"], "host_class", call.arguments["moe_cls"])
        moe_cls, verdict = _or_host((host_class, None), lambda: _backend_for(call, host_class))
        ours = hasattr(moe_cls, "host_class")
        if not ours:
            _raise_if_refused(call)
        call.arguments["moe_cls"] = moe_cls
        try:
            with patches.known_as_cutlass(names, moe_cls if ours else None):
                module = create_moe_backend(*call.args, **call.kwargs)
        except Exception as error:
            if not ours:
                raise
            _raise_if_refused(call)
            call.arguments["moe_cls"] = moe_cls.host_class
            module = create_moe_backend(*call.args, **call.kwargs)  # or raise TensorRT-LLM's error
            refuse(error)
        if verdict is not None and not ours:
            with guard.bookkeeping():
                status.record(module, verdict, ready=True)
        return module

    return wrapper


def _raise_if_refused(call: inspect.BoundArguments) -> None:
    if (size := call.arguments.get("intermediate_size")) in patches.refused_sizes:
        quantization = describe.quantization_of(call.arguments.get("model_config")) or {}
        patches.raise_if_refused(size, quantization.get("quant_algo"))


def _backend_for(call: inspect.BoundArguments, host_class: Any) -> tuple[Any, Resolution | None]:
    """Return the class to build, and the verdict on the layer if it uses the CUTLASS backend."""
    trtllm = _adapter()
    if trtllm is None:
        return host_class, None
    arguments = {**call.arguments, **call.kwargs}  # call.kwargs has the arguments of a ** parameter
    model_config = arguments.get("model_config")
    moe_cls = _without_broken_b12x(arguments["moe_cls"], trtllm)
    promoted_before = arguments["moe_cls"] is not host_class
    if not promoted_before and moe_cls is not trtllm.CutlassFusedMoE:
        _name_cutlass(model_config, arguments)
        return moe_cls, None
    # get_moe_cls may have used the quantization of one layer, which can differ from the model's.
    quantization = {} if promoted_before else describe.quantization_of(model_config) or {}
    verdict = _resolve(model_config, quantization, arguments)
    # If get_moe_cls exists, it has already decided. Otherwise TensorRT-LLM always passes CutlassFusedMoE.
    undecided = promoted_before or not trtllm.has_get_moe_cls
    if not verdict.served:
        if undecided:
            announce(verdict, "MoE layer", _rank(model_config))
        return trtllm.CutlassFusedMoE, verdict
    if not undecided:
        return moe_cls, None  # the caller named TensorRT-LLM's class explicitly
    if str(getattr(model_config, "moe_backend", "")).upper() == "TRTLLM":
        _warn_of_trtllm(model_config)
    return _our_class(), verdict


def _name_cutlass(model_config: Any, arguments: dict[str, Any]) -> None:
    """Log how to run W4A16_NVFP4 experts on our kernels. TensorRT-LLM resolves AUTO to CUTEDSL for them (PR 16511)."""
    with guard.bookkeeping():
        quantization = describe.quantization_of(model_config) or {}
        named = str(getattr(model_config, "moe_backend", "")).upper() == "CUTEDSL"
        if not named or _rank(model_config) or describe.quant_algo(model_config.quant_config) != "W4A16_NVFP4":
            return
        if environment.probe(host.state()).sm in (120, 121) and _resolve(model_config, quantization, arguments).served:
            message = "W4A16_NVFP4 experts run on moe_backend CUTEDSL, which TensorRT-LLM takes where none is set"
            log.once(f"{message}: set moe_config.backend: CUTLASS to run decode on our kernels", logging.INFO)


def _warn_of_trtllm(model_config: Any) -> None:
    """Warn about backend TRTLLM. From C1 on TensorRT-LLM uses CUTLASS instead, but the model still assumes TRTLLM."""
    if not _rank(model_config):
        message = "moe_backend TRTLLM has no FP4 kernels for this card, and models expect what only it does"
        log.once(f"{message}: set moe_config.backend: CUTLASS, whose decode is then ours")


def refuse(error: Exception) -> None:
    """Turn promotion off for the rest of this process, with one warning. TensorRT-LLM then runs its own classes."""
    patches.refused = errors.first_line(error)
    log.logger.warning("promotion is off in this process, the host's own classes run: %s", patches.refused, exc_info=error)


def _rank(model_config: Any) -> int:
    return int(getattr(getattr(model_config, "mapping", None), "rank", 0))


def _without_broken_b12x(moe_cls: Any, trtllm: Host) -> Any:
    """Replace TensorRT-LLM's b12x class with CUTLASS if the payload check shows that its kernels will not compile."""
    if getattr(moe_cls, "__name__", "") != _HOSTS_B12X:
        return moe_cls
    payload = environment.probe(host.state(), always_look=True)  # even if our b12x is unavailable for another reason
    rejections = tuple(r for r in decide(LayerShape(), environment=payload).rejections if r.reason in _PAYLOAD)
    if not rejections:
        return moe_cls
    announce(Resolution((("b12x", Verdict(rejections)),)), f"moe_backend CUTEDSL ({moe_cls.__name__})")
    return trtllm.CutlassFusedMoE
