"""``MoEImplBase``: an execution unit with abstract methods that bind (metaclass ABCMeta), and no ``forward``."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import nn

from ._generation import INIT_LOAD_BALANCER, install_activation
from .impl_blocks import MoEEplbWeightLayoutMixin, MoEExecutionContractMixin, MoEWeightOwnerMixin
from .impl_contract import MoEDeployment, MoEEligibility, MoEProblem, MoERunContext
from .interface import MoESchedulerKind, set_layer

STANDALONE_MOE_IMPL_ERROR = (
    "{name} is an execution unit, not a complete MoE layer. Construct it through create_moe() / ConfigurableMoE."
)


def apply_moe_impl_construction_state(module: Any, *, init_load_balancer: bool = INIT_LOAD_BALANCER, **arguments: Any) -> None:
    if init_load_balancer:
        raise TypeError(STANDALONE_MOE_IMPL_ERROR.format(name=type(module).__name__))
    set_layer(module, **arguments)
    install_activation(module)


class MoEImplBase(MoEExecutionContractMixin, MoEWeightOwnerMixin, MoEEplbWeightLayoutMixin, nn.Module, abc.ABC):
    scheduler_kind = MoESchedulerKind.EXTERNAL_COMM

    def __init__(self, *, eplb: Any = None) -> None:
        super().__init__()
        self.eplb = eplb

    @classmethod
    @abc.abstractmethod
    def can_implement(cls, p: MoEProblem, d: MoEDeployment) -> MoEEligibility: ...

    @abc.abstractmethod
    def _get_quant_method(self) -> Any: ...

    @abc.abstractmethod
    def quantize_input(self, x: Any, **kwargs: Any) -> Any: ...

    @abc.abstractmethod
    def run_moe(self, ctx: MoERunContext) -> torch.Tensor: ...

    def try_fused_route_quant(self, x: Any, router_logits: torch.Tensor) -> Any:
        return None

    def get_workspaces(self, *args: Any, **kwargs: Any) -> Any:
        return None
