# SPDX-License-Identifier: Apache-2.0
"""Real exports of nvidia-modelopt, end to end through the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from tests.integration.exports import MODELS, export
from tests.integration.vllm import layers, whole
from trtllm_b12x.tools.checkpoint import Checkpoint
from trtllm_b12x.tools.cli import main
from trtllm_b12x.tools.verify import reference

ROOT = Path(__file__).parents[2]


def verify(checkpoint: Path, tmp_path: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    file = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["verify", str(checkpoint), "--out", str(file), *arguments])
    assert result.exit_code == status, result.output
    report: dict[str, Any] = json.loads(file.read_text())
    return {**report, "last_line": result.output.strip().splitlines()[-1]}


@pytest.mark.all("*-128", "*-160", "*-1856")
@pytest.mark.parametrize(
    ("name", "size"),
    [("qwen3-moe", 128), ("qwen3-moe", 160), ("qwen3-moe", 320), ("nemotron-h", 160), ("nemotron-h", 320), ("nemotron-h", 1856)],
)
def test_served_by_b12x_within_the_bounds(name: str, size: int, tmp_path: Path) -> None:
    gated = name == "qwen3-moe"
    small = {"hidden_size": 256, ("num_experts" if gated else "n_routed_experts"): 8}
    checkpoint = export(MODELS[name](**small, moe_intermediate_size=size), tmp_path)
    report = verify(checkpoint, tmp_path, "--require-b12x")
    assert len(report["layers"]) == 2
    for layer in report["layers"]:
        assert layer["activation"] == ("Swiglu" if gated else "Relu2")
        assert layer["intermediate_size"] == size
        assert layer["bits_exact"] is True
        assert layer["bytes"]["extra"] == 0
        assert layer["reference_error"] < 0.4
        assert {case["path"] for case in layer["cases"]} == {"b12x"}
        assert all(case["experts"] == 8 for case in layer["cases"])


@pytest.mark.all
def test_the_pages_show_what_the_demo_prints(tmp_path: Path, every_family: None) -> None:
    """Other machines may differ: processors round sums in bfloat16 at other places."""
    checkpoint = export(MODELS["qwen3-moe"](), tmp_path, original=True)
    command = ["verify", str(checkpoint), "--original", str(tmp_path / "original"), "--require-b12x"]
    printed = CliRunner().invoke(main, command).output
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/measure.md")]
    shown = [line for page in pages for line in page.splitlines() if line.startswith(("PASS: ", "model.layers.0.mlp "))]
    assert len(shown) == 4
    numbers = re.compile(r"\d+\.\d+")
    for line in shown:
        same = [each for each in printed.splitlines() if numbers.sub("", each).split() == numbers.sub("", line).split()]
        assert same, f"{line} is not in {printed}"
        values = [list(map(float, numbers.findall(each))) for each in (same[0], line)]
        assert values[0] == pytest.approx(values[1], rel=0.05, abs=8e-4)


def test_shards_exclusions_and_the_original(tmp_path: Path) -> None:
    model = MODELS["qwen3-moe"](hidden_size=256, num_experts=8, moe_intermediate_size=128, num_hidden_layers=3)
    checkpoint = export(model, tmp_path, original=True, exclude=("*layers.1.mlp.experts*",), max_shard_size="400KB")
    assert len(list(checkpoint.glob("*.safetensors"))) > 2
    report = verify(checkpoint, tmp_path, "--original", str(tmp_path / "original"))
    assert [layer["served_by"] for layer in report["layers"]] == ["b12x", "cutlass", "b12x"]
    assert report["layers"][1]["quant_algo"] == "none"
    assert report["last_line"].startswith("PASS: 2 of 3 MoE layers on b12x")
    for layer in report["layers"][::2]:
        assert 0.08 < layer["weight_error"] < 0.11
        assert layer["notes"] == []
        assert all(case["original_error"] < 0.3 for case in layer["cases"] if case["outliers"] < 1)
    verify(checkpoint, tmp_path, "--require-b12x", status=1)


def test_mixtral(tmp_path: Path) -> None:
    report = verify(export(MODELS["mixtral"](num_experts_per_tok=2), tmp_path), tmp_path, "--require-b12x")
    assert report["layers"][0]["name"] == "model.layers.0.block_sparse_moe"


def test_llama4(tmp_path: Path) -> None:
    """CUTLASS serves it for its router; its stacked tensors are right all the same, as any other model's would be."""
    checkpoint = export(MODELS["llama4"](num_experts_per_tok=1), tmp_path)
    report = verify(checkpoint, tmp_path, status=3)
    assert report["last_line"].startswith("NOTHING COMPARED: 0 of 2 MoE layers on b12x")
    assert (report["passed"], report["status"]) == (False, "nothing compared")
    assert "ROUTER_WEIGHT_ON_INPUT" in report["layers"][0]["reasons"][0]
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": "another"}))
    report = verify(checkpoint, tmp_path, "--require-b12x")
    assert [layer["bits_exact"] for layer in report["layers"]] == [True, True]


