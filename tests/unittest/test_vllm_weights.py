# SPDX-License-Identifier: Apache-2.0
"""What our kernels are given of vLLM's tensors, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trtllm_b12x.engines.vllm import weights
from trtllm_b12x.formats import GATE_UP, ROWS, WeightLayout
from trtllm_b12x.formats.weights import tensors_of
from trtllm_b12x.kernels import Geometry

GEOMETRY = Geometry(3, 2, 128, 64, "SwigluBias", bias=torch.bfloat16, layout=WeightLayout(ROWS, GATE_UP))
GATE, UP, INPUTS = torch.tensor([2.0, 8.0, 4.0]), torch.tensor([4.0, 2.0, 4.0]), torch.tensor([2.0, 4.0, 8.0])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("name", "power"), [("w13_weight_scale_2", 1), ("w13_weight_global_scale", -1), ("", 1)])
def test_scalars(name: str, power: int, shared: bool) -> None:
    """ModelOpt's scales of gate and up, the reciprocals of compressed-tensors, or neither."""
    layer = SimpleNamespace(**{name: torch.stack((GATE, UP), 1) ** power})
    weights.record_halves(layer)
    found = weights.scalars(layer, (INPUTS, 2 * INPUTS), GATE, shared)
    if name:
        assert torch.equal(found.fc1_half_alphas, torch.stack((UP, GATE)) / INPUTS)  # type: ignore[arg-type]
        assert torch.equal(found.fc1_alpha, torch.tensor([2.0, 2.0, 0.5]))  # type: ignore[arg-type]
    assert weights.scale_ratio(found) == (4 if name else 1)
    first, inputs = INPUTS[:1] if shared else INPUTS, found.inputs
    expected = first, 2 * INPUTS, first.expand(3).reciprocal(), (2 * INPUTS).reciprocal()
    assert all(torch.equal(*pair) for pair in zip(tensors_of(inputs).values(), expected, strict=True))
    assert weights.scalars(layer, (3 * INPUTS, INPUTS), GATE, shared) is found  # captured graphs read the same memory
    assert torch.equal(inputs.fc2_input_scale, INPUTS)
    assert weights.scalars(layer, None, GATE, not shared) is not found


def test_view() -> None:
    """Every tensor is vLLM's own, and in its place."""
    drawn, given = weights.draw(GEOMETRY, torch.device("cpu"))
    scalars = weights.scalars(SimpleNamespace(), given, torch.ones(3), False)
    found: Any = weights.view(drawn, GEOMETRY, scalars, (1.5, 0.5, 7.0))
    found.check(GEOMETRY)
    alphas: Any = drawn.alphas
    own = {"fc1_weight": drawn.w1, "fc2_weight": drawn.w2, "fc1_weight_sf": drawn.scales[0], "fc2_weight_sf": drawn.scales[1]}
    own |= {"fc1_alpha": alphas[0], "fc2_alpha": alphas[1]}
    own |= {name: getattr(scalars.inputs, name) for name in ("fc1_divisor", "fc2_divisor")}
    assert {name: tensor.data_ptr() for name, tensor in found.tensors().items()} == {n: t.data_ptr() for n, t in own.items()}
    extra = found.epilogue
    assert (extra.fc1_bias, extra.fc2_bias) == drawn.biases
    assert [float(tensor[2]) for tensor in (extra.swiglu_alpha, extra.swiglu_beta, extra.swiglu_limit)] == [1.5, 0.5, 7.0]
