# SPDX-License-Identifier: Apache-2.0
import contextlib

from trtllm_b12x.engines.trtllm.embedded.config import ActivationType, Fp4QuantizedTensor, is_gated_activation

__all__ = ["ActivationType", "Fp4QuantizedTensor", "is_gated_activation"]

_extra_attrs = None
_compiling = False


def get_model_extra_attrs():
    """Those of the model whose forward is under way, or None."""
    return _extra_attrs


@contextlib.contextmanager
def model_extra_attrs(attrs):
    global _extra_attrs
    before, _extra_attrs = _extra_attrs, attrs
    try:
        yield
    finally:
        _extra_attrs = before


def set_torch_compiling(on):
    global _compiling
    _compiling = on


def is_torch_compiling():
    return _compiling
