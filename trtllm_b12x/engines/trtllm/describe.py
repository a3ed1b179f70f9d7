# SPDX-License-Identifier: Apache-2.0
"""Describe a TensorRT-LLM layer as ``LayerShape`` and ``Deployment``, before and after it is built.

Only this module reads these facts. Unknown fields are None, and decision rules skip them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trtllm_b12x.core import settings
from trtllm_b12x.decision import Deployment
from trtllm_b12x.formats.geometry import LayerShape

from .host import UnsupportedHostError, lacks, load

if TYPE_CHECKING:
    import torch

LayerQuery = tuple[LayerShape, Deployment]

_MOE_LORA_MODULES = ("moe_h_to_4h", "moe_gate", "moe_4h_to_h")
"""``lora_target_modules`` on the experts (``_torch/peft/lora/validation.py``). LoRA on attention does not change them."""
_ACTIVATION_TENSORS = {"swiglu_alpha": "act_alpha", "swiglu_beta": "act_beta", "swiglu_limit": "act_clamp"}
"""Layer attributes that hold SwiGLU's constants as tensors, mapped to their names in C2."""
_CONSTANTS = (*_ACTIVATION_TENSORS, "swiglu_limit_scalar")
_REGISTERS = ("alpha", "beta", "limit")
_KNOWN_FIELDS = frozenset({"kind", "clamp", "gate_sigmoid_scale", "linear_offset", *_REGISTERS})
"""Fields of C2's activation and constants records that kernels support. All others, such as ``clamp_after_silu`` (PR 19217), must
have their defaults."""


def quantization_of(model_config: Any, override: Any = None) -> dict[str, Any] | None:
    """Return a ``ModelConfig``'s ``quant_algo`` and ``group_size``: empty if its layers differ, None for other types.

    ``override`` is the quantization of one layer, if it differs from the model.
    """
    try:
        quantization = _quantization(override if override is not None else model_config.quant_config)
    except AttributeError:
        return None
    return {} if quantization["quant_algo"] == "MIXED_PRECISION" else quantization


def most_tokens(model_config: Any) -> int | None:
    """Return the maximum number of tokens per call of a layer, or None if unknown. Longer batches come in chunks."""
    with suppress(AttributeError, TypeError):
        return int(model_config.moe_max_num_tokens or model_config.max_num_tokens * model_config.mapping.dp_size)
    return None


def from_config(
    model_config: Any, quantization: Mapping[str, Any] = MappingProxyType({}), arguments: Mapping[str, Any] | None = None
) -> LayerQuery:
    """Describe a layer that is not built yet. Missing fields of a ``ModelConfig`` count as their defaults.

    ``quantization`` has ``quant_algo`` and ``group_size`` as far as known. ``arguments`` are those of the later call of
    ``create_moe_backend``.
    """
    mapping = getattr(model_config, "mapping", None)
    # TensorRT-LLM's own LoRA check moved between generations and is missing in early ones.
    lora = getattr(getattr(model_config, "lora_config", None), "lora_target_modules", None) or ()
    deployment = Deployment(
        ep_size=getattr(mapping, "moe_ep_size", None),
        attention_dp=bool(getattr(mapping, "enable_attention_dp", False)) and getattr(mapping, "tp_size", 1) > 1,
        load_balancer=_load_balancer(model_config),
        lora=any(str(name).lower() in _MOE_LORA_MODULES for name in lora),
        cuda_graphs=bool(getattr(model_config, "use_cuda_graph", False)),
    )
    dynamic = bool(getattr(model_config, "force_dynamic_quantization", False))
    shape = LayerShape(dynamic_quantization=dynamic, **quantization)
    if arguments is not None:
        shape = replace(
            shape,
            **_activation(arguments.get),
            dtype=_dtype_name(arguments.get("dtype")),
            bias=bool(arguments.get("bias")),
            apply_router_weight_on_input=bool(arguments.get("apply_router_weight_on_input")),
            hidden_size=arguments.get("hidden_size"),
        )
    return shape, deployment


