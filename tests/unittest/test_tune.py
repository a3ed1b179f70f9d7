"""``trtllm-b12x tune`` as a user meets it; a stand-in clock has the times."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from trtllm_b12x.crossover import measuring, store

from tests.checkpoints import random_experts, write_checkpoint
from tests.clock import Clock, standing_in
from trtllm_b12x import process
from trtllm_b12x.cli import main
from trtllm_b12x.dispatch.policy import HOST, Measured, Times

tune: Any = importlib.import_module("trtllm_b12x.cli.tune")  # its package has the command by that name
SIZES = ["--hidden", "128", "--intermediate", "256", "--experts", "8", "--top-k", "2"]


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


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
    monkeypatch.setattr(tune, "_device", lambda: "cpu")
    monkeypatch.setattr(tune, "_families", lambda: ["b12x"])
    monkeypatch.setattr(measuring, "copy_bandwidth", lambda: 1e12)
    with standing_in(Clock(lambda name, tokens: 10.0 if name == HOST else 1.0 * tokens)) as clock:
        yield clock


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    for source in (SIZES, [write_checkpoint(tmp_path / "model", [random_experts(3, 128, 64)], top_k=2)]):
        result = run(*source)
        assert result.exit_code == 2
        assert result.output.startswith("error: no GPU: torch sees none")
        assert "run it on the one with the card" in result.output


def test_a_geometry(card: Clock, tmp_path: Path) -> None:
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    result = run(*SIZES, "--skewed", "--json", out, "--png", png)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "A stand-in (SM0): the tables are this GPU's, not another card's"
    assert "not CUTLASS" in lines[1]
    assert lines[2] == "a copy moves 1.00 TB/s, read plus written"
    assert lines[3].startswith("8 experts, top 2, 128 x 256, on a rank 8 experts, top 2, 128 x 256, Swiglu: measured in ")
    assert lines[3].endswith("b12x 1-9, then CUTLASS, 1 layers")
    assert lines[4].split() == ["tokens", "rows/expert", "b12x", "us", "host", "us", "limit", "us", "chosen"]
    rows = {int(line.split()[0]): line.split()[1:] for line in lines[5:] if line.split()[0].isdigit()}
    assert {1, 2, 4, 8, 16, 32} < set(rows) < set(range(33))  # the host has won twice; more around 10
    read = 3 * 128 * 256 * 9 / 16 * 8 * (1 - 0.75**8) * 1e6 / 1e12
    assert rows[8] == ["2.00", "8.0", "10.0", f"{read:.1f}", "b12x"]
    assert rows[16][-1] == "host"
    assert "skewed routes: the choice is at most 0.0 % behind the fastest path" in lines
    assert png.read_bytes().startswith(b"\x89PNG")
    content = json.loads(out.read_text())
    (table,) = content["tables"]
    assert table["chosen"] == [[1, 9, "b12x"], [10, 128, "host"]]
    assert table["rows_per_local_expert"]["8"] == 2
    assert table["bandwidth_limit"]["8"] == pytest.approx(read, abs=0.01)
    assert table["skewed"]["worst_loss"] == 0
    assert [named.get("skewed") for named in card.named] == [None, True]
    assert (content["gpu"], content["embedded_host"]) == ("A stand-in (SM0)", True)


@pytest.mark.parametrize("activation", ["swiglu", "swiglubias"])
def test_two_kernels_of_a_format_that_the_host_has_no_path_for(
    activation: str, card: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are measured against each other, from drawn weights on."""
    monkeypatch.setattr(tune, "_families", lambda: ["triton", "grouped"])
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    result = run(*SIZES, "--format", "mxfp8", "--activation", activation, "--json", out, "--png", png)
    assert result.exit_code == 0, result.output
    assert "MXFP8: measured in " in result.output
    assert "triton 1-9, then grouped, 1 layers" in result.output
    lines = result.output.splitlines()
    assert lines[4].split() == ["tokens", "rows/expert", "triton", "us", "grouped", "us", "limit", "us", "chosen"]
    rows = {int(line.split()[0]): line.split()[1:] for line in lines[5:] if line.split()[0].isdigit()}
    read = 3 * 128 * 256 * 33 / 32 * 8 * (1 - 0.75**8) * 1e6 / 1e12
    assert rows[8] == ["2.00", "8.0", "10.0", f"{read:.1f}", "triton"]
    assert rows[16][-1] == "grouped"
    assert 0 < card.largest_gap < 0.1
    (table,) = json.loads(out.read_text())["tables"]
    key = store.Key(*(table[part] for part in ("card", "geometry", "paths", "conditions")))
    assert key.paths == {"kernels": ["triton"], "host": "grouped", "tuned": True}
    assert store.load(key) is not None
    monkeypatch.setattr(tune, "_families", lambda: ["grouped"])
    result = run(*SIZES, "--format", "mxfp8")
    assert result.exit_code == 2
    assert "grouped at every count: there is nothing to compare it with" in result.output


