# SPDX-License-Identifier: Apache-2.0
"""Build timed paths from TensorRT-LLM's path and our kernels, and sample routes from a layer's router."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from trtllm_b12x.dispatch import crossover, timing
from trtllm_b12x.dispatch.host_check import HostPath
from trtllm_b12x.dispatch.schedule import EMPTY_SCHEDULE
from trtllm_b12x.dispatch.timing import RouteSampler, TimedPath
from trtllm_b12x.environment import packages
from trtllm_b12x.kernels import Geometry

from . import guard, status
from .host import load

_LAYERS = 32


def timed_paths(module: Any, like: Any) -> dict[str, TimedPath]:
    """Return the timed path of each family and of TensorRT-LLM, over this layer and similar layers of ours.

    ``like`` is a call that TensorRT-LLM has just made, for ``run_as_the_host``.
    """
    layers = [module, *(other for other, _ in status.alive() if other is not module and _alike(other, module))][:_LAYERS]
    if module.schedule.base:
        return crossover.paths_of([layer.schedule for layer in layers], None)
    # The embedded operator synchronizes to find the experts that have tokens.
    host = TimedPath([partial(layer.run_as_the_host, like) for layer in layers], captured=load().generation != "embedded")
    return crossover.paths_of([layer.schedule for layer in layers], host)


def judged(module: Any, like: Any) -> HostPath:
    """Return TensorRT-LLM's path through this layer, with the engine, version and layer that a warning names."""
    version = packages.versions(["tensorrt_llm"]).get("tensorrt_llm", load().generation)
    layer = f"MoE layer {getattr(module, 'layer_idx', '?')}"
    return HostPath(partial(module.run_as_the_host, like), "TensorRT-LLM", version, layer)


def _alike(other: Any, module: Any) -> bool:
    """Return whether ``other`` has kernels of the same families and geometry, on its own weights on the same device."""
    mine, its = module.schedule, getattr(other, "schedule", EMPTY_SCHEDULE)
    if its.kernels and its.kernels[0].geometry == mine.kernels[0].geometry:
        other.plan_waiting()
        its = other.schedule
    return bool(
        its.families.keys() == mine.families.keys()
        and its.settled
        and its.kernels[0].geometry == mine.kernels[0].geometry
        and other.w2_weight.device == module.w2_weight.device
    )


def route_sampler(module: Any, geometry: Geometry, device: torch.device) -> RouteSampler:
    """Return a sampler that routes random logits with the layer's router, or by top-k if the router needs more than logits."""

    def sample(tokens: int, seed: int, skewed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logits = timing.router_logits(geometry, tokens, seed, skewed).to(device)
        with guard.bookkeeping():
            ids, router_weights = module.routing_method.apply(logits)
            if ids.shape == router_weights.shape == (tokens, geometry.top_k):
                return ids.to(torch.int32), router_weights.float()
        values, ids = logits.topk(geometry.top_k, dim=1)
        return ids.to(torch.int32), values.softmax(1)

    return sample
