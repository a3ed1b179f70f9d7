# SPDX-License-Identifier: Apache-2.0
"""Other weights into the same module, and copies of it: results follow, storage stays."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts
from trtllm_b12x.formats.layouts import mma_scale_view
from trtllm_b12x.tools import verify


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
def test_the_hosts_reload_hooks(gated: bool) -> None:
    """Everything changes, calibration too."""
    first = random_experts(4, 128, 192, gated)
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


def calibrated(factor: float, **arguments: Any) -> dict[str, torch.Tensor]:
    """Other weights, and input scales times ``factor``."""
    tensors = random_experts(4, 128, 256, seed=1, **arguments)
    return {name: tensor * factor if name.endswith("input_scale") else tensor for name, tensor in tensors.items()}


def other_storage(module: Any, other: Any) -> None:
    for name, parameter in other.backend.named_parameters():
        getattr(module.backend, name).data = parameter.data.clone()


def other_parameters(module: Any, other: Any) -> None:
    for name, parameter in list(other.backend.named_parameters()):
        setattr(module.backend, name, torch.nn.Parameter(parameter.data.clone(), requires_grad=False))
    module.backend.quant_method.setup_quant_scales(module.backend)  # the host's own record holds parameters


def state_dict(module: Any, other: Any) -> None:
    module.load_state_dict(other.state_dict())


def assigned(module: Any, other: Any) -> None:
    module.load_state_dict({name: tensor.clone() for name, tensor in other.state_dict().items()}, assign=True)
    module.backend.quant_method.setup_quant_scales(module.backend)  # as above


REFITS = [copy_over, other_storage, other_parameters, state_dict, assigned]


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize(
    ("refit", "gated"),
    [*((refit, True) for refit in REFITS), (copy_over, False)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_no_hook_is_called(refit: Any, gated: bool, factor: float) -> None:
    """Decode, prefill and decode again are those of a fresh load, to the bit."""
    first, second = random_experts(4, 128, 256, gated), calibrated(factor, gated=gated)
    module, other = (layers.load(layers.create(4, 128, 256, gated=gated), tensors) for tensors in (first, second))
    assert_serves(module, first)
    refit(module, other)
    for tokens in (3, 70, 40):
        x, logits = layers.inputs(module, tokens, second)
        with verify.kernel_calls(module.backend) as reached:
            assert torch.equal(module(x, logits), other(x, logits)), tokens
        assert len(reached) == (tokens < 64)


def test_every_parameter_by_itself() -> None:
    """One tensor after the other moves: at each step b12x computes what a kernel does that is bound anew."""
    first, second = random_experts(4, 128, 256), calibrated(4.0)
    module, other = (layers.load(layers.create(4, 128, 256), tensors) for tensors in (first, second))
    x, logits = layers.inputs(module, 5, second)
    for name, parameter in other.backend.named_parameters():
        getattr(module.backend, name).data = parameter.data.clone()
        result = module(x, logits)
        module.backend.kernel.bind(module.backend.quant_method.kernel_weights(module.backend))
        assert torch.equal(result, module(x, logits)), name


@pytest.mark.parametrize("change", ["transposed", "unaligned", "another size"])
def test_what_the_kernel_cannot_read_is_left_to_the_host(change: str) -> None:
    """Not silently wrong: the layer stops serving, the host answers or says what is wrong, as it does alone."""
    tensors = random_experts(4, 128, 256)
    module, plain = (layers.load(layers.create(4, 128, 256, promote=p), tensors) for p in (True, False))
    x, logits = layers.inputs(module, 5, tensors)

    def answer(layer: Any) -> Any:
        parameter = layer.backend.w2_weight
        if change == "transposed":
            parameter.data = parameter.data.transpose(1, 2).contiguous().transpose(1, 2)
        elif change == "unaligned":
            room = torch.empty(parameter.numel() + 1, dtype=parameter.dtype)[1:]
            parameter.data = room.view(parameter.shape).copy_(parameter.data)
        else:
            parameter.data = parameter.data[:, :, :8].contiguous()
        try:
            return layer(x, logits)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    ours, alone = answer(module), answer(plain)
    if isinstance(alone, str):
        assert ours == alone
        return
    assert torch.equal(ours, alone)
    assert module.backend.kernel is None
    assert "not contiguous, or not at a multiple of 16 bytes" in str(module.backend.verdict)
    layers.load(module, tensors)
    assert module.backend.kernel is None  # for good


@pytest.mark.parametrize("loaded_in", [True, False])
def test_loaded_in_inference_mode_and_called_outside_or_the_other_way(loaded_in: bool) -> None:
    first, second = random_experts(4, 128, 256), calibrated(4.0)
    with torch.inference_mode(loaded_in):
        module, other = (layers.load(layers.create(4, 128, 256), tensors) for tensors in (first, second))
        copy_over(module, other)
    x, logits = layers.inputs(module, 5, second)
    with torch.inference_mode(not loaded_in):
        assert torch.equal(module(x, logits), other(x, logits))
    assert module.backend.kernel is not None


# ---- state dicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
def test_state_dicts_of_the_hosts_layer_and_ours_are_one(gated: bool) -> None:
    tensors = random_experts(4, 128, 256, gated)
    ours, plain = (layers.load(layers.create(4, 128, 256, gated=gated, promote=p), tensors) for p in (True, False))
    assert list(ours.state_dict()) == list(plain.state_dict())
    other = random_experts(4, 128, 256, gated, seed=3)
    for source_promoted in (True, False):
        source = layers.load(layers.create(4, 128, 256, gated=gated, promote=source_promoted), other)
        target = layers.load(layers.create(4, 128, 256, gated=gated, promote=not source_promoted), tensors)
        target.load_state_dict(source.state_dict())
        x, logits = layers.inputs(target, 70, other)
        assert torch.equal(target(x, logits), source(x, logits))
        if not source_promoted:
            assert_serves(target, other)


def test_padding_is_named() -> None:
    tensors = random_experts(4, 128, 192)
    ours, plain = (layers.load(layers.create(4, 128, 192, promote=p), tensors) for p in (True, False))
    with pytest.raises(RuntimeError, match=r"(?s)size mismatch.*multiple of 256.*TRTLLM_B12X=0"):
        ours.load_state_dict(plain.state_dict())
    assert_serves(layers.load(ours, tensors), tensors)


# ---- copies, moves and halves ------------------------------------------------------------------------------------------


def test_a_copy_and_a_moved_layer() -> None:
    """A copy runs on CUTLASS until it is loaded; a moved layer's kernel follows the storage."""
    module, tensors = layers.made(3, 128, 192)
    backend = module.backend
    for copied in (copy.deepcopy(backend), pickle.loads(pickle.dumps(backend))):
        assert copied.kernel is None
        assert backend.kernel is not None
        loaded = layers.load(copied, tensors)
        assert loaded.kernel.weights.fc1_weight.data_ptr() == loaded.w3_w1_weight.data_ptr()
    module._apply(torch.clone)
    assert backend.kernel.weights.fc1_weight.data_ptr() == backend.w3_w1_weight.data_ptr()


def test_scale_view_refuses_what_does_not_fill_tiles() -> None:
    with pytest.raises(ValueError, match="120 x 128"):
        mma_scale_view(torch.zeros(120 * 8, dtype=torch.uint8), 120, 128)
