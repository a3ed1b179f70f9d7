# SPDX-License-Identifier: Apache-2.0
"""Lines of ``doctor`` about SGLang: whether this version is recognized, and what its experts would run on here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from trtllm_b12x import formats
from trtllm_b12x.core import settings
from trtllm_b12x.decision import Environment

from .. import report
from . import facts


def sglang_lines(e: Environment) -> Iterator[str]:
    """Yield lines on the installed SGLang: none if SGLang is absent, one with the reason if it does not load our kernels."""
    if not facts.version():
        return
    listed = os.environ.get("SGLANG_PLUGINS", "")
    if listed and (reason := report.left_out("SGLANG_PLUGINS", [name.strip() for name in listed.split(",")])):
        yield f"{facts.version()}, {reason}"
        return
    if difference := report.difference("sglang", facts.version(), facts.__file__, facts.check):
        yield f"{facts.version()}, left alone: {difference}"
        return
    yield f"{facts.version()}, recognized"
    e = replace(e, sm=settings.counted(e.sm))
    for form in formats.FORMATS:
        theirs = facts.FORMATS.get(form.name, "")
        if not theirs:
            yield f"{form.name} experts stay SGLang's, which shuffles their rows for SM100"
        elif (verdict := report.verdict(form, facts.FAMILIES, e, own_path=True)).served:
            yield f"{form.name} experts run on {' and '.join(verdict.families)}, before {theirs}"
        else:
            yield f"{form.name} experts stay on {theirs}: {verdict.findings}"
    yield "checkpoints of modelopt_mixed (nvidia/Qwen3.6) need --moe-runner-backend flashinfer_cutlass"
