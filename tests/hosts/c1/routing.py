"""Routing methods as the scheduler asks them: ``apply`` takes the token ids too."""

from trtllm_b12x.engines.trtllm.embedded import routing


class RenormalizeMoeRoutingMethod(routing.RenormalizeMoeRoutingMethod):
    def apply(self, router_logits, input_ids=None):
        return super().apply(router_logits)
