# SPDX-License-Identifier: Apache-2.0
"""``trtllm-b12x tune`` as a user meets it; a stand-in clock has the times."""

from __future__ import annotations

import copy
import importlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner, Result

from tests.checkpoints import random_experts, write_checkpoint
from tests.clock import Clock, standing_in
from trtllm_b12x.core import process
from trtllm_b12x.dispatch import store, timing
from trtllm_b12x.dispatch.policy import HOST, counts_to_measure
from trtllm_b12x.engines.trtllm import build_layer
from trtllm_b12x.kernels.reference import UnquantizedReferenceKernel
from trtllm_b12x.tools.cli import main

tune: Any = importlib.import_module("trtllm_b12x.tools.tune")  # its package has the command by that name
SIZES = ["--hidden", "128", "--intermediate", "256", "--experts", "8", "--top-k", "2"]


def run(*arguments: Any, status: int = 0) -> Result:
    result = CliRunner().invoke(main, ["tune", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def rows(lines: list[str]) -> dict[int, list[str]]:
    """Of a printed table, by token count."""
    return {int(line.split()[0]): line.split()[1:] for line in lines if line.split()[0].isdigit()}


def key_of(table: dict[str, Any]) -> store.Key:
    return store.Key(*(table[part] for part in ("card", "geometry", "paths", "conditions", "max_num_tokens")))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    process.forget()
    level = logging.getLogger("trtllm_b12x").level
    yield
    logging.getLogger("trtllm_b12x").setLevel(level)
    process.forget()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A machine with something to measure on."""
    monkeypatch.setattr(tune, "_gpu", lambda: "A stand-in (SM0)")
    monkeypatch.setattr(tune, "_DEVICE", "cpu")
    monkeypatch.setattr(tune, "_families", lambda: ["b12x"])
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e12)
    with standing_in(Clock(lambda name, tokens: 10.0 if name == HOST else 1.0 * tokens)) as clock:
        yield clock


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    for source in (SIZES, [write_checkpoint(tmp_path / "model", [random_experts(3, 128, 64)], top_k=2)]):
        result = run(*source, status=2)
        assert result.output.startswith("error: no GPU: torch sees none")
        assert "run it on the one with the card" in result.output


def test_a_geometry(card: Clock, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    lines = run(*SIZES, "--out", out).output.splitlines()
    assert lines[0] == "A stand-in (SM0): the tables are this GPU's, not another card's"
    assert "not CUTLASS" in lines[1]
    assert lines[2] == "a copy moves 1.00 TB/s, read plus written"
    assert lines[3].startswith("8 experts, top 2, 128 x 256, on a rank 8 experts, top 2, 128 x 256, Swiglu: measured in ")
    assert lines[3].endswith("b12x 1-9, then CUTLASS, 1 layers")
    assert lines[4].split() == ["tokens", "rows/expert", "b12x", "us", "host", "us", "limit", "us", "chosen"]
    printed = rows(lines[5:])
    assert list(printed) == sorted(counts_to_measure([128]))
    read = 3 * 128 * 256 * 9 / 16 * 8 * (1 - 0.75**8) * 1e6 / 1e12
    assert printed[8] == ["2.00", "8.0", "10.0", f"{read:.1f}", "b12x"]
    assert printed[16][-1] == "host"
    content = json.loads(out.read_text())
    (table,) = content["tables"]
    assert table["chosen"] == [[1, 9, "b12x"], [10, 128, "host"]]
    assert table["rows_per_local_expert"]["8"] == 2
    assert table["bandwidth_limit"]["8"] == pytest.approx(read, abs=0.01)
    assert (content["gpu"], content["embedded_host"]) == ("A stand-in (SM0)", True)


@pytest.mark.parametrize("activation", ["swiglu", "swiglubias"])
def test_two_kernels_of_a_format_that_the_host_has_no_path_for(
    activation: str, card: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are measured against each other, from drawn weights on."""
    monkeypatch.setattr(tune, "_families", lambda: ["triton", "grouped"])
    out = tmp_path / "out.json"
    lines = run(*SIZES, "--format", "mxfp8", "--activation", activation, "--out", out).output.splitlines()
    assert "MXFP8: measured in " in lines[3]
    assert lines[3].endswith("triton 1-10, then grouped, 1 layers")
    assert lines[4].split() == ["tokens", "rows/expert", "triton", "us", "grouped", "us", "limit", "us", "chosen"]
    read = 3 * 128 * 256 * 33 / 32 * 8 * (1 - 0.75**8) * 1e6 / 1e12
    assert rows(lines[5:])[8] == ["2.00", "8.0", "10.0", f"{read:.1f}", "triton"]
    assert rows(lines[5:])[16][-1] == "grouped"
    assert 0 < card.largest_gap < 0.1
    (table,) = json.loads(out.read_text())["tables"]
    assert table["paths"] == {"kernels": ["triton"], "host": "grouped", "tuned": True}
    assert store.load(key_of(table)) is not None
    monkeypatch.setattr(tune, "_families", lambda: ["grouped"])
    result = run(*SIZES, "--format", "mxfp8", status=2)
    assert "grouped at every count: there is nothing to compare it with" in result.output


def test_a_family_that_serves_beyond_decode(card: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tune, "_families", lambda: ["b12x", "grouped"])
    times = {"b12x": (1.0, 1.0), "grouped": (40.0, 0.05), HOST: (10.0, 0.1)}
    card.microseconds = lambda name, tokens: times[name][0] + times[name][1] * tokens
    run(*SIZES, "--out", tmp_path / "out.json")
    (table,) = json.loads((tmp_path / "out.json").read_text())["tables"]
    assert table["chosen"] == [[1, 9, "b12x"], [10, 648, HOST], [649, 8192, "grouped"]]  # grouped is 3 % faster from 645 on
    assert {1024, 4096, 8192} <= {int(tokens) for tokens in table["microseconds"]}
    assert "grouped" not in table["microseconds"]["32"]  # it serves from 64 tokens on


def test_forms_of_a_kernel_beside_each_other(card: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    forms = {"8 64x256w4 128x256w4": 2.0, "16 64x256w4 128x256w4": 1.0}
    monkeypatch.setattr(UnquantizedReferenceKernel, "forms", lambda self: {name: copy.copy(self) for name in forms})
    monkeypatch.setattr(tune, "_families", lambda: ["triton"])
    card.microseconds = lambda name, tokens: 10.0 if name == HOST else tokens * forms[name.removeprefix("triton ")]
    lines = run(*SIZES, "--out", tmp_path / "out.json", "--plot", tmp_path / "out.png").output.splitlines()
    assert lines[3].endswith("triton 16 64x256w4 128x256w4 1-9, then CUTLASS, 1 layers")
    assert lines[4:6] == [f"({letter}) triton {name}" for letter, name in zip("ab", forms, strict=True)]
    assert lines[6].split()[2:8] == ["(a)", "us", "(b)", "us", "host", "us"]
    assert rows(lines[7:-1])[8][1:4] == ["16.0", "8.0", "10.0"]
    assert rows(lines[7:-1])[8][-1] == "(b)"
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_has_a_table_for_each_geometry_and_a_server_reads_it(card: Clock, tmp_path: Path) -> None:
    experts = [random_experts(4, 128, 64), random_experts(4, 128, 64, seed=1)]
    result = run(write_checkpoint(tmp_path / "model", experts, top_k=2), "--tp", "2", "--ep", "2", "--json")
    (table,) = json.loads(result.stdout)["tables"]
    assert table["layer"] == "model.layers.0.mlp"
    assert [table["geometry"][name] for name in ("intermediate_size", "num_experts", "ranks")] == [256, 2, 2]  # 32 on the tile
    stored = store.load(key_of(table))
    assert stored is not None
    (tmp_path / "out.json").write_text(result.stdout)
    assert store.load_file(tmp_path / "out.json", key_of(table)).rows == stored.rows
    assert len(card.asked) == 1
    assert "on a rank" in result.stderr


def test_a_cache_that_cannot_be_written_is_named(card: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement is printed all the same."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = run(*SIZES, "--json")
    folder = tmp_path / "file" / "trtllm_b12x"
    assert f"warning: no table is stored for servers: {folder} cannot be written; set XDG_CACHE_HOME\n" in result.stderr
    assert len(json.loads(result.stdout)["tables"]) == 1


def test_what_cannot_be_measured(card: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, words in (
        ([*SIZES, "--plot", tmp_path / "none" / "a.png"], "its folder does not exist; create it first"),
        ([], "give a CHECKPOINT or all of --experts, --top-k, --hidden, --intermediate, not both"),
        (SIZES[:6], "give a CHECKPOINT or all of"),
        ([tmp_path, *SIZES[:2]], "give a CHECKPOINT or all of"),
        ([*SIZES, "--out", tmp_path / "none" / "a.json"], "its folder does not exist; create it first"),
        ([*SIZES, "--activation", "tanh"], "activation 'tanh': there are kernels for "),
        ([*SIZES, "--activation", "gelu"], "ACTIVATION"),
        ([*SIZES, "--tp", "3"], "--tp 3 does not divide intermediate size 256"),
        ([*SIZES, "--ep", "3"], "--ep 3 does not divide the number of experts 8"),
        ([*SIZES[:6], "--top-k", "9"], "--top-k 9 exceeds --experts 8"),
        (["--hidden", "144", *SIZES[2:]], "hidden size 144"),
        ([tmp_path / "none"], "none"),
        ([*SIZES, "--out", "/proc/out.json"], "cannot be written"),
    ):
        output = run(*arguments, status=2).output.replace("\n", " ")
        assert words in output
        assert "Traceback" not in output
    card.before = Mock(side_effect=RuntimeError("CUDA error: out of memory\nmore lines"))
    assert "8 experts, top 2, 128 x 256: RuntimeError: CUDA error: out of memory\n" in run(*SIZES, status=2).output
    card.before = Mock(side_effect=KeyboardInterrupt)
    assert "interrupted" in run(*SIZES, status=130).output
    monkeypatch.setattr(tune, "_families", list)
    assert "no kernel family runs on this card" in run(*SIZES, status=2).output


def test_layers_outgrow_the_cache_and_leave_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes in MiB, with 64 of cache: of a layer, of free memory; the number of layers."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=64 << 20))
    for layer, free, layers in ((64, 1 << 20, 8), (1, 1 << 20, 16), (1024, 1 << 20, 6), (1024, 4096, 3), (1024, 512, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free << 20, 1 << 50))
        backend = SimpleNamespace(parameters=lambda size=layer << 20: [torch.empty(size, dtype=torch.uint8, device="meta")])
        assert build_layer._enough(backend, torch.device("cuda")) == layers
