from .configurable_moe import ConfigurableMoE
from .create_moe import create_moe, resolve_moe_cls
from .fused_moe_cutlass import CutlassFusedMoE
from .impl_base import MoEImplBase
from .interface import MoE, MoEWeightLoadingMode

__all__ = [  # create_moe is the function
    "ConfigurableMoE",
    "CutlassFusedMoE",
    "MoE",
    "MoEImplBase",
    "MoEWeightLoadingMode",
    "create_moe",
    "resolve_moe_cls",
]
