# SPDX-License-Identifier: Apache-2.0
"""Tensors of one expert as the quantization methods of every generation read them, by the layer's loading mode."""

from trtllm_b12x.engines.trtllm.embedded.config import MoEWeightLoadingMode


def of_expert(module, weights, expert, kind):
    """What there is of w1, w3 and w2."""
    if module.weight_loading_mode is MoEWeightLoadingMode.FUSED_GATE_UP_PROJ:
        return _of_fused(weights, expert, "" if kind == "weight" else f"_{kind}")
    if module.weight_loading_mode is not MoEWeightLoadingMode.VANILLA:
        raise NotImplementedError(f"the double loads per-expert and fused tensors, not {module.weight_loading_mode}")
    names = {half: f"{expert}.{half}.{kind}" for half in ("w1", "w3", "w2")}
    return {half: weights[name] for half, name in names.items() if name in weights}


def _of_fused(weights, expert, suffix):
    """All experts in one tensor, gate before up, matrices transposed; one scalar for all."""
    found = {}
    if (gate_up := weights.get(f"gate_up_proj{suffix}")) is not None:
        halves = (gate_up, gate_up) if gate_up.dim() < 3 else gate_up[expert].transpose(0, 1).chunk(2, dim=0)
        found.update(zip(("w1", "w3"), halves, strict=True))
    if (down := weights.get(f"down_proj{suffix}")) is not None:
        found["w2"] = down if down.dim() < 3 else down[expert].transpose(0, 1).contiguous()
    return found
