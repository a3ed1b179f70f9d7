# SPDX-License-Identifier: Apache-2.0
"""Promotion reaches every process of a host, however it starts, and a broken plugin breaks none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import random_experts, write_checkpoint
from tests.hosts.machine import HOSTS, OURS, SHORT, Double, Machine, of, site
from tests.installations import distribution

LINE = "rank 0: 2 of 3 MoE layers on {}, decode below 64 tokens (NVFP4)"


def starts(short: set[tuple[str, ...]], others: set[tuple[str, ...]]) -> list[Any]:
    """Return cases of ``make test``, and those that ``make test-all`` adds. Each begins with the double."""
    return [pytest.param(*case, marks=() if case in short else pytest.mark.all) for case in sorted(short | others)]


TIMINGS = ("before_import", "after_import", "by_itself", "spawned", "mpi_worker")
PROMOTED = starts(
    {("B", "12.1", "before_import"), ("C2", "12.1", "by_itself"), ("B", "9.0", "by_itself")},
    {(double, "12.1", timing) for double in ("B", "C2") for timing in TIMINGS}
    | {(double, "12.1", timing) for double in ("A", "C1") for timing in ("before_import", "mpi_worker")}
    | {(double, "9.0", "by_itself") for double in ("A", "C1", "C2")},
)
STOCK = starts(
    {("B", "before_import")},
    {("A", "mpi_worker"), ("B", "by_itself"), ("C1", "by_itself"), ("C2", "before_import"), ("C2", "mpi_worker")},
)


@pytest.mark.parametrize(("double", "card", "timing"), PROMOTED, indirect=["double"])
def test_a_model_is_promoted_on_its_cards_only(double: Double, card: str, timing: str) -> None:
    result = double.scenario(f"starts.{timing}", FAKE_COMPUTE_CAP=card, DOUBLE_SM="121")
    assert result["generation"] == double.generation
    assert result["finite"]
    assert result["built_once"]  # nothing of ours touches tensors that have no storage yet
    assert result["wrappers"] == ["ConfigurableMoE"] * 3
    if card == "9.0":
        assert result["backends"] == [HOSTS] * 3
        assert not result["log"]
        assert result["promoted"] == 0
        return
    # The third lost its quantization after it was built: ours by name, the host's to the letter.  C2 binds late enough.
    assert result["backends"] == [OURS, OURS, HOSTS if double.generation == "C2" else OURS]
    assert result["methods"] == ["NVFP4Sm12xFusedMoEMethod"] * 2 + ["UnquantizedFusedMoEMethod"]
    assert result["kernels"] == [True, True, False]
    assert (result["promoted"], result["layers"]) == (2, 3)
    assert [line for line in result["log"] if "MoE layers on b12x" in line] == [LINE.format("b12x")]
    expected = {"create_moe.create_moe_backend"}
    if double.has_contexts:
        expected |= {"create_moe.resolve_moe_cls", "moe_resolution.resolve_moe_cls"}
    else:
        expected.add("create_moe.get_moe_cls")
    assert {".".join(name.split(".")[-2:]) for name in result["patches"]} == expected


@pytest.mark.parametrize(("double", "timing"), STOCK, indirect=["double"])
def test_on_stock_pins_decode_runs_on_triton(double: Double, tmp_path: Path, timing: str) -> None:
    """FlashInfer is 1.2's, as far as its metadata and sources say."""
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").touch()
    (tmp_path / "flashinfer" / "_build_meta.py").write_text('__version__ = "0.6.0"\n')
    distribution(tmp_path, "flashinfer-python", "0.6.0", [])
    path = f"{tmp_path}:{double.variables['PYTHONPATH']}"
    result = double.scenario(f"starts.{timing}", PYTHONPATH=path, TRTLLM_B12X_KERNELS="auto")
    assert result["generation"] == double.generation
    assert result["backends"][:2] == [OURS] * 2
    assert result["kernels"] == [True, True, False]
    assert result["finite"]
    assert (result["promoted"], result["families"]) == (2, {"triton": 2})
    assert result["log"].count(LINE.format("triton")) == 1
    (line,) = (line for line in result["log"] if "is served by triton, not by b12x" in line)
    assert "FLASHINFER_TOO_OLD: flashinfer-python 0.6.0 is older than 0.6.18" in line
    assert 'pip install "flashinfer-python>=0.7.2,<0.7.4"' in line
    assert all("QUANTIZATION" in line for line in result["warnings"])  # of the third layer


@pytest.mark.all
@pytest.mark.parametrize("double", ["B"], indirect=True)  # the line is ours, whatever the host
def test_the_line_is_seen(double: Double) -> None:
    result = double.scenario("starts.no_handler_of_its_own")
    assert result["stderr"].splitlines().count(f"[trtllm_b12x] [INFO] {LINE.format('b12x')}") == 1
    result = double.scenario("starts.no_handler_of_its_own", TRTLLM_B12X_LOG="ERROR")
    assert "[trtllm_b12x]" not in result["stderr"]


@pytest.mark.parametrize("double", of("A", "B", "C1"), indirect=True)
def test_without_configurable_moe(double: Double) -> None:
    """Generations A and B can do without the wrapper; later ones read no such switch."""
    result = double.scenario("starts.by_itself", ENABLE_CONFIGURABLE_MOE="0")
    assert result["wrappers"] == ["ConfigurableMoE" if double.has_contexts else OURS] * 3
    assert result["backends"][:2] == [OURS] * 2
    assert result["kernels"] == [True, True, False]


