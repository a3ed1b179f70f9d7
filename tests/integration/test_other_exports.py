# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in every published form of the formats, end to end through the command line."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from tests.integration.exports import MODELS, export
from tests.integration.other_exports import compressed, deepseek_v4_form, gpt_oss_form, qwen36_form, saved
from tests.integration.test_exports import verify
from trtllm_b12x import formats
from trtllm_b12x.tools import options, warmup
from trtllm_b12x.tools.checkpoint import Checkpoint
from trtllm_b12x.tools.cli import main
from trtllm_b12x.tools.verify import layer as verify_layer
from trtllm_b12x.tools.verify import reference_formats

SMALL = {"hidden_size": 256, "num_experts": 4, "moe_intermediate_size": 96}
DECODE = ("--kernels", "triton", "--tokens", "1,8", "--require-b12x")
FORMS = ("w4a16_nvfp4", "qwen3.6", "gpt-oss", "deepseek-v4", "compressed-tensors", "two groups", "mxfp4")


def make(form: str, folder: Path) -> tuple[Path, Path]:
    """Return a checkpoint and its original."""
    original = folder / "original"
    if form in ("w4a16_nvfp4", "qwen3.6", "mxfp4"):
        written = export(MODELS["qwen3-moe"](**SMALL), folder, original=True, form="mxfp4" if form == "mxfp4" else "w4a16_nvfp4")
        return (qwen36_form(written) if form == "qwen3.6" else written), original
    convert = {"gpt-oss": gpt_oss_form, "deepseek-v4": deepseek_v4_form}.get(form)
    if convert is not None:
        return convert(saved(MODELS[form](), original), folder / "made"), original
    groups = {"NVFP4": ["Linear"]}
    if form == "two groups":
        groups = {"NVFP4": [r"re:.*layers\.0\.mlp\.experts.*"], "NVFP4A16": [r"re:.*layers\.1\.mlp\.experts.*"]}
    return compressed(saved(MODELS["qwen3-moe"](**SMALL), original), folder / "made", groups), original


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Make each checkpoint once."""
    known: dict[str, tuple[Path, Path]] = {}

    def get(form: str) -> tuple[Path, Path]:
        if form not in known:
            known[form] = make(form, tmp_path_factory.mktemp(form.replace(" ", "-")))
        return known[form]

    return get


@pytest.mark.parametrize("form", FORMS)
def test_decode_is_float32s_with_the_checkpoints_own_bytes(form: str, made: Any, tmp_path: Path) -> None:
    checkpoint, original = made(form)
    report = verify(checkpoint, tmp_path, *DECODE, "--original", str(original))
    assert re.match("PASS(, but prompts on CUTLASS .*)?: 2 of 2 MoE layers on triton", report["last_line"])
    for layer in report["layers"]:
        assert (layer["bits_exact"], layer["bytes"]["extra"]) == (True, 0)
        assert [case["path"] for case in layer["cases"]] == ["triton"] * 3
        assert max(case["error"] for case in layer["cases"]) < 0.004
        assert 0.08 < layer["weight_error"] < 0.12
        assert all(case["original_error"] < 0.4 for case in layer["cases"] if case["outliers"] < 1)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("w4a16_nvfp4", ("W4A16_NVFP4", 16, "Swiglu", None, ["weight", "weight_scale", "weight_scale_2"])),
        ("qwen3.6", ("W4A16_NVFP4", 16, "Swiglu", None, ["weight", "weight_scale", "weight_scale_2", "input_scale"])),
        ("gpt-oss", ("W4A8_MXFP4_MXFP8", 32, "SwigluBias", (1.702, 1.0, 0.03), ["weight", "weight_scale", "bias"])),
        ("deepseek-v4", ("W4A8_MXFP4_MXFP8", 32, "SwigluBias", (1.0, 0.0, 0.01), ["weight", "weight_scale"])),
        ("mxfp4", ("W4A8_MXFP4_MXFP8", 32, "Swiglu", None, ["weight", "weight_scale"])),
        ("compressed-tensors", ("NVFP4", 16, "Swiglu", None, ["weight", "weight_scale", "weight_scale_2", "input_scale"])),
    ],
)
def test_what_is_read(form: str, expected: Any, made: Any) -> None:
    layer = Checkpoint(made(form)[0]).layers[1]
    assert (layer.quant_algo, layer.group_size, layer.activation, layer.swiglu, list(layer.kinds)) == expected
    assert layer.index == 1


@pytest.mark.parametrize("ranks", [("--tp", "2"), ("--ep", "2")], ids=["TP2", "EP2"])
@pytest.mark.parametrize("form", ["qwen3.6", "gpt-oss"])
def test_ranks(form: str, ranks: tuple[str, ...], made: Any, tmp_path: Path) -> None:
    """MXFP4 pads 96 columns to 256 before two ranks share them, so that the second holds none; FC2's bias counts once."""
    layers = verify(made(form)[0], tmp_path, *DECODE, *ranks)["layers"]
    assert all(layer["bits_exact"] and layer["passed"] for layer in layers)


