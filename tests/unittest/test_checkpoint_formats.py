"""Checkpoints of other formats and damaged ones: each has its own message, none hangs."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from tests import mxfp8
from tests.checkpoints import random_experts, write_checkpoint
from tests.unittest.test_checkpoint import E0, edit_json, edit_tensors, quantize
from trtllm_b12x.tools.checkpoint import Checkpoint, CheckpointError, quantization
from trtllm_b12x.tools.cli import main


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

W4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "compressed-tensors NVFP4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": {"weights": W4}}},
        "is NVFP4 as llm-compressor writes it .* vLLM serves it",
    ),
    "compressed-tensors, group by scheme": (
        {"quant_method": "compressed-tensors", "config_groups": {"NVFP4": {"weights": W4}}},
        "is NVFP4 as llm-compressor writes it",
    ),
    "compressed-tensors FP8": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}}},
        "is compressed-tensors .* with weights of 8 bits, not NVFP4",
    ),
    "block FP8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "is FP8 with a scale per 128 x 128 block"),
    "FP8": ({"quant_method": "fp8"}, "is FP8 with one scale per tensor"),
    "MXFP4": ({"quant_method": "mxfp4"}, "is MXFP4 .*TensorRT-LLM serves it"),
    "GPTQ": ({"quant_method": "gptq", "bits": 4}, "is GPTQ"),
    "AWQ": ({"quant_method": "awq", "bits": 4}, "is AWQ"),
    "unknown": ({"quant_method": "xyz"}, "is quantized by xyz"),
}


def quantize_in_config(directory: Path, **section: Any) -> None:
    """Write the section of config.json, as Hugging Face's libraries do."""
    (directory / "hf_quant_config.json").unlink(missing_ok=True)
    edit_json(directory / "config.json", quantization_config=section)


@pytest.mark.parametrize(("section", "words"), FOREIGN.values(), ids=FOREIGN)
def test_other_formats_are_named(directory: Path, section: dict[str, Any], words: str) -> None:
    quantize_in_config(directory, **section)
    with pytest.raises(CheckpointError, match=rf"config\.json: {words}.*nvidia-modelopt"):
        Checkpoint(directory)


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


def test_mxfp8_of_other_blocks(published: Path) -> None:
    quantize_in_config(published, quant_method="mxfp8", weight_block_size=[128, 128])
    with pytest.raises(CheckpointError, match=r"config\.json: weight_block_size is \[128, 128\]; .* \[1, 32\] for mxfp8"):
        Checkpoint(published)


@pytest.mark.parametrize("missing", ["weight", "weight_scale_inv"])
def test_mxfp8_with_a_tensor_missing(published: Path, missing: str) -> None:
    file = published / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if not n.endswith(f"layers.0.mlp.experts.1.up_proj.{missing}")}, file)
    assert f"model.layers.0.mlp.experts.1.up_proj.{missing}" in refusal(published)


@pytest.mark.parametrize("algo", sorted(set(quantization.OTHER_ALGORITHMS) - {"none"}))
def test_other_algorithms_of_modelopt_are_named(directory: Path, algo: str) -> None:
    quantize(directory, quant_algo=algo)
    algorithm = quantization.OTHER_ALGORITHMS[algo]
    assert f"not an NVFP4 or MXFP8 checkpoint, its experts are {algorithm}; quantize it with" in refusal(directory)


# ---- folders and files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_root_of_the_hub_cache(directory: Path, tmp_path: Path, depth: int) -> None:
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "0123"
    shutil.copytree(directory, snapshot)
    words = f"is a folder of the Hugging Face cache, not a checkpoint; give {snapshot}"
    assert refusal(snapshot.parents[depth]).endswith(words)
    assert len(Checkpoint(snapshot).layers) == 3


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 16)], top_k=1, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    mapping = json.loads(index.read_text())["weight_map"]
    files, name = sorted(set(mapping.values())), E0 + "up_proj.weight"
    (other,) = set(files) - {mapping[name]}
    for weight_map, words in (
        ({**mapping, name: other}, f"{other}: tensor {name} is in {mapping[name]}, but"),
        # A file of that name in the folder itself is another file.
        (
            {name: f"sub/{file}" for name, file in mapping.items()},
            f"lists sub/{files[0]}, but TensorRT-LLM loads files only",
        ),
        *(({name: wrong}, "has no weight_map") for wrong in (5, None, ["x"])),
        ({}, "has no weight_map"),
    ):
        edit_json(index, weight_map=weight_map)
        assert words in refusal(tmp_path)
    edit_json(index, weight_map=mapping)
    (tmp_path / files[1]).unlink()
    assert "listed in model.safetensors.index.json but missing" in refusal(tmp_path)


def test_a_second_file_beside_the_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 16)], top_k=1, shards=2)
    stale = load_file(tmp_path / "model-00001-of-00002.safetensors")
    save_file(stale, tmp_path / "consolidated.safetensors")  # the host leaves this one out
    (tmp_path / ".model.safetensors").write_bytes(b"hidden files too")
    assert len(Checkpoint(tmp_path).layers) == 1
    save_file(stale, tmp_path / "model.safetensors")
    assert "and so does model-00001-of-00002.safetensors. TensorRT-LLM loads both files" in refusal(tmp_path)


