# SPDX-License-Identifier: Apache-2.0
"""Read from an engine's log what the package serves."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.on_card.steps import StepError

_SERVED = re.compile(r"rank \d+: \d+ of \d+ MoE layers .*|\w+ experts run on trtllm-b12x.*")
"""The package's line in TensorRT-LLM and in vLLM. The engine writes the text before it."""
_SAID = re.compile(r"(?<=\[trtllm_b12x\] \[)\w+\] (.*)|(\w+ experts run on trtllm-b12x.*|vLLM(?:'s \w+)? keeps .*)")


def served(log: Path, with_it: bool) -> tuple[list[str], list[str]]:
    """Return the package's lines on what it serves, and all of its lines.

    Raises:
        StepError: the package served nothing, or it served although it was switched off.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    found = [line.strip() for line in dict.fromkeys(_SERVED.findall(text))]
    said = [line.strip() for line in dict.fromkeys(match[1] or match[2] or "" for match in _SAID.finditer(text))]
    if with_it and not found:
        why = " / ".join(said[-5:]) or "it said nothing; trtllm-b12x doctor may know"
        raise StepError(f"the package served no layer, so the engine would be compared with itself: {why}")
    if found and not with_it:
        raise StepError(f"the package was not off: {found[0]}")
    return found, said
