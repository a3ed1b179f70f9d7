"""``FlashInferNvfp4Sm12xFusedMoE``: the host's CUTLASS layer, with decode on b12x."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from . import host as _host
from . import kernels, log, registry, settings
from .crossover import crossover
from .decision import Deployment, Problem, Rejection, RejectReason, Verdict, decide
from .host import ranks
from .quantization import NVFP4Sm12xFusedMoEMethod

host = _host.load()

_votes: dict[kernels.Geometry, str | None] = {}
"""Geometries that were planned, and what went wrong on another rank."""


def _agreed(geometry: kernels.Geometry, mapping: Any, error: str | None) -> str | None:
    """``error``, or that of another rank: ranks that share a layer compute it alike.  Asked once per geometry and process."""
    if geometry not in _votes and mapping is not None:
        _votes[geometry] = None
        try:
            answers = ranks.exchange(mapping, error or "")
        except Exception as exception:
            log.logger.warning("other ranks cannot be asked about their kernels: %s", kernels.first_line(exception))
            answers = {}
        failed = [f"rank {rank}: {text}" for rank, text in answers.items() if text and rank != mapping.rank]
        if failed and error is None:
            _votes[geometry] = failed[0]
    return error or _votes.get(geometry)


class FlashInferNvfp4Sm12xFusedMoE(host.Layer, host.CutlassFusedMoE):  # type: ignore[name-defined]
    """NVFP4 MoE on SM120/SM121: calls of fewer tokens than the crossover run on b12x, all others as the parent has them.

    Whether b12x serves the layer at all is decided in :meth:`create_weights`, when its final quantization is known;
    where it does not, the instance behaves as its parent to the letter.  ``verdict`` says why.
    """

    verdict: Verdict
    """The latest, from ``create_weights`` on."""
    kernel: kernels.Kernel | None = None
    """Set once weights are loaded, if b12x serves the layer."""
    crossover: int = 0
    """First token count that takes CUTLASS."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Before the parent, which may create the weights, hence ask for the verdict, in its own __init__.
        config = kwargs.get("model_config")
        self._lora = getattr(config, "lora_config", None) is not None
        self._dynamic_quantization = bool(getattr(config, "force_dynamic_quantization", False))
        self._cuda_graphs = bool(getattr(config, "use_cuda_graph", False))
        self._mapping = getattr(config, "mapping", None)
        # Fixed here and alike on every rank: what is sent to other ranks must not depend on anything of a call.
        self._gather_bf16 = settings.GATHER_BF16()
        super().__init__(*args, **kwargs)

    # ---- load --------------------------------------------------------------------------------------------------------

    def _get_quant_method(self) -> Any:
        self._kernel_class = kernels.kernel_class()
        self.kernel = None  # the host may create weights anew, for another quantization
        self._judge_and_record()
        if self.verdict.served:
            return NVFP4Sm12xFusedMoEMethod(self._kernel_class.features.tile)
        return super()._get_quant_method()

    def _weights_are_ready(self) -> None:
        """Called at the end of every load and refit, by the hook that this host's generation ends with."""
        if not isinstance(self.quant_method, NVFP4Sm12xFusedMoEMethod):
            registry.record(self, self.verdict, ready=True)
            return
        if self.w2_weight.is_meta:  # hosts that share weights call the hooks before there are any
            return
        self._judge_and_record()  # AWQ scales show only now
        if self.verdict.served:
            error = self._bind_kernel()
            if error is not None:
                # The parameters serve CUTLASS as they are: the layer is slower, the server lives.
                self._judge_and_record(plan_error=error)
        if not self.verdict.served:
            self.kernel = None
        registry.record(self, self.verdict, ready=True)

    def _bind_kernel(self) -> str | None:
        """Give the kernel the weights, planned and tested before if it is new; what failed, here or on another rank."""
        try:
            geometry = self._geometry()
            if _votes.get(geometry) is not None:
                return _votes[geometry]
            weights = self.quant_method.kernel_weights(self)
            if self.kernel is not None:
                self.kernel.bind(weights)
                return None
            self.crossover = crossover(self.routing_method.experts_per_token)
            kernel = self._kernel_class()
        except Exception as exception:
            return kernels.first_line(exception)
        error = None
        try:
            kernel.plan(geometry, self.crossover - 1, self.w2_weight.device)
            kernel.bind(weights)
            kernel.self_test()
            if geometry.expert_parallel:
                kernels.warm_up(self.w2_weight.device)
        except Exception as exception:
            error = kernels.first_line(exception)
        error = _agreed(geometry, self._mapping, error)
        if error is None:
            self.kernel = kernel
        elif self.w2_weight.is_cuda:
            del kernel
            torch.cuda.empty_cache()  # the host sizes its KV cache by what is free
        return error

    def _judge_and_record(self, plan_error: str | None = None) -> None:
        try:
            self.verdict = self._judge(plan_error)
        except Exception as error:  # an attribute that this host's layers do not have: the host's own class would not care
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
            self.verdict = Verdict((Rejection(RejectReason.HOST, detail),))
        log.announce(self.verdict, f"MoE layer {self.layer_idx}", self.rank)
        registry.record(self, self.verdict, ready=False)

    def _judge(self, plan_error: str | None = None) -> Verdict:
        algo = self.quant_config.quant_algo if self.quant_config is not None else None
        divided = self.intermediate_size % self.tp_size == 0  # else the host's shards differ in size
        problem = Problem(
            quant_algo="none" if algo is None else str(getattr(algo, "value", algo)),
            group_size=getattr(self.quant_config, "group_size", None),
            activation_dtype=None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            activation=self._activation_name(),
            activation_constants=host.activation_constants(lambda name: getattr(self, name, None)),
            pre_quant_scale=getattr(self, "fc31_act_scale", None) is not None,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size_per_partition if divided else self.intermediate_size / self.tp_size,
            num_experts=self.num_experts,
            top_k=self.routing_method.experts_per_token,
            dynamic_quantization=self._dynamic_quantization,
            bias=bool(self.bias),
            apply_router_weight_on_input=self.apply_router_weight_on_input,
        )
        balancer = self.layer_load_balancer
        deployment = Deployment(
            tp_size=self.tp_size,
            ep_size=self.ep_size,
            attention_dp=self.use_dp and self.parallel_size > 1,
            load_balancer="none" if balancer is None else "dynamic" if self._using_dynamic_load_balancer() else "static",
            lora=self._lora,
            cuda_graphs=self._cuda_graphs,
        )
        return decide(problem, deployment, replace(kernels.environment(self._kernel_class), plan_error=plan_error))

    def _activation_name(self) -> str:
        return str(host.activation_name(lambda name: getattr(self, name, None)))

    def _geometry(self) -> kernels.Geometry:
        return kernels.Geometry(
            num_experts=self.expert_size_per_partition,
            top_k=self.routing_method.experts_per_token,
            hidden_size=self.hidden_size,
            intermediate_size=2 * self.w2_weight.data.view(torch.uint8).shape[2],
            activation=self._activation_name(),
            expert_parallel=self.ep_size > 1,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without the kernel, whose views and workspace are this layer's: a copy runs on CUTLASS until its weights are loaded."""
        return {**self.__dict__, "kernel": None}

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Moved or converted: the kernel follows."""
        module = super()._apply(*args, **kwargs)
        if self.kernel is not None:
            self.kernel = None
            self._weights_are_ready()
        return module

    # ---- call --------------------------------------------------------------------------------------------------------

    def _in_range(self, x: Any) -> bool:
        """Not quantized yet, and few enough tokens for the kernel."""
        return (
            self.kernel is not None
            and isinstance(x, torch.Tensor)
            and x.dtype is torch.bfloat16
            and self.kernel.serves(x.shape[0])
            and not host.is_tuning()  # CUTLASS's tactics for few tokens are found as without us
        )

    def quantize_input(self, x: Any, post_quant_comm: bool = True, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        """As the parent, except that what b12x will serve passes through: it quantizes by itself.

        Before communication (``post_quant_comm``) the form of the tokens must not depend on this rank's count: always
        the host's quantization, hence CUTLASS, or always bf16 where that was chosen (``TRTLLM_B12X_GATHER_BF16``).
        """
        if post_quant_comm:
            # By the method, not the kernel: a rank whose kernel could not be planned must send what the others send.
            if self._gather_bf16 and isinstance(self.quant_method, NVFP4Sm12xFusedMoEMethod) and isinstance(x, torch.Tensor):
                return x, None
        elif self._in_range(x):
            return x, None
        return super().quantize_input(x, post_quant_comm=post_quant_comm, **kwargs)

    def _serve(
        self,
        x: Any,
        x_sf: torch.Tensor | None,
        token_selected_experts: torch.Tensor | None,
        token_final_scales: torch.Tensor | None,
        output_dtype: torch.dtype | None,
        moe_output: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The kernel's answer, or None where the call is CUTLASS's.

        bf16 within the kernel's range means b12x, anything quantized is CUTLASS's.  So is what only CUTLASS does, which the
        forms of a call (:mod:`trtllm_b12x.host.calls`) sort out before: LoRA, unfinalized output, and ids from an
        all-to-all, which may hold a padding id.  ``moe_output`` is written and returned if given.
        """
        if not self._in_range(x) or x_sf is not None or token_selected_experts is None or token_final_scales is None:
            return None
        return self._run_kernel(x, token_selected_experts, token_final_scales, output_dtype, moe_output)

    def _quantize_late(self, x: Any, x_sf: torch.Tensor | None, swizzled: bool) -> tuple[Any, torch.Tensor | None]:
        """bf16 that :meth:`quantize_input` passed through and the kernel does not serve, with the scale layout of this call."""
        ours = isinstance(self.quant_method, NVFP4Sm12xFusedMoEMethod)
        if ours and isinstance(x, torch.Tensor) and x.is_floating_point() and x_sf is None:
            quantized: tuple[Any, torch.Tensor | None] = super().quantize_input(x, post_quant_comm=not swizzled)
            return quantized
        return x, x_sf

    def _run_kernel(
        self,
        x: torch.Tensor,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        output_dtype: torch.dtype | None,
        moe_output: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self.kernel is not None
        # Ids are global: what is not this rank's is unrouted.  The rank returns the partial sum of its own experts, the host
        # reduces.  Padding ids beyond the last expert come from an all-to-all alone.
        ids = token_selected_experts
        if self.ep_size > 1:
            ids = kernels.local_ids(ids, self.slot_start, self.expert_size_per_partition)
        direct = moe_output if moe_output is not None and moe_output.dtype is torch.bfloat16 else None
        result = self.kernel.run(x, ids, token_final_scales, out=direct)
        if moe_output is None:
            return result if output_dtype in (None, torch.bfloat16) else result.to(output_dtype)
        return moe_output if direct is not None else moe_output.copy_(result)
