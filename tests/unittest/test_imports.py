# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, read from the code."""

from __future__ import annotations

import ast
import graphlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trtllm_b12x
from trtllm_b12x import formats
from trtllm_b12x.core import process

ROOT = Path(trtllm_b12x.__file__).parent
FILES = {path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__"): path for path in ROOT.rglob("*.py")}
MODULES = {".".join(("trtllm_b12x", *name.replace("__init__", "").split("/"))).rstrip("."): name for name in FILES}
MOST_LINES = 400

FLOORS = (
    ("core",),
    ("formats",),
    ("decision",),
    ("environment",),
    ("kernels",),
    ("dispatch",),
    ("engines",),
    ("bootstrap", "__init__", "switch"),
    ("tools",),
    ("__main__",),
)
"""From the ground up. An import goes down or stays on its floor, imports inside functions and for types included."""
LIGHT = (
    "core",
    "decision",
    "environment",
    "tools/cli",
    "dispatch/policy",
    "dispatch/schedule",
    "engines/trtllm/promote",
    "engines/trtllm/status",
    "engines/rebinding",
    "engines/report",
    "engines/sglang/facts",
    "engines/sglang/plugin",
    "engines/sglang/report",
    "engines/vllm/facts",
    "engines/vllm/plugin",
    "engines/vllm/report",
)
"""Imported without torch: in every process of the host, or by a command on a machine that has none."""


def floor(name: str) -> int:
    """Number of the floor of a file or a module of the package, from the ground."""
    room = name.replace(".", "/").removeprefix("trtllm_b12x").strip("/").partition("/")[0] or "__init__"
    named = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    return named.get(room, named["__init__"])  # a name of the package itself, such as status


def imports(name: str, late: bool = True, types: bool = False) -> set[str]:
    """Absolute names; with ``late`` also of imports inside functions, with ``types`` those for type checkers too."""
    found, path = set(), FILES[name]
    package = ["trtllm_b12x", *name.split("/")]
    if path.name != "__init__.py":
        package.pop()
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types:
            nodes += node.orelse
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not late:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) + 1 - node.level], *([node.module] if node.module else [])])
            base = base if node.level else str(node.module)
            named = {f"{base}.{alias.name}" for alias in node.names}
            found |= named if named <= MODULES.keys() else {base, *named}
        nodes += ast.iter_child_nodes(node)
    return found


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}/")


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_import_goes_up(name: str) -> None:
    ours = {found for found in imports(name, types=True) if f"{found}.".startswith("trtllm_b12x.")}
    assert {found for found in ours if floor(found) > floor(name)} == set()


def test_the_reference_shares_nothing_with_what_it_judges() -> None:
    judged = (
        "trtllm_b12x.kernels",
        "trtllm_b12x.engines",
        *(f"trtllm_b12x.formats.{part}" for part in ("nvfp4", "mxfp8", "layouts")),
    )
    for name in ("tools/verify/reference", "tools/verify/reference_formats"):
        assert {found for found in imports(name) if found.startswith(judged)} == set(), name


def test_no_import_runs_in_a_circle() -> None:
    """But in the embedded host, whose circle is the host's own."""
    embedded = "trtllm_b12x.engines.trtllm.embedded"
    graph = {module: imports(name, late=False) & MODULES.keys() - {module} for module, name in MODULES.items()}
    graph = {module: found for module, found in graph.items() if not module.startswith(f"{embedded}.")}
    tuple(graphlib.TopologicalSorter({**graph, embedded: set()}).static_order())  # raises with the circle


def test_no_file_is_too_long() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_neighbors_have_one_door_each() -> None:
    for name in FILES:
        found = {module.partition(".")[0] for module in imports(name)}
        assert "tensorrt_llm" not in found or within(name, "engines/trtllm"), name
        outside = not within(name, "kernels") and not within(name, "environment")
        for engine in ("vllm", "sglang"):
            assert engine not in found or within(name, f"engines/{engine}"), name
        assert not (found & {"flashinfer", "cutlass", "triton"} and outside), name


@pytest.mark.parametrize(("mine", "other"), [*itertools.permutations(("trtllm", "vllm", "sglang"), 2)])
def test_engines_know_nothing_of_each_other(mine: str, other: str) -> None:
    found = {module for name in FILES if within(name, f"engines/{mine}") for module in imports(name, types=True)}
    assert not {module for module in found if module.startswith(f"trtllm_b12x.engines.{other}")}


def test_what_must_do_without_torch_does() -> None:
    for name in FILES:
        if name == "formats" or any(within(name, room) for room in LIGHT):
            assert "torch" not in {module.partition(".")[0] for module in imports(name, late=False)}, name


def test_nobody_asks_for_a_format_by_name() -> None:
    """Its parts are found by its row.  What hosts call theirs is theirs."""
    for name, path in FILES.items():
        if within(name, "engines/trtllm"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Compare, ast.MatchValue)):
                named = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                assert not named & set(formats.names()), f"{name}:{node.lineno}"


def test_a_layer_and_a_method_inherit_what_the_host_has(tmp_path: Path) -> None:
    """So to import them is to load the host; whoever cannot says why."""
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm/__init__.py").write_text("raise RuntimeError('of another shape')\n")
    code = (
        "import importlib, sys, trtllm_b12x.engines.trtllm.promote\n"
        "assert 'tensorrt_llm' not in sys.modules\n"
        "for name in ('fused_moe', 'quantization_nvfp4'):\n"
        "    try:\n"
        "        importlib.import_module(f'trtllm_b12x.engines.trtllm.{name}')\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT.parent))), "TRTLLM_B12X": "0"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    line = "UnsupportedHostError TensorRT-LLM cannot be imported or adapted: RuntimeError: of another shape"
    assert result.stdout.count(line) == 2


def holds_state(tree: ast.Module) -> bool:
    """A module name is rebound by a function, is a container that fills, or a function remembers its results."""
    for node in ast.walk(tree):
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        names = {ast.unparse(decorator).removeprefix("functools.").partition("(")[0] for decorator in decorators}
        if isinstance(node, ast.Global) or names & {"cache", "lru_cache"}:
            return True
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id.lower() == node.target.id:
            value = ast.unparse(node.value) if node.value is not None else ""
            if value in ("[]", "{}", "set()") or value.startswith("weakref."):
                return True
    return False


def test_what_outlives_a_reset_is_declared() -> None:
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items() if not within(name, "tools")}
    stateful = {name.replace("/", ".") for name, tree in trees.items() if holds_state(tree)}
    reset = {name.replace("/", ".") for name, tree in trees.items() if "process.kept" in ast.unparse(tree)}
    assert stateful - reset == set(process.PERMANENT) - reset
