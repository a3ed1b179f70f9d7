# SPDX-License-Identifier: Apache-2.0
"""Experts of vLLM's modular kernel, on our kernels. Importing this module imports vLLM."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import _quantize_input
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils import quant_utils

from trtllm_b12x.core import log
from trtllm_b12x.decision.verdicts import SERVED_SM
from trtllm_b12x.dispatch.host_check import HostPath
from trtllm_b12x.dispatch.layer import LayerDispatch
from trtllm_b12x.dispatch.timing import RouteSampler
from trtllm_b12x.formats import constants
from trtllm_b12x.formats.geometry import Scoring
from trtllm_b12x.formats.mxfp4 import LARGEST_SCALE_OF_GEMM
from trtllm_b12x.kernels import MoECall, first_line
from trtllm_b12x.kernels.call import of_logits

from .. import serving
from . import facts, machine, problem, weights
from .facts import Slot


class Sm12xExperts(mk.FusedMoEExpertsModular):
    """Experts of one layer in one slot. Weights are vLLM's own tensors, read in place, and bound again when one moves.

    Kernels are bound in the first call, which vLLM makes in its profile run: the MXFP8 methods do not call a hook before it.
    """

    slot: ClassVar[Slot]
    theirs: ClassVar[type[Any] | None] = None
    """vLLM's own experts class for the same tensors. It serves the calls that our kernels do not."""
    rival: ClassVar[type[Any] | None] = None
    """Experts class of vLLM's choice if weight loading converts its tensors differently. One of the two then serves all calls."""
    scoring: ClassVar[Scoring | None] = None
    """How the layer routes, if its calls come with router logits (``monolithic.py``)."""

    def __init__(
        self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None, num_dispatchers: int | None = None
    ) -> None:
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        # Some vLLM methods do not load the model's bias, and their experts do not add it.
        bias = None if self.w1_bias is None else self.w1_bias.dtype
        self.geometry = replace(problem.geometry_of(moe_config, self.slot), bias=bias)
        self.dispatch = LayerDispatch(machine.candidate_kernels(self.slot, machine.device_of(moe_config)))
        self.dispatch.scoring = self.scoring
        self._own = None if self.theirs is None else self.theirs(moe_config, quant_config)
        self._scalars: weights.Scalars | None = None
        self._addresses: tuple[int, ...] = ()
        self._first_expert, self._layer_name = 0, "a MoE layer"
        self._local: torch.Tensor | None = None
        """Local ids at index global id + 1, with -1 at both ends. None if this rank's experts are contiguous."""
        self._scratch: dict[int, int] = {}
        """Bytes that kernels need by number of tokens."""
        self.fault = ""

    # ---- selection ---------------------------------------------------------------------------------------------------

    @staticmethod
    def is_supported_config(
        cls: type[Sm12xExperts], moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        """Answer vLLM's oracle. Kernels are planned and tested here. After a failure vLLM's own choice stays."""
        try:
            reason = cls.refusal(moe_config, weight_key, activation_key, activation_format) or machine.rehearse(cls, moe_config)
        except Exception as error:  # the MXFP8 oracle catches only ValueError
            reason = first_line(error)
        return not reason, reason or None

    @classmethod
    def refusal(cls, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any) -> str:
        """Return why vLLM's contract or our rules refuse the layer; empty if they accept it. No kernel is planned."""
        if unsupported := problem.unsupported(moe_config):
            return f"kernels do not support {unsupported}"
        keys = weight_key, activation_key, activation_format
        supported, reason = mk.FusedMoEExperts.is_supported_config(cls, moe_config, *keys)
        return machine.resolve(cls.slot, moe_config).findings if supported else str(reason)

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return machine.sm() in SERVED_SM

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @classmethod
    def _supports_quant_scheme(cls, weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == named_keys(cls.slot.keys)

    @classmethod
    def _supports_activation(cls, activation: Any) -> bool:
        by_turns = activation.value == problem.BY_TURNS_ACTIVATION  # vLLM reorders the halves of a pair's weights
        return activation.value in problem.ACTIVATIONS and not (by_turns and cls.slot.pair)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_all2all_kernels and not moe_parallel_config.enable_eplb

    # ---- contract ----------------------------------------------------------------------------------------------------

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def supports_expert_map(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, *rest: Any) -> Any:  # noqa: N803
        """Return the shapes of two workspaces and the output. Our scratch is in the second: vLLM may use the first as output."""
        ours = -(-self._workspace_bytes(M) // self.moe_config.in_dtype.itemsize)
        if self._own is None:
            return (0,), (ours,), (M, K)
        # vLLM quantizes the input of its experts first, to two codes per byte.
        columns = K if self._own.expects_unquantized_inputs else K // 2
        first, second, out = self._own.workspace_shapes(M, N, columns, topk, *rest)
        return first, (max(math.prod(second), ours),), out

    def _workspace_bytes(self, tokens: int) -> int:
        """Return the bytes of kernels and of three numbers per route. They grow with tokens: vLLM locks the largest workspace."""
        if tokens not in self._scratch:
            kernels = machine.rehearsed(type(self), self.moe_config).kernels or self.dispatch.schedule.kernels
            if not kernels:
                return 0
            self._scratch[tokens] = max(kernel.scratch_bytes(tokens) for kernel in kernels)
        return self._scratch[tokens] + 12 * tokens * self.geometry.top_k

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the NVFP4 scalars after vLLM has converted the tensors. vLLM calls this again at each reload."""
        if self._own is not None:
            self._own.process_weights_after_loading(layer)
        if self.g1_alphas is not None:
            gscales = (self.a1_gscale, self.a2_gscale) if self.slot.pair else None
            # FlashInfer's input scales have the largest range of all experts (is_global_sf_supported_for_nvfp4_backend).
            shared = gscales is None or self.slot.backend.startswith("FLASHINFER")
            self._scalars = weights.scalars(layer, gscales, self.g1_alphas, shared)
            self._layer_name = getattr(layer, "layer_name", self._layer_name)
            if self.slot.pair:
                self.dispatch.scale_ratio = weights.scale_ratio(self._scalars)

    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
        topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, global_num_experts: int,
        expert_map: torch.Tensor | None, a1q_scale: torch.Tensor | None, a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor, workspace2: torch.Tensor, expert_tokens_meta: Any, apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        """Write the weighted sum over this rank's experts into ``output``, ``(M, K)``."""
        call = MoECall(hidden_states, topk_ids, topk_weights, out=output, scratch=workspace2)
        tensors = w1, w2, expert_map, apply_router_weight_on_input
        if self._own is None:
            if not self.call(call, *tensors):
                raise RuntimeError(f"no kernel serves {len(hidden_states)} tokens of {self.geometry}; set TRTLLM_B12X=0")
            return

        def theirs(x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor, out: torch.Tensor) -> None:
            codes, scales = (x, None) if own.expects_unquantized_inputs else _quantize_input(x, self.quant_config)
            own.apply(
                out, codes, w1, w2, router_weights, ids, activation, global_num_experts, expert_map, scales, a2_scale,
                workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
            )  # fmt: skip

        own, served = self._own, False
        try:
            served = not self.fault and not serving.is_tuning() and self.call(call, *tensors, theirs)
        except Exception as error:
            self.fault = first_line(error)
            log.once(f"vLLM's own {self.slot.backend} serves {self.geometry} after an error of ours: {self.fault}")
        if not served:
            theirs(hidden_states, topk_ids, topk_weights, output)

    # ---- our part ----------------------------------------------------------------------------------------------------

    def call(
        self, call: MoECall, w1: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor | None, weighted: bool,
        theirs: Callable[..., None] | None = None,
    ) -> bool:  # fmt: skip
        """Run a kernel. Return False if no kernel serves this token count.

        ``call.scratch`` is vLLM's workspace. ``weighted``: the input has been multiplied by the router weights.
        """
        if self._tensors(w1, w2).addresses() != self._addresses:
            self.load(w1, w2, expert_map)
        if self.dispatch.should_measure() and serving.measurable(call.x.device):
            own_path = None if theirs is None else self._host_path(theirs)
            serving.measure(self.dispatch, call.x.device, own_path, self.sample_routes, f"vLLM {facts.version()}")
        tokens, routes = call.x.shape[0], call.ids.numel()
        kernel = self.dispatch.schedule.at(tokens)
        if kernel is None:
            return False
        size = self._workspace_bytes(tokens)
        memory = None if call.scratch is None else call.scratch.view(-1).view(torch.uint8)
        if memory is None or memory.nbytes < size:
            memory = torch.empty(size, dtype=torch.uint8, device=call.x.device)
        call = MoECall(call.x, call.ids, call.router_weights, out=call.out, scratch=memory)
        if weighted or self._local is not None:
            ones, places, ids = memory[size - 12 * routes : size].view(torch.int32).view(3, *call.ids.shape)
            if weighted:
                call = call._replace(router_weights=ones.view(torch.float32).fill_(1))
            if self._local is not None:
                torch.clamp(call.ids, -1, len(self._local) - 2, out=places)
                torch.index_select(self._local, 0, places.add_(1).view(-1), out=ids.view(-1))
                call = call._replace(ids=ids)
        kernel.run(call)
        return True

    def call_with_logits(
        self, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor | None,
        expert_map: torch.Tensor | None, padding: torch.Tensor | None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Return the output of a kernel that routes by itself; None if vLLM has to route the call."""
        if self.fault or (self.scoring is not None and self.scoring.bias) != (bias is not None) or serving.is_tuning():
            return None
        if self._tensors(w1, w2).addresses() != self._addresses:
            try:
                self.load(w1, w2, expert_map)
            except Exception:
                return None  # a routed call raises the error again
        if self.dispatch.should_measure() and serving.measurable(x.device):
            return None
        return None if self._local is not None else self.dispatch.run_logits(of_logits(x, logits, bias, padding=padding))

    def _tensors(self, w1: torch.Tensor, w2: torch.Tensor) -> weights.Tensors:
        alphas = None if self.g1_alphas is None else (self.g1_alphas, self.g2_alphas)
        if alphas is not None and self._scalars is not None and self._scalars.fc1_alpha is not None:
            alphas = self._scalars.fc1_alpha, alphas[1]
        biases = None if self.w1_bias is None else (self.w1_bias, self.w2_bias)
        return weights.Tensors(w1, w2, (self.w1_scale, self.w2_scale), alphas, biases)

    def load(self, w1: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor | None) -> None:
        """Plan, bind and test kernels at the first call; later rebind moved tensors. Raise RuntimeError if no kernel serves."""
        tensors, swiglu = self._tensors(w1, w2), problem.swiglu_constants(self.moe_config)
        if len(devices := tensors.devices()) > 1:  # --cpu-offload-gb without UVA causes this; vLLM's kernels refuse it
            where = " and ".join(sorted(devices))
            raise RuntimeError(f"tensors of a layer are on {where}: unset VLLM_WEIGHT_OFFLOADING_DISABLE_UVA, or offload none")
        views = weights.view(tensors, self.geometry, self._scalars, swiglu)
        if self.dispatch.schedule.kernels:
            self.dispatch.bind(views, self._first_expert)
        else:
            self._place(expert_map)
            largest = views.largest_scale
            eligible = serving.reached_by(largest, machine.resolve(self.slot, self.moe_config).families)
            if self._scalars is not None and self._scalars.inputs.fc31_input_scale.numel() > 1:
                eligible.discard("grouped")  # quantizes a token once for all experts
            with serving.float32_default():
                errors = self.dispatch.load(self.geometry, views, w1.device, self._first_expert, eligible)
            schedule = self.dispatch.schedule
            if not (schedule.kernels if self.slot.pair else schedule.base):
                too_large = f"block scales of {self._layer_name} reach 2**{largest - 127}: kernels take 2**67 at most"
                reason = too_large if largest > LARGEST_SCALE_OF_GEMM else "no family serves every count"
                raise RuntimeError("; ".join(errors.values()) or reason)
            self.dispatch.tell_of_halves(self._layer_name, f"vLLM's {self.slot.backend} applies gate's to both")
        self._addresses = tensors.addresses()

    def _place(self, expert_map: torch.Tensor | None) -> None:
        """Find this rank's experts. Kernels take contiguous global ids directly; other ids need a table of local ids."""
        if expert_map is None:
            return
        here = (expert_map >= 0).nonzero().flatten()
        neighbors = torch.arange(len(here), device=here.device)
        if bool((here == here[0] + neighbors).all() and (expert_map[here] == neighbors).all()):
            self._first_expert = int(here[0])
        else:
            # vLLM creates this object again at each load, while captured graphs read the first object's table.
            ids, device = (-1, *expert_map.tolist(), -1), expert_map.device
            table = functools.partial(torch.tensor, ids, dtype=torch.int32, device=device)
            self._local = constants.kept(("local ids", ids, device), table, device)

    def _host_path(self, theirs: Callable[..., None]) -> HostPath:
        # If this rank's experts are not contiguous, calls have local ids, but vLLM needs global ids. -1 is sorted last.
        places = None if self._local is None else (self._local[1:-1] & torch.iinfo(torch.int32).max).argsort()

        def run(call: MoECall) -> torch.Tensor:
            out, ids = torch.empty_like(call.x), call.ids
            theirs(call.x, ids if places is None else places[ids].to(ids.dtype), call.router_weights, out)
            return out

        return HostPath(run, "vLLM", facts.version(), f"experts in {self.slot.backend}")

    @property
    def sample_routes(self) -> RouteSampler:
        return functools.partial(serving.sample_routes, self.geometry, machine.device_of(self.moe_config))


def named_keys(names: tuple[str, str | None]) -> tuple[Any, Any]:
    """Return vLLM's weight key and activation key by their names; None for an empty name."""
    weight, activation = (getattr(quant_utils, name) if name else None for name in names)
    return weight, activation


@functools.cache
def experts_class(slot: Slot, theirs: type[Any] | None, scoring: Scoring | None = None) -> type[Sm12xExperts]:
    """Return the experts class of a slot. ``theirs`` is vLLM's chosen class; ``scoring`` routes calls with logits."""
    return type(
        f"{slot.format}Sm12xExperts",
        (Sm12xExperts,),
        {"slot": slot, "theirs" if slot.pair else "rival": theirs, "scoring": scoring, "__module__": __name__},
    )
