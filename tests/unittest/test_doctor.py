# SPDX-License-Identifier: Apache-2.0
"""``trtllm-b12x doctor``: facts, verdicts and commands on one screen."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import trtllm_b12x
from tests.checkpoints import random_experts, write_checkpoint
from tests.facts import GOOD
from trtllm_b12x import environment
from trtllm_b12x.decision import Environment, Lacking, PayloadFault, RejectReason, families
from trtllm_b12x.dispatch import store
from trtllm_b12x.dispatch.policy import Timings
from trtllm_b12x.engines.trtllm import embedded as host
from trtllm_b12x.environment import prove, triton
from trtllm_b12x.tools.cli import main

FIELD = dataclasses.replace(GOOD, dsl="4.5.0", payload_cuda=(12, 9), payload_fault=PayloadFault.SHADOWED, flashinfer="0.6.16")


def run(monkeypatch: pytest.MonkeyPatch, facts: Environment, *arguments: Any, status: int | None = None) -> Result:
    monkeypatch.setattr(environment, "probe", lambda host, always_look: facts)
    result = CliRunner().invoke(main, ["doctor", *map(str, arguments)])
    assert status is None or result.exit_code == status, result.output
    return result


def report(monkeypatch: pytest.MonkeyPatch, facts: Environment, *arguments: Any) -> Any:
    return json.loads(run(monkeypatch, facts, *arguments, "--json").output)


def test_what_cards_have_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tables that a server of these versions reads, by geometry; others are counted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRTLLM_B12X_CROSSOVER")
    assert "not measured yet: a server measures at its first call" in " ".join(run(monkeypatch, GOOD).output.split())
    folder = tmp_path / "trtllm_b12x"
    sizes = {"num_experts": 128, "top_k": 8, "hidden_size": 2048, "intermediate_size": 768, "format": "NVFP4"}
    key = store.Key({"name": "NVIDIA GeForce RTX 5090"}, sizes, {"host": "1.3"}, store.versions(), 64)
    forms = {"cuda": 250.0, "triton 8 64x256w4 128x256w4": 200.0, "host": 300.0}
    store.keep(key, Timings({1: {"cuda": 20.0, "host": 80.0}, 64: forms}))
    current = json.loads((folder / key.file).read_text())
    line = "RTX 5090, 128 experts, top 8, 2048 x 768, NVFP4: stored: cuda 1-29, triton 8 64x256w4 128x256w4 30-64"
    for others in (
        ("{}", json.dumps({**current, "form": store.FORM - 1}), json.dumps({**current, "conditions": {"torch": "2.9"}})),
        ("{", json.dumps(current), json.dumps({**current, "microseconds": {}})),  # the second has another one's name
    ):
        for number, text in enumerate(others):
            (folder / f"crossover-{number}.json").write_text(text)
        said = "".join(run(monkeypatch, GOOD).output.split())  # lines end within words
        assert said.count("RTX5090") == 1
        assert line.replace(" ", "") in said
        assert "3moreofotherversions,ordamaged:noserverreadsthem" in said
    (folder / key.file).write_text(json.dumps({**current, "form": store.FORM - 1}))
    said = " ".join(run(monkeypatch, GOOD).output.split())
    assert "not measured yet" in said
    assert "4 more of other versions" in said
    monkeypatch.setenv("TRTLLM_B12X_CROSSOVER", "32")
    assert "paths TRTLLM_B12X_CROSSOVER=32" in " ".join(run(monkeypatch, GOOD).output.split())


def test_every_problem_once_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, FIELD, status=1)
    lines = result.output.splitlines()
    commands = [line for line in lines if line.startswith("   $ ")]
    assert commands == ['   $ pip install "flashinfer-python>=0.7.2,<0.7.4" "nvidia-cutlass-dsl[cu13]==4.8.1"']
    assert "It moves flashinfer-python 0.6.16, nvidia-cutlass-dsl 4.5.0." in lines
    assert sum(line.startswith(("1. DSL_PAYLOAD", "2. FLASHINFER_TOO_OLD")) for line in lines) == 2
    assert lines[-1].startswith("b12x WOULD NOT serve decode here")


def test_every_problem_has_a_remedy_line(monkeypatch: pytest.MonkeyPatch, every_family: None) -> None:
    """The command is FlashInfer's and the CuTe DSL's: what Triton lacks stands beside it."""
    facts = dataclasses.replace(
        FIELD, toolkit_cuda=(0, 0), triton_lacks=(Lacking("Triton is not installed", "pip install triton"),)
    )
    remedies = [line for line in run(monkeypatch, facts).output.splitlines() if line.startswith("   -> ")]
    assert [remedy == "   -> the command below" for remedy in remedies] == [False, True, True, False, False]
    assert remedies[3] == "   -> pip install triton"


@pytest.mark.parametrize(
    "facts", [GOOD, FIELD, Environment(), dataclasses.replace(GOOD, sm=0), dataclasses.replace(GOOD, host="unsupported")]
)
def test_eighty_columns_and_no_escape_codes(monkeypatch: pytest.MonkeyPatch, facts: Environment) -> None:
    output = run(monkeypatch, facts).output
    assert "\x1b" not in output
    assert all(len(line) <= 80 or line.startswith("   $ ") for line in output.splitlines())
    assert len(output.splitlines()) < 50


def test_an_unknown_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end: the report is wanted then most."""
    monkeypatch.setenv("TRTLLM_B12X", "nope")
    monkeypatch.setenv("TRTLLM_B12X_CROSSOVER", "/nonexistent.json")
    result = run(monkeypatch, GOOD, "--target", "sm_120a", status=2)
    error = "error: TRTLLM_B12X must be 0 or 1; got nope, and 1 is used"
    assert error in result.output.splitlines()
    assert "setting       TRTLLM_B12X must be 0 or 1; got nope, and 1 is used" in result.output.splitlines()
    assert result.output.count("got /nonexistent.json") == 2
    assert result.output.splitlines()[-1] == "b12x WOULD serve decode on sm_120a"
    monkeypatch.delenv("TRTLLM_B12X_CROSSOVER")
    monkeypatch.setenv("TRTLLM_B12X", "1")
    monkeypatch.setenv("TRTLLM_B12X_UNKNOWN", "1")
    run(monkeypatch, GOOD, status=2)


