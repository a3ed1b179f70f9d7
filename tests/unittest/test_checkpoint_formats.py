# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other formats and damaged ones: each has its own message, none hangs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from tests import mxfp4, mxfp8
from tests.checkpoints import random_experts, write_checkpoint
from tests.unittest.test_checkpoint import E0, edit_json, edit_tensors, quantize
from trtllm_b12x.tools.checkpoint import Checkpoint, CheckpointError
from trtllm_b12x.tools.checkpoint.files import read_json
from trtllm_b12x.tools.checkpoint.quantization import Quantization
from trtllm_b12x.tools.cli import main
from trtllm_b12x.tools.verify import Case, verify_layer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", [random_experts(2, 128, 16, seed=i) for i in range(3)], top_k=1)


def refusal(directory: Path) -> str:
    """The one line of an unusable checkpoint."""
    result = CliRunner().invoke(main, ["verify", str(directory)])
    assert (result.exit_code, type(result.exception)) == (2, SystemExit), result.output
    (line,) = result.output.splitlines()
    assert line.startswith(f"error: {directory}")
    return line


# ---- other formats ---------------------------------------------------------------------------------------------------


def quantize_in_config(directory: Path, **section: Any) -> None:
    """Write the section of config.json, as Hugging Face's libraries do."""
    (directory / "hf_quant_config.json").unlink(missing_ok=True)
    edit_json(directory / "config.json", quantization_config=section)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        *(
            ({"quant_method": method}, f"config.json: quant_method is {method}, which verify does not read; export")
            for method in ("awq", "fp8", "gptq")
        ),
        ({"quant_method": "compressed-tensors"}, "config.json: quantization_config has no config_groups; copy config.json"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": INT4, "input_activations": None}}},
            "its experts are compressed-tensors 4-bit int by group, none of NVFP4, W4A16_NVFP4, MXFP4, MXFP8; quantize",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {**INT4, "num_bits": "4"}}}},
            'config.json: num_bits is "4", not a whole number',
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "its experts are FP8_BLOCK_SCALES, none of NVFP4"),
    ],
)
def test_other_schemes_are_named(directory: Path, section: dict[str, Any], words: str) -> None:
    quantize_in_config(directory, **section)
    assert words in refusal(directory)


@pytest.mark.parametrize(
    ("targets", "ignore", "expected"),
    [
        # Exact names come before patterns, and of the patterns the first in the alphabet.
        (({"NVFP4": r"re:.*mlp.*"}, {"FP8": r"re:.*layers\.2.*"}), (), ["NVFP4", "NVFP4", "FP8"]),
        (({"NVFP4": "Linear"}, {"FP8": r"re:.*layers\.2.*"}), (), ["NVFP4", "NVFP4", "FP8"]),
        (({"NVFP4": "Linear"}, {"FP8": r"re:lm_head"}), (r"re:.*layers\.0\..*",), ["none", "NVFP4", "NVFP4"]),
        # Matched from the start, not in full; one expert of another scheme makes the layer a mixture.
        (({"NVFP4": r"re:model"}, {"FP8": r"model.layers.1.mlp.experts.1.up_proj"}), (), ["NVFP4", "MIXED_PRECISION", "NVFP4"]),
        # Not recursive in several groups: the name of a module around the experts excludes nothing.
        (({"NVFP4": "Linear"}, {"FP8": "re:lm_head"}), ("model.layers.0.mlp",), ["NVFP4", "NVFP4", "NVFP4"]),
    ],
)
def test_config_groups_of_compressed_tensors(directory: Path, targets: Any, ignore: Any, expected: list[str]) -> None:
    fp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    nvfp4 = {"weights": fp4, "input_activations": fp4}
    schemes: dict[str, Any] = {"NVFP4": nvfp4, "FP8": {"weights": {"num_bits": 8}, "input_activations": {}}}
    groups = {f"group_{n}": {**schemes[name], "targets": [one]} for n, each in enumerate(targets) for name, one in each.items()}
    quantize_in_config(directory, quant_method="compressed-tensors", config_groups=groups, ignore=list(ignore))
    quantization = Quantization.from_files(directory, read_json(directory / "config.json"))
    modules = [[f"model.layers.{i}.mlp.experts.{e}.{p}" for e in (0, 1) for p in ("gate_proj", "up_proj")] for i in range(3)]
    found = [quantization.of_experts(f"model.layers.{i}.mlp", modules[i])[0] for i in range(3)]
    assert [algo.replace("compressed-tensors 8-bit None by None", "FP8") for algo in found] == expected


