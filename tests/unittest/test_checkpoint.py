"""Reading ModelOpt's formats, and one clear line for everything that is not one."""

from __future__ import annotations

import json
import os
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


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_layers_and_tensors(directory: Path) -> None:
    first, second = Checkpoint(directory).layers
    assert (first.name, first.index, second.index) == ("model.layers.0.mlp", 0, 1)
    assert (first.num_experts, first.top_k, first.hidden_size, first.intermediate_size) == (3, 2, 128, 64)
    assert (first.gated, first.activation.name, first.quant_algo, first.group_size) == (True, "Swiglu", "NVFP4", 16)
    weights = Checkpoint(directory).weights(second)
    expected = random_experts(3, 128, 64, seed=1)
    assert set(weights) == set(expected)
    assert all(
        torch.equal(weights[k].view(torch.uint8), t.reshape(weights[k].shape).view(torch.uint8))
        for k, t in expected.items()
        if t.dim()
    )
    assert all(weights[k] == t for k, t in expected.items() if not t.dim())
    assert weights.nbytes == 3 * 3 * (128 * 64 // 2 + 128 * 64 // 16)


def test_nemotron_naming(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 64, gated=False)], top_k=1, gated=False)
    (layer,) = Checkpoint(tmp_path).layers
    assert (layer.name, layer.activation.name, dict(layer.projections)) == (
        "backbone.layers.0.mixer",
        "Relu2",
        {"w1": "up_proj", "w2": "down_proj"},
    )


def test_shards(tmp_path: Path) -> None:
    experts = random_experts(3, 128, 64)
    write_checkpoint(tmp_path, [experts], top_k=2, shards=3)
    checkpoint = Checkpoint(tmp_path)
    weights = checkpoint.weights(checkpoint.layers[0])
    assert torch.equal(weights["2.w2.weight"], experts["2.w2.weight"])


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
    edit_json(
        directory / "hf_quant_config.json", quantization={"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": [pattern]}
    )
    checkpoint = Checkpoint(directory)
    assert [layer.quant_algo for layer in checkpoint.layers] == ["NVFP4", "none"]
    assert checkpoint.layers[1].hidden_size == 128
    assert set(checkpoint.weights(checkpoint.layers[1])) == {f"{e}.{w}.weight" for e in range(3) for w in ("w1", "w3", "w2")}


def test_an_excluded_router_does_not_exclude_the_experts(directory: Path) -> None:
    section = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["model.layers.0.mlp.gate", "lm_head"]}
    edit_json(directory / "hf_quant_config.json", quantization=section)
    assert Checkpoint(directory).layers[0].quant_algo == "NVFP4"


def test_mixed_precision(directory: Path) -> None:
    layers = {
        "model.layers.0.mlp.experts.0.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.mlp.experts.0.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp.experts.0.gate_proj": {"quant_algo": "FP8"},
    }
    edit_json(directory / "hf_quant_config.json", quantization={"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert [layer.quant_algo for layer in Checkpoint(directory).layers] == ["NVFP4", "FP8"]


def test_nested_language_model_configuration(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"text_config": {"num_experts_per_tok": 3, "hidden_act": "silu"}}))
    assert Checkpoint(directory).layers[0].top_k == 3


E0 = "model.layers.0.mlp.experts.0."

BROKEN: dict[str, tuple[Any, str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json: missing"),
    "config no json": (lambda d: (d / "config.json").write_text("{"), "config.json: cannot be read"),
    "config no object": (lambda d: (d / "config.json").write_text("[]"), "config.json: holds no JSON object"),
    "no top_k": (lambda d: (d / "config.json").write_text("{}"), "num_experts_per_tok is missing"),
    "wrong expert count": (lambda d: edit_json(d / "config.json", num_experts=4), "expected 4 .expert 3 is missing"),
    "no quantization section": (lambda d: (d / "hf_quant_config.json").write_text("{}"), "no quantization section"),
    "odd layer entry": (
        lambda d: edit_json(
            d / "hf_quant_config.json",
            quantization={
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"model.layers.0.mlp.experts.0.w": {"quant_algo": ["x"]}},
            },
        ),
        "quant_algo is .* not a string",
    ),
    "no safetensors": (lambda d: (d / "model.safetensors").unlink(), "holds no \\*.safetensors"),
    "truncated": (lambda d: os.truncate(d / "model.safetensors", 20_000), "model.safetensors: cannot be opened"),
    "no header": (lambda d: (d / "model.safetensors").write_bytes(b"x" * 100), "model.safetensors: cannot be opened"),
    "no experts": (lambda d: save_file({"a": torch.zeros(1)}, d / "model.safetensors"), "no MoE layers"),
    "missing scale": (lambda d: edit_tensors(d, **{E0 + "up_proj.weight_scale": None}), "up_proj.weight_scale is missing"),
    "missing projection": (
        lambda d: edit_tensors(
            d, **{E0 + "up_proj." + k: None for k in ("weight", "weight_scale", "weight_scale_2", "input_scale")}
        ),
        "has the projections",
    ),
    "wrong dtype": (
        lambda d: edit_tensors(d, **{E0 + "up_proj.weight_scale": torch.ones(64, 8)}),
        "is F32 .64, 8., expected F8_E4M3",
    ),
    "wrong shape": (
        lambda d: edit_tensors(d, **{E0 + "down_proj.weight": torch.zeros(128, 30, dtype=torch.uint8)}),
        "down_proj.weight is U8 .128, 30., expected U8 .128, 32.",
    ),
    "unquantized where NVFP4 is said": (
        lambda d: edit_tensors(d, **{E0 + "up_proj.weight": torch.zeros(64, 128)}),
        "exclude the layer",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_damage_is_named(directory: Path, damage: Any, message: str) -> None:
    damage(directory)
    with pytest.raises(CheckpointError, match=message) as error:
        _ = Checkpoint(directory).layers
    assert str(directory) in str(error.value)
    assert "\n" not in str(error.value)


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


def test_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 64)], top_k=1, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    mapping = json.loads(index.read_text())["weight_map"]
    other = {
        "model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors",
        "model-00002-of-00002.safetensors": "model-00001-of-00002.safetensors",
    }
    name = E0 + "up_proj.weight"
    edit_json(index, weight_map={**mapping, name: other[mapping[name]]})
    with pytest.raises(CheckpointError, match=f"{other[mapping[name]]}: tensor {name} is in {mapping[name]}, but"):
        _ = Checkpoint(tmp_path).layers
    edit_json(index, weight_map=mapping)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"listed in model\.safetensors\.index\.json but missing"):
        Checkpoint(tmp_path)
    for wrong in (5, None, ["x"]):
        edit_json(index, weight_map={name: wrong})
        with pytest.raises(CheckpointError, match="has no weight_map"):
            Checkpoint(tmp_path)
    edit_json(index, weight_map={})
    with pytest.raises(CheckpointError, match="has no weight_map"):
        Checkpoint(tmp_path)
