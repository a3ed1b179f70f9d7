from .create_moe import create_moe, get_moe_cls
from .fused_moe_cutlass import CutlassFusedMoE
from .interface import MoE, MoEWeightLoadingMode

__all__ = ["CutlassFusedMoE", "MoE", "MoEWeightLoadingMode", "create_moe", "get_moe_cls"]  # create_moe is the function
