"""Parameters on the kernel's tile, storage shared with the kernel, the exact scale map."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts
from trtllm_b12x.formats.layouts import mma_scale_view, plain_scales

SIZES = [(128, 256), (192, 256), (256, 256), (320, 512)]


def built(size: int, gated: bool, experts: int = 3, **arguments: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    tensors = random_experts(experts, 128, size, gated, **arguments)
    return layers.load(layers.create(experts, 128, size, gated=gated), tensors).backend, tensors


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("size", "tile"), SIZES)
def test_parameters_are_created_on_the_tile(size: int, tile: int, gated: bool) -> None:
    backend, tensors = built(size, gated)
    halves = 2 if gated else 1
    assert backend.w3_w1_weight.shape == (3, halves * tile, 8)
    assert backend.w2_weight.shape == (3, 128, tile // 16)
    assert backend.w3_w1_weight_scale.shape == (3, halves * tile, 2)
    assert backend.w2_weight_scale.shape == (3, 128, tile // 64)
    assert backend.intermediate_size_per_partition == size
    rows = backend.w3_w1_weight.data.view(torch.uint8)[2]
    if gated:
        assert torch.equal(rows[:size], tensors["2.w3.weight"])
    assert torch.equal(rows[(halves - 1) * tile :][:size], tensors["2.w1.weight"])
    assert int((rows != 0).any(1).sum()) == halves * size
    columns = backend.w2_weight.data.view(torch.uint8)[2]
    assert torch.equal(columns[:, : size // 2], tensors["2.w2.weight"])
    assert not columns[:, size // 2 :].any()


@pytest.mark.parametrize("gated", [True, False])
def test_the_kernel_reads_the_host_storage_and_nothing_else(gated: bool) -> None:
    backend, _ = built(192, gated)
    weights = backend.kernel.weights
    own = {
        "fc1_weight": backend.w3_w1_weight,
        "fc1_weight_sf": backend.w3_w1_weight_scale,
        "fc2_weight": backend.w2_weight,
        "fc2_weight_sf": backend.w2_weight_scale,
        "fc1_alpha": backend.fc31_alpha,
        "fc2_alpha": backend.fc2_alpha,
    }
    for name, parameter in own.items():
        view = getattr(weights, name)
        assert view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr(), name
    named = (*backend.named_parameters(), *backend.named_buffers())
    scalars = sum(tensor.nbytes for name, tensor in named if name.startswith("b12x_"))
    assert scalars <= 16 * backend.num_experts


def test_exact_scale_map() -> None:
    backend, tensors = built(192, gated=True)
    weights = backend.kernel.weights
    fc1 = max(float(tensors[f"{e}.w1.input_scale"]) for e in range(3))
    fc2 = max(float(tensors[f"{e}.w2.input_scale"]) for e in range(3))
    assert weights.fc1_divisor.tolist() == pytest.approx([fc1] * 3, rel=2e-7)
    for e in range(3):
        assert (weights.fc1_alpha / weights.fc1_divisor)[e].item() == pytest.approx(
            float(tensors[f"{e}.w1.weight_scale_2"]), rel=5e-7
        )
        assert weights.fc2_divisor[e].item() == pytest.approx(fc2, rel=2e-7)
        assert weights.fc2_alpha[e].item() == pytest.approx(float(tensors[f"{e}.w2.weight_scale_2"]) * fc2, rel=5e-7)
        scales = plain_scales(weights.fc1_weight_sf)[e].view(torch.uint8)
        assert torch.equal(scales[:192], tensors[f"{e}.w3.weight_scale"].view(torch.uint8))
        assert torch.equal(scales[256 : 256 + 192], tensors[f"{e}.w1.weight_scale"].view(torch.uint8))


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


def test_one_half_at_a_time() -> None:
    """Partial loads pass the other half as None: it stays where it is."""
    backend, tensors = built(192, gated=True)
    other = random_experts(3, 128, 192, seed=5)
    rows = backend.w3_w1_weight.data[1]
    backend.quant_method.load_expert_w3_w1_weight(backend, None, other["1.w3.weight"], rows)
    view = rows.view(torch.uint8)
    assert torch.equal(view[:192], other["1.w3.weight"])
    assert torch.equal(view[256:448], tensors["1.w1.weight"])


def test_scale_view_refuses_what_does_not_fill_tiles() -> None:
    with pytest.raises(ValueError, match="120 x 128"):
        mma_scale_view(torch.zeros(120 * 8, dtype=torch.uint8), 120, 128)
