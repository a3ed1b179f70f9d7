from trtllm_b12x.engines.trtllm.embedded.config import ActivationType, Fp4QuantizedTensor, is_gated_activation

__all__ = ["ActivationType", "Fp4QuantizedTensor", "is_gated_activation"]

_extra_attrs = {}
_compiling = False


def get_model_extra_attrs():
    return _extra_attrs


def set_torch_compiling(on):
    global _compiling
    _compiling = on


def is_torch_compiling():
    return _compiling
