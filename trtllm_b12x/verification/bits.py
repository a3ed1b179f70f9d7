"""What can be told without computing: the bits that the kernel reads, and what the checkpoint's codes say of themselves."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from trtllm_b12x.checkpoint import Checkpoint, MoELayer
from trtllm_b12x.kernels.layout import plain_scales

from .report import BytesReport, LayerReport

_FULL = 0.999
"""Max calibration leaves a code of magnitude 6 in every block whose E4M3 scale is normal: the scale is within 1/16 of amax / 6,
so the largest value is above 5.6, and everything from 5 rounds to 6."""

_HOLES, _NO_HOLES = 0.1, 0.001
"""Share of zero blocks in a matrix that is damage, where half of the layer's matrices have less than the other: a shard whose
download broke off has pages of zeros.  Padding, pruned rows and dead channels are in all of them."""

_MAGNITUDES = 0x7777777777777777
_LOWEST_BITS = 0x1111111111111111
_SMALLEST_NORMAL = 0x08


def examine_codes(checkpoint: Checkpoint, layer: MoELayer, report: LayerReport) -> None:
    """Expert matrices that say nothing (all zero), and such whose codes no max calibration wrote."""
    matrices = list(_matrices(checkpoint, layer, range(layer.num_experts)))
    by_max = _calibrated_by_max(checkpoint)
    live = sum(matrix.counted for matrix in matrices)
    report.full_blocks = sum(matrix.full for matrix in matrices) / live if live else None
    dead = [matrix.name for matrix in matrices if matrix.empty == 1]
    if dead:
        report.failures.append(f"{_listed(dead)}: all zero, whatever the input")
    if statistics.median(matrix.empty for matrix in matrices) < _NO_HOLES:
        holes = [f"{matrix.name} {100 * matrix.empty:.0f} %" for matrix in matrices if _HOLES < matrix.empty < 1]
        if holes:
            report.failures.append(
                f"{_listed(holes)} of the blocks are zero, hardly any elsewhere in the layer: parts are missing"
            )
    short = [
        f"{matrix.name} {100 * matrix.full / matrix.counted:.0f} %"
        for matrix in matrices
        if by_max and matrix.full < _FULL * matrix.counted
    ]
    if short:
        report.failures.append(
            f"{_listed(short)} of the blocks hold a code of magnitude 6, all others in this checkpoint 100 % "
            "(random bytes 88 %, transposed 85 %): these weights were damaged"
        )
    if not by_max and report.full_blocks is not None:
        if _evenly_spread(checkpoint, layer):
            report.failures.append("all codes are equally frequent, as in random bytes: these are no weights")
        else:
            report.notes.append(
                f"{100 * report.full_blocks:.0f} % of the blocks hold a code of magnitude 6: not calibrated by max (100 %), "
                "so the codes do not tell damage; --original does"
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _calibrated_by_max(checkpoint: Checkpoint) -> bool:
    """Some matrix of the checkpoint has a code of magnitude 6 in every block: by chance none has."""
    for layer in checkpoint.layers:
        if layer.quant_algo == "NVFP4" and not layer.pre_quant_scale:
            for matrix in _matrices(checkpoint, layer, sorted({0, layer.num_experts - 1})):
                if matrix.counted >= 64 and matrix.full >= _FULL * matrix.counted:
                    return True
    return False


class _Matrix(NamedTuple):
    name: str
    counted: int
    """Blocks that are not zero and have a normal scale."""
    full: int
    """Those of them with a code of magnitude 6."""
    empty: float
    """Share of the blocks that stand for zeros."""


def _matrices(checkpoint: Checkpoint, layer: MoELayer, experts: Sequence[int]) -> Iterator[_Matrix]:
    weights = checkpoint.weights(layer)
    for expert in experts:
        for projection in layer.projections:
            codes = weights[f"{expert}.{projection}.weight"].clone().view(torch.int64)
            scales = weights[f"{expert}.{projection}.weight_scale"].view(torch.uint8)
            used = (codes & _MAGNITUDES) != 0
            sixes = (codes & (codes >> 1) & (codes >> 2) & _LOWEST_BITS) != 0
            counted = used & (scales >= _SMALLEST_NORMAL)
            zero = float(weights[f"{expert}.{projection}.weight_scale_2"]) == 0
            empty = 1.0 if zero else 1 - int((used & (scales != 0)).sum()) / used.numel()
            name = f"expert {expert} {layer.projections[projection]}"
            yield _Matrix(name, int(counted.sum()), int((counted & sixes).sum()), empty)


def _evenly_spread(checkpoint: Checkpoint, layer: MoELayer) -> bool:
    weights = checkpoint.weights(layer)
    for projection in layer.projections:
        packed = weights[f"0.{projection}.weight"].flatten().int()
        shares = torch.bincount(torch.cat((packed & 7, (packed >> 4) & 7)), minlength=8).double() / (2 * len(packed))
        if float((shares - 0.125).abs().max()) > 0.01:
            return False
    return True


def count_bytes(backend: Any, total: BytesReport) -> None:
    """Add one rank's bytes."""
    own = {p.untyped_storage().data_ptr() for p in backend.parameters()}
    weights = backend.kernel.weights.tensors()

    def extra(*names: str) -> int:
        return sum(weights[n].nbytes for n in names if weights[n].untyped_storage().data_ptr() not in own)

    parameters = ("w3_w1_weight", "w2_weight", "w3_w1_weight_scale", "w2_weight_scale")
    total.padding += sum(getattr(backend, name).nbytes for name in parameters)
    total.extra_payload += extra("w1_weight", "w2_weight")
    total.extra_scales += extra("w1_weight_sf", "w2_weight_sf")
    named = (*backend.named_parameters(), *backend.named_buffers())
    total.scalars += sum(tensor.nbytes for name, tensor in named if name.startswith("b12x_"))


