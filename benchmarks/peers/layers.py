"""What every kernel is given, and how one of other makers is timed.

A captured graph cycles through layers with weights of their own, as many as put four times the L2 cache between two uses of one,
so no weight is read from the cache. All kernels see the same x, ids and router weights.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from benchmarks.geometries import routes
from tests import mxfp8
from tests.nvfp4_layer import Layer, distance, plain, random_call, random_layer
from trtllm_b12x.dispatch.timing import expected_hits, expert_bytes, graph_seconds
from trtllm_b12x.formats.weights import Weights
from trtllm_b12x.kernels import Geometry

REPLAYS = 9
_COLD = 4
"""Bytes that other layers' calls read between two uses of a layer, in multiples of the L2 cache."""
_ROUTINGS = 2
"""Calls of a layer in a graph, each with routes of its own."""
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


def draw(geometry: Geometry, whole: Geometry, tokens: int, layers: int, skewed: bool = False) -> Draw:
    """Draw the calls of a graph over ``layers`` layers. Ids name experts of the ``whole`` layer, as in expert parallelism."""
    layers = min(layers, cold_layers(geometry, tokens))
    routings = _ROUTINGS if tokens <= 256 else 1
    x, _, router_weights = random_call(geometry, tokens, whole.num_experts, "cuda")
    calls = [(i, routes(whole, tokens, i * 97 + turn, skewed).cuda()) for turn in range(routings) for i in range(layers)]
    return Draw(x, router_weights, calls, geometry.num_experts)


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


class PeerLayer(Protocol):
    """One layer's weights in a peer's form."""

    expert_bytes: float
    """Bytes of codes and scales of one expert."""
    timed: Mapping[str, Callable[..., Any]]
    """Key of a line to the function whose time it is: ``us`` and ``products_us``."""

    def prepare(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> tuple[Any, ...]:
        """Return the arguments of the timed functions; not timed."""

    def output(self, *prepared: Any) -> torch.Tensor | None:
        """Return the layer's output ``(T, H)``, or None if no error is computed."""

    def expected(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> torch.Tensor:
        """Return the output in float32, of dequantized weights and activations that are not quantized."""


@dataclass(frozen=True)
class Peer:
    """Another maker's kernels."""

    title: str
    quantization: str
    lacks: Callable[..., str]
    """Function of the geometry and vLLM's folder to the reason why the peer cannot be measured, or ""."""
    note: str
    """How its calls differ from ours, for the page."""
    layers: Callable[[Geometry, Sequence[Any], int], list[Any]]
    """Function of the geometry, our layers and the largest token count to as many ``PeerLayer`` or, if memory is short, fewer."""


def measure_peer(peer: Peer, geometry: Geometry, ours: Sequence[Any], tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a line for each token count: microseconds of a call, error, megabytes of a call and of a replay.

    ``us`` is None if the peer has only products, as its ``products_us``.
    """
    layers = peer.layers(geometry, ours, max(tokens))
    for count in tokens:
        drawn = draw(geometry, geometry, count, len(layers))
        calls = [(layers[i], layers[i].prepare(drawn.x, ids, drawn.router_weights)) for i, ids in drawn.calls]
        layer, arguments = calls[0]
        output = layer.output(*arguments)
        expected = None if output is None else layer.expected(drawn.x, drawn.calls[0][1], drawn.router_weights)
        line: dict[str, Any] = {"tokens": count, "us": None}
        line["quantization"] = getattr(layer, "quantization", peer.quantization)
        line["error"] = math.nan if expected is None or output is None else distance(output, expected)
        for key in layer.timed:

            def run(key: str = key, calls: Any = calls) -> list[Any]:
                return [each.timed[key](*arguments) for each, arguments in calls]

            line[key] = 1e6 * graph_seconds(run, REPLAYS) / len(calls)
        line["megabytes"] = drawn.hits * layer.expert_bytes / 1e6
        line["replay_megabytes"] = line["megabytes"] * len(calls)
        yield line


def swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, limit: float = math.inf) -> torch.Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + beta)


def activated(geometry: Geometry, inner: torch.Tensor) -> torch.Tensor:
    """Apply the layer's activation to ``(rows, r * I)``, gated halves in the order gate, up."""
    if not geometry.gated:
        return plain(geometry.activation, inner)
    gate, up = inner.chunk(2, dim=1)
    if geometry.activation == "Geglu":
        return torch.nn.functional.gelu(gate) * up
    return swiglu(gate, up, 1.702, 1.0, LIMIT) if geometry.activation == "SwigluBias" else swiglu(gate, up)


def float_layer(
    x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor, expert: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """Return the weighted sum ``(T, H)`` float32 of ``expert(rows of x in float32, index)`` over the routes."""
    result = torch.zeros(x.shape, device=x.device)
    for e in ids.unique().tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        result.index_add_(0, token, expert(x[token].float(), e) * router_weights[token, slot].unsqueeze(1))
    return result
