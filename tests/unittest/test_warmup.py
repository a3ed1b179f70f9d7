# SPDX-License-Identifier: Apache-2.0
"""``trtllm-b12x warmup``, and a server that finds what it left: no compiler, no GPU, and no compile while calls wait."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from tests import layers, warm_start
from tests.checkpoints import random_experts, write_checkpoint
from trtllm_b12x import formats
from trtllm_b12x.formats.geometry import Geometry, LayerShape
from trtllm_b12x.kernels.cards import MODELS, Card, models, warmup_command
from trtllm_b12x.tools.cli import main
from trtllm_b12x.tools.options import Ranks

warmup: Any = importlib.import_module("trtllm_b12x.tools.warmup")  # its package has the command by that name
ROOT = Path(__file__).parents[2]
SIZES = {"hidden": 128, "intermediate": 128, "experts": 4, "top-k": 2}
FIELDS = {"num_experts": 4, "top_k": 2, "hidden_size": 128, "intermediate_size": 128, "activation": "Swiglu"}
CARD = {"capability": 120, "multiprocessors": 170}
OTHER = "--hidden 128 --intermediate 128 --experts 4 --top-k 1 --activation swiglu --format nvfp4 --target sm_120a --card 170"
"""Options of a geometry that is not warmed up."""


def run(*arguments: Any, **variables: str) -> Result:
    return CliRunner().invoke(main, ["warmup", *map(str, arguments)], env=variables)


def test_the_command_of_a_rank_names_the_models_experts() -> None:
    geometry = Geometry(32, 8, 2048, 768, "Relu2", torch.float16, ranks=4, format="W4A16_NVFP4")
    assert warmup_command(geometry, Card(170, 100 << 10, 120)) == (
        "trtllm-b12x warmup --hidden 2048 --intermediate 768 --experts 128 --top-k 8 --activation relu2 --format w4a16_nvfp4 "
        "--ep 4 --dtype float16 --target sm_120a --card 170"
    )


def sizes(**others: Any) -> list[Any]:
    return [word for name, value in {**SIZES, **others}.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("warm")


@pytest.fixture(scope="module")
def variables(folder: Path) -> dict[str, str]:
    """Of the image: the build's and the server's."""
    return {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TRITON_LIBCUDA_PATH": warm_start.LIBCUDA,
        "XDG_CACHE_HOME": str(folder / "xdg"),
        "TRTLLM_B12X_KERNELS": "triton,grouped",
        "TRTLLM_B12X_CROSSOVER": "2",  # one token: few kernels
        "PYTHONUNBUFFERED": "1",  # as images have it: what several processes say must not mix
    }


def build(form: str, kernels: str, variables: dict[str, str]) -> list[dict[str, Any]]:
    """Return what the image's build says of a format, and what it says when it runs again."""
    found = []
    for _ in range(2):
        arguments = [*sizes(format=form, target="sm_120a", card=170), "--json"]
        # The build does not know where the server's libcuda is.
        result = run(*arguments, **{**variables, "TRTLLM_B12X_KERNELS": kernels, "TRITON_LIBCUDA_PATH": ""})
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout))
    return found


def compiled(built: list[dict[str, Any]]) -> list[tuple[str, int, int, int]]:
    rows = [row for report in built for target in report["targets"] for row in target["rows"]]
    return [(row["family"], row["compiled"], row["cached"], row["failed"]) for row in rows]


@pytest.fixture(scope="module")
def built(variables: dict[str, str]) -> list[dict[str, Any]]:
    return build("nvfp4", "triton", variables)


@pytest.mark.all
def test_every_kernel_is_compiled_once(built: list[dict[str, Any]], variables: dict[str, str]) -> None:
    assert compiled(built) == [("triton", 10, 0, 0), ("triton", 0, 10, 0)]
    assert built[0]["caches"]["triton"] == variables["TRITON_CACHE_DIR"]


@pytest.mark.all
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"TRITON_LIBCUDA_PATH": warm_start.LIBCUDA}, "no C compiler"),
        ({"TRITON_LIBCUDA_PATH": "/usr/lib/wsl/lib"}, "no C compiler"),
        ({"TRTLLM_B12X_FREEZE": "1"}, f"TRTLLM_B12X_FREEZE=1 (trtllm-b12x warmup {OTHER})"),
    ],
)
def test_a_server_that_may_not_compile_plans_every_kernel(
    built: list[dict[str, Any]], variables: dict[str, str], folder: Path, changes: dict[str, str], why: str
) -> None:
    """Another geometry is refused with the command that mends it. A frozen server has a compiler."""
    asked = [{**FIELDS, "family": "triton", "capacity": 1}, {**FIELDS, "family": "triton", "capacity": 1, "top_k": 1}]
    before = set((folder / "triton").rglob("*.cubin"))
    compiler, server = "TRTLLM_B12X_FREEZE" in changes, {**variables, **changes}
    own, other = warm_start.start(warm_start.driver(folder), asked, CARD, server, compiler=compiler)
    assert (own["error"], own["kernels"], own["compiled"]) == ("", 10, 0)
    assert other["error"].startswith(f"PlanError: route_kernel is not in Triton's cache and is not compiled: {why}")
    assert f"(trtllm-b12x warmup {OTHER})" in other["error"]
    assert set((folder / "triton").rglob("*.cubin")) == before


