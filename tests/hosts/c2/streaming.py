"""What C2 adds to the staged loading of C1: experts that arrive one by one, w1 alone where there is no gate, MXFP8's scales."""

from __future__ import annotations

from typing import Any

import torch

from .quantization import MXFP8CutlassFusedMoEMethod, NVFP4CutlassFusedMoEMethod, NVFP4FusedMoEMethod, _named

_STAGED = ("tmp_cutlass_w3_w1_weights", "tmp_cutlass_w3_w1_weight_scales")


def prepare_streaming_expert_load(self: Any, module: Any) -> None:
    module.tmp_raw_input_scales, module.tmp_weight_scale_2 = {}, {}
    module._streamed_expert_slots = set()
    for name in _STAGED:
        setattr(module, name, {})


def load_streaming_nvfp4_expert(
    self: Any,
    module: Any,
    *,
    global_expert_id: int,
    local_slot_id: int,
    w1_weight: torch.Tensor,
    w1_weight_scale: torch.Tensor,
    w1_weight_scale_2: torch.Tensor,
    w1_input_scale: torch.Tensor,
    w2_weight: torch.Tensor,
    w2_weight_scale: torch.Tensor,
    w2_weight_scale_2: torch.Tensor,
    w2_input_scale: torch.Tensor,
    w3_weight: torch.Tensor,
    w3_weight_scale: torch.Tensor,
    w3_weight_scale_2: torch.Tensor,
    w3_input_scale: torch.Tensor,
) -> None:
    """Several threads call it; ``allow_partial_loading`` is never passed."""
    slot = local_slot_id
    if not 0 <= slot < module.expert_size_per_partition:
        raise IndexError(f"slot {slot} is not on this rank")
    if global_expert_id != module.initial_local_expert_ids[slot]:
        raise ValueError(f"slot {slot} holds expert {module.initial_local_expert_ids[slot]}, not {global_expert_id}")
    if not hasattr(module, "_streamed_expert_slots"):
        raise RuntimeError("prepare_streaming_expert_load comes first")
    if slot in module._streamed_expert_slots:
        raise ValueError(f"slot {slot} is loaded already")
    if any(weight.dtype is not torch.uint8 for weight in (w1_weight, w2_weight, w3_weight)):
        raise TypeError("NVFP4 weights are uint8")
    hook = self.load_expert_w3_w1_weight
    hook(module, w1_weight, w3_weight, module.w3_w1_weight.data[slot], **_named(hook, expert_idx=slot))
    self.load_expert_w2_weight(module, w2_weight, module.w2_weight.data[slot])
    hook = self.load_expert_w3_w1_weight_scale_nvfp4
    hook(module, w1_weight_scale, w3_weight_scale, module.w3_w1_weight_scale.data[slot], **_named(hook, expert_idx=slot))
    self.load_expert_w2_weight_scale_nvfp4(module, w2_weight_scale, module.w2_weight_scale.data[slot])
    module.tmp_weight_scale_2[slot] = {"w1": w1_weight_scale_2, "w3": w3_weight_scale_2, "w2": w2_weight_scale_2}
    scales = {"w1": w1_input_scale, "w3": w3_input_scale, "w2": w2_input_scale}
    module.tmp_raw_input_scales[global_expert_id] = {half: scale.reshape([]) for half, scale in scales.items()}
    self.finalize_streamed_expert(module, slot)
    module._weights_loaded = True
    module._streamed_expert_slots.add(slot)


def finalize_streamed_expert(self: Any, module: Any, local_slot_id: int) -> None:
    """What is staged of a slot goes to its place at once."""
    for name in _STAGED:
        staged = getattr(module, name)
        for key in [key for key in list(staged) if key[1] == local_slot_id]:
            entry = staged.pop(key)
            if self._resolve_staged(entry) and name == _STAGED[1]:
                self._interleave_w3_w1_weight_scale(entry["dst"])


def _resolve_staged(self: Any, entry: dict[str, torch.Tensor]) -> bool:
    """Both halves, or w1 alone from the top, whatever lies below it; w3 alone is dropped."""
    if "w1" not in entry:
        return False
    joined = torch.cat([entry["w3"], entry["w1"]]) if "w3" in entry else entry["w1"]
    entry["dst"].copy_(self._maybe_padding_shape(joined, entry["dst"]))
    return True


def process_weights_after_loading(self: Any, module: Any) -> None:
    """MXFP8 since September 2026: what ``load_quant_scales`` staged is interleaved once, at the end of partial loads too."""
    if module._mxfp8_w3_w1_sf_pending_slots or module._mxfp8_w2_sf_pending_slots:
        raise NotImplementedError("of SM100 alone")


for _owner, _method in (
    (MXFP8CutlassFusedMoEMethod, process_weights_after_loading),
    (NVFP4FusedMoEMethod, load_streaming_nvfp4_expert),
    (NVFP4CutlassFusedMoEMethod, prepare_streaming_expert_load),
    (NVFP4CutlassFusedMoEMethod, finalize_streamed_expert),
    (NVFP4CutlassFusedMoEMethod, _resolve_staged),
):
    setattr(_owner, _method.__name__, _method)
