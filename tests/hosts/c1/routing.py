# SPDX-License-Identifier: Apache-2.0
"""Routing methods as the scheduler asks them. Of equal scores the lower expert comes first, as in the CUDA operators."""

import torch


def best(scores, top_k):
    return scores.argsort(dim=1, descending=True, stable=True)[:, :top_k]


def shares(scores, factor=1.0):
    return scores * factor / (scores.sum(1, keepdim=True) + 1e-20)


class BaseMoeRoutingMethod:
    requires_separated_routing = False

    def __init__(self, top_k, output_dtype=torch.float32):
        self.top_k, self.output_dtype = top_k, output_dtype

    @property
    def experts_per_token(self):
        return self.top_k


class DefaultMoeRoutingMethod(BaseMoeRoutingMethod):
    def apply(self, router_logits, input_ids=None):
        scores = router_logits.to(self.output_dtype).softmax(1)
        ids = best(scores, self.top_k)
        return ids.int(), scores.gather(1, ids)


class RenormalizeMoeRoutingMethod(BaseMoeRoutingMethod):
    def apply(self, router_logits, input_ids=None):
        ids = best(router_logits, self.top_k)
        return ids.int(), router_logits.gather(1, ids).to(self.output_dtype).softmax(1)


class RenormalizeNaiveMoeRoutingMethod(RenormalizeMoeRoutingMethod):
    pass


class Llama4RenormalizeMoeRoutingMethod(BaseMoeRoutingMethod):
    def apply(self, router_logits, input_ids=None):
        ids = best(router_logits, self.top_k)
        return ids.int(), router_logits.gather(1, ids).float().sigmoid()


class SigmoidRenormMoeRoutingMethod(BaseMoeRoutingMethod):
    def __init__(self, top_k, num_experts, renormalize=True, output_dtype=torch.float32):
        super().__init__(top_k, output_dtype)
        self.renormalize = renormalize

    def apply(self, router_logits, input_ids=None):
        scores = router_logits.sigmoid()
        ids = best(scores, self.top_k)
        chosen = scores.gather(1, ids)
        return ids.int(), (shares(chosen) if self.renormalize else chosen).to(self.output_dtype)


class _Biased(BaseMoeRoutingMethod):
    @property
    def e_score_correction_bias(self):
        return self.callable_e_score_correction_bias()


class MiniMaxM2MoeRoutingMethod(_Biased):
    def __init__(self, top_k, num_experts, callable_e_score_correction_bias, output_dtype=torch.float32):
        super().__init__(top_k, output_dtype)
        self.callable_e_score_correction_bias = callable_e_score_correction_bias

    def scores(self, logits):
        return logits.sigmoid()

    def apply(self, router_logits, input_ids=None):
        scores = self.scores(router_logits)
        ids = best(scores + self.e_score_correction_bias, self.top_k)
        return ids.int(), shares(scores.gather(1, ids)).to(self.output_dtype)


class SqrtSoftplusMoeRoutingMethod(MiniMaxM2MoeRoutingMethod):
    requires_separated_routing = True

    def scores(self, logits):
        return torch.nn.functional.softplus(logits.float()).sqrt()


class Deepseekv3RoutingImpl:
    def __init__(self, top_k, n_group, topk_group, routed_scaling_factor, is_fused=True):
        self.top_k, self.n_group, self.topk_group = top_k, n_group, topk_group
        self.routed_scaling_factor, self.is_fused = routed_scaling_factor, is_fused

    def apply(self, logits, e_score_correction_bias):
        """``noaux_tc_op``: its weights have the dtype of the logits."""
        scores = 0.5 * torch.tanh(0.5 * logits.float()) + 0.5
        choice, groups = scores + e_score_correction_bias, self.n_group
        if groups > 1:
            parts = choice.unflatten(1, (groups, -1))
            kept = best(parts.topk(2, dim=2).values.sum(2), self.topk_group)
            inside = torch.zeros(len(logits), groups, dtype=torch.bool).scatter_(1, kept, True)
            choice = parts.masked_fill(~inside.unsqueeze(2), -torch.inf).flatten(1)
        ids = best(choice, self.top_k)
        return ids.int(), shares(scores.gather(1, ids), self.routed_scaling_factor).to(logits.dtype).float()


class DeepSeekV3MoeRoutingMethod(_Biased):
    def __init__(self, top_k, n_group, topk_group, routed_scaling_factor, callable_e_score_correction_bias, is_fused=True):
        self.routing_impl = Deepseekv3RoutingImpl(top_k, n_group, topk_group, routed_scaling_factor, is_fused)
        self.callable_e_score_correction_bias = callable_e_score_correction_bias

    top_k = property(lambda self: self.routing_impl.top_k)

    def apply(self, logits, input_ids=None):
        return self.routing_impl.apply(logits, self.e_score_correction_bias)


class MiniMaxM3MoeRoutingMethod(MiniMaxM2MoeRoutingMethod):
    def __init__(
        self, top_k, num_experts, callable_e_score_correction_bias, routed_scaling_factor=1.0, output_dtype=torch.float32
    ):
        super().__init__(top_k, num_experts, callable_e_score_correction_bias, output_dtype)
        self.routed_scaling_factor = routed_scaling_factor
        self.routing_impl = Deepseekv3RoutingImpl(top_k, 1, 1, routed_scaling_factor)

    def apply(self, router_logits, input_ids=None):
        if router_logits.dtype == torch.float32:
            return self.routing_impl.apply(router_logits, self.e_score_correction_bias)
        ids, scales = super().apply(router_logits, input_ids)
        return ids, scales * self.routed_scaling_factor
