# SPDX-License-Identifier: Apache-2.0
"""Probe this machine once per process, for ``trtllm_b12x.decision.decide``.

Static facts come first: package metadata, RECORD files, nvidia-smi, source text. This process imports neither FlashInfer nor
the CuTe DSL and creates no CUDA context. A child process imports them once per installation (``cute_dsl.py``).
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from functools import cache

from trtllm_b12x.core import settings
from trtllm_b12x.decision import Environment

from . import nvrtc, packages, triton
from .cute_dsl import WHEELS, inspect_payload
from .flashinfer import distribution_of, inspect_flashinfer
from .gpu import cards, driver_cuda, gpu_sm, toolkit_cuda

__all__ = ["cards", "driver_cuda", "gpu_sm", "inspect_flashinfer", "inspect_payload", "probe", "toolkit_cuda", "triton"]

_COMPILED_WITH = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch")
"""Requirements of FlashInfer whose version affects its kernels. Other requirements only have to be installed."""


def probe(host: tuple[str, str] = ("none", ""), always_look: bool = False) -> Environment:
    """Return all facts about this machine.

    ``host`` is the state of TensorRT-LLM in this process, and the difference from the nearest known generation.
    ``always_look`` loads the CuTe DSL payload even if b12x cannot serve on this machine.
    """
    state, detail = host
    return replace(_probe(state != "unsupported", always_look), host=state, host_detail=detail)


@cache
def _probe(hosted: bool, always_look: bool) -> Environment:
    """Probe the machine once.

    Without ``always_look``, the CuTe DSL payload is loaded only if b12x is enabled and supports the card. Otherwise the server
    starts without the payload. Files and ptxas show which requirements Triton lacks.
    """
    wheels = packages.installed(WHEELS)
    dsl = wheels.get("nvidia-cutlass-dsl")
    facts = replace(
        inspect_flashinfer(),
        enabled=settings.ENABLED(),
        sm=gpu_sm(),
        toolkit_cuda=toolkit_cuda(),
        dsl="none" if dsl is None else dsl.version,
        dsl_wheels=tuple(wheels),
        nvrtc=nvrtc.library() is not None,
    )
    if not always_look and (facts.enabled is False or not hosted or facts.sm not in (None, 120, 121)):
        return facts
    facts = replace(facts, triton_lacks=triton.lacking(facts.sm), upcast=triton.upcast(facts.sm))
    if not always_look and "b12x" not in settings.KERNELS():
        return facts
    facts = inspect_payload(facts)
    origin = packages.origin("flashinfer")
    ours = distribution_of(origin) if origin is not None else None
    unmet, missing = packages.requirements((*wheels.values(), *(() if ours is None else (ours,))))
    if importlib.util.find_spec("triton") is None:  # FlashInfer's b12x module imports Triton but does not declare it
        missing.append("triton")
    return replace(
        facts,
        unmet=tuple(text for text in unmet if text.startswith(_COMPILED_WITH)),
        missing=tuple(missing) if _lacks_a_module(facts) else (),
    )


def _lacks_a_module(facts: Environment) -> bool:
    """Return True if an import failed because a module outside FlashInfer and the CuTe DSL is missing."""
    module = re.search(r"No module named '(\w+)", f"{facts.payload_detail} {facts.flashinfer_fault}")
    return module is not None and module[1] not in ("cutlass", "nvidia_cutlass_dsl", "flashinfer")


forget = _probe.cache_clear
"""Clear the cached probe."""