def test_w4a16_nvfp4_beyond_decode(made: Any, tmp_path: Path) -> None:
    layers = verify(made("qwen3.6")[0], tmp_path, "--kernels", "gemm", "--tokens", "9,64,200", "--require-b12x")["layers"]
    assert {case["path"] for layer in layers for case in layer["cases"]} == {"gemm"}
    assert all(case["error"] < 0.004 for layer in layers for case in layer["cases"])


# ---- what is wrong is far beyond the bound -----------------------------------------------------------------------------------


MUTATIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "nibbles": ("matrix", lambda w: w.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)),
    "scale row": ("matrix", lambda w: w * (1 + torch.arange(len(w)).unsqueeze(1) % 2)),
    "bias": ("bias", lambda b: None if b is None else b.roll(1)),
}


@pytest.mark.parametrize(
    ("mutation", "form"),
    [
        *((mutation, form) for mutation in ("nibbles", "scale row") for form in ("w4a16_nvfp4", "gpt-oss", "deepseek-v4")),
        ("bias", "gpt-oss"),
        ("limit", "gpt-oss"),
        ("limit", "deepseek-v4"),
    ],
)
def test_a_mistake_misses_the_bound_by_ten_times(
    mutation: str, form: str, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake is made in the reference, which is the same distance as one in the kernels."""
    if mutation == "limit":
        outputs = verify_layer.reference.outputs

        def of_twice_the_limit(*arguments: Any) -> Any:
            *others, (alpha, beta, limit) = arguments
            return outputs(*[*others, (alpha, beta, 2 * limit)])

        monkeypatch.setattr(verify_layer.reference, "outputs", of_twice_the_limit)
    else:
        name, wrong = MUTATIONS[mutation]
        for kind in (reference_formats.ReferenceDequantizer, *reference_formats.DEQUANTIZERS.values()):
            if name in vars(kind):
                right = vars(kind)[name]
                monkeypatch.setattr(kind, name, lambda self, e, n, right=right: wrong(right(self, e, n)))
    report = verify(made(form)[0], tmp_path, *DECODE, status=1)
    assert all(case["rel_l2_kernel"] > 0.04 for layer in report["layers"] for case in layer["cases"])


# ---- what the host does with a checkpoint ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("mxfp4", ["TensorRT-LLM raises ValueError: its QuantAlgo has no such member (mxfp4)"]),
        ("compressed-tensors", ["has no known mapping of weight_packed, weight_global_scale and input_global_scale"]),
        ("two groups", ["raises TypeError: it expects input_activations", "in its weight mapper of qwen3_moe: loading fails"]),
        ("gpt-oss", []),
        ("deepseek-v4", []),
        ("qwen3.6", []),
    ],
)
def test_one_line_says_what_the_host_would_do(form: str, words: list[str], made: Any) -> None:
    checkpoint = str(made(form)[0])
    printed = CliRunner().invoke(main, ["verify", checkpoint, "--kernels", "triton", "--tokens", "1", "--sample", "1"]).output
    warnings = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert [any(each in line for line in warnings) for each in words] == [True] * len(words)
    assert len(warnings) == len(words)
    assert "PASS" in printed
    told = CliRunner().invoke(main, ["doctor", "--target", "sm_120a", "--checkpoint", checkpoint, "--json"])
    rows = [value for name, value in json.loads(told.output[told.output.index("{") :])["facts"] if name == "checkpoint"]
    assert rows == [line.removeprefix("warning: ") for line in warnings]


def test_another_model_type_that_the_host_maps(made: Any, tmp_path: Path) -> None:
    checkpoint = made("compressed-tensors")[0]
    config = json.loads((checkpoint / "config.json").read_text())
    moved = tmp_path / "laguna"
    moved.mkdir()
    (moved / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    (moved / "config.json").write_text(json.dumps({**config, "model_type": "laguna"}))
    assert Checkpoint(moved).remarks == []


def test_targets_that_match_no_module(made: Any, tmp_path: Path) -> None:
    checkpoint = made("two groups")[0]
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_1"]["targets"] = ["Linear"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    found = Checkpoint(tmp_path)
    assert [layer.quant_algo for layer in found.layers] == ["NVFP4", "W4A16_NVFP4"]
    assert any("target Linear of config_groups matches no module" in line for line in found.remarks)


def test_a_group_size_of_32_is_refused_by_name(tmp_path: Path, every_family: None) -> None:
    """TensorRT-LLM loads it without a word, half of its scales zero."""
    checkpoint = export(MODELS["qwen3-moe"](**SMALL, num_hidden_layers=1), tmp_path, form="NVFP4_MLP_WEIGHT_ONLY_CFG")
    report = verify(checkpoint, tmp_path, status=3)
    assert "GROUP_SIZE: W4A16_NVFP4 with group size 32" in report["layers"][0]["reasons"][0]


def test_an_expert_that_calibration_never_reached(made: Any, tmp_path: Path) -> None:
    """compressed-tensors stores 0, which the host keeps."""
    checkpoint = made("compressed-tensors")[0]
    tensors = load_file(checkpoint / "model.safetensors")
    for name in tensors:
        if ".experts.2." in name and name.endswith("input_global_scale"):
            tensors[name] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    report = verify(tmp_path, tmp_path, *DECODE)
    assert report["passed"]


@pytest.mark.parametrize("form", ["gpt-oss", "w4a16_nvfp4"])
def test_tune_warmup_and_doctor_know_the_layer(form: str, made: Any, every_family: None) -> None:
    """All three go on to the machine, which here has no GPU."""
    checkpoint = str(made(form)[0])
    assert CliRunner().invoke(main, ["tune", checkpoint]).output.startswith("error: no GPU")
    told = CliRunner().invoke(main, ["doctor", "--target", "sm_120a", "--checkpoint", checkpoint, "--json"]).output
    verdicts = json.loads(told[told.index("{") :])["verdicts"]
    assert all(verdict["served"] or _of_the_machine(verdict) for verdict in verdicts)
    no_sizes = dict.fromkeys(("experts", "top_k", "hidden", "intermediate"))
    (shape,) = options.layer_shapes(Path(checkpoint), "swiglu", "nvfp4", 1, 1, **no_sizes).values()
    tasks, _ = warmup._tasks({"": dataclasses.replace(shape, dtype="bfloat16")}, "sm_120a", options.Ranks())
    row = formats.find(shape.quant_algo)
    assert row is not None
    assert {task.geometry.format for task in tasks} == {row.name}


def _of_the_machine(verdict: dict[str, Any]) -> bool:
    return {rejection["reason"] for rejection in verdict["rejections"]} <= {"TRITON", "SM"}
