# SPDX-License-Identifier: Apache-2.0
"""A model in float32, layer by layer, from the codes and scales that vLLM's loader has put into its parameters.

Nothing is quantized again: activations stay in float32, even if a format prescribes 4 bits. The device holds one dense matrix
or a few experts in float32 at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import gelu, relu, silu

_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
_EXPERTS_AT_ONCE = 8
_ALPHA, _LIMIT = 1.702, 7.0
"""Constants of gpt-oss's SwiGLU."""


class UnknownModelError(LookupError):
    """This model, or this format of weights, has no float32 computation."""


# ---- weights -------------------------------------------------------------------------------------------------------------


def dequantize(module: Any, prefix: str = "", experts: slice | None = None) -> torch.Tensor:
    """Return a weight in float32: ``(N, K)``, or ``(E, N, K)`` of the ``experts`` of ``w13_`` or ``w2_``.

    Raises:
        UnknownModelError: the weight is not stored as NVFP4, MXFP4, MXFP8, FP8 or unquantized.
    """

    def part(kind: str) -> Any:
        tensor = getattr(module, prefix + kind, None)
        return tensor if tensor is None or experts is None else tensor.data[experts]

    weight, scale, second = part("weight"), part("weight_scale"), part("weight_scale_2")
    if weight is None:
        raise UnknownModelError(f"the weights of {type(module).__name__} are stored in an unknown form")
    if weight.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return weight.float()
    if scale is None:
        raise UnknownModelError(f"{type(module).__name__} has {weight.dtype} weights without weight_scale")
    if weight.dtype is torch.uint8:
        codes = torch.stack((weight & 15, weight >> 4), -1).flatten(-2)
        wide = _FP4.to(weight.device)[codes.int()]
    else:
        wide = weight.float()
    if scale.dtype is torch.uint8:
        return wide * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)
    if weight.dtype is torch.uint8:
        wide = wide * scale.float().repeat_interleave(16, -1)
        if second is None:
            raise UnknownModelError(f"{type(module).__name__} has NVFP4 weights without weight_scale_2")
        return wide * _rows(module, second.float(), wide)
    return wide * (scale.float() if scale.dim() == wide.dim() else _rows(module, scale.float(), wide))


