# SPDX-License-Identifier: Apache-2.0
"""Facts about TensorRT-LLM's MoE package, read from its source without running it.

    python -m tests.hosts.extract A=TensorRT-LLM-1.2 C2=TensorRT-LLM-main --write

takes, per generation, a folder with the repository's tree (a clone, or the few files that matter under their paths) and rewrites
``trtllm_b12x/engines/trtllm/facts.json``.  A file's commit is the folder's ``git`` commit, or what a first line
``# source: repository commit path`` says.  The same extraction runs on the doubles.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtllm_b12x.engines.trtllm import contract

PACKAGES = {"C2": "tensorrt_llm/_torch/moe/fused_moe"}
OLD_PACKAGE = "tensorrt_llm/_torch/modules/fused_moe"
_FACTS = Path(contract.__file__).with_name("facts.json")
_COMPARED = ("create_moe", "configurable_moe", "moe_scheduler")
"""Files in which the host compares classes."""
_METHOD = "quantization.NVFP4CutlassFusedMoEMethod"


class Source:
    """The modules of one generation's MoE package."""

    def __init__(self, root: Path, package: str) -> None:
        self.root, self.package = root, package
        self.paths = {path.stem: path for path in sorted((root / package).glob("*.py"))}
        self.trees = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in self.paths.items()}
        if not self.trees:
            raise SystemExit(f"{root} has no {package}: give the folder that holds the repository's tree")
        self._classes = {
            node.name: (module, node)
            for module, tree in self.trees.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        }

    def lineage(self, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """The class and its bases within the package, depth first, which is Python's order for these trees."""
        if name in self._classes:
            module, node = self._classes[name]
            yield module, node
            for base in node.bases:
                if isinstance(base, ast.Name):  # what has a dot is another package's
                    yield from self.lineage(base.id)

    def function(self, dotted: str) -> ast.FunctionDef | None:
        module, *owner, name = dotted.split(".")
        bodies = [node.body for _, node in self.lineage(owner[0])] if owner else [self.trees[module].body]
        for body in bodies:
            for node in body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return node
        return None

    def origin(self, module: str) -> str:
        path = self.paths[module]
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        if first.startswith("# source: "):
            return first.removeprefix("# source: ")
        relative = path.relative_to(self.root)
        command = ["git", "-C", str(self.root), "log", "-1", "--format=%H", "--", str(relative)]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        return f"{commit or 'unknown commit'} {relative}"


def parameters(node: ast.FunctionDef) -> list[str]:
    """``name``, ``name=default``, ``*`` and ``**name``, in order; a method without its first one."""
    arguments, positional = node.args, [*node.args.posonlyargs, *node.args.args]

    def words(names: list[ast.arg], defaults: list[ast.expr | None]) -> list[str]:
        return [n.arg + (f"={ast.unparse(d)}" if d is not None else "") for n, d in zip(names, defaults, strict=True)]

    star = [f"*{arguments.vararg.arg}"] if arguments.vararg is not None else ["*"] * bool(arguments.kwonlyargs)
    return [
        *words(positional, [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)),
        *star,
        *words(arguments.kwonlyargs, arguments.kw_defaults),
        *([f"**{arguments.kwarg.arg}"] if arguments.kwarg is not None else []),
    ]


def comparisons(tree: ast.AST) -> list[str]:
    """Every test of a backend's class against a literal one, in the host's own words."""
    found = set()
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, (ast.Compare, ast.Call)) else ""
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) not in ("isinstance", "issubclass"):
                continue
        elif not any(word in text for word in ("moe_cls", "__class__", "type(self.backend)")):
            continue
        if "CutlassFusedMoE" in text or "MoEImplBase" in text:
            found.add(text)
    return sorted(found)


def extract(root: Path, generation: str) -> dict[str, Any]:
    """The facts of one generation, in the form of ``facts.json``."""
    package = PACKAGES.get(generation, OLD_PACKAGE)
    source = Source(root, package)
    classes = (contract.CUTLASS, _METHOD)
    functions, missing = {}, []
    for name in contract.relied_on(generation):
        node = source.function(name)
        if node is None:
            missing.append(name)
        else:
            functions[name] = parameters(node)
    if missing:
        raise SystemExit(f"generation {generation}: {', '.join(missing)} not found under {root}")
    return {
        "package": package.replace("/", "."),
        "sources": {module: source.origin(module) for module in source.trees},
        "functions": functions,
        "bases": {name: [node.name for _, node in source.lineage(name.partition(".")[2])] for name in classes},
        "attributes": {_METHOD: attributes(source, _METHOD.partition(".")[2])},
        "comparisons": {module: comparisons(source.trees[module]) for module in _COMPARED if module in source.trees},
    }


def attributes(source: Source, name: str) -> list[str]:
    """Names assigned in the class's own body."""
    _, node = next(iter(source.lineage(name)))
    assigned = [
        target
        for statement in node.body
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    ]
    return [target.id for target in assigned if isinstance(target, ast.Name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("generation", nargs="+", metavar="GENERATION=FOLDER")
    parser.add_argument("--write", action="store_true", help="rewrite facts.json; otherwise print")
    options = parser.parse_args()
    facts = dict(contract.facts()) if _FACTS.exists() else {}
    for pair in options.generation:
        generation, _, folder = pair.partition("=")
        facts[generation] = extract(Path(folder), generation)
    text = json.dumps({name: facts[name] for name in contract.GENERATIONS if name in facts}, indent=1) + "\n"
    (_FACTS.write_text if options.write else sys.stdout.write)(text)


if __name__ == "__main__":
    main()
