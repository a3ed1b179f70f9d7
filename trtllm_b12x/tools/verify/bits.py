"""Compare the weights that a kernel reads with the checkpoint's, byte by byte."""

from __future__ import annotations

from typing import Any

import torch

from trtllm_b12x.tools.checkpoint import LayerWeights, MoELayer

from .reference import reference_for
from .report import BytesReport


def zero_matrices(weights: LayerWeights, layer: MoELayer) -> list[str]:
    """Return the names of expert matrices whose codes or scales are all zero: no input reaches their output."""
    kinds = set(layer.kinds) - {"input_scale", "bias"}
    return [
        f"expert {expert} {name}"
        for expert in range(layer.num_experts)
        for projection, name in layer.projections.items()
        if not all(bool(weights[f"{expert}.{projection}.{kind}"].reshape(-1).view(torch.uint8).any()) for kind in kinds)
    ]


def count_bytes(backend: Any, total: BytesReport) -> None:
    parameters = {p.untyped_storage().data_ptr() for p in backend.parameters()}
    weights, tensors = backend.kernel.weights, backend.kernel.weights.tensors()
    read = [tensors[name] for name in weights.stored_fields]
    total.padding += sum(getattr(backend, name).nbytes for name in backend.quant_method.stored)
    total.extra += sum(tensor.nbytes for tensor in read if tensor.untyped_storage().data_ptr() not in parameters)
    total.scalars += backend.quant_method.scalar_bytes(backend)


def bits_exact(backend: Any, weights: LayerWeights, layer: MoELayer) -> bool:
    """Return whether the kernel reads the checkpoint's codes and block scales, and zeros in the padding."""
    tensors = backend.kernel.weights
    halves = ("w3", "w1") if layer.gated else ("w1",)
    first, last = _part(backend, layer)
    for slot, expert in enumerate(backend.initial_local_expert_ids):
        for kind, (fc1, fc2) in tensors.stored(slot).items():
            for half, rows in zip(halves, fc1.chunk(len(halves)), strict=True):
                if not _holds(rows, weights[f"{expert}.{half}.{kind}"][first:last]):
                    return False
            down = weights[f"{expert}.w2.{kind}"]
            per_column = layer.intermediate_size // down.shape[1]
            if not _holds(fc2, down[:, first // per_column : last // per_column]):
                return False
    return True


def _part(backend: Any, layer: MoELayer) -> tuple[int, int]:
    """Return the first and the last of the layer's intermediate columns that this rank holds.

    Most methods cut the layer's size for tensor parallelism and pad each part, MXFP4's pads the whole and cuts that.
    """
    from trtllm_b12x.engines.trtllm.quantization import PaddedMethod

    size = layer.intermediate_size // backend.tp_size
    if not isinstance(backend.quant_method, PaddedMethod):
        size = backend.quant_method.intermediate_size(backend)
    first = min(size * backend.tp_rank, layer.intermediate_size)
    return first, min(first + size, layer.intermediate_size)


def wrong_scalars(backend: Any, weights: LayerWeights, layer: MoELayer) -> list[str]:
    """Return the names of the kernel's per-expert scales that differ from the checkpoint's for any expert."""
    dequantizer = reference_for(weights, layer.num_experts, layer.gated, layer.quant_algo)
    expected = dequantizer.scalars(backend.initial_local_expert_ids)
    actual = {name: tensor.double().cpu() for name, tensor in backend.kernel.weights.tensors().items() if name in expected}
    return [name for name, value in expected.items() if not torch.allclose(actual[name], value, rtol=3e-5, atol=1e-45)]


def _holds(padded: torch.Tensor, plain: torch.Tensor) -> bool:
    """Return whether ``padded`` (uint8) has ``plain`` in its upper left corner and zeros elsewhere."""
    expected = torch.zeros_like(padded)
    expected[: plain.shape[0], : plain.shape[1]] = plain.contiguous().view(torch.uint8)
    return torch.equal(padded, expected)
