# SPDX-License-Identifier: Apache-2.0
"""Random weights of a whole model, drawn into vLLM's parameters before it packs them.

Each parameter is drawn by a generator seeded with its name. So every backend, and every rank of a split model, gets the same
weights, and a process can draw only one layer. Products have about unit variance.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_FP4_RMS, _FP8_RMS, _E4M3_RMS = 2.93, 64.0, 279.0
"""Root mean squares of uniform FP4 codes, of the FP8 values below, and of the block scales below."""
_BIAS = 100
"""``inner`` of biases, whose standard deviation is 0.1."""
_LARGEST = {"w13": 8.0, "w2": 32.0}
"""Largest activation that an input scale is calibrated for. ``w2`` reads products."""


@dataclass(frozen=True)
class Parameter:
    """How one parameter is drawn, and which part of it this rank has."""

    name: str
    target: torch.Tensor
    role: str
    """A key of ``_DRAW``."""
    shape: tuple[int, ...]
    """Shape in a model that is not split."""
    inner: int = 0
    """Number of terms in a sum that uses the parameter."""
    parts: tuple[tuple[int, torch.Tensor], ...] = ()
    """Dimensions that are split, each with the indices that this rank has."""


def fill(model: torch.nn.Module) -> int:
    """Draw every parameter of a model. Return their number.

    Raises:
        LookupError: a module is split over GPUs in an unknown way.
    """
    count = 0
    with torch.no_grad():
        for parameter in parameters(model):
            values = draw(parameter, parameter.target.device)
            for dimension, indices in parameter.parts:
                values = values.index_select(dimension, indices.to(values.device))
            target = parameter.target
            if values.shape != target.shape and values.numel() != target.numel():
                target.zero_()  # the backend pads its parameters
                target = target[tuple(slice(n) for n in values.shape)]
            target.copy_(values.reshape(target.shape))
            count += 1
    return count


def parameters(model: torch.nn.Module) -> Iterator[Parameter]:
    """Yield the parameters to draw for a vLLM model whose weights are not processed yet."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            role = _role(module, path, name, tensor)
            if role and id(tensor) not in seen:
                seen.add(id(tensor))
                yield _parameter(module, path, name, tensor.data, role)


