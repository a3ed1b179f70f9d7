"""A number format is one row of its catalog and one of a family's; everything else finds it there."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import trtllm_b12x
from tests import checkpoints, layers, toy_format
from tests.facts import GOOD
from trtllm_b12x import environment, formats
from trtllm_b12x.core import process
from trtllm_b12x.decision import RejectReason, families
from trtllm_b12x.dispatch import crossover
from trtllm_b12x.engines.trtllm.fused_moe import METHODS
from trtllm_b12x.kernels.catalog import KERNELS
from trtllm_b12x.tools.checkpoint import storage
from trtllm_b12x.tools.cli import main
from trtllm_b12x.tools.verify.reference import Arithmetic, MoECall, outputs
from trtllm_b12x.tools.verify.reference_formats import DEQUANTIZERS

pytestmark = pytest.mark.embedded


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """All that the rest of the package is told."""
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, toy_format.FORMAT))
    monkeypatch.setitem(storage.STORAGE, "FP8", toy_format.STORAGE)
    monkeypatch.setitem(DEQUANTIZERS, "FP8", toy_format.ToyDequantizer)
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, toy_format.FAMILY))
    monkeypatch.setitem(KERNELS, toy_format.FAMILY.key, (toy_format.ToyKernel, toy_format.ToyKernel))
    monkeypatch.setitem(METHODS, "FP8", toy_format.ToyMethod)
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "b12x,triton")
    caplog.set_level(logging.INFO, logger="trtllm_b12x")
    process.forget()
    yield
    process.forget()


def quant_config(algo: str) -> Any:
    return layers.host.QuantConfig(quant_algo=layers.host.QuantAlgo(algo), group_size=None)


def loaded(size: int = 128, **arguments: Any) -> Any:
    module = layers.create(4, 128, size, quant_config=quant_config("FP8"), **arguments)
    return layers.load(module, toy_format.random_experts(4, 128, size))


def write(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    section = {"quant_algo": "FP8", "group_size": None}
    return checkpoints.write_checkpoint(directory, [tensors], top_k=2, quantization=section)


def verify(*arguments: object, status: int = 0) -> Result:
    result = CliRunner().invoke(main, ["verify", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("mapping", [{}, {"world_size": 2, "rank": 1, "tp_size": 2, "moe_ep_size": 2}])
def test_a_layer_on_both_sides_of_the_crossover(mapping: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    tensors, module = toy_format.random_experts(4, 128, 160), loaded(160, mapping=mapping)
    backend = module.backend
    assert (type(backend.quant_method), backend.toy_fc2.shape[2]) == (toy_format.ToyMethod, 192)
    assert list(backend.schedule.families) == ["triton"]
    assert isinstance(backend.kernel, toy_format.ToyKernel)
    for tokens in (1, 63, 64, 200):
        x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)
        ids, router_weights = module.routing_method.apply(torch.randn(tokens, 4, generator=torch.Generator().manual_seed(tokens)))
        served = backend.schedule.at(tokens) is not None
        assert served == (tokens < 64)
        rank = set(backend.initial_local_expert_ids)
        local = torch.where(torch.isin(ids, torch.tensor(sorted(rank))), ids, -1)
        call = MoECall(x, local, router_weights)
        ((expected,),) = outputs(tensors, 4, True, [call], [Arithmetic.UNQUANTIZED], quant_algo="FP8")
        result = layers.run_moe(backend, x, ids, router_weights)
        assert relative(result, expected) < (0.004 if served else 0.01)
    assert "1 of 1 MoE layers on triton, decode below 64 tokens (FP8)" in caplog.text
    assert trtllm_b12x.status().formats == {"FP8": 1}


def test_layers_of_two_formats_in_one_model(caplog: pytest.LogCaptureFixture) -> None:
    first = layers.create(4, 128, 128, quant_config=quant_config("FP8"))
    second = layers.create(4, 128, 128)
    layers.load(first, toy_format.random_experts(4, 128, 128))
    layers.load(second, checkpoints.random_experts(4, 128, 128))
    assert "2 of 2 MoE layers 1 on triton, 1 on b12x, decode below 64 tokens (FP8 and NVFP4)" in caplog.text
    assert trtllm_b12x.status().formats == {"FP8": 1, "NVFP4": 1}


def test_weights_are_handed_on() -> None:
    """A state dict has this format's keys and no other's; a layer that gets memory later is the same layer."""
    module, other = loaded(), loaded()
    for parameter in other.parameters():
        parameter.data.zero_()
    state = module.state_dict()
    assert not [key for key in state if "b12x" in key]
    other.load_state_dict(state)
    x, logits = torch.randn(5, 128).to(torch.bfloat16), torch.randn(5, 4)
    assert torch.equal(other(x, logits), module(x, logits))


def test_explain() -> None:
    explained = [trtllm_b12x.explain(layers.host.ModelConfig(quant_config=quant_config(algo))) for algo in ("FP8", "NVFP4")]
    assert [verdict.families for verdict in explained] == [("triton",), ("b12x", "triton")]
    assert str(explained[0]) == "triton"  # b12x has no row for the format, and is not asked
    refused = trtllm_b12x.explain(layers.host.ModelConfig(quant_config=quant_config("W4A16_AWQ")))
    assert refused.reasons == (RejectReason.QUANTIZATION,)


def test_where_the_format_is_not_known_yet_any_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = layers.host.ModelConfig(quant_config=quant_config("MIXED_PRECISION"))
    assert trtllm_b12x.explain(mixed).families == ("b12x", "triton")
    row = dataclasses.replace(toy_format.FAMILY, name="b12x")
    monkeypatch.setattr(families, "FAMILIES", (row, *families.FAMILIES[1:]))
    monkeypatch.setitem(KERNELS, row.key, (toy_format.ToyKernel, toy_format.ToyKernel))
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "b12x")
    assert trtllm_b12x.explain(mixed).families == ("b12x",)


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "probe", lambda host, always_look: GOOD)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert "NVFP4 Swiglu would be FlashInferNvfp4Sm12xFusedMoE on b12x, else triton" in lines
    assert "FP8 Swiglu would be FlashInferNvfp4Sm12xFusedMoE on triton" in lines
    verdicts = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)["verdicts"]
    usual = ["NVFP4 Swiglu", "NVFP4 Relu2", "MXFP8 Swiglu", "MXFP8 Geglu", "FP8 Swiglu"]
    assert [verdict["layers"] for verdict in verdicts] == usual
    assert (verdicts[-1]["families"], verdicts[-1]["rejections"]) == (["triton"], [])


@pytest.mark.parametrize("split", [[], ["--tp", "2"], ["--ep", "3"]], ids=" ".join)
def test_verify(tmp_path: Path, split: list[str]) -> None:
    write(tmp_path, toy_format.random_experts(3, 128, 128))
    result = verify(tmp_path, "--require-b12x", "--tokens", "1,70", "--json", "-", *split)
    (layer,) = json.loads(result.stdout)["layers"]
    assert (layer["quant_algo"], layer["served_by"], layer["bits_exact"]) == ("FP8", "triton", True)
    assert [case["path"] for case in layer["cases"]] == ["triton", "triton"]
    assert max(case["rel_l2_kernel"] for case in layer["cases"]) < 0.005
    assert (layer["bytes"]["extra_payload"], layer["bytes"]["extra_scales"]) == (0, 0)
    assert "PASS: 1 of 1 MoE layers on triton" in result.output


def test_verify_finds_mistakes_of_its_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, toy_format.random_experts(3, 128, 128))
    original = toy_format.ToyMethod.load_quant_scales

    def damaged(self: Any, module: Any, weights: Any) -> None:
        original(self, module, weights)
        module.toy_fc2_scale.data[1] *= 2
        module.toy_fc1.data[2, 3, 5] ^= 1

    monkeypatch.setattr(toy_format.ToyMethod, "load_quant_scales", damaged)
    output = verify(tmp_path, "--tokens", "8", status=1).output
    assert "fc2_scale differ from the checkpoint's scales" in output
    assert "the kernel's codes or block scales differ from the checkpoint's" in output


def test_a_checkpoint_that_lacks_a_tensor(tmp_path: Path) -> None:
    tensors = toy_format.random_experts(3, 128, 128)
    del tensors["0.w1.weight_scale"]
    assert "0.gate_proj.weight_scale" in verify(write(tmp_path, tensors), status=2).output


def test_what_is_planned_and_measured_for_one_format_is_not_anothers() -> None:
    """Layers of the same sizes in one model."""
    modules = [loaded(96), layers.load(layers.create(4, 128, 192), checkpoints.random_experts(4, 128, 192))]
    geometries = [module.backend.kernel.geometry for module in modules]
    assert [geometry.format for geometry in geometries] == ["FP8", "NVFP4"]
    assert str(geometries[0]).endswith("Swiglu, FP8")
    same = dataclasses.replace(geometries[0], format="NVFP4")
    among = modules[0].backend.schedule
    keys = [crossover.key_of(geometry, torch.device("cpu"), among, "embedded", True) for geometry in (geometries[0], same)]
    assert keys[0] != keys[1]
