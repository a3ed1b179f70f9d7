# SPDX-License-Identifier: Apache-2.0
"""Draw the inputs of every kernel, and time other makers' kernels.

A captured graph cycles through layers with separate weights. Between two uses of a layer it reads four times the L2 cache, so no
weight comes from the cache. All kernels see the same x, ids and router weights.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests import mxfp8
from tests.nvfp4_layer import Layer, distance, random_call, random_layer
from trtllm_b12x.dispatch.timing import expected_hits, expert_bytes, graph_seconds, router_logits
from trtllm_b12x.formats.weights import Weights
from trtllm_b12x.kernels import Geometry

REPLAYS = 9
_COLD = 4
"""Bytes that other layers' calls read between two uses of a layer, in multiples of the L2 cache."""
_ROUTINGS = 2
"""Calls of a layer in a graph, each with its own routes."""
LIMIT = 7.0
"""Limit of gpt-oss's SwiGLU, the same for every expert: Marlin and triton_kernels take one number."""


def l2_bytes() -> int:
    return int(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 64 << 20))


@dataclass(frozen=True)
class Draw:
    """Input of one token count: x ``(T, H)``, router weights ``(T, k)``, and for each call its layer and ids ``(T, k)`` int32."""

    x: torch.Tensor
    router_weights: torch.Tensor
    calls: list[tuple[int, torch.Tensor]]
    local_experts: int

    @property
    def hits(self) -> float:
        """Mean number of local experts that a call hits."""
        return statistics.mean(int(ids[ids < self.local_experts].unique().numel()) for _, ids in self.calls)


def draw(geometry: Geometry, whole: Geometry, tokens: int, layers: int) -> Draw:
    """Draw the calls of a graph over ``layers`` layers. Ids name experts of the ``whole`` layer, as in expert parallelism."""
    layers = min(layers, cold_layers(geometry, tokens))
    routings = _ROUTINGS if tokens <= 256 else 1
    x, _, router_weights = random_call(geometry, tokens, whole.num_experts, "cuda")
    calls = [(i, routes(whole, tokens, i * 97 + turn).cuda()) for turn in range(routings) for i in range(layers)]
    return Draw(x, router_weights, calls, geometry.num_experts)


def routes(geometry: Geometry, tokens: int, seed: int) -> torch.Tensor:
    """Draw global ids ``(tokens, top_k)`` int32 on the CPU."""
    return router_logits(geometry, tokens, seed).topk(geometry.top_k, dim=1).indices.int()


def cold_layers(geometry: Geometry, tokens: int) -> int:
    """Return how many layers a graph cycles through."""
    return 1 + max(1, math.ceil(_COLD * l2_bytes() / (expected_hits(geometry, tokens) * expert_bytes(geometry))))


def stack(geometry: Geometry, limit: int) -> Sequence[Layer | Weights]:
    """Return the weights of as many layers as calls of one token need, at most ``limit`` or what memory allows, at least two."""
    size = expert_bytes(geometry) * geometry.num_experts
    count = max(2, min(limit, cold_layers(geometry, 1), int(0.3 * torch.cuda.mem_get_info()[0]) // size))
    if geometry.format == "MXFP8":
        return [mxfp8.random_weights(geometry, "cuda", seed) for seed in range(count)]
    first = random_layer(geometry, "cuda", 0)
    if first.epilogue.swiglu_limit is not None:
        first.epilogue = replace(first.epilogue, swiglu_limit=torch.full_like(first.epilogue.swiglu_limit, LIMIT))
    layers = [first]
    for seed in range(1, count):
        generator = torch.Generator("cuda").manual_seed(seed)
        w1, w2 = (torch.empty_like(w).random_(0, 256, generator=generator) for w in (first.w1, first.w2))
        layers.append(replace(first, w1=w1, w2=w2))
    return layers


@dataclass(frozen=True)
class Peer:
    """Another maker's kernels."""

    title: str
    quantization: str
    lacks: Callable[..., str]
    """Function of the geometry and vLLM's folder to the reason why the peer cannot be measured, or ""."""
    note: str
    """How the peer's calls differ from our calls, for the page."""
    layers: Callable[[Geometry, Sequence[Any]], list[Any]]
    """Function of the geometry and our layers to the same number of the peer's layers.

    Each has ``expert_bytes`` (codes and scales) and three functions. ``prepare(x, ids, router_weights)`` is not timed, ``output``
    maps its result to ``(T, H)``. ``expected`` computes in float32 with dequantized weights and unquantized activations.
    """


def measure_peer(peer: Peer, geometry: Geometry, ours: Sequence[Any], tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a line for each token count: microseconds, error and megabytes of a call."""
    layers = peer.layers(geometry, ours)
    for count in tokens:
        drawn = draw(geometry, geometry, count, len(layers))
        calls = [(layers[i], layers[i].prepare(drawn.x, ids, drawn.router_weights)) for i, ids in drawn.calls]
        layer, arguments = calls[0]
        expected = layer.expected(drawn.x, drawn.calls[0][1], drawn.router_weights)

        def run(calls: Any = calls) -> list[Any]:
            return [each.output(*arguments) for each, arguments in calls]

        yield {
            "tokens": count,
            "quantization": getattr(layer, "quantization", peer.quantization),
            "error": distance(layer.output(*arguments), expected),
            "us": 1e6 * graph_seconds(run, REPLAYS) / len(calls),
            "megabytes": drawn.hits * layer.expert_bytes / 1e6,
        }
