"""What can be told without computing: the bits that the kernel reads, and what the checkpoint's codes say of themselves."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from trtllm_b12x.checkpoint import Checkpoint, MoELayer, kinds
from trtllm_b12x.strict_reference import judge

from .report import BytesReport, LayerReport

_FULL = 0.999
"""Max calibration leaves a full code in every block that tells (:class:`trtllm_b12x.checkpoint.kinds.Blocks`)."""

_HOLES, _NO_HOLES = 0.1, 0.001
"""Share of zero blocks in a matrix that is damage, where half of the layer's matrices have less than the other: a shard whose
download broke off has pages of zeros.  Padding, pruned rows and dead channels are in all of them."""


def examine_codes(checkpoint: Checkpoint, layer: MoELayer, report: LayerReport) -> None:
    """Expert matrices that say nothing (all zero), and such whose codes no max calibration wrote."""
    kind = kinds.of(layer.quant_algo)
    if not kind.full_code:
        return
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
            f"{_listed(short)} of the blocks hold {kind.full_code}, all others in this checkpoint 100 % "
            f"({kind.damaged}): these weights were damaged"
        )
    if not by_max and report.full_blocks is not None:
        if _evenly_spread(checkpoint, layer):
            report.failures.append("all codes are equally frequent, as in random bytes: these are no weights")
        else:
            report.notes.append(
                f"{100 * report.full_blocks:.0f} % of the blocks hold {kind.full_code}: not calibrated by max (100 %), "
                "so the codes do not tell damage; --original does"
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _calibrated_by_max(checkpoint: Checkpoint) -> bool:
    """Some matrix of the checkpoint has a full code in every block: by chance none has."""
    for layer in checkpoint.layers:
        if kinds.of(layer.quant_algo).full_code and not layer.pre_quant_scale:
            for matrix in _matrices(checkpoint, layer, sorted({0, layer.num_experts - 1})):
                if matrix.counted >= 64 and matrix.full >= _FULL * matrix.counted:
                    return True
    return False


class _Matrix(NamedTuple):
    name: str
    counted: int
    """See :class:`trtllm_b12x.checkpoint.kinds.Blocks`."""
    full: int
    empty: float


def _matrices(checkpoint: Checkpoint, layer: MoELayer, experts: Sequence[int]) -> Iterator[_Matrix]:
    weights, kind = checkpoint.weights(layer), kinds.of(layer.quant_algo)
    for expert in experts:
        for projection in layer.projections:
            prefix = f"{expert}.{projection}."
            blocks = kind.blocks(lambda tensor, prefix=prefix: weights[prefix + tensor])  # type: ignore[misc]
            yield _Matrix(f"expert {expert} {layer.projections[projection]}", *blocks)


def _evenly_spread(checkpoint: Checkpoint, layer: MoELayer) -> bool:
    weights, kind = checkpoint.weights(layer), kinds.of(layer.quant_algo)
    return all(kind.evenly_spread(weights[f"0.{projection}.weight"]) for projection in layer.projections)


def count_bytes(backend: Any, total: BytesReport) -> None:
    """Add one rank's bytes."""
    own = {p.untyped_storage().data_ptr() for p in backend.parameters()}
    weights, tensors = backend.kernel.weights, backend.kernel.weights.tensors()

    def extra(names: Sequence[str]) -> int:
        return sum(tensors[n].nbytes for n in names if tensors[n].untyped_storage().data_ptr() not in own)

    total.padding += sum(getattr(backend, name).nbytes for name in backend.quant_method.stored)
    total.extra_payload += extra(weights.payload)
    total.extra_scales += extra(weights.block_scales)
    total.scalars += backend.quant_method.scalar_bytes(backend)


def bits_exact(backend: Any, weights: Any, layer: MoELayer) -> bool:
    """Compare what the kernel reads, byte by byte, with the checkpoint."""
    tensors = backend.kernel.weights
    halves = ("w3", "w1") if layer.gated else ("w1",)
    size = layer.intermediate_size // backend.tp_size
    first = size * backend.tp_rank
    for slot, expert in enumerate(backend.initial_local_expert_ids):
        for kind, (fc1, fc2) in tensors.stored(slot).items():
            for half, rows in zip(halves, fc1.chunk(len(halves)), strict=True):
                if not _holds(rows, weights[f"{expert}.{half}.{kind}"][first : first + size]):
                    return False
            down = weights[f"{expert}.w2.{kind}"]
            per_column = layer.intermediate_size // down.shape[1]
            if not _holds(fc2, down[:, first // per_column : (first + size) // per_column]):
                return False
    return True


def wrong_scalars(backend: Any, weights: Any, layer: MoELayer) -> list[str]:
    """Names of the kernel's per-expert scales that are not the checkpoint's, for any expert: a global error hides small ones."""
    expected = judge(weights, layer.num_experts, layer.gated, layer.quant_algo).scalars(backend.initial_local_expert_ids)
    found = backend.kernel.weights.tensors()
    return [n for n, value in expected.items() if not torch.allclose(found[n].double().cpu(), value, rtol=3e-5, atol=1e-45)]


def _holds(padded: torch.Tensor, plain: torch.Tensor) -> bool:
    """``plain`` is the upper left corner of ``padded`` (uint8), and the rest is zero."""
    rows, columns = plain.shape
    corner = padded[:rows, :columns]
    return (
        bool(torch.equal(corner, plain.contiguous().view(torch.uint8).to(padded.device)))
        and not bool(padded[rows:].any())
        and not bool(padded[:, columns:].any())
    )