@pytest.mark.all("C2")
@pytest.mark.parametrize("double", SHORT, indirect=True)
def test_the_off_switch(double: Double) -> None:
    result = double.scenario("starts.by_itself", TRTLLM_B12X="0")
    assert result["backends"] == [HOSTS] * 3
    assert result["patches"] == []
    assert result["log"] == []
    result = double.scenario("starts.after_import", TRTLLM_B12X="0")
    assert (result["backends"], result["patches"]) == ([HOSTS] * 3, [])


@pytest.mark.all
def test_ranks_of_a_ray_session(machine: Machine) -> None:
    result = machine.double("B").scenario("starts.ray_ranks")
    for rank, model in enumerate(result["models"]):
        assert model["backends"] == [OURS] * 3
        assert LINE.format("b12x").replace("rank 0", f"rank {rank}") in model["log"]


@pytest.mark.all
def test_custom_module_dirs(own_double: Double) -> None:
    """Where no ``.pth`` is read, the folder that the package brings for the option reaches the workers."""
    (site(own_double.python) / "trtllm_b12x.pth").unlink()
    assert own_double.scenario("starts.mpi_worker")["backends"] == [HOSTS] * 3
    printed = Path(own_double.run("-m", "trtllm_b12x", "switch").stdout.strip())
    assert [path.name for path in printed.parent.iterdir()] == [printed.name]  # it comes first on sys.path
    result = own_double.scenario("starts.custom_module_dirs", str(printed))
    assert result["backends"] == [OURS] * 3
    assert result["classes"] == ["TrtllmB12xSwitch"]


@pytest.mark.all("C2")
@pytest.mark.parametrize("double", SHORT, indirect=True)
def test_verify_uses_the_embedded_host(double: Double, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, [random_experts(4, 128, 192)], top_k=2)
    result = double.run("-m", "trtllm_b12x", "verify", checkpoint, "--require-b12x")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "PASS" in result.stdout


def test_the_interpreters_start(machine: Machine) -> None:
    """The ``.pth`` imports nothing until the host is imported, and then nothing that the interpreter has not imported anyway."""

    def modules(code: str = "pass", **more: str) -> dict[str, int]:
        command = [str(machine.python), "-X", "importtime", "-c", code]
        variables = {name: value for name, value in machine.variables.items() if name != "PYTHONPATH"} | more
        errors = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stderr
        rows = [line.removeprefix("import time:").split("|") for line in errors.splitlines() if "|" in line]
        return {row[2].strip(): int(row[1]) for row in rows if row[1].strip().isdigit()}

    assert set(modules()) == set(modules(TRTLLM_B12X="0"))
    expected = {"trtllm_b12x", "trtllm_b12x.bootstrap", "trtllm_b12x.core", "trtllm_b12x.core.hook"}
    assert set(modules("import trtllm_b12x.bootstrap")) - set(modules()) == expected


@pytest.mark.all("syntax", "missing", "unreadable", "cache")
@pytest.mark.parametrize("how", ["syntax", "missing", "raising", "unreadable", "cache"])
def test_a_broken_plugin_breaks_nothing(own_double: Double, tmp_path: Path, how: str) -> None:
    package = site(own_double.python) / "trtllm_b12x"
    bootstrap, selection = package / "bootstrap.py", package / "engines" / "trtllm" / "promote.py"
    command, variables = [str(own_double.python)], own_double.variables
    if how == "syntax":
        bootstrap.write_text("def (:\n")
    elif how == "missing":
        bootstrap.unlink()
    elif how == "raising":
        text = selection.read_text()
        selection.write_text(text.replace("def patch(module: ModuleType) -> None:", "def patch(module):\n    1 / 0"))
    elif how == "unreadable":
        bootstrap.chmod(0)
        if os.geteuid() == 0:  # root reads everything, unless told not to
            command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all", *command]
    else:
        (tmp_path / "file").touch()
        variables = {**variables, "XDG_CACHE_HOME": str(tmp_path / "file")}
    for cached in package.glob("__pycache__/bootstrap*"):
        cached.unlink()

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, "-c", code], env=variables, cwd=tmp_path, capture_output=True, text=True)

    start = run("print('alive')")
    assert (start.returncode, start.stdout, start.stderr) == (0, "alive\n", "")
    result = run(
        "import importlib; c = importlib.import_module('tensorrt_llm._torch.modules.fused_moe.create_moe');"
        "from tests.hosts.scenarios import model_config; print(c.get_moe_cls(model_config()).__name__)"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [OURS if how == "cache" else HOSTS]
    assert ("is left alone: ZeroDivisionError" in result.stderr) == (how == "raising")


def test_nothing_is_left_after_uninstalling(own_double: Double) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(own_double.python)]
    subprocess.run([*pip, "uninstall", "-y", "trtllm-b12x"], check=True)
    assert [path.name for path in site(own_double.python).iterdir() if "b12x" in path.name] == []
    code = (
        "import sys, importlib; c = importlib.import_module('tensorrt_llm._torch.modules.fused_moe.create_moe');"
        "print(hasattr(c.get_moe_cls, '_trtllm_b12x'), [type(f).__name__ for f in sys.meta_path].count('Finder'))"
    )
    # The double's own records are the embedded host's: the package is there as plain files, as no user has it.
    path = f"{own_double.folder}:{own_double.machine.base / 'clone'}:{own_double.machine.base / 'sources'}"
    result = own_double.run("-c", code, PYTHONPATH=path)
    assert result.stdout.split() == ["False", "0"], result.stderr
