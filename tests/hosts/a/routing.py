from trtllm_b12x.engines.trtllm.embedded.routing import BaseMoeRoutingMethod, RenormalizeMoeRoutingMethod

__all__ = ["BaseMoeRoutingMethod", "RenormalizeMoeRoutingMethod"]
