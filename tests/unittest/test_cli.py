# SPDX-License-Identifier: Apache-2.0
"""``trtllm-b12x verify`` as a user meets it: exit status, messages, table, JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from tests.checkpoints import random_experts, unquantized, write_checkpoint
from tests.unittest.test_checkpoint import E0, edit_tensors
from trtllm_b12x import __version__
from trtllm_b12x.core import process
from trtllm_b12x.engines.trtllm import quantization_nvfp4 as quantization
from trtllm_b12x.engines.trtllm.fused_moe import FlashInferNvfp4Sm12xFusedMoE
from trtllm_b12x.kernels.reference import ReferenceKernel, UnquantizedReferenceKernel
from trtllm_b12x.tools import verify as package
from trtllm_b12x.tools.cli import main

Method = quantization.NVFP4Sm12xFusedMoEMethod


def verify(*arguments: Any, status: int = 0) -> Result:
    result = CliRunner().invoke(main, ["verify", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def report(*arguments: Any, status: int = 0) -> dict[str, Any]:
    """The JSON on standard output; the table is on standard error."""
    result = verify(*arguments, "--json", status=status)
    assert "bounds: kernel 0.005" in result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def last_line(result: Result) -> str:
    return result.output.strip().splitlines()[-1]


def write_plain(directory: Path, layers: list[dict[str, torch.Tensor]]) -> Path:
    return write_checkpoint(directory, layers, top_k=2, quantization={"quant_algo": None})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", [random_experts(3, 128, 64), random_experts(3, 128, 64, seed=1)], top_k=2)


def test_pass(directory: Path, tmp_path: Path) -> None:
    words = r"PASS: 2 of 2 MoE layers on b12x, worst relative L2 0\.00\d+ \(bound 0\.005\), extra bytes 0 \(padding \d+\)"
    assert re.match(
        f"{words}, computed in torch: no kernel ran$",
        last_line(verify(directory, "--require-b12x", "--out", tmp_path / "report.json")),
    )
    found = json.loads((tmp_path / "report.json").read_text())
    assert (found["passed"], found["status"], found["trtllm_b12x"]) == (True, "passed", __version__)
    for layer in found["layers"]:
        assert (layer["served_by"], layer["bits_exact"]) == ("b12x", True)
        assert layer["bytes"]["extra"] == 0
        # To the byte: both halves and w2's columns go from 64 to the tile of 256, payload half a byte, scale a sixteenth.
        assert layer["bytes"]["padding"] == 3 * 3 * (256 - 64) * 128 * 9 // 16
        assert layer["bytes"]["scalars"] <= 16 * 3
        assert {case["tokens"]: case["path"] for case in layer["cases"]} == {1: "b12x", 8: "b12x", 63: "b12x"}
        assert all(case["experts"] == 3 for case in layer["cases"])
        assert any(case["outliers"] == 4.0 and case["path"] == "b12x" for case in layer["cases"])


def test_layers_tokens_and_seed(directory: Path) -> None:
    first, again, other = (
        report(directory, "--layers", "1", "--tokens", "2,60-61,70", "--seed", seed)["layers"] for seed in (0, 0, 1)
    )
    assert [layer["index"] for layer in first] == [1]
    assert [case["tokens"] for case in first[0]["cases"]] == [2, 60, 61, 61]
    assert first == again != other


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
    layer = report(directory, "--require-b12x", "--tokens", "43,44,46")["layers"][0]
    assert [(case["tokens"], case["path"]) for case in layer["cases"]] == [(43, "b12x")]
    assert layer["notes"] == ["b12x serves fewer than 44 tokens: no offsets for more than 43"]
    assert "decode below 44 tokens" in caplog.text


def test_a_pass_means_that_b12x_ran(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "b12x serves no count of --tokens, so it was not run: add a count from 1 to 63"
    assert words in verify(directory, "--require-b12x", "--tokens", "64,100", status=1).output
    with monkeypatch.context() as patch:  # a kernel that was planned for less than the crossover
        patch.setattr(ReferenceKernel, "serves", lambda self, tokens: False)
        patch.setattr(ReferenceKernel, "capacity", 0, raising=False)
        patch.setattr(ReferenceKernel, "plan", lambda self, geometry, *_: setattr(self, "geometry", geometry))
        assert "served by cutlass, not by b12x" in verify(directory, status=1).output
    monkeypatch.setattr(FlashInferNvfp4Sm12xFusedMoE, "_kernel_for", lambda self, x: None)
    assert "served by cutlass, not by b12x" in verify(directory, status=1).output


@pytest.mark.parametrize("name", ["fc31_alpha", "fc2_alpha", "fc2_input_scale", "fc31_input_scale"])
def test_a_wrong_scale_of_one_small_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By 1e-4, a hundredth of what any error of the output shows, and expert 2 is 300 times larger than the wrong expert 0."""
    tensors = random_experts(3, 128, 64)
    for kind in ("w1", "w3"):
        tensors[f"2.{kind}.weight_scale_2"] = tensors[f"2.{kind}.weight_scale_2"] * 300
    write_checkpoint(tmp_path, [tensors], top_k=2)
    original = Method.post_load_weights

    def damaged(self: Any, module: Any) -> None:
        original(self, module)
        getattr(module, name).data.view(-1)[0] *= 1.0001
        self.kernel_weights(module)  # derives the divisors

    monkeypatch.setattr(Method, "post_load_weights", damaged)
    assert "differ from the checkpoint's scales" in verify(tmp_path, status=1).output