def judged(checkpoint: Checkpoint, *call: torch.Tensor) -> torch.Tensor:
    """The first layer in float32, as the reference computes it."""
    layer, weights = checkpoint.layers[0], checkpoint.weights(checkpoint.layers[0])
    sizes = layer.num_experts, layer.gated
    more: dict[str, Any] = {"activation": layer.activation, "swiglu": layer.swiglu}
    ((ours,),) = reference.outputs(weights, *sizes, [reference.MoECall(*call)], [reference.Arithmetic.UNQUANTIZED], **more)
    return ours


@pytest.mark.all("mixtral", "nemotron*", "minimax*", "deepseek*")
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "nemotron-h", "minimax-m3", "gpt-oss", "deepseek-v4", "llama4"])
def test_the_judge_agrees_with_the_model_itself(name: str, tmp_path: Path) -> None:
    """The reference shares the names of gate, up and down with what it judges: here transformers' own experts speak."""
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    experts = next(module for name, module in model.named_modules() if name.endswith(".experts")).float()
    checkpoint, generator = Checkpoint(tmp_path), torch.Generator().manual_seed(0)
    layer = checkpoint.layers[0]
    if name == "llama4":  # whose experts take the tokens of each expert one after the other
        x = torch.randn(layer.num_experts, layer.hidden_size, generator=generator).bfloat16()
        routes = (torch.arange(layer.num_experts).unsqueeze(1), torch.ones(layer.num_experts, 1))
        given: tuple[torch.Tensor, ...] = (x.float(),)
    else:
        x = torch.randn(20, layer.hidden_size, generator=generator).bfloat16()
        router_weights, ids = torch.randn(20, layer.num_experts, generator=generator).softmax(-1).topk(layer.top_k)
        routes, given = (ids, router_weights), (x.float(), ids, router_weights)
    with torch.no_grad():
        theirs = experts(*given)
    ours = judged(checkpoint, x, *routes)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-3


@pytest.mark.parametrize("ranks", [(), ("--tp", "2"), ("--ep", "3")], ids=["one", "TP2", "EP3"])
def test_mxfp8_at_every_count(mxfp8: Path, ranks: tuple[str, ...], tmp_path: Path, every_family: None) -> None:
    """No path of the host's: decode and prefill are kernels', in torch here, each with the rounding points of its own."""
    report = verify(mxfp8, tmp_path, "--require-b12x", "--tokens", "1,5,64,300", *ranks)
    assert report["layers"], report["last_line"]
    for layer in report["layers"]:
        assert (layer["quant_algo"], layer["served_by"]) == ("MXFP8", "triton+grouped")
        assert layer["bits_exact"] is True
        assert layer["bytes"]["extra"] == 0
        assert [case["path"] for case in layer["cases"]] == ["triton", "triton", "grouped", "grouped", "triton"]
        assert layer["reference_error"] < 0.1


def test_tensors_that_vllms_loader_is_tested_with_are_named_as_exported(mxfp8: Path) -> None:
    prefix = "model.layers.0.mlp."
    exported = load_file(mxfp8 / "model.safetensors")
    drawn = dict(whole.checkpoint(layers.random_experts("MXFP8", 12, 256, 192)))
    assert {prefix + name: (tensor.dtype, tensor.shape) for name, tensor in drawn.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in exported.items() if name.startswith(f"{prefix}experts.")
    }


@pytest.mark.parametrize("form", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("name", ["gemma4", "minimax-m3"])
def test_other_activations(name: str, form: str, tmp_path: Path, every_family: None) -> None:
    """GeGLU by tanh, which kernels take for the exact one as the host does, and SwiGLU with alpha, beta and limit."""
    model = MODELS[name](**({} if name == "gemma4" else {"num_local_experts": 6}))
    checkpoint = export(model, tmp_path, original=True, form=form)
    arguments = ("--require-b12x", "--tokens", "1,5,64,300", "--original", str(tmp_path / "original"))
    found = verify(checkpoint, tmp_path, *arguments)["layers"]
    assert [layer["served_by"] for layer in found] == {"nvfp4": ["triton", "grouped"], "mxfp8": ["triton+grouped"]}[form]
    for layer in found:
        assert (layer["index"], layer["activation"]) == {"gemma4": (0, "Geglu"), "minimax-m3": (1, "SwigluBias")}[name]
        assert layer["bits_exact"] is True
        assert max(case["rel_l2_kernel"] for case in layer["cases"]) < 0.005
        assert layer["weight_error"] < {"nvfp4": 0.12, "mxfp8": 0.03}[form]


def test_mxfp8_blocks_along_the_rows(tmp_path: Path) -> None:
    """nvidia-modelopt does not turn stacked experts before it quantizes them: no product has such scales, and it is said."""
    checkpoint = export(MODELS["llama4"](num_experts_per_tok=1), tmp_path, form="mxfp8")
    result = CliRunner().invoke(main, ["verify", str(checkpoint)])
    assert result.exit_code == 2
    assert "model.layers.0.feed_forward.experts.gate_up_proj_weight_scale scales blocks along the rows" in result.output
    assert "export the experts as NVFP4, or not quantized" in result.output


@pytest.fixture(scope="module")
def mxfp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = {"hidden_size": 256, "num_experts": 12, "moe_intermediate_size": 192, "num_hidden_layers": 1}
    return export(MODELS["qwen3-moe"](**small), tmp_path_factory.mktemp("mxfp8"), original=True, form="mxfp8")
