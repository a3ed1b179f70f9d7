"""Where micro's barrier is told to be, to be missing, or not to be told."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from trtllm_b12x.kernels.b12x import sources

STORE = 'cute.arch.fence_proxy("async.shared", space="cta")'
BARRIER = "self.epilog_sync_barrier.arrive_and_wait()"


def kernel(*between: str, behind: str = BARRIER) -> str:
    """A tile that is stored and scattered, with statements in between."""
    lines = [
        "class MoEMicroKernel:",
        "    def kernel(self, tiles):",
        "        while tiles:",
        "            cute.copy(a, b)",
        f"            {STORE}",
        *(f"            {line}" for line in between),
        "            while pairs:",
        "                scatter_add_bf16x2(get_ptr(out, at), v0, v1)",
        f"            {behind}",
    ]
    return "\n".join(lines) + "\n"


def test_a_missing_barrier_is_one_line_behind_the_store() -> None:
    for between in ((), ("# no barrier is needed here", "rows = 3"), ("self.other_barrier.arrive_and_wait()",)):
        mended = sources.with_barrier(kernel(*between))
        assert mended == kernel(BARRIER, *between)


@pytest.mark.parametrize("between", [(BARRIER,), ("rows = 3", BARRIER, "rows = 4")])
def test_a_barrier_that_is_there_is_left_alone(between: tuple[str, ...]) -> None:
    assert sources.with_barrier(kernel(*between)) == kernel(*between)


def test_every_store_is_looked_at() -> None:
    twice = kernel() + textwrap.indent(kernel(BARRIER), "")
    assert sources.with_barrier(twice) == kernel(BARRIER) + kernel(BARRIER)


@pytest.mark.parametrize(
    "source",
    [
        "class MoEMicroKernel: ...\n",
        kernel().replace("scatter_add_bf16x2", "red_global"),
        kernel().replace(STORE, "publish(tile)"),
        # A barrier that only some warps reach is none.
        kernel()
        .replace(STORE, "publish(tile)")
        .replace("while pairs:", f"if lane:\n                {BARRIER}\n            while pairs:"),
    ],
)
def test_a_place_that_cannot_be_told_is_not_guessed(source: str) -> None:
    assert sources.with_barrier(source) is None


def test_a_barrier_inside_a_branch_does_not_count() -> None:
    source = kernel(f"if lane:\n                {BARRIER}")
    assert sources.with_barrier(source) == kernel(BARRIER, f"if lane:\n                {BARRIER}")


def test_the_mended_class_is_another_whose_source_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CuTe DSL reads a kernel's source while it compiles."""
    (tmp_path / "own_kernel.py").write_text(kernel())
    monkeypatch.syspath_prepend(tmp_path)
    own: Any = __import__("own_kernel")
    dispatch = types.SimpleNamespace(MoEMicroKernel=own.MoEMicroKernel)
    found = sources.micro(dispatch)
    assert found is not None
    assert found.kernel is not own.MoEMicroKernel
    assert found == sources.micro(dispatch)
    assert len(found.digest) == 12
    linecache.checkcache()
    method = found.kernel.kernel  # type: ignore[attr-defined]
    assert inspect.getsource(method) == textwrap.indent(textwrap.dedent(kernel(BARRIER).split("\n", 1)[1]), "    ")
    assert "arrive_and_wait()\n            while pairs" not in inspect.getsource(own.MoEMicroKernel)
    for name in ("own_kernel", found.kernel.__module__):
        sys.modules.pop(name)


def test_the_installed_flashinfer_is_told() -> None:
    spec = importlib.util.find_spec("flashinfer")  # not imported: other tests of this process have none
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "fused_moe" / "cute_dsl" / "blackwell_sm12x" / "moe_micro_kernel.py"
    mended = sources.with_barrier(path.read_text())
    assert mended is not None
    assert sources.with_barrier(mended) == mended
    assert len(mended.splitlines()) - len(path.read_text().splitlines()) in (0, 1)


def test_globals_are_replaced_in_a_copy_alone() -> None:
    def scaled(x: int, *, by: int = 2) -> int:
        return x * by + len(_NAMES)

    copy = sources.with_globals(scaled, _NAMES=[1, 2, 3])
    assert (copy(1), copy(1, by=5), scaled(1)) == (5, 8, 2)


_NAMES: list[int] = []
