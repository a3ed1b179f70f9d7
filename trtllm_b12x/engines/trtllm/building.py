"""Build layers of this process's host outside of a model. The command line measures them."""

from __future__ import annotations

import importlib
import inspect
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from . import embedded
from .host import load

_SWIGLU = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
"""SwigluBias constants of gpt-oss and MiniMax-M3. The time of a layer does not depend on them."""


def records() -> Any:
    """Return the host classes that describe a layer, by name, wherever this generation defines them."""
    trtllm = load()
    if trtllm.generation == "embedded":
        return embedded
    sources = {
        "tensorrt_llm._torch.model_config": ("ModelConfig",),
        "tensorrt_llm.mapping": ("Mapping",),
        "tensorrt_llm.models.modeling_utils": ("QuantAlgo", "QuantConfig"),
        f"{trtllm.create_moe.__package__}.routing": ("BaseMoeRoutingMethod", "RenormalizeMoeRoutingMethod"),
    }
    found = {name: getattr(importlib.import_module(module), name) for module, names in sources.items() for name in names}
    return SimpleNamespace(**found)


def create(
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    activation: str,
    *,
    tp: int = 1,
    ep: int = 1,
    quant_algo: str = "NVFP4",
    group_size: int | None = 16,
    dtype: torch.dtype = torch.bfloat16,
    most_tokens: int = 8192,
) -> Any:
    """Call ``create_moe`` for a quantized layer on the first of ``tp * ep`` ranks. The weights are uninitialized.

    Sizes are those of the model. ``activation`` is a member of ``ActivationType``, ``quant_algo`` of ``QuantAlgo``.

    Raises:
        ValueError: the host does not know the algorithm.
        Exception: any error of the host.
    """
    trtllm, names = load(), records()
    ranks = {"world_size": tp * ep, "tp_size": tp * ep, "moe_tp_size": tp, "moe_ep_size": ep}
    config = names.ModelConfig(
        quant_config=names.QuantConfig(quant_algo=names.QuantAlgo(quant_algo), group_size=group_size),
        mapping=names.Mapping(**ranks),
        moe_backend="CUTLASS",
        max_num_tokens=most_tokens,
    )
    create_moe, kind = trtllm.create_moe.create_moe, trtllm.ActivationType[activation]
    values = _SWIGLU if activation == "SwigluBias" else {}
    constants = {name: torch.full((num_experts // ep,), value, dtype=torch.float32) for name, value in values.items()}
    if trtllm.generation == "embedded" or "activation_type" in inspect.signature(create_moe).parameters:
        given = {"activation_type": kind, **{f"swiglu_{name}": tensor for name, tensor in constants.items()}}
    else:
        payloads = importlib.import_module(f"{trtllm.create_moe.__package__}.activation")
        if constants:
            given = {"activation": payloads.SwigluBiasActivation(constants["alpha"], constants["beta"], constants["limit"])}
        else:
            swiglu = kind == trtllm.ActivationType.Swiglu
            given = {"activation": payloads.SwigluActivation() if swiglu else payloads.SimpleActivation(kind)}
    routing = names.RenormalizeMoeRoutingMethod(top_k)
    module = create_moe(
        routing, num_experts, hidden_size, intermediate_size, dtype=dtype, reduce_results=False, model_config=config, **given
    )
    if not getattr(module, "backend", module)._weights_created:
        module.create_weights()
    return module


def autotune() -> AbstractContextManager[Any]:
    """Return the context in which TensorRT-LLM autotunes the operators that are called."""
    found: AbstractContextManager[Any] = importlib.import_module("tensorrt_llm._torch.autotuner").autotune()
    return found
