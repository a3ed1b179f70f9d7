# SPDX-License-Identifier: Apache-2.0
"""``MoEImplBase``: an execution unit with abstract methods that bind (metaclass ABCMeta), and no ``forward``."""

import abc

from torch import nn

from ._generation import INIT_LOAD_BALANCER, install_activation
from .impl_blocks import MoEEplbWeightLayoutMixin, MoEExecutionContractMixin, MoEWeightOwnerMixin
from .interface import set_layer


def apply_moe_impl_construction_state(module, *, init_load_balancer=INIT_LOAD_BALANCER, **arguments):
    if init_load_balancer:
        raise TypeError(f"{type(module).__name__} is an execution unit, not a complete MoE layer")
    set_layer(module, **arguments)
    install_activation(module)


class MoEImplBase(MoEExecutionContractMixin, MoEWeightOwnerMixin, MoEEplbWeightLayoutMixin, nn.Module, abc.ABC):
    @classmethod
    @abc.abstractmethod
    def rejection(cls, p, d):
        """What is refused of a problem and a deployment; None: nothing. The host: ``can_implement``."""

    @abc.abstractmethod
    def _get_quant_method(self): ...

    @abc.abstractmethod
    def quantize_input(self, x, **kwargs): ...

    @abc.abstractmethod
    def run_moe(self, ctx): ...
