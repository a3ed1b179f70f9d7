# SPDX-License-Identifier: Apache-2.0
"""Reset the process-wide state of this package, and list the state that outlives a reset."""

from __future__ import annotations

from collections.abc import Callable

_kept: list[Callable[[], None]] = []
in_server = False
"""True once promotion is installed in an engine. A compile that may crash the process then runs in a child first."""

PERMANENT = {
    "core.hook": "import hooks and their last failure: uninstall() removes them",
    "core.process": "the reset functions themselves",
    "decision.decide": "verdicts on equal facts are equal",
    "dispatch.store": "versions of installed packages",
    "engines.trtllm.contract": "facts.json",
    "engines.trtllm.host": "the TensorRT-LLM of this process, whose classes ours inherit",
    "engines.trtllm.patches": "rebound names of TensorRT-LLM: uninstall() restores them",
    "engines.sglang.plugin": "rebound names of SGLang: uninstall() restores them",
    "engines.vllm.experts": "classes that vLLM holds",
    "engines.vllm.facts": "the contract of the vLLM of this process",
    "engines.vllm.monolithic": "classes that vLLM holds",
    "engines.vllm.plugin": "rebound names of vLLM: uninstall() restores them",
    "environment": "facts of the machine, which cost processes; environment.forget() clears them",
    "environment.triton": "releases of ptxas programs",
    "formats.constants": "captured graphs read these tensors",
    "kernels.b12x.compiler": "captured graphs launch these kernels",
    "kernels.driver": "the driver's library",
    "environment.nvrtc": "NVRTC's library",
    "kernels.cuda.nvrtc": "NVRTC's version",
    "kernels.cuda.probe": "what a GPU's tensor cores do",
    "kernels.b12x.precompile": "jobs of a child process",
    "kernels.triton.tiles": "tiles for equal sizes are equal",
    "kernels.b12x.streams": "launches of existing layers stay in order",
}
"""Modules whose state ``forget`` leaves as it is, and why."""


def kept(forget: Callable[[], None]) -> Callable[[], None]:
    """Register a reset function. Also works as a decorator."""
    _kept.append(forget)
    return forget


def forget() -> None:
    """Reset all process-wide state except ``PERMANENT``, as in a new process. Existing layers are not changed."""
    for reset in _kept:
        reset()
