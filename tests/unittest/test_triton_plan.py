# SPDX-License-Identifier: Apache-2.0
"""Tiles by rule, and what is missing for a compile, without compiling."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.nvfp4_layer import random_layer
from trtllm_b12x.core import settings
from trtllm_b12x.decision import Environment, RejectReason, decide, families
from trtllm_b12x.environment import packages
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.formats.geometry import LayerShape
from trtllm_b12x.formats.weights import Epilogue
from trtllm_b12x.kernels import Geometry, PlanError
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.reference import ReferenceKernel
from trtllm_b12x.kernels.triton import jit, launcher
from trtllm_b12x.kernels.triton.decode import TritonKernel, TritonMXFP8Kernel, blocks
from trtllm_b12x.kernels.triton.grouped import GroupedNVFP4Kernel
from trtllm_b12x.kernels.triton.jit import CompiledPlan, check

QWEN3_30B = Geometry(128, 8, 2048, 768, "Swiglu")
NEMOTRON_SUPER = Geometry(512, 22, 1024, 2688, "Relu2")
GPT_OSS, GEMMA4 = Geometry(128, 4, 2880, 2880, "Swiglu"), Geometry(128, 8, 2816, 704, "Geglu")
H100, RTX_PRO_6000, GB10 = Card(132, 228 << 10, 90), Card(188, 100 << 10, 120), Card(48, 100 << 10, 121)


GEOMETRIES = (
    QWEN3_30B,
    NEMOTRON_SUPER,
    GEMMA4,
    Geometry(512, 22, 1024, 768, "Swiglu"),
    Geometry(128, 8, 512, 768, "Swiglu"),
    GPT_OSS,
    Geometry(8, 2, 144, 80, "Swiglu"),
)
FITTED = [(TritonKernel, geometry) for geometry in GEOMETRIES] + [(TritonMXFP8Kernel, geometry) for geometry in GEOMETRIES[:5]]


def described(geometry: Geometry, card: Card, kind: type[TritonKernel] = TritonKernel) -> TritonKernel:
    kernel = kind(card)
    kernel.describe(geometry, 256, torch.device("cuda"))
    return kernel


@pytest.mark.parametrize("card", [H100, RTX_PRO_6000])
@pytest.mark.parametrize(("kind", "geometry"), FITTED)
def test_every_call_has_tiles_that_fit(kind: type[TritonKernel], geometry: Geometry, card: Card) -> None:
    kernel = described(geometry, card, kind)
    for tokens, found in ((count, found) for count in range(1, 257) for found in kernel.proposals(count)):
        for tile, parts in ((found.fc1, 1 + geometry.gated), (found.fc2, 1)):
            assert tile.rows in (16, 32, 64, 128)
            assert tile.columns in (128, 256)
            assert 16 * tile.num_warps <= parts * tile.rows <= 64 * tile.num_warps
            assert tile.scales_by_four(kind.features.group_size)
            assert tile.num_stages in (2, 3)
        routes = tokens * geometry.top_k
        # Every expert's routes, however they fall, find a block.
        most = min(routes, geometry.num_experts)
        assert blocks(geometry, tokens, found.routes) >= most - 1 + -(-(routes - most + 1) // found.routes)
        assert blocks(geometry, tokens, found.routes) >= -(-routes // found.routes)


@pytest.mark.parametrize(("card", "products"), [(H100, 8), (RTX_PRO_6000, 11), (GB10, 7)])
def test_few_variants(card: Card, products: int) -> None:
    """With the kernels that sort routes, at most 1.5 times as many as with one set for each count: 12 and 14."""
    kernel = described(QWEN3_30B, card)
    every = {variant.key: variant for variant in kernel.variants()}
    routes = [variant for variant in every.values() if variant.name == "route_kernel"]
    assert len(routes) == 8  # ids and router weights of two types each, for both kinds of input
    assert len(every) - len(routes) == products
    for tokens, quantized in itertools.product(range(1, 257), (False, True)):
        for found in kernel.proposals(tokens):
            assert all(variant.key in every for variant in kernel.variants_of_call(found, quantized))


def test_one_family_compiles_ahead_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """While ``cuda`` is planned: once, for every family of Triton's, and not at all with TRTLLM_B12X_FREEZE."""
    fill = Mock(return_value=16)
    monkeypatch.setattr(jit, "card_of", lambda device: H100)
    monkeypatch.setattr(toolchain, "lacking", lambda sm: ())
    monkeypatch.setattr(toolchain, "tools_lacking", lambda: ())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(jit.cache, "fill", fill)
    planned: Any = [(ReferenceKernel, 63), (TritonKernel, 256), (GroupedNVFP4Kernel, 4096)]
    asked = [kind.compile_ahead(planned, QWEN3_30B, torch.device("cuda", 0)) for kind, _ in planned]
    assert asked == [0, 16, 0]
    ((variants, _),) = (call.args for call in fill.call_args_list)
    assert {variant.module for variant in variants} == {"triton.decode_kernels", "triton.grouped_kernels", "triton.routing"}
    with settings.FREEZE.set("1"):
        assert TritonKernel.compile_ahead(planned, QWEN3_30B, torch.device("cuda", 0)) == 0