def test_huggingface_nvfp4_is_read_as_by_the_host(directory: Path) -> None:
    quantize_in_config(directory, quant_method="nvfp4", modules_to_not_convert=["model.layers.2.*"])
    plain = {n: torch.ones(1, 1) for n in load_file(directory / "model.safetensors") if "layers.2" in n and n.endswith(".weight")}
    edit_tensors(directory, **plain)
    assert [(layer.quant_algo, layer.group_size) for layer in Checkpoint(directory).layers[:2]] == [("NVFP4", 16)] * 2
    assert Checkpoint(directory).layers[2].quant_algo == "none"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """MXFP8 as others than nvidia-modelopt write it: the second of two layers is not quantized."""
    quantized = {k.replace("weight_scale", "weight_scale_inv"): t for k, t in mxfp8.random_experts(2, 128, 64).items()}
    shapes = {"w1": (64, 128), "w3": (64, 128), "w2": (128, 64)}
    plain = {f"{e}.{name}.weight": torch.zeros(shape) for e in range(2) for name, shape in shapes.items()}
    directory = write_checkpoint(tmp_path / "model", [quantized, plain], top_k=1)
    ignored = ["model.layers.1.mlp.experts"]
    quantize_in_config(directory, quant_method="mxfp8", weight_block_size=[1, 32], ignored_layers=ignored)
    return directory


