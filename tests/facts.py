# SPDX-License-Identifier: Apache-2.0
"""The facts of a machine where nothing stands against b12x."""

from __future__ import annotations

from trtllm_b12x.decision import Environment

GOOD = Environment(
    enabled=True,
    host="none",
    sm=120,
    toolkit_cuda=(13, 0),
    dsl="4.8.1",
    payload_cuda=(13, 4),
    flashinfer="0.7.2.post1",
    expert_parallel=True,
    tile=256,
)
