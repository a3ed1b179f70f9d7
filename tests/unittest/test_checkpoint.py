# SPDX-License-Identifier: Apache-2.0
"""Reading ModelOpt's formats, and what real checkpoints bring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import mxfp8
from tests.checkpoints import plain_projections, quantize_weight, random_experts, write_checkpoint
from trtllm_b12x.decision import RejectReason
from trtllm_b12x.tools.checkpoint import Checkpoint, CheckpointError
from trtllm_b12x.tools.verify import Case, LayerReport, Ranks, resolve_on_ranks, verify_layer


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


def test_an_excluded_router_and_a_nested_configuration(directory: Path) -> None:
    quantize(directory, exclude_modules=["model.layers.0.mlp.gate", "lm_head"])
    (directory / "config.json").write_text(json.dumps({"text_config": {"num_experts_per_tok": 3, "hidden_act": "silu"}}))
    assert (Checkpoint(directory).layers[0].quant_algo, Checkpoint(directory).layers[0].top_k) == ("NVFP4", 3)


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


# ---- mixtures of algorithms, odd scales, stacked experts ---------------------------------------------------------------


CASES = [Case(1), Case(8), Case(63), Case(64)]


def verified(directory: Path) -> LayerReport:
    checkpoint = Checkpoint(directory)
    return verify_layer(checkpoint, checkpoint.layers[0], CASES)


@pytest.mark.parametrize("zeros", [{1}, {0, 1, 2, 3}])
@pytest.mark.parametrize("kind", ["", "weight", "weight_scale", "weight_scale_2"])
def test_experts_of_zeros(tmp_path: Path, zeros: set[int], kind: str) -> None:
    """nvidia-modelopt writes scales of zero for them; ours are then zero too, every number agrees, and nothing is right."""
    tensors = random_experts(4, 128, 160)
    for name, tensor in tensors.items():
        if int(name[0]) in zeros and name.endswith(kind) and not name.endswith("input_scale"):
            tensors[name] = torch.zeros_like(tensor)
    report = verified(write_checkpoint(tmp_path, [tensors], top_k=2))
    (failure,) = report.failures
    assert failure.startswith(f"expert {min(zeros)} gate_proj, expert {min(zeros)} up_proj")
    assert "all zero" in failure
    assert report.bits_exact
    assert not any(case.failures for case in report.cases)


def reasons(directory: Path) -> list[tuple[RejectReason, ...]]:
    checkpoint = Checkpoint(directory)
    return [resolve_on_ranks(checkpoint, layer, Ranks()).reasons for layer in checkpoint.layers]


UP = "model.layers.0.mlp.experts.0.up_proj"


@pytest.mark.parametrize(
    ("options", "tensors", "expected"),
    [
        ({"quantization": {"group_size": 32}}, {}, ["GROUP_SIZE"]),
        ({}, {f"{UP}.pre_quant_scale": torch.ones(128)}, ["PRE_QUANT_SCALE"]),
        (
            {"config": {"hidden_act": "gelu", "model_type": "llama4_text"}},
            {f"{UP}.bias": torch.ones(64)},
            ["ACTIVATION", "BIAS", "ROUTER_WEIGHT_ON_INPUT"],
        ),
        ({"config": {"swiglu_limits": [7.0]}}, {}, ["ACTIVATION_CONSTANTS"]),
    ],
    ids=["group size", "AWQ", "bias, activation, router weight", "SwiGLU constants"],
)
def test_layers_that_no_kernel_serves(
    tmp_path: Path, options: Any, tensors: dict[str, torch.Tensor], expected: list[str]
) -> None:
    edit_tensors(write_checkpoint(tmp_path, [random_experts(2, 128, 64)], top_k=1, **options), **tensors)
    assert reasons(tmp_path) == [tuple(RejectReason[name] for name in expected)]


def test_other_algorithms_among_nvfp4_layers(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.mlp.experts.0.gate_proj" for i in range(3)]
    entries = {names[0]: {"quant_algo": "NVFP4", "group_size": 16}, names[1]: {"quant_algo": "FP8"}}
    section = {"quant_algo": "MIXED_PRECISION", "group_size": None, "quantized_layers": entries}
    write_checkpoint(tmp_path, [random_experts(2, 128, 64, seed=i) for i in range(3)], top_k=1, quantization=section)
    edit_tensors(tmp_path, **plain_projections(2, 2, 128, 64))
    assert [found[:1] for found in reasons(tmp_path)] == [(), (RejectReason.QUANTIZATION,), (RejectReason.QUANTIZATION,)]
    assert [layer.quant_algo for layer in Checkpoint(tmp_path).layers] == ["NVFP4", "FP8", "none"]
    assert verified(tmp_path).passed


def test_plain_layers_of_any_form_beside_nvfp4_ones(tmp_path: Path) -> None:
    """Multi-token-prediction layers as Qwen3.5 keeps them: stacked, rows first, excluded by their outermost name."""
    write_checkpoint(tmp_path, [random_experts(2, 128, 64)], top_k=1, exclude=("mtp",), config={"hidden_size": 128})
    prefix = "mtp.layers.0.mlp.experts."
    plain = {prefix + "gate_up_proj": torch.randn(2, 192, 128), prefix + "down_proj": torch.randn(2, 128, 96)}
    edit_tensors(tmp_path, **plain)
    nvfp4, mtp = sorted(Checkpoint(tmp_path).layers, key=lambda layer: layer.quant_algo)
    assert (mtp.quant_algo, mtp.hidden_size, mtp.intermediate_size, mtp.inner_first) == ("none", 128, 96, False)
    weights = Checkpoint(tmp_path).weights(mtp)
    assert torch.equal(weights["1.w3.weight"], plain[prefix + "gate_up_proj"][1, 96:])
    assert torch.equal(weights["1.w2.weight"], plain[prefix + "down_proj"][1])
    assert verify_layer(Checkpoint(tmp_path), nvfp4, CASES).passed


def test_gate_and_up_calibrated_apart_are_refused_as_by_the_host(tmp_path: Path) -> None:
    tensors = random_experts(2, 128, 64)
    tensors["1.w3.input_scale"] = tensors["1.w3.input_scale"] * 2
    with pytest.raises(CheckpointError, match="gate and up differ in input_scale"):
        verified(write_checkpoint(tmp_path, [tensors], top_k=1))


def write_stacked(directory: Path, experts: int, hidden: int, size: int, form: str = "NVFP4", rows_first: bool = False) -> Any:
    """One tensor for all experts and one scale of each kind, inner dimension first as nvidia-modelopt writes Llama 4 in NVFP4, or
    rows first as transformers keeps newer models; returns each expert's payload, rows first."""
    generator = torch.Generator().manual_seed(0)
    fc1, fc2 = (torch.randn(experts, *shape, generator=generator) * 0.05 for shape in ((2 * size, hidden), (hidden, size)))
    tensors, by_expert = {}, {}
    for name, weight in (("gate_up_proj", fc1), ("down_proj", fc2)):
        shared = float(weight.abs().max()) / 2688
        parts = [quantize_weight(w, shared) if form == "NVFP4" else mxfp8.quantize_weight(w) for w in weight]
        prefix = f"model.layers.0.feed_forward.experts.{name}"
        for suffix, kind in (("", "weight"), ("_weight_scale", "weight_scale")):
            stacked = torch.stack([p[kind].view(torch.uint8) for p in parts])
            stacked = (stacked if rows_first else stacked.mT).contiguous()
            tensors[prefix + suffix] = stacked.view(parts[0][kind].dtype)
        if form == "NVFP4":
            tensors[f"{prefix}_weight_scale_2"] = torch.tensor(shared)
            tensors[f"{prefix}_input_scale"] = torch.tensor((4.0 if name == "gate_up_proj" else 6.0) / 2688)
        for e, part in enumerate(parts):
            by_expert[f"{e}.{name}"] = part["weight"].view(torch.uint8)
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"num_experts_per_tok": 2, "hidden_act": "silu"}))
    section = {"quant_algo": form, "group_size": 16 if form == "NVFP4" else 32}
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    return by_expert