def test_frozen_kernels_are_not_planned_on_an_unknown_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = TritonKernel(RTX_PRO_6000)
    kernel.describe(QWEN3_30B, 63, torch.device("cuda"))
    monkeypatch.setattr(launcher, "known", lambda: False)
    with settings.FREEZE.set("1"), pytest.raises(PlanError, match=r"launches through its JIT.*TRTLLM_B12X_FREEZE=1"):
        kernel._make_plan()


def test_a_small_layer_takes_narrower_tiles() -> None:
    """For one token fewer rows; steps of 256 columns where at most an eighth of the products are with zeros."""
    kernel = described(Geometry(128, 8, 2048, 384, "Swiglu"), H100)
    one, many = kernel.tiles(1).fc1, kernel.tiles(8).fc1
    assert (one.rows, many.rows, one.num_warps < many.num_warps, kernel.tiles(8).fc2.columns) == (32, 64, True, 128)
    for geometry in (GPT_OSS, NEMOTRON_SUPER):
        found = described(geometry, H100).tiles(8)
        assert (found.fc1.columns, found.fc2.columns) == (256, 256)


def test_blocks_grow_with_the_routes_of_an_expert() -> None:
    def routes(kernel: TritonKernel, tokens: int) -> list[int]:
        return [found.routes for found in kernel.proposals(tokens)]

    kernel = described(QWEN3_30B, H100)
    assert [routes(kernel, n) for n in (8, 64, 128)] == [[8, 8, 8], [8, 16, 16], [16, 8, 16]]
    # What may be the fastest from some count on is proposed before what it replaces ends.
    assert [routes(kernel, n) for n in (160, 191, 192)] == [[16, 16, 8], [16, 16, 8], [16, 16, 16]]
    assert routes(described(dataclasses.replace(QWEN3_30B, ranks=4), H100), 128)[0] == 8


def test_little_shared_memory_is_shared_by_several_programs() -> None:
    """A set with steps of half the columns is proposed too, since two programs of four warps leave a multiprocessor waiting."""
    kernel = described(QWEN3_30B, GB10)
    assert [(found.fc1.columns, found.fc1.num_stages) for found in kernel.proposals(4)] == [(256, 2), (256, 2), (128, 3)]
    assert [found.fc1.num_stages for found in described(QWEN3_30B, H100).proposals(4)] == [3, 3, 3]


def test_a_form_is_held_to_its_tiles_and_serves_where_they_are_proposed() -> None:
    kernel = described(QWEN3_30B, H100)
    kernel._plan = CompiledPlan(None, tested=True)
    forms = kernel.forms()
    assert set(forms) == {str(tiles) for tokens in range(1, 257) for tiles in kernel.proposals(tokens)}
    for tokens in (1, 47, 48, 127, 128, 191, 192, 256):
        serving = [form.tiles(tokens) for form in forms.values() if form.serves(tokens)]
        assert sorted(map(str, serving)) == sorted(map(str, kernel.proposals(tokens)))
        assert kernel.tiles(tokens) == kernel.proposals(tokens)[0]
        assert kernel.scratch_bytes(tokens) >= max(form.scratch_bytes(tokens) for form in forms.values())
    assert not any(form.serves(257) for form in forms.values())


