# SPDX-License-Identifier: Apache-2.0
"""Doubles keep to the facts of the public source, and what the package relies on is checked against the same facts."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.hosts.build import build
from tests.hosts.extract import extract
from trtllm_b12x.engines.trtllm import contract

KINDS = ("functions", "bases", "attributes", "comparisons")


def differences(folder: Path, generation: str) -> list[str]:
    """What the double in ``folder`` says otherwise than the public source."""
    double, host = extract(folder, generation), contract.facts()[generation]
    return [
        f"{kind} {name}: {double[kind].get(name)}, the host has {host[kind].get(name)}"
        for kind in KINDS
        for name in sorted({*double[kind], *host[kind]})
        if double[kind].get(name) != host[kind].get(name)
    ]


@pytest.mark.parametrize("generation", contract.GENERATIONS)
def test_the_double_keeps_to_the_facts(tmp_path: Path, generation: str) -> None:
    assert differences(build(generation, tmp_path), generation) == []


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("create_moe", "moe_cls in (CutlassFusedMoE, MarlinFusedMoE)", "issubclass(moe_cls, CutlassFusedMoE)"),
        ("fused_moe_cutlass", "workspace=", "scratch="),
        ("fused_moe_cutlass", "post_quant_comm=True", "post_quant_comm=False"),
        ("fused_moe_cutlass", "class CutlassFusedMoE(MoEImplBase)", "class CutlassFusedMoE(MoEWeightOwnerMixin)"),
        ("quantization", "    weight_dtype = ", "    dtype_of_weights = "),
    ],
)
def test_a_difference_is_found(tmp_path: Path, module: str, old: str, new: str) -> None:
    folder = build("C1", tmp_path)
    file = folder / "tensorrt_llm/_torch/modules/fused_moe" / f"{module}.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    assert differences(folder, "C1") != []


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x, y, *, scale=1.0, **kwargs: None, []),
        (lambda x, y, z=0, *, scale=2.0, other=1: None, []),
        (lambda x, *, scale=1.0: None, ["no parameter y"]),
        (lambda x, y, z, *, scale: None, ["parameter scale has no default", "new parameter z without a default"]),
        (lambda y, x, *, scale=1.0: None, ["its parameters are (y, x), not (x, y, ...)"]),
    ],
)
def test_what_a_host_may_change(function: Callable[..., None], found: list[str]) -> None:
    recorded = ["x", "y", "*", "scale=1.0", "**kwargs"]
    assert list(contract._missing(recorded, list(inspect.signature(function).parameters.values()))) == found


def read_of(owners: set[str], *files: str) -> set[str]:
    """Attributes, and parameters by name, that these files of the package read of what they call ``self`` and so on."""
    root = Path(contract.__file__).parent
    nodes = [node for file in files for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8")))]
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in owners
    } | {
        str(node.slice.value)
        for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and ast.unparse(node.value) == "parameters"
    }


def test_the_contract_covers_what_is_read() -> None:
    """Read off the code: whoever reads another name of the host has to add it."""
    from trtllm_b12x.engines.trtllm.fused_moe import FlashInferNvfp4Sm12xFusedMoE as Ours
    from trtllm_b12x.engines.trtllm.quantization import Method

    layer = Ours.__new__(Ours)
    torch.nn.Module.__init__(layer)
    bare = set(dir(layer)) - {
        name for base in Ours.__mro__ if base.__module__.startswith("trtllm_b12x.engines.trtllm.emb") for name in vars(base)
    }
    assigned = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[Ours.__module__])))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    methods = ("quantization.py", "quantization_nvfp4.py", "load_hooks.py")
    found = read_of({"self"}, "fused_moe.py", "calls.py") | read_of({"module"}, *methods)
    found |= read_of({"layer"}, "describe.py") | set(Method.stored)
    read = {name for name in found - bare - assigned if not name.startswith("b12x_")} - {"kernel"}
    optional = {"_moe_lora_active"}  # asked for with hasattr
    by_the_registry = {"rank"}
    assert (read - optional) | by_the_registry == {*contract.LAYER, *contract.WEIGHTS, "quant_method"}
    assert read_of({"ctx"}, "calls.py") == set(contract.RECORDS["MoERunContext"])
    assert read_of({"plan"}, "calls.py") == set(contract.RECORDS["MoECommPlan"])
