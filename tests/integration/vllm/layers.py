# SPDX-License-Identifier: Apache-2.0
"""Layers of vLLM from random checkpoint tensors, through its own ModelOpt methods and modular kernel."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from tests import checkpoints, mxfp4, mxfp8
from tests.nvfp4_layer import dequantized
from tests.nvfp4_layer import distance as distance

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
COMMUNICATORS = "vllm.distributed.device_communicators"


def pretend_sm120() -> None:
    """Make vLLM see an SM120 on a machine without a GPU. Its modules are imported before: they call extensions if there is one.

    The extensions are linked with torch's CUDA libraries, which a CPU build does not have. Empty modules stand in. Idempotent.
    """
    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch"):
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    import vllm.platforms as platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    if type(platforms._current_platform).__name__ == "Sm120":  # vLLM's modules have bound it
        return

    class Sm120(CudaPlatformBase):
        visible = False
        dispatch_key = "CPU"  # of vLLM's custom operators
        capability = DeviceCapability(12, 0)
        get_device_capability = classmethod(lambda cls, device_id=0: cls.capability)
        get_device_name = classmethod(lambda cls, device_id=0: "SM120, pretended")
        get_device_communicator_cls = classmethod(lambda cls: f"{COMMUNICATORS}.base_device_communicator.DeviceCommunicatorBase")
        is_cuda_alike = is_cuda = lambda self: self.visible

    platforms._current_platform = Sm120()
    for name in ("modelopt", "mxfp4", "online.fp8"):
        importlib.import_module(f"vllm.model_executor.layers.quantization.{name}")
    Sm120.visible = True
    torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = lambda: None  # ask for a device
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


@contextmanager
def vllm_config(device: torch.device | str = "cpu") -> Iterator[None]:
    """Set vLLM's configuration, and the memory that its modular kernels share."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device(device))
    with set_current_vllm_config(VllmConfig()):
        yield


@contextmanager
def pretended(sm: int) -> Iterator[None]:
    """Make vLLM see another card, after ``pretend_sm120``. None for 0."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(*divmod(sm, 10)) if sm else None
    with mock.patch.object(type(current_platform), "capability", capability):
        yield


@contextmanager
def model_dtype() -> Iterator[None]:
    """Set the default dtype that vLLM builds a model under."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def config_of(experts: int, top_k: int, hidden: int, size: int, **more: Any) -> Any:
    """Return a ``FusedMoEConfig``. ``parallel``: fields of its parallel config."""
    from vllm.model_executor.layers.fused_moe import config as c
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    parallel = c.FusedMoEParallelConfig.make_no_parallel()
    for name, value in more.pop("parallel", {}).items():
        setattr(parallel, name, value)
    fields = {
        "num_experts": experts,
        "experts_per_token": top_k,
        "hidden_dim": hidden,
        "intermediate_size": size,
        "num_local_experts": experts,
        "num_logical_experts": experts,
        "device": "cpu",
        "routing_method": c.RoutingMethodType.Unspecified,  # calls come with ids
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
    } | more
    fields["activation"] = MoEActivation(fields.get("activation", "silu"))
    return c.FusedMoEConfig(**fields)


@dataclass
class Experts:
    """Tensors of a layer as a ModelOpt checkpoint has them, and the layer in float32. E experts, rows [w1; w3]."""

    parameters: dict[str, torch.Tensor]
    """vLLM's parameter names to tensors."""
    w13: torch.Tensor
    w2: torch.Tensor
    """Dequantized, float32, on the CPU or the GPU."""
    b13: torch.Tensor | float = 0.0
    """``(E, r * I)``, and of FC2 ``(E, H)``."""
    b2: torch.Tensor | float = 0.0

    def expected(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, activation: str = "silu", limit: float = math.inf
    ) -> torch.Tensor:
        """Return the layer's output in float32."""
        result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e in range(len(self.w13)):
            token, slot = (ids == e).nonzero(as_tuple=True)
            b13, b2 = (bias[e].float() if isinstance(bias, torch.Tensor) else bias for bias in (self.b13, self.b2))
            inner = activated(activation, x[token].float() @ self.w13[e].T + b13, limit)
            result.index_add_(0, token, (inner @ self.w2[e].T + b2) * weights[token, slot].float().unsqueeze(1))
        return result