def test_an_original_of_other_sizes(directory: Path, tmp_path: Path) -> None:
    plain = unquantized(random_experts(3, 128, 64))
    for other in (
        {k: v for k, v in plain.items() if not k.startswith("2.")},
        {k: v[:, :64].contiguous() for k, v in plain.items()},
    ):
        original = write_plain(tmp_path / "plain", [other])
        output = verify(directory, "--layers", "0", "--original", original, status=2).output
        assert "has no unquantized layer model.layers.0.mlp of the same sizes" in output


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_original_that_is_not_finite(directory: Path, tmp_path: Path, value: float) -> None:
    plain = unquantized(random_experts(3, 128, 64))
    plain["1.w1.weight"][0] = value
    arguments = (directory, "--layers", "0", "--original", write_plain(tmp_path / "plain", [plain]))
    assert "weights differ from the original's (bound 20 %): expert 1 gate_proj by nan %" in verify(*arguments, status=1).output


def test_numbers_that_json_has_no_word_for(directory: Path) -> None:
    edit_tensors(directory, **{E0 + "down_proj.weight_scale_2": torch.tensor(3e38)})
    assert report(directory, status=1)["passed"] is False


def test_wrong_arguments(directory: Path, tmp_path: Path) -> None:
    folder_for_a_file = tmp_path / "damaged"
    (folder_for_a_file / "model.safetensors").mkdir(parents=True)
    shutil.copy(directory / "config.json", folder_for_a_file)
    for arguments, message in (
        ((directory, "--layers", "7"), "--layers 7: no MoE layer; choose from 0, 1"),
        ((directory, "--layers", "x"), "such as 1,8,60-64; got 'x'"),
        ((directory, "--tokens", "0"), "must be 1 to 64 numbers from 1 to 16384, such as"),
        ((directory, "--device", "quantum"), "must be cpu, cuda, cuda:1, ...; got 'quantum'"),
        ((directory, "--device", "cuda:77"), "cuda:77 cannot be used here"),
        ((directory, "--tokens", "1-999999999999"), "got '1-999999999999'"),
        ((directory, "--tokens", "1-100"), "got '1-100'"),
        ((directory, "--tokens", "5-2"), "got '5-2'"),
        ((directory, "--seed", "-1"), "--seed"),
        ((directory, "--tp", "9" * 30), "--tp"),
        ((directory, "--sample", "0"), "--sample"),
        ((directory, "--kernels", "cutlass"), "must be one or more of cuda, b12x"),
        ((directory, "--out", tmp_path), "it is a folder"),
        ((directory, "--out", tmp_path / "no" / "r.json"), "its folder does not exist"),
        ((directory, "--tokens", "1", "--out", "/dev/full"), "error: /dev/full: cannot be written"),
        ((directory, "--original", tmp_path / "none"), "no such directory"),
        ((tmp_path / "none",), "no such directory"),
        ((directory / "config.json",), "is a file, not a folder"),
        (("x" * 5000,), "no such directory"),
        (("nvidia/A-Model",), "give the folder that this prints: hf download nvidia/A-Model"),
        ((directory, "--out", directory / "config.json" / "r.json"), "config.json is a file, not a folder); choose another"),
        ((shutil.copytree(directory, tmp_path / "\udcff"),), "\\udcff/model.safetensors: safetensors opens no path that is not"),
        ((tmp_path / "\udcfe",), "\\udcfe: no such directory"),
        ((directory, "--original", folder_for_a_file), "model.safetensors: is a folder, not a file; copy or export"),
    ):
        result = verify(*arguments, status=2)
        assert message in result.output
        assert isinstance(result.exception, SystemExit)


