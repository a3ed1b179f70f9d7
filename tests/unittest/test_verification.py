# SPDX-License-Identifier: Apache-2.0
"""What ``verify`` concludes from its numbers; its bounds do not fail sound layers, and fail each mistake."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import random_experts, unquantized, write_checkpoint
from tests.nvfp4_layer import interleaved
from trtllm_b12x.decision import RejectReason
from trtllm_b12x.engines.trtllm import quantization as placing
from trtllm_b12x.engines.trtllm import quantization_nvfp4 as quantization
from trtllm_b12x.formats.layouts import plain_scales
from trtllm_b12x.formats.nvfp4 import InputScales
from trtllm_b12x.tools.checkpoint import Checkpoint, CheckpointError
from trtllm_b12x.tools.progress import UnusableError
from trtllm_b12x.tools.verify import Case, LayerReport, Ranks, Tolerances, relative_l2, resolve_on_ranks, verify_layer
from trtllm_b12x.tools.verify.bounds import exceeds
from trtllm_b12x.tools.verify.layer import _holds

Tensors = dict[str, torch.Tensor]
Method = quantization.NVFP4Sm12xFusedMoEMethod


def verified(
    directory: Path, tensors: Tensors, cases: tuple[int, ...] = (8, 63), original: Path | None = None, gated: bool = True
) -> LayerReport:
    write_checkpoint(directory, [tensors], top_k=2, gated=gated)
    checkpoint, plain = Checkpoint(directory), None if original is None else Checkpoint(original)
    return verify_layer(checkpoint, checkpoint.layers[0], [Case(count) for count in cases], original=plain)


def write_original(directory: Path, tensors: Tensors) -> Path:
    return write_checkpoint(directory, [unquantized(tensors)], top_k=2, quantization={"quant_algo": None})


def fc2_scale_lost(tensors: Tensors) -> None:
    for key in [key for key in tensors if key.endswith("w2.input_scale")]:
        tensors[key] = torch.tensor(1e-30)


def one_expert_too_large(tensors: Tensors) -> None:
    for name in ("w1", "w3"):
        tensors[f"1.{name}.weight_scale_2"] = tensors[f"1.{name}.weight_scale_2"] * 1e4


@pytest.mark.parametrize("damage", [fc2_scale_lost, one_expert_too_large])
def test_input_scales_of_other_weights(tmp_path: Path, damage: Callable[[Tensors], None]) -> None:
    """The kernel agrees with the reference to 0.005; the checkpoint itself is wrong."""
    tensors = random_experts(3, 128, 64)
    damage(tensors)
    report = verified(tmp_path, tensors)
    assert any("the input scales are not those of these weights" in failure for failure in report.failures)
    assert report.reference_error is not None
    assert report.reference_error > 0.7


def test_an_error_that_is_not_a_number_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = random_experts(3, 128, 64)
    original = write_original(tmp_path / "plain", tensors)
    monkeypatch.setattr("trtllm_b12x.tools.verify.layer.relative_l2", lambda value, reference: math.nan)
    report = verified(tmp_path, tensors, original=original)
    assert [failure.split(":")[0].split(" by ")[0] for failure in report.failures] == [
        "quantizing activations costs nan % of the output (16 % is usual, 70 % allowed)",
        "outputs differ from the original's",
    ]
    assert all(len(case.failures) == 2 for case in report.cases)  # against float32, and the ratio


def test_outputs_of_another_model(tmp_path: Path) -> None:
    original = write_original(tmp_path / "plain", random_experts(3, 128, 64, seed=1))
    weights, outputs = verified(tmp_path, random_experts(3, 128, 64), original=original).failures
    assert weights.startswith("weights differ from the original's (bound 20 %)")
    assert re.fullmatch(r"outputs differ from the original's by 1\d\d % \(bound 75 %\)", outputs)


def test_fc2_was_never_calibrated(tmp_path: Path) -> None:
    tensors = {k: t * 0 if k.endswith("w2.input_scale") else t for k, t in random_experts(3, 128, 64).items()}
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp has an input_scale of 0 in every expert"):
        verified(tmp_path, tensors)


def test_counts_that_no_kernel_serves_are_left_out(tmp_path: Path) -> None:
    report = verified(tmp_path, random_experts(3, 128, 64), cases=(64, 8, 200))
    assert [(case.tokens, case.path) for case in report.cases] == [(8, "b12x")]
    report = verified(tmp_path, random_experts(3, 128, 64), cases=(64, 200))
    assert (report.passed, report.compared, report.bits_exact) == (True, False, True)
    assert report.notes == ["b12x serves no count of --tokens, so it was not run: add a count from 1 to 63"]


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "column"), [(3, 0), (7, 5), (0, 4), (2, 7)])
def test_padding_must_be_zero(row: int, column: int) -> None:
    plain = torch.arange(1, 13, dtype=torch.uint8).view(3, 4)
    padded = torch.zeros(8, 8, dtype=torch.uint8)
    padded[:3, :4] = plain
    assert _holds(padded, plain)
    padded[row, column] = 1
    assert not _holds(padded, plain)


def test_the_bits_of_experts_without_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"{e}.{key[2:]}": t for e in range(40) for key, t in random_experts(1, 128, 16).items()}
    report = verified(tmp_path, tensors, cases=(8,))
    assert report.passed
    assert report.experts_run == 16
    original, loads = Method.load_expert_w2_weight, itertools.count(1)

    def damaged(self: Any, module: object, weight: torch.Tensor, destination: torch.Tensor) -> None:
        original(self, module, weight, destination)
        if next(loads) % 80 == 77:
            destination.view(torch.uint8)[5, 3] ^= 1

    monkeypatch.setattr(Method, "load_expert_w2_weight", damaged)
    report = verified(tmp_path, tensors, cases=(8,))
    assert report.bits_exact is False
    assert not report.passed


@pytest.mark.parametrize("name", ["fc1_alpha", "fc2_alpha", "fc1_divisor", "fc2_divisor"])
def test_a_scale_of_one_expert_that_is_not_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By as little as no bound of an output tells."""
    original, factor = Method.kernel_weights, torch.tensor([1.0, 1.0001, 1.0])

    def kernel_weights(self: Any, module: Any) -> Any:
        weights = original(self, module)
        return dataclasses.replace(weights, input_scales=None, **{name: getattr(weights, name) * factor})

    monkeypatch.setattr(Method, "kernel_weights", kernel_weights)
    assert verified(tmp_path, random_experts(3, 128, 16)).failures == [f"rank 0: {name} differ from the checkpoint's scales"]


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_sound_layers_pass_with_few_tokens(tmp_path: Path) -> None:
    """Flipped codes alone make a float32 error of 0.061 and 0.052 for two of these seeds."""
    write_checkpoint(tmp_path, [random_experts(3, 128, 16)], top_k=2)
    checkpoint = Checkpoint(tmp_path)
    worst = 0.0
    for seed in (0, 11, 16, 21, 50):
        report = verify_layer(checkpoint, checkpoint.layers[0], [Case(8), Case(63)], seed=seed)
        worst = max(worst, *(case.rel_l2_none for case in report.cases))
        assert report.passed, report
    assert worst > 0.05


