# SPDX-License-Identifier: Apache-2.0
"""Import the CuTe DSL and FlashInfer's kernels in a process that may crash. This script prints one JSON line per result.

``{"cutlass": {...}}`` has version, CUDA payload and file of the CuTe DSL, or the error. ``{"flashinfer": {...}}`` has the error
of importing FlashInfer's kernels, if FlashInfer is installed. The script needs only the standard library.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any

DISPATCH = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_dispatch"


def say(question: str, **answer: Any) -> None:
    print("\n" + json.dumps({question: answer}), flush=True)


def error_of(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def file_of(package: str) -> str:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def answer_for_the_gpu(torch: Any, sm_count: int, major: int, minor: int) -> None:
    """Make torch report a GPU: FlashInfer 0.6.17 and 0.6.18 query it at import (``gdn_kernels``) and while building a launch."""

    class Properties:
        name = f"sm_{major}{minor}a"
        multi_processor_count = sm_count
        total_memory = 96 << 30

    Properties.major, Properties.minor = major, minor  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        return
    torch.cuda.get_device_properties = lambda *arguments: Properties
    torch.cuda.get_device_capability = lambda *arguments: (major, minor)
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda *arguments: type("Stream", (), {"cuda_stream": 0})()


def look_at_cutlass() -> None:
    from cutlass.base_dsl.version_info import CUDA_VERSION

    module = sys.modules["cutlass"]
    version, file = str(getattr(module, "__version__", "") or ""), module.__file__ or file_of("cutlass")
    say("cutlass", cuda=[CUDA_VERSION.major, CUDA_VERSION.minor], version=version, file=file)


def look_at_flashinfer() -> None:
    init = file_of("flashinfer")
    if not init:
        return
    kernels = os.path.join(os.path.dirname(init), *DISPATCH.split(".")[1:]) + ".py"
    if os.path.exists(kernels):  # else FlashInfer is older than b12x (see its version), or damaged (see RECORD)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # set after the DSL chose its payload: torch must not use the GPU
        import torch

        answer_for_the_gpu(torch, 188, 12, 0)
        importlib.import_module(DISPATCH)
    say("flashinfer", error="", file=init)


def main() -> None:
    for package, look_at in (("cutlass", look_at_cutlass), ("flashinfer", look_at_flashinfer)):
        try:
            look_at()
        except Exception as error:
            say(package, error=error_of(error), file=file_of(package))
            return


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))  # PYTHONSAFEPATH does not remove it before Python 3.11
    sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) != here]
    main()