def test_without_permission(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root has every permission, so the answers of the system are replaced."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))
    result = verify(directory, "--out", tmp_path / "r.json", status=2)
    assert result.output.endswith(f"r.json: cannot be written (no permission); choose another file, or chmod u+w {tmp_path}\n")
    result = CliRunner().invoke(main, ["warmup", str(directory), "--target", "sm_120a"], env={"TRITON_CACHE_DIR": str(tmp_path)})
    assert result.output == f"error: Triton's cache {tmp_path} cannot be written; name another folder in TRITON_CACHE_DIR\n"
    denied = Mock(side_effect=PermissionError(13, "Permission denied", "config.json"))
    monkeypatch.setattr(Path, "read_bytes", denied)
    message = f"error: {directory / 'config.json'}: you have no permission to read it; run this as its owner, or"
    assert message in verify(directory, status=2).output
    monkeypatch.setattr("trtllm_b12x.core.disk.contents", denied)
    for command in (["cache"], ["cache", "clear"]):
        expected = f"error: {tmp_path / 'trtllm_b12x'}: Permission denied; remove it as its owner, or set XDG_CACHE_HOME\n"
        assert CliRunner().invoke(main, command).output == expected


def test_a_layer_that_cannot_be_used_loses_no_other(directory: Path, tmp_path: Path) -> None:
    edit_tensors(directory, **{E0.replace("0.mlp", "1.mlp") + "down_proj.weight_scale_2": torch.tensor(float("nan"))})
    result = verify(directory, "--out", tmp_path / "r.json", status=2)
    assert "model.layers.1.mlp.experts.0.down_proj.weight_scale_2 is nan" in result.output
    assert re.search(r"model\.layers\.0\.mlp +b12x .* ok", result.output)
    assert last_line(result).startswith("FAIL: 1 of 2 MoE layers on b12x")
    found = json.loads((tmp_path / "r.json").read_text())
    assert [layer["passed"] for layer in found["layers"]] == [True]
    assert (list(found["errors"]), found["status"]) == (["model.layers.1.mlp"], "unusable")


def test_results_as_they_come(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_layer, seen, file = package.verify_layer, [], tmp_path / "r.json"

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append(json.loads(file.read_text()))
        return verify_layer(*arguments, **options)

    monkeypatch.setattr(package, "verify_layer", watched)
    verify(directory, "--out", file)
    assert [(found["status"], len(found["layers"])) for found in seen] == [("running", 0), ("running", 1)]
    assert len(json.loads(file.read_text())["layers"]) == 2


def test_sample(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 16, seed=i) for i in range(5)], top_k=1)
    output = verify(tmp_path, "--sample", "3", "--tokens", "8").output
    assert re.findall(r"^model\.layers\.(\d)\.mlp ", output, re.MULTILINE) == ["0", "2", "4"]
    assert "PASS: 3 of 3 MoE layers on b12x (5 in all)" in output


def test_names_that_a_terminal_would_obey(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 16)], top_k=1)
    file = tmp_path / "model.safetensors"
    odd = "[bold]\x1b[31mm[/]\u202e.layers.0.mlp"
    save_file({name.replace("model.layers.0.mlp", odd): tensor for name, tensor in load_file(file).items()}, file)
    output = verify(tmp_path, "--tokens", "8").output
    assert re.search(r"^\[bold\]\\x1b\[31mm\[/\]\\u202e\.layers\.0\.mlp +b12x", output, re.MULTILINE)
    assert "\x1b" not in output


def swapped(tensors: dict[str, torch.Tensor], **other: str) -> dict[str, torch.Tensor]:
    return {".".join(other.get(f"_{part}", part) for part in key.split(".")): tensor for key, tensor in tensors.items()}


def test_what_changed_places_is_found_with_the_original_only(tmp_path: Path) -> None:
    sound = [random_experts(3, 128, 64, seed=seed) for seed in (0, 1)]
    original = write_plain(tmp_path / "original", [unquantized(layer) for layer in sound])
    mutants = {
        "nothing": sound,
        "experts": [swapped(sound[0], _0="1", _1="0"), sound[1]],
        "gate and up": [swapped(sound[0], _w1="w3", _w3="w1"), sound[1]],
        "layers": sound[::-1],
    }
    blind = "without --original verify cannot see swapped experts, layers, or gate and up"
    for name, layers in mutants.items():
        directory = write_checkpoint(tmp_path / name, layers, top_k=2)
        assert blind in verify(directory, "--tokens", "8").output
        output = verify(directory, "--tokens", "8", "--original", original, status=int(name != "nothing")).output
        assert blind not in output
        assert ("weights differ from the original's (bound 20 %): expert 0" in output) == (name != "nothing")


