"""What the wrappers of all generations have in common."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tensorrt_llm._torch.utils import AuxStreamType, EventType, get_model_extra_attrs

_SYNCHRONIZED = (
    "layer_idx",
    "layer_idx_str",
    "num_slots",
    "layer_load_balancer",
    "repeat_count",
    "repeat_idx",
    "initial_local_expert_ids",
    "initial_global_assignments",
    "slot_start",
    "slot_end",
    "expert_size_per_partition",
)


def adopt(wrapper: Any, backend: Any) -> None:
    wrapper.backend = backend
    for name in _SYNCHRONIZED:
        setattr(backend, name, getattr(wrapper, name))


@contextmanager
def temporarily_skip_weight_creation(model_config: Any) -> Iterator[None]:
    previous = model_config.skip_create_weights_in_init

    def write(value: bool) -> None:
        model_config._frozen = False
        model_config.skip_create_weights_in_init = value
        model_config._frozen = True

    write(True)
    try:
        yield
    finally:
        write(previous)


def set_chunking(wrapper: Any, model_config: Any, aux_stream_dict: Any) -> None:
    wrapper.moe_max_num_tokens = model_config.moe_max_num_tokens
    wrapper.aux_stream, wrapper.event_dict = None, None
    if wrapper.moe_max_num_tokens < model_config.max_num_tokens * model_config.mapping.dp_size and torch.cuda.is_available():
        streams = aux_stream_dict or {}
        wrapper.aux_stream = streams.get(AuxStreamType.MoeChunkingOverlap) or torch.cuda.Stream()
        wrapper.event_dict = {key: torch.cuda.Event() for key in (EventType.Main, EventType.MoeChunkingOverlap)}


def register_layer(layer: Any, layer_idx: int | None, model_config: Any) -> None:
    """Make a layer known to the operator that stands for its ``forward`` under a compiler."""
    layer.register_to_config = layer_idx is not None
    if layer_idx is not None:
        layers: dict[str, Any] = model_config.extra_attrs.setdefault("moe_layers", {})
        layers[str(layer_idx)] = weakref.ref(layer)


@torch.library.custom_op("trtllm::moe_custom_op", mutates_args=())
def moe_custom_op(layer_idx: str, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
    layers: Any = get_model_extra_attrs()["moe_layers"]
    result: torch.Tensor = layers[layer_idx]().forward_impl(x, router_logits)
    return result


@moe_custom_op.register_fake
def _(layer_idx: str, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
