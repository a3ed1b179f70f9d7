# SPDX-License-Identifier: Apache-2.0
"""vLLM's whole MoE layer: its router, runner, ModelOpt method, and the weight loader that its models call."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.integration.vllm import layers

Sizes = tuple[int, int, int, int]
"""Number of experts, experts per token, hidden size, intermediate size."""
NAMES = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


@contextmanager
def one_rank(backend: str = "gloo") -> Iterator[None]:
    """Initialize vLLM's process groups with one rank, as its own tests do: its parameters ask for a rank."""
    with tempfile.TemporaryDirectory() as folder, ranks(1, 0, Path(folder) / "store", backend):
        yield


@contextmanager
def ranks(world: int, rank: int, store: Path, backend: str = "gloo") -> Iterator[None]:
    """Initialize vLLM's groups of tensor parallelism over all ranks."""
    from vllm.distributed import parallel_state

    with _config("cpu"):
        parallel_state.init_distributed_environment(world, rank, f"file://{store}", 0, backend)
        parallel_state.initialize_model_parallel(world, 1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


@contextmanager
def _config(device: torch.device | str, moe_backend: Any = "auto") -> Iterator[Any]:
    from vllm.config import DeviceConfig, KernelConfig, VllmConfig, set_current_vllm_config

    config = VllmConfig(kernel_config=KernelConfig(moe_backend=moe_backend), device_config=DeviceConfig(torch.device(device)))
    with set_current_vllm_config(config):
        yield config


def checkpoint(experts: layers.Experts) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a layer by the names that ModelOpt exports: one for each expert and projection."""
    for name, tensor in experts.parameters.items():
        prefix, kind = name.split("_", 1)
        for e, stacked in enumerate(tensor):
            projections = NAMES[prefix]
            # A projection of w13 has half the rows, or one of two scalars.
            parts = stacked.chunk(len(projections)) if len(projections) > 1 else (stacked,)
            for projection, part in zip(projections, parts, strict=True):
                scalar = kind.endswith(("_2", "input_scale"))
                yield f"experts.{e}.{projection}.{kind}", (part.squeeze(0) if scalar else part).cpu()


class Block(torch.nn.Module):
    """Module around a layer that vLLM's ``FusedMoEFactory`` builds. The caller passes router logits: there is no gate."""

    def __init__(self, form: str, sizes: Sizes, device: torch.device | str, moe_backend: str = "auto") -> None:
        from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        super().__init__()
        experts, top_k, hidden, size = sizes
        more: dict[str, Any] = {}
        if torch.device(device).type == "cpu":
            more["custom_routing_function"] = route  # vLLM's own router is a CUDA extension
        with _config(device, moe_backend) as self.config, layers.model_dtype(), torch.device(device):
            self.experts = FusedMoEFactory(
                num_experts=experts,
                top_k=top_k,
                hidden_size=hidden,
                intermediate_size=size,
                renormalize=True,
                quant_config=layers.quant_config(form),
                prefix="model.layers.0.mlp.experts",
                **more,
            )
            record_metadata_for_reloading(self)

    @property
    def method(self) -> Any:
        return self.experts.routed_experts.quant_method

    @property
    def fused_experts(self) -> Any:
        return self.method.moe_kernel.fused_experts

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        """Load as vLLM's models do. Return the names of parameters, without their modules'."""
        from vllm.model_executor.models.utils import AutoWeightsLoader

        return {name.rsplit(".", 1)[-1] for name in AutoWeightsLoader(self).load_weights(weights)}

    def load(self, experts: layers.Experts) -> set[str]:
        """Load and process, as vLLM's model loader does."""
        with _set(self.config), layers.model_dtype():
            loaded = self.load_weights(checkpoint(experts))
            self.method.process_weights_after_loading(self.experts.routed_experts)
        return loaded

    def reload(self, experts: layers.Experts) -> None:
        """Load as vLLM's ``reload_weights`` does: into new tensors, which are processed and copied to the old ones."""
        reload = importlib.import_module("vllm.model_executor.model_loader.reload")
        device = next(self.parameters()).device
        with _set(self.config), layers.model_dtype(), device:
            reload.initialize_layerwise_reload(self)
            self.load_weights(checkpoint(experts))
            reload.finalize_layerwise_reload(self, None)

    def forward(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        with self.context(len(x)):
            result: torch.Tensor = self.experts(hidden_states=x, router_logits=router_logits)
        return result

    @contextmanager
    def context(self, tokens: int) -> Iterator[None]:
        """Set what vLLM's model runner sets around a call."""
        from vllm.forward_context import set_forward_context

        with _set(self.config), set_forward_context(None, self.config, num_tokens=tokens):
            yield


def _set(config: Any) -> Any:
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(config)


def route(hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool) -> Any:
    """Route as Qwen3's router does."""
    weights, ids = gating_output.float().softmax(-1).topk(topk, -1)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids.int()


def inputs(sizes: Sizes, tokens: int, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and router logits. No two logits of a token are equal in bfloat16, so that every router picks the same experts."""
    experts, _, hidden, _ = sizes
    generator = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator, device=device)
    ranks = torch.rand(tokens, experts, generator=generator, device=device).argsort(-1)
    return x.to(torch.bfloat16), (ranks * (4 / experts)).to(torch.bfloat16)


def expected(experts: layers.Experts, sizes: Sizes, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the layer's output in float32."""
    return experts.expected(x, *route(x, logits, sizes[1], renormalize=True))
