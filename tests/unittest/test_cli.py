"""``trtllm-b12x verify`` as a user meets it: exit status, messages, table, JSON."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from tests.checkpoints import plain_projections, random_experts, unquantized, write_checkpoint
from tests.unittest.test_checkpoint import E0, edit_tensors
from trtllm_b12x import __version__
from trtllm_b12x.core import process
from trtllm_b12x.kernels.reference import ReferenceKernel, UnquantizedReferenceKernel
from trtllm_b12x.tools.cli import main


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", [random_experts(3, 128, 64), random_experts(3, 128, 64, seed=1)], top_k=2)


def test_pass(directory: Path, tmp_path: Path) -> None:
    result = run("verify", directory, "--require-b12x", "--json", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    last = result.output.strip().splitlines()[-1]
    assert re.match(
        r"PASS: 2 of 2 MoE layers on b12x, worst relative L2 0\.00\d+ \(bound 0\.005\), extra bytes 0 \(padding \d+\), baked",
        last,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is True
    assert report["trtllm_b12x"] == __version__
    for layer in report["layers"]:
        assert layer["served_by"] == "b12x"
        assert layer["bits_exact"] is True
        assert layer["bytes"]["extra_payload"] == layer["bytes"]["extra_scales"] == 0
        # To the byte: both halves and w2's columns go from 64 to the tile of 256, payload half a byte, scale a sixteenth.
        assert layer["bytes"]["padding"] == 3 * 3 * (256 - 64) * 128 * 9 // 16
        assert layer["bytes"]["scalars"] <= 16 * 3
        assert 0.02 < layer["baked_weight_error"] < 0.2
        paths = {case["tokens"]: case["path"] for case in layer["cases"]}
        assert paths == {1: "b12x", 8: "b12x", 63: "b12x"}
        assert all(case["experts"] == 3 for case in layer["cases"])
        assert any(case["outliers"] == 4.0 and case["path"] == "b12x" for case in layer["cases"])


def test_layers_tokens_and_seed(directory: Path, tmp_path: Path) -> None:
    reports = []
    for seed in (0, 0, 1):
        result = run(
            "verify", directory, "--layers", "1", "--tokens", "2,60-61,70", "--seed", seed, "--json", tmp_path / "r.json"
        )
        assert result.exit_code == 0, result.output
        reports.append(json.loads((tmp_path / "r.json").read_text())["layers"])
    assert [layer["index"] for layer in reports[0]] == [1]
    assert [case["tokens"] for case in reports[0][0]["cases"]] == [2, 60, 61, 61]
    assert reports[0] == reports[1] != reports[2]


def test_block_scales_that_were_never_loaded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_b12x.engines.trtllm import quantization_nvfp4 as quantization

    monkeypatch.setattr(quantization.NVFP4Sm12xFusedMoEMethod, "load_expert_w2_weight_scale_nvfp4", lambda *a: None)
    result = run("verify", directory)
    assert result.exit_code == 1
    assert "FAIL the kernel's codes or block scales differ" in result.output
    assert result.output.strip().splitlines()[-1].startswith("FAIL: 2 of 2")


def test_fewer_tokens_than_asked_for_where_the_kernel_says_why(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As FlashInfer's offsets leave 43 of 46 tokens of 512 experts, top 22, 8192 x 1024."""
    plan = ReferenceKernel.plan

    def fewer(self: Any, geometry: Any, capacity: int, device: Any) -> None:
        plan(self, geometry, min(capacity, 43), device)
        self.limited = "no offsets for more than 43"

    process.forget()
    monkeypatch.setenv("TRTLLM_B12X_LOG", "INFO")
    caplog.set_level("INFO", logger="trtllm_b12x")
    monkeypatch.setattr(ReferenceKernel, "plan", fewer)
    result = run("verify", directory, "--require-b12x", "--tokens", "43,44,46", "--json", "-")
    assert result.exit_code == 0
    layer = json.loads(result.stdout)["layers"][0]
    assert [(case["tokens"], case["path"]) for case in layer["cases"]] == [(43, "b12x")]
    assert layer["notes"] == ["b12x serves fewer than 44 tokens: no offsets for more than 43"]
    assert "decode below 44 tokens" in caplog.text


