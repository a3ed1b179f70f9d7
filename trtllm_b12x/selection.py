"""Promotion: what is rebound in the host, why, and until when.

Everything here is a module attribute that the host looks up when it builds a layer; a name that somebody bound before asks
the same switch, so that ``uninstall`` reaches it too.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

from trtllm_b12x.core import errors, hook, log, process, settings

from . import environment, host, registry, unserved
from .decision import Problem, RejectReason, Resolution, Verdict, decide
from .decision.announce import announce
from .host import Host, autotuner, patches, questions
from .host.patches import promotion


def install() -> None:
    """Promote in this process, before or after the host is imported.  Idempotent, thread-safe.

    Nothing is patched with ``TRTLLM_B12X=0``, and TensorRT-LLM is not imported by this.  Without it the embedded host is patched.
    A host of another shape is left alone, with a warning.
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
        # One that is being imported right now is patched by its loader when it is complete.
        if not getattr(module.__spec__, "_initializing", False):
            hook.hand_over(module, patch)


def _turn_on() -> None:
    with patches.lock:
        if not promotion.active:
            log.configure()
        promotion.active = True
        process.in_server = host.installed()


def uninstall() -> None:
    """Give the host its names back; names that others bound meanwhile ask the switch and answer as the host.

    Layers that were built stay what they are.  A class that ``get_moe_cls`` gave before must have been built: the host's own
    ``create_moe_backend`` does not know it.
    """
    with patches.lock:
        promotion.active, promotion.refused, hook.failure = False, "", ""
        _give_back()


def _give_back() -> None:
    with patches.lock:
        hook.stop()
        patches.give_back()


def patch(module: ModuleType) -> None:
    """Rebind the names of one of the host's modules (``core.hook.WATCHED``), all of them or none.

    ``create_moe.get_moe_cls`` (generations A and B).  Why: the host builds and wraps whatever class it returns, and has no
    registry for the CUTLASS name.  How: rebound as a module attribute, which ``create_moe`` looks up globally and
    ``ConfigurableMoE`` imports at call time, and wherever the host's modules bound it before.  It can go when the host offers an
    entry point for backends; upstream decided against promoting CUTLASS (PR 13773).

    ``create_moe.create_moe_backend`` (every generation).  Why: only here are a layer's activation, bias and router weight known;
    it refuses every class that it does not name, also from C1 on, where ``get_moe_cls`` is gone (``moe_resolution``).  How: as
    above; inside the call, its name for the CUTLASS class is ours.  It can go with the other.

    ``create_moe.resolve_moe_cls`` (from C1 on).  Why: it raises where no class of the host's serves a layer (:mod:`.unserved`).
    How: the error is answered.  It can go when its tables have a way in for classes from elsewhere.

    ``AutoTuner._find_nearest_profile``: :mod:`trtllm_b12x.host.autotuner`.

    Raises:
        ValueError: the module lacks what is rebound.
    """
    if not settings.ENABLED():
        return
    _turn_on()
    with patches.lock:
        if module.__name__.rpartition(".")[2] == "autotuner":
            autotuner.patch(module, lambda: promotion.active)
            return
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
            if patches.rebound(original):
                continue
            patches.rebind(module, name, wrapper)
            # A gate that asks one function and a layer that asks another would not fit together.
            for path, other in list(sys.modules.items()):
                if path.startswith("tensorrt_llm.") and isinstance(other, ModuleType) and vars(other).get(name) is original:
                    patches.put(other, name, getattr(module, name))


def _adapter() -> Host | None:
    """The host's adapter while promotion is on; None leaves the host alone."""
    if not promotion.active or promotion.refused:
        return None
    with patches.building:
        if promotion.refused:
            return None
        try:
            return host.load()
        except host.UnsupportedHostError as error:
            promotion.refused = str(error)
            _give_back()  # nothing of ours was answered yet
            log.logger.warning("%s; the host's own classes run (trtllm-b12x doctor shows what differs)", error)
            return None