def test_mxfp8_of_other_producers(published: Path) -> None:
    checkpoint = Checkpoint(published)
    first, second = checkpoint.layers
    assert [(layer.quant_algo, layer.group_size) for layer in (first, second)] == [("MXFP8", 32), ("none", None)]
    expected = mxfp8.random_experts(2, 128, 64)
    weights = checkpoint.weights(first)
    assert set(weights) == set(expected)
    assert all(torch.equal(weights[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("kind", "tensor", "words"),
    [
        ("weight", None, " is missing"),
        ("weight_scale_inv", None, " is missing"),
        ("weight_scale_inv", torch.zeros(1, 1, dtype=torch.uint8), " is U8 [1, 1], expected U8 [64, 4]"),
    ],
)
def test_mxfp8_tensors_that_cannot_be_used(published: Path, kind: str, tensor: torch.Tensor | None, words: str) -> None:
    edit_tensors(published, **{f"{E0}up_proj.{kind}": tensor})
    assert f"{E0}up_proj.{kind}{words}" in refusal(published)


@pytest.mark.parametrize("label", ["mxfp4", "MXFP4", "W4A16_MXFP4"])
def test_labels_of_mxfp4(tmp_path: Path, label: str) -> None:
    """Of nvidia-modelopt 0.47 and 0.48; nothing of TensorRT-LLM's on these cards takes them."""
    tensors = mxfp4.random_experts(2, 128, 64)
    directory = write_checkpoint(tmp_path, [tensors], top_k=1, quantization={"quant_algo": label, "group_size": None})
    checkpoint = Checkpoint(directory)
    (layer,) = checkpoint.layers
    assert (layer.quant_algo, layer.group_size) == ("W4A8_MXFP4_MXFP8", 32)
    (remark,) = checkpoint.remarks
    assert remark.startswith("hf_quant_config.json: TensorRT-LLM r")
    assert remark.endswith(f"({label})")
    assert ("SM90 alone" in remark) == (label == "W4A16_MXFP4")


def test_scales_of_mxfp4_that_are_no_numbers(tmp_path: Path) -> None:
    tensors = mxfp4.random_experts(2, 128, 64)
    tensors["0.w3.weight_scale"][3, 1] = 255
    write_checkpoint(tmp_path, [tensors], top_k=1, quantization={"quant_algo": "MXFP4", "group_size": 32})
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale holds NaN, a scale must be finite"):
        _ = checkpoint.weights(checkpoint.layers[0])["0.w3.weight_scale"]


@pytest.mark.parametrize("label", ["NVFP4", "W4A16_NVFP4"])
@pytest.mark.parametrize("lacking", ["input_scale", "0.w2.input_scale", "1.w3.input_scale"])
def test_experts_without_input_scales(tmp_path: Path, every_family: None, lacking: str, label: str) -> None:
    """Calibration writes none for experts that no token reaches, weight-only exports none at all."""
    tensors = {name: t for name, t in random_experts(2, 128, 64).items() if not name.endswith(lacking)}
    write_checkpoint(tmp_path, [tensors], top_k=1, quantization={"quant_algo": label})
    checkpoint = Checkpoint(tmp_path)
    (layer,) = checkpoint.layers
    assert verify_layer(checkpoint, layer, [Case(8)]).passed
    if lacking == "input_scale":
        assert (layer.quant_algo, set(checkpoint.weights(layer))) == ("W4A16_NVFP4", set(tensors))
        assert [remark.endswith("Set quant_algo to W4A16_NVFP4") for remark in checkpoint.remarks] == [True] * (label == "NVFP4")
    else:
        assert layer.quant_algo == label
        assert checkpoint.remarks[0].startswith(f"no input_scale: expert {lacking[0]} of model.layers.0.mlp. Kernels with 16-bit")
        assert [name for name, t in checkpoint.weights(layer).items() if not t.any()] == {
            "0.w2.input_scale": ["0.w2.input_scale"],
            "1.w3.input_scale": ["1.w1.input_scale", "1.w3.input_scale"],  # TensorRT-LLM reads them together
        }[lacking]


@pytest.mark.parametrize(("key", "scale"), [("store_dtype", "weight_scale"), ("routed_experts_quant_method", "weight_scale_inv")])
def test_mxfp4_experts_of_fp8_models(tmp_path: Path, key: str, scale: str) -> None:
    tensors = {name.replace("weight_scale", scale): t for name, t in mxfp4.random_experts(2, 128, 64).items()}
    write_checkpoint(tmp_path, [tensors], top_k=1)
    quantize_in_config(tmp_path, quant_method="fp8", weight_block_size=[128, 128], **{key: "mxfp4"})
    (layer,) = Checkpoint(tmp_path).layers
    assert (layer.quant_algo, layer.label, layer.group_size) == ("W4A8_MXFP4_MXFP8", "FP8_BLOCK_SCALES", 32)
    (remark,) = Checkpoint(tmp_path).remarks
    assert remark.startswith(
        "config.json: names FP8_BLOCK_SCALES, but experts such as model.layers.0.mlp's are MXFP4: TensorRT-LLM"
    )


def test_experts_per_token_under_other_keys(directory: Path) -> None:
    for changes in ({"moe_top_k": 2}, {"moe_topk": 2}, {"moe_k": 2}, {"thinker_config": {"text_config": {"moe_k": 2}}}):
        (directory / "config.json").write_text(json.dumps({"hidden_act": "silu", **changes}))
        assert {layer.top_k for layer in Checkpoint(directory).layers} == {2}


# ---- folders and files -----------------------------------------------------------------------------------------------


def test_root_of_the_hub_cache(directory: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "0123"
    shutil.copytree(directory, snapshot)
    assert refusal(snapshot.parents[1]).endswith("or a folder below snapshots/ in a Hugging Face cache")
    assert len(Checkpoint(snapshot).layers) == 3


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 16)], top_k=1, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    mapping = json.loads(index.read_text())["weight_map"]
    files, name = sorted(set(mapping.values())), E0 + "up_proj.weight"
    for weight_map, words in (
        ({**mapping, "gone": files[0]}, f"{files[0]}: tensor gone is missing, but"),
        # A file of that name in the folder itself is another file.
        ({name: f"sub/{files[0]}"}, f"lists sub/{files[0]}, which is not in this folder; copy the shard"),
        *(({name: wrong}, "has no weight_map") for wrong in (5, None, ["x"])),
        ({}, "has no weight_map"),
    ):
        edit_json(index, weight_map=weight_map)
        assert words in refusal(tmp_path)
    edit_json(index, weight_map=mapping)
    (tmp_path / files[1]).unlink()
    assert f"lists {files[1]}, which is not in this folder" in refusal(tmp_path)


def test_a_second_file_beside_the_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 16)], top_k=1, shards=2)
    stale = load_file(tmp_path / "model-00001-of-00002.safetensors")
    save_file(stale, tmp_path / "consolidated.safetensors")  # the host leaves this one out
    (tmp_path / ".model.safetensors").write_bytes(b"hidden files too")
    assert len(Checkpoint(tmp_path).layers) == 1
    save_file(stale, tmp_path / "model.safetensors")
    assert "and so does model-00001-of-00002.safetensors. TensorRT-LLM loads both files" in refusal(tmp_path)


