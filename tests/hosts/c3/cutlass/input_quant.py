from ..input_quant import quantize_nvfp4

__all__ = ["quantize_nvfp4"]
