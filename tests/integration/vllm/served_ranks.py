# SPDX-License-Identifier: Apache-2.0
"""One of two ranks of models with random weights, on the CPU: ``served_ranks FOLDER RANK`` saves what it drew of each case."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.served import drawn
from tests.integration.vllm import layers, test_served_model, whole

CASES = (("qwen3-30b-a3b-mxfp8", False), ("qwen3-30b-a3b-mxfp8", True), ("gpt-oss-20b", False))
"""Name, and whether whole experts are on a rank."""


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a rank's parameters without what its backend pads. FP8 as bytes."""
    found = {}
    for parameter in drawn.parameters(model):
        tensor = parameter.target[tuple(slice(n) for n in drawn.local_shape(parameter))].clone()
        found[parameter.name] = tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor
    return found


def main(folder: str, rank: str) -> None:
    layers.pretend_sm120()
    with test_served_model.card(), whole.ranks(2, int(rank), Path(folder) / "store"):
        for i, (name, expert_parallel) in enumerate(CASES):
            more = {"tensor_parallel_size": 2, "enable_expert_parallel": expert_parallel}
            with test_served_model.built(name, Path(folder) / f"model-{i}-{rank}", **more) as (model, _, _):
                drawn.fill(model)
                torch.save(values(model), Path(folder) / f"{i}-{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
