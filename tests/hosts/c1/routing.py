"""Routing methods as the scheduler and the resolver ask them: ``apply`` takes the token ids too."""

from __future__ import annotations

from enum import IntEnum

import torch

from trtllm_b12x.engines.trtllm.embedded import routing


class RoutingMethodType(IntEnum):
    Default = 0
    Renormalize = 1
    Unspecified = 99


class BaseMoeRoutingMethod(routing.BaseMoeRoutingMethod):
    requires_separated_routing = False
    routing_method_type = RoutingMethodType.Unspecified


class RenormalizeMoeRoutingMethod(BaseMoeRoutingMethod, routing.RenormalizeMoeRoutingMethod):
    routing_method_type = RoutingMethodType.Renormalize

    def apply(self, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().apply(router_logits)
