"""Who may import whom, read from the code."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trtllm_b12x
from trtllm_b12x import formats

ROOT = Path(trtllm_b12x.__file__).parent
FILES = {path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__"): path for path in ROOT.rglob("*.py")}
MODULES = {".".join(("trtllm_b12x", *name.replace("__init__", "").split("/"))).rstrip("."): name for name in FILES}
MOST_LINES = 400

LIGHT = (
    "decision",
    "families",
    "settings",
    "log",
    "locks",
    "process",
    "registry",
    "selection",
    "environment",
    "cli",
    "dispatch/policy",
    "dispatch/schedule",
)
"""Imported without torch: in every process of the host, or by a command on a machine that has none."""
RULES = (
    # (who, must not import whom, why)
    ("decision", tuple(f"trtllm_b12x.{room}" for room in ("environment", "kernels", "host", "fused_moe")), "it is pure"),
    ("families", ("trtllm_b12x.kernels", "trtllm_b12x.environment", "trtllm_b12x.host"), "rows name modules, they do not import"),
    (
        "environment",
        ("trtllm_b12x.kernels", "trtllm_b12x.fused_moe", "trtllm_b12x.selection"),
        "it knows no kernels",
    ),
    (
        "strict_reference",
        (
            "trtllm_b12x.kernels",
            "trtllm_b12x.host",
            "trtllm_b12x.quantization",
            *(f"trtllm_b12x.formats.{part}" for part in ("nvfp4", "layouts", "weights")),
        ),
        "the judge shares nothing",
    ),
    (
        "formats",
        ("trtllm_b12x.kernels", "trtllm_b12x.host", "trtllm_b12x.quantization", "trtllm_b12x.checkpoint"),
        "numbers know nobody",
    ),
    ("quantization", ("trtllm_b12x.fused_moe", "trtllm_b12x.selection", "trtllm_b12x.strict_reference"), "methods know no layer"),
    (
        "kernels",
        tuple(f"trtllm_b12x.{room}" for room in ("host", "eligibility", "fused_moe", "quantization", "selection")),
        "kernels know no host and no layer",
    ),
    ("checkpoint", ("trtllm_b12x.kernels", "trtllm_b12x.fused_moe", "trtllm_b12x.host"), "files are files"),
    (
        "dispatch",
        tuple(f"trtllm_b12x.{room}" for room in ("host", "registry", "fused_moe", "quantization")),
        "it knows no engine",
    ),
    ("host", ("trtllm_b12x.kernels", "trtllm_b12x.fused_moe", "trtllm_b12x.verification"), "the host knows nothing of ours"),
)


def imports(name: str, late: bool = True) -> set[str]:
    """Absolute names; with ``late`` also of imports inside functions, never those for type checkers alone."""
    found, path = set(), FILES[name]
    package = ["trtllm_b12x", *name.split("/")]
    if path.name != "__init__.py":
        package.pop()
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
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


@pytest.mark.parametrize(("room", "forbidden", "why"), RULES, ids=[rule[0] for rule in RULES])
def test_no_import_runs_back(room: str, forbidden: tuple[str, ...], why: str) -> None:
    files = [name for name in FILES if within(name, room) and name not in ("host/build_layer", "host/host_path")]
    assert files
    for name in files:
        wrong = {found for found in imports(name) if any(f"{found}.".startswith(f"{rule}.") for rule in forbidden)}
        wrong -= {found for found in wrong if found == "trtllm_b12x" or f"{found}.".startswith(f"trtllm_b12x.{room}.")}
        assert not wrong, f"{name} imports {sorted(wrong)}: {why}"


def test_no_import_runs_in_a_circle() -> None:
    """But in the embedded host, whose circle is the host's own."""
    embedded = "trtllm_b12x.host.embedded"
    graph = {module: imports(name, late=False) & MODULES.keys() - {module} for module, name in MODULES.items()}
    graph = {module: found for module, found in graph.items() if not module.startswith(f"{embedded}.")}
    tuple(graphlib.TopologicalSorter({**graph, embedded: set()}).static_order())  # raises with the circle


def test_no_file_is_too_long() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_neighbors_have_one_door_each() -> None:
    for name in FILES:
        found = {module.partition(".")[0] for module in imports(name)}
        assert "tensorrt_llm" not in found or within(name, "host"), name
        outside = not within(name, "kernels") and not within(name, "environment")
        assert not (found & {"flashinfer", "cutlass", "triton"} and outside), name


def test_what_must_do_without_torch_does() -> None:
    for name in FILES:
        if name == "formats" or any(within(name, room) for room in LIGHT):
            assert "torch" not in {module.partition(".")[0] for module in imports(name, late=False)}, name


def test_nobody_asks_for_a_format_by_name() -> None:
    """Its parts are found by its row.  What hosts call theirs is theirs."""
    for name, path in FILES.items():
        if within(name, "host"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Compare, ast.MatchValue)):
                named = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                assert not named & set(formats.names()), f"{name}:{node.lineno}"


def test_a_layer_and_a_method_import_beside_any_host(tmp_path: Path) -> None:
    """Their classes are made when they are asked for; then the host is looked at, and may be another one."""
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm/__init__.py").write_text("raise RuntimeError('of another shape')\n")
    code = (
        "import sys, trtllm_b12x.fused_moe as layer, trtllm_b12x.quantization.nvfp4 as method\n"
        "assert 'tensorrt_llm' not in sys.modules\n"
        "for module, name in ((layer, 'FlashInferNvfp4Sm12xFusedMoE'), (method, 'NVFP4Sm12xFusedMoEMethod')):\n"
        "    try:\n"
        "        getattr(module, name)\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT.parent))), "TRTLLM_B12X": "0"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.count("UnsupportedHostError importing tensorrt_llm fails: RuntimeError: of another shape") == 2
