# SPDX-License-Identifier: Apache-2.0
"""Layers that Triton's kernels serve, by what stands in for them here: the whole path from the decision to a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trtllm_b12x
from tests import forks, layers
from tests.checkpoints import random_experts
from trtllm_b12x.engines.trtllm.embedded.config import ActivationType, is_gated_activation
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.reference import ReferenceKernel, UnquantizedReferenceKernel
from trtllm_b12x.tools.verify import kernel_calls
from trtllm_b12x.tools.verify.reference import Arithmetic

pytestmark = pytest.mark.usefixtures("triton_alone")
BOUND = 0.004
"""Relative L2 from unquantized activations: bf16's rounding of the activation's result and of the output."""


def error(module: Any, x: torch.Tensor, logits: torch.Tensor, tensors: dict[str, torch.Tensor], arithmetic: Arithmetic) -> float:
    return layers.errors(module, x, logits, module(x, logits), tensors, arithmetic)[1]


@pytest.mark.parametrize("up_to_gate", [1.0, 3.0])
@pytest.mark.parametrize("size", [64, 192, 256, 320, *(pytest.param(size, marks=pytest.mark.embedded) for size in (80, 208))])
@pytest.mark.parametrize("gated", [True, False])
def test_numbers_on_both_sides_of_the_crossover(gated: bool, size: int, up_to_gate: float) -> None:
    tensors = random_experts(4, 128, size, gated, up_to_gate=up_to_gate)
    module = layers.load(layers.create(4, 128, size, gated=gated), tensors)
    assert (module.backend.verdict.families, type(module.backend.kernel)) == (("triton",), UnquantizedReferenceKernel)
    for tokens, served in ((1, 1), (63, 1), (64, 0)):
        x, logits = layers.inputs(module, tokens, tensors)
        with kernel_calls(module.backend) as reached:
            if served:
                assert error(module, x, logits, tensors, Arithmetic.UNQUANTIZED) < BOUND
            else:  # CUTLASS takes the larger scale of gate and up for both
                assert (error(module, x, logits, tensors, Arithmetic.NONE) < 0.05) == (up_to_gate == 1 or not gated)
        assert len(reached) == served


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("size", [64, 128, 192, 320])
def test_the_parameters_are_the_hosts_to_the_bit(gated: bool, size: int) -> None:
    """No extra bytes, and CUTLASS computes what it computes without us; sizes that hosts split right."""
    tensors = random_experts(3, 128, size, gated)
    ours = layers.load(layers.create(3, 128, size, gated=gated), tensors)
    hosts = layers.load(layers.create(3, 128, size, gated=gated, promote=False), tensors)
    for name, parameter in hosts.backend.named_parameters():
        assert torch.equal(parameter, ours.backend.get_parameter(name)), name
    x, logits = layers.inputs(ours, 70, tensors)
    assert torch.equal(ours(x, logits), hosts(x, logits))
    assert set(hosts.backend.state_dict()) == set(ours.backend.state_dict())
    fresh = layers.load(layers.create(3, 128, size, gated=gated), random_experts(3, 128, size, gated, seed=7))
    fresh.backend.load_state_dict(hosts.backend.state_dict())
    few = x[:5], logits[:5]
    assert torch.equal(fresh(*few), ours(*few))
    inner = 2 * ours.backend.w2_weight.data.view(torch.uint8).shape[2]
    assert (ours.backend.quant_method.padding_bytes(ours.backend) == 0) == (inner == size)


def test_the_next_family_takes_what_b12x_leaves(every_family: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top 22: b12x ends before its dynamic kernel, at 46 tokens."""
    module, tensors = layers.made(24, 128, 192, top_k=22)
    chosen = module.backend.schedule
    assert list(chosen.families) == ["b12x", "triton"]
    assert [type(chosen.at(tokens)) for tokens in (46, 47, 63, 64)] == [
        ReferenceKernel,
        UnquantizedReferenceKernel,
        UnquantizedReferenceKernel,
        type(None),
    ]
    assert module.backend.w2_weight.shape[2] * 16 == 256
    x, logits = layers.inputs(module, 50, tensors)
    assert error(module, x, logits, tensors, Arithmetic.UNQUANTIZED) < BOUND
    kernels = trtllm_b12x.status().kernels
    assert [line for lines in kernels.values() for line in lines] == [
        "reference: 1 to 46 tokens",
        "reference W4A16: 1 to 63 tokens",
    ]


@pytest.mark.parametrize("activation", ["Swiglu", "SwigluBias", "Geglu", "Relu2", "Silu", "Gelu"])
def test_gated_is_what_the_host_calls_so(activation: str) -> None:
    assert Geometry(1, 1, 128, 128, activation).gated == is_gated_activation(ActivationType[activation])


def in_the_interpreter() -> dict[str, Any]:
    """The kernels themselves in a layer: self-test, numbers, and parameters that are overwritten, no hook called."""
    tensors, other = random_experts(3, 128, 64, up_to_gate=2.0), random_experts(3, 128, 64, seed=3)
    module = layers.load(layers.create(3, 128, 64), tensors)
    found: dict[str, Any] = {"kernel": type(module.backend.kernel).__name__, "log": list(module.backend.kernel.summary())}
    x, logits = layers.inputs(module, 1, tensors)
    found["error"] = error(module, x, logits, tensors, Arithmetic.UNQUANTIZED)
    fresh = layers.load(layers.create(3, 128, 64), other)
    for name, parameter in fresh.backend.named_parameters():
        module.backend.get_parameter(name).data.copy_(parameter)
    found["followed"] = error(module, x, logits, other, Arithmetic.UNQUANTIZED)
    return found


@pytest.mark.embedded
def test_the_kernels_themselves_in_a_layer() -> None:
    settings = {"TRTLLM_B12X_KERNELS": "triton", "TRTLLM_B12X_CROSSOVER": "2"}  # the interpreter takes seconds for a call
    found = forks.in_the_interpreter(f"{__name__}:in_the_interpreter", **settings)
    assert (found["kernel"], found["log"]) == ("TritonKernel", ["triton: 1 to 1 tokens"])
    assert found["error"] < BOUND
    assert found["followed"] < BOUND