def from_layer(layer: Any, config: LayerQuery, alltoall: bool, unequal_scales: bool = False) -> LayerQuery:
    """Describe a built layer completely, from its attributes (``contract.LAYER``) and with its final quantization.

    ``config`` is the result of ``from_config`` when the layer was built. ``alltoall`` is True if tokens come from an all-to-all.
    ``unequal_scales`` is True if gate and up of some expert have different ``weight_scale_2``.
    """
    shape, deployment = config
    shape = replace(
        shape,
        **_quantization(layer.quant_config),
        **_activation(lambda name: getattr(layer, name, None)),
        dtype=_dtype_name(layer.dtype),
        pre_quant_scale=getattr(layer, "fc31_act_scale", None) is not None,
        unequal_scales=unequal_scales,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_experts=layer.num_experts,
        top_k=layer.routing_method.experts_per_token,
        bias=bool(layer.bias),
        apply_router_weight_on_input=layer.apply_router_weight_on_input,
    )
    balanced = layer.layer_load_balancer is not None
    return shape, replace(
        deployment,
        ep_size=layer.ep_size,
        tp_size=layer.tp_size,
        attention_dp=layer.use_dp and layer.parallel_size > 1,
        alltoall=alltoall,
        load_balancer="none" if not balanced else "dynamic" if layer._using_dynamic_load_balancer() else "static",
    )


def _activation(get: Callable[[str], Any]) -> dict[str, Any]:
    """Return the activation's name, and whether SwiGLU's alpha, beta or limit are set.

    ``get`` looks up an argument of ``create_moe_backend`` or a layer attribute, and returns None if it is missing. Unknown fields
    that are set become part of the name, so that no kernel supports the activation.
    """
    record = get("activation")  # C2; older generations have activation_type and separate constants
    kind = getattr(record, "kind", get("activation_type"))
    names = load().ActivationType
    constants = record.constants() if callable(getattr(record, "constants", None)) else None
    values = map(get, _CONSTANTS) if constants is None else (getattr(constants, name, None) for name in _REGISTERS)
    unknown = ", ".join(dict.fromkeys((*_set_and_unknown(record), *_set_and_unknown(constants))))
    return {
        "activation": f"{names(names.Swiglu if kind is None else kind).name}{f' with {unknown}' if unknown else ''}",
        "activation_constants": any(value is not None for value in values),
    }


def _set_and_unknown(record: Any) -> Iterator[str]:
    for field in fields(record) if is_dataclass(record) else ():
        value, default = getattr(record, field.name), field.default
        same = value is default or (isinstance(value, (bool, int, float, str)) and value == default)
        if field.name not in _KNOWN_FIELDS and not same:
            yield field.name


def activation_tensors(layer: Any) -> dict[str, torch.Tensor]:
    """Return SwiGLU alpha, beta and limit as TensorRT-LLM's operator receives them, ``(E,)`` float32 each, for local experts.

    If one of them is set, the operator computes SwigluBias (``moeOp.cpp``). Raise ValueError if one is not a tensor.
    """
    tensors = {name: getattr(layer, attribute) for name, attribute in activation_tensor_names(layer).items()}
    for name, value in tensors.items():
        if not hasattr(value, "data_ptr"):
            raise ValueError(f"{name} is a {type(value).__name__}, the kernels take a tensor")
    if not tensors and _activation(lambda name: getattr(layer, name, None))["activation_constants"]:
        raise ValueError("SwiGLU's limit is given as a number alone")
    return tensors


def activation_tensor_names(layer: Any) -> dict[str, str]:
    """Map SwiGLU alpha, beta and limit, as far as they are set, to the layer attributes that hold them."""
    both = ((name, attribute) for name, newer in _ACTIVATION_TENSORS.items() for attribute in (name, newer))
    return {name: attribute for name, attribute in both if getattr(layer, attribute, None) is not None}


def _load_balancer(model_config: Any) -> str | None:
    """Return the kind of the registered load balancer. Whether the layer will use it is not known yet."""
    registered = None
    with suppress(UnsupportedHostError):
        registered = getattr(load().create_moe, "get_moe_load_balancer", lambda: None)()
    if registered is None:
        return None
    # As in TensorRT-LLM, a balancer with updates per iteration moves weights while serving.
    updates = getattr(getattr(model_config, "moe_load_balancer", None), "layer_updates_per_iter", 0)
    return "dynamic" if int(updates or 0) else "static"


def quant_algo(quant_config: Any) -> str:
    """Return the algorithm name of a ``QuantConfig``, or "none" if the layer is not quantized."""
    algo = quant_config.quant_algo if quant_config is not None else None
    return "none" if algo is None else str(getattr(algo, "value", algo))


def served_as(quant_algo: str) -> str:
    """Return the algorithm to build experts with: NVFP4 for W4A16_NVFP4 if the user enables W4A4 prefill, else ``quant_algo``."""
    w4a4 = quant_algo == "W4A16_NVFP4" and settings.W4A4_PREFILL() and not lacks(quant_algo)
    return "NVFP4" if w4a4 else quant_algo


def _quantization(quant_config: Any) -> dict[str, Any]:
    return {"quant_algo": served_as(quant_algo(quant_config)), "group_size": getattr(quant_config, "group_size", None)}


def _dtype_name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
