# SPDX-License-Identifier: Apache-2.0
"""What C1 and C2 do differently where their doubles share a file.  C2: one ``activation``."""

from tensorrt_llm._torch.utils import ActivationType, is_gated_activation

from .activation import DEFAULT_MOE_ACTIVATION, install_activation_params

INIT_LOAD_BALANCER = False


def set_activation(module, activation=DEFAULT_MOE_ACTIVATION):
    module.activation, module.activation_type = activation, ActivationType(activation.kind)
    module.is_gated_activation = is_gated_activation(activation.kind)


def install_activation(module):
    install_activation_params(module)


def operator_constants(module):
    return {"swiglu_alpha": module.act_alpha, "swiglu_beta": module.act_beta, "swiglu_limit": module.act_clamp}
