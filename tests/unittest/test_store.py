# SPDX-License-Identifier: Apache-2.0
"""Tables on disk: used where they are this card's and this user's, else one line and a measurement."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtllm_b12x.core import disk
from trtllm_b12x.dispatch import store
from trtllm_b12x.dispatch.policy import HOST, Timings
from trtllm_b12x.dispatch.store import Key

TIMINGS = Timings({1: {"triton": 10.25, HOST: 20.5}, 2: {"triton": 11.0, HOST: 21.0}})
KEY = Key({"name": "a card"}, {"num_experts": 8}, {"kernels": ["triton"], "tuned": True}, {"torch": "2.11"}, 256)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "trtllm_b12x"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="trtllm_b12x")

    def said() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "trtllm_b12x"]
        caplog.clear()
        return found

    return said


def rows(timings: Timings | None) -> Any:
    return None if timings is None else timings.rows


def test_kept_and_found_again(folder: Path, lines: Callable[[], list[str]]) -> None:
    """Nobody else may write into the folder, whatever the umask."""
    assert store.load(KEY) is None
    before = os.umask(0)
    try:
        store.keep(KEY, TIMINGS)
    finally:
        os.umask(before)
    assert rows(store.load(KEY)) == TIMINGS.rows
    assert not lines()
    assert (folder / KEY.file).stat().st_mode & 0o022 == 0
    assert dict(disk.contents())[KEY.file] > 100
    assert disk.clear() > 100
    assert store.load(KEY) is None


def test_another_card_geometry_or_kernel_has_a_file_of_its_own(folder: Path, lines: Callable[[], list[str]]) -> None:
    for other, words in (
        ({"card": {"name": "another"}}, "another card (name)"),
        ({"geometry": {"num_experts": 9}}, "another geometry (num_experts)"),
        ({"paths": {"kernels": []}}, "other kernels (kernels, tuned)"),
        ({"conditions": {"torch": "2.12", "triton": "3.7"}}, "other versions (torch, triton)"),  # of the same file
    ):
        store.keep(KEY, TIMINGS)
        key = dataclasses.replace(KEY, **other)
        if key.file != KEY.file:
            assert store.load(key) is None
        (folder / KEY.file).rename(folder / key.file)
        assert store.load(key) is None
        (line,) = lines()
        assert line.endswith(f": of {words}")
    store.keep(key, TIMINGS)
    assert rows(store.load(key)) == TIMINGS.rows
    assert store.load(KEY) is None


def test_a_table_of_more_tokens_serves_fewer(lines: Callable[[], list[str]]) -> None:
    """A server of 8,192 tokens must not take the table of one of 256."""
    store.keep(KEY, TIMINGS)
    assert rows(store.load(dataclasses.replace(KEY, max_num_tokens=96))) == TIMINGS.rows
    assert store.load(dataclasses.replace(KEY, max_num_tokens=8192)) is None
    (line,) = lines()
    assert line.endswith(": of 256 tokens, not 8192")


def damaged(change: Callable[[dict[str, Any]], Any]) -> bytes:
    content = store.record(KEY, TIMINGS)
    return json.dumps(change(content) or content).encode()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000, b" " * (2 << 20)),
        damaged(lambda c: c.update(form=1)),
        damaged(lambda c: c.update(card="a card")),
        damaged(lambda c: c.update(max_num_tokens="many")),
        damaged(lambda c: c["microseconds"].update({str(10**9): {HOST: 1}})),
        damaged(lambda c: c["microseconds"].update({"1": {HOST: 10**400}})),
        damaged(lambda c: c["microseconds"].update({"1": {HOST: 1, " ": 1}})),
        damaged(lambda c: c.pop("microseconds")),
        damaged(lambda c: c.update(microseconds={})),
        damaged(lambda c: c["microseconds"].update({"1": {"triton": 0, HOST: 1}})),
        damaged(lambda c: c["microseconds"].update({"1": {"triton": 1}})),
        damaged(lambda c: c["microseconds"].update({"1": None})),
        damaged(lambda c: c["microseconds"].update({"one": {HOST: 1}})),
        damaged(lambda c: c["microseconds"].update({"1": {HOST: float("nan")}})),
    ],
)
def test_what_is_damaged_is_one_line(folder: Path, content: bytes, lines: Callable[[], list[str]]) -> None:
    folder.mkdir()
    (folder / KEY.file).write_bytes(content)
    assert store.load(KEY) is None
    (line,) = lines()
    assert line.startswith(f"the stored crossover is not used, {folder / KEY.file}: ")
    assert "\n" not in line
    store.keep(KEY, TIMINGS)
    assert rows(store.load(KEY)) == TIMINGS.rows
    assert not lines()


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_another_user_can_write_or_owns_is_not_trusted(folder: Path, what: str, lines: Callable[[], list[str]]) -> None:
    store.keep(KEY, TIMINGS)
    place = folder / KEY.file if what == "file" else folder
    mode = place.stat().st_mode
    for added in (0o020, 0o002):
        place.chmod(mode | added)
        assert store.load(KEY) is None
        (line,) = lines()
        assert f"{KEY.file if what == 'file' else folder} can be written by other users: chmod go-w" in line
    place.chmod(mode)
    assert store.load(KEY) is not None
    if os.geteuid() == 0:  # only root can give a file away
        os.chown(place, 12345, 12345)
        assert store.load(KEY) is None
        assert "can be written by other users" in lines()[0]


def test_no_link_is_followed_and_nothing_but_a_file_is_read(folder: Path, tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    store.keep(KEY, TIMINGS)
    file = folder / KEY.file
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert store.load(KEY) is None
    store.keep(KEY, TIMINGS)
    assert not file.is_symlink()
    for make in (os.mkfifo, os.mkdir):
        file.unlink()
        make(file)
        assert store.load(KEY) is None
    assert len(lines()) == 3
    store.keep(KEY, TIMINGS)
    assert "cannot be written" in lines()[0]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_takes_nothing_is_one_line(
    folder: Path, error: int, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    def refuses(descriptor: int, *_: Any, **__: Any) -> None:
        os.close(descriptor)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fdopen", refuses)
    store.keep(KEY, TIMINGS)
    (line,) = lines()
    assert line.startswith(f"the crossover is measured at every start, {folder} cannot be written: ")
    assert os.strerror(error) in line
    assert [file.name for file in folder.iterdir() if not file.name.endswith(".lock")] == []


def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", Path("/proc/1")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        assert store.load(KEY) is None
        store.keep(KEY, TIMINGS)
    assert lines()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "relative")
    assert store.load(KEY) is None
    store.keep(KEY, TIMINGS)
    assert lines() == ["the crossover is measured at every start: neither XDG_CACHE_HOME nor HOME is an absolute path"]


def write_and_read(cache: str, number: int) -> list[str]:
    """What a process found wrong while others wrote the same table."""
    os.environ["XDG_CACHE_HOME"] = cache
    wrong = []
    logging.getLogger("trtllm_b12x").addHandler(handler := logging.Handler())
    handler.emit = lambda record: wrong.append(record.getMessage())  # type: ignore[method-assign]
    for turn in range(30):
        store.keep(KEY, Timings({1: {"triton": number + 1.0, HOST: float(turn + 1)}}))
        found = store.load(KEY)
        if found is None or not 1 <= found.rows[1]["triton"] <= 4:
            wrong.append(str(found))
    return wrong


def test_processes_at_a_time(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.starmap(write_and_read, [(str(tmp_path), number) for number in range(3)]) == [[]] * 3


def test_a_file_that_the_user_names(tmp_path: Path) -> None:
    """One table, or several as ``tune --json`` has them; whatever versions, of this card and geometry."""
    file = tmp_path / "given.json"

    def given(content: Any, key: Key = KEY) -> Any:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return store.load_file(file, key).rows

    own = store.record(KEY, TIMINGS)
    other = store.record(dataclasses.replace(KEY, geometry={"num_experts": 16}, conditions={}), TIMINGS)
    changed = dataclasses.replace(KEY, conditions={}, paths={"kernels": ["b12x"], "tuned": False})
    assert given(own, changed) == given({"tables": [other, own]}) == TIMINGS.rows
    for content, words in (
        ("", "JSONDecodeError"),
        ([1], "AttributeError"),
        ({"tables": []}, "no table"),
        (other, "of another geometry"),
        ({**own, "card": {"name": "b"}}, r"of another card \(name\)"),
    ):
        with pytest.raises(ValueError, match=words):
            given(content)
    file.unlink()
    with pytest.raises(ValueError, match="No such file"):
        store.load_file(file, KEY)


def test_tests_leave_the_cache_of_the_user_alone() -> None:
    assert disk.directory() != Path.home() / ".cache/trtllm_b12x"