def test_what_is_and_what_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, GOOD, status=0).output.splitlines()[-1] == "b12x WOULD serve decode here, inside TensorRT-LLM"
    inside = dataclasses.replace(GOOD, host="A")
    here = run(monkeypatch, inside).output
    assert "NVFP4 Swiglu is FlashInferNvfp4Sm12xFusedMoE" in here
    assert here.splitlines()[-1] == "b12x WILL serve decode here"
    elsewhere = run(monkeypatch, inside, "--target", "sm_121a").output
    assert "NVFP4 Swiglu would be FlashInferNvfp4Sm12xFusedMoE" in elsewhere
    assert elsewhere.splitlines()[-1] == "b12x WOULD serve decode on sm_121a"
    assert "b12x will NOT serve" in run(monkeypatch, dataclasses.replace(inside, sm=90)).output


def test_it_is_a_bug_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    (tmp_path / "trtllm_b12x").mkdir()
    (tmp_path / ".cache/flashinfer").mkdir(parents=True)
    (tmp_path / ".cache/flashinfer/kernel.so").write_bytes(bytes(2_500_000))
    monkeypatch.setenv("VLLM_PLUGINS", "trtllm_b12x")
    monkeypatch.setenv("VLLM_API_KEY", "of nobody else")
    facts = dataclasses.replace(GOOD, payload_file="/somewhere/cutlass/__init__.py", payload_kept=True, dsl_wheels=("pytest",))
    told = dict(report(monkeypatch, facts)["facts"][::-1])
    assert {"trtllm-b12x", "Python", "torch", "TensorRT-LLM", "GPU", "driver", "toolkit", "FlashInfer", "CuTe DSL"} <= set(told)
    assert sys.executable in told["Python"]
    assert importlib.metadata.version("torch") in told["torch"]  # a CUDA build says +cu130 in the module alone
    assert "from /somewhere/cutlass/__init__.py, read by an earlier process (trtllm-b12x cache clear)" in told["CuTe DSL"]
    output = run(monkeypatch, facts).output
    assert f"pytest {pytest.__version__}" in output
    assert "flashinfer: 2.5 MB" in output
    assert "variable      VLLM_PLUGINS=trtllm_b12x" in output.splitlines()
    assert "variable      TRTLLM_B12X_KERNELS=b12x" in output.splitlines()
    assert "of nobody else" not in output


def test_the_commit_that_was_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "trtllm_b12x-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: trtllm-b12x\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    version = f"trtllm-b12x   {trtllm_b12x.__version__}"
    assert run(monkeypatch, GOOD).output.splitlines()[0] == version  # of a wheel
    (folder / "direct_url.json").write_text('{"url": "https://host/r.git", "vcs_info": {"vcs": "git", "commit_id": "0af1"}}')
    assert run(monkeypatch, GOOD).output.splitlines()[0] == f"{version}, commit 0af1"


def test_without_torch() -> None:
    """The whole command, but for reading a checkpoint and compiling."""
    code = "import sys; sys.modules['torch'] = None; from trtllm_b12x.tools.cli import main; main()"
    command = [sys.executable, "-c", code, "doctor", "--target", "sm_120a"]
    result = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stderr
    assert json.loads(result.stdout)["environment"]["sm"] == 120
    for option in (["--checkpoint", "."], ["--compile"]):
        result = subprocess.run([*command, *option], capture_output=True, text=True)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
        assert "needs torch" in result.stderr


