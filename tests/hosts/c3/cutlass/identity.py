"""What the leaves publish: identity, capabilities, what the scheduler prepares for them."""

from __future__ import annotations

import torch

from ..impl_contract import MoEInputRequirement, MoEStaticCapability
from ..impl_identity import MoEImplDescriptor, MoEImplId
from ..interface import MoESchedulerKind

CUTLASS_CAPABILITIES = MoEStaticCapability(
    supports_expert_bias=True, supports_eplb=True, supports_apply_router_weight_on_input=True
)
CUTLASS_LORA_CAPABILITIES = MoEStaticCapability(
    supports_moe_lora=True, supports_expert_bias=True, supports_eplb=True, supports_apply_router_weight_on_input=True
)
CUTLASS_INPUT_REQUIREMENT = MoEInputRequirement(routing_scales_dtype=torch.float32)


def cutlass_descriptor(quant: str, doc: str, *, capabilities: MoEStaticCapability = CUTLASS_CAPABILITIES) -> MoEImplDescriptor:
    return MoEImplDescriptor(
        identity=MoEImplId("trtllm", "cutlass", "grouped_gemm", quant),
        scheduler_kind=MoESchedulerKind.EXTERNAL_COMM,
        capabilities=capabilities,
        input_requirement=CUTLASS_INPUT_REQUIREMENT,
        doc=doc,
    )
