# SPDX-License-Identifier: Apache-2.0
"""What asks Triton's cache and FlashInfer's for a kernel, and what becomes of a miss."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock
from triton import knobs
from triton.runtime import cache as triton_cache

from trtllm_b12x.core import process, settings
from trtllm_b12x.environment import prove
from trtllm_b12x.kernels import PlanError
from trtllm_b12x.kernels.b12x import compiler
from trtllm_b12x.kernels.triton import cache

KEY = "ab" * 32


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def ask(name: str = "fc1_kernel.json") -> Any:
    return triton_cache.get_cache_manager(KEY).get_group(name)


def test_a_miss_raises_in_this_thread_alone() -> None:
    answers: list[Any] = []
    with cache.hits_only():
        with pytest.raises(cache.CacheMissError, match=r"^fc1_kernel$"):
            ask()
        other = threading.Thread(target=lambda: answers.append(ask()))
        other.start()
        other.join()
    assert answers == [None]
    assert ask() is None


def test_what_is_in_the_cache_is_found() -> None:
    manager = triton_cache.get_cache_manager(KEY)
    manager.put_group("fc1_kernel.json", {"fc1_kernel.json": manager.put("{}", "fc1_kernel.json")})
    with cache.hits_only():
        assert ask() == {"fc1_kernel.json": manager.get_file("fc1_kernel.json")}


def test_the_user_s_manager_is_asked_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(triton_cache.FileCacheManager):
        def get_group(self, filename: str) -> dict[str, str]:
            return {filename: "theirs"}

    monkeypatch.setitem(vars(knobs.cache), "manager_class", Theirs)
    with cache.hits_only():
        assert ask() == {"fc1_kernel.json": "theirs"}
    assert knobs.cache.manager_class is Theirs


def test_a_manager_that_the_environment_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "triton.runtime.cache:FileCacheManager")
    with cache.hits_only(), pytest.raises(cache.CacheMissError):
        ask()
    assert "manager_class" not in vars(knobs.cache)
    assert knobs.cache.manager_class is triton_cache.FileCacheManager


def test_a_cache_without_room_misses_too(folder: Path) -> None:
    """A read-only folder: Triton makes one for each key before it looks."""
    folder.write_text("no folder")
    with cache.hits_only(), pytest.raises(cache.CacheMissError):
        ask()


def test_triton_s_own_module_is_refused_with_the_variable_that_helps() -> None:
    with cache.hits_only(), pytest.raises(cache.CacheMissError, match=r"Triton's own cuda_utils .*TRITON_LIBCUDA_PATH"):
        triton_cache.get_cache_manager(KEY).get_file("cuda_utils.cpython-311-x86_64-linux-gnu.so")


def test_what_triton_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.toolchain, "lacking", lambda capability: ("no ptxas",))
    with pytest.raises(PlanError, match="no ptxas"):
        cache.load([], 120, "")


def test_a_plan_waits_for_its_own_kernels_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another thread or process compiles for longer: the cache is asked again, and what is there is taken."""
    monkeypatch.setattr(cache.toolchain, "cache_folder", lambda: tmp_path)
    answers = [["missing"], ["missing"], []]
    monkeypatch.setattr(cache, "_missing", lambda needed: answers.pop(0))
    with FileLock(tmp_path / "trtllm_b12x.lock"):
        assert cache.fill([], 120) == 0
    assert not answers
    answers = [["missing"], ["missing"]]
    monkeypatch.setattr(cache.compile_pool, "fill", lambda missing, capability: len(missing))
    assert cache.fill([], 120) == 1


# ---- FlashInfer's kernels: what its cache lacks is tried in a child first, inside a server -----------------------------


@pytest.mark.parametrize(
    ("cached", "in_server", "frozen", "answer", "proofs"),
    [
        (True, True, "1", "loaded", []),
        (False, True, "0", "ptxas fatal", ["sm_120a"]),
        (False, False, "0", "compiled", []),
        (False, True, "1", r"static_1 is not in FlashInfer's cache.*warmup \.\.\.", []),
    ],
    ids=["in the cache", "tried in a child", "no server that would die", "frozen"],
)
def test_what_flashinfers_cache_lacks(
    monkeypatch: pytest.MonkeyPatch, cached: bool, in_server: bool, frozen: str, answer: str, proofs: list[str]
) -> None:
    """On an sm_120a, where FlashInfer cannot compile."""
    proof = Mock(return_value="ptxas fatal")
    flashinfers = Mock(side_effect=lambda module, name, compile_kernel: "loaded" if cached else compile_kernel())
    monkeypatch.setattr(process, "in_server", in_server)
    monkeypatch.setattr(prove, "compile_error", proof)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    asked = flashinfers, "trtllm-b12x warmup ...", torch.device("cuda"), "module", "static_1", lambda: "compiled"
    with settings.FREEZE.set(frozen):
        if answer in ("loaded", "compiled"):
            assert compiler._build(*asked) == answer
        else:
            with pytest.raises(PlanError, match=answer):
                compiler._build(*asked)
    assert [call.args[0] for call in proof.call_args_list] == proofs