def activated(name: str, inner: torch.Tensor, limit: float) -> torch.Tensor:
    """Compute vLLM's activation of FC1's output ``(n, r * I)``, columns [gate; up]. gpt-oss has a limit of its own."""
    if name == "relu2_no_mul":
        return torch.relu(inner) ** 2
    limit = 7 if name == "swigluoai" else limit
    gate, up = inner.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name == "swigluoai":
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return (torch.nn.functional.silu(gate) if name == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")) * up


QUANTIZE = {
    "MXFP8": mxfp8.quantize_weight,
    "MXFP4": mxfp4.quantize_weight,
    "NVFP4": checkpoints.quantize_weight,
    "W4A16_NVFP4": checkpoints.quantize_weight,
}


def dequantize(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a matrix in float32."""
    weight, scale = tensors["weight"], tensors["weight_scale"]
    if weight.dtype is torch.float8_e4m3fn:
        return weight.float() * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    return dequantized(weight, scale) * tensors.get("weight_scale_2", 1.0)


def random_experts(
    form: str, experts: int, hidden: int, size: int, device: Any = "cpu", seed: int = 0, gated: bool = True, bias: bool = False
) -> Experts:
    """Draw weights of a format, and biases in bfloat16. Every expert has its own scale."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = 2 * size if gated else size
    parameters: dict[str, torch.Tensor] = {}
    wide = {}
    for name, height, width in (("w13", rows, hidden), ("w2", hidden, size)):
        parts = []
        for _ in range(experts):
            spread = 1 + torch.rand((), generator=generator, device=device)
            weight = torch.randn(height, width, generator=generator, device=device) * spread / width**0.5
            parts.append(QUANTIZE[form](weight))
        for kind in parts[0]:
            parameters[f"{name}_{kind}"] = torch.stack([part[kind] for part in parts]).to(device)
        wide[name] = torch.stack([dequantize(part) for part in parts])
        if "NVFP4" in form:
            largest = 6 if name == "w13" else 16  # of the calibrated activations
            column = parameters[f"{name}_weight_scale_2"]
            if name == "w13":
                column = column[:, None].repeat(1, 2 if gated else 1)
            parameters[f"{name}_weight_scale_2"] = column
            parameters[f"{name}_input_scale"] = torch.full_like(column, largest / 2688)
    if not bias:
        return Experts(parameters, **wide)
    for name, height in (("w13", rows), ("w2", hidden)):
        drawn = torch.randn(experts, height, generator=generator, device=device) / 4
        parameters[f"{name}_bias"] = drawn.to(torch.bfloat16)
    return Experts(parameters, **wide, b13=parameters["w13_bias"], b2=parameters["w2_bias"])


def by_turns(experts: Experts) -> Experts:
    """Return the layer with gate and up by turns, as gpt-oss has it."""
    turned = {
        name: torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2) if name.startswith("w13") else tensor
        for name, tensor in experts.parameters.items()
    }
    return replace(experts, parameters=turned)


def unequal(experts: Experts, ratio: float) -> Experts:
    """Return NVFP4 experts whose up matrices are ``ratio`` times as large: the ``weight_scale_2`` of those alone."""
    parameters, w13 = {name: tensor.clone() for name, tensor in experts.parameters.items()}, experts.w13.clone()
    parameters["w13_weight_scale_2"][:, 1] *= ratio
    w13[:, w13.shape[1] // 2 :] *= ratio
    return replace(experts, parameters=parameters, w13=w13)


def compressed(experts: Experts) -> Experts:
    """Return NVFP4 experts as llm-compressor exports them, in compressed-tensors: global scales are reciprocals."""
    names = {"weight": "weight_packed", "weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
    parameters = {}
    for name, tensor in experts.parameters.items():
        prefix, kind = name.split("_", 1)
        parameters[f"{prefix}_{names.get(kind, kind)}"] = 1 / tensor if tensor.dtype is torch.float32 else tensor
    return replace(experts, parameters=parameters)


def compressed_method(config: Any, use_a16: bool) -> Any:
    """Return vLLM's method for NVFP4 in compressed-tensors, whose package logs through another."""
    with mock.patch.dict(sys.modules, {} if importlib.util.find_spec("loguru") else {"loguru": mock.MagicMock()}):
        package = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
        module = importlib.import_module(f"{package}.compressed_tensors_moe_w4a4_nvfp4")
    with model_dtype():
        return module.CompressedTensorsW4A4Nvfp4MoEMethod(config, use_a16=use_a16)


def rounded_up(method: Any, config: Any, experts: Experts) -> Experts:
    """Set the sizes that vLLM allocates for its backend, and return the tensors with zeros in what they do not fill.

    Only MXFP4's methods round up; the halves of FC1 are by turns, so that what is added is the last rows.
    """
    sizes = config.hidden_dim, config.intermediate_size_per_partition
    hidden, size = method.maybe_roundup_sizes(*sizes, config.in_dtype, config.moe_parallel_config)
    if (hidden, size) == sizes:
        return experts
    assert config.activation.value == "swigluoai"
    config.hidden_dim, config.intermediate_size_per_partition = method.hidden_size, method.intermediate_size = hidden, size
    parameters = {}
    for name, tensor in experts.parameters.items():
        rows, width, before = (2 * size, hidden, sizes[0]) if name.startswith("w13") else (hidden, size, sizes[1])
        parameters[name] = tensor.new_zeros(len(tensor), rows, *(n * width // before for n in tensor.shape[2:]))
        parameters[name][tuple(slice(n) for n in tensor.shape)] = tensor
    return replace(experts, parameters=parameters)


class Layer(torch.nn.Module):
    """What ModelOpt's methods use of vLLM's RoutedExperts."""

    w13_weight: torch.nn.Parameter
    w2_weight: torch.nn.Parameter
    apply_router_weight_on_input = False
    expert_map: torch.Tensor | None = None

    def __init__(self, config: Any, experts: Experts) -> None:
        super().__init__()
        self.moe_config, self.activation = config, config.activation
        self.hidden_size, self.num_experts = config.hidden_dim, config.num_local_experts
        self.intermediate_size_per_partition = config.intermediate_size_per_partition
        self.global_num_experts = config.num_experts
        self.params_dtype = self.orig_dtype = torch.bfloat16
        for name, tensor in experts.parameters.items():
            setattr(self, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))

    def _expert_routing_tables(self) -> None:
        return None


def quant_config(form: str) -> Any:
    """Return vLLM's configuration of a checkpoint, of ModelOpt's but for MXFP4."""
    from vllm.model_executor.layers.quantization import modelopt, mxfp4

    if form == "MXFP4":
        return mxfp4.Mxfp4Config()
    kind = modelopt.ModelOptMxFp8Config if form == "MXFP8" else modelopt.ModelOptNvFp4Config
    return kind.from_config(
        {
            "quant_method": "modelopt",
            "quantization": {"quant_algo": form, "group_size": 16, "exclude_modules": [], "kv_cache_quant_algo": None},
        }
    )


def method_of(form: str, config: Any) -> Any:
    """Return vLLM's method for a layer; it asks the oracle. MXFP4 with gate and up by turns is gpt-oss's."""
    from vllm.model_executor.layers.quantization import modelopt, mxfp4

    with model_dtype():
        if form == "MXFP4":
            turns = config.activation.value == "swigluoai"
            oracle = importlib.import_module(f"{FUSED_MOE}.oracle.mxfp4")  # which asks for a model
            with mock.patch.object(oracle, "_user_moe_activation_override", return_value=None, create=True):
                method = (mxfp4.GptOssMxfp4MoEMethod if turns else mxfp4.Mxfp4MoEMethod)(config)
            method.num_experts, method.hidden_size = config.num_local_experts, config.hidden_dim
            method.intermediate_size = config.intermediate_size_per_partition
            return method
        return (modelopt.ModelOptMxFp8FusedMoE if form == "MXFP8" else modelopt.ModelOptNvFp4FusedMoE)(quant_config(form), config)


def loaded(form: str, config: Any, experts: Experts, method: Any = None) -> tuple[Any, Layer]:
    """Load a layer as vLLM does after its weights are in place."""
    method = method or method_of(form, config)
    layer = Layer(config, rounded_up(method, config, experts))
    with model_dtype():
        method.process_weights_after_loading(layer)
    return method, layer


@dataclass
class Routed:
    """What vLLM's RoutedExperts has of its router when it makes its method."""

    num_expert_group: int | None = None
    custom_routing_function: Any = None
    routed_scaling_factor: float = 1.0

    def loaded(self, form: str, config: Any, experts: Experts) -> tuple[Any, Layer]:
        """Make and load a layer as ``loaded`` does."""
        return loaded(form, config, experts)


def reload(method: Any, layer: Layer, experts: Experts) -> None:
    """Load again as ``reload_weights`` does: into new parameters, which are processed and copied to where the old ones are."""
    held = dict(layer.named_parameters())
    for name, parameter in Layer(layer.moe_config, rounded_up(method, layer.moe_config, experts)).named_parameters():
        setattr(layer, name, parameter)
    with model_dtype():
        method.process_weights_after_loading(layer)
    for name, parameter in held.items():
        parameter.data.copy_(getattr(layer, name).data.view(parameter.shape))
        setattr(layer, name, parameter)


def routes(config: Any, tokens: int, seed: int = 0, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, router weights and global ids of a call."""
    generator = torch.Generator(device).manual_seed(seed + 1000 * tokens)
    x = torch.randn(tokens, config.hidden_dim, generator=generator, device=device, dtype=torch.float32).to(config.in_dtype)
    logits = torch.rand(tokens, config.num_experts, generator=generator, device=device, dtype=torch.float32)
    ids = logits.topk(config.experts_per_token, -1).indices.int()
    weights = torch.rand(ids.shape, generator=generator, device=device, dtype=torch.float32).softmax(-1)
    return x, weights, ids


def call(method: Any, layer: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Call the layer as vLLM's runner does, which pads x to the layer's hidden size."""
    hidden = x.shape[1]
    if padding := layer.hidden_size - hidden:
        x = torch.nn.functional.pad(x, (0, padding))
    result: torch.Tensor = method.apply(layer, x, weights, ids, None, None)
    return result[:, :hidden] if padding else result


@functools.cache
def _has_sinks(kernel: Any) -> bool:
    return "routing_sink" in inspect.signature(kernel.apply_monolithic).parameters


def call_with_logits(method: Any, layer: Layer, x: torch.Tensor, logits: torch.Tensor, **more: Any) -> torch.Tensor:
    """Call the layer's experts as ``apply_monolithic`` of vLLM's methods does."""
    groups = {"num_expert_group": None, "topk_group": None}
    routing = {**groups, "e_score_correction_bias": None, "routed_scaling_factor": 1.0, "apply_router_weight_on_input": False}
    tensors = x, layer.w13_weight, layer.w2_weight, logits, layer.activation, layer.global_num_experts, layer.expert_map
    sink = {"routing_sink": None} if _has_sinks(method.moe_kernel.__class__) else {}
    result: torch.Tensor = method.moe_kernel.apply_monolithic(*tensors, **sink | routing | more)
    return result
