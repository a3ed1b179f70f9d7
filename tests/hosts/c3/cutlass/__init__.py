"""One class per quantization under an abstract base.  Five of the host's twelve leaves are doubled."""

from .base import CutlassFusedMoEBase
from .fp8 import TrtllmCutlassFp8Impl
from .mxfp8 import TrtllmCutlassMxfp8Impl
from .nvfp4 import TrtllmCutlassNvfp4Impl
from .unquantized import TrtllmCutlassUnquantizedImpl
from .w4a16_nvfp4 import TrtllmCutlassW4a16Nvfp4Impl

CUTLASS_LEAVES: tuple[type[CutlassFusedMoEBase], ...] = (
    TrtllmCutlassNvfp4Impl,
    TrtllmCutlassW4a16Nvfp4Impl,
    TrtllmCutlassMxfp8Impl,
    TrtllmCutlassFp8Impl,
    TrtllmCutlassUnquantizedImpl,
)

__all__ = [
    "CUTLASS_LEAVES",
    "CutlassFusedMoEBase",
    "TrtllmCutlassFp8Impl",
    "TrtllmCutlassMxfp8Impl",
    "TrtllmCutlassNvfp4Impl",
    "TrtllmCutlassUnquantizedImpl",
    "TrtllmCutlassW4a16Nvfp4Impl",
]
