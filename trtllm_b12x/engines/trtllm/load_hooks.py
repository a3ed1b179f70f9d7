# SPDX-License-Identifier: Apache-2.0
"""Adapt ``NVFP4Sm12xFusedMoEMethod`` to the weight loading order of each TensorRT-LLM generation.

In early versions (1.2, early 1.3) every hook writes its parameter, and ``load_quant_scales`` computes alphas at its end.
Later versions stage weights and compute alphas in ``process_weights_after_loading``, after a load, a partial load, or streamed
experts. Our hooks write their input at once, so they may run in any order, for a part of the weights, or repeatedly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_Method: Any = object
"""Stand-in base class for our method and its TensorRT-LLM parent class."""


class DirectWeights(_Method):
    """Mixin for the embedded TensorRT-LLM and generation A, whose hooks write parameters directly."""

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
        local = getattr(module, "tmp_weight_scale_2", None)  # the load balancer passes another dictionary
        pairs = {}
        if module.is_gated_activation and local is not None and tmp_weight_scale_2 is local:
            for slot, scales in local.items():
                if scales.get("w1") is not None and scales.get("w3") is not None:
                    pairs[slot] = scales["w1"][...], scales["w3"][...]
        super()._reconcile_and_compute_alphas(module, tmp_weight_scale_2, *args, **kwargs)
        self.record_weight_scale_2(module, pairs)

    def _interleave_w2_weight_scale(self, dst_w2_weight_scale: torch.Tensor) -> None:
        """Do nothing: our hooks write interleaved scales. TensorRT-LLM would interleave every expert, loaded or not."""


class CachedWeights(StagedWeights):
    """Mixin for C1 and C2, where a weight load ends with two hooks. Another process may run only the second."""

    def finalize_streamed_expert(self, module: Any, local_slot_id: int) -> None:
        """Do nothing, because nothing is staged."""

    def transform_weights(self, module: Any) -> None:
        if hasattr(module, "tmp_raw_input_scales"):  # a load in groups may end without process_weights_after_loading
            self.process_weights_after_loading(module)
        super().transform_weights(module)
