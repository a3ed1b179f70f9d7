"""``trtllm-b12x doctor``: facts, verdicts and commands on one screen."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import trtllm_b12x
from tests.checkpoints import random_experts, write_checkpoint
from tests.facts import GOOD
from trtllm_b12x import environment
from trtllm_b12x.cli import main
from trtllm_b12x.decision import Environment, PayloadFault, RejectReason

FIELD = dataclasses.replace(
    GOOD, dsl="4.5.0", payload_cuda=(12, 9), payload_fault=PayloadFault.SHADOWED, flashinfer="0.6.16", exact_scales=False
)


def run(monkeypatch: pytest.MonkeyPatch, facts: Environment, *arguments: Any) -> Result:
    monkeypatch.setattr(environment, "probe", lambda always_look: facts)
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def test_active(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, GOOD)
    assert result.exit_code == 0, result.output
    assert "NVFP4 Swiglu: FlashInferNvfp4Sm12xFusedMoE" in result.output
    assert "NVFP4 Relu2: FlashInferNvfp4Sm12xFusedMoE" in result.output
    assert result.output.splitlines()[-1] == "b12x WOULD serve decode here, inside TensorRT-LLM"


def test_every_problem_once_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, FIELD)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert "   $ pip install --force-reinstall --no-deps nvidia-cutlass-dsl-libs-cu13==4.5.0" in lines
    assert '   $ pip install "flashinfer-python==0.6.17"' in lines
    assert sum(line.startswith(("1. DSL_PAYLOAD", "2. FLASHINFER_TOO_OLD")) for line in lines) == 2
    assert lines[-1].startswith("b12x will NOT serve decode here")


@pytest.mark.parametrize(
    "facts", [GOOD, FIELD, Environment(), dataclasses.replace(GOOD, sm=0), dataclasses.replace(GOOD, host="unsupported")]
)
def test_eighty_columns_and_no_escape_codes(monkeypatch: pytest.MonkeyPatch, facts: Environment) -> None:
    monkeypatch.setenv("TRTLLM_B12X_UNKNOWN", "1")
    output = run(monkeypatch, facts).output
    assert "\x1b" not in output
    assert all(len(line) <= 80 or line.startswith("   $ ") for line in output.splitlines())
    assert len(output.splitlines()) < 40


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(run(monkeypatch, FIELD, "--json").output)
    assert report["active"] is False
    assert report["environment"]["payload_fault"] == "SHADOWED"
    (first, second) = report["verdicts"]
    assert (first["layers"], second["layers"]) == ("NVFP4 Swiglu", "NVFP4 Relu2")
    assert [r["reason"] for r in first["rejections"]] == ["DSL_PAYLOAD", "FLASHINFER_TOO_OLD"]
    assert first["class"] == "CutlassFusedMoE"


def test_target_replaces_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = dataclasses.replace(GOOD, sm=0, toolkit_cuda=(0, 0))
    assert run(monkeypatch, facts).exit_code == 1
    result = run(monkeypatch, facts, "--target", "sm_121a")
    assert result.exit_code == 0
    assert "SM121 (assumed: --target sm_121a)" in result.output
    assert run(monkeypatch, facts, "--target", "sm_90a").exit_code == 2


def test_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path, [random_experts(2, 128, 64, seed=i) for i in range(3)], top_k=1, quantization={"exclude_modules": ["*.2.mlp"]}
    )
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    result = run(monkeypatch, GOOD, "--checkpoint", tmp_path)
    assert result.exit_code == 0
    assert result.output.count("NVFP4 Swiglu 2 experts, top 1, 128 x 64: FlashInferNvfp4Sm12xFusedMoE") == 1
    result = run(monkeypatch, GOOD, "--checkpoint", tmp_path / "none")
    assert result.exit_code == 2
    assert "no such directory" in result.output


def test_explain_is_the_same_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_b12x.host import embedded as host

    monkeypatch.setattr(environment, "probe", lambda: FIELD)
    config = host.ModelConfig(quant_config=host.QuantConfig(quant_algo=host.QuantAlgo.FP8))
    verdict = trtllm_b12x.explain(config)
    assert verdict.reasons == (RejectReason.DSL_PAYLOAD, RejectReason.FLASHINFER_TOO_OLD, RejectReason.QUANTIZATION)
    assert not verdict.served
    override = host.QuantConfig(quant_algo=host.QuantAlgo.NVFP4, group_size=16)
    assert RejectReason.QUANTIZATION not in trtllm_b12x.explain(config, override).reasons


def test_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Selection, doctor and verify say the same."""
    from trtllm_b12x.host import embedded as host

    result = run(monkeypatch, dataclasses.replace(GOOD, enabled=False))
    assert "1. DISABLED: TRTLLM_B12X=0" in result.output
    monkeypatch.setenv("TRTLLM_B12X", "0")
    trtllm_b12x.uninstall()
    trtllm_b12x.install()
    config = host.ModelConfig(quant_config=host.QuantConfig(quant_algo=host.QuantAlgo.NVFP4))
    assert host.create_moe.get_moe_cls(config) is host.CutlassFusedMoE
    write_checkpoint(tmp_path, [random_experts(2, 128, 64)], top_k=1)
    result = CliRunner().invoke(main, ["verify", str(tmp_path), "--require-b12x"])
    assert result.exit_code == 1
    assert "DISABLED: TRTLLM_B12X=0" in result.output
