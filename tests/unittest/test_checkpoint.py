"""Reading ModelOpt's formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import plain_projections, random_experts, write_checkpoint
from trtllm_b12x.tools.checkpoint import Checkpoint, CheckpointError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", [random_experts(3, 128, 64), random_experts(3, 128, 64, seed=1)], top_k=2)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def quantize(directory: Path, **section: Any) -> None:
    """Write the section of hf_quant_config.json."""
    edit_json(directory / "hf_quant_config.json", quantization={"quant_algo": "NVFP4", "group_size": 16, **section})


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_layers_and_tensors(directory: Path) -> None:
    first, second = Checkpoint(directory).layers
    assert (first.name, first.index, second.index) == ("model.layers.0.mlp", 0, 1)
    assert (first.num_experts, first.top_k, first.hidden_size, first.intermediate_size) == (3, 2, 128, 64)
    assert (first.gated, first.activation, first.quant_algo, first.group_size) == (True, "Swiglu", "NVFP4", 16)
    weights = Checkpoint(directory).weights(second)
    expected = random_experts(3, 128, 64, seed=1)
    assert set(weights) == set(expected)
    assert all(torch.equal(weights[k].view(torch.uint8), t.view(torch.uint8)) for k, t in expected.items() if t.dim())
    assert all(weights[k] == t for k, t in expected.items() if not t.dim())
    assert weights.nbytes == 3 * 3 * (128 * 64 // 2 + 128 * 64 // 16)


def test_nemotron_naming(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 64, gated=False)], top_k=1, gated=False)
    (layer,) = Checkpoint(tmp_path).layers
    assert (layer.name, layer.activation) == ("backbone.layers.0.mixer", "Relu2")
    assert layer.projections == {"w1": "up_proj", "w2": "down_proj"}


def test_shards(tmp_path: Path) -> None:
    experts = random_experts(3, 128, 64)
    checkpoint = Checkpoint(write_checkpoint(tmp_path, [experts], top_k=2, shards=3))
    assert torch.equal(checkpoint.weights(checkpoint.layers[0])["2.w2.weight"], experts["2.w2.weight"])


def test_layers_are_in_the_models_order(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(1, 128, 16)] * 11, top_k=1)
    assert [layer.index for layer in Checkpoint(tmp_path).layers] == list(range(11))


def test_quantization_config_inside_config_json(directory: Path) -> None:
    (directory / "hf_quant_config.json").unlink()
    groups = {"group_0": {"weights": {"group_size": 16, "num_bits": 4}}}
    section = {"quant_algo": "NVFP4", "quant_method": "modelopt", "ignore": ["lm_head"], "config_groups": groups}
    edit_json(directory / "config.json", quantization_config=section)
    assert [(layer.quant_algo, layer.group_size) for layer in Checkpoint(directory).layers] == [("NVFP4", 16)] * 2


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.1.mlp*",
        "model.layers.1.mlp.experts*",
        "*.1.mlp.experts",
        "model.layers.1.mlp.\0sentinel",
        "model.layers.1",
        r"re:.*layers\.1\.mlp.*",
    ],
)
def test_excluded_layers_are_plain(directory: Path, pattern: str) -> None:
    edit_tensors(directory, **plain_projections(1, 3, 128, 64))
    quantize(directory, exclude_modules=[pattern])
    checkpoint = Checkpoint(directory)
    assert [layer.quant_algo for layer in checkpoint.layers] == ["NVFP4", "none"]
    assert checkpoint.layers[1].hidden_size == 128
    assert set(checkpoint.weights(checkpoint.layers[1])) == {f"{e}.{w}.weight" for e in range(3) for w in ("w1", "w3", "w2")}


def test_an_excluded_router_does_not_exclude_the_experts(directory: Path) -> None:
    quantize(directory, exclude_modules=["model.layers.0.mlp.gate", "lm_head"])
    assert Checkpoint(directory).layers[0].quant_algo == "NVFP4"


def test_nested_language_model_configuration(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"text_config": {"num_experts_per_tok": 3, "hidden_act": "silu"}}))
    assert Checkpoint(directory).layers[0].top_k == 3


E0 = "model.layers.0.mlp.experts.0."


@pytest.mark.parametrize(
    ("name", "values", "fault"),
    [
        *(("input_scale", torch.tensor(value), "is") for value in (float("nan"), float("inf"), -1.0)),
        # NaN in E4M3, and a negative scale: block-scaled tensor cores ignore the sign.
        *(("weight_scale", [0x38] * 511 + [code], "holds NaN or a negative value") for code in (0x7F, 0xFF, 0xB8)),
    ],
    ids=str,
)
def test_scales_that_are_not_scales(directory: Path, name: str, values: Any, fault: str) -> None:
    if isinstance(values, list):
        values = torch.tensor(values, dtype=torch.uint8).view(torch.float8_e4m3fn).view(64, 8)
    edit_tensors(directory, **{f"{E0}up_proj.{name}": values})
    checkpoint = Checkpoint(directory)
    with pytest.raises(CheckpointError, match=rf"model.safetensors: .*up_proj.{name} {fault}"):
        _ = checkpoint.weights(checkpoint.layers[0])[f"0.w3.{name}"]
