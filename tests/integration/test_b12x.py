# SPDX-License-Identifier: Apache-2.0
"""FlashInfer on a machine without its card: what its driver plans, shares, refuses and makes of faults, and its layouts."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import flashinfer
import pytest
import torch
from flashinfer.cute_dsl.utils import convert_sf_from_mma_layout, convert_sf_to_mma_layout, get_mma_sf_shape

from tests import forks
from tests.integration.sm12x_on_hopper.problem import arguments
from tests.nvfp4_layer import random_layer
from trtllm_b12x.engines.trtllm import embedded as host
from trtllm_b12x.formats.layouts import mma_scale_view, plain_scales
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.b12x.compiler import DISPATCH, signatures
from trtllm_b12x.kernels.b12x.scratch import fitting
from trtllm_b12x.kernels.reference import ReferenceKernel

SERVED = ["nothing", "damaged objects in the cache", "damaged index of the cache", "no compiler on the path"]
FAULTS = {
    "ptxas": "RuntimeError: NVVM Compilation Error",
    "another CuTe DSL": "AttributeError: module 'cutlass.cute' has no 'copy'",
    "out of memory": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "a kernel of another FlashInfer": "ValueError: FlashInfer's static kernel takes tile_plan, which",
    "no kernels in FlashInfer": "ModuleNotFoundError: ",
    "a cache that cannot be written": "NotADirectoryError: [Errno 20]",
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("cache"))
    command = [sys.executable, "-m", "tests.forks", "call", "tests.integration.b12x_on_cpu:cases", folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=forks.ROOT)
    found: dict[str, dict[str, Any]] = forks.result((done.returncode, done.stdout, done.stderr))
    return found


@pytest.mark.all
@pytest.mark.parametrize("fault", SERVED)
def test_what_flashinfer_mends_or_goes_without(cases: dict[str, dict[str, Any]], fault: str) -> None:
    assert cases[fault]["errors"] == []


@pytest.mark.all
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_for_every_layer_and_keeps_nothing(cases: dict[str, dict[str, Any]], fault: str) -> None:
    found = cases[fault]
    assert len(found["errors"]) == 2
    assert all(error.startswith(f"PlanError: {FAULTS[fault]}") and "\n" not in error for error in found["errors"])
    assert found["errors"][0] == found["errors"][1]
    assert found["lasting"] == (fault != "out of memory")
    assert (found["plans"], found["workspaces"]) == (0, 0)


@pytest.mark.all
def test_layers_of_one_geometry_share_and_leave_nothing_behind(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["sharing"]
    assert found["same"] == [True, False]
    assert found["bytes"] > 0
    assert found["left"] == 0
    assert found["variants"] == [0, 0]  # static, whose code is the same for one and two tokens
    assert found["unplanned"].startswith("no kernel is planned for 5 tokens, only for 1-2: ")


@pytest.mark.all
def test_a_second_start_compiles_nothing(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["restart"]
    assert found["loaded"] == found["compiled"] == ["direct_micro", "static"]
    assert found["compiled again"] == 0
    assert found["warmed up"] == [True]  # static of the first geometry


@pytest.mark.all
def test_kinds(cases: dict[str, dict[str, Any]]) -> None:
    assert cases["kinds"]["any"] == ["direct_micro", "static"]
    assert cases["kinds"]["expert parallel"] == ["static"]


@pytest.mark.all
@pytest.mark.parametrize(("size", "planned"), [(1344, 1536), (640, 768)])
def test_flashinfers_own_padding_is_never_reached(cases: dict[str, dict[str, Any]], size: int, planned: int) -> None:
    found = cases[f"padding {size}"]
    assert found["planned"] == planned
    assert found["summary"][0] == "static: 1-3 tokens"
    assert found["weights left"] == 0  # by a plan that outlives its kernel


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [
        ((128, 8, 2048, 768), 63),
        ((512, 22, 8192, 1024), 43),
        ((512, 20, 8192, 1024), 48),
        ((384, 8, 7168, 2048), 63),
        ((8192, 32, 16384, 256), 1),
    ],
)
def test_a_workspace_stays_below_what_offsets_can_reach(sizes: tuple[int, int, int, int], tokens: int) -> None:
    assert fitting(Geometry(*sizes, "Swiglu"), 63) == tokens


def test_what_the_driver_relies_on_in_the_installed_flashinfer() -> None:
    """Cooperative launches, a constructor of workspaces, and every argument by a name that is known."""
    import flashinfer

    folder = Path(flashinfer.__file__).parent / "fused_moe" / "cute_dsl" / "blackwell_sm12x"
    assert "cooperative=True" in (folder / "moe_static_kernel.py").read_text()
    assert "cooperative=self.compile_time_phase == 0" in (folder / "moe_direct_micro_kernel.py").read_text()
    dispatch = __import__("importlib").import_module(DISPATCH)
    assert set(signatures(dispatch)) == {"static", "direct_micro"}
    wanted = {"state_E", "weight_E", "m", "k", "n", "num_topk", "max_rows", "topk_ids_dtype", "mac_override", "activation"}
    assert wanted <= set(inspect.signature(dispatch._get_static_kernel).parameters)


# ---- layouts and arguments against FlashInfer's own code ---------------------------------------------------------------


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
