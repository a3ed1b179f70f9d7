# SPDX-License-Identifier: Apache-2.0
"""``FlashInferNvfp4Sm12xFusedMoE``: TensorRT-LLM's CUTLASS layer, with decode on our kernels.

Importing this module imports TensorRT-LLM, whose layer class ours inherits. Hold ``patches.building`` during the import.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from trtllm_b12x import formats, kernels
from trtllm_b12x.core import log, settings
from trtllm_b12x.decision import Deployment, RejectReason, Resolution
from trtllm_b12x.decision.announce import announce
from trtllm_b12x.dispatch import crossover, timing
from trtllm_b12x.dispatch.layer import LayerDispatch
from trtllm_b12x.dispatch.schedule import InParts, Schedule
from trtllm_b12x.formats import constants
from trtllm_b12x.formats.geometry import LayerShape
from trtllm_b12x.formats.weights import Weights

from . import contract, describe, guard, host_path, machine, patches, status
from .host import load
from .quantization import Method
from .quantization_mxfp4 import MXFP4Sm12xFusedMoEMethod
from .quantization_mxfp8 import MXFP8Sm12xFusedMoEMethod
from .quantization_nvfp4 import NVFP4Sm12xFusedMoEMethod, W4A16NVFP4Sm12xFusedMoEMethod
from .routing import RoutesItself

METHODS: dict[str, type[Method]] = {
    method.format: method
    for method in (
        NVFP4Sm12xFusedMoEMethod,
        W4A16NVFP4Sm12xFusedMoEMethod,
        MXFP4Sm12xFusedMoEMethod,
        MXFP8Sm12xFusedMoEMethod,
    )
}

_HOST = load()
Layer: Any = _HOST.Layer
CutlassFusedMoE: Any = _HOST.CutlassFusedMoE
_Tensor, _address, _new = torch.Tensor, torch.Tensor.data_ptr, tuple.__new__


class FlashInferNvfp4Sm12xFusedMoE(RoutesItself, Layer, CutlassFusedMoE):
    """MoE layer for SM120/SM121. Small batches run on our kernels, all other calls on the parent class.

    ``create_weights`` decides whether kernels serve the layer, because it knows the final quantization. If none does, the
    instance behaves exactly as its parent; ``verdict`` holds the reason. Each rank decides for itself: partial sums are added, so
    ranks may use different kernels. Only TensorRT-LLM's settings determine what a rank sends to others.
    """

    host_class = CutlassFusedMoE
    """Class that TensorRT-LLM would have built."""
    _is_tuning, _reads_ids = staticmethod(_HOST.is_tuning), staticmethod(_HOST.reads_ids)
    _gets_logits = not _HOST.has_get_moe_cls
    verdict: Resolution
    """Latest verdict, set from ``create_weights`` on."""
    _shape, _deployment = LayerShape(), Deployment()
    dispatch = LayerDispatch()
    """Kernel dispatch. It has kernels once weights are loaded, if our kernels serve the layer."""
    _fault = ""
    """First line of our error in a load or call. TensorRT-LLM then serves the layer."""
    _addresses: tuple[int, ...] = ()
    """Addresses of the TensorRT-LLM tensors that the kernels were bound to."""
    _reads: tuple[Any, tuple[str, ...]]
    """Getter of the parameters that kernels read, and attributes that hold SwiGLU's alpha, beta and limit."""
    _our_method: Method | None = None
    """``quant_method``, if it is one of ours."""
    scale_ratio = 1.0
    """Largest ratio between gate's and up's ``weight_scale_2`` over all experts, as of the last load."""
    _dtype = torch.bfloat16
    _ones: torch.Tensor | None = None
    """Router weights of 1, for calls whose weights TensorRT-LLM has already applied to the input."""
    _alone = False
    """True if CUTLASS cannot run this format (MXFP8)."""
    _as_w4a4 = False
    """True if the experts are W4A16_NVFP4 and built as NVFP4 (``TRTLLM_B12X_W4A4_PREFILL``)."""
    _memory: Mapping[tuple[str, torch.device, torch.dtype], torch.Tensor] = MappingProxyType({})
    """Our buffers by name, device and dtype, for every device that the layer was on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Set these before the parent's __init__, which may create the weights and then needs the verdict.
        self._config = describe.from_config(kwargs.get("model_config"))
        self._alltoall = False
        self._max_num_tokens = describe.most_tokens(kwargs.get("model_config"))
        super().__init__(*args, **kwargs)

    @property
    def schedule(self) -> Schedule:
        return self.dispatch.schedule

    @property
    def kernel(self) -> kernels.Kernel | None:
        """The preferred kernel, or None if CUTLASS serves every call."""
        return next(iter(self.schedule.kernels), None)

    # ---- load --------------------------------------------------------------------------------------------------------

    def _get_quant_method(self) -> Any:
        self._our_method, self._alone, self._as_w4a4, self.scale_ratio = None, False, False, 1.0
        with guard.host_takes_over(self):
            label = describe.quant_algo(self.quant_config)
            algorithm = describe.served_as(label)
            self._dtype = self.dtype or torch.bfloat16
            # TensorRT-LLM may create weights again for another quantization.
            self.dispatch = LayerDispatch(machine.candidate_kernels(quant_algo=algorithm), self._max_num_tokens)
            self._judge()
            row = formats.find(algorithm)
            if self.verdict.served and row is not None:
                tiles = (self.dispatch.kernels[name].features.tile for name in self.verdict.families)
                self._our_method, self._alone = METHODS[row.name](math.lcm(*tiles)), not row.hosts_path
                self._as_w4a4 = algorithm != label
                return self._our_method
        if self.intermediate_size in patches.refused_sizes:
            patches.raise_if_refused(self.intermediate_size, describe.quant_algo(self.quant_config))
        return super()._get_quant_method()

    def _weights_are_ready(self) -> None:
        """Plan, bind and test kernels. The last hook of a weight load or refit calls this method.

        Raise RuntimeError if TensorRT-LLM has no path for the format and no kernel serves every call. Otherwise the first call
        would raise while other ranks wait in the reduction. Raise ValueError if experts are built for W4A4 and the checkpoint has
        no input scales, which TensorRT-LLM leaves at 1.
        """
        if self._as_w4a4 and not self.w2_weight.is_meta and bool((self.fc31_input_scale == 1).all()):
            raise ValueError(
                f"MoE layer {getattr(self, 'layer_idx', '?')}: {settings.W4A4_PREFILL.name}=1 needs input_scale of every expert, "
                f"and the checkpoint has none: unset {settings.W4A4_PREFILL.name}"
            )
        with guard.host_takes_over(self):
            self._load_kernels()
        if self._alone and not self.w2_weight.is_meta and not self.schedule.base:
            raise RuntimeError(f"no kernel serves the MoE layer of {self._about()}")

    def _leave_to_the_host(self, error: Exception) -> None:
        """Let TensorRT-LLM serve the layer after our error, and log one line."""
        self.dispatch.drop()
        log.logger.debug("MoE layer %s", getattr(self, "layer_idx", "?"), exc_info=error)
        self._fault = self._fault or kernels.first_line(error)
        self.verdict = Resolution.left_to_the_host(RejectReason.KERNEL_PLAN_FAILED, self._fault)
        self._announce_and_record(ready=True)

    def _load_kernels(self) -> None:
        if self._our_method is not None:
            if self.w2_weight.is_meta:  # TensorRT-LLM may call the hooks before shared weights exist
                return
            self._our_method.check(self)
            self.scale_ratio = self._our_method.scale_ratio(self)
            # AWQ scales are known only now.
            self._judge(dict.fromkeys(self.dispatch.kernels, self._fault) if self._fault else {})
        if self._our_method is not None and self.verdict.served:
            geometry, device = self._geometry(), self.w2_weight.device
            weights = self._kernel_weights()
            self._addresses = self._addresses_now()
            self.dispatch.scale_ratio, self.dispatch.scoring = self.scale_ratio, self._scoring()
            if errors := self.dispatch.load(geometry, weights, device, self.slot_start, self.verdict.families):
                self._judge(errors)  # CUTLASS reads the same parameters: the layer is slower, the server keeps running
            layer = f"MoE layer {getattr(self, 'layer_idx', '?')}"
            self.dispatch.tell_of_halves(layer, "TensorRT-LLM's CUTLASS applies the larger one to both")
            if self.apply_router_weight_on_input and self.schedule.kernels:
                capacity = max([*(kernel.capacity for kernel in self.schedule.kernels), *self.dispatch.waiting.values()])
                self._ones = constants.filled(1.0, (capacity, geometry.top_k), device)
        else:
            self.dispatch.drop()
        self._announce_and_record(ready=True)

    def plan_waiting(self) -> None:
        """Plan the families that a measurement is about to compare."""
        if errors := self.dispatch.plan_waiting():
            self._judge(errors)

    def _about(self) -> str:
        """Describe the layer whose format TensorRT-LLM cannot run, and why none of our kernels serves it."""
        place = f"tp {self.tp_size}, ep {self.ep_size}, layer {getattr(self, 'layer_idx', '?')}"
        return f"{self._shape}, {place}, and TensorRT-LLM has no path for it on this card: {self.verdict}"

    def _judge(self, plan_errors: Mapping[str, str] = MappingProxyType({})) -> None:
        """Decide again which families serve the layer, from all facts known now."""
        try:
            if lacking := [name for name in contract.LAYER if not hasattr(self, name)]:
                raise AttributeError(f"layers of this host have no {', '.join(lacking)}")
            question = describe.from_layer(self, self._config, self._alltoall, self.scale_ratio > 1)
            self._shape, self._deployment = question
            self.verdict = machine.resolve(question, self.dispatch.kernels, plan_errors)
        except Exception as error:  # TensorRT-LLM's own class would not raise
            self.verdict = Resolution.left_to_the_host(RejectReason.HOST, kernels.first_line(error))
        self._announce_and_record(ready=False)

    def _announce_and_record(self, ready: bool) -> None:
        with guard.bookkeeping():
            announce(self.verdict, f"MoE layer {getattr(self, 'layer_idx', '?')}", getattr(self, "rank", 0), self._alone)
            status.record(self, self.verdict, ready=ready)

    def _geometry(self) -> kernels.Geometry:
        return kernels.Geometry(
            num_experts=self.expert_size_per_partition,
            top_k=self.routing_method.experts_per_token,
            hidden_size=self.hidden_size,
            intermediate_size=self.quant_method.intermediate_size(self),
            activation=str(self._shape.kernel_activation),
            dtype=self._dtype,
            ranks=self.ep_size,
            bias=self._dtype if self.bias else None,
            format=self.quant_method.format,
            layout=self.quant_method.layout(),
        )

    def _kernel_weights(self) -> Weights:
        """Return the layer's weights as the kernels read them, with biases and activation constants."""
        weights: Weights = self.quant_method.kernel_weights(self)
        self._reads = self.quant_method.read_by_kernels, tuple(describe.activation_tensor_names(self).values())
        epilogue = dataclasses.replace(weights.epilogue, **describe.activation_tensors(self))
        return dataclasses.replace(weights, epilogue=epilogue)

    def _addresses_now(self) -> tuple[int, ...]:
        """Return the addresses of TensorRT-LLM's tensors that kernels read: parameters and SwiGLU constants."""
        parameters, names = self._reads
        addresses = tuple(map(_address, parameters(self._parameters)))
        return (*addresses, *(getattr(self, name).data_ptr() for name in names)) if names else addresses

    # ---- call --------------------------------------------------------------------------------------------------------

    def _measure_once(self, like: Any) -> None:
        """Benchmark the families and TensorRT-LLM on this card once, at the first eager call, to choose by token count.

        ``like`` is the current call in TensorRT-LLM's calling convention.
        """
        if self._is_tuning():
            crossover.tuning()
        elif self.dispatch.should_measure() and not torch.compiler.is_compiling():
            with self.dispatch.measuring():
                device = self.w2_weight.device
                self.plan_waiting()
                if timing.possible(device) and not self.apply_router_weight_on_input:
                    self.dispatch.judge_host(host_path.judged(self, like))
                paths = functools.partial(host_path.timed_paths, self, like)
                sampler = host_path.route_sampler(self, self.schedule.kernels[0].geometry, device)
                self.dispatch.measure(device, paths, sampler, _HOST.generation)

    def _kernel_for(self, x: Any, x_sf: torch.Tensor | None = None) -> kernels.Kernel | InParts | None:
        """Return the kernel for this call, or None if CUTLASS serves it."""
        kernel = self.dispatch.schedule.at(x.shape[0]) if isinstance(x, _Tensor) else None
        if kernel is None or x.dtype is not (kernel.geometry.dtype if x_sf is None else torch.uint8):
            return None
        if x_sf is not None and not kernel.features.quantized_input:
            return None
        # The autotuner must tune TensorRT-LLM's kernels also for few tokens, as without this package.
        return kernel if not self._is_tuning() or self._alone else None

    def quantize_input(self, x: Any, post_quant_comm: bool = True, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        """Return tokens unquantized if a kernel will serve them, else quantize as the parent does.

        Before communication (``post_quant_comm``) the token format must not depend on this rank's kernels, so the parent
        quantizes the tokens. If TensorRT-LLM has no path for the format, tokens are always sent in bf16.
        """
        try:
            serves = self._alone or (not post_quant_comm and self._kernel_for(x) is not None)
        except Exception as error:  # guard.host_takes_over would cost a microsecond in every call
            self._leave_to_the_host(error)
            serves = False
        if serves:
            return x, None
        return super().quantize_input(x, post_quant_comm=post_quant_comm, **kwargs)

    def _behind_alltoall(self) -> None:
        """Disable our kernels once all-to-all communication is in use. All ranks detect it at the same call."""
        if not self._alltoall:
            self._alltoall = True
            self._judge()
            self.dispatch.drop()

    def _serve(
        self, like: Any, do_finalize: bool, lora_params: Any, enable_alltoall: bool,
        x: Any, x_sf: Any, swizzled: bool, ids: Any, router_weights: Any, output_dtype: Any, moe_output: Any,
    ) -> tuple[torch.Tensor | None, Exception | None]:  # fmt: skip
        """Return a kernel's output, or None if CUTLASS serves the call, and our error if one is the cause.

        ``like`` is the call in TensorRT-LLM's calling convention. ``moe_output`` is written and returned if given. Only CUTLASS
        serves unfinalized output, LoRA on these experts, and ids from an all-to-all, which may be padding. Our errors are
        raised if TensorRT-LLM has no path.
        """
        try:
            if enable_alltoall:
                self._behind_alltoall()
            if not do_finalize or enable_alltoall:
                return None, None
            # TensorRT-LLM passes the LoRA parameters of all layers, including attention.
            if lora_params is not None and (not hasattr(self, "_moe_lora_active") or self._moe_lora_active(lora_params)):
                return None, None
            if not self.dispatch.decided:
                self._measure_once(like)
            if not isinstance(x, _Tensor) and isinstance(x, _HOST.Fp4QuantizedTensor):
                x, x_sf, swizzled = x.fp4_tensor, x.scaling_factor, x.is_sf_swizzled
            kernel = self._kernel_for(x, x_sf)
            if router_weights is None and self._ones is not None and kernel is not None and x.shape[0] <= len(self._ones):
                router_weights = self._ones[: x.shape[0]]
            if kernel is None or ids is None or router_weights is None:
                return self._unserved(x, moe_output), None
            self._follow()
            # Ids are global. The rank returns the partial sum of its own experts, and TensorRT-LLM reduces.
            fields = x, ids, router_weights, x_sf, swizzled, moe_output, None, None, None, None
            result = kernel.run(_new(kernels.MoECall, fields))  # half the time of MoECall(*fields)
            converts = moe_output is None and output_dtype is not None and output_dtype is not result.dtype
            return result.to(output_dtype) if converts else result, None
        except Exception as error:
            if self._alone:
                raise
            return None, error

    def _follow(self) -> None:
        """Bind the kernels again if parameters have moved, even if no hook was called."""
        if self._addresses_now() != self._addresses:
            self.dispatch.bind(self._kernel_weights(), self.slot_start)
            self._addresses = self._addresses_now()

    def _unserved(self, x: Any, moe_output: torch.Tensor | None) -> torch.Tensor | None:
        """If TensorRT-LLM has no path, return the output of a call without tokens, or raise RuntimeError if it has tokens."""
        if not self._alone or not isinstance(x, torch.Tensor):
            return None
        if x.shape[0]:
            raise RuntimeError(f"no kernel serves {x.shape[0]} tokens of the MoE layer of {self._about()}")
        return x if moe_output is None else moe_output

    def _quantize_late(self, x: Any, x_sf: torch.Tensor | None, swizzled: bool) -> tuple[Any, torch.Tensor | None]:
        """Quantize input that ``quantize_input`` left in bf16 and no kernel serves, in the scale layout of this call."""
        if self._our_method is not None and isinstance(x, torch.Tensor) and x.is_floating_point() and x_sf is None:
            quantized: tuple[Any, torch.Tensor | None] = super().quantize_input(x, post_quant_comm=not swizzled)
            return quantized
        return x, x_sf

    # ---- between loads and calls: copied, moved, converted ------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Omit the kernels, whose views and workspace belong to this layer. A copy runs on CUTLASS until it loads weights."""
        return {**self.__dict__, "dispatch": LayerDispatch(self.dispatch.kernels, self._max_num_tokens), "_memory": {}}

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or convert the layer. The kernels follow, or wait until the layer is back on a device where they run."""
        meta = [name for name, tensor in self._buffers.items() if name.startswith("b12x_") and tensor.is_meta]
        with guard.bookkeeping():
            # Captured graphs read and write our buffers where they are: keep that memory alive.
            self._memory = {(name, old.device, old.dtype): old for name, old in self._own_buffers().items()} | dict(self._memory)
        module = super()._apply(*args, **kwargs)
        for name in meta:
            if not self._buffers[name].is_meta:
                self._buffers[name].zero_()  # to_empty and similar calls leave the memory uninitialized
        with guard.host_takes_over(self):
            self._take_old_memory()
            if self.dispatch.moved_to(self.w2_weight.device):
                self._weights_are_ready()
        return module

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        return {name: tensor.data for name, tensor in self._buffers.items() if name.startswith("b12x_") and not tensor.is_meta}

    @torch.inference_mode()
    def _take_old_memory(self) -> None:
        """Restore the memory that our buffers had when the layer was last on this device."""
        for name, tensor in self._own_buffers().items():
            before = self._memory.get((name, tensor.device, tensor.dtype), tensor)
            if before.data_ptr() != tensor.data_ptr() and before.shape == tensor.shape:
                before.copy_(tensor)
                self._buffers[name].data = before

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Explain a size mismatch in the error message."""
        error_msgs = args[-1]
        errors = len(error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self._our_method is not None and len(error_msgs) > errors:
            where = prefix.rstrip(".") or type(self).__name__
            error_msgs.append(
                f"{where} pads its intermediate size to a multiple of {self._our_method.tile}, which its kernels need: load the "
                "checkpoint, or the state_dict of a layer with the same padding (TRTLLM_B12X=0 pads as TensorRT-LLM does)"
            )
