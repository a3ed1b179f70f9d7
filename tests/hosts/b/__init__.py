from .configurable_moe import ConfigurableMoE
from .create_moe import create_moe, get_moe_cls
from .fused_moe_cutlass import CutlassFusedMoE
from .interface import MoE, MoEWeightLoadingMode

__all__ = ["ConfigurableMoE", "CutlassFusedMoE", "MoE", "MoEWeightLoadingMode", "create_moe", "get_moe_cls"]
