# SPDX-License-Identifier: Apache-2.0
"""Run the experts of one SGLang layer on our kernels, which read SGLang's own tensors."""

from __future__ import annotations

import functools
import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from trtllm_b12x import formats
from trtllm_b12x.core import log
from trtllm_b12x.core.errors import first_line
from trtllm_b12x.decision import Deployment
from trtllm_b12x.dispatch.host_check import HostPath
from trtllm_b12x.dispatch.layer import LayerDispatch
from trtllm_b12x.formats import WeightLayout
from trtllm_b12x.formats.geometry import Geometry, LayerShape, Scoring
from trtllm_b12x.kernels import MoECall

from .. import serving
from . import facts

ACTIVATIONS = {("silu", True): "Swiglu", ("gelu", True): "Geglu", ("relu2", False): "Relu2"}
"""Kernels' activation by ``activation`` and ``is_gated`` of ``MoeRunnerConfig``."""
pretended_sm = 0
"""SM number that tests set on a CPU."""


def sm() -> int:
    """Return the SM number that the rules use, major * 10 + minor; 0 without an NVIDIA card."""
    if not torch.cuda.is_available():
        return pretended_sm
    major, minor = torch.cuda.get_device_capability()
    return serving.served_sm(10 * major + minor)


class Experts(ABC):
    """Our state of one SGLang layer. Each format has a subclass."""

    format: ClassVar[str]
    layout: ClassVar[WeightLayout]
    parameters: ClassVar[tuple[str, ...]]
    """Parameters of SGLang's layer that kernels read."""
    scoring: Scoring | None = None
    """Routing of calls that have router logits."""
    scale_ratio = 1.0
    """Largest ratio of the scales of gate and up."""

    def __init__(self) -> None:
        self.dispatch: LayerDispatch | None = None
        """None if our kernels do not serve the layer."""
        self.runner = facts.FORMATS[self.format]
        """SGLang's runner backend, which serves the calls that our kernels do not."""
        self._addresses = 0, 0
        self._symmetric = False

    @abstractmethod
    def refusal(self, layer: Any) -> str:
        """Return why SGLang has to serve the layer; empty if our kernels can."""

    @abstractmethod
    def view(self, layer: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
        """View SGLang's ``parameters`` and ``constants`` as kernels read them. Write the values that SGLang has no tensor for."""

    def constants(self, layer: Any) -> tuple[torch.Tensor, ...]:
        """Return SwiGLU's alpha, beta and limit, ``(E,)`` float32 each, if the layer has them outside its parameters."""
        return ()

    def with_logits(self, x: torch.Tensor, routes: Any, out: torch.Tensor | None) -> MoECall | None:
        """Return the call with its router logits if it has them and ``scoring`` routes as SGLang does."""
        return None

    def fail(self, error: Exception) -> None:
        self.dispatch = None
        log.once(f"SGLang's {self.runner} serves a layer after an error of ours: {first_line(error)}")

    # ---- load --------------------------------------------------------------------------------------------------------

    def load(self, layer: Any) -> None:
        """Plan, bind and test kernels at the first load. At later loads, bind the tensors again and write our scalars."""
        try:
            if self.dispatch is None and (reason := _unsupported(layer) or self.refusal(layer)):
                log.once(f"SGLang's {self.runner} keeps {layer.num_experts} {self.format} experts: {reason}", logging.INFO)
                return
            dispatch = self._bind(layer)
            dispatch.tell_of_halves(f"MoE layer {layer.layer_id}", f"SGLang's {self.runner} applies gate's to both")
        except Exception as error:
            self.fail(error)

    def _bind(self, layer: Any) -> LayerDispatch:
        tensors, first, dispatch = self._tensors(layer), layer.moe_ep_rank * layer.num_local_experts, self.dispatch
        weights = self.view(layer, tuple(tensor.detach() for tensor in tensors))
        if dispatch is None:
            dispatch = self._planned(layer, weights, first)
        else:
            dispatch.scale_ratio = self.scale_ratio
            dispatch.bind(weights, first)
        self.dispatch, self._addresses = dispatch, _addresses(layer)
        return dispatch

    def _planned(self, layer: Any, weights: Any, first: int) -> LayerDispatch:
        config, form, device = layer.moe_runner_config, formats.find(self.format), layer.w13_weight.device
        size, bias = layer.w2_weight.shape[2] * 2, "w13_weight_bias" in self.parameters or getattr(layer, "with_bias", False)
        hidden, limited = layer.hidden_size_unpadded, weights.epilogue.swiglu_limit is not None
        shape = LayerShape(
            num_experts=layer.num_experts, top_k=layer.top_k, hidden_size=hidden, intermediate_size=size * layer.moe_tp_size,
            activation=ACTIVATIONS[config.activation, config.is_gated], quant_algo=form.quant_algo if form else None,
            dtype="bfloat16", activation_constants=limited, bias=bias,
        )  # fmt: skip
        deployment = Deployment(layer.moe_ep_size, layer.moe_tp_size, alltoall=False, load_balancer="none", lora=False)
        kernels = serving.classes_on(device, self.format, facts.FAMILIES)
        verdict = serving.resolve(shape, deployment, kernels, device, sm(), own_path=True)
        if not verdict.served:
            raise RuntimeError(verdict.findings)
        geometry = Geometry(
            num_experts=layer.num_local_experts, top_k=layer.top_k, hidden_size=hidden, intermediate_size=size,
            activation=str(shape.kernel_activation), dtype=torch.bfloat16, ranks=layer.moe_ep_size,
            bias=torch.bfloat16 if bias else None, format=self.format, layout=self.layout,
        )  # fmt: skip
        dispatch = LayerDispatch(kernels)
        dispatch.scale_ratio, dispatch.scoring = self.scale_ratio, self.scoring
        with serving.float32_default():
            eligible = serving.reached_by(weights.largest_scale, verdict.families)
            errors = dispatch.load(geometry, weights, device, first, eligible)
        if not dispatch.schedule.kernels:
            raise RuntimeError("; ".join(errors.values()) or "no family serves a call")
        self._symmetric = of_sglang("distributed.device_communicators.pynccl_allocator").is_symmetric_memory_enabled()
        beyond = f"with SGLang's {self.runner} for many tokens"
        log.once(f"{self.format} experts run on trtllm-b12x, {beyond} ({geometry})", logging.INFO)
        return dispatch

    def _tensors(self, layer: Any) -> tuple[torch.Tensor, ...]:
        return *map(layer._parameters.__getitem__, self.parameters), *self.constants(layer)

    # ---- call --------------------------------------------------------------------------------------------------------

    def call(self, layer: Any, dispatched: Any, theirs: Callable[[Any], Any]) -> torch.Tensor | None:
        """Return the sum over this rank's experts, ``(T, H)`` bfloat16; None if SGLang serves the call.

        Args:
            theirs: SGLang's own function of ``dispatched``.
        """
        x, routes, own = dispatched.hidden_states, dispatched.topk_output, vars(layer)
        tokens = x.shape[0]
        # SGLang rewrites Nemotron-3-Super's w2 between phases, and DWDP pages experts. Both begin after weight loading.
        if self.dispatch is None or not tokens or "_nvfp4_layout_slot" in own or own.get("_dwdp_bound") or serving.is_tuning():
            return None
        if self._addresses != _addresses(layer):
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return None  # binding synchronizes
            self._bind(layer)
        dispatch, out = self.dispatch, self._output(x, layer.hidden_size_unpadded) if self._symmetric else None
        if dispatch.should_measure() and not self._symmetric and serving.measurable(x.device):
            self._measure(layer, x.device, theirs)
        if self.scoring is not None and dispatch.schedule.with_logits(tokens) is not None:
            logits = self.with_logits(x, routes, out)
            if logits is not None and (output := dispatch.run_logits(logits)) is not None:
                return output
        if (kernel := dispatch.schedule.at(tokens)) is None:
            return None
        routes, scales = routes if hasattr(routes, "topk_ids") else routes.to_standard(), dispatched.hidden_states_scale
        return kernel.run(MoECall(x, routes.topk_ids, routes.topk_weights, scales, scales is not None, out))

    def _output(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """Allocate the output where SGLang does: in memory that ranks share."""
        module: Any = importlib.import_module(facts.CUTLASS)
        # 0.5.20 has a function for the group.
        group = module.get_tp_group() if hasattr(module, "get_tp_group") else module.get_parallel().tp_group
        with module.use_symmetric_memory(group, disabled=not module.is_allocation_symmetric()):
            return torch.empty(len(x), columns, dtype=torch.bfloat16, device=x.device)

    def _measure(self, layer: Any, device: torch.device, theirs: Callable[[Any], Any]) -> None:
        def run(call: MoECall) -> torch.Tensor:
            routes = of_sglang("layers.moe.topk").StandardTopKOutput(call.router_weights, call.ids, None)
            dispatch_output = of_sglang("layers.moe.token_dispatcher.standard").StandardDispatchOutput
            result: torch.Tensor = theirs(dispatch_output(call.x, None, routes)).hidden_states
            return result

        assert self.dispatch is not None
        path = HostPath(run, "SGLang", facts.version(), f"MoE layer {layer.layer_id}")
        sample_routes = functools.partial(serving.sample_routes, self.dispatch.schedule.kernels[0].geometry, device)
        serving.measure(self.dispatch, device, path, sample_routes, f"SGLang {facts.version()}, {self.runner}")


def _addresses(layer: Any) -> tuple[int, int]:
    """Return the weights' addresses. SGLang moves a layer's tensors together, and each check costs a call 0.2 us."""
    own = layer._parameters
    return own["w13_weight"].data_ptr(), own["w2_weight"].data_ptr()


def of_sglang(module: str) -> Any:
    return importlib.import_module(f"sglang.srt.{module}")


def _unsupported(layer: Any) -> str:
    """Return the feature of a layer, in any format, that our kernels do not support; empty if they support all."""
    config, server = layer.moe_runner_config, of_sglang("runtime_context").get_exec()
    if server.moe.enable_eplb:
        return "EPLB, which moves experts and calls no hook"
    if server.offload.cpu_offload_gb or server.offload.offload_group_size > 0:
        return "offloading, which moves weights between calls"
    if config.params_dtype not in (None, torch.bfloat16):
        return f"activations of {config.params_dtype}"
    if config.no_combine or config.apply_router_weight_on_input:
        return "no_combine or apply_router_weight_on_input"
    if config.num_fused_shared_experts and layer.moe_ep_size > 1:
        return "fused shared experts of ranks, whose ids are not contiguous"
    if (config.activation, config.is_gated) not in ACTIVATIONS:
        return f"activation {config.activation}, {'gated' if config.is_gated else 'not gated'}"
    return "" if getattr(layer.dispatcher, "skip_local_expert_mapping", False) else "local ids"
