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

from . import eligibility, formats, host, kernels, log, registry, settings, unserved, votes
from .carried import Carried
from .crossover import deciding
from .decision import RejectReason, Resolution
from .formats import constants
from .formats.epilogue import Epilogue
from .host import contract, questions
from .quantization import Method
from .schedule import HOSTS, Schedule

_SPARE = "no call is left to it"
"""What a family is left out for that nothing speaks against."""


class Promoted(Carried):
    """MoE on SM120/SM121, of any of our formats: calls of few tokens are our kernels', all others the parent's.

    Whether any serve the layer at all is decided in :meth:`create_weights`, when its final quantization is known;
    where it does not, the instance behaves as its parent to the letter.  ``verdict`` says why.
    """

    hosts_class: ClassVar[type]
    _quantized: ClassVar[Any]
    _is_tuning: ClassVar[staticmethod[[], bool]]
    """The host's autotuner is running."""
    verdict: Resolution
    schedule = HOSTS
    """Has kernels once weights are loaded, if any serve the layer."""
    _parked = HOSTS
    """Of a layer that was moved to where its kernels cannot run, until it is back."""
    _asked: int | None = -1
    """Stage of :mod:`trtllm_b12x.crossover.deciding` at which the schedule got its split; None: it was the last."""
    _fault = ""
    """First line of what went wrong in a call; the layer is then the host's."""
    _addresses: tuple[int, ...] = ()
    """Of the host's tensors that the kernel reads, when it was bound."""
    _swiglu_tensors: tuple[str, ...] = ()
    """Attributes that hold SwiGLU's alpha, beta and limit."""
    _kernels: Mapping[str, type[kernels.Kernel]] = MappingProxyType({})
    """By family, in order."""
    _plan_errors: Mapping[str, str] = MappingProxyType({})
    _ours: Method | None = None
    """``quant_method``, where it is one of ours."""
    _most_tokens: int | None = None
    _dtype = torch.bfloat16
    _ones: torch.Tensor | None = None
    _alone = False
    """The host has no path for the layer's format: every call is a kernel's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Before the parent, which may create the weights, hence ask for the verdict, in its own __init__.
        self._config = questions.of_config(kwargs.get("model_config"))
        self._mapping = getattr(kwargs.get("model_config"), "mapping", None)
        self._alltoall = False
        self._agreed: dict[str, str] = {}
        """By family, what the ranks that share the layer came to: empty for its kernels, else what stands against them."""
        self._open: set[str] = set()
        """Families on which the vote is cast, its answer not there yet."""
        self._gather_bf16 = False
        with suppress(Exception):
            self._gather_bf16 = settings.GATHER_BF16()
            self._most_tokens = questions.most_tokens(kwargs.get("model_config"))
        with suppress(Exception):
            votes.announce(self._mapping)
        super().__init__(*args, **kwargs)

    # ---- load --------------------------------------------------------------------------------------------------------

    def _get_quant_method(self) -> Any:
        self._agreed, self._ours, self._alone = {}, None, False
        try:
            self.retire_kernels()  # the host may create weights anew, for another quantization
            self._load = votes.load()
            algorithm = questions.quant_algo(self.quant_config)
            self._kernels, self._dtype = eligibility.considered(quant_algo=algorithm), self.dtype or torch.bfloat16
            self._judge_and_record()
            row = formats.find(algorithm)
            if self.verdict.served and row is not None:
                tiles = (self._kernels[name].features.tile for name in self.verdict.families)
                self._ours, self._alone = formats.load(row.method)(math.lcm(*tiles)), not row.hosts_path
                return self._ours
        except Exception as error:
            self._leave_to_the_host(error)
        return super()._get_quant_method()

    def _weights_are_ready(self) -> None:
        """Called at the end of every load and refit, by the hook that this host's generation ends with."""
        try:
            self._bind_or_not()
        except Exception as error:
            self._leave_to_the_host(error)
            with suppress(Exception):
                for name in set(settings.KERNELS.listed()) - self._open:  # the others wait for this rank's
                    self._vote(name, None, self._fault)

    @property
    def kernel(self) -> kernels.Kernel | None:
        """The first of the schedule's."""
        return next(iter(self.schedule.kernels), None)

    def retire_kernels(self) -> None:
        """No further call is a kernel's.  Graphs that were captured before go on: their scratch memory is their own."""
        self.schedule = self._parked = HOSTS

    def _leave_to_the_host(self, error: Exception) -> None:
        """After a fault of ours: the host's own path for good, and a line."""
        self.schedule = self._parked = HOSTS
        log.logger.debug("MoE layer %s", getattr(self, "layer_idx", "?"), exc_info=error)
        self._fault = self._fault or kernels.first_line(error)
        self.verdict = Resolution.left_to_the_host(RejectReason.KERNEL_PLAN_FAILED, self._fault)
        with suppress(Exception):
            self._announce_and_record(ready=True)

    def _bind_or_not(self) -> None:
        if self._open:
            votes.settle()
        if self._ours is not None:
            if self.w2_weight.is_meta:  # hosts that share weights call the hooks before there are any
                return
            fault = self._fault or self._ours.fault
            self._judge_and_record(dict.fromkeys(self._kernels, fault) if fault else {})  # AWQ scales show only now
        bound: dict[str, kernels.Kernel] = {}
        for name in settings.KERNELS.listed():
            kernel, error = self._bound_kernel(name, Schedule(bound, deciding.fixed()))
            if kernel is not None:
                bound[name] = kernel
            self._vote(name, kernel, error)
            if self._agreed.get(name):  # another rank is without it: the next family is wanted on this one too
                bound.pop(name, None)

    def _vote(self, name: str, kernel: kernels.Kernel | None, error: str | None) -> None:
        """Once per layer and family; a layer that is loaded again keeps to what was agreed."""
        settled = functools.partial(self._settle, name, kernel)
        if name in self._agreed or RejectReason.QUANTIZATION in self.verdict.reasons:
            settled(self._agreed.get(name) or error)
        else:
            self._open.add(name)
            votes.cast(self._mapping, f"{self._about()}, {name}", error, settled)

    def _settle(self, name: str, kernel: kernels.Kernel | None, error: str | None) -> None:
        """Take the kernel, or leave it for what went wrong here or on another rank: ranks that share a layer compute it alike."""
        self._open.discard(name)
        self._agreed.setdefault(name, error or "")
        chosen = {family: other for family, other in self.schedule.families.items() if family != name}
        if kernel is not None and not (error or self._fault):
            chosen[name] = kernel
        self.schedule = Schedule({family: chosen[family] for family in self._kernels if family in chosen}, deciding.fixed())
        self._asked = -1
        if error not in (None, _SPARE) and name in self.verdict.families:
            if kernel is not None:
                self._load.failed[name, self._geometry()] = error
            # The parameters serve CUTLASS as they are: the layer is slower, the server lives.
            self._judge_and_record({**self._plan_errors, name: error})
            if self.w2_weight.is_cuda:
                del kernel
                torch.cuda.empty_cache()  # the host sizes its KV cache by what is free
        with suppress(Exception):
            registry.record(self, self.verdict, ready=self._agreed.keys() >= set(settings.KERNELS.listed()))

    def _bound_kernel(self, name: str, before: Schedule) -> tuple[kernels.Kernel | None, str | None]:
        """The kernel with the weights, planned and tested before if it is new, or what failed.

        Args:
            before: what preferred families serve.
        """
        if name not in self.verdict.families:
            return None, str(self.verdict)
        try:
            geometry, kernel = self._geometry(), self.schedule.families.get(name)
            kind = self._kernels[name]
            most = deciding.most(kind.features, geometry, self.w2_weight.device)
            refused = self._agreed.get(name, self._load.failed.get((name, geometry)))
            if kind.features.measured_from and self._most_tokens is not None:
                most = min(most, self._most_tokens)
            if refused or most < kind.features.measured_from or before.serves_all(most):
                return None, refused or _SPARE
            weights = self._kernel_weights()
            self._addresses = self._addresses_now()
            if self.apply_router_weight_on_input:  # the host has scaled the input, and hands on no scales
                self._ones = constants.filled(1.0, (most, geometry.top_k), self.w2_weight.device)
            if kernel is None or kernel.device != self.w2_weight.device:
                kernel = kind()
                kernel.plan(geometry, most, self.w2_weight.device)
            kernel.bind(weights, self.slot_start)
            kernel.self_test()
            return kernel, None
        except Exception as error:
            if isinstance(error, kernels.PlanError) and error.lasting:
                self._load.failed[name, geometry] = kernels.first_line(error)
            return None, kernels.first_line(error)

    def _about(self) -> str:
        """The layer, in words that every rank has alike: sizes before any split, and its place."""
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
        log.announce(self.verdict, f"MoE layer {getattr(self, 'layer_idx', '?')}", getattr(self, "rank", 0), self._alone)
        registry.record(self, self.verdict, ready=ready)

    def _judge(self) -> Resolution:
        lacking = contract.lacking(self)
        if lacking:
            raise AttributeError(f"layers of this host have no {', '.join(lacking)}")
        question = questions.of_layer(self, self._config, self._alltoall)
        return eligibility.resolve(question, self._kernels, self._plan_errors)

    def _activation_name(self) -> str:
        return questions.activation_name(lambda name: getattr(self, name, None))

    def _geometry(self) -> kernels.Geometry:
        return kernels.Geometry(
            num_experts=self.expert_size_per_partition,
            top_k=self.routing_method.experts_per_token,
            hidden_size=self.hidden_size,
            intermediate_size=self.quant_method.intermediate_size(self),
            activation="SwigluBias" if questions.activation_tensors(self) else self._activation_name(),
            dtype=self._dtype,
            ranks=self.ep_size,
            format=self.quant_method.format,
        )

    def _kernel_weights(self) -> Any:
        """Of the layer's format, with what it has beside its weights."""
        weights, extra = self.quant_method.kernel_weights(self), questions.activation_tensors(self)
        self._swiglu_tensors = questions.activation_tensor_names(self)
        return dataclasses.replace(weights, epilogue=Epilogue(**extra)) if extra else weights

    def _addresses_now(self) -> tuple[int, ...]:
        """Addresses of the host's tensors that the kernels read: parameters, and SwiGLU's constants."""
        constants = (getattr(self, name).data_ptr() for name in self._swiglu_tensors)
        return (*self.quant_method.addresses(self), *constants)

    # ---- call --------------------------------------------------------------------------------------------------------

    def _ask(self, like: Any) -> None:
        """Which of the families, and of the host where that has a path, serves how many tokens on this card, once it can be told.

        Args:
            like: the call under way, in the host's form.
        """
        try:
            if self._is_tuning():
                deciding.tuning()
            elif (
                self._asked != (stage := deciding.stage())
                and self.schedule.kernels
                and not torch.compiler.is_compiling()
                and deciding.ask(self, like)
            ):
                self._asked = None if stage == deciding.TUNED else stage
        except Exception as error:  # it costs the card's own split
            self._asked = None
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
        """As the parent, except that what a kernel will serve passes through: it takes tokens that are not quantized.

        Before communication (``post_quant_comm``) the form of the tokens must not depend on anything of this rank: always
        the host's quantization, hence CUTLASS, or always bf16 where that was chosen (``TRTLLM_B12X_GATHER_BF16``) and every
        rank serves the layer.
        """
        try:
            if self._open:
                votes.settle()
            serves = self._alone or (not post_quant_comm and self._kernel_for(x) is not None)
        except Exception as error:
            self._leave_to_the_host(error)
            serves = False
        if serves:
            return x, None
        # By what was agreed, not by the kernel: one that is lost later on this rank alone changes nothing of what is sent.
        # Only what serves no other tokens says by its vote that every rank has chosen bf16.
        agreed = (
            self._gather_bf16
            and not self._alltoall
            and any(self._agreed.get(name) == "" for name, kind in self._kernels.items() if not kind.features.quantized_input)
        )
        if post_quant_comm and agreed and isinstance(x, torch.Tensor):
            return x, None
        return super().quantize_input(x, post_quant_comm=post_quant_comm, **kwargs)

    def _behind_alltoall(self) -> None:
        """Known with the wrapper's strategy, or at the first call, on all ranks alike: tokens are sent as the host sends them."""
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
        of a call (:mod:`trtllm_b12x.host.calls`) sort out before: LoRA, unfinalized output, and ids from an all-to-all, which may
        hold a padding id.  ``moe_output`` is written and returned if given.
        """
        if isinstance(x, self._quantized):
            x, x_sf, swizzled = x.fp4_tensor, x.scaling_factor, x.is_sf_swizzled
        kernel = self._kernel_for(x, x_sf)
        if token_final_scales is None and self._ones is not None and kernel is not None:
            token_final_scales = self._ones[: x.shape[0]]
        if kernel is None or token_selected_experts is None or token_final_scales is None:
            if self._alone and isinstance(x, torch.Tensor):
                return unserved.answer(x, moe_output, self._about(), self.verdict)
            if self._ours is not None:
                self._ours.before_hosts_call(self)
            return None
        addresses = self._addresses_now()
        if addresses != self._addresses:  # the kernel reads the parameters as they are now, also where no hook was called
            weights = self._kernel_weights()
            for one in self.schedule.kernels:
                one.bind(weights, self.slot_start)
            self._addresses = addresses
        # Ids are global: what is not this rank's is unrouted.  The rank returns the partial sum of its own experts, the host
        # reduces.
        direct = moe_output if moe_output is not None and moe_output.dtype is self._dtype else None
        if x_sf is None:
            result = kernel.run(x, token_selected_experts, token_final_scales, out=direct)
        else:
            result = kernel.run_quantized(x, x_sf, swizzled, token_selected_experts, token_final_scales, out=direct)
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
        UnsupportedHostError: see :func:`trtllm_b12x.host.load`.
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