def test_a_layer_s_tensors_are_checked() -> None:
    layer = random_layer(Geometry(2, 1, 144, 80, "Swiglu"))
    weights = layer.kernel_weights()
    check(layer.geometry, weights)
    for name, tensor in weights.tensors().items():
        cut: dict[str, Any] = {name: tensor[:-1]}
        with pytest.raises(ValueError, match=name):
            check(layer.geometry, dataclasses.replace(weights, **cut))
        if "weight" in name:
            memory = torch.empty(tensor.nbytes + 8, dtype=torch.uint8)[8:].view(tensor.dtype)
            cut = {name: memory.as_strided(tensor.shape, tensor.stride())}
            with pytest.raises(ValueError, match=f"{name} is not contiguous, or not at a multiple of 16 bytes"):
                check(layer.geometry, dataclasses.replace(weights, **cut))
    with pytest.raises(ValueError, match=r"fc1_weight_sf.*contiguous"):
        check(layer.geometry, dataclasses.replace(weights, fc1_weight_sf=weights.fc1_weight_sf.contiguous()))
    for epilogue, named in (
        (Epilogue(swiglu_alpha=torch.ones(3)), "swiglu_alpha"),
        (Epilogue(fc1_bias=torch.ones(2, 160), fc2_bias=torch.ones(2, 144)), "fc1_bias"),
        (Epilogue(swiglu_limit=torch.ones(2, dtype=torch.int32)), "swiglu_limit"),
    ):
        with pytest.raises(ValueError, match=named):
            check(layer.geometry, dataclasses.replace(weights, epilogue=epilogue))
    with pytest.raises(ValueError, match="bias"):
        check(dataclasses.replace(layer.geometry, bias=torch.float32), weights)


def test_what_a_compile_lacks_is_said_with_what_mends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CC", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert toolchain.lacking(90) == ()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (item,) = toolchain.lacking(90)
    assert "cannot be written" in str(item)
    assert "TRITON_CACHE_DIR" in item.remedy
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (item,) = toolchain.lacking(90)
    assert "no C compiler" in str(item)
    assert "CC" in item.remedy
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    (item,) = toolchain.lacking(90)
    assert "CC=no-such-compiler" in item.what


@pytest.mark.parametrize(("release", "sm", "lacks"), [("12.8", 121, True), ("12.8", 120, False), ("12.9", 121, False)])
def test_a_ptxas_older_than_the_card(release: str, sm: int, lacks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton 3.5 brings CUDA 12.8's alone."""
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.93'\n")
    ptxas.chmod(0o755)
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.setenv(name, str(ptxas))
    found = toolchain.lacking(sm)
    assert bool(found) is lacks
    if lacks:
        assert "does not know sm_121" in found[0].what
        assert "_PATH" in found[0].remedy
        assert "12.9" in found[0].remedy


@pytest.mark.parametrize(
    ("version", "what"),
    [
        (None, "not installed"),
        ("3.4.1", "older than 3.5"),
        ("3.5.0+git1", "no ptxas"),
        ("", "no Triton, or a damaged one"),
    ],
)
def test_a_triton_that_is_not_there_or_too_old(
    version: str | None, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if version is not None:
        (tmp_path / "triton/_C").mkdir(parents=True)
        text = f'__version__ = "{version}"\n' if version else "raise SystemExit('a stub')\n"
        (tmp_path / "triton/__init__.py").write_text(text)
        if version:
            (tmp_path / "triton/_C/libtriton.so").touch()
    found = tmp_path / "triton/__init__.py" if version is not None else None
    monkeypatch.setattr(packages, "origin", lambda name: found)
    (item,) = toolchain.lacking(120)
    assert what in item.what
    facts = Environment(triton_lacks=(item,))
    refused = decide(LayerShape(), environment=facts, features=families.triton(facts)).rejections
    assert [(r.reason, r.remedy) for r in refused] == [(RejectReason.TRITON, item.remedy)]
    assert decide(LayerShape(), environment=facts, features=families.b12x(facts)).served


SERVES = """
import torch
from tests import layers
from tests.checkpoints import random_experts
from trtllm_b12x.tools import verify

module = layers.load(layers.create(2, 128, 128, top_k=1), random_experts(2, 128, 128))
with verify.kernel_calls(module.backend) as reached:
    module(torch.randn(2, 128).bfloat16(), torch.randn(2, 2))
print(module.backend.verdict.families, len(reached))
"""


@pytest.mark.all("*SystemExit*")
@pytest.mark.parametrize("statement", ["raise RuntimeError('a stub')", "raise SystemExit('a stub')"])
def test_what_needs_no_triton_serves_where_its_import_fails(statement: str, tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text(f'__version__ = "3.9.0"\n{statement}\n')
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "TRTLLM_B12X_KERNELS": "b12x,triton"}
    result = subprocess.run([sys.executable, "-c", SERVES], capture_output=True, text=True, env=variables)
    assert result.stdout == "('b12x', 'triton') 1\n", result.stderr
