"""Tiles by rule, and what is missing for a compile, without compiling."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nvfp4_layer import random_layer
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.triton import CAPABILITY, Epilogue, Form, TritonKernel, check, toolchain
from trtllm_b12x.kernels.triton.tiles import TABLE, Card, blocks, tiles

QWEN3_30B = Geometry(128, 8, 2048, 768, "Swiglu")
NEMOTRON_SUPER = Geometry(512, 22, 1024, 2688, "Relu2")
H100, RTX_PRO_6000 = Card(132, 228 << 10, 90), Card(188, 100 << 10, 120)


@pytest.mark.parametrize("card", [H100, RTX_PRO_6000])
@pytest.mark.parametrize("geometry", [QWEN3_30B, NEMOTRON_SUPER, Geometry(8, 2, 144, 80, "Swiglu")])
def test_every_call_has_tiles_that_fit(geometry: Geometry, card: Card) -> None:
    for tokens in range(1, 257):
        found = tiles(geometry, tokens, card)
        for tile in (found.fc1, found.fc2):
            assert tile.rows in (16, 32, 64, 128)
            assert tile.columns in (128, 256)
            assert 16 * tile.num_warps <= tile.rows <= 32 * tile.num_warps
        routes = tokens * geometry.top_k
        # Every expert's routes, however they fall, find a block.
        most = min(routes, geometry.num_experts)
        assert blocks(geometry, tokens, found.routes) >= most - 1 + -(-(routes - most + 1) // found.routes)
        assert blocks(geometry, tokens, found.routes) >= -(-routes // found.routes)


@pytest.mark.parametrize(("card", "most"), [(H100, 17), (RTX_PRO_6000, 14)])
def test_few_variants_and_the_fewest_launches(card: Card, most: int) -> None:
    kernel = TritonKernel(Form(quantized=True), card)
    kernel.describe(QWEN3_30B, 63, torch.device("cuda"))
    keys = set()
    for tokens in range(1, 64):
        step = kernel.step(tokens)
        for inline, quantized in ((step.inline, False), (False, True)):
            made = kernel.variants(step, inline, quantized)
            assert len(made) <= CAPABILITY["launches"] - inline
            keys |= {key for _, key, _, _ in made}
    assert len(keys) <= most


def test_one_token_of_a_small_layer_takes_narrower_tiles() -> None:
    one, many = (tiles(Geometry(128, 8, 2048, 384, "Swiglu"), tokens, H100).fc1 for tokens in (1, 8))
    assert (one.rows, many.rows) == (32, 64)
    assert one.num_warps < many.num_warps


def test_blocks_grow_with_the_routes_of_an_expert() -> None:
    assert [tiles(QWEN3_30B, tokens, H100).routes for tokens in (1, 8, 63, 128, 256)] == [1, 8, 8, 16, 32]
    assert tiles(QWEN3_30B, 256, H100, ranks=4).routes == 8
    assert all(table[-1].most == float("inf") for table in TABLE.values())


def test_a_layer_s_tensors_are_checked() -> None:
    layer = random_layer(Geometry(2, 1, 144, 80, "Swiglu"))
    weights = layer.kernel_weights()
    check(layer.geometry, weights)
    for name, tensor in weights.tensors().items():
        cut: dict[str, Any] = {name: tensor[:-1]}
        with pytest.raises(ValueError, match=name):
            check(layer.geometry, dataclasses.replace(weights, **cut))
    with pytest.raises(ValueError, match=r"w1_weight_sf.*contiguous"):
        check(layer.geometry, dataclasses.replace(weights, w1_weight_sf=weights.w1_weight_sf.contiguous()))
    kernel = TritonKernel(Form(), H100)
    kernel.describe(layer.geometry, 8, torch.device("cuda"))
    for epilogue, named in (
        (Epilogue(up_to_gate=torch.ones(3)), "up_to_gate"),
        (Epilogue(w1_bias=torch.ones(2, 160), w2_bias=torch.ones(2, 144)), "bias"),
        (Epilogue(swiglu_limit=torch.ones(2, dtype=torch.int32)), "swiglu_limit"),
    ):
        with pytest.raises(ValueError, match=named):
            kernel.bind(weights, 0, epilogue)


def test_no_c_compiler_is_said_with_what_mends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert toolchain.missing(90) == ()
    monkeypatch.setenv("PATH", str(tmp_path))
    (item,) = toolchain.missing(90)
    assert "no C compiler" in str(item)
    assert "CC" in item.remedy
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    (item,) = toolchain.missing(90)
    assert "CC=no-such-compiler" in item.what


@pytest.mark.parametrize(("release", "capability", "lacks"), [("12.8", 121, True), ("12.8", 120, False), ("12.9", 121, False)])
def test_a_ptxas_older_than_the_card(release: str, capability: int, lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.5 brings CUDA 12.8's alone."""
    said = f"Cuda compilation tools, release {release}, V{release}.93"
    answer = subprocess.CompletedProcess([], 0, stdout=said, stderr="")
    version = toolchain._version_of(Path("ptxas"), run=lambda *_, **__: answer)
    monkeypatch.setattr(toolchain, "_version_of", lambda _: version)
    found = toolchain.missing(capability)
    assert bool(found) is lacks
    if lacks:
        assert "does not know sm_121" in found[0].what
        assert "_PATH" in found[0].remedy
        assert "12.9" in found[0].remedy
