from .activation import DEFAULT_MOE_ACTIVATION, SimpleActivation, SwigluActivation, SwigluBiasActivation
from .configurable_moe import ConfigurableMoE
from .create_moe import create_moe, resolve_moe_cls
from .fused_moe_cutlass import CutlassFusedMoE
from .impl_base import MoEImplBase
from .interface import MoE, MoEWeightLoadingMode

__all__ = [  # create_moe is the function
    "DEFAULT_MOE_ACTIVATION",
    "ConfigurableMoE",
    "CutlassFusedMoE",
    "MoE",
    "MoEImplBase",
    "MoEWeightLoadingMode",
    "SimpleActivation",
    "SwigluActivation",
    "SwigluBiasActivation",
    "create_moe",
    "resolve_moe_cls",
]