def test_files_are_closed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 16)], top_k=1, shards=2)

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    with Checkpoint(tmp_path) as checkpoint:
        weight = checkpoint.weights(checkpoint.layers[0])["0.w1.weight"]
        assert mapped()
    kept = weight.clone()
    assert torch.equal(weight, kept)
    del weight
    assert not mapped()


def test_without_permission() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs to become another user")
    directory = Path(tempfile.mkdtemp())
    try:
        directory.chmod(0o755)
        write_checkpoint(directory, [random_experts(2, 128, 16)], top_k=1)
        for path in directory.iterdir():
            path.chmod(0o644)
        for name in ("config.json", "hf_quant_config.json", "model.safetensors"):
            (directory / name).chmod(0o600)
            os.seteuid(65534)
            try:
                assert f"{name}: this user may not read it" in refusal(directory)
            finally:
                os.seteuid(0)
            (directory / name).chmod(0o644)
    finally:
        shutil.rmtree(directory)


# ---- what the configuration promises ---------------------------------------------------------------------------------

PATTERNS: dict[str, tuple[dict[str, Any], int | None]] = {
    "every layer": ({"model_type": "mixtral", "num_hidden_layers": 4}, 3),
    "a family that is not known": ({"model_type": "new", "num_hidden_layers": 4}, None),
    "sparse step, dense by name": ({"decoder_sparse_step": 1, "mlp_only_layers": [3], "num_hidden_layers": 4}, None),
    "dense first, every third": ({"first_k_dense_replace": 1, "moe_layer_freq": 3, "num_hidden_layers": 5}, 3),
    "frequency listed": ({"first_k_dense_replace": 0, "moe_layer_freq": [1, 1, 1, 0, 1], "num_hidden_layers": 5}, 4),
    "blocks": ({"layers_block_type": ["moe", "mamba", "moe", "attention", "moe"], "num_hidden_layers": 5}, 4),
    "blocks, not counted": ({"layers_block_type": ["moe", "moe", "moe", "attention", "moe"]}, 4),
    "letters": ({"hybrid_override_pattern": "EM*E", "num_hidden_layers": 4}, 3),
    "kinds of MLP": ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_hidden_layers": 4}, 3),
    "Llama 4": ({"moe_layers": [0, 1, 2, 3], "num_hidden_layers": 4}, 3),
    "Llama 4, every other": ({"interleave_moe_layer_step": 2, "num_hidden_layers": 4}, 3),
    "MiniMax-M3": ({"moe_layer_freq": [0, 1, 1, 1], "num_hidden_layers": 4}, 3),
    "MiniMax-M3, dense at its end": ({"moe_layer_freq": [1, 1, 1, 0], "num_hidden_layers": 4}, None),
    "nested": ({"text_config": {"model_type": "qwen3_moe", "num_hidden_layers": 4}}, 3),
}


@pytest.mark.parametrize(("config", "missing"), PATTERNS.values(), ids=PATTERNS)
def test_a_layer_that_is_promised_and_gone(directory: Path, config: dict[str, Any], missing: int | None) -> None:
    edit_json(directory / "config.json", **config)
    if missing is None:
        assert len(Checkpoint(directory).layers) == 3
    else:
        assert f"layer {missing} should have experts, but the files hold no tensor" in refusal(directory)


def test_layers_of_another_module_do_not_count(directory: Path) -> None:
    """Multi-token prediction counts its own from 0."""
    edit_json(directory / "config.json", model_type="qwen3_moe", num_hidden_layers=3)
    renamed("model.layers.0", "mtp.layers.0")(directory)
    assert "layer 0 should have experts" in refusal(directory)


def test_the_constants_of_minimax_m3(directory: Path) -> None:
    """What TensorRT-LLM takes where the configuration does not say; of other models nobody knows here."""
    for changes, expected in (
        ({"hidden_act": "swigluoai"}, ("SwigluBias", True, (1.702, 1.0, 7.0))),
        ({"model_type": "minimax_m3_vl_text", "swiglu_alpha": 1, "swiglu_limit": 5}, ("SwigluBias", True, (1, 1.0, 5))),
        ({"model_type": "gpt_oss", "swiglu_limit": 7.0}, ("Swiglu", True, None)),
    ):
        edit_json(directory / "config.json", **{"hidden_act": "silu", **changes})
        layer = Checkpoint(directory).layers[0]
        assert (layer.activation, layer.activation_constants, layer.swiglu) == expected


# ---- nothing hangs, nothing crashes ----------------------------------------------------------------------------------


def test_a_pattern_that_is_no_regular_expression_excludes_nothing(directory: Path) -> None:
    quantize(directory, exclude_modules=["re:(", "re:" + "(" * 5000 + ")" * 5000])
    assert {layer.quant_algo for layer in Checkpoint(directory).layers} == {"NVFP4"}