def test_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "trtllm_b12x").mkdir()
    (tmp_path / "trtllm_b12x/payload.json").write_text("{}")
    shown = CliRunner().invoke(main, ["cache"])
    assert (shown.exit_code, shown.output) == (0, f"{tmp_path / 'trtllm_b12x'}: 2 bytes\n")
    assert CliRunner().invoke(main, ["cache", "clear"]).output == "2 bytes removed\n"
    assert not (tmp_path / "trtllm_b12x").exists()
    assert CliRunner().invoke(main, ["cache", "clear"]).output == "0 bytes removed\n"


def test_target_replaces_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = dataclasses.replace(GOOD, sm=0, toolkit_cuda=(0, 0))
    blind = run(monkeypatch, facts, status=1)
    assert "SM: no GPU is visible\n   -> make the GPU visible: docker run --gpus all" in blind.output
    assert "nothing to do" not in blind.output
    result = run(monkeypatch, facts, "--target", "sm_121a", status=0)
    assert "SM121 (assumed: --target sm_121a)" in result.output
    run(monkeypatch, facts, "--target", "sm_90a", status=2)


def test_explain_is_the_same_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "probe", lambda host: FIELD)
    monkeypatch.setattr("trtllm_b12x.engines.trtllm.host.installed", lambda: True)
    config = host.ModelConfig(quant_config=host.QuantConfig(quant_algo=host.QuantAlgo.FP8))
    verdict = trtllm_b12x.explain(config)
    assert verdict.reasons == (RejectReason.DSL_PAYLOAD, RejectReason.FLASHINFER_TOO_OLD, RejectReason.QUANTIZATION)
    assert not verdict.served
    override = host.QuantConfig(quant_algo=host.QuantAlgo.NVFP4, group_size=16)
    assert RejectReason.QUANTIZATION not in trtllm_b12x.explain(config, override).reasons