@pytest.mark.all
def test_a_server_of_mxfp8_plans_every_kernel(variables: dict[str, str], folder: Path) -> None:
    """What its calls compile: ``test_triton_launch.py``."""
    assert compiled(build("mxfp8", "grouped", variables)) == [("grouped", 13, 0, 0), ("grouped", 0, 13, 0)]
    asked = [{**FIELDS, "family": "grouped", "capacity": 4096, "format": "MXFP8"}]
    (grouped,) = warm_start.start(warm_start.driver(folder), asked, CARD, variables)
    assert (grouped["error"], grouped["kernels"], grouped["compiled"]) == ("", 13, 0)


@pytest.mark.all
def test_ranks_that_start_together_compile_each_kernel_once(variables: dict[str, str], folder: Path) -> None:
    """With nothing in the cache: one compiles, the other waits and loads."""
    library = warm_start.driver(folder)
    fresh = {**variables, "TRITON_CACHE_DIR": str(folder / "ranks"), "LIBRARY_PATH": str(folder)}
    asked = [{**FIELDS, "family": "routes", "capacity": 0}]
    found = warm_start.together(2, library, asked, CARD, fresh)
    assert [rank["error"] for rank in found] == ["", ""]
    assert sorted(rank["processes"] for rank in found) == [0, 2]
    assert [rank["compiled"] for rank in found] == [0, 0]  # by the ranks' own JIT


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a CHECKPOINT or all of --experts, --top-k, --hidden, --intermediate, not both"),
        (sizes(intermediate=100, tp=3), "--tp 3 does not divide intermediate size 100"),
        ([*sizes(), "--card", "RTX 9090"], "'RTX 9090' is not a card of sm_120a; there are RTX PRO 6000, RTX 5090"),
        ([*sizes(), "--activation", "tanh"], "activation 'tanh': there are kernels for"),
        ([*sizes(hidden=192), "--format", "mxfp8"], "no family of kernels can serve this here"),
    ],
)
def test_what_cannot_be_warmed_up(arguments: list[Any], said: str, variables: dict[str, str]) -> None:
    result = run(*arguments, "--target", "sm_120a", **variables)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "W4A8_MXFP4_MXFP8", "MXFP8"])
@pytest.mark.parametrize(("size", "tp", "ep"), [(192, 1, 1), (320, 2, 1), (416, 1, 4), (448, 2, 2)])
def test_the_geometry_is_the_one_of_the_host_s_layer(
    algorithm: str, size: int, tp: int, ep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the kernels' tile, of one rank."""
    families = "triton", "grouped" if algorithm in ("NVFP4", "MXFP8") else "gemm"
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", ",".join(families))
    config = layers.host.QuantConfig(quant_algo=layers.host.QuantAlgo(algorithm), group_size=formats.group_size(algorithm))
    ranks = {"world_size": tp * ep, "tp_size": tp * ep, "moe_tp_size": tp, "moe_ep_size": ep}
    backend = layers.create(8, 128, size, quant_config=config, mapping=ranks).backend
    shapes = {"": LayerShape(8, 2, 128, size, "Swiglu", algorithm, dtype="bfloat16")}
    for crossover, planned in (("auto", families), ("64", families[: 1 + (algorithm == "MXFP8")])):
        monkeypatch.setenv("TRTLLM_B12X_CROSSOVER", crossover)  # what is to be measured is not compiled where nothing is
        tasks, _ = warmup._tasks(shapes, "sm_120a", Ranks(tp, ep))
        assert {task.geometry for task in tasks} == {backend._geometry()}
        assert tuple(task.kind.features.name for task in tasks) == planned
    assert backend.verdict.families == families


@pytest.mark.all
def test_a_host_that_does_not_import_is_not_asked(tmp_path: Path) -> None:
    """Its bindings need a driver, which a machine that builds images does not have."""
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm/__init__.py").write_text("raise ImportError('libcuda.so.1')\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    variables = {"PYTHONPATH": path, "TRTLLM_B12X_KERNELS": "triton", "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "trtllm_b12x", "warmup", *map(str, sizes()), "--target", "sm_120a"]
    result = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert result.returncode == 2
    assert "not triton: TRITON: no C compiler for Triton's launcher" in result.stderr


def test_a_checkpoint_says_its_own_formats(variables: dict[str, str], tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", [random_experts(3, 128, 64)], top_k=2)
    result = run(model, "--target", "sm_999a", **variables)
    assert "'sm_999a' is not one of 'sm_120a', 'sm_121a'" in result.output
    result = run(model, "--target", "sm_121a", "--card", "5090", **variables)
    assert "'5090' is not a card of sm_121a; there are GB10" in result.output


def test_cards_by_name_and_by_number() -> None:
    named = models("sm_120a", ("geforce rtx 5090", "NVIDIA RTX PRO 6000", "12"))
    assert [card.multiprocessors for card in named] == [188, 170, 12]
    assert {card.multiprocessors for card in models("sm_120a")} == set(MODELS["sm_120a"].values())
    assert [card.capability for card in models("sm_121a")] == [121]


def test_sizes_that_no_kernel_takes_are_one_line() -> None:
    result = run(*sizes(experts=2**20, target="sm_120a", card=170), TRTLLM_B12X_KERNELS="triton")
    assert result.exit_code == 1
    assert re.search(r"^error: top \d+ of 1048576 experts: at most \d+ of 2048$", result.output, re.MULTILINE), result.output