def test_bounds_narrow_with_the_sample() -> None:
    bounds = Tolerances()
    many, few = (zip((bounds.none, bounds.ratio), bounds.of(tokens), strict=True) for tokens in (4096, 64))
    assert all(least < narrow < wide for (least, narrow), (_, wide) in zip(many, few, strict=True))
    assert bounds.of(64) < (2.6 * bounds.none, 1.16)


@pytest.mark.parametrize("other", [math.nan, math.inf, -math.inf])
def test_an_error_is_infinite_if_either_side_is_not_finite(other: float) -> None:
    ones, wrong = torch.ones(2, 3), torch.tensor([[1.0, 1.0, 1.0], [1.0, other, 1.0]])
    assert relative_l2(wrong, ones) == relative_l2(ones, wrong) == relative_l2(wrong, wrong) == math.inf


@pytest.mark.parametrize(
    ("errors", "tokens", "fails"),
    [
        ((), 64, False),
        ((0.1, 0.05), 64, False),  # two flipped codes
        ((0.1, 0.05, 0.05), 64, True),
        ((1.0,), 64, True),  # a lost token
        ((math.inf,), 64, True),
        ((math.nan,), 64, True),
        ((0.1,), 4, True),  # one token in eight may flip
        ((0.006,) * 64, 64, True),
    ],
)
def test_tokens_with_a_flipped_code(errors: tuple[float, ...], tokens: int, fails: bool) -> None:
    reference = torch.ones(tokens, 4)
    error = torch.tensor([*errors, *[0.0038] * (tokens - len(errors))])
    assert exceeds(reference * (1 + error.unsqueeze(1)), reference, 0.005) is fails


# ---- mistakes that others have made, or could: each exceeds the bound ten times ----------------------------------------


def inverted_scale_map(patch: pytest.MonkeyPatch) -> None:
    def derive(self: InputScales) -> None:
        self.fc1_divisor.copy_(self.fc31_input_scale)
        self.fc2_divisor.copy_(self.fc2_input_scale)

    patch.setattr(InputScales, "derive", derive)


def alpha_without_the_input_scale(patch: pytest.MonkeyPatch) -> None:
    original = Method.kernel_weights

    def kernel_weights(self: Any, module: Any) -> Any:
        weights = original(self, module)
        return dataclasses.replace(weights, fc1_alpha=weights.fc1_alpha / weights.fc1_divisor)

    patch.setattr(Method, "kernel_weights", kernel_weights)


def gate_and_up_swapped(patch: pytest.MonkeyPatch) -> None:
    original = Method.load_expert_w3_w1_weight
    patch.setattr(Method, "load_expert_w3_w1_weight", lambda self, module, w1, w3, dst: original(self, module, w3, w1, dst))


def interleave_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placing, "interleave", lambda rows, block_scales: block_scales.view(torch.uint8).copy_(rows))


