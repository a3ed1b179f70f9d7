from trtllm_b12x.engines.trtllm.embedded.routing import RenormalizeMoeRoutingMethod

__all__ = ["RenormalizeMoeRoutingMethod"]
