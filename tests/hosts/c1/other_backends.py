"""Every other backend by name: what is compared, what refuses SM120, and what a named backend would get."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm.models.modeling_utils import QuantAlgo
from torch import nn

from ._generation import ACTIVATIONS
from .fused_moe_cutlass import CutlassFusedMoE
from .impl_base import MoEImplBase, apply_moe_impl_construction_state
from .impl_contract import MoEDeployment, MoEEligibility, MoEProblem, MoERejectReason, MoERunContext, MoEStaticCapability
from .interface import MoESchedulerKind, _reject

_DATACENTER = frozenset({100, 103})


def _judged(cls: Any, p: MoEProblem, d: MoEDeployment) -> MoEEligibility:
    if d.env.sm not in cls.sm_versions:
        return _reject(MoERejectReason.SM_UNSUPPORTED, f"{cls.__name__} does not run on SM{d.env.sm}")
    if p.quant_algo not in cls.quant_algos:
        return _reject(MoERejectReason.QUANT_UNSUPPORTED, f"{cls.__name__} does not support quant_algo={p.quant_algo}")
    return MoEEligibility.ok()


class _Other(MoEImplBase):
    sm_versions = _DATACENTER
    quant_algos: tuple[QuantAlgo | None, ...] = (QuantAlgo.NVFP4,)
    activation_support = ACTIVATIONS

    @classmethod
    def can_implement(cls, p: MoEProblem, d: MoEDeployment) -> MoEEligibility:
        return _judged(cls, p, d)

    def __init__(self, apply_router_weight_on_input: bool = False, **arguments: Any) -> None:
        super().__init__(eplb=None)
        apply_moe_impl_construction_state(self, **arguments)
        self._weights_created = False

    def create_weights(self) -> None:
        self._weights_created = True

    def _get_quant_method(self) -> Any:
        raise NotImplementedError

    def quantize_input(self, x: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def run_moe(self, ctx: MoERunContext, *, workspace: dict[str, Any] | None = None) -> torch.Tensor:
        raise NotImplementedError


class CuteDslFusedMoE(CutlassFusedMoE):
    capabilities = MoEStaticCapability(supports_dwdp=True, supports_eplb=True, supports_apply_router_weight_on_input=True)
    sm_versions = _DATACENTER
    quant_algos = (QuantAlgo.NVFP4, QuantAlgo.FP8_BLOCK_SCALES)

    @classmethod
    def can_implement(cls, p: MoEProblem, d: MoEDeployment) -> MoEEligibility:
        return _judged(cls, p, d)


class TRTLLMGenFusedMoE(_Other):
    capabilities = MoEStaticCapability(supports_eplb=True, supports_expert_bias=True)
    quant_algos = (QuantAlgo.NVFP4, QuantAlgo.FP8_BLOCK_SCALES, None)


class DeepGemmFusedMoE(_Other):
    quant_algos = (QuantAlgo.FP8_BLOCK_SCALES,)


class DenseGEMMFusedMoE(_Other):
    pass


class MarlinFusedMoE(_Other):
    sm_versions = frozenset({80, 86, 89, 90})


class TritonFusedMoE(_Other):
    capabilities = MoEStaticCapability(supports_expert_bias=True)
    sm_versions = frozenset({90})
    quant_algos = (None, QuantAlgo.FP8)


class MegaMoEDeepGemm(_Other):
    scheduler_kind = MoESchedulerKind.FUSED_COMM


class MegaMoECuteDsl(_Other):
    scheduler_kind = MoESchedulerKind.FUSED_COMM


class VanillaMoE(nn.ModuleList):
    """A complete layer, hence never wrapped."""

    capabilities = MoEStaticCapability()

    @classmethod
    def can_implement(cls, p: MoEProblem, d: MoEDeployment) -> MoEEligibility:
        return MoEEligibility.ok()

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
