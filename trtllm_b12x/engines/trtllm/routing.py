# SPDX-License-Identifier: Apache-2.0
"""Describe how TensorRT-LLM's routing methods turn logits into routes, for layers whose kernel routes by itself.

Source: ``fused_moe/routing.py`` of August 2026. The class identifies a method: classes of one ``RoutingMethodType`` compute
different functions. TensorRT-LLM routes for all others: groups, ``DeepSeekV4`` and ``SqrtSoftplus`` (square root of softplus),
``Llama4`` (no softmax), ``Static``, ``LoadBalanced`` and ``SparseMixer``, and those that model files define (gemma-4, Kimi K3).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

import torch

from trtllm_b12x.formats.geometry import Scoring
from trtllm_b12x.kernels.call import of_logits

METHODS = {
    "DefaultMoeRoutingMethod": Scoring(renormalize=False),
    "RenormalizeMoeRoutingMethod": Scoring(),
    "RenormalizeNaiveMoeRoutingMethod": Scoring(),
    "DeepSeekV3MoeRoutingMethod": Scoring("sigmoid_tanh", bias=True),
    "MiniMaxM2MoeRoutingMethod": Scoring("sigmoid", bias=True),
    "MiniMaxM3MoeRoutingMethod": Scoring("sigmoid_tanh", bias=True),
    "SigmoidRenormMoeRoutingMethod": Scoring("sigmoid"),
}
"""Scoring by class name. ``noaux_tc_op`` of DeepSeekV3 and MiniMaxM3 computes sigmoids with tanh."""


def scoring_of(method: Any) -> Scoring | None:
    """Return the scoring of a routing method, or None if the method is unknown or has groups or 16-bit weights."""
    known = METHODS.get(type(method).__name__)
    separated = getattr(method, "requires_separated_routing", False)
    if known is None or separated or getattr(method, "output_dtype", torch.float32) is not torch.float32:
        return None
    factor = 1.0
    if known.kind == "sigmoid_tanh":  # if a newer version moved an attribute, this raises and TensorRT-LLM routes
        if method.routing_impl.n_group not in (0, 1):
            return None
        factor = float(method.routing_impl.routed_scaling_factor)
    return Scoring(known.kind, bool(getattr(method, "renormalize", known.renormalize)), known.bias, factor)


def takes(scoring: Scoring, logits: torch.Tensor) -> bool:
    """Return whether kernels route logits of this dtype as TensorRT-LLM does, which computes sigmoids in the logits' dtype."""
    return logits.dtype is torch.float32 or (scoring.kind == "softmax" and logits.dtype is torch.bfloat16)


class RoutesItself:
    """Mixin of our layer for calls that come with router logits and without ids."""

    _gets_logits: ClassVar[bool]
    """True if calls carry router logits, as in generations with ``run_moe(ctx)``."""
    _reads_ids: Any
    """Return True if TensorRT-LLM itself may read the ids of a call (``Host.reads_ids``)."""

    def _scoring(self: Any) -> Scoring | None:
        """Return how to route calls that may come without ids, or None if TensorRT-LLM always routes them."""
        deployment, scoring = self._deployment, None
        uneven = self.expert_size_per_partition * self.ep_size != self.num_experts
        if not self._gets_logits or self.apply_router_weight_on_input or self._alltoall or uneven:
            return None
        if deployment.attention_dp or deployment.lora or deployment.load_balancer not in (None, "none"):
            return None
        with suppress(AttributeError):
            scoring = scoring_of(self.routing_method)
        # Sigmoids may differ in their last bits from TensorRT-LLM's, which another rank may use to route the same call.
        alone = self.tp_size * self.ep_size == 1
        return scoring if scoring is None or alone or scoring.kind == "softmax" else None

    def _takes_logits(self: Any) -> bool:
        """Return whether the next call may come with router logits and without ids."""
        try:
            return bool(self.dispatch.schedule.routing) and not self._reads_ids()
        except Exception as error:
            self.dispatch.route_first(error)
        return False

    def _serve_logits(
        self: Any, x: Any, x_sf: Any, swizzled: bool, logits: torch.Tensor, output_dtype: Any, moe_output: Any
    ) -> torch.Tensor | None:
        """Return the output of a kernel that routes by itself, or None if the call has to be routed first."""
        try:
            scoring, dispatch = self.dispatch.scoring, self.dispatch
            if scoring is None or not takes(scoring, logits) or self._is_tuning() or dispatch.should_measure():
                return None
            if hasattr(x, "fp4_tensor"):
                x, x_sf, swizzled = x.fp4_tensor, x.scaling_factor, x.is_sf_swizzled
            if self._kernel_for(x, x_sf) is None:
                return None
            self._follow()
            bias = self.routing_method.e_score_correction_bias if scoring.bias else None
            result: torch.Tensor | None = dispatch.run_logits(
                of_logits(x, logits, bias, x_sf=x_sf, swizzled=swizzled, out=moe_output)
            )
            converts = moe_output is None and output_dtype is not None and result is not None and output_dtype is not result.dtype
            return result.to(output_dtype) if result is not None and converts else result
        except Exception as error:
            self.dispatch.route_first(error)
        return None