def test_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Selection, doctor and verify say the same."""
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


MISSING: dict[str, Any] = dict.fromkeys(("payload_cuda", "expert_parallel", "tile"))
STOCK = dataclasses.replace(GOOD, dsl="none", flashinfer="none", toolkit_cuda=(0, 0), **MISSING)
"""torch and this package alone."""


def test_where_triton_alone_serves(monkeypatch: pytest.MonkeyPatch, every_family: None) -> None:
    run(monkeypatch, STOCK, status=0)  # no toolkit for FlashInfer either
    result = run(monkeypatch, STOCK, "--target", "sm_120a", status=0)
    lines = result.output.splitlines()
    assert "NVFP4 Swiglu would be FlashInferNvfp4Sm12xFusedMoE on cuda, else triton" in lines
    assert "b12x          refused: DSL_MISSING, FLASHINFER_MISSING" in lines
    assert any(line.startswith("triton        eligible for NVFP4 Swiglu, NVFP4 Relu2") for line in lines)
    assert any(line.startswith("grouped       eligible for NVFP4 Swiglu, NVFP4 Relu2") for line in lines)
    assert any("not b12x: FLASHINFER_MISSING" in line for line in lines)
    assert lines[-1] == "cuda WOULD serve decode on sm_120a"
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "grouped")  # serves beyond decode, where it is measured to be faster
    nvfp4 = report(monkeypatch, STOCK, "--target", "sm_120a")["verdicts"][0]
    assert (nvfp4["layers"], nvfp4["families"]) == ("NVFP4 Swiglu", ["grouped"])
    assert all(len(line) <= 80 or line.startswith("   $ ") for line in lines)


def test_what_triton_lacks(monkeypatch: pytest.MonkeyPatch, every_family: None) -> None:
    facts = dataclasses.replace(STOCK, triton_lacks=(Lacking("no C compiler", "apt-get install gcc, or name one in CC"),))
    result = run(monkeypatch, facts, status=0)  # NVRTC needs none
    assert "Triton        no C compiler" in result.output.splitlines()
    assert "not triton: TRITON: no C compiler" in result.output
    assert "-> apt-get install gcc, or name one in CC" in result.output
    assert "cuda" in result.output.splitlines()[-1]
    assert report(monkeypatch, facts)["environment"]["triton_lacks"][0]["what"] == "no C compiler"


def test_nvrtc_is_missing(monkeypatch: pytest.MonkeyPatch, every_family: None) -> None:
    result = run(monkeypatch, dataclasses.replace(STOCK, nvrtc=False), "--target", "sm_120a", status=0)
    assert "cuda          refused: NVRTC" in result.output.splitlines()
    assert "-> pip install nvidia-cuda-nvrtc" in result.output
    assert result.output.splitlines()[-1] == "triton WOULD serve decode on sm_120a"


@pytest.mark.parametrize("plugins", ["", "trtllm_b12x,lora"])
def test_where_vllm_is_the_only_engine(monkeypatch: pytest.MonkeyPatch, every_family: None, plugins: str) -> None:
    """Nothing of TensorRT-LLM's, nor of FlashInfer's b12x, which vLLM does not get."""
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    monkeypatch.setattr("trtllm_b12x.engines.vllm.facts.version", lambda: "0.33.0")
    monkeypatch.setattr("trtllm_b12x.engines.vllm.facts.check", lambda: None)
    result = run(monkeypatch, STOCK, status=0 if plugins else 1)
    *lines, last = result.stdout.splitlines()
    assert not any(word in result.stdout for word in ("FlashInferNvfp4", "CutlassFusedMoE", "\nb12x", "$ pip install"))
    assert "TensorRT-LLM  not installed" in lines
    assert "NVFP4 Swiglu runs on cuda, else triton" in lines
    if plugins:
        assert last == "cuda WILL serve decode here"
    else:
        assert last == "cuda and triton and gemm and grouped will NOT serve decode here: vLLM's own kernels run"
        assert "vLLM 0.33.0, loads only VLLM_PLUGINS=: add trtllm_b12x to it, or unset it" in lines


def test_where_sglang_is_the_only_engine(monkeypatch: pytest.MonkeyPatch, every_family: None) -> None:
    monkeypatch.setattr("trtllm_b12x.engines.sglang.facts.version", lambda: "0.5.23")
    monkeypatch.setattr("trtllm_b12x.engines.sglang.facts.check", lambda: None)
    *lines, last = run(monkeypatch, STOCK, status=0).stdout.splitlines()
    assert "SGLang        0.5.23, recognized" in lines
    assert "NVFP4 Swiglu runs on cuda, else triton" in lines
    assert not any(line.startswith("MXFP8") for line in lines)
    assert "MXFP8 experts stay SGLang's, which shuffles their rows for SM100" in " ".join(map(str.strip, lines))
    assert last == "cuda WILL serve decode here"
    for listed in ("", "another, trtllm_b12x"):
        monkeypatch.setenv("SGLANG_PLUGINS", listed)
        run(monkeypatch, STOCK, status=0)
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    assert run(monkeypatch, STOCK, status=1).stdout.splitlines()[-1].endswith("SGLang's own kernels run")


def test_where_libcuda_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For the card that is here, and for no other. WSL2 has it in a folder of its own."""
    monkeypatch.delenv("TRITON_LIBCUDA_PATH", raising=False)
    assert triton.driver_folders()[-1] == "/usr/lib/wsl/lib"
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    expected = f"not in {tmp_path}: set TRITON_LIBCUDA_PATH to its folder, for warmup and for the server"
    assert dict(report(monkeypatch, GOOD)["facts"])["libcuda"] == expected
    (tmp_path / "libcuda.so.1").touch()
    assert dict(report(monkeypatch, GOOD)["facts"])["libcuda"] == str(tmp_path)
    assert "libcuda" not in dict(report(monkeypatch, GOOD, "--target", "sm_121a")["facts"])


def test_what_to_know_of_kernels_that_would_serve(monkeypatch: pytest.MonkeyPatch, every_family: None) -> None:
    slow = "Triton 3.5.1 multiplies bfloat16 on sm_120, which is slow; Triton 3.6 and newer have block-scaled products"
    facts = dataclasses.replace(GOOD, tile=128, flashinfer="0.6.18", upcast=slow)

    def notes() -> list[str]:
        return [text for name, text in report(monkeypatch, facts)["facts"] if name == "note"]

    assert notes() == [families.ATOMIC_SUMS, slow]
    assert "note          b12x of FlashInfer before 0.7.0 adds with atomics" in run(monkeypatch, facts).output
    assert report(monkeypatch, facts)["verdicts"][-1]["families"] == ["cuda", "triton", "gemm", "grouped"]
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "triton")
    assert notes() == []
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "b12x")
    facts = GOOD
    assert notes() == []


def test_b12x_that_does_not_compile_leaves_it_to_triton(monkeypatch: pytest.MonkeyPatch, every_family: None) -> None:
    monkeypatch.setattr(
        prove,
        "prove",
        lambda target, family: prove.Proof(target, family == "triton", "" if family == "triton" else "ptxas fatal"),
    )
    result = run(monkeypatch, GOOD, "--compile", status=0)
    assert result.output.splitlines()[-1] == "triton WOULD serve decode here, inside TensorRT-LLM"
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "b12x")
    run(monkeypatch, GOOD, "--compile", status=1)
