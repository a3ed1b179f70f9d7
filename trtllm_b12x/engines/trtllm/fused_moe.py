"""``FlashInferNvfp4Sm12xFusedMoE``: the host's CUTLASS layer, with decode on kernels of ours."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from trtllm_b12x import formats, kernels
from trtllm_b12x.core import log
from trtllm_b12x.decision import RejectReason, Resolution
from trtllm_b12x.decision.announce import announce
from trtllm_b12x.dispatch import crossover
from trtllm_b12x.dispatch.layer import LayerDispatch
from trtllm_b12x.dispatch.schedule import HOSTS, Schedule
from trtllm_b12x.formats import constants
from trtllm_b12x.formats.weights import Epilogue

from . import contract, describe, eligibility, host, host_path, no_host_path, status
from .carried import Carried
from .quantization import Method


class Promoted(Carried):
    """MoE layer for SM120/SM121. Small batches run on our kernels, all other calls on the parent class.

    Whether any kernel serves the layer is decided in ``create_weights``, when its final quantization is known. If none does, the
    instance behaves as its parent to the letter; ``verdict`` says why. Each rank decides for itself: partial sums are added, so
    ranks may use different kernels. What a rank sends to others depends on the host's settings alone.
    """

    hosts_class: ClassVar[type]
    """Class that TensorRT-LLM would have built."""
    _quantized: ClassVar[Any]
    """The host's ``Fp4QuantizedTensor``."""
    _is_tuning: ClassVar[staticmethod[[], bool]]
    """Return True while the host's autotuner is running."""
    verdict: Resolution
    """The latest, from ``create_weights`` on."""
    dispatch = LayerDispatch()
    """Has kernels once weights are loaded, if any serve the layer."""
    _fault = ""
    """First line of what went wrong in a call; the layer is then served by the host."""
    _addresses: tuple[int, ...] = ()
    """Addresses of the host's tensors that the kernels were bound to."""
    _swiglu_tensors: tuple[str, ...] = ()
    """Attributes that hold SwiGLU's alpha, beta and limit."""
    _plan_errors: Mapping[str, str] = MappingProxyType({})
    _ours: Method | None = None
    """``quant_method``, if it is one of ours."""
    scale_ratio = 1.0
    """Largest ratio of gate's and up's ``weight_scale_2`` of an expert, as of the last load."""
    _dtype = torch.bfloat16
    _ones: torch.Tensor | None = None
    """Router weights for a host that applies them to the input and hands on none."""
    _alone = False
    """True if CUTLASS cannot run this format (MXFP8)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Before the parent, which may create the weights, hence ask for the verdict, in its own __init__.
        self._config = describe.from_config(kwargs.get("model_config"))
        self._alltoall = False
        self._max_num_tokens: int | None = None
        with suppress(Exception):
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
        self._ours, self._alone, self.scale_ratio = None, False, 1.0
        try:
            self.retire_kernels()  # the host may create weights anew, for another quantization
            algorithm = describe.quant_algo(self.quant_config)
            self._dtype = self.dtype or torch.bfloat16
            self.dispatch = LayerDispatch(eligibility.considered(quant_algo=algorithm), self._max_num_tokens)
            self._judge_and_record()
            row = formats.find(algorithm)
            if self.verdict.served and row is not None:
                tiles = (self.dispatch.kernels[name].features.tile for name in self.verdict.families)
                self._ours, self._alone = formats.load(row.method)(math.lcm(*tiles)), not row.hosts_path
                return self._ours
        except Exception as error:
            self._leave_to_the_host(error)
        return super()._get_quant_method()

    def _weights_are_ready(self) -> None:
        """Plan, bind and test kernels. The hook that this host's generation ends a load or refit with calls this.

        Raises:
            RuntimeError: no kernel serves every call of a format that the host has no path for. Its first call would raise
                while other ranks wait in the reduction.
        """
        try:
            self._load_kernels()
        except Exception as error:
            self._leave_to_the_host(error)
        if self._alone and not self.w2_weight.is_meta and not self.schedule.base:
            raise RuntimeError(
                f"no kernel serves the MoE layer of {self._about()}, and TensorRT-LLM has no path for it on this card: "
                f"{self.verdict}"
            )

    def retire_kernels(self) -> None:
        """Send all further calls to the host. Graphs captured earlier stay valid: they own their workspace."""
        self.dispatch.drop()

    def _leave_to_the_host(self, error: Exception) -> None:
        """After a fault of ours the host serves the layer, and one line says so."""
        self.dispatch.schedule = self.dispatch.detached = HOSTS
        log.logger.debug("MoE layer %s", getattr(self, "layer_idx", "?"), exc_info=error)
        self._fault = self._fault or kernels.first_line(error)
        self.verdict = Resolution.left_to_the_host(RejectReason.KERNEL_PLAN_FAILED, self._fault)
        with suppress(Exception):
            self._announce_and_record(ready=True)

    def _load_kernels(self) -> None:
        errors: dict[str, str] = {}
        if self._ours is not None:
            if self.w2_weight.is_meta:  # hosts that share weights call the hooks before there are any
                return
            self.scale_ratio = self._ours.scale_ratio(self)
            # AWQ scales show only now.
            self._judge_and_record(dict.fromkeys(self.dispatch.kernels, self._fault) if self._fault else {})
        if self._ours is not None and self.verdict.served:
            geometry, device = self._geometry(), self.w2_weight.device
            weights = self._kernel_weights()
            self._addresses = self._addresses_now()
            errors = self.dispatch.load(geometry, weights, device, self.slot_start, self.verdict.families)
            if self.apply_router_weight_on_input and self.schedule.kernels:
                capacity = max(kernel.capacity for kernel in self.schedule.kernels)
                self._ones = constants.filled(1.0, (capacity, geometry.top_k), device)
        else:
            self.retire_kernels()
        if errors:  # the parameters serve CUTLASS as they are: the layer is slower, the server lives
            self._judge_and_record(errors)
        with suppress(Exception):
            status.record(self, self.verdict, ready=True)

    def _about(self) -> str:
        """Sizes of the layer, and its place in the model."""
        experts = f"{self.num_experts} experts, top {self.routing_method.experts_per_token}"
        sizes = f"{self.hidden_size} x {self.intermediate_size}, {self._activation_name()}"
        return f"{experts}, {sizes}, tp {self.tp_size}, ep {self.ep_size}, layer {getattr(self, 'layer_idx', '?')}"

    def _judge_and_record(self, plan_errors: dict[str, str] | None = None) -> None:
        try:
            self._plan_errors = plan_errors or {}
            self.verdict = self._judge()
        except Exception as error:  # an attribute that this host's layers do not have: the host's own class would not care
            detail = kernels.first_line(error)
            self.verdict = Resolution.left_to_the_host(RejectReason.HOST, detail)
        with suppress(Exception):
            self._announce_and_record(ready=False)

    def _announce_and_record(self, ready: bool) -> None:
        announce(self.verdict, f"MoE layer {getattr(self, 'layer_idx', '?')}", getattr(self, "rank", 0), self._alone)
        status.record(self, self.verdict, ready=ready)

    def _judge(self) -> Resolution:
        lacking = contract.lacking(self)
        if lacking:
            raise AttributeError(f"layers of this host have no {', '.join(lacking)}")
        question = describe.from_layer(self, self._config, self._alltoall, self.scale_ratio > 1)
        return eligibility.resolve(question, self.dispatch.kernels, self._plan_errors)

    def _activation_name(self) -> str:
        return describe.activation_name(lambda name: getattr(self, name, None))

    def _geometry(self) -> kernels.Geometry:
        return kernels.Geometry(
            num_experts=self.expert_size_per_partition,
            top_k=self.routing_method.experts_per_token,
            hidden_size=self.hidden_size,
            intermediate_size=self.quant_method.intermediate_size(self),
            activation="SwigluBias" if describe.activation_tensors(self) else self._activation_name(),
            dtype=self._dtype,
            ranks=self.ep_size,
            format=self.quant_method.format,
        )

    def _kernel_weights(self) -> Any:
        """Return the layer's weights as the kernels read them, with biases and activation constants."""
        weights, extra = self.quant_method.kernel_weights(self), describe.activation_tensors(self)
        self._swiglu_tensors = describe.activation_tensor_names(self)
        return dataclasses.replace(weights, epilogue=Epilogue(**extra)) if extra else weights

    def _addresses_now(self) -> tuple[int, ...]:
        """Addresses of the host's tensors that the kernels read: parameters, and SwiGLU's constants."""
        constants = (getattr(self, name).data_ptr() for name in self._swiglu_tensors)
        return (*self.quant_method.addresses(self), *constants)

    # ---- call --------------------------------------------------------------------------------------------------------

    def _ask(self, like: Any) -> None:
        """Measure once, at the first eager call, which of the families and the host serves how many tokens on this card.

        Args:
            like: the call under way, in the host's form.
        """
        try:
            if self._is_tuning():
                crossover.tuning()
            elif self.dispatch.should_measure() and not torch.compiler.is_compiling():
                device = self.w2_weight.device
                paths = functools.partial(host_path.timed_paths, self, like)
                sampler = host_path.route_sampler(self, self.schedule.kernels[0].geometry, device)
                self.dispatch.measure(device, paths, sampler, host.load().generation)
        except Exception as error:  # costs the measurement
            self.dispatch.decided = True
            with suppress(Exception):
                log.once(f"the crossover stays as it is: {kernels.first_line(error)}")

    def _kernel_for(self, x: Any, x_sf: torch.Tensor | None = None) -> kernels.Kernel | None:
        """None where the call is the host's."""
        if not isinstance(x, torch.Tensor) or x.dtype is not (self._dtype if x_sf is None else torch.uint8):
            return None
        kernel = self.schedule.at(x.shape[0])
        if kernel is None or (x_sf is not None and not kernel.features.quantized_input):
            return None
        # CUTLASS's tactics for few tokens are found as without us.
        return kernel if self._alone or not self._is_tuning() else None

    def quantize_input(self, x: Any, post_quant_comm: bool = True, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        """Pass on unquantized what a kernel will serve, else quantize as the parent does.

        Before communication (``post_quant_comm``) the form of the tokens must not depend on this rank's kernels, so they are
        quantized as the host does; a format that the host has no path for is always sent in bf16.
        """
        try:
            serves = self._alone or (not post_quant_comm and self._kernel_for(x) is not None)
        except Exception as error:
            self._leave_to_the_host(error)
            serves = False
        if serves:
            return x, None
        return super().quantize_input(x, post_quant_comm=post_quant_comm, **kwargs)

    def _behind_alltoall(self) -> None:
        """Disable our kernels once all-to-all communication is in use. All ranks detect it at the same call."""
        if not self._alltoall:
            self._alltoall = True
            self._judge_and_record()
            self.retire_kernels()

    def _serve(
        self,
        x: Any,
        x_sf: torch.Tensor | None,
        swizzled: bool,
        token_selected_experts: torch.Tensor | None,
        token_final_scales: torch.Tensor | None,
        output_dtype: torch.dtype | None,
        moe_output: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The kernel's answer, or None where the call is CUTLASS's.

        What is within a kernel's range is the kernel's, quantized input where it takes that.  What only CUTLASS does, the forms
        of a call (:mod:`.calls`) sort out before: LoRA, unfinalized output, and ids from an all-to-all, which may hold a
        padding id.  ``moe_output`` is written and returned if given.
        """
        if isinstance(x, self._quantized):
            x, x_sf, swizzled = x.fp4_tensor, x.scaling_factor, x.is_sf_swizzled
        kernel = self._kernel_for(x, x_sf)
        if token_final_scales is None and self._ones is not None and kernel is not None:
            token_final_scales = self._ones[: x.shape[0]]
        if kernel is None or token_selected_experts is None or token_final_scales is None:
            if self._alone and isinstance(x, torch.Tensor):
                return no_host_path.answer(x, moe_output, self._about(), self.verdict)
            return None
        addresses = self._addresses_now()
        if addresses != self._addresses:  # the kernel reads the parameters as they are now, also where no hook was called
            self.dispatch.bind(self._kernel_weights(), self.slot_start)
            self._addresses = self._addresses_now()
        # Ids are global: what is not this rank's is unrouted.  The rank returns the partial sum of its own experts, the host
        # reduces.
        direct = moe_output if moe_output is not None and moe_output.dtype is self._dtype else None
        result = kernel.run(kernels.MoECall(x, token_selected_experts, token_final_scales, x_sf, swizzled, direct))
        if moe_output is None:
            return result if output_dtype in (None, self._dtype) else result.to(output_dtype)
        return moe_output if direct is not None else moe_output.copy_(result)

    def _quantize_late(self, x: Any, x_sf: torch.Tensor | None, swizzled: bool) -> tuple[Any, torch.Tensor | None]:
        """bf16 that :meth:`quantize_input` passed through and the kernel does not serve, with the scale layout of this call."""
        if self._ours is not None and isinstance(x, torch.Tensor) and x.is_floating_point() and x_sf is None:
            quantized: tuple[Any, torch.Tensor | None] = super().quantize_input(x, post_quant_comm=not swizzled)
            return quantized
        return x, x_sf


@functools.cache
def layer_class() -> type[Promoted]:
    """``FlashInferNvfp4Sm12xFusedMoE``: :class:`Promoted` on this process's host.

    Raises:
        UnsupportedHostError: see :func:`trtllm_b12x.engines.trtllm.host.load`.
    """
    trtllm = host.load()
    return host.derive(
        f"{__name__}:FlashInferNvfp4Sm12xFusedMoE",
        Promoted,
        trtllm.Layer,
        trtllm.CutlassFusedMoE,
        hosts_class=trtllm.CutlassFusedMoE,
        _quantized=trtllm.Fp4QuantizedTensor,
        _is_tuning=staticmethod(trtllm.is_tuning),
    )


def __getattr__(name: str) -> Any:
    if name == "FlashInferNvfp4Sm12xFusedMoE":
        return layer_class()
    raise AttributeError(name)
