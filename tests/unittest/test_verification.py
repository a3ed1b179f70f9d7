"""What ``verify`` makes of its numbers: damage that the checkpoint itself tells, and bounds that do not fail sound layers."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts, write_checkpoint
from trtllm_b12x.checkpoint import Checkpoint, CheckpointError
from trtllm_b12x.formats.nvfp4 import pack_fp4, unpack_fp4
from trtllm_b12x.strict_reference.nvfp4 import dequantize_weight
from trtllm_b12x.verification import Case, LayerReport, relative_l2, verify_layer
from trtllm_b12x.verification.bits import _holds, wrong_scalars
from trtllm_b12x.verification.bounds import SIGMAS, exceeds, misses

Tensors = dict[str, torch.Tensor]


def verified(
    directory: Path, *tensors: Tensors, gated: bool = True, cases: tuple[int, ...] = (8, 63), original: Path | None = None
) -> list[LayerReport]:
    write_checkpoint(directory, list(tensors), top_k=2, gated=gated)
    drawn = [Case(count) for count in cases]
    with Checkpoint(directory) as checkpoint:
        plain = None if original is None else Checkpoint(original)
        return [verify_layer(checkpoint, layer, drawn, original=plain) for layer in checkpoint.layers]


def unquantized(tensors: Tensors) -> Tensors:
    kinds = ("weight", "weight_scale", "weight_scale_2")
    names = [key.removesuffix(".weight") for key in tensors if key.endswith(".weight")]
    return {f"{name}.weight": dequantize_weight(*(tensors[f"{name}.{kind}"] for kind in kinds)) for name in names}


# ---- damage ----------------------------------------------------------------------------------------------------------


def random_codes(weight: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 256, weight.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def transposed(weight: torch.Tensor) -> torch.Tensor:
    codes = unpack_fp4(weight)
    return pack_fp4(codes.T.contiguous().reshape(codes.shape))


def rolled_by_a_column(weight: torch.Tensor) -> torch.Tensor:
    return pack_fp4(unpack_fp4(weight).roll(1, dims=1))


@pytest.mark.parametrize("damage", [random_codes, transposed, rolled_by_a_column])
@pytest.mark.parametrize("gated", [True, False])
def test_codes_that_no_calibration_wrote(tmp_path: Path, damage: Callable[[torch.Tensor], torch.Tensor], gated: bool) -> None:
    tensors = random_experts(3, 128, 64, gated)
    tensors["1.w2.weight"] = damage(tensors["1.w2.weight"])
    (report,) = verified(tmp_path, tensors, gated=gated)
    (failure,) = report.failures
    assert failure.startswith("expert 1 down_proj "), failure
    assert "of the blocks hold a code of magnitude 6, all others in this checkpoint 100 %" in failure
    assert report.bits_exact


@pytest.mark.parametrize("kind", ["weight", "weight_scale"])
def test_holes_of_a_download_that_broke_off(tmp_path: Path, kind: str) -> None:
    tensors = random_experts(3, 128, 64)
    matrix = tensors[f"2.w2.{kind}"].view(torch.uint8)
    matrix[: len(matrix) // 4] = 0
    (report,) = verified(tmp_path, tensors)
    assert report.failures == [
        "expert 2 down_proj 25 % of the blocks are zero, hardly any elsewhere in the layer: parts are missing"
    ]


def test_zeros_that_every_matrix_has_are_padding(tmp_path: Path) -> None:
    tensors = random_experts(3, 128, 64)
    for key in [key for key in tensors if key.endswith("weight")]:
        tensors[key][:, -8:] = 0
    (report,) = verified(tmp_path, tensors)
    assert report.passed


def test_a_sound_layer_has_a_six_in_every_block(tmp_path: Path) -> None:
    (report,) = verified(tmp_path, random_experts(3, 128, 64))
    assert (report.full_blocks, report.passed, report.notes) == (1.0, True, [])


def test_a_layer_of_random_bytes(tmp_path: Path) -> None:
    tensors = {k: random_codes(t) if k.endswith(".weight") else t for k, t in random_experts(3, 128, 64).items()}
    alone, beside = verified(tmp_path / "1", tensors)[0], verified(tmp_path / "2", random_experts(3, 128, 64), tensors)[1]
    assert alone.failures == ["all codes are equally frequent, as in random bytes: these are no weights"]
    assert "expert 0 gate_proj 8" in beside.failures[0]
    assert "and 6 more" in beside.failures[0]


def test_another_calibration_is_not_called_damage(tmp_path: Path) -> None:
    """Block scales of amax / 4 where that rounds better, as searches choose them: the codes tell nothing, and that is said."""
    tensors = random_experts(3, 128, 64)
    for key in [key for key in tensors if key.endswith("weight_scale")]:
        weight, scale = tensors[key.removesuffix("_scale")], tensors[key].float()
        odd = torch.arange(scale.shape[1]) % 2 == 1
        values = unpack_fp4(weight).view(weight.shape[0], -1, 16)
        smaller = torch.where(values % 8 == 7, values - 1, values)  # a code of 6 becomes one of 4
        tensors[key] = torch.where(odd, scale * 1.5, scale).to(torch.float8_e4m3fn)
        tensors[key.removesuffix("_scale")] = pack_fp4(torch.where(odd[None, :, None], smaller, values).flatten(1))
    (report,) = verified(tmp_path, tensors)
    assert report.passed
    (note,) = report.notes
    assert note.startswith("50 % of the blocks hold a code of magnitude 6: not calibrated by max")


def fc2_scale_lost(tensors: Tensors) -> None:
    for key in [key for key in tensors if key.endswith("w2.input_scale")]:
        tensors[key] = torch.tensor(1e-30)


def one_expert_too_large(tensors: Tensors) -> None:
    for name in ("w1", "w3"):
        tensors[f"1.{name}.weight_scale_2"] = tensors[f"1.{name}.weight_scale_2"] * 1e4


@pytest.mark.parametrize("damage", [fc2_scale_lost, one_expert_too_large])
def test_input_scales_of_other_weights(tmp_path: Path, damage: Callable[[Tensors], None]) -> None:
    """The kernel computes what it was told, to 0.005; what it was told is wrong."""
    tensors = random_experts(3, 128, 64)
    damage(tensors)
    (report,) = verified(tmp_path, tensors)
    assert any("the input scales are not those of these weights" in failure for failure in report.failures)
    assert report.reference_error is not None
    assert report.reference_error > 0.7


def test_an_error_that_is_no_number_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What quantizing costs the reference, and the distance from the original."""
    tensors = random_experts(3, 128, 64)
    write_checkpoint(tmp_path / "plain", [unquantized(tensors)], top_k=2, quantization={"quant_algo": None})
    monkeypatch.setattr("trtllm_b12x.verification.layer.relative_l2", lambda value, reference: math.nan)
    (report,) = verified(tmp_path, tensors, original=tmp_path / "plain")
    assert [failure.split(":")[0].split(" by ")[0] for failure in report.failures] == [
        "quantizing activations costs nan % of the output (16 % is usual, 70 % allowed)",
        "outputs differ from the original's",
    ]