def draw(parameter: Parameter, device: Any) -> torch.Tensor:
    """Return the values of a parameter of a model that is not split."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(parameter.name.encode()))
    return _DRAW[parameter.role](parameter, generator, device).to(parameter.target.dtype)


def local_shape(parameter: Parameter) -> tuple[int, ...]:
    """Return the shape of this rank's part of a parameter, without the backend's padding."""
    shape = list(parameter.shape)
    for dimension, indices in parameter.parts:
        shape[dimension] = len(indices)
    return tuple(shape)


def _role(module: torch.nn.Module, path: str, name: str, tensor: torch.Tensor) -> str:
    kind = type(module).__name__
    if name.endswith(("k_scale", "v_scale", "q_scale", "prob_scale")):
        return ""  # vLLM sets the scales of the KV cache
    if name.endswith("input_scale"):
        return "input_scale"
    weight = _weight_of(module, name)
    if name.endswith("weight_scale_2"):
        return "scale_2"
    if name.endswith("weight_scale"):
        if tensor.dtype is not torch.uint8:
            return "e4m3"
        return "e8m0 of FP4" if weight is not None and weight.dtype is torch.uint8 else "e8m0 of FP8"
    if tensor.dtype is torch.uint8:
        return "FP4"
    if tensor.dtype is torch.float8_e4m3fn:
        return "FP8"
    if name in ("A_log", "A"):
        return name
    if name in ("dt_bias", "D"):
        return "ones"
    if "norm" in f"{path}.{name}".lower() or "Norm" in kind:
        return "near 0" if "Gemma" in kind or "Qwen3_5RMSNorm" in kind else "near 1"
    return "normal"


def _weight_of(module: torch.nn.Module, name: str) -> Any:
    prefix = name.split("_", 1)[0] + "_" if name.startswith(("w13_", "w2_")) else ""
    return getattr(module, f"{prefix}weight", None)


def _parameter(module: Any, path: str, name: str, tensor: torch.Tensor, role: str) -> Parameter:
    key, shape = f"{path}.{name}", list(tensor.shape)
    parts: dict[int, torch.Tensor] = {}
    if name.startswith(("w13_", "w2_")):
        inner = _experts(module, name, shape, parts)
        if name.endswith("bias"):
            inner = _BIAS
            if name.startswith("w2") and module.moe_config.moe_parallel_config.tp_rank:
                role = "zeros"  # only rank 0 adds the bias
    else:
        _dense(module, name, shape, parts)
        weight = _weight_of(module, name)
        width = shape[-1] if weight is None or weight.dim() < 2 else weight.shape[-1]
        inner = width * (2 if weight is not None and weight.dtype is torch.uint8 else 1)
        if any(kind.__name__ == "RowParallelLinear" for kind in type(module).__mro__):
            inner *= module.tp_size  # each rank has a part of every sum
        if "Embedding" in type(module).__name__:
            inner = 4
        elif name == "sinks":
            inner = 1
        elif name.endswith("bias"):
            inner = _BIAS
    return Parameter(key, tensor, role, tuple(shape), inner, tuple(parts.items()))


def _experts(layer: Any, name: str, shape: list[int], parts: dict[int, torch.Tensor]) -> int:
    """Set shape and parts of stacked experts ``(E, rows, columns)``. Return the number of terms in their sums."""
    config = layer.moe_config
    parallel = config.moe_parallel_config
    hidden, size = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded
    whole, gated = size * parallel.tp_size, config.is_act_and_mul
    local = torch.arange(parallel.tp_rank * size, (parallel.tp_rank + 1) * size)
    if layer.expert_map is not None:
        expert_map = layer.expert_map.cpu()
        ids = (expert_map >= 0).nonzero()[:, 0]
        parts[0] = ids[expert_map[ids].argsort()]
        shape[0] = len(expert_map)
    if name.startswith("w13"):
        if len(shape) > 1 and shape[1] > 2:
            shape[1] = whole * (2 if gated else 1)
            interleaved = "GptOss" in type(layer).__name__
            rows = torch.stack((2 * local, 2 * local + 1), 1).flatten() if interleaved else torch.cat((local, whole + local))
            if parallel.tp_size > 1:
                parts[1] = rows if gated else local
        inner = hidden
    else:
        if len(shape) > 1:
            shape[1] = hidden
        inner = whole
    if len(shape) == 3:
        dtype = getattr(layer, name).dtype
        if name.endswith("weight"):
            values = 2 if dtype is torch.uint8 else 1
        else:
            values = 16 if dtype is torch.float8_e4m3fn else 32
        shape[2] = inner // values
        if name.startswith("w2") and parallel.tp_size > 1:
            if size % values:
                raise LookupError(f"{size} columns of a rank are not whole blocks of {values}; split over fewer GPUs")
            columns = size // values
            parts[2] = torch.arange(parallel.tp_rank * columns, (parallel.tp_rank + 1) * columns)
    return inner


def _dense(module: Any, name: str, shape: list[int], parts: dict[int, torch.Tensor]) -> None:
    """Set shape and parts of a parameter of a module that is not experts."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if "VocabParallelEmbedding" in kinds:
        shard = module.shard_indices
        shape[0] = module.org_vocab_size
        if module.tp_size > 1:
            parts[0] = torch.arange(shard.org_vocab_start_index, shard.org_vocab_end_index)
        return
    count, rank = getattr(module, "tp_size", 1), getattr(module, "tp_rank", 0)
    if name == "sinks":
        count, rank = module.qkv_proj.tp_size, module.qkv_proj.tp_rank
    scalar = len(shape) < 2 and not name.endswith("bias") and name != "sinks"
    if count == 1 or scalar:
        return
    if "QKVParallelLinear" in kinds:
        heads, width = module.num_heads, module.head_size
        kv, total_kv = module.num_kv_heads, module.total_num_kv_heads
        first = rank // module.num_kv_head_replicas * kv
        starts = (rank * heads, heads), (module.total_num_heads + first, kv), (module.total_num_heads + total_kv + first, kv)
        parts[0] = torch.cat([torch.arange(at * width, (at + n) * width) for at, n in starts])
        shape[0] = (module.total_num_heads + 2 * total_kv) * width
    elif "RowParallelLinear" in kinds:
        if not name.endswith("bias"):
            parts[len(shape) - 1] = torch.arange(rank * shape[-1], (rank + 1) * shape[-1])
            shape[-1] *= count
    elif name == "sinks":
        parts[0] = torch.arange(rank * shape[0], (rank + 1) * shape[0])
        shape[0] *= count
    elif "ReplicatedLinear" not in kinds:
        raise LookupError(f"random weights of {type(module).__name__} cannot be split over GPUs; name a checkpoint")