# ---- what the configuration says -------------------------------------------------------------------------------------


def test_the_constants_of_swiglu(directory: Path) -> None:
    """What TensorRT-LLM takes where the configuration does not say. Models with a limit for each layer differ in the formula."""
    for changes, expected in (
        ({"hidden_act": "swigluoai"}, ("SwigluBias", True, (1.702, 1.0, 7.0))),
        ({"model_type": "minimax_m3_vl_text", "swiglu_alpha": 1, "swiglu_limit": 5}, ("SwigluBias", True, (1, 1.0, 5))),
        ({"model_type": "gpt_oss", "swiglu_limit": 7.0}, ("SwigluBias", True, (1.702, 1.0, 7.0))),
        ({"model_type": "deepseek_v4", "swiglu_limit": 10.0}, ("SwigluBias", True, (1.0, 0.0, 10.0))),
        ({"model_type": "another", "swiglu_limit": 7.0}, ("SwigluBias", True, (1.0, 0.0, 7.0))),
        ({"model_type": "another", "swiglu_limit": 0.0}, ("Swiglu", False, None)),
        ({"model_type": "another", "swiglu_limit": None, "swiglu_limits": [0.0, 7.0]}, ("Swiglu", False, None)),
        ({"model_type": "another", "swiglu_limits": [7.0]}, ("Swiglu", True, None)),
    ):
        edit_json(directory / "config.json", **{"hidden_act": "silu", "swiglu_alpha": None, **changes})
        layer = Checkpoint(directory).layers[0]
        assert (layer.activation, layer.activation_constants, layer.swiglu) == expected


# ---- nothing hangs, nothing crashes ----------------------------------------------------------------------------------


def test_a_pattern_that_is_no_regular_expression_excludes_nothing(directory: Path) -> None:
    quantize(directory, exclude_modules=["re:(", "re:" + "(" * 5000 + ")" * 5000])
    assert {layer.quant_algo for layer in Checkpoint(directory).layers} == {"NVFP4"}


def raw(name: str, content: str) -> Callable[[Path], Any]:
    return lambda d: (d / name).write_text(content)


def index(file: str) -> Callable[[Path], Any]:
    return lambda d: (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))


def renamed(old: str, new: str) -> Callable[[Path], None]:
    def rename(directory: Path) -> None:
        file = directory / "model.safetensors"
        save_file({name.replace(old, new): tensor for name, tensor in load_file(file).items()}, file)

    return rename