def test_outputs_that_are_not_the_original_s(tmp_path: Path) -> None:
    """By 164 %, as far as another model's are."""
    other = random_experts(3, 128, 64, seed=1)
    write_checkpoint(tmp_path / "plain", [unquantized(other)], top_k=2, quantization={"quant_algo": None})
    (report,) = verified(tmp_path, random_experts(3, 128, 64), original=tmp_path / "plain")
    weights, outputs = report.failures
    assert weights.startswith("weights differ from the original's (bound 20 %)")
    assert re.fullmatch(r"outputs differ from the original's by 1\d\d % \(bound 75 %\)", outputs)


def test_fc2_was_never_calibrated(tmp_path: Path) -> None:
    tensors = {k: t * 0 if k.endswith("w2.input_scale") else t for k, t in random_experts(3, 128, 64).items()}
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp has an input_scale of 0 in every expert"):
        verified(tmp_path, tensors)


@pytest.mark.parametrize("code", [0x7F, 0xFF, 0xB8])
def test_a_block_scale_that_is_no_number_or_negative_is_named(tmp_path: Path, code: int) -> None:
    tensors = random_experts(3, 128, 64)
    tensors["2.w2.weight_scale"].view(torch.uint8)[5, 1] = code
    with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj\.weight_scale holds NaN or a negative value"):
        verified(tmp_path, tensors)


# ---- bits ----


@pytest.mark.parametrize(("row", "column"), [(3, 0), (7, 5), (0, 4), (2, 7)])
def test_padding_that_is_not_zero_is_no_padding(row: int, column: int) -> None:
    plain = torch.arange(1, 13, dtype=torch.uint8).view(3, 4)
    padded = torch.zeros(8, 8, dtype=torch.uint8)
    padded[:3, :4] = plain
    assert _holds(padded, plain)
    padded[row, column] = 1
    assert not _holds(padded, plain)