def test_a_pass_means_that_b12x_ran(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_b12x.engines.trtllm.fused_moe import FlashInferNvfp4Sm12xFusedMoE

    result = run("verify", directory, "--require-b12x", "--tokens", "64,100")
    assert result.exit_code == 1
    assert "b12x serves no count of --tokens, so it was not run: add a count from 1 to 63" in result.output
    with monkeypatch.context() as patch:  # a kernel that was planned for less than the crossover
        patch.setattr(ReferenceKernel, "serves", lambda self, tokens: False)
        patch.setattr(ReferenceKernel, "capacity", 0, raising=False)
        patch.setattr(ReferenceKernel, "plan", lambda self, geometry, *_: setattr(self, "geometry", geometry))
        assert "served by cutlass, not by b12x" in run("verify", directory).output
    monkeypatch.setattr(FlashInferNvfp4Sm12xFusedMoE, "_kernel_for", lambda self, x: None)
    result = run("verify", directory)
    assert result.exit_code == 1
    assert "served by cutlass, not by b12x" in result.output


@pytest.mark.parametrize("name", ["fc31_alpha", "fc2_alpha", "fc2_input_scale", "fc31_input_scale"])
def test_a_wrong_scale_of_one_small_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Expert 2 is 300 times larger and drowns expert 0 in any error over the whole output."""
    from trtllm_b12x.engines.trtllm import quantization_nvfp4 as quantization

    tensors = random_experts(3, 128, 64)
    for kind in ("w1", "w3"):
        tensors[f"2.{kind}.weight_scale_2"] = tensors[f"2.{kind}.weight_scale_2"] * 300
    write_checkpoint(tmp_path, [tensors], top_k=2)
    original = quantization.NVFP4Sm12xFusedMoEMethod.post_load_weights

    def damaged(self: Any, module: Any) -> None:
        original(self, module)
        getattr(module, name).data.view(-1)[0] *= 1.5
        self.input_scales(module).derive()

    monkeypatch.setattr(quantization.NVFP4Sm12xFusedMoEMethod, "post_load_weights", damaged)
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert "differ from the checkpoint's scales" in result.output


def test_layers_that_cutlass_serves(directory: Path) -> None:
    edit_tensors(directory, **plain_projections(1, 3, 128, 64))
    section = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["model.layers.1.*"]}
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    result = run("verify", directory)
    assert result.exit_code == 0, result.output
    assert "model.layers.1.mlp: QUANTIZATION: the experts are not quantized" in result.output
    assert "PASS: 1 of 2 MoE layers on b12x" in result.output
    result = run("verify", directory, "--require-b12x")
    assert result.exit_code == 1
    assert "model.layers.1.mlp: FAIL served by CUTLASS: QUANTIZATION" in result.output


def test_original(directory: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = unquantized(random_experts(3, 128, 64))
    for key, exact in plain.items():
        noise = torch.randn(exact.shape, generator=generator)
        plain[key] = exact + 0.1 * noise * exact.norm() / noise.norm()
    write_checkpoint(tmp_path / "plain", [plain], top_k=2, quantization={"quant_algo": None})
    result = run("verify", directory, "--layers", "0", "--original", tmp_path / "plain", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    (layer,) = json.loads((tmp_path / "r.json").read_text())["layers"]
    assert layer["weight_error"] == pytest.approx(0.1, rel=0.02)
    assert all(case["original_error"] > case["error"] for case in layer["cases"])
    result = run("verify", directory, "--original", tmp_path / "plain")
    assert result.exit_code == 2
    assert "has no unquantized layer model.layers.1.mlp of the same sizes" in result.output
    for change in (
        {k: v for k, v in plain.items() if not k.startswith("2.")},
        {k: v[:, :64].contiguous() for k, v in plain.items()},
    ):
        write_checkpoint(tmp_path / "other", [change], top_k=2, quantization={"quant_algo": None})
        result = run("verify", directory, "--layers", "0", "--original", tmp_path / "other")
        assert result.exit_code == 2
        assert "has no unquantized layer" in result.output
    plain["1.w1.weight"][0, 0] = torch.nan
    write_checkpoint(tmp_path / "plain", [plain], top_k=2, quantization={"quant_algo": None})
    result = run("verify", directory, "--layers", "0", "--original", tmp_path / "plain", "--json", tmp_path / "r.json")
    assert result.exit_code == 2
    assert "holds weights that are not finite" in result.output


def test_numbers_that_json_has_no_word_for(directory: Path, tmp_path: Path) -> None:
    edit_tensors(directory, **{E0 + "down_proj.weight_scale_2": torch.tensor(3e38)})
    result = run("verify", directory, "--json", tmp_path / "r.json")
    assert result.exit_code == 1, result.output
    assert json.loads((tmp_path / "r.json").read_text())["passed"] is False


def test_wrong_arguments(directory: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("--layers", "7"), "--layers 7: no MoE layer; choose of 0, 1"),
        (("--layers", "x"), "must be a list of numbers such as 1,8,60-64; got 'x'"),
        (("--tokens", "0"), "must be numbers from 1 to 16384"),
        (("--device", "quantum"), "must be cpu, cuda, cuda:1, ...; got 'quantum'"),
        (("--device", "meta"), "got 'meta'"),
        (("--device", "cuda:77"), "cuda:77 cannot be used here"),
        (("--tokens", "1-999999999999"), "must be numbers from 1 to 16384; got '1-999999999999'"),
        (("--tokens", "1-100"), "must be 1 to 64 numbers; got 100"),
        (("--tokens", "9" * 5000), "must be a list of numbers"),
        (("--tokens", "5-2"), "got 0 in '5-2'"),
        (("--seed", "-1"), "--seed"),
        (("--seed", "9" * 30), "--seed"),
        (("--tp", "9" * 30), "--tp"),
        (("--sample", "0"), "--sample"),
        (("--json", tmp_path), "it is a folder"),
        (("--json", tmp_path / "no" / "r.json"), "its folder does not exist"),
        (("--original", tmp_path / "none"), "no such directory"),
    ):
        result = run("verify", directory, *arguments)
        assert result.exit_code == 2, result.output
        assert message in result.output
        assert isinstance(result.exception, SystemExit)
    assert "no such directory" in run("verify", tmp_path / "none").output
    assert "no such directory" in run("verify", "x" * 5000).output
    assert "give the folder that this prints: hf download nvidia/A-Model" in run("verify", "nvidia/A-Model").output


def test_json_that_cannot_be_written(directory: Path) -> None:
    result = run("verify", directory, "--tokens", "1", "--json", "/dev/full")
    assert result.exit_code == 2
    assert "error: /dev/full: cannot be written" in result.output


def test_help_and_version() -> None:
    assert "verify" in run("--help").output
    assert "Exit status" in run("verify", "--help").output
    assert __version__ in run("--version").output


def test_hosts_that_refuse_the_split_are_named(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", [random_experts(4, 128, 192)], top_k=2)
    result = run("verify", directory, "--tp", "2", "--ep", "2", "--tokens", "1", "--json", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    assert "warning: TensorRT-LLM from August 2026 on refuses it: intermediate size 96 per rank" in result.output
    assert "no answer from ranks" not in result.output
    assert len(json.loads((tmp_path / "report.json").read_text())["layers"][0]["warnings"]) == 1
    assert "refuses it" not in run("verify", directory, "--tokens", "1").output


def test_nothing_compared_is_no_pass(directory: Path, tmp_path: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    result = run("verify", directory, "--json", tmp_path / "r.json")
    assert result.exit_code == 3
    assert "model.layers.0.mlp: ACTIVATION" in result.output
    assert result.output.strip().splitlines()[-1].startswith("NOTHING COMPARED: 0 of 2 MoE layers on b12x")
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["passed"], report["status"]) == (False, "nothing compared")


def test_a_layer_that_cannot_be_used_loses_no_other(directory: Path, tmp_path: Path) -> None:
    edit_tensors(directory, **{E0.replace("0.mlp", "1.mlp") + "down_proj.weight_scale_2": torch.tensor(float("nan"))})
    result = run("verify", directory, "--json", tmp_path / "r.json")
    assert result.exit_code == 2
    assert "model.layers.1.mlp.experts.0.down_proj.weight_scale_2 is nan" in result.output
    assert re.search(r"model\.layers\.0\.mlp +b12x .* ok", result.output)
    assert result.output.strip().splitlines()[-1].startswith("FAIL: 1 of 2 MoE layers on b12x")
    report = json.loads((tmp_path / "r.json").read_text())
    assert [layer["passed"] for layer in report["layers"]] == [True]
    assert list(report["errors"]) == ["model.layers.1.mlp"]
    assert report["status"] == "unusable"


def test_results_as_they_come(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_b12x.tools import verify

    verify_layer, seen = verify.verify_layer, []

    def watched(checkpoint: Any, layer: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(json.loads((tmp_path / "r.json").read_text()))
        shares: list[float] = []
        report = verify_layer(checkpoint, layer, *arguments, **{**options, "progress": shares.append})
        assert len(shares) > 10
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        return report

    monkeypatch.setattr(verify, "verify_layer", watched)
    result = run("verify", directory, "--json", tmp_path / "r.json")
    assert [(report["status"], len(report["layers"])) for report in seen] == [("running", 0), ("running", 1)]
    last = json.loads((tmp_path / "r.json").read_text())
    assert result.exit_code == 0
    assert (last["status"], last["passed"], len(last["layers"])) == ("passed", True, 2)


def test_sample(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 16, seed=i) for i in range(5)], top_k=1)
    result = run("verify", tmp_path, "--sample", "3", "--tokens", "8")
    assert result.exit_code == 0, result.output
    assert re.findall(r"^model\.layers\.(\d)\.mlp ", result.output, re.MULTILINE) == ["0", "2", "4"]
    assert "PASS: 3 of 3 MoE layers on b12x (5 in all)" in result.output


def test_json_on_standard_output(directory: Path) -> None:
    result = CliRunner().invoke(main, ["verify", str(directory), "--tokens", "8", "--json", "-"])
    assert json.loads(result.stdout)["status"] == "passed"
    assert "PASS: 2 of 2" in result.stderr


@pytest.mark.parametrize("columns", [40, 60, 80, 110, 160])
def test_the_verdict_stays_on_a_narrow_terminal(directory: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("verify", directory, "--layers", "0", "--tokens", "8").output.splitlines()
    (row,) = [line for line in lines if "s.0.mlp" in line]
    assert row.endswith("  ok")
    assert len(row) <= columns
    assert re.search(r" 0\.00\d\d ", row)


def test_names_that_a_terminal_would_obey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file, save_file

    monkeypatch.setenv("COLUMNS", "170")
    write_checkpoint(tmp_path, [random_experts(2, 128, 16)], top_k=1)
    file = tmp_path / "model.safetensors"
    odd = "[bold]\x1b[31mm[/]\u202e.layers.0.mlp"
    save_file({name.replace("model.layers.0.mlp", odd): tensor for name, tensor in load_file(file).items()}, file)
    result = run("verify", tmp_path, "--tokens", "8")
    assert result.exit_code == 0, result.output
    assert r"[bold]\x1b[31mm[/]\u202e.layers.0.mlp  b12x" in result.output
    assert "\x1b" not in result.output


def swapped(tensors: dict[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    other = {"experts": {"0": "1", "1": "0"}, "gate and up": {"w1": "w3", "w3": "w1"}}[what]
    return {".".join(other.get(part, part) for part in key.split(".")): tensor for key, tensor in tensors.items()}


def test_what_changed_places_is_found_with_the_original_only(tmp_path: Path) -> None:
    sound = [random_experts(3, 128, 64, seed=seed) for seed in (0, 1)]
    plain = [unquantized(layer) for layer in sound]
    original = write_checkpoint(tmp_path / "original", plain, top_k=2, quantization={"quant_algo": None})
    mutants = {
        "nothing": sound,
        "experts": [swapped(sound[0], "experts"), sound[1]],
        "gate and up": [swapped(sound[0], "gate and up"), sound[1]],
        "layers": sound[::-1],
    }
    for name, layers in mutants.items():
        directory = write_checkpoint(tmp_path / name, layers, top_k=2)
        blind = run("verify", directory, "--tokens", "8")
        assert blind.exit_code == 0, blind.output
        assert "without --original verify cannot see swapped experts, layers, or gate and up" in blind.output
        result = run("verify", directory, "--tokens", "8", "--original", original)
        assert "without --original" not in result.output
        assert result.exit_code == (0 if name == "nothing" else 1), result.output
        assert ("weights differ from the original's (bound 20 %): expert 0" in result.output) == (name != "nothing")
    for words in ("A checkpoint alone cannot show swapped experts", "--original"):
        assert words in run("verify", "--help").output


def test_interrupted_from_the_keyboard(tmp_path: Path) -> None:
    layers = [random_experts(2, 128, 16)] * 150  # the signal must find it at work, however busy the machine
    write_checkpoint(tmp_path / "model", layers, top_k=1)
    command = [sys.executable, "-m", "trtllm_b12x", "verify", str(tmp_path / "model"), "--json", str(tmp_path / "r.json")]
    listening = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # jobs of a shell may ignore it
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listening) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("model.layers.0.mlp "):
                process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    assert re.fullmatch(r"interrupted: \d+ of 150 layers were verified\n", lines[-1])
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["status"] == "interrupted"
    assert 0 < len(report["layers"]) < 150


def test_every_family_that_serves_a_layer_is_verified(tmp_path: Path, every_family: None) -> None:
    """Each by its own rounding points, on its own tile; what each is off unquantized activations, side by side."""
    write_checkpoint(tmp_path, [random_experts(8, 128, 192)], top_k=2)
    result = run("verify", tmp_path, "--tokens", "8,70", "--require-b12x", "--json", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    assert "PASS: 1 of 1 MoE layers on b12x+triton+grouped" in result.output
    b12x, triton, grouped = json.loads((tmp_path / "report.json").read_text())["layers"]
    assert (b12x["served_by"], triton["served_by"], grouped["served_by"]) == ("b12x", "triton", "grouped")
    assert (triton["bytes"]["padding"], triton["bits_exact"]) == (0, True)
    for case, other in zip(triton["cases"], b12x["cases"], strict=True):
        assert (case["path"], case["tokens"]) == ("triton", 8)
        assert case["error"] == case["rel_l2_kernel"] < 0.004
        assert case["error"] < 0.1 * other["error"]
    cases = {case["tokens"]: case for case in grouped["cases"]}
    assert {tokens: case["path"] for tokens, case in cases.items()} == {70: "grouped"}
    assert cases[70]["rel_l2_kernel"] < 0.004 < cases[70]["rel_l2_none"]
    rows = [line.split() for line in result.output.splitlines() if line.startswith("model.layers.0.mlp ")]
    assert [(row[1], "-" in row) for row in rows] == [("b12x", False), ("triton", True), ("grouped", False)]
    result = run("verify", tmp_path, "--tokens", "8", "--kernels", "triton")
    assert result.exit_code == 0
    assert "MoE layers on triton" in result.output
    assert "b12x" not in result.output
    assert run("verify", tmp_path, "--kernels", "cutlass").exit_code == 2


def test_nothing_of_a_server_stands_in_the_table(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 192)] * 2, top_k=1)
    command = [sys.executable, "-m", "trtllm_b12x", "verify", str(tmp_path), "--tokens", "1"]
    for level, said in (("", False), ("INFO", True)):
        environment = {**os.environ, "TRTLLM_B12X_LOG": level}
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert result.returncode == 0, result.stderr
        assert ("[trtllm_b12x] [INFO]" in result.stderr) is said


def test_numbers_that_are_not_the_familys_fail(tmp_path: Path, triton_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """b12x's own, as far off as quantizing activations makes them."""
    write_checkpoint(tmp_path, [random_experts(8, 128, 256)], top_k=2)
    monkeypatch.setattr(UnquantizedReferenceKernel, "quantizes", True)
    result = run("verify", tmp_path, "--tokens", "8")
    assert result.exit_code == 1
    assert "on triton: rel_l2_kernel" in result.output
