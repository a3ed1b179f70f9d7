"""What comes of compiling a family's real kernels here, for a card that need not be: a process of its own says it.

The CuTe DSL may kill the process that uses it.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

from . import child

TIMEOUT_S = 300


@dataclass(frozen=True)
class Proof:
    """What the compile showed."""

    target: str
    compiled: bool
    error: str = ""
    """First telling line: the assembler's words, or the exception's."""
    products: int = 0
    """Tensor core instructions in the PTX: b12x's are ``kind::mxf4nvf4``."""
    seconds: float = 0.0


def prove(target: str, family: str = "b12x") -> Proof:
    """Run :mod:`trtllm_b12x.kernels.prove`; a crash or a hang is an answer too.  Nothing of the working directory is imported.

    Args:
        target: ``sm_120a`` or ``sm_121a``.
    """
    try:
        result = child.run(child.command("trtllm_b12x.kernels.prove", target, family), child.variables(), TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Proof(target, False, f"no result within {TIMEOUT_S} s")
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if lines:
        return Proof(**json.loads(lines[-1]))
    words = [line for line in result.stderr.splitlines() if line.strip()]
    return Proof(target, False, words[-1] if words else f"the process died with status {result.returncode}")
