"""``NVFP4Sm12xFusedMoEMethod``: the host's NVFP4 parameters, created on the kernel's tile, and the kernel's view of them."""

from __future__ import annotations

from typing import Any

import torch

from . import host as _host
from .kernels import KernelWeights
from .kernels.layout import mma_scale_view

host = _host.load()


class NVFP4Sm12xFusedMoEMethod(host.Weights, host.NVFP4CutlassFusedMoEMethod):  # type: ignore[name-defined]
    """One set of tensors for CUTLASS and b12x.

    The parameters are the host's own (names, dtypes, meaning, 128x4-interleaved scales).  Only their intermediate
    dimension differs: w3, w1 and w2's columns are each padded with zeros to ``tile``, so that half of the rows is
    the border between up and gate for every reader.  With E local experts, T = round_up(I, tile) and r = 2 if gated:
    ``w3_w1_weight (E, r*T, H/16)`` int64, ``w2_weight (E, H, T/16)`` int64, ``w3_w1_weight_scale (E, r*T, H/64)`` and
    ``w2_weight_scale (E, H, T/64)`` int32.  The host's CUTLASS operator takes the sizes from the tensors
    (``moeOp.cpp``), so it accepts them as they are.

    What the kernel needs beyond views of these is the input scales as divisors, kept in buffers of the module for its
    whole life and rewritten in place: ``b12x_input_global_scale`` and ``b12x_fc2_input_scale``, both ``(E,)`` float32.

    One parameter is ours: ``b12x_up_to_gate (E,)`` float32, up's ``weight_scale_2`` over gate's, nearly always 1.  The host
    keeps the larger of the two for both halves.  FC1 has one alpha per expert, but up enters SwiGLU linearly: gate's
    scale goes into ``fc31_alpha``, and the ratio u into the quantization of the product, which comes out smaller by u and
    is divided by a scale smaller by u.  Codes and ``fc2_alpha`` stay what they were, for b12x and for CUTLASS
    (``b12x_fc2_act_global (E,)``, read only then).
    """

    def __init__(self, tile: int) -> None:
        super().__init__()
        self.tile = tile
        self._gate_and_up: dict[int, tuple[float, float]] = {}
        self.ratios_are_set = False
        """``b12x_up_to_gate`` holds numbers: a model built on meta tensors has to be given them."""

    def create_weights(self, module: Any) -> None:
        logical = module.intermediate_size_per_partition
        module.intermediate_size_per_partition = -(-logical // self.tile) * self.tile
        try:
            super().create_weights(module)
        finally:
            module.intermediate_size_per_partition = logical
        experts = module.expert_size_per_partition
        ratio = torch.nn.Parameter(torch.ones(experts, dtype=torch.float32), requires_grad=False)
        module.register_parameter("b12x_up_to_gate", ratio)
        for name in ("b12x_input_global_scale", "b12x_fc2_input_scale", "b12x_fc2_act_global"):
            module.register_buffer(name, torch.ones(experts, dtype=torch.float32), persistent=False)

    # ---- loading, one expert at a time -------------------------------------------------------------------------------

    # The host looks at the names of these arguments (``inspect.getfullargspec``) before it passes the last two.

    def load_expert_w3_w1_weight(
        self,
        module: Any,
        w1_weight: torch.Tensor | None,
        w3_weight: torch.Tensor | None,
        dst_w3_w1_weight: torch.Tensor,
        allow_partial_loading: bool = False,
        expert_idx: int = -1,
    ) -> None:
        """Rows of this rank, each half at the start of its own tile-aligned half of ``dst (r*T, H/16)`` int64.

        Without a gate there is w1 alone, whatever comes as w3: hosts pass None or a tensor without rows.  A half that is None
        stays what it was (partial loading).
        """
        halves = (w3_weight, w1_weight) if module.is_gated_activation else (w1_weight,)
        for half, destination in zip(halves, dst_w3_w1_weight.view(torch.uint8).chunk(len(halves)), strict=True):
            if half is not None:
                shard = self._shard(module, half, host.TensorParallelMode.COLUMN, destination.device)
                destination.zero_()
                destination[: shard.shape[0]].copy_(shard)

    def load_expert_w2_weight(
        self,
        module: Any,
        w2_weight: torch.Tensor | None,
        dst_w2_weight: torch.Tensor,
        allow_partial_loading: bool = False,
    ) -> None:
        """Columns of this rank at the start of ``dst (H, T/16)`` int64."""
        if w2_weight is None:
            return
        destination = dst_w2_weight.view(torch.uint8)
        destination.zero_()
        shard = self._shard(module, w2_weight, host.TensorParallelMode.ROW, destination.device)
        destination[:, : shard.shape[1]].copy_(shard)

    def load_expert_w3_w1_weight_scale_nvfp4(
        self,
        module: Any,
        w1_weight_scale: torch.Tensor | None,
        w3_weight_scale: torch.Tensor | None,
        dst_w3_w1_weight_scale: torch.Tensor,
        expert_idx: int = -1,
    ) -> None:
        """Scales have the weights' rows, so they are placed alike, then interleaved.

        The 128x4 layout permutes bytes within 128 rows, and each half is a multiple of that: a half is written by itself.
        """
        halves = (w3_weight_scale, w1_weight_scale) if module.is_gated_activation else (w1_weight_scale,)
        destinations = dst_w3_w1_weight_scale.view(torch.uint8).chunk(len(halves))
        for half, destination in zip(halves, destinations, strict=True):
            if half is not None:
                shard = self._shard(module, half, host.TensorParallelMode.COLUMN, destination.device)
                destination.zero_()
                destination[: shard.shape[0]].copy_(shard)
                _interleave(destination)

    def load_expert_w2_weight_scale_nvfp4(
        self, module: Any, w2_weight_scale: torch.Tensor | None, dst_w2_weight_scale: torch.Tensor
    ) -> None:
        if w2_weight_scale is not None:
            self.load_expert_w2_weight(module, w2_weight_scale, dst_w2_weight_scale)
            _interleave(dst_w2_weight_scale)

    @staticmethod
    def _shard(module: Any, tensor: torch.Tensor, mode: Any, device: torch.device) -> torch.Tensor:
        """This rank's slice as bytes.  On integrated GPUs the host leaves it on the CPU, whatever ``device`` says."""
        shard = host.load_weight_shard(tensor, module.tp_size, module.tp_rank, mode, device)
        return shard.contiguous().view(torch.uint8)

    # ---- scalars -----------------------------------------------------------------------------------------------------

    def remember(self, module: Any, slot: int, gate: torch.Tensor, up: torch.Tensor) -> None:
        """``weight_scale_2`` of one local expert as the checkpoint has them; the host keeps the larger of the two."""
        self._gate_and_up[slot] = (float(gate.reshape(())), float(up.reshape(())))  # no reference to the loader's buffers

    def before_quant_scales(self, module: Any) -> None:
        """gate's scale into FC1's alpha, once the host has made its alphas, and up's over gate's into ``b12x_up_to_gate``."""
        loaded, self._gate_and_up = self._gate_and_up, {}
        if module.b12x_up_to_gate.is_meta:
            return
        if not self.ratios_are_set:  # what a model built on meta tensors gets is not even zeros
            module.b12x_up_to_gate.data.fill_(1)
            self.ratios_are_set = True
        for slot, (gate, up) in loaded.items():
            zero = gate == 0 or up == 0  # then so is the product
            module.b12x_up_to_gate.data[slot] = 1.0 if gate == up or zero else up / gate
            if gate != up:
                module.fc31_alpha.data[slot] = 0.0 if zero else gate / module.fc31_input_scale.data

    def refresh(self, module: Any) -> None:
        """All that is derived from what was loaded; repeatable."""
        self.before_quant_scales(module)
        self.setup_quant_scales(module)
        self.after_quant_scales(module)

    def after_quant_scales(self, module: Any) -> None:
        if not module.b12x_up_to_gate.is_meta:
            self.update_scalars(module)

    def setup_quant_scales(self, module: Any) -> None:
        super().setup_quant_scales(module)
        ratio = getattr(module, "b12x_up_to_gate", None)  # the host calls this in create_weights too
        if ratio is not None and not ratio.is_meta and self.ratios_are_set and bool((ratio.data != 1).any()):
            module.b12x_fc2_act_global.copy_(module.fc2_input_scale.data * ratio.data)
            module.quant_scales = module.quant_scales._replace(fc2_act_global=module.b12x_fc2_act_global)

    def update_scalars(self, module: Any) -> None:
        """Input scales from the host's parameters, in place.

        FlashInfer divides activations by them (the checkpoint's ``input_scale``), the host multiplies by their
        reciprocals.  The host's alphas, ``weight_scale_2 * input_scale``, are the kernels' own.  A refit that copies over
        parameters without the host's hooks is followed in weights, block scales and alphas; calibrated input scales and
        ``b12x_up_to_gate`` take effect at the next of those hooks.
        """
        module.b12x_input_global_scale.copy_(module.fc31_input_scale.data.reciprocal())
        module.b12x_fc2_input_scale.copy_(module.fc2_input_scale.data.reciprocal() / module.b12x_up_to_gate.data)

    def padding_bytes(self, module: Any) -> int:
        """Zeros in payload and block scales that fill the tile, on this rank."""
        logical = module.intermediate_size_per_partition
        tile = -(-logical // self.tile) * self.tile
        names = ("w3_w1_weight", "w2_weight", "w3_w1_weight_scale", "w2_weight_scale")
        total = sum(getattr(module, name).data.nbytes for name in names)
        return total * (tile - logical) // tile

    def scalar_bytes(self, module: Any) -> int:
        """What this method adds to the host's parameters."""
        names = ("b12x_up_to_gate", "b12x_input_global_scale", "b12x_fc2_input_scale", "b12x_fc2_act_global")
        return sum(int(getattr(module, name).nbytes) for name in names)

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