def test_a_family_that_serves_beyond_decode(card: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tune, "_families", lambda: ["b12x", "grouped"])
    times = {"b12x": (1.0, 1.0), "grouped": (40.0, 0.05), HOST: (10.0, 0.1)}
    card._microseconds = lambda name, tokens: times[name][0] + times[name][1] * tokens
    result = run(*SIZES, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    (table,) = json.loads((tmp_path / "out.json").read_text())["tables"]
    (_, last, decode), (_, end, between), (_, most, prefill) = table["chosen"]
    assert (last, decode, between, most, prefill) == (9, "b12x", HOST, 8192, "grouped")
    assert 580 < end < 800  # 3 % better than the host from 640 on
    assert {1024, 4096, 8192} <= {int(tokens) for tokens in table["microseconds"]}
    assert "grouped" not in table["microseconds"]["32"]  # nothing of its own below 64


def test_what_it_writes_is_what_a_server_reads(card: Clock, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run(*SIZES, "--ep", "2", "--json", out).exit_code == 0
    table = json.loads(out.read_text())["tables"][0]
    assert table["geometry"]["num_experts"] == 4
    assert table["geometry"]["ranks"] == 2
    key = store.Key(*(table[part] for part in ("card", "geometry", "paths", "conditions")))
    given, stored = store.given(str(out), key), store.load(key)
    assert given is not None
    assert stored is not None
    assert given.points == stored.points


def test_a_checkpoint_has_a_table_for_each_geometry(card: Clock, tmp_path: Path) -> None:
    experts = [random_experts(4, 128, 64), random_experts(4, 128, 64, seed=1)]
    model = write_checkpoint(tmp_path / "model", experts, top_k=2)
    result = run(model, "--tp", "2", "--json", "-")
    assert result.exit_code == 0, result.output
    (table,) = json.loads(result.stdout)["tables"]
    assert table["layer"] == "model.layers.0.mlp"
    assert table["geometry"]["intermediate_size"] == 256  # 32 on the tile
    assert len(card.asked) == 1
    assert "on a rank" in result.stderr


def test_usage(tmp_path: Path) -> None:
    for arguments, said in (
        ([], "give a CHECKPOINT, or all of --experts, --top-k, --hidden, --intermediate"),
        (SIZES[:6], "give a CHECKPOINT, or all of"),
        ([tmp_path, *SIZES], "give a CHECKPOINT, or all of"),
        ([tmp_path, *SIZES[:2]], "give a CHECKPOINT, or all of"),
        ([*SIZES, "--json", tmp_path / "none" / "a.json"], "its folder does not exist; create it first"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert said in result.output.replace("\n", " ")


def test_what_cannot_be_measured(card: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, said in (
        ([*SIZES, "--activation", "tanh"], "activation 'tanh': there are kernels for "),
        ([*SIZES, "--activation", "gelu"], "ACTIVATION"),
        ([*SIZES, "--tp", "3"], "--tp 3 does not divide intermediate size 256"),
        ([*SIZES, "--ep", "3"], "--ep 3 does not divide the number of experts 8"),
        ([*SIZES[:6], "--top-k", "9"], "--top-k 9 exceeds --experts 8"),
        (["--hidden", "144", *SIZES[2:]], "hidden size 144"),
        ([tmp_path / "none"], "none"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert said in result.output
        assert "Traceback" not in result.output

    def fails() -> None:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    card._before = fails
    result = run(*SIZES)
    assert result.exit_code == 2
    assert "8 experts, top 2, 128 x 256: RuntimeError: CUDA error: out of memory\n" in result.output
    monkeypatch.setattr(tune, "_families", list)
    result = run(*SIZES)
    assert result.exit_code == 2
    assert "no kernel family runs on this card" in result.output


def test_a_plot_without_matplotlib(card: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run(*SIZES, "--png", tmp_path / "out.png")
    assert result.exit_code == 2
    assert "--png needs matplotlib: pip install matplotlib" in result.output
    assert not card.asked


def test_files_that_cannot_be_written(card: Clock, tmp_path: Path) -> None:
    for option in ("--json", "--png"):
        result = run(*SIZES, option, "/proc/out.json" if option == "--json" else "/proc/out.png")
        assert result.exit_code == 2
        assert "cannot be written" in result.output


def test_interrupted(card: Clock) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    card._before = interrupt
    result = run(*SIZES)
    assert result.exit_code == 130
    assert "interrupted" in result.output


def test_the_loss_of_a_choice_is_told() -> None:
    times = Times({1: {"a": 5.0, HOST: 10.0}, 2: {"a": 9.0, HOST: 10.0}})
    table = tune._Table(
        "", None, {}, times, {}, {"a": 2}, 1.0, 1, {}, Times({1: {"a": 5.0, HOST: 10.0}, 2: {"a": 12.0, HOST: 10.0}})
    )
    assert isinstance(table.split, Measured)
    assert table.loss() == pytest.approx(0.2)


def test_the_choice_knows_where_launches_change() -> None:
    times = Times({n: {"a": 5.0 if n < 40 else 15.0, HOST: 10.0} for n in (16, 32, 64)})
    table = tune._Table("", None, {}, times, {"a": [40]}, {"a": 64}, 1.0, 1, {})
    assert table.split.ranges(64, {"a": 64}) == [(1, 39, "a"), (40, 64, HOST)]
