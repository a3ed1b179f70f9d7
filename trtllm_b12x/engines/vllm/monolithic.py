# SPDX-License-Identifier: Apache-2.0
"""Experts of vLLM's monolithic contract, which take router logits and route by themselves.

vLLM uses one class per layer, so this class serves every call. ``cuda`` takes the logits of the calls that it serves. vLLM's own
router routes the other calls, which run through vLLM's modular kernel, as without this class.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar

import torch
import vllm.envs as envs
import vllm.forward_context as forward_context
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import make_moe_prepare_and_finalize_no_dp_ep
from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router

from trtllm_b12x.formats.geometry import Scoring

from .experts import Sm12xExperts
from .facts import Slot

SCORINGS = {
    "Default": Scoring("softmax", renormalize=False),
    "Renormalize": Scoring("softmax"),
    "RenormalizeNaive": Scoring("softmax"),
    "SigmoidRenorm": Scoring("sigmoid"),
    "Sigmoid": Scoring("sigmoid", renormalize=False),
    "MiniMax2": Scoring("sigmoid", bias=True),
    "DeepSeekV3": Scoring("sigmoid_tanh", bias=True),
}
"""Scoring of vLLM's operators on CUDA by name of ``RoutingMethodType`` (0.28 and 0.33): ``topk_softmax``, ``topk_sigmoid``,
``grouped_topk``. The name does not show groups or factors."""
_LOGITS = torch.bfloat16, torch.float32


def scoring_of(config: Any, layer: Any) -> Scoring | None:
    """Return how a layer routes; None if its logits are not available or its routing is unknown.

    ``layer`` is vLLM's RoutedExperts. Our sigmoids may differ in their last bits from those of vLLM's operators, which another
    rank may use at the same count, so sigmoid scoring needs a single rank.
    """
    parallel, dtype = config.moe_parallel_config, getattr(config, "router_logits_dtype", None)
    if parallel.dp_size > 1 or parallel.pcp_size > 1 or parallel.use_all2all_kernels or parallel.is_sequence_parallel:
        return None  # logits would have to travel between ranks
    adjusted = getattr(config, "require_decomposed_backend", False) or getattr(config, "has_hash_routing", False)
    uneven = config.num_local_experts * parallel.ep_size != config.num_experts
    if adjusted or uneven or config.is_lora_enabled or dtype not in _LOGITS:
        return None
    scoring, factor = SCORINGS.get(config.routing_method.name), float(layer.routed_scaling_factor)
    if scoring is None or layer.custom_routing_function is not None or (layer.num_expert_group or 0) > 1:
        return None
    if factor != 1.0 and not scoring.bias:  # not every router applies the factor
        return None
    if scoring.kind != "softmax" and parallel.tp_size * parallel.ep_size > 1:
        return None
    return replace(scoring, factor=factor)


class Sm12xMonolithicExperts(mk.FusedMoEExpertsMonolithic):
    """A layer's modular experts, behind vLLM's router unless a kernel takes the router logits."""

    modular: ClassVar[type[Sm12xExperts]]
    slot: ClassVar[Slot]

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        self.experts = self.modular(moe_config, quant_config)
        self.kernel = mk.FusedMoEKernel(make_moe_prepare_and_finalize_no_dp_ep(False), self.experts)
        self._routers: dict[str, Any] = {}

    # ---- contract ----------------------------------------------------------------------------------------------------

    @staticmethod
    def is_supported_config(
        cls: type[Sm12xMonolithicExperts], moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        return cls.modular.is_supported_config(cls.modular, moe_config, weight_key, activation_key, activation_format)

    @staticmethod
    def activation_format() -> Any:
        return Sm12xExperts.activation_format()

    @staticmethod
    def _supports_current_device() -> bool:
        return Sm12xExperts._supports_current_device()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return Sm12xExperts._supports_no_act_and_mul()

    @classmethod
    def _supports_quant_scheme(cls, weight_key: Any, activation_key: Any) -> bool:
        return cls.modular._supports_quant_scheme(weight_key, activation_key)

    @classmethod
    def _supports_activation(cls, activation: Any) -> bool:
        return cls.modular._supports_activation(activation)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return Sm12xExperts._supports_parallel_config(moe_parallel_config)

    @staticmethod
    def _supports_routing_method(routing_method: Any, weight_key: Any, activation_key: Any) -> bool:
        return routing_method.name in SCORINGS

    @staticmethod
    def _supports_router_logits_dtype(router_logits_dtype: Any, routing_method: Any) -> bool:
        return router_logits_dtype in _LOGITS

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def supports_expert_map(self) -> bool:
        return True

    def process_weights_after_loading(self, layer: Any) -> None:
        self.experts.process_weights_after_loading(layer)

    def apply(
        self, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, router_logits: torch.Tensor, activation: Any,
        global_num_experts: int, expert_map: torch.Tensor | None, a1q_scale: torch.Tensor | None,
        apply_router_weight_on_input: bool, num_expert_group: int | None = None,
        e_score_correction_bias: torch.Tensor | None = None, routed_scaling_factor: float | None = None,
        topk_group: int | None = None, routing_replay_out: None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the weighted sum over this rank's experts, ``(M, K)``."""
        factor = 1.0 if routed_scaling_factor is None else float(routed_scaling_factor)
        bias, dispatch = e_score_correction_bias, self.experts.dispatch
        known = dispatch.scoring is not None and factor == dispatch.scoring.factor and (num_expert_group or 0) <= 1
        if known and not apply_router_weight_on_input:
            try:
                routes = router_logits, bias, expert_map, _padding(len(hidden_states))
                result = self.experts.call_with_logits(hidden_states, w1, w2, *routes)
            except Exception as error:
                dispatch.route_first(error)
                result = None
            if result is not None:
                return result
        grouping = None if num_expert_group is None else (num_expert_group, topk_group)
        router = self._router(global_num_experts, grouping, factor, bias)
        router_weights, ids = router.select_experts(hidden_states, router_logits)
        output: torch.Tensor = self.kernel.apply(
            hidden_states, w1, w2, router_weights, ids, activation, global_num_experts, expert_map, apply_router_weight_on_input
        )
        return output

    def _router(self, experts: int, grouping: tuple[int, int | None] | None, factor: float, bias: torch.Tensor | None) -> Any:
        """Return a router like the layer's own, which vLLM does not pass on. A reload may replace the bias."""
        if self._routers.get("of") != (experts, grouping, factor) or self._routers["bias"] is not bias:
            scoring = self.experts.scoring
            assert scoring is not None
            more: dict[str, Any] = {}
            if grouping is not None:
                more = {"use_grouped_topk": True, "num_expert_group": grouping[0], "topk_group": grouping[1]}
            router = create_fused_moe_router(
                self.moe_config.experts_per_token, experts, scoring.renormalize,
                scoring_func=scoring.kind.partition("_")[0], routed_scaling_factor=factor, e_score_correction_bias=bias, **more,
            )  # fmt: skip
            self._routers = {"of": (experts, grouping, factor), "bias": bias, "router": router}
        return self._routers["router"]


def _padding(tokens: int) -> torch.Tensor | None:
    """Return vLLM's mask of rows without a request, which its operators do not route. Captured graphs read the mask at replay."""
    if not getattr(envs, "VLLM_MOE_SKIP_PADDING", False) or not forward_context.is_forward_context_available():
        return None
    mask: torch.Tensor | None = getattr(forward_context.get_forward_context(), "is_padding", None)
    return None if mask is None else mask[:tokens]


@functools.cache
def monolithic_class(modular: Any) -> type[Sm12xMonolithicExperts]:
    """Return the monolithic class around a modular class that has ``scoring``. Both have the same name."""
    names = {"modular": modular, "slot": modular.slot, "__module__": __name__}
    return type(modular.__name__, (Sm12xMonolithicExperts,), names)
