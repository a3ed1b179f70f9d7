from trtllm_b12x.host.embedded.routing import BaseMoeRoutingMethod, RenormalizeMoeRoutingMethod

__all__ = ["BaseMoeRoutingMethod", "RenormalizeMoeRoutingMethod"]
