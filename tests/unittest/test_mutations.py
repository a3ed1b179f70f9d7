"""Mistakes that others have made, or could: each exceeds the kernels' bound ten times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import random_experts, write_checkpoint
from trtllm_b12x.engines.trtllm import embedded
from trtllm_b12x.engines.trtllm import quantization as placing
from trtllm_b12x.engines.trtllm import quantization_nvfp4 as quantization
from trtllm_b12x.formats.layouts import mma_scale_view, plain_scales
from trtllm_b12x.formats.nvfp4 import InputScales
from trtllm_b12x.tools.checkpoint import Checkpoint
from trtllm_b12x.tools.verify import Case, LayerReport, Tolerances, verify_layer

Method = quantization.NVFP4Sm12xFusedMoEMethod
CASES = [Case(1), Case(8), Case(63)]


def verified(tmp_path: Path, gated: bool = True) -> LayerReport:
    write_checkpoint(tmp_path, [random_experts(4, 128, 160, gated)], top_k=2, gated=gated)
    checkpoint = Checkpoint(tmp_path)
    return verify_layer(checkpoint, checkpoint.layers[0], CASES)


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
        weights = original(self, module)

        def baked(scales: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
            plain = (plain_scales(scales).float() * alpha.view(-1, 1, 1)).to(torch.float8_e4m3fn)
            return mma_scale_view(
                torch.stack([torch.from_numpy(interleaved(p)) for p in plain]), plain.shape[1], 16 * plain.shape[2]
            )

        def interleaved(plain: torch.Tensor) -> Any:
            return embedded.block_scale_interleave(plain.view(torch.uint8)).numpy()

        fc2_scale = weights.fc2_divisor
        return dataclasses.replace(
            weights,
            fc1_weight_sf=baked(weights.fc1_weight_sf, weights.fc1_alpha / weights.fc1_divisor),
            fc1_alpha=weights.fc1_divisor.expand(weights.fc1_alpha.shape).contiguous(),
            fc2_weight_sf=baked(weights.fc2_weight_sf, weights.fc2_alpha / fc2_scale),
            fc2_alpha=fc2_scale.clone(),
        )

    patch.setattr(Method, "kernel_weights", kernel_weights)


GATED_ONLY = [gate_and_up_swapped, split_at_the_padded_half]
MUTATIONS = [inverted_scale_map, alpha_without_the_input_scale, interleave_skipped, scales_shifted_by_one_row, baked_block_scales]


@pytest.mark.parametrize("gated", [True, False])
def test_without_a_mutation_the_layer_passes(tmp_path: Path, gated: bool) -> None:
    report = verified(tmp_path, gated)
    assert report.served_by == "b12x"
    assert report.passed, report


@pytest.mark.parametrize(
    ("mutate", "gated"),
    [(m, True) for m in MUTATIONS + GATED_ONLY] + [(m, False) for m in MUTATIONS],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_each_mutation_fails_by_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], gated: bool
) -> None:
    mutate(monkeypatch)
    report = verified(tmp_path, gated)
    assert report.served_by == "b12x"
    assert not report.passed
    for case in report.cases:
        assert case.rel_l2_kernel is not None
        assert case.rel_l2_kernel > 10 * Tolerances().kernel, (mutate.__name__, case)
        assert case.failures


def test_baked_scales_are_other_bits_and_other_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baked_block_scales(monkeypatch)
    report = verified(tmp_path)
    assert report.bits_exact is False
    assert report.bytes is not None
    assert report.bytes.extra > 0