def raw(name: str, content: bytes | str) -> Callable[[Path], None]:
    return lambda d: (d / name).unlink() or (d / name).write_bytes(content if isinstance(content, bytes) else content.encode())  # type: ignore[func-returns-value,return-value]


def replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    return lambda d: (d / name).unlink() or make(d / name)  # type: ignore[func-returns-value]


def index(file: str) -> Callable[[Path], Any]:
    return lambda d: (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))


def renamed(old: str, new: str) -> Callable[[Path], None]:
    def rename(directory: Path) -> None:
        file = directory / "model.safetensors"
        save_file({name.replace(old, new): tensor for name, tensor in load_file(file).items()}, file)

    return rename


def tensors(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    """Change tensors of expert 0; ``__`` stands for a dot."""
    return lambda d: edit_tensors(d, **{E0 + name.replace("__", "."): tensor for name, tensor in changes.items()})


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda d: edit_json(d / "config.json", **changes)


def in_a_folder_below(directory: Path) -> None:
    (directory / "sub").mkdir()
    (directory / "model.safetensors").rename(directory / "sub" / "model.safetensors")


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123\n"
KINDS = ("weight", "weight_scale", "weight_scale_2", "input_scale")
ODD_ENTRY = {"model.layers.0.mlp.experts.0.w": {"quant_algo": ["x"]}}
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json: missing"),
    "config no json": (raw("config.json", "{"), "config.json: cannot be read"),
    "config no object": (raw("config.json", "[]"), "config.json: holds no JSON object"),
    "no top_k": (raw("config.json", "{}"), "num_experts_per_tok is missing"),
    "wrong expert count": (config(num_experts=4), "expected 4 (expert 2 is missing)"),
    "no quantization section": (raw("hf_quant_config.json", "{}"), "no quantization section"),
    "no quantization file": (
        lambda d: (d / "hf_quant_config.json").unlink(),
        "hf_quant_config.json: missing, but the tensor names show that the experts are NVFP4",
    ),
    "odd layer entry": (
        lambda d: quantize(d, quant_algo="MIXED_PRECISION", quantized_layers=ODD_ENTRY),
        'quant_algo is ["x"], not a string',
    ),
    **{
        f"LFS pointer, {name}": (raw(name, POINTER), f"{name}: is a Git LFS pointer, not the file itself; run git lfs pull")
        for name in ("model.safetensors", "config.json", "hf_quant_config.json")
    },
    "no safetensors": (lambda d: (d / "model.safetensors").unlink(), "holds no *.safetensors"),
    "shards in a folder below": (in_a_folder_below, "*.safetensors are in sub/, but TensorRT-LLM loads only"),
    "truncated": (lambda d: os.truncate(d / "model.safetensors", 5_000), "model.safetensors: cannot be opened"),
    "no header": (raw("model.safetensors", "x" * 100), "model.safetensors: cannot be opened"),
    "no experts": (lambda d: save_file({"a": torch.zeros(1)}, d / "model.safetensors"), "no MoE layers"),
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
        "is packed, but hf_quant_config.json says that it is not quantized",
    ),
    **{f"activation {value}": (config(hidden_act=value), "config.json: hidden_act is") for value in (None, 5, ["silu"])},
    **{
        f"limit {value!r}": (config(hidden_act="swigluoai", swiglu_limit=value), "config.json: swiglu_limit is")
        for value in ("7", [7.0], True)
    },
    "deep": (raw("config.json", "[" * 100_000), "nested too deeply"),
    "deep, complete": (raw("config.json", '{"a":' * 50_000 + "1" + "}" * 50_000), "nested too deeply"),
    "integer of 5,000 digits": (raw("config.json", '{"num_experts_per_tok": ' + "9" * 5000 + "}"), "cannot be read"),
    "half a surrogate pair": (raw("config.json", '{"hidden_act": "\\ud800"}'), "half a surrogate pair"),
    "no text": (raw("config.json", b"\xff\xfe{"), "cannot be read"),
    "endless": (replaced("config.json", lambda p: p.symlink_to("/dev/zero")), "a pipe, socket or device"),
    "pipe": (replaced("config.json", os.mkfifo), "a pipe, socket or device"),
    "pipe of tensors": (replaced("model.safetensors", os.mkfifo), "a pipe, socket or device"),
    "huge": (lambda d: os.truncate(d / "config.json", 1 << 30), "too many for a configuration"),
    "1e10 experts": (config(num_experts=1e10), "not a whole number"),
    "10**10 experts": (config(num_experts=10**10), "expert 2 is missing"),
    "minus one expert": (config(num_experts=-1), "expected -1 (expert 0 is unexpected)"),
    "10**12 layers": (config(num_hidden_layers=10**12), "expected 1 to 10000"),
    "10**30 experts per token": (config(num_experts_per_tok=10**30), "top_k"),
    "shard's name too long": (index("x" * 5000), "listed in model.safetensors.index.json but missing"),
    "shard's name with a NUL": (index("x\0y"), "listed in model.safetensors.index.json but missing"),
    "shard of an absolute path": (index("/etc/passwd"), "loads files only from"),
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
