"""What is left at the old place: the family's name for its abstract base, which is equal to no class that is built."""

from .cutlass import CUTLASS_LEAVES, CutlassFusedMoEBase

CutlassFusedMoE = CutlassFusedMoEBase

__all__ = ["CUTLASS_LEAVES", "CutlassFusedMoE"]