def bits_exact(backend: Any, weights: Any, layer: MoELayer) -> bool:
    """Compare what the kernel reads, byte by byte, with the checkpoint."""
    tensors = backend.kernel.weights
    halves = ("w3", "w1") if layer.gated else ("w1",)
    size = layer.intermediate_size // backend.tp_size
    first = size * backend.tp_rank
    for slot, expert in enumerate(backend.initial_local_expert_ids):
        scales1, scales2 = (plain_scales(sf[..., slot : slot + 1])[0] for sf in (tensors.w1_weight_sf, tensors.w2_weight_sf))
        for fc1, fc2, kind, per_column in (
            (tensors.w1_weight[slot], tensors.w2_weight[slot], "weight", 2),
            (scales1.view(torch.uint8), scales2.view(torch.uint8), "weight_scale", 16),
        ):
            for half, rows in zip(halves, fc1.chunk(len(halves)), strict=True):
                if not _holds(rows, weights[f"{expert}.{half}.{kind}"][first : first + size]):
                    return False
            columns = slice(first // per_column, (first + size) // per_column)
            if not _holds(fc2, weights[f"{expert}.w2.{kind}"][:, columns]):
                return False
    return True


def wrong_scalars(backend: Any, weights: Any, layer: MoELayer) -> list[str]:
    """Names of the kernel's per-expert scales that are not the checkpoint's, for any expert: a global error hides small ones."""

    def scales(name: str, kind: str, experts: Sequence[int]) -> torch.Tensor:
        return torch.tensor([float(weights[f"{e}.{name}.{kind}"]) for e in experts], dtype=torch.float64)

    everyone, local = range(layer.num_experts), backend.initial_local_expert_ids
    fc1 = scales("w1", "input_scale", everyone).max()
    fc2 = scales("w2", "input_scale", everyone).max()
    gate = scales("w1", "weight_scale_2", local)
    up = scales("w3", "weight_scale_2", local) if layer.gated else gate
    product = (gate != 0) & (up != 0)
    ratio = torch.where(product, up / gate.where(product, torch.ones_like(gate)), torch.ones_like(gate))
    expected = {
        "input_global_scale": fc1.expand(len(local)),
        "folded_w1_alpha": torch.where(product, gate, torch.zeros_like(gate)) * fc1,
        "fc2_input_scale": fc2 / ratio,
        "w2_alpha": scales("w2", "weight_scale_2", local) * fc2,
    }
    found = backend.kernel.weights.tensors()
    return [n for n, value in expected.items() if not torch.allclose(found[n].double().cpu(), value, rtol=2e-6, atol=1e-45)]


def _holds(padded: torch.Tensor, plain: torch.Tensor) -> bool:
    """``plain`` is the upper left corner of ``padded`` (uint8), and the rest is zero."""
    rows, columns = plain.shape
    corner = padded[:rows, :columns]
    return (
        bool(torch.equal(corner, plain.contiguous().view(torch.uint8).to(padded.device)))
        and not bool(padded[rows:].any())
        and not bool(padded[:, columns:].any())
    )
