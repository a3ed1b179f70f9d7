"""Build layers of a geometry with random weights, to measure without a server."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x import formats
from trtllm_b12x.kernels import Geometry

from . import building, host, promote, status
from .patches import promotion

_MEMORY = 0.5
"""Maximum share of the free GPU memory that the layers take."""
_COLD = 8
"""Total weight size that is enough, in multiples of the L2 cache size."""
_MOST = 16


class NothingToMeasureError(RuntimeError):
    """Error: none of our kernels serves such a layer here. The message says why."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer in the model, and the parallelism."""

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
    """Build promoted layers of the first rank with random weights: so many that none is in the L2 cache when it runs again.

    Args:
        progress: called with the share of layers that is done.

    Returns:
        TensorRT-LLM wrappers whose ``backend`` is our layer.

    Raises:
        NothingToMeasureError: no kernel of ours serves the layer.
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
    promote.install()
    try:
        with torch.device(device), torch.inference_mode(False):
            return building.create(*sizes, tp=shape.tp, ep=shape.ep, quant_algo=shape.format, group_size=group_size)
    finally:
        if not was:
            promote.uninstall()


def _why(backend: Any) -> str:
    verdicts = (verdict for built, verdict in status.alive() if built is backend)
    return str(next(verdicts, "the host has built it as its own"))


def _enough(backend: Any, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    size = sum(parameter.nbytes for parameter in backend.parameters())
    cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
    room = 1 + int(_MEMORY * torch.cuda.mem_get_info(device)[0]) // size
    return max(1, min(max(6, math.ceil(_COLD * cache / size)), _MOST, room))


def call(module: Any, tokens: int) -> Any:
    """Capture one call in the form that the host makes it, for ``trtllm_b12x.engines.trtllm.host_path.timed_paths``."""
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
    """Autotune the host path for up to ``most`` tokens, as at warm-up. The embedded host has nothing to tune."""
    if not is_embedded():
        with building.autotune():
            run(module, most)


def geometry(module: Any) -> Geometry:
    """Return the geometry of the kernels on this rank."""
    found: Geometry = getattr(module, "backend", module).schedule.kernels[0].geometry
    return found


def is_embedded() -> bool:
    return host.load().generation == "embedded"
