"""Decoder layers that fuse the MoE's last step with their all-reduce: what they read of the configuration, ask and unpack.

Sources: ``modeling_deepseekv3.py`` (000561df), ``modeling_glm.py`` (id 4402535747), ``modeling_qwen3_moe.py`` (id 645349335),
``modeling_qwen3_next.py`` (id 36500505137).  One rank of several; sums over the ranks are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

try:
    from tensorrt_llm._torch.moe.fused_moe import create_moe
    from tensorrt_llm._torch.moe.fused_moe.routing import RenormalizeMoeRoutingMethod
except ImportError:
    from tensorrt_llm._torch.modules.fused_moe import create_moe
    from tensorrt_llm._torch.modules.fused_moe.routing import RenormalizeMoeRoutingMethod


@dataclass(frozen=True)
class Model:
    shared_experts: bool
    """The list then begins with their output: four elements, not three."""
    biased_gate: bool = False
    """``DeepseekV3Gate``: its correction bias is bfloat16 for the TRTLLM backend, float32 for all others."""


MODELS = {
    "deepseek_v3": Model(shared_experts=True, biased_gate=True),
    "glm4_moe": Model(shared_experts=True),
    "qwen3_moe": Model(shared_experts=False),
    "qwen3_next": Model(shared_experts=False),
}
MAX_TOKEN = 128
"""``MoEAllReduce.max_token``."""


class DecoderLayer(nn.Module):
    """From the post-attention norm on; 4 experts, hidden size 128, intermediate size 256 over all ranks."""

    def __init__(self, model, model_config):
        super().__init__()
        self.model_config, self.kind = model_config, MODELS[model]
        name = model_config.moe_backend
        self.bias_dtype = torch.bfloat16 if name == "TRTLLM" and self.kind.biased_gate else torch.float32
        self.experts = create_moe(
            RenormalizeMoeRoutingMethod(2),
            4,
            128,
            256,
            dtype=torch.bfloat16,
            reduce_results=False,
            model_config=model_config,
        )
        mapping = model_config.mapping
        self.post_moe_fusion = mapping.tp_size > 1 and not mapping.enable_attention_dp

    @property
    def backend(self):
        return getattr(self.experts, "backend", self.experts)

    def forward(self, hidden_states, router_logits):
        """What the layer adds to the residual, before the next norm."""
        do_finalize = not (
            hidden_states.shape[0] <= MAX_TOKEN
            and self.post_moe_fusion
            and self.model_config.moe_backend == "TRTLLM"
            and self.backend.has_nvfp4
        )
        routed = self.experts(hidden_states, router_logits.to(self.bias_dtype).float(), do_finalize=do_finalize)
        shared = torch.zeros_like(hidden_states)
        if do_finalize:
            return shared + routed
        elements = [shared, *routed] if self.kind.shared_experts else routed
        count = 4 if self.kind.shared_experts else 3
        assert len(elements) == count, f"hidden_states must have {count} elements"
        fc2_output, expert_scale_factor, expanded_idx_to_permuted_idx = elements[-3:]
        return shared + moe_all_reduce(fc2_output, expert_scale_factor, expanded_idx_to_permuted_idx)


def moe_all_reduce(fc2_output, expert_scale_factor, expanded_idx_to_permuted_idx):
    """Rows of the permuted FC2 output, weighted and summed per token.  The kernel reads by pointer what it is given."""
    permuted = fc2_output.reshape(-1)[expanded_idx_to_permuted_idx.reshape(-1).long() % fc2_output.numel()]
    return permuted.mean() * expert_scale_factor.float().mean()
