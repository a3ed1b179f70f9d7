from . import streaming  # noqa: F401 - C2's additions to the NVFP4 methods
from .activation import DEFAULT_MOE_ACTIVATION, SimpleActivation, SwigluActivation, SwigluBiasActivation
from .configurable_moe import ConfigurableMoE
from .create_moe import create_moe, resolve_moe_cls, resolve_moe_impl
from .fused_moe_cutlass import CUTLASS_LEAVES, CutlassFusedMoE
from .impl_base import MoEImplBase
from .interface import MoE, MoEWeightLoadingMode

__all__ = [  # create_moe is the function
    "CUTLASS_LEAVES",
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
    "resolve_moe_impl",
]