@pytest.mark.parametrize("size", [96, 64])  # of which the first product is square
@pytest.mark.parametrize("rows_first", [False, True], ids=["inner first", "rows first"])
@pytest.mark.parametrize("form", ["NVFP4", "MXFP8"])
def test_stacked_experts(form: str, rows_first: bool, size: int, tmp_path: Path, every_family: None) -> None:
    parts = write_stacked(tmp_path, 4, 128, size, form, rows_first)
    checkpoint = Checkpoint(tmp_path)
    (layer,) = checkpoint.layers
    assert (layer.stacked, layer.inner_first) == (True, not rows_first)
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size, layer.gated) == (4, 128, size, True)
    weights = checkpoint.weights(layer)
    assert torch.equal(weights["3.w1.weight"].view(torch.uint8), parts["3.gate_up_proj"][:size])
    assert torch.equal(weights["3.w3.weight"].view(torch.uint8), parts["3.gate_up_proj"][size:])
    assert torch.equal(weights["3.w2.weight"].view(torch.uint8), parts["3.down_proj"])
    report = verify_layer(checkpoint, layer, CASES)
    assert report.passed, report
    assert report.bits_exact


def test_stacked_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Rows of gate and up by turns, gate first."""
    parts = write_stacked(tmp_path, 4, 128, 96)
    edit_json(tmp_path / "config.json", model_type="gpt_oss", swiglu_limit=7.0)
    checkpoint = Checkpoint(tmp_path)
    weights = checkpoint.weights(checkpoint.layers[0])
    for first, name in enumerate(("w1", "w3")):
        assert torch.equal(weights[f"3.{name}.weight"].view(torch.uint8), parts["3.gate_up_proj"][first::2])


@pytest.mark.parametrize("name", ["gate_up_proj", "gate_up_proj_weight_scale", "down_proj_weight_scale"])
def test_stacked_experts_of_the_wrong_shape(tmp_path: Path, name: str) -> None:
    write_stacked(tmp_path, 4, 128, 96)
    key = f"model.layers.0.feed_forward.experts.{name}"
    edit_tensors(tmp_path, **{key: load_file(tmp_path / "model.safetensors")[key][:, :-1].contiguous()})
    with pytest.raises(CheckpointError, match="expected"):
        _ = Checkpoint(tmp_path).layers