def _resolve(question: questions.Question) -> Resolution:
    from . import eligibility  # torch is there by now

    return eligibility.resolve(question)


def _is_ours(moe_cls: Any) -> bool:
    return "trtllm_b12x.fused_moe" in sys.modules and moe_cls is _our_class()


def _our_class() -> Any:
    # Imported at the first promotion: at the time of the import hook the host's package is half-initialized.
    with patches.building:
        from .fused_moe import layer_class

        return layer_class()


# ---- which class ---------------------------------------------------------------------------------------------------------

_NO_SM12X_KERNEL = "CuteDslFusedMoE"
"""Its NVFP4 kernels are for SM100 alone; named on SM12x it fails at run time (TensorRT-LLM PR 11997).

So does ``TRTLLMGenFusedMoE``, but that name is read by models, for what CUTLASS does not speak: decoder layers of DeepSeek-V3,
Qwen3-MoE, Qwen3-Next and GLM4-MoE compare ``model_config.moe_backend`` with it before they ask for ``do_finalize=False`` and
unpack a list, and ``DeepseekV3Gate`` makes its bias bfloat16 (``models/modeling_*.py``).  They compare with no other name.
"""
_NAMED_BY_MODELS = "TRTLLMGenFusedMoE"

_HOSTS_B12X = "CuteDslB12xFusedMoE"
"""The host's own b12x (PR 13773): compiles with whatever CuTe DSL payload is there, dies with a wrong one (issue 15853)."""

_PAYLOAD = (RejectReason.DSL_MISSING, RejectReason.DSL_PAYLOAD, RejectReason.TOOLKIT)


def _promoting(get_moe_cls: Any) -> Any:
    @functools.wraps(get_moe_cls)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        moe_cls = get_moe_cls(*args, **kwargs)
        try:
            trtllm = _adapter()
            return moe_cls if trtllm is None else _class_for(trtllm, moe_cls, args, kwargs)
        except Exception as error:
            refuse(error)
            return moe_cls

    return wrapper


def _resolving(resolve_moe_cls: Any) -> Any:
    @functools.wraps(resolve_moe_cls)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return resolve_moe_cls(*args, **kwargs)
        except ValueError:
            found = None
            with suppress(Exception):
                trtllm = _adapter()
                model_config = args[0] if args else kwargs.get("model_config")
                found = trtllm and unserved.class_for(trtllm, _resolve, model_config, kwargs.get("override_quant_config"))
            if found is None:
                raise
            return found

    return wrapper


