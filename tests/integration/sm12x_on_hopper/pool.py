# SPDX-License-Identifier: Apache-2.0
"""The package's pool of processes that compile for Triton (``kernels/triton/compile_pool.py``), with translated machine code."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.integration.sm12x_on_hopper.build import device_functions
from tests.integration.sm12x_on_hopper.own import translating_triton
from trtllm_b12x.kernels.triton import compile_pool

if __name__ == "__main__":
    device_functions()  # once, before the pool forks
    with translating_triton():
        compile_pool.main()