def test_an_interrupt_that_arrives_as_another_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)  # a worker may ignore it

    def interrupted(*arguments: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise ValueError("torch's C code makes this of it, in safetensors' get_tensor")

    monkeypatch.setattr("trtllm_b12x.tools.verify.layer.zero_matrices", interrupted)
    assert "interrupted: 0 of 2 layers were verified" in verify(directory, status=130).output


def test_every_family_that_serves_a_layer_is_verified(tmp_path: Path, every_family: None) -> None:
    """Each by its own rounding points, on its own tile; what each is off unquantized activations, side by side."""
    write_checkpoint(tmp_path, [random_experts(8, 128, 192)], top_k=2)
    output = verify(tmp_path, "--tokens", "8,70", "--require-b12x", "--out", tmp_path / "report.json").output
    assert "PASS: 1 of 1 MoE layers on b12x+triton+grouped" in output
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
    rows = [line.split() for line in output.splitlines() if line.startswith("model.layers.0.mlp ")]
    assert [(row[1], "-" in row) for row in rows] == [("b12x", False), ("triton", True), ("grouped", False)]
    output = verify(tmp_path, "--tokens", "8", "--kernels", "triton").output
    assert "MoE layers on triton" in output
    assert "b12x" not in output


def test_gate_and_up_with_different_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_family: None) -> None:
    """b12x refuses such a layer before it is loaded; alone it leaves nothing to compare."""
    write_checkpoint(tmp_path, [random_experts(4, 256, 256, up_to_gate=1.5)], top_k=2)
    output = verify(tmp_path, "--tokens", "8,70", "--out", tmp_path / "report.json").output
    assert re.search(r"PASS, but prompts on CUTLASS are off by up to \d\d % \(gate and up have different scales\): 1", output)
    triton, grouped = json.loads((tmp_path / "report.json").read_text())["layers"]
    assert (triton["served_by"], grouped["served_by"]) == ("triton", "grouped")
    assert "not b12x: UNEQUAL_SCALES" in triton["reasons"][0]
    assert triton["scale_ratio"] == pytest.approx(1.5)
    assert min(triton["cutlass_error"], grouped["cutlass_error"]) > 0.3
    assert "up to 1.5 times" in triton["notes"][0]
    assert max(case["rel_l2_kernel"] for case in (*triton["cases"], *grouped["cases"])) < 0.005
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "b12x")
    output = verify(tmp_path, "--tokens", "8", status=3).output
    assert re.search(r"UNEQUAL_SCALES[^$]*NOTHING COMPARED: 0 of 1 MoE layers on b12x", output)


@pytest.mark.all("INFO")
@pytest.mark.parametrize("level", ["", "INFO"])
def test_nothing_of_a_server_stands_in_the_table(tmp_path: Path, level: str) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 192)] * 2, top_k=1)
    command = [sys.executable, "-m", "trtllm_b12x", "verify", str(tmp_path), "--tokens", "1"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRTLLM_B12X_LOG": level})
    assert result.returncode == 0, result.stderr
    assert ("[trtllm_b12x] [INFO]" in result.stderr) is bool(level)


def test_numbers_that_are_not_the_familys_fail(tmp_path: Path, triton_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """b12x's own, as far off as quantizing activations makes them."""
    write_checkpoint(tmp_path, [random_experts(8, 128, 256)], top_k=2)
    monkeypatch.setattr(UnquantizedReferenceKernel, "quantizes", True)
    assert "on triton: rel_l2_kernel" in verify(tmp_path, "--tokens", "8", status=1).output


def test_ranks_that_divide_no_layer_are_told_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [random_experts(2, 128, 64)] * 2, top_k=1)
    result = CliRunner().invoke(main, ["verify", str(tmp_path), "--tp", "3"])
    assert (result.exit_code, result.output) == (2, "error: --tp 3 does not divide intermediate size 64\n")


@pytest.mark.parametrize(
    ("code", "stdout", "words"),
    [
        ("from trtllm_b12x.__main__ import main; main()", "/dev/full", "standard output cannot be written"),
        ("import benchmarks; benchmarks.finish(lambda: print('text') or 0)", "/dev/full", "standard output cannot be written"),
        ("sys.modules['click'] = None; from trtllm_b12x.__main__ import main; main()", "/dev/null", "pip install click"),
    ],
)
def test_what_python_cannot_do_is_one_line(code: str, stdout: str, words: str) -> None:
    program = f"import sys; sys.argv[1:] = ['switch']; {code}"
    with open(stdout, "w") as stream:
        result = subprocess.run([sys.executable, "-c", program], stdout=stream, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert words in result.stderr


BENCHMARKS = "calls chain decode floor models on_card overhead peers results served starts vllm warmup"


@pytest.mark.all("chain", "models", "on_card", "peers", "results", "served", "starts", "vllm")
@pytest.mark.parametrize("module", BENCHMARKS.split())
def test_help_of_benchmarks(module: str) -> None:
    """It measures nothing, so it needs no GPU."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--help"]
    result = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert result.returncode == 0, result.stderr
    assert "benchmarks." in result.stdout
