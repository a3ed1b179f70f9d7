# SPDX-License-Identifier: Apache-2.0
"""Compile a family's real kernels for a card that need not be in this machine, and check their PTX.

``python -m trtllm_b12x.kernels.prove_child sm_120a b12x`` prints one JSON line: a
``trtllm_b12x.environment.prove.Proof``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtllm_b12x.environment.prove import Proof

from . import Geometry, first_line
from .cards import models
from .catalog import KERNELS

LAYER = Geometry(16, 4, 512, 256, "Swiglu")


def proof(target: str, family: str) -> Proof:
    """Compile the family's kernels for each number format."""
    started, products, error = time.monotonic(), 0, ""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TRITON_CACHE_DIR"] = directory
        try:
            for (name, _), classes in KERNELS.items():
                if name == family:
                    kernel: Any = classes[0]
                    made = kernel.assembled(LAYER, models(target)[0], Path(directory))
                    count = sum(ptx.count(kernel.instruction) for ptx in made)
                    error = error if count else f"the PTX holds no {kernel.instruction} instruction"
                    products += count
        except Exception as exception:
            print(exception)  # the parent searches this text for the assembler's error
            error = first_line(exception)[:300]
    return Proof(target, not error, error, products, round(time.monotonic() - started, 1))


def main() -> None:
    print("\n" + json.dumps(asdict(proof(*sys.argv[1:]))))


if __name__ == "__main__":
    main()