def _rows(module: Any, scale: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Return the scale of a matrix, or the scales of the matrices that are fused in it, as ``(..., N, 1)`` or ``(..., 1, 1)``."""
    stacked = wide.dim() == 3
    values = scale.reshape(len(wide), -1) if stacked else scale.reshape(1, -1)
    if values.shape[1] > 1:
        widths = None if stacked else getattr(module, "logical_widths", None)
        counts = torch.tensor(widths or [wide.shape[-2] // values.shape[1]] * values.shape[1], device=values.device)
        values = values.repeat_interleave(counts, 1)
    return values[..., None] if stacked else values[0][:, None]


def linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    result = x @ dequantize(module)[:, : x.shape[-1]].T
    bias = getattr(module, "bias", None)
    return result if bias is None else result + bias.float()


# ---- experts -------------------------------------------------------------------------------------------------------------


def experts(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the output of vLLM's ``RoutedExperts`` in float32, before its weights are processed.

    Args:
        x: ``(T, hidden)``, float32.
        weights: router weights ``(T, k)``.
        ids: expert of each route ``(T, k)``.
    """
    config = layer.moe_config
    hidden, size = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded
    rows = size * (2 if config.is_act_and_mul else 1)
    interleaved = "GptOss" in type(layer).__name__
    limit = getattr(layer, "swiglu_limit", None)
    result = torch.zeros_like(x)
    for first in range(0, config.num_local_experts, _EXPERTS_AT_ONCE):
        some = slice(first, first + _EXPERTS_AT_ONCE)
        w13 = dequantize(layer, "w13_", some)[:, :rows, :hidden]
        w2 = dequantize(layer, "w2_", some)[:, :hidden, :size]
        for i in range(len(w13)):
            token, slot = (ids == first + i).nonzero(as_tuple=True)
            inner = x[token] @ w13[i].T + _bias(layer, "w13_bias", first + i, rows)
            if interleaved:
                inner = torch.cat((inner[:, ::2], inner[:, 1::2]), -1)
            inner = activate(layer.activation.value, inner, limit)
            output = inner @ w2[i].T + _bias(layer, "w2_bias", first + i, hidden)
            result.index_add_(0, token, output * weights[token, slot, None].float())
    return result


def _bias(layer: Any, name: str, expert: int, size: int) -> Any:
    bias = getattr(layer, name, None)
    return 0.0 if bias is None else bias.data[expert, :size].float()


def activate(name: str, inner: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Compute vLLM's activation ``name`` of FC1's output, columns [gate; up]."""
    if name == "relu2_no_mul":
        return relu(inner) ** 2
    gate, up = inner.chunk(2, -1)
    if name.startswith("swigluoai"):
        gate, up = gate.clamp(max=limit or _LIMIT), up.clamp(-(limit or _LIMIT), limit or _LIMIT)
        return gate * torch.sigmoid(_ALPHA * gate) * (up + 1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name == "silu":
        return silu(gate) * up
    if name in ("gelu", "gelu_tanh"):
        return gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up
    raise UnknownModelError(f"experts with activation {name}")


# ---- whole models --------------------------------------------------------------------------------------------------------


def logits(
    model: torch.nn.Module,
    config: dict[str, Any],
    sequences: torch.Tensor,
    first: int,
    dtype: torch.dtype = torch.float32,
    routes: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits at positions ``first`` and later of token sequences ``(B, T)``, and the expert ids of each layer.

    Args:
        dtype: activations between modules are rounded to this dtype, as an engine stores them. Within a module they are float32.
        routes: expert ids ``(B * T, k)`` of each layer, used instead of the router's own ids.

    Returns:
        float32 logits ``(B, T - first, V)``, and ids ``(B * T, k)`` for each layer.

    Raises:
        UnknownModelError: the model is not Qwen3-MoE or gpt-oss.
    """
    kind = config["model_type"]
    if kind not in ("qwen3_moe", "gpt_oss"):
        raise UnknownModelError(f"no float32 computation of {kind}")
    torch.backends.cuda.matmul.allow_tf32 = False

    def stored(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float()

    modules: dict[str, Any] = dict(model.named_modules())
    attend, route = (_qwen3_attention, _qwen3_routes) if kind == "qwen3_moe" else (_gpt_oss_attention, _gpt_oss_routes)
    norm_eps = config["rms_norm_eps"]
    x = modules["model.embed_tokens" if "model.embed_tokens" in modules else "model.embedding"].weight.data[sequences].float()
    angles = _angles(config, sequences.shape[1], x.device)
    taken: list[torch.Tensor] = []
    for number in range(config["num_hidden_layers"]):
        path = f"model.layers.{number}"
        at = {name.removeprefix(f"{path}."): module for name, module in modules.items() if name.startswith(f"{path}.")}
        attention = at.get("self_attn") or at["attn"]
        h = stored(_norm(at["input_layernorm"], x, norm_eps))
        x = stored(x + stored(attend(attention, config, h, angles, number)))
        layer = next((module for name, module in at.items() if hasattr(module, "w13_weight")), None)
        if layer is None:
            raise UnknownModelError(f"layer {number} has no experts")
        h = stored(_norm(at["post_attention_layernorm"], x, norm_eps)).flatten(0, 1)
        scores = stored(linear(at.get("mlp.gate") or at["mlp.router"], h))
        weights, ids = route(scores, config, None if routes is None else routes[number])
        taken.append(ids)
        x = stored(x + stored(experts(layer, h, weights, ids)).view_as(x))
    x = stored(_norm(modules["model.norm"], x[:, first:], norm_eps))
    head = modules["model.embed_tokens"] if config.get("tie_word_embeddings") else modules["lm_head"]
    return torch.cat([x @ rows.float().T for rows in _vocabulary(head, config["vocab_size"])], -1), taken


def _vocabulary(head: Any, size: int) -> Iterator[torch.Tensor]:
    yield from head.weight.data[:size].split(16384)


def _norm(module: Any, x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * module.weight.float()


def _angles(config: dict[str, Any], length: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of rotary positions, ``(T, 1, head_dim / 2)``, with YaRN if the configuration sets it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config["rope_theta"]
    dim = config["head_dim"]
    exponent = torch.arange(0, dim, 2, device=device).double() / dim
    frequencies, scale = theta**-exponent, 1.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "yarn":
        factor, original = rope["factor"], rope["original_max_position_embeddings"]

        def dimension(rotations: float) -> float:
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension(rope.get("beta_fast", 32)), dimension(rope.get("beta_slow", 1))
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = ((torch.arange(dim // 2, device=device).double() - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequencies = frequencies * (1 - ramp) + frequencies / factor * ramp
        scale = 0.1 * math.log(factor) + 1
    elif kind != "default":
        raise UnknownModelError(f"rotary embeddings of type {kind}")
    angles = torch.outer(torch.arange(length, device=device).double(), frequencies)
    return (scale * angles.cos()).float()[:, None], (scale * angles.sin()).float()[:, None]


def _rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    (a, b), (cos, sin) = x.chunk(2, -1), angles
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _project(module: Any, config: dict[str, Any], x: torch.Tensor) -> list[torch.Tensor]:
    """Return q, k and v, ``(B, T, heads, head_dim)``."""
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    parts = linear(module.qkv_proj, x).split([heads * dim, kv * dim, kv * dim], -1)
    return [part.unflatten(-1, (-1, dim)) for part in parts]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Return causal attention, ``(B, T, heads * head_dim)``. A sink is a head's logit that takes weight and adds no value."""
    length, repeats = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (tensor.repeat_interleave(repeats, 2) for tensor in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    hidden = (distance < 0) | (distance >= (window or length))
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(len(q), -1, length, 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


def _qwen3_attention(module: Any, config: dict[str, Any], x: torch.Tensor, angles: Any, number: int) -> torch.Tensor:
    q, k, v = _project(module, config, x)
    q, k = (_rotate(_norm(norm, t, config["rms_norm_eps"]), angles) for norm, t in ((module.q_norm, q), (module.k_norm, k)))
    return linear(module.o_proj, _attend(q, k, v))


def _gpt_oss_attention(module: Any, config: dict[str, Any], x: torch.Tensor, angles: Any, number: int) -> torch.Tensor:
    q, k, v = _project(module, config, x)
    window = None if number % 2 else config["sliding_window"]
    return linear(module.o_proj, _attend(_rotate(q, angles), _rotate(k, angles), v, window, module.sinks.data))


Routes = tuple[torch.Tensor, torch.Tensor]
"""Router weights and expert ids of tokens, ``(T, k)`` each."""


def _qwen3_routes(scores: torch.Tensor, config: dict[str, Any], ids: torch.Tensor | None) -> Routes:
    probabilities = scores.softmax(-1)
    ids = probabilities.topk(config["num_experts_per_tok"], -1).indices if ids is None else ids
    weights = probabilities.gather(-1, ids)
    return (weights / weights.sum(-1, keepdim=True) if config.get("norm_topk_prob") else weights), ids


def _gpt_oss_routes(scores: torch.Tensor, config: dict[str, Any], ids: torch.Tensor | None) -> Routes:
    ids = scores.topk(config["num_experts_per_tok"], -1).indices if ids is None else ids
    return scores.gather(-1, ids).softmax(-1), ids
