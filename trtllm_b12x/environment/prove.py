"""Compile the real kernels of a family in a subprocess, for a card that need not be present.

The CuTe DSL may crash the process that uses it.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

from . import child

TIMEOUT_S = 300


@dataclass(frozen=True)
class Proof:
    """Result of the test compile."""

    target: str
    compiled: bool
    error: str = ""
    """First informative line of the assembler's message or of the exception."""
    products: int = 0
    """Number of tensor core instructions in the PTX. Those of b12x are ``kind::mxf4nvf4``."""
    seconds: float = 0.0


def prove(target: str, family: str = "b12x") -> Proof:
    """Run ``trtllm_b12x.kernels.prove`` outside the working directory. A crash or a hang is also a result.

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
