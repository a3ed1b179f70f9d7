"""vLLM's own layers of small sizes on the CPU, behind a platform that says SM120."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch


def fake_sm120() -> None:
    import sys, types

    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch"):
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    import vllm.platforms as platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Sm120(CudaPlatformBase):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(12, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "faked SM120")
        on = False
        is_cuda_alike = is_cuda = lambda self: self.on

    platforms._current_platform = Sm120()
    import vllm.model_executor.layers.quantization.modelopt

    Sm120.on = True
    torch.Tensor.cuda = lambda self, *a, **k: self


def config_of(experts, top_k, hidden, size, **more):
    from vllm.model_executor.layers.fused_moe import config as c
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    given = (
        dict(
            num_experts=experts,
            experts_per_token=top_k,
            hidden_dim=hidden,
            intermediate_size=size,
            num_local_experts=experts,
            num_logical_experts=experts,
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=c.RoutingMethodType.Renormalize,
            moe_parallel_config=c.FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
        )
        | more
    )
    return c.FusedMoEConfig(**given)