@pytest.mark.parametrize("name", ["fc1_alpha", "fc2_alpha", "fc1_divisor", "fc2_divisor"])
def test_a_scale_that_is_off_by_little_is_named(name: str) -> None:
    """A ten thousandth of one expert's: a hundredth of what any error of the output shows."""
    tensors = random_experts(3, 128, 64)
    backend = layers.load(layers.create(3, 128, 64), tensors).backend
    layer: Any = types.SimpleNamespace(num_experts=3, gated=True, quant_algo="NVFP4")
    assert wrong_scalars(backend, tensors, layer) == []
    backend.kernel.weights.tensors()[name][1] *= 1.0001
    assert wrong_scalars(backend, tensors, layer) == [name]


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_layers_that_fixed_bounds_failed(tmp_path: Path) -> None:
    """Seeds whose float32 error (0.068, 0.071) or ratio (1.039) is beyond 0.05 or 1.03 by the codes that happened to flip."""
    write_checkpoint(tmp_path, [random_experts(3, 128, 16)], top_k=2)
    checkpoint = Checkpoint(tmp_path)
    worst = 0.0
    for seed in range(12):
        report = verify_layer(checkpoint, checkpoint.layers[0], [Case(63), Case(64)], seed=seed)
        worst = max(worst, *(case.rel_l2_none for case in report.cases))
        assert report.passed, report
    assert worst > 0.05


@pytest.mark.parametrize("other", [math.nan, math.inf, -math.inf])
def test_an_error_is_infinite_where_either_side_is_not_finite(other: float) -> None:
    ones, wrong = torch.ones(2, 3), torch.tensor([[1.0, 1.0, 1.0], [1.0, other, 1.0]])
    assert relative_l2(wrong, ones) == relative_l2(ones, wrong) == relative_l2(wrong, wrong) == math.inf


def test_false_alarms_are_rarer_than_stated() -> None:
    """Excess that is symmetric and of very different size from token to token stays below what the inequality allows."""
    generator = torch.Generator().manual_seed(0)
    runs, z = 50_000, 3.0
    excess = torch.randn(runs, 64, generator=generator, dtype=torch.float64) ** 3
    alarms = float((excess.sum(1) > z * excess.square().sum(1).sqrt()).double().mean())
    assert 0 < alarms < math.exp(-(z**2) / 2)
    assert math.exp(-(SIGMAS**2) / 2) * 1200 < 1e-4
    limit = torch.full((64,), 1.0, dtype=torch.float64)
    assert not any(exceeds(limit + row.clamp(min=-1), limit) for row in excess[:2000])


@pytest.mark.parametrize("tokens", [37, 63, 400])
def test_an_error_of_every_token_is_seen(tokens: int) -> None:
    limit = torch.full((tokens,), 0.0025, dtype=torch.float64)
    assert exceeds(limit * 4, limit)
    assert not exceeds(limit * 0.99, limit)
    assert exceeds(limit * math.nan, limit)


def test_a_token_whose_code_flipped_and_one_that_was_lost() -> None:
    norm = torch.ones(64, dtype=torch.float64)
    sound = norm * 0.0038**2

    def with_tokens(*errors: float) -> torch.Tensor:
        return torch.cat([torch.tensor(errors, dtype=torch.float64).square(), sound[len(errors) :]])

    assert not misses(sound, norm, 0.005)
    assert not misses(with_tokens(0.1, 0.05), norm, 0.005)
    assert misses(with_tokens(0.1, 0.05, 0.05), norm, 0.005)
    assert misses(with_tokens(1.0), norm, 0.005)
    assert misses(norm * 0.006**2, norm, 0.005)
    assert misses(with_tokens(math.inf), norm, 0.005)
    assert misses(with_tokens(0.1)[:4], norm[:4], 0.005)  # of four tokens none may


def test_experts_that_no_token_reaches_are_compared_by_their_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_b12x.quantization import nvfp4 as quantization

    tensors = {f"{e}.{key[2:]}": t for e in range(40) for key, t in random_experts(1, 128, 16).items()}
    (report,) = verified(tmp_path, tensors, cases=(8,))
    assert report.passed
    assert report.experts_run == 16
    original = quantization.NVFP4Sm12xFusedMoEMethod.load_expert_w2_weight
    loaded = 0

    def damaged(self: object, module: object, weight: torch.Tensor, destination: torch.Tensor) -> None:
        nonlocal loaded
        loaded += 1
        original(self, module, weight, destination)
        if loaded % 80 == 77:
            destination.view(torch.uint8)[5, 3] ^= 1

    monkeypatch.setattr(quantization.NVFP4Sm12xFusedMoEMethod, "load_expert_w2_weight", damaged)
    (report,) = verified(tmp_path, tensors, cases=(8,))
    assert report.bits_exact is False
    assert not report.passed
