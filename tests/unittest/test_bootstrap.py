"""The import hook, on modules made for the test; inside doubles of TensorRT-LLM it is in ``tests/integration/test_hosts.py``."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from trtllm_b12x import bootstrap, selection

NAME = "watched_module"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Modules that the hook handed over; ``watched_module`` is one that it watches."""
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    (tmp_path / "unwatched.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(bootstrap, "WATCHED", frozenset({NAME}))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    handed: list[str] = []

    def patch(module: ModuleType) -> None:
        handed.append(module.__name__)
        vars(module)["value"] += 1

    monkeypatch.setattr(selection, "patch", patch)
    bootstrap.start()
    yield handed
    bootstrap.stop()
    for name in (NAME, "unwatched"):
        sys.modules.pop(name, None)


def test_a_watched_module_is_handed_over_once_it_is_complete(seen: list[str]) -> None:
    importlib.import_module("unwatched")
    module = importlib.import_module(NAME)
    assert seen == [NAME]
    assert module.value == 2
    assert module.__spec__ is not None
    assert module.__spec__.loader.get_source(NAME) == "value = 1\n"  # type: ignore[union-attr]  # the original's


def test_a_reload_is_handed_over_again(seen: list[str]) -> None:
    module = importlib.import_module(NAME)
    assert importlib.reload(module).value == 2
    assert seen == [NAME, NAME]


def test_start_twice_watches_once(seen: list[str]) -> None:
    bootstrap.start()
    assert sum(isinstance(finder, bootstrap.Finder) for finder in sys.meta_path) == 1


def test_a_module_that_fails_fails_as_without_us(seen: list[str], tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").write_text("raise KeyError('the host')\n")
    importlib.invalidate_caches()
    with pytest.raises(KeyError, match="the host"):
        importlib.import_module(NAME)
    assert seen == []


def test_a_watched_module_that_is_not_there(seen: list[str], tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").unlink()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)


def test_threads_that_import_at_once(seen: list[str]) -> None:
    threads = [threading.Thread(target=importlib.import_module, args=(NAME,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [NAME]


def test_a_hook_that_raises_costs_one_line(
    seen: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selection, "patch", lambda module: 1 / 0)
    assert importlib.import_module(NAME).value == 1
    assert "watched_module is left alone: ZeroDivisionError" in capsys.readouterr().err
    assert bootstrap.failure == "ZeroDivisionError: division by zero"


def test_a_module_without_what_is_rebound_is_not_half_patched() -> None:
    module = ModuleType("create_moe")
    module.get_moe_cls = lambda model_config: int  # type: ignore[attr-defined]
    original = module.get_moe_cls
    for create in (None, lambda cls: None, lambda moe_cls: None):
        if create is not None:
            module.create_moe_backend = create  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"create_moe_backend|CutlassFusedMoE"):
            selection.patch(module)
        assert module.get_moe_cls is original
    selection.uninstall()
