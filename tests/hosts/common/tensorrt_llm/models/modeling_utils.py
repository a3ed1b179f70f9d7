from trtllm_b12x.host.embedded.config import QuantAlgo, QuantConfig

__all__ = ["QuantAlgo", "QuantConfig"]
