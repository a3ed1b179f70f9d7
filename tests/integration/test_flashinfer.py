"""Our layouts and argument contract against FlashInfer's own code, as far as it runs without a GPU."""

from __future__ import annotations

import inspect

import flashinfer
import pytest
import torch
from flashinfer.cute_dsl.utils import convert_sf_from_mma_layout, convert_sf_to_mma_layout, get_mma_sf_shape

from tests.integration.sm12x_on_hopper.problem import arguments
from tests.nvfp4_layer import random_layer
from trtllm_b12x.engines.trtllm import embedded as host
from trtllm_b12x.formats.layouts import mma_scale_view, plain_scales
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.reference import ReferenceKernel


@pytest.mark.parametrize(("experts", "rows", "columns"), [(1, 128, 64), (3, 256, 128), (2, 512, 192)])
def test_scale_view(experts: int, rows: int, columns: int) -> None:
    plain = torch.randint(0, 256, (experts, rows, columns // 16), dtype=torch.uint8)
    stored = host.block_scale_interleave(plain)
    ours = mma_scale_view(stored.view(torch.int32), rows, columns)
    theirs = convert_sf_to_mma_layout(stored, m=rows, k=columns, num_groups=experts)
    assert ours.shape == theirs.shape == get_mma_sf_shape(rows, columns, experts)
    assert ours.stride() == theirs.stride()
    assert torch.equal(ours.view(torch.uint8), theirs)
    assert ours.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
    # What the kernels read through it: FlashInfer's way back is a view of the same bytes, no copy.
    back = convert_sf_from_mma_layout(ours.view(torch.uint8), m=rows, k=columns, num_groups=experts)
    assert back.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
    assert torch.equal(back.flatten(), stored)
    assert torch.equal(host.block_scale_interleave_reverse(back.view(experts, rows, columns // 16)), plain)
    assert torch.equal(plain_scales(ours).view(torch.uint8), plain)


def test_the_kernel_takes_our_tensors_by_these_names() -> None:
    parameters = inspect.signature(flashinfer.B12xMoEWrapper.run).parameters
    ours = arguments(random_layer(Geometry(2, 2, 128, 128, "Swiglu")).kernel_weights())
    assert ours.keys() == {name for name in parameters if name.startswith(("w1_", "w2_", "fc2_", "input_"))}
    assert {"x", "token_selected_experts", "token_final_scales"} <= set(parameters)


def test_the_tile_is_what_flashinfer_pads_to() -> None:
    from flashinfer.fused_moe.cute_dsl.blackwell_sm12x import moe_dispatch

    assert ReferenceKernel.features.tile == moe_dispatch._STATIC_RETAINED_GROUP_N
