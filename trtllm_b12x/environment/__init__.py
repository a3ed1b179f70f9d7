"""Facts about this machine for :func:`trtllm_b12x.decision.decide`, probed once per process.

Static facts come first: package metadata, RECORD files, nvidia-smi, source text.  Neither FlashInfer nor the CuTe DSL is imported
here and no CUDA context is made; a child process imports them once per installation (:mod:`.cute_dsl`).
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from functools import cache

from trtllm_b12x.core import settings
from trtllm_b12x.decision import Environment

from . import answers, packages, prove, triton
from .cute_dsl import WHEELS, Payload, inspect_payload, installation_key
from .flashinfer import FlashInfer, distribution_of, inspect_flashinfer
from .gpu import cards, driver_cuda, gpu_sm, toolkit_cuda

__all__ = [
    "FlashInfer",
    "Payload",
    "cards",
    "compile_error",
    "driver_cuda",
    "gpu_sm",
    "inspect_flashinfer",
    "inspect_payload",
    "of_flashinfer",
    "probe",
    "toolkit_cuda",
    "triton",
]

_COMPILED_WITH = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch")
"""Of FlashInfer's requirements those whose version its kernels feel; the rest only has to be there."""


def of_flashinfer(found: FlashInfer) -> Environment:
    """What is told by reading it alone."""
    installed = found.version != "none"
    return Environment(
        flashinfer=found.version,
        flashinfer_fault=found.fault,
        mismatched=found.mismatched,
        exact_scales=found.exact_scales if installed else None,
        expert_parallel=found.negative_ids if installed else None,
        tile=found.tile if installed else None,
    )


def probe(host: tuple[str, str] = ("none", ""), always_look: bool = False) -> Environment:
    """Return everything, for the process that asks.

    Args:
        host: state of the engine in this process, and what differs from the nearest that is known.
        always_look: see the CuTe DSL's payload loaded also where nothing could make b12x serve.
    """
    state, detail = host
    return replace(_probe(state != "unsupported", always_look), host=state, host_detail=detail)


@cache
def _probe(hosted: bool, always_look: bool) -> Environment:
    """Read the machine once.

    The CuTe DSL's payload is looked at unless nothing could make b12x serve here (or with ``always_look``): on another card, or
    switched off, a server starts without it.  What Triton lacks is told by files and a ptxas.
    """
    wheels = packages.installed(WHEELS)
    dsl = wheels.get("nvidia-cutlass-dsl")
    facts = replace(
        of_flashinfer(inspect_flashinfer()),
        enabled=settings.ENABLED(),
        sm=gpu_sm(),
        toolkit_cuda=toolkit_cuda(),
        dsl="none" if dsl is None else dsl.version,
        dsl_wheels=tuple(wheels),
    )
    if not always_look and (facts.enabled is False or not hosted or facts.sm not in (None, 120, 121)):
        return facts
    facts = replace(facts, triton_lacks=triton.lacking(facts.sm), upcast=triton.upcast(facts.sm))
    if not always_look and "b12x" not in settings.KERNELS.listed():
        return facts
    payload = inspect_payload()
    origin = packages.origin("flashinfer")
    ours = distribution_of(origin) if origin is not None else None
    stated = [*wheels.values(), *([ours] if ours is not None else [])]
    unmet, missing = packages.requirements(stated)
    if importlib.util.find_spec("triton") is None:  # FlashInfer's b12x module imports it and does not say so
        missing.append("triton")
    return replace(
        facts,
        dsl=payload.version if dsl is not None else "none",
        payload_cuda=payload.cuda,
        payload_fault=payload.fault,
        payload_detail=payload.detail,
        payload_file=payload.file,
        payload_kept=payload.kept,
        dsl_in_the_way=payload.in_the_way,
        flashinfer_fault=facts.flashinfer_fault or ("" if facts.mismatched else payload.flashinfer_fault),
        unmet=tuple(text for text in unmet if text.startswith(_COMPILED_WITH)),
        missing=tuple(missing) if _lacks_a_module(payload) else (),
        unrecorded=tuple(name for name, d in _named(wheels, ours).items() if not d.read_text("RECORD")),
    )


def _lacks_a_module(payload: Payload) -> bool:
    """An import failed for a module that is neither FlashInfer's nor the CuTe DSL's."""
    module = re.search(r"No module named '(\w+)", f"{payload.detail} {payload.flashinfer_fault}")
    return module is not None and module[1] not in ("cutlass", "nvidia_cutlass_dsl", "flashinfer")


def _named(
    wheels: dict[str, packages.Distribution], flashinfer: packages.Distribution | None
) -> dict[str, packages.Distribution]:
    return {**wheels, **({"flashinfer-python": flashinfer} if flashinfer is not None else {})}


def compile_error(target: str) -> str:
    """What stands against compiling FlashInfer's kernels for ``target`` (``sm_120a``): empty, or one line.

    A child compiles one the first time on an installation, because a payload that imports may still end the process that uses it;
    that it passed is kept.
    """

    def ask() -> str:
        proof = prove.prove(target)
        return "" if proof.compiled else proof.error or "the compile failed and does not say why"

    error, _ = answers.once(f"compile {target} {installation_key()}", ask, keep=lambda answer: answer == "")
    return str(error)


def forget() -> None:
    """Read the machine anew."""
    _probe.cache_clear()