def _uniform(p: Parameter, generator: torch.Generator, device: Any) -> torch.Tensor:
    return torch.rand(p.shape, generator=generator, device=device, dtype=torch.float32)


def _normal(p: Parameter, generator: torch.Generator, device: Any) -> torch.Tensor:
    return torch.randn(p.shape, generator=generator, device=device, dtype=torch.float32)


def _bytes(low: int, high: int, p: Parameter, generator: torch.Generator, device: Any) -> torch.Tensor:
    return torch.randint(low, high, p.shape, generator=generator, device=device, dtype=torch.uint8)


def _exponents(rms: float, p: Parameter, generator: torch.Generator, device: Any) -> torch.Tensor:
    low = 127 + math.floor(math.log2(1 / (math.sqrt(p.inner) * rms * 1.5)) + 0.5)
    return _bytes(low, low + 2, p, generator, device)


def _scale_2(p: Parameter, generator: torch.Generator, device: Any) -> torch.Tensor:
    """Return one scale per expert, equal for gate and up. Other weights have one common scale."""
    value = torch.full(p.shape, 1 / (math.sqrt(p.inner) * _FP4_RMS * _E4M3_RMS), device=device, dtype=torch.float32)
    if "experts" not in p.name or not p.shape:
        return value
    spread = 0.7 + 0.6 * torch.rand(p.shape[:1], generator=generator, device=device, dtype=torch.float32)
    return value * spread.reshape(-1, *[1] * (len(p.shape) - 1))


def _input_scale(p: Parameter, generator: torch.Generator, device: Any) -> torch.Tensor:
    largest = _LARGEST["w2" if p.name.rpartition(".")[2].startswith("w2") else "w13"]
    return torch.full(p.shape, largest / (6 * 448), device=device, dtype=torch.float32)


_DRAW: dict[str, Any] = {
    "FP4": lambda *a: _bytes(0, 256, *a),
    "FP8": lambda *a: (_normal(*a) * _FP8_RMS).clamp_(-448, 448),
    "e4m3": lambda *a: _uniform(*a) * 384 + 64,
    "e8m0 of FP4": lambda *a: _exponents(_FP4_RMS, *a),
    "e8m0 of FP8": lambda *a: _exponents(_FP8_RMS, *a),
    "scale_2": _scale_2,
    "input_scale": _input_scale,
    "A_log": lambda *a: torch.log(1 + 15 * _uniform(*a)),
    "A": lambda *a: -1 - 15 * _uniform(*a),
    "ones": lambda p, generator, device: torch.ones(p.shape, device=device),
    "zeros": lambda p, generator, device: torch.zeros(p.shape, device=device),
    "near 0": lambda *a: 0.1 * _normal(*a),
    "near 1": lambda *a: 1 + 0.1 * _normal(*a),
    "normal": lambda p, generator, device: _normal(p, generator, device) / math.sqrt(p.inner or 1),
}
