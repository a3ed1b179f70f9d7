# SPDX-License-Identifier: Apache-2.0
"""The code of MOE_DEVELOPER_GUIDE.md runs as it stands there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forks
from tests.nvfp4_layer import distance, random_call, random_layer
from trtllm_b12x.kernels import Geometry

GUIDE = Path(__file__).parents[2] / "MOE_DEVELOPER_GUIDE.md"
GEOMETRY = Geometry(4, 2, 128, 64, "Swiglu")


def code() -> tuple[str, str]:
    """Return the two halves of the example: a kernel that runs, and its choice by time."""
    section = GUIDE.read_text(encoding="utf-8").partition("## Kernels without an engine")[2]
    first, second = section.partition("```python\n")[2].partition("```")[0].split("\n\npaths = ")
    return first, f"paths = {second}"


def run(device: str) -> tuple[dict[str, Any], float]:
    layer = random_layer(GEOMETRY, device)
    names: dict[str, Any] = {"geometry": GEOMETRY, "device": torch.device(device), "weights": layer.kernel_weights()}
    names["x"], names["ids"], names["router_weights"] = call = random_call(GEOMETRY, 5, device=device)
    # Triton's interpreter takes a minute for kernels of 64 tokens.
    exec(code()[0] if device != "cpu" else code()[0].replace("plan(geometry, 64,", "plan(geometry, 8,"), names)
    return names, distance(names["output"], layer.expected(*call))


def in_the_interpreter() -> float:
    return run("cpu")[1]


def test_a_kernel_runs_on_plain_tensors() -> None:
    assert forks.in_the_interpreter(f"{__name__}:in_the_interpreter") < 0.004


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kernel_is_timed_and_chosen() -> None:
    names, error = run("cuda:0")
    assert error < 0.004
    names["other"] = lambda call: torch.cuda._sleep(10_000_000)  # some milliseconds

    def sample_routes(tokens: int, seed: int, skewed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return random_call(GEOMETRY, tokens, device="cuda", seed=seed)[1:]

    names["sample_routes"] = sample_routes
    exec(code()[1], names)
    assert names["choice"] == "triton"
