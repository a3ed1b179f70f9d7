"""The torch kernel's argument contract and its numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts
from trtllm_b12x.formats.nvfp4 import NVFP4Weights
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.reference import ReferenceKernel


def bound(gated: bool = True, experts: int = 4, size: int = 320) -> tuple[Any, ReferenceKernel, dict[str, torch.Tensor]]:
    tensors = random_experts(experts, 128, size, gated)
    module = layers.load(layers.create(experts, 128, size, top_k=3, gated=gated), tensors)
    return module, module.backend.kernel, tensors


def test_reruns_are_bit_identical_and_out_is_written() -> None:
    module, kernel, tensors = bound()
    x, logits = layers.inputs(module, 9, tensors)
    ids, router_weights = module.routing_method.apply(logits)
    first = kernel.run(MoECall(x, ids, router_weights))
    out = torch.full_like(first, float("nan"))
    assert kernel.run(MoECall(x, ids.long(), router_weights, out=out)) is out
    assert torch.equal(first, out)


def test_negative_ids_are_unrouted() -> None:
    module, kernel, tensors = bound()
    x, logits = layers.inputs(module, 6, tensors)
    ids, router_weights = module.routing_method.apply(logits)
    dropped = ids.clone()
    dropped[:, 1] = -1
    dropped[5] = -1
    zeroed = router_weights.clone()
    zeroed[:, 1] = 0
    result = kernel.run(MoECall(x, dropped, router_weights))
    assert torch.equal(result[:5], kernel.run(MoECall(x, ids, zeroed))[:5])
    assert not result[5].any()


def test_scales_of_its_own_for_each_expert() -> None:
    module, kernel, tensors = bound()
    scale = float(kernel.weights.fc1_divisor[0])
    per_expert = scale * torch.tensor([1.0, 1.5, 1.25, 1.75])
    scale_2 = kernel.weights.fc1_alpha / kernel.weights.fc1_divisor
    kernel.bind(dataclasses.replace(kernel.weights, fc1_divisor=per_expert, fc1_alpha=scale_2 * per_expert))
    x, _ = layers.inputs(module, 1, tensors)
    outputs = [kernel.run(MoECall(x, torch.tensor([[e, -1, -1]]), torch.ones(1, 3))).float() for e in range(4)]
    kernel.bind(dataclasses.replace(kernel.weights, fc1_divisor=torch.full((4,), scale), fc1_alpha=scale_2 * scale))
    shared = [kernel.run(MoECall(x, torch.tensor([[e, -1, -1]]), torch.ones(1, 3))).float() for e in range(4)]
    close = [float((a - b).norm() / b.norm()) for a, b in zip(outputs, shared, strict=True)]
    assert close[0] == 0
    assert all(0 < c < 0.4 for c in close[1:])  # the same input, quantized otherwise


@pytest.mark.parametrize(
    "name", [f.name for f in dataclasses.fields(NVFP4Weights) if f.name not in ("input_scales", "epilogue", "layout")]
)
def test_every_tensor_is_checked(name: str) -> None:
    _, kernel, _ = bound()
    tensor = getattr(kernel.weights, name)
    with pytest.raises(ValueError, match=name):
        kernel.bind(dataclasses.replace(kernel.weights, **{name: tensor[:-1]}))


def test_plan_and_run_refuse_what_no_kernel_takes() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="Gelu"):
        ReferenceKernel().plan(Geometry(4, 2, 128, 256, "Gelu"), 8, cpu)
    with pytest.raises(ValueError, match="multiples of 128"):
        ReferenceKernel().plan(Geometry(4, 2, 128, 192, "Swiglu"), 8, cpu)
    module, kernel, tensors = bound()
    x, logits = layers.inputs(module, 64, tensors)
    with pytest.raises(ValueError, match=r"64.*63"):
        kernel.run(MoECall(x, *module.routing_method.apply(logits)))
