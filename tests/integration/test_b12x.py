"""FlashInfer's driver on a machine without its card: what it plans, shares and refuses, and what it makes of faults."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.b12x.compiler import DISPATCH, signatures
from trtllm_b12x.kernels.b12x.scratch import fitting

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
    command = [sys.executable, "-m", "tests.integration.b12x_on_cpu", str(tmp_path_factory.mktemp("cache"))]
    environment = {**os.environ, "TRTLLM_B12X_LOG": "WARNING"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=environment)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}


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
