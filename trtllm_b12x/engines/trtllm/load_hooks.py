"""Adapt ``NVFP4Sm12xFusedMoEMethod`` to when each generation of TensorRT-LLM loads what.

Early hosts (1.2, early 1.3) let every hook write its parameter and compute their alphas at the end of ``load_quant_scales``.
Later ones stage: they compute alphas in ``process_weights_after_loading``, after a load, a partial load, or streamed experts. We
stage nothing. Each hook writes what it gets, so any order, part and repetition is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_Method: Any = object
"""Our method and the host's, as the mixins see them."""


class DirectWeights(_Method):
    """The embedded host and generation A."""

    def load_quant_scales(self, module: Any, weights: Any) -> None:
        super().load_quant_scales(module, weights)
        # Other loading modes have one scale for both halves.
        pairs = {}
        for slot, expert in enumerate(module.initial_local_expert_ids if module.is_gated_activation else ()):
            names = [f"{expert}.{half}.weight_scale_2" for half in ("w1", "w3")]
            if all(name in weights for name in names):
                pairs[slot] = weights[names[0]][...], weights[names[1]][...]
        self.record_weight_scale_2(module, pairs)


class StagedWeights(_Method):
    def _reconcile_and_compute_alphas(self, module: Any, tmp_weight_scale_2: Any, *args: Any, **kwargs: Any) -> None:
        local = getattr(module, "tmp_weight_scale_2", None)  # the other dictionary is the load balancer's
        pairs = {}
        if module.is_gated_activation and local is not None and tmp_weight_scale_2 is local:
            for slot, scales in local.items():
                if scales.get("w1") is not None and scales.get("w3") is not None:
                    pairs[slot] = scales["w1"][...], scales["w3"][...]
        super()._reconcile_and_compute_alphas(module, tmp_weight_scale_2, *args, **kwargs)
        self.record_weight_scale_2(module, pairs)

    def _interleave_w2_weight_scale(self, dst_w2_weight_scale: torch.Tensor) -> None:
        """Done already, when the scales were written: the host would do it to every expert, loaded or not."""


class CachedWeights(StagedWeights):
    """Generations C1 and C2: the end of a load is two hooks, of which another process may run the second alone."""

    def finalize_streamed_expert(self, module: Any, local_slot_id: int) -> None:
        """Nothing is staged."""

    def transform_weights(self, module: Any) -> None:
        if hasattr(module, "tmp_raw_input_scales"):  # a load in groups may end without it
            self.process_weights_after_loading(module)
        super().transform_weights(module)
