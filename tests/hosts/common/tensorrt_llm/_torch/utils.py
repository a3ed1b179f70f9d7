from enum import Enum

from trtllm_b12x.engines.trtllm.embedded.config import ActivationType, AuxStreamType, Fp4QuantizedTensor, is_gated_activation

__all__ = ["ActivationType", "AuxStreamType", "EventType", "Fp4QuantizedTensor", "is_gated_activation"]

_extra_attrs: dict[str, object] = {}
_compiling = False


class EventType(Enum):
    Main = 0
    MoeChunkingOverlap = 2


def get_model_extra_attrs() -> dict[str, object]:
    return _extra_attrs


def set_torch_compiling(on: bool) -> None:
    global _compiling
    _compiling = on


def is_torch_compiling() -> bool:
    return _compiling