def only(name: str) -> Callable[[Path], Any]:
    return lambda d: save_file({name: torch.zeros(1)}, d / "model.safetensors")


def tensors(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    """Change tensors of expert 0; ``__`` stands for a dot."""
    return lambda d: edit_tensors(d, **{E0 + name.replace("__", "."): tensor for name, tensor in changes.items()})


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda d: edit_json(d / "config.json", **changes)


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123\n"
KINDS = ("weight", "weight_scale", "weight_scale_2", "input_scale")
ODD_ENTRY = {"model.layers.0.mlp.experts.0.w": {"quant_algo": ["x"]}}
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json: missing"),
    "config no json": (raw("config.json", "{"), "config.json: cannot be read"),
    "config no object": (raw("config.json", "[]"), "config.json: holds no JSON object"),
    "no top_k": (
        raw("config.json", "{}"),
        "experts per token is under none of num_experts_per_tok, num_experts_per_token, top_k",
    ),
    "stacked in compressed-tensors": (
        only("a.experts.down_proj_input_global_scale"),
        "its experts are stacked in compressed-tensors (a.experts.down_proj_input_global_scale), which verify and TensorRT-LLM",
    ),
    "experts of unknown names": (
        only("a.experts.fc1"),
        "its experts have names that verify does not know, such as a.experts.fc1; ex",
    ),
    "missing scale": (tensors(up_proj__weight_scale=None), "up_proj.weight_scale is missing"),
    "missing projection": (tensors(**{f"up_proj__{kind}": None for kind in KINDS}), "has the projections"),
    "wrong dtype": (tensors(up_proj__weight_scale=torch.ones(16, 8)), "is F32 [16, 8], expected F8_E4M3"),
    "wrong shape": (
        tensors(down_proj__weight=torch.zeros(128, 6, dtype=torch.uint8)),
        "down_proj.weight is U8 [128, 6], expected U8 [128, 8]",
    ),
    "unquantized where NVFP4 is said": (tensors(up_proj__weight=torch.zeros(16, 128)), "exclude the layer"),
    "packed experts that are said to be plain": (
        lambda d: quantize(d, exclude_modules=["model.layers.1.*"]),
        "is packed, but hf_quant_config.json does not say how it is quantized",
    ),
    "no activation": (config(hidden_act=None), "config.json: hidden_act is missing"),
    "activation of another type": (config(hidden_act=["silu"]), 'config.json: hidden_act is ["silu"], not a string'),
    "limit of another type": (config(hidden_act="swigluoai", swiglu_limit=True), "swiglu_limit is true, not a number"),
    "deep": (raw("config.json", "[" * 100_000), "cannot be read"),
    "integer of 5,000 digits": (raw("config.json", '{"num_experts_per_tok": ' + "9" * 5000 + "}"), "cannot be read"),
    "1e10 experts": (config(num_experts=1e10), "not a whole number"),
    "10**10 experts": (config(num_experts=10**10), "expected 10000000000"),
    "10**30 experts per token": (config(num_experts_per_tok=10**30), "top_k"),
    "shard's name too long": (index("x" * 5000), "which is not in this folder"),
    "shard of an absolute path": (index("/etc/passwd"), "lists /etc/passwd, which is not in this folder"),
    "expert's number too long": (
        renamed("experts.0.", f"experts.{'9' * 5000}."),
        "expert 0 of model.layers.0.mlp has the projections none",
    ),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_one_line(directory: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(directory)
    line = refusal(directory)
    assert words in line
    assert len(line) < 1000


def test_a_layer_number_of_any_length(directory: Path) -> None:
    renamed("layers.0.", f"layers.{'9' * 5000}.")(directory)
    result = CliRunner().invoke(main, ["verify", str(directory), "--tokens", "8", "--sample", "1"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
