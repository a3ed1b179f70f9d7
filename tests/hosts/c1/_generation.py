# SPDX-License-Identifier: Apache-2.0
"""What C1 and C2 do differently where their doubles share a file.  C1: ``activation_type`` and ``swiglu_*``, one by one."""

from tensorrt_llm._torch.utils import ActivationType, is_gated_activation

INIT_LOAD_BALANCER = True
"""Default of ``init_load_balancer``, which no execution unit may be built with."""


def set_activation(
    module,
    activation_type=ActivationType.Swiglu,
    swiglu_alpha=None,
    swiglu_beta=None,
    swiglu_limit=None,
    swiglu_limit_scalar=None,
):
    module.activation_type = int(activation_type)
    module.is_gated_activation = is_gated_activation(activation_type)
    module.swiglu_alpha, module.swiglu_beta = swiglu_alpha, swiglu_beta
    module.swiglu_limit, module.swiglu_limit_scalar = swiglu_limit, swiglu_limit_scalar


def install_activation(module):
    pass


def operator_constants(module):
    """Arguments of ``torch.ops.trtllm.fused_moe``."""
    return {name: getattr(module, name) for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit")}
