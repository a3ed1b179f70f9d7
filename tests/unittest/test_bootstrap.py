# SPDX-License-Identifier: Apache-2.0
"""The import hook, on modules made for the test; inside doubles of TensorRT-LLM it is in ``tests/integration/hosts``."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from trtllm_b12x import bootstrap
from trtllm_b12x.core import hook
from trtllm_b12x.engines.trtllm import promote

NAME = "watched_module"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Modules that the hook handed over; ``watched_module`` is one that it watches."""
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    (tmp_path / "unwatched.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    handed: list[str] = []

    def patch(module: ModuleType) -> None:
        handed.append(module.__name__)
        vars(module)["value"] += 1

    monkeypatch.setattr(promote, "patch", patch)
    hook.start(bootstrap.patch, frozenset({NAME}))
    yield handed
    hook.stop()
    for name in (NAME, "unwatched"):
        sys.modules.pop(name, None)


def test_a_watched_module_is_handed_over_once_it_is_complete(seen: list[str]) -> None:
    hook.start(bootstrap.patch, frozenset({NAME}))  # a second time
    importlib.import_module("unwatched")
    module = importlib.import_module(NAME)
    assert seen == [NAME]
    assert module.value == 2
    assert module.__spec__ is not None
    assert module.__spec__.loader.get_source(NAME) == "value = 1\n"  # type: ignore[union-attr]  # the original's
    assert importlib.reload(module).value == 2
    assert seen == [NAME, NAME]


def test_a_module_that_fails_fails_as_without_us(seen: list[str], tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").write_text("raise KeyError('the host')\n")
    importlib.invalidate_caches()
    with pytest.raises(KeyError, match="the host"):
        importlib.import_module(NAME)
    assert seen == []


def test_threads_that_import_at_once(seen: list[str]) -> None:
    threads = [threading.Thread(target=importlib.import_module, args=(NAME,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [NAME]


ROOT = Path(__file__).parents[2]


def test_the_start_file_names_what_the_pth_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEP 829: one ``package.module:callable`` a line, called without arguments."""
    (line,) = (ROOT / "trtllm_b12x.start").read_text().splitlines()
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv("TRTLLM_B12X", raising=False)
    hook.stop()
    assert not hook.watching()
    pkgutil.resolve_name(line)()
    assert hook.watching()


def test_the_installed_package_is_taken_not_the_working_directorys(tmp_path: Path) -> None:
    """The search path as it was when the ``.pth`` ran: a program's own folder comes later."""
    (tmp_path / "trtllm_b12x").mkdir()
    (tmp_path / "trtllm_b12x/__init__.py").write_text("1 / 0")
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm/__init__.py").touch()
    code = f"import sys\nsys.path[:] = [p for p in sys.path if p] + [{str(ROOT)!r}]\n"
    code += f"exec(open({str(ROOT / 'trtllm_b12x.pth')!r}).read())\nsys.path.insert(0, '.')\nimport tensorrt_llm\n"
    code += "print(sys.modules['trtllm_b12x'].__file__, type(sys.meta_path[0]).__name__)"
    result = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(ROOT / "trtllm_b12x/__init__.py"), "Finder"]
