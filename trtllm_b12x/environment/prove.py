# SPDX-License-Identifier: Apache-2.0
"""Compile the real kernels of a family in a subprocess, for a card that need not be present.

The CuTe DSL may crash the process that uses it.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, replace

from trtllm_b12x.core import child, disk

from .cute_dsl import installation_key

TIMEOUT_S = 300


@dataclass(frozen=True)
class Proof:
    target: str
    compiled: bool
    error: str = ""
    """First informative line of the assembler's message or of the exception."""
    products: int = 0
    """Number of tensor core instructions in the PTX. Those of b12x are ``kind::mxf4nvf4``."""
    seconds: float = 0.0


def prove(target: str, family: str = "b12x") -> Proof:
    """Compile for ``target`` (``sm_120a``) with ``trtllm_b12x.kernels.prove_child``. A crash or a hang is also a result."""
    try:
        result = child.run(child.command("trtllm_b12x.kernels.prove_child", target, family), child.variables(), TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Proof(target, False, f"no result within {TIMEOUT_S} s")
    answers = [line for line in result.stdout.splitlines() if line.startswith("{")]
    words = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    if not answers:
        return Proof(target, False, words[-1] if words else f"the process died with status {result.returncode}")
    proof = Proof(**json.loads(answers[-1]))
    # The assembler writes to the process's own streams.
    complaints = (line.strip() for line in (*result.stdout.splitlines(), *words) if re.search("ptxas.*(fatal|error)", line))
    return proof if proof.compiled else replace(proof, error=next(complaints, proof.error)[:300])


def compile_error(target: str) -> str:
    """Compile a FlashInfer kernel for ``target`` (``sm_120a``). Return the error in one line, or an empty string.

    A child process compiles, because a payload that imports may still crash the process that uses it. Success is cached per
    installation.
    """

    def ask() -> str:
        proof = prove(target)
        return "" if proof.compiled else proof.error or "the compile failed and does not say why"

    error, _ = disk.once(f"compile {target} {installation_key()}", ask, keep=lambda answer: answer == "")
    return str(error)
