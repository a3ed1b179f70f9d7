# SPDX-License-Identifier: Apache-2.0
"""Build the pip commands that fix problems caused by installed packages."""

from __future__ import annotations

import re
import string

from .inputs import Environment, PayloadFault
from .rules import COMPLETE_DSL, COMPLETE_FLASHINFER, OLDEST_DSL, machine_findings, version_tuple
from .verdicts import RejectReason

FLASHINFERS = frozenset(
    {
        RejectReason.DSL_MISSING,
        RejectReason.DSL_PAYLOAD,
        RejectReason.FLASHINFER_MISSING,
        RejectReason.FLASHINFER_TOO_OLD,
        RejectReason.FLASHINFER_BROKEN,
        RejectReason.REQUIREMENT,
    }
)
"""Reasons that concern the packages behind FlashInfer's kernels. pip can fix them."""

_NO_REINSTALL = "does not match|PermissionError"
_NOT_BY_PIP = (PayloadFault.DRIVER, PayloadFault.NO_ANSWER, PayloadFault.FOREIGN)


def repair(e: Environment, newer_flashinfer: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the commands that fix every FlashInfer and CuTe DSL package, and ``name version`` of each package they replace."""
    wrong = dict(machine_findings(e))
    moves, install, reinstall = [], [], []
    pinned = "" if e.host in (None, "none") else " (TensorRT-LLM pins and uses it)"
    unmet = {_name(requirement) for requirement in e.unmet}

    flashinfer_moves = newer_flashinfer or e.flashinfer == "none" or RejectReason.FLASHINFER_TOO_OLD in wrong
    if flashinfer_moves:
        install.append(COMPLETE_FLASHINFER)
        moves += [f"flashinfer-python {e.flashinfer}{pinned}"] if e.flashinfer != "none" else []
    elif RejectReason.FLASHINFER_BROKEN in wrong and not e.missing and not re.search(_NO_REINSTALL, e.flashinfer_fault):
        reinstall.append(f"flashinfer-python=={e.flashinfer}")

    too_old = version_tuple(e.dsl or "") < OLDEST_DSL
    mixed = any(name.startswith("nvidia-cutlass-dsl-") for name in unmet)
    fault = e.payload_fault
    if e.dsl == "none" or "nvidia-cutlass-dsl" in unmet or mixed or (flashinfer_moves and e.dsl is not None and too_old):
        version = COMPLETE_DSL if e.dsl == "none" or too_old or "nvidia-cutlass-dsl" in unmet else e.dsl
        install.append(f"nvidia-cutlass-dsl[cu13]=={version}")
        moves += [f"nvidia-cutlass-dsl {e.dsl}{pinned}"] if e.dsl not in ("none", version) else []
    elif fault is PayloadFault.CU13_MISSING:
        install.append(f"nvidia-cutlass-dsl-libs-cu13=={e.dsl}")
    elif RejectReason.DSL_PAYLOAD in wrong and not e.missing and fault not in _NOT_BY_PIP:
        # Wheels before DSL 4.6 share paths: install cu13 last, or only cu13 if just its files were overwritten.
        wheels = e.dsl_wheels or ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13")
        shadowed = fault is PayloadFault.SHADOWED
        reinstall += [f"{name}=={e.dsl}" for name in wheels if name.endswith("-cu13") or not shadowed]
    others = [] if flashinfer_moves else [text for text in e.unmet if not text.startswith("nvidia-cutlass-dsl")]
    install += [text.split()[0] for text in others]
    moves += [f"{_name(text)} {text.split()[1].strip('(')}{pinned}" for text in others]
    install += e.missing

    commands = []
    if reinstall:
        commands.append(f"pip install --force-reinstall --no-deps {' '.join(reinstall)}")
    if install:
        commands.append("pip install " + " ".join(f'"{requirement}"' for requirement in install))
    return tuple(commands), tuple(moves)


def _name(requirement: str) -> str:
    """Return the distribution name in a requirement, ``name==version`` or ``name version``."""
    return requirement[: len(requirement) - len(requirement.lstrip(string.ascii_letters + string.digits + "-_."))]
