"""Other weights into the same module: results follow, storage stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts


def storages(backend: Any) -> dict[str, int]:
    own = {name: tensor.data_ptr() for name, tensor in [*backend.named_parameters(), *backend.named_buffers()]}
    return own | {f"kernel.{name}": tensor.data_ptr() for name, tensor in backend.kernel.weights.tensors().items()}


def assert_serves(module: Any, tensors: dict[str, torch.Tensor]) -> None:
    for tokens in (40, 70):
        x, logits = layers.inputs(module, tokens, tensors)
        none, kernel = layers.errors(module, x, logits, module(x, logits), tensors)
        assert none < 0.05
        if tokens == 40:
            assert kernel < 0.005


def copy_over(module: Any, other: Any) -> None:
    for name, parameter in other.backend.named_parameters():
        getattr(module.backend, name).data.copy_(parameter.data)


@pytest.mark.parametrize("gated", [True, False])
def test_weights_copied_over_the_parameters_need_no_hook(gated: bool) -> None:
    """Same calibration, other weights, block scales and alphas: what reinforcement learning does between steps."""
    first, second = (random_experts(4, 128, 192, gated, seed=seed) for seed in (0, 1))
    module = layers.load(layers.create(4, 128, 192, gated=gated), first)
    other = layers.load(layers.create(4, 128, 192, gated=gated), second)
    assert_serves(module, first)
    before = storages(module.backend)
    copy_over(module, other)
    assert storages(module.backend) == before
    assert_serves(module, second)


@pytest.mark.parametrize("ratio", [1.0, 1.5])
@pytest.mark.parametrize("gated", [True, False])
def test_the_hosts_reload_hooks(gated: bool, ratio: float) -> None:
    """Everything changes, calibration and the ratio of gate's and up's scales too."""
    first = random_experts(4, 128, 192, gated, up_to_gate=ratio)
    second = random_experts(4, 128, 192, gated, seed=1)
    for name in second:
        if name.endswith("input_scale"):
            second[name] = second[name] * 3
    module = layers.load(layers.create(4, 128, 192, gated=gated), first)
    assert_serves(module, first)
    before = storages(module.backend)
    layers.load(module, second)
    assert storages(module.backend) == before
    assert_serves(module, second)
    layers.load(module, first)
    assert_serves(module, first)


def test_ratios_of_gate_and_up_copied_over_are_followed_at_the_hook() -> None:
    first, second = random_experts(4, 128, 192), random_experts(4, 128, 192, seed=1, up_to_gate=3.0)
    for tensors, others in ((first, second), (second, first)):
        module, other = (layers.load(layers.create(4, 128, 192), t) for t in (tensors, others))
        before = storages(module.backend)
        copy_over(module, other)
        module.backend.post_load_weights()
        assert storages(module.backend) == before
        assert_serves(module, others)


def test_calibration_copied_over_is_followed_at_the_hook() -> None:
    first, second = random_experts(4, 128, 192), random_experts(4, 128, 192, seed=1)
    for name in second:
        if name.endswith("input_scale"):
            second[name] = second[name] * 3
    module = layers.load(layers.create(4, 128, 192), first)
    other = layers.load(layers.create(4, 128, 192), second)
    before = storages(module.backend)
    copy_over(module, other)
    module.backend.post_load_weights()
    assert storages(module.backend) == before
    assert_serves(module, second)


@pytest.mark.embedded  # later hosts load parts
def test_partial_reload_is_the_hosts_answer() -> None:
    """1.2 and 1.3 refuse partial loading of quantized experts; nothing is lost."""
    tensors = random_experts(4, 128, 192)
    module = layers.load(layers.create(4, 128, 192), tensors)
    with pytest.raises(ValueError, match="partial loading"):
        module.load_weights([tensors], allow_partial_loading=True)
    assert_serves(module, tensors)
