"""What our kernels are given of vLLM's tensors, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trtllm_b12x.engines.vllm import weights
from trtllm_b12x.formats import GATE_UP, ROWS, WeightLayout
from trtllm_b12x.kernels import Geometry

GEOMETRY = Geometry(3, 2, 128, 64, "SwigluBias", bias=torch.bfloat16, layout=WeightLayout(ROWS, GATE_UP))
GATE, UP, INPUTS = torch.tensor([2.0, 8.0, 4.0]), torch.tensor([4.0, 2.0, 4.0]), torch.tensor([2.0, 4.0, 8.0])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["w13_weight_scale_2", "w13_weight_global_scale", ""])
def test_scalars(name: str, shared: bool) -> None:
    """ModelOpt's scales of gate and up, the reciprocals of compressed-tensors, or one column."""
    both = torch.stack((GATE, UP), 1)
    stored = (
        {name: both.reciprocal() if name.endswith("global_scale") else both} if name else {"w13_weight_scale_2": GATE[:, None]}
    )
    layer = SimpleNamespace(**stored)
    weights.record_halves(layer)
    found = weights.scalars(layer, (INPUTS, 2 * INPUTS), GATE, shared)
    if name:
        assert torch.equal(found.fc1_half_alphas, torch.stack((UP, GATE)) / INPUTS)  # type: ignore[arg-type]
        assert found.fc1_alpha is not None
        assert found.fc1_alpha.tolist() == [2.0, 2.0, 0.5]
    assert weights.scale_ratio(found) == (4 if name else 1)
    inputs = found.inputs
    assert torch.equal(inputs.fc31_input_scale, INPUTS[:1] if shared else INPUTS)
    assert torch.equal(inputs.fc1_divisor, (INPUTS[:1].expand(3) if shared else INPUTS).reciprocal())
    assert torch.equal(inputs.fc2_input_scale, 2 * INPUTS)
    assert torch.equal(inputs.fc2_divisor, (2 * INPUTS).reciprocal())
    again = weights.scalars(layer, (3 * INPUTS, INPUTS), GATE, shared)  # another load: captured graphs read the same memory
    assert again is found
    assert torch.equal(inputs.fc2_input_scale, INPUTS)
    assert weights.scalars(layer, None, GATE, not shared) is not found


def test_view() -> None:
    """Every tensor is vLLM's own, and in its place."""
    drawn, given = weights.draw(GEOMETRY, torch.device("cpu"))
    scalars = weights.scalars(SimpleNamespace(), given, torch.ones(3), False)
    found: Any = weights.view(drawn, GEOMETRY, scalars, (1.5, 0.5, 7.0))
    found.check(GEOMETRY)
    assert drawn.alphas is not None
    assert drawn.biases is not None
    own = {"fc1_weight": drawn.w1, "fc2_weight": drawn.w2, "fc1_weight_sf": drawn.scales[0], "fc2_weight_sf": drawn.scales[1]}
    own |= {"fc1_alpha": drawn.alphas[0], "fc2_alpha": drawn.alphas[1]}
    own |= {name: getattr(scalars.inputs, name) for name in ("fc1_divisor", "fc2_divisor")}
    assert {name: tensor.data_ptr() for name, tensor in found.tensors().items()} == {n: t.data_ptr() for n, t in own.items()}
    extra = found.epilogue
    assert (extra.fc1_bias, extra.fc2_bias) == drawn.biases
    assert [float(tensor[2]) for tensor in (extra.swiglu_alpha, extra.swiglu_beta, extra.swiglu_limit)] == [1.5, 0.5, 7.0]
