"""``NVFP4Sm12xFusedMoEMethod``: the host's NVFP4 parameters, created on the kernel's tile, and the kernel's view of them."""

from __future__ import annotations

from typing import Any

import torch

from . import host as _host
from .kernels import KernelWeights
from .kernels.layout import mma_scale_view

host = _host.load()


class NVFP4Sm12xFusedMoEMethod(host.NVFP4CutlassFusedMoEMethod):  # type: ignore[name-defined]
    """One set of tensors for CUTLASS and b12x.

    The parameters are the host's own (names, dtypes, meaning, 128x4-interleaved scales).  Only their intermediate
    dimension differs: w3, w1 and w2's columns are each padded with zeros to ``tile``, so that half of the rows is
    the border between up and gate for every reader.  With E local experts, T = round_up(I, tile) and r = 2 if gated:
    ``w3_w1_weight (E, r*T, H/16)`` int64, ``w2_weight (E, H, T/16)`` int64, ``w3_w1_weight_scale (E, r*T, H/64)`` and
    ``w2_weight_scale (E, H, T/64)`` int32.  The host's CUTLASS operator takes the sizes from the tensors
    (``moeOp.cpp``), so it accepts them as they are.

    What the kernel needs beyond views of these is the input scales as divisors, kept in buffers of the module for its
    whole life and rewritten in place: ``b12x_input_global_scale (1,)`` and ``b12x_fc2_input_scale (E,)``, float32; with
    ``b12x_up_to_gate (E,)``, which is ours alone, 8 bytes per expert and 4 per layer.
    """

    def __init__(self, tile: int) -> None:
        super().__init__()
        self.tile = tile

    def create_weights(self, module: Any) -> None:
        logical = module.intermediate_size_per_partition
        module.intermediate_size_per_partition = -(-logical // self.tile) * self.tile
        try:
            super().create_weights(module)
        finally:
            module.intermediate_size_per_partition = logical
        scalars = {
            "b12x_input_global_scale": 1,
            "b12x_fc2_input_scale": module.expert_size_per_partition,
            # Ratio of up's to gate's weight_scale_2; not a kernel argument.
            "b12x_up_to_gate": module.expert_size_per_partition,
        }
        for name, size in scalars.items():
            module.register_buffer(name, torch.ones(size, dtype=torch.float32), persistent=False)

    # ---- loading, one expert at a time -------------------------------------------------------------------------------

    def load_expert_w3_w1_weight(
        self, module: Any, w1_weight: torch.Tensor, w3_weight: torch.Tensor | None, dst_w3_w1_weight: torch.Tensor
    ) -> None:
        """Rows of this rank, each half at the start of its own tile-aligned half of ``dst (r*T, H/16)`` int64."""
        destination = dst_w3_w1_weight.view(torch.uint8)
        destination.zero_()
        halves = [half for half in (w3_weight, w1_weight) if half is not None]
        for index, half in enumerate(halves):
            shard = self._shard(module, half, host.TensorParallelMode.COLUMN, destination.device)
            start = index * destination.shape[0] // len(halves)
            destination[start : start + shard.shape[0]].copy_(shard)

    def load_expert_w2_weight(self, module: Any, w2_weight: torch.Tensor, dst_w2_weight: torch.Tensor) -> None:
        """Columns of this rank at the start of ``dst (H, T/16)`` int64."""
        destination = dst_w2_weight.view(torch.uint8)
        destination.zero_()
        shard = self._shard(module, w2_weight, host.TensorParallelMode.ROW, destination.device)
        destination[:, : shard.shape[1]].copy_(shard)

    def load_expert_w3_w1_weight_scale_nvfp4(
        self,
        module: Any,
        w1_weight_scale: torch.Tensor,
        w3_weight_scale: torch.Tensor | None,
        dst_w3_w1_weight_scale: torch.Tensor,
    ) -> None:
        # Scales have the weights' rows: placed alike, then interleaved.
        self.load_expert_w3_w1_weight(module, w1_weight_scale, w3_weight_scale, dst_w3_w1_weight_scale)
        _interleave(dst_w3_w1_weight_scale)

    def load_expert_w2_weight_scale_nvfp4(
        self, module: Any, w2_weight_scale: torch.Tensor, dst_w2_weight_scale: torch.Tensor
    ) -> None:
        self.load_expert_w2_weight(module, w2_weight_scale, dst_w2_weight_scale)
        _interleave(dst_w2_weight_scale)

    @staticmethod
    def _shard(module: Any, tensor: torch.Tensor, mode: Any, device: torch.device) -> torch.Tensor:
        """This rank's slice as bytes.  On integrated GPUs the host leaves it on the CPU, whatever ``device`` says."""
        shard = host.load_weight_shard(tensor, module.tp_size, module.tp_rank, mode, device)
        return shard.contiguous().view(torch.uint8)

    # ---- scalars -----------------------------------------------------------------------------------------------------

    def load_quant_scales(self, module: Any, weights: Any) -> None:
        """The host's scales, exact also where w1 and w3 carry different ``weight_scale_2``.

        The host keeps the larger of the two for both halves.  FC1 has one alpha per expert, but up enters SwiGLU
        linearly: gate's scale goes into ``fc31_alpha``, and the ratio u = up / gate into the quantization of the
        product, which is smaller by u and is divided by a scale smaller by u.  Codes and ``fc2_alpha`` stay the same.
        """
        super().load_quant_scales(module, weights)
        if not module.is_gated_activation:
            return
        for slot, expert in enumerate(module.initial_local_expert_ids):
            gate, up = (float(weights[f"{expert}.{w}.weight_scale_2"][...].reshape(())) for w in ("w1", "w3"))
            zero = 0.0 in (gate, up)  # then so is the product
            module.b12x_up_to_gate[slot] = 1.0 if gate == up or zero else up / gate
            if gate != up:
                module.fc31_alpha.data[slot] = 0.0 if zero else gate / module.fc31_input_scale.data

    def setup_quant_scales(self, module: Any) -> None:
        super().setup_quant_scales(module)
        ratio = getattr(module, "b12x_up_to_gate", None)  # the host calls this in create_weights too
        if ratio is not None and bool((ratio != 1).any()):
            per_expert = module.fc2_input_scale.data * ratio
            module.quant_scales = module.quant_scales._replace(fc2_act_global=per_expert)

    def post_load_weights(self, module: Any) -> None:
        super().post_load_weights(module)
        self.update_scalars(module)

    def update_scalars(self, module: Any) -> None:
        """Input scales from the host's parameters, in place.

        FlashInfer divides activations by them (the checkpoint's ``input_scale``), the host multiplies by their
        reciprocals.  The host's alphas, ``weight_scale_2 * input_scale``, are the kernels' own.  A refit that copies over
        parameters without the host's hooks is followed in everything but calibrated input scales: those need this.
        """
        module.b12x_input_global_scale.copy_(module.fc31_input_scale.data.reciprocal())
        module.b12x_fc2_input_scale.copy_(module.fc2_input_scale.data.reciprocal() / module.b12x_up_to_gate)

    def kernel_weights(self, module: Any) -> KernelWeights:
        """The kernel's arguments as views of the module's storage; keep the returned object alive with the module."""
        w1 = module.w3_w1_weight.data.view(torch.uint8)
        w2 = module.w2_weight.data.view(torch.uint8)
        return KernelWeights(
            w1_weight=w1,
            w1_weight_sf=mma_scale_view(module.w3_w1_weight_scale.data, rows=w1.shape[1], columns=2 * w1.shape[2]),
            folded_w1_alpha=module.fc31_alpha.data,
            w2_weight=w2,
            w2_weight_sf=mma_scale_view(module.w2_weight_scale.data, rows=w2.shape[1], columns=2 * w2.shape[2]),
            w2_alpha=module.fc2_alpha.data,
            fc2_input_scale=module.b12x_fc2_input_scale,
            input_global_scale=module.b12x_input_global_scale,
        )


def _interleave(block_scales: torch.Tensor) -> None:
    """Row-major bytes to the 128x4 layout, in place; ``(rows, columns/4)`` int32, rows % 128 == 0."""
    interleaved = host.block_scale_interleave(block_scales.view(torch.uint8))
    block_scales.copy_(interleaved.view(block_scales.dtype).reshape(block_scales.shape))
