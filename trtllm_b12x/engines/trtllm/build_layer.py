# SPDX-License-Identifier: Apache-2.0
"""Build TensorRT-LLM layers of one shape with random weights, to measure without a server."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from trtllm_b12x import formats
from trtllm_b12x.formats.geometry import LayerShape

from . import embedded, host, patches, promote, status

_SWIGLU = MappingProxyType({"alpha": 1.702, "beta": 1.0, "limit": 7.0})
"""SwigluBias constants of gpt-oss and MiniMax-M3. The time of a layer does not depend on them."""
_SOURCES = {
    "ModelConfig": "tensorrt_llm._torch.model_config",
    "Mapping": "tensorrt_llm.mapping",
    "QuantAlgo": "tensorrt_llm.models.modeling_utils",
    "QuantConfig": "tensorrt_llm.models.modeling_utils",
}
"""TensorRT-LLM module by name of a class that describes a layer."""

_MEMORY = 0.5
"""Maximum share of the free GPU memory that the layers take."""
_COLD = 8
"""Target for the total weight size of the layers, in multiples of the L2 cache size."""
_MOST = 16


class NothingToMeasureError(RuntimeError):
    """Error: none of our kernels serves the layer in this process. The message says why."""


def build(shape: LayerShape, device: torch.device, tp: int = 1, ep: int = 1) -> list[Any]:
    """Build promoted layers of rank 0 with random weights, enough to evict each from the L2 cache before it runs again.

    Return TensorRT-LLM's wrappers, whose ``backend`` is our layer. Raise NothingToMeasureError if none of our kernels serves it.
    """
    made: list[Any] = []
    wanted, was_active = 1, patches.active
    promote.install()
    try:
        while len(made) < wanted:
            with torch.device(device), torch.inference_mode(False):
                module = create(shape, tp, ep)
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
    finally:
        if not was_active:
            promote.uninstall()
    return made


def create(
    shape: LayerShape, tp: int = 1, ep: int = 1, rank: int = 0, swiglu: Mapping[str, float] = _SWIGLU, **arguments: Any
) -> Any:
    """Call ``create_moe`` for one of ``tp * ep`` ranks, in bf16. The weights are uninitialized. Raise TensorRT-LLM's errors.

    ``swiglu`` holds the constants of SwigluBias, ``arguments`` holds further arguments of ``create_moe``.
    """
    trtllm, quant_algo = host.load(), str(shape.quant_algo)
    in_torch = trtllm.generation == "embedded"

    def named(name: str, module: str = "") -> Any:
        return getattr(embedded if in_torch else importlib.import_module(module or _SOURCES[name]), name)

    group_size = shape.group_size or formats.group_size(quant_algo)
    quant_config = named("QuantConfig")(quant_algo=named("QuantAlgo")(quant_algo), group_size=group_size)
    config = named("ModelConfig")(
        quant_config=quant_config,
        mapping=named("Mapping")(world_size=tp * ep, rank=rank, tp_size=tp * ep, moe_tp_size=tp, moe_ep_size=ep),
        moe_backend="CUTLASS",
        max_num_tokens=8192,
    )
    package = trtllm.create_moe.__package__
    routing = named("RenormalizeMoeRoutingMethod", f"{package}.routing")(shape.top_k)
    create_moe, kind = trtllm.create_moe.create_moe, trtllm.ActivationType[str(shape.kernel_activation)]
    experts, values = shape.num_experts, swiglu if shape.activation_constants else {}
    constants = {name: torch.full((int(experts or 0) // ep,), value, dtype=torch.float32) for name, value in values.items()}
    if in_torch or "activation_type" in inspect.signature(create_moe).parameters:
        arguments |= {"activation_type": kind, **{f"swiglu_{name}": tensor for name, tensor in constants.items()}}
    else:
        records = importlib.import_module(f"{package}.activation")
        if constants:
            arguments["activation"] = records.SwigluBiasActivation(*constants.values())
        else:
            plain = kind == trtllm.ActivationType.Swiglu
            arguments["activation"] = records.SwigluActivation() if plain else records.SimpleActivation(kind)
    sizes = experts, shape.hidden_size, shape.intermediate_size
    module = create_moe(routing, *sizes, dtype=torch.bfloat16, model_config=config, bias=bool(shape.bias), **arguments)
    if not getattr(module, "backend", module)._weights_created:
        module.create_weights()
    return module


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
    """Capture one call in TensorRT-LLM's calling convention, for ``trtllm_b12x.engines.trtllm.host_path.timed_paths``."""
    seen: list[Any] = []
    backend = getattr(module, "backend", module)
    backend._measure_once = seen.append
    try:
        run(module, tokens)
    finally:
        del backend._measure_once
    return seen[0]


def run(module: Any, tokens: int) -> torch.Tensor:
    backend = getattr(module, "backend", module)
    device, dtype = backend.w2_weight.device, backend.schedule.kernels[0].geometry.dtype
    generator = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, backend.hidden_size, device=device, generator=generator).to(dtype)
    logits = torch.randn(tokens, backend.num_experts, device=device, generator=generator)
    with torch.inference_mode():
        result: torch.Tensor = module(x, logits)
    return result


def tuned(module: Any, most: int) -> None:
    """Autotune TensorRT-LLM's path for up to ``most`` tokens, as at warm-up. The embedded TensorRT-LLM has nothing to tune."""
    if not is_embedded():
        with importlib.import_module("tensorrt_llm._torch.autotuner").autotune():
            run(module, most)


def is_embedded() -> bool:
    return host.load().generation == "embedded"