def split_at_the_padded_half(patch: pytest.MonkeyPatch) -> None:
    """w1 right below w3, padding at the bottom, as the host lays it out; the kernel splits in the middle."""

    def load(self: Any, module: Any, w1: torch.Tensor, w3: torch.Tensor, dst: torch.Tensor) -> None:
        rows = torch.cat([w3, w1]).view(torch.uint8)
        dst.view(torch.uint8).zero_()
        dst.view(torch.uint8)[: rows.shape[0]].copy_(rows)

    patch.setattr(Method, "load_expert_w3_w1_weight", load)


def scales_shifted_by_one_row(patch: pytest.MonkeyPatch) -> None:
    original = placing.interleave
    patch.setattr(placing, "interleave", lambda rows, block_scales: original(rows.roll(1, 0), block_scales))


def baked_block_scales(patch: pytest.MonkeyPatch) -> None:
    """``weight_scale_2`` multiplied into the E4M3 scales, alphas left with the input scales, as peers do."""
    original = Method.kernel_weights

    def kernel_weights(self: Any, module: Any) -> Any:
        weights, changed = original(self, module), {}
        for name in ("fc1", "fc2"):
            divisor, alpha = getattr(weights, f"{name}_divisor"), getattr(weights, f"{name}_alpha")
            scales = plain_scales(getattr(weights, f"{name}_weight_sf")).float() * (alpha / divisor).view(-1, 1, 1)
            changed[f"{name}_weight_sf"] = interleaved(scales.to(torch.float8_e4m3fn))
            changed[f"{name}_alpha"] = divisor.expand(alpha.shape).contiguous()
        return dataclasses.replace(weights, **changed)

    patch.setattr(Method, "kernel_weights", kernel_weights)


GATED_ONLY = [gate_and_up_swapped, split_at_the_padded_half]
MUTATIONS = [inverted_scale_map, alpha_without_the_input_scale, interleave_skipped, scales_shifted_by_one_row, baked_block_scales]


@pytest.mark.parametrize(
    ("mutate", "gated"),
    [(m, True) for m in MUTATIONS + GATED_ONLY] + [(m, False) for m in MUTATIONS],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_each_mutation_fails_by_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], gated: bool
) -> None:
    mutate(monkeypatch)
    report = verified(tmp_path, random_experts(4, 128, 160, gated), cases=(1, 8, 63), gated=gated)
    assert report.served_by == "b12x"
    assert not report.passed
    if mutate is baked_block_scales:
        assert report.bits_exact is False
        assert report.bytes is not None
        assert report.bytes.extra > 0
    for case in report.cases:
        assert case.rel_l2_kernel is not None
        assert case.rel_l2_kernel > 10 * Tolerances().kernel, (mutate.__name__, case)
        assert case.failures


# ---- tensor and expert parallelism, simulated: two models x TP x EP x token counts -------------------------------------


OF_RANKS = [Case(1), Case(8), Case(63)]
EXPERTS, TOP_K = 4, 3
SIZES = {"qwen3-moe": 1280, "nemotron-h": 768}  # 1280 / 8 = 160, / 4 = 320; 768 / 8 = 96


@pytest.fixture(scope="module", params=sorted(SIZES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    gated = request.param == "qwen3-moe"
    experts = random_experts(EXPERTS, 128, SIZES[request.param], gated)
    return Checkpoint(write_checkpoint(tmp_path_factory.mktemp(request.param), [experts], TOP_K, gated=gated))


@pytest.mark.all("*-[14]-?", "*-?-4", "*-2-2", "*-8-1")
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_add_up(checkpoint: Checkpoint, tp: int, ep: int, caplog: pytest.LogCaptureFixture) -> None:
    (layer,) = checkpoint.layers
    report = verify_layer(checkpoint, layer, OF_RANKS, ranks=Ranks(tp, ep), require_b12x=True)
    assert report.passed, (report.failures, [case.failures for case in report.cases])
    assert [case.path for case in report.cases] == ["b12x"] * 3
    size = layer.intermediate_size // tp
    padded = tp * (-(-size // 256) * 256) - layer.intermediate_size
    matrices = EXPERTS * len(layer.projections)
    assert report.bytes is not None
    assert report.bytes.padding == matrices * padded * 128 * 9 // 16
    assert report.bytes.extra == 0
    assert report.bytes.scalars <= 16 * EXPERTS * tp
    assert not report.warnings  # TensorRT-LLM refuses some of the sizes, but not with our layer
    assert "answer" not in caplog.text  # nobody is asked about simulated ranks


def test_ranks_that_do_not_divide(checkpoint: Checkpoint) -> None:
    (layer,) = checkpoint.layers
    with pytest.raises(UnusableError, match="--tp 7"):
        verify_layer(checkpoint, layer, OF_RANKS, ranks=Ranks(tp=7))
    with pytest.raises(UnusableError, match="--ep 3"):
        verify_layer(checkpoint, layer, OF_RANKS, ranks=Ranks(ep=3))
    ranks = Ranks(tp=32 if layer.gated else 96)
    assert resolve_on_ranks(checkpoint, layer, ranks).reasons == (RejectReason.INTERMEDIATE_SIZE,)
