"""MoE layers as the host builds them, loaded from the tensors of :mod:`tests.checkpoints`."""

from __future__ import annotations

from typing import Any

import torch

import trtllm_b12x
from trtllm_b12x import host as _host
from trtllm_b12x import strict_reference
from trtllm_b12x.strict_reference import Arithmetic, Call

host = _host.load()


def create(
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int = 2,
    gated: bool = True,
    *,
    promote: bool = True,
    mapping: dict[str, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    quant_config: Any = None,
    max_num_tokens: int = 8192,
    moe_max_num_tokens: int = 0,
    pretrained_config: Any = None,
    **arguments: Any,
) -> Any:
    """A ``ConfigurableMoE`` without weights, its backend promoted or not."""
    config = host.ModelConfig(
        pretrained_config=pretrained_config,
        quant_config=quant_config or host.QuantConfig(quant_algo=host.QuantAlgo.NVFP4, group_size=16),
        mapping=host.Mapping(**(mapping or {})),
        max_num_tokens=max_num_tokens,
        moe_max_num_tokens=moe_max_num_tokens,
    )
    (trtllm_b12x.install if promote else trtllm_b12x.uninstall)()
    try:
        return host.create_moe.create_moe(
            host.RenormalizeMoeRoutingMethod(top_k),
            num_experts,
            hidden_size,
            intermediate_size,
            dtype=dtype,
            model_config=config,
            activation_type=host.ActivationType.Swiglu if gated else host.ActivationType.Relu2,
            **arguments,
        )
    finally:
        trtllm_b12x.uninstall()


def load(module: Any, tensors: dict[str, torch.Tensor]) -> Any:
    module.load_weights([tensors])
    module.post_load_weights()
    return module


def inputs(module: Any, tokens: int, tensors: dict[str, torch.Tensor], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``x (tokens, H)`` bf16 off rounding ties, and router logits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, module.hidden_size, generator=generator).to(torch.bfloat16)
    scale = max(float(t) for name, t in tensors.items() if name.endswith("w1.input_scale"))
    logits = torch.randn(tokens, module.num_experts, generator=generator)
    return strict_reference.move_off_ties(x, scale), logits


def errors(
    module: Any, x: torch.Tensor, logits: torch.Tensor, result: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Relative L2 of ``result`` against float32 and against the kernels' rounding points."""
    call = Call(x, *module.routing_method.apply(logits))
    gated = module.is_gated_activation
    strict = strict_reference.outputs(tensors, module.num_experts, gated, [call], [Arithmetic.NONE, Arithmetic.KERNEL])[0]
    none, kernel = (float((result.float() - reference).norm() / reference.norm()) for reference in strict)
    return none, kernel
