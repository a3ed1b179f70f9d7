# SPDX-License-Identifier: Apache-2.0
"""All that a user runs, on a terminal: narrow ones, without color, without UTF-8, and Ctrl-C at any time."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests import terminal
from tests.checkpoints import random_experts, write_checkpoint
from trtllm_b12x.tools.cli import main

PROGRAM = "-m", "trtllm_b12x"
SIZES = "--hidden", "128", "--intermediate", "256", "--experts", "8", "--top-k", "2"
SHOWN, HIDDEN = "\x1b[?25h", "\x1b[?25l"
"""The cursor. A progress bar hides it."""
TUNE = """
import importlib
from tests.clock import Clock, standing_in
from trtllm_b12x.dispatch import timing
from trtllm_b12x.tools.cli import main
tune = importlib.import_module("trtllm_b12x.tools.tune")
tune._gpu, tune._DEVICE, tune._families, timing.copy_bandwidth = lambda: "A stand-in", "cpu", lambda: ["b12x"], lambda: 1e12
with standing_in(Clock(lambda name, tokens: float(tokens))):
    main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = [random_experts(3, 128, 64, seed=seed) for seed in (0, 1)]
    return write_checkpoint(tmp_path_factory.mktemp("model"), layers, top_k=2)


@pytest.mark.all("dumb, C", "40, ascii")
@pytest.mark.parametrize(
    ("columns", "variables"),
    [
        (80, {}),
        (40, {"NO_COLOR": "1"}),
        (80, {"TERM": "dumb", "LANG": "C", "LC_ALL": "C"}),
        (40, {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}),
    ],
    ids=["80", "40, no color", "dumb, C", "40, ascii"],
)
def test_a_table_under_a_bar(model: Path, columns: int, variables: dict[str, str]) -> None:
    """Its lines are those of a file, to the character, and nothing is left of the bar."""
    command = "verify", str(model), "--tokens", "1"
    expected = CliRunner().invoke(main, command).output
    screen = terminal.run(*PROGRAM, *command, columns=columns, **variables)
    assert (screen.status, screen.lines) == (0, [*expected.splitlines(), ""])
    assert max(map(len, screen.rows)) == columns
    bars = screen.written.count("verifying layers")
    assert (bars > 0) is ("TERM" not in variables)
    if bars:
        assert "0/2" in screen.written
        assert screen.written.rindex(SHOWN) > screen.written.rindex(HIDDEN)
    if "NO_COLOR" in variables or "TERM" in variables:
        assert not re.search(r"\x1b\[3[0-9]", screen.written)
    if "PYTHONIOENCODING" in variables:
        assert screen.written.isascii()
        assert "\\u" not in screen.written


def test_a_table_that_is_measured(tmp_path: Path) -> None:
    screen = terminal.run("-c", TUNE, "tune", *SIZES, columns=40, XDG_CACHE_HOME=str(tmp_path))
    assert screen.status == 0, screen.lines
    assert screen.lines[0] == "A stand-in: the tables are this GPU's, not another card's"
    assert screen.lines[3] == "[trtllm_b12x] [INFO] rank 0: 1 of 1 MoE layers on b12x, decode below 64 tokens (NVFP4)"
    assert screen.lines[5] == "tokens  rows/expert     b12x us     host us    limit us  chosen"
    assert "measuring layers" in screen.written
    assert not any("measuring layers" in line for line in screen.lines)


@pytest.mark.all
def test_kernels_that_are_compiled(tmp_path: Path) -> None:
    command = *PROGRAM, "warmup", *SIZES, "--target", "sm_120a", "--card", "170", "--jobs", "1"
    cache = str(tmp_path)
    screen = terminal.run(*command, columns=40, interrupt_at="1/", TRITON_CACHE_DIR=cache, TRTLLM_B12X_KERNELS="cuda")
    assert (screen.status, screen.lines) == (130, ["interrupted", ""])
    screen = terminal.run(*command, columns=40, TRITON_CACHE_DIR=cache, TRTLLM_B12X_KERNELS="cuda")
    assert screen.status == 0, screen.lines
    assert screen.lines[0] == "1 geometry: 8 experts, top 2, 128 x 256"
    assert "kernels for sm_120a" in screen.written


@pytest.mark.parametrize(
    ("arguments", "status", "shown"),
    [
        (("--help",), 0, "Usage: python -m trtllm_b12x"),
        (("cache",), 0, r"größe \u4e00"),
        (("doctor", "--target", "sm_120a"), None, "trtllm-b12x"),
        (("verify", "nowhere"), 2, "error: nowhere: no such directory"),
        (("tune", *SIZES, "--tp", "3"), 2, "error: --tp 3 does not divide"),
        (("warmup", *SIZES), 2, "Missing option '--target'"),
        (("switch", "x"), 2, "unexpected extra argument"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_without_a_bar(arguments: tuple[str, ...], status: int | None, shown: str, tmp_path: Path) -> None:
    variables = {"XDG_CACHE_HOME": str(tmp_path / "größe \u4e00")} if arguments == ("cache",) else {}
    screen = terminal.run(*PROGRAM, *arguments, columns=40, LC_ALL="C", PYTHONIOENCODING="latin-1", **variables)
    assert screen.status in ((0, 1) if status is None else (status,)), screen.lines
    assert shown in "\n".join(screen.lines)
    assert "Traceback" not in screen.written


@pytest.mark.parametrize("module", ["click", "torch"])
def test_ctrl_c_during_imports(module: str, tmp_path: Path) -> None:
    """As torch's C code does, this module makes another error of whatever is raised."""
    code = "import time\nprint('importing', flush=True)\ntry:\n    time.sleep(60)\nfinally:\n    raise ImportError(__name__)\n"
    (tmp_path / f"{module}.py").write_text(code)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", str(Path(__file__).parents[2]))))
    screen = terminal.run(*PROGRAM, "verify", str(tmp_path), interrupt_at="importing\r\n", PYTHONPATH=path)
    assert (screen.status, screen.lines) == (130, ["importing", "^Cinterrupted", ""])


def test_ctrl_c_at_work(tmp_path: Path) -> None:
    """A layer counts once every family has verified it, and an interrupt loses nothing that was shown."""
    layers = [random_experts(2, 128, 16)] * 150  # Ctrl-C must find it at work, however busy the machine
    file, model = tmp_path / "r.json", write_checkpoint(tmp_path / "model", layers, top_k=1)
    command = *PROGRAM, "verify", str(model), "--tokens", "1", "--out", str(file)
    screen = terminal.run(*command, columns=60, interrupt_at="layers.1.mlp  ", TRTLLM_B12X_KERNELS="b12x,triton")
    assert screen.status == 130
    found = json.loads(file.read_text())
    assert found["status"] == "interrupted"
    names = [layer["name"] for layer in found["layers"]]
    verified = re.fullmatch(r"interrupted: (\d+) of 150 layers were verified", screen.lines[-2])
    assert verified
    assert len(names) // 2 - int(verified[1]) in (0, 1)  # 1: before its last line was shown
    shown = {words[0] for line in screen.lines if (words := line.split())[1:2] in (["b12x"], ["triton"])}
    assert shown <= set(names)
    assert not any("verifying layers" in line for line in screen.lines)
    assert 2 < len(names) < 300
    assert screen.written.rindex(SHOWN) > screen.written.rindex(HIDDEN)
