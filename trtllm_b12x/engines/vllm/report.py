# SPDX-License-Identifier: Apache-2.0
"""Lines of ``doctor`` about vLLM: whether this version is recognized, and which backends its oracles would choose here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from trtllm_b12x import formats
from trtllm_b12x.core import settings
from trtllm_b12x.decision import Environment

from .. import report
from . import facts


def vllm_lines(e: Environment) -> Iterator[str]:
    """Yield lines on the installed vLLM: none if vLLM is absent, one with the reason if vLLM does not load our kernels."""
    if not facts.version():
        return
    if reason := report.left_out("VLLM_PLUGINS", os.environ.get("VLLM_PLUGINS", "").split(",")):
        yield f"{facts.version()}, {reason}"
        return
    if difference := report.difference("vllm", facts.version(), facts.__file__, facts.check):
        yield f"{facts.version()}, left alone: {difference}"
        return
    yield f"{facts.version()}, recognized"
    e = replace(e, sm=settings.counted(e.sm))
    for form in formats.FORMATS:
        slots = [slot for slot in facts.SLOTS if slot.format == form.name]
        pair = slots[0].pair
        verdict = report.verdict(form, facts.FAMILIES, e, pair, (lambda known: known) if pair else facts.for_every_call)
        theirs = " or ".join(dict.fromkeys(slot.instead[0] for slot in slots))
        if not verdict.served:
            yield f"{form.name} experts stay on {theirs}: {verdict.findings}"
        else:
            place = "before" if pair else "in place of"
            yield f"{form.name} experts run on {' and '.join(verdict.families)}, {place} {theirs}"
