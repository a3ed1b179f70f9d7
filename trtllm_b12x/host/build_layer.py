"""Layers of a geometry with random weights: to measure where no server has loaded any."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x import formats, host, registry, selection
from trtllm_b12x.host import building
from trtllm_b12x.host.patches import promotion
from trtllm_b12x.kernels import Geometry

_MEMORY = 0.5
"""Share of what is free that layers may take."""
_COLD = 8
"""Caches full of weights that are enough."""
_MOST = 16


class NothingToMeasureError(RuntimeError):
    """No kernel of ours serves such a layer here; the message says why."""


@dataclass(frozen=True)
class Shape:
    """A layer as the model has it, and the ranks that share it."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    tp: int = 1
    ep: int = 1
    format: str = formats.FORMATS[0].name


def build(
    shape: Shape,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Any]:
    """The first rank's layers, promoted, with random weights, as many as are out of the L2 cache when their turn comes again.

    Args:
        progress: told the share of them that is done.

    Returns:
        Wrappers of the host's, whose ``backend`` is ours.

    Raises:
        NothingToMeasureError: see there.
    """
    made: list[Any] = []
    wanted = 1
    while len(made) < wanted:
        module = _promoted(shape, device)
        backend = getattr(module, "backend", module)
        if not getattr(getattr(backend, "verdict", None), "served", False):
            raise NothingToMeasureError(_why(backend))
        backend.quant_method.fill(backend, torch.Generator(backend.w2_weight.device).manual_seed(len(made)))
        module.post_load_weights()
        if not backend.schedule.kernels or not backend.schedule.settled:
            raise NothingToMeasureError(_why(backend))
        made.append(module)
        if len(made) == 1:
            wanted = _enough(backend, device)
        progress(len(made) / wanted)
    return made


def _promoted(shape: Shape, device: torch.device) -> Any:
    sizes = (shape.num_experts, shape.hidden_size, shape.intermediate_size, shape.top_k, shape.activation)
    group_size = formats.group_size(shape.format)
    was = promotion.active
    selection.install()
    try:
        with torch.device(device), torch.inference_mode(False):
            return building.create(*sizes, tp=shape.tp, ep=shape.ep, quant_algo=shape.format, group_size=group_size)
    finally:
        if not was:
            selection.uninstall()


def _why(backend: Any) -> str:
    verdicts = (verdict for built, verdict in registry.alive() if built is backend)
    return str(next(verdicts, "the host has built it as its own"))


def _enough(backend: Any, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    size = sum(parameter.nbytes for parameter in backend.parameters())
    cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
    room = 1 + int(_MEMORY * torch.cuda.mem_get_info(device)[0]) // size
    return max(1, min(max(6, math.ceil(_COLD * cache / size)), _MOST, room))


def call(module: Any, tokens: int) -> Any:
    """A call of the host's, in its own form: what :func:`trtllm_b12x.host.host_path.timed_paths` takes."""
    seen: list[Any] = []
    backend = getattr(module, "backend", module)
    backend._ask = seen.append
    try:
        run(module, tokens)
    finally:
        del backend._ask
    return seen[0]


def run(module: Any, tokens: int) -> torch.Tensor:
    backend = getattr(module, "backend", module)
    device, dtype = backend.w2_weight.device, backend.schedule.kernels[0].geometry.dtype
    own = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, backend.hidden_size, device=device, generator=own).to(dtype)
    logits = torch.randn(tokens, backend.num_experts, device=device, generator=own)
    with torch.inference_mode():
        result: torch.Tensor = module(x, logits)
    return result


def tuned(module: Any, most: int) -> None:
    """The host tunes its own path for up to ``most`` tokens, as when it warms up; the embedded one has nothing to tune."""
    if not is_embedded():
        with building.autotune():
            run(module, most)


def geometry(module: Any) -> Geometry:
    """Of the kernels, on this rank."""
    found: Geometry = getattr(module, "backend", module).schedule.kernels[0].geometry
    return found


def is_embedded() -> bool:
    return host.load().generation == "embedded"