def _class_for(trtllm: Host, moe_cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    moe_cls = _without_broken_b12x(moe_cls, trtllm)
    model_config = args[0] if args else kwargs.get("model_config")
    question = questions.of_model(model_config, args[1] if len(args) > 1 else kwargs.get("override_quant_config"))
    if question is None or (moe_cls is not trtllm.CutlassFusedMoE and not _has_no_kernel_here(moe_cls)):
        return moe_cls
    verdict = _resolve(question)
    if moe_cls.__name__ == _NAMED_BY_MODELS:
        if verdict.served:
            _warn_of_trtllm(model_config)
        return moe_cls
    if verdict.served:
        return _our_class()
    announce(verdict, f"moe_backend {getattr(model_config, 'moe_backend', '?')}", _rank(model_config))
    return moe_cls


def _building(names: dict[str, Any], create_moe_backend: Any) -> Any:
    """``names`` are its module's."""
    signature = inspect.signature(create_moe_backend)

    @functools.wraps(create_moe_backend)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError:
            call = None  # the error is the host's to make
        if call is None:
            return create_moe_backend(*args, **kwargs)
        asked = call.arguments["moe_cls"]
        otherwise = getattr(asked, "hosts_class", asked)
        try:
            trtllm = _adapter()
            moe_cls, verdict = (otherwise, None) if trtllm is None else _backend_for(trtllm, call)
            ours = moe_cls if _is_ours(moe_cls) else None
        except Exception as error:
            refuse(error)
            moe_cls, verdict, ours = otherwise, None, None
        call.arguments["moe_cls"] = moe_cls
        try:
            with patches.known_as_cutlass(names, ours):
                module = create_moe_backend(*call.args, **call.kwargs)
        except Exception as error:
            if ours is None:
                raise
            call.arguments["moe_cls"], verdict, ours = ours.hosts_class, None, None
            module = create_moe_backend(*call.args, **call.kwargs)  # or the error is the host's
            refuse(error)
        if ours is None:
            with suppress(Exception):
                if verdict is not None:
                    registry.record(module, verdict, ready=True)
        return module

    return wrapper


def _backend_for(trtllm: Host, call: inspect.BoundArguments) -> tuple[Any, Resolution | None]:
    """The class to build, and the verdict on the layer if it is one of CUTLASS's."""
    asked, model_config = call.arguments["moe_cls"], call.arguments.get("model_config")
    moe_cls = _without_broken_b12x(asked, trtllm)
    promoted_before = _is_ours(asked)
    if not promoted_before and moe_cls is not trtllm.CutlassFusedMoE:
        return moe_cls, None
    verdict = _resolve(questions.of_call(_flat(call), quantization=not promoted_before))
    ours = verdict.served
    # Where get_moe_cls names the class, yes or no was said already; elsewhere the host's answer is CutlassFusedMoE.
    if ours and (promoted_before or not trtllm.has_get_moe_cls):
        if str(getattr(model_config, "moe_backend", "")).upper() == "TRTLLM":
            _warn_of_trtllm(model_config)
        return _our_class(), verdict
    if ours:
        return moe_cls, None  # somebody named the host's class
    if promoted_before or not trtllm.has_get_moe_cls:
        announce(verdict, "MoE layer", _rank(model_config))
    return (trtllm.CutlassFusedMoE if promoted_before else moe_cls), verdict


def _flat(call: inspect.BoundArguments) -> dict[str, Any]:
    """Arguments by name, those of a ``**arguments`` too."""
    several = (p.name for p in call.signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD)
    return {**call.arguments, **call.arguments.get(next(several, ""), {})}


def _warn_of_trtllm(model_config: Any) -> None:
    """From C1 on the host gives CUTLASS in its place by itself; the model goes on asking TRTLLM."""
    if not _rank(model_config):
        message = "moe_backend TRTLLM has no NVFP4 kernels for this card, and models expect what only it does"
        log.once(f"{message}: set moe_config.backend: CUTLASS, whose decode is then ours")


def refuse(error: Exception) -> None:
    """The host's own answer from here on, and one warning."""
    promotion.refused = errors.first_line(error)
    with suppress(Exception):
        why = promotion.refused
        log.logger.warning("promotion is off in this process, the host's own classes run: %s", why, exc_info=error)


def _rank(model_config: Any) -> int:
    return int(getattr(getattr(model_config, "mapping", None), "rank", 0))


def _has_no_kernel_here(moe_cls: type) -> bool:
    return moe_cls.__name__ in (_NO_SM12X_KERNEL, _NAMED_BY_MODELS) and environment.probe(host.state()).sm in (120, 121)


def _without_broken_b12x(moe_cls: Any, trtllm: Host) -> Any:
    """CUTLASS in place of the host's own b12x class where the payload gate says that its kernels will not compile."""
    if getattr(moe_cls, "__name__", "") != _HOSTS_B12X:
        return moe_cls
    payload = environment.probe(host.state(), always_look=True)  # also where b12x of ours would not be served for another reason
    rejections = tuple(r for r in decide(Problem(), environment=payload).rejections if r.reason in _PAYLOAD)
    if not rejections:
        return moe_cls
    announce(Resolution((("b12x", Verdict(rejections)),)), f"moe_backend CUTEDSL ({moe_cls.__name__})")
    return trtllm.CutlassFusedMoE
