"""The two forms in which hosts call a backend, and tell it that its weights are there.

Both hand the call to ``_serve`` of the class they are mixed into; what it does not serve goes on to the host's own ``run_moe``,
quantized by ``_quantize_late`` where the host's ``quantize_input`` was passed through.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trtllm_b12x.dispatch.layer import LayerDispatch

    class _Backend:
        """What the mixins find behind and before them."""

        def run_moe(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...

        def post_load_weights(self) -> None: ...

        def cache_derived_state(self) -> None: ...

        def _weights_are_ready(self) -> None: ...

        def validate_configurable_moe(self, moe: Any) -> None: ...

        def _moe_lora_active(self, lora_params: Any) -> bool: ...

        def _behind_alltoall(self) -> None: ...

        def quantize_input(self, x: Any, post_quant_comm: bool = True) -> tuple[Any, torch.Tensor | None]: ...

        _alone: bool
        dispatch: LayerDispatch

        def _ask(self, like: Any) -> None: ...

        def _serve(self, *args: Any) -> torch.Tensor | None: ...

        def _leave_to_the_host(self, error: Exception) -> None: ...

        def _quantize_late(self, x: Any, x_sf: torch.Tensor | None, swizzled: bool) -> tuple[Any, torch.Tensor | None]: ...

else:
    _Backend = object


class EndsWithPostLoad(_Backend):
    """``post_load_weights`` is the last of the host's hooks after a load or a refit."""

    def post_load_weights(self) -> None:
        super().post_load_weights()
        self._weights_are_ready()


class EndsWithCachedState(_Backend):
    """``cache_derived_state`` is; it runs alone where transformed weights are shared between processes."""

    def cache_derived_state(self) -> None:
        super().cache_derived_state()
        self._weights_are_ready()


class _Calls(_Backend):
    def validate_configurable_moe(self, moe: Any) -> None:
        """The wrapper hands itself over, its communication chosen (late 1.3 and later; earlier ones tell it call by call)."""
        super().validate_configurable_moe(moe)
        try:
            if getattr(moe, "enable_alltoall", False):
                self._behind_alltoall()
        except Exception as error:
            self._leave_to_the_host(error)

    def _only_cutlass(self, do_finalize: bool, lora_params: Any, enable_alltoall: bool | None) -> bool:
        """Unfinalized output, LoRA on these experts, and ids that an all-to-all may have padded."""
        if enable_alltoall:
            self._behind_alltoall()
        if not do_finalize or enable_alltoall:
            return True
        # Hosts hand over what there is for any layer, attention's too.
        return lora_params is not None and (not hasattr(self, "_moe_lora_active") or self._moe_lora_active(lora_params))


class KeywordCalls(_Calls):
    """Generations A and B (TensorRT-LLM 1.2 and 1.3), and the embedded host: one keyword per fact.

    A host that compares classes exactly gives them to nobody but ``CutlassFusedMoE`` (``ConfigurableMoE._get_backend_kwargs``).
    """

    def run_as_the_host(
        self, like: dict[str, Any], x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor
    ) -> torch.Tensor:
        """The host's own path on tokens ``(T, H)`` that are not quantized yet, in the form of the call ``like``."""
        quantized, x_sf = super().quantize_input(x, post_quant_comm=False)
        return super().run_moe(quantized, ids, router_weights, x_sf=x_sf, is_sf_swizzled=True, output_dtype=x.dtype, **like)

    def run_moe(
        self,
        x: Any,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor | None,
        x_sf: torch.Tensor | None = None,
        is_sf_swizzled: bool = True,
        output_dtype: torch.dtype | None = None,
        tuner_num_tokens: int | None = None,
        tuner_top_k: int | None = None,
        moe_output: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Experts on ``x (T, H)``, ids ``(T, k)`` and scales ``(T, k)`` float32; ``(T, H)`` in ``output_dtype``."""
        fault = None
        try:
            enable_alltoall = kwargs.get("enable_alltoall")
            if enable_alltoall is None:  # late 1.3's own forward path does not say; run_moe of its fused_moe_cutlass.py
                enable_alltoall = getattr(self, "enable_alltoall", False)
            if not self._only_cutlass(kwargs.get("do_finalize", True), kwargs.get("lora_params"), enable_alltoall):
                if not self.dispatch.decided:
                    self._ask(kwargs)
                result = self._serve(
                    x, x_sf, is_sf_swizzled, token_selected_experts, token_final_scales, output_dtype, moe_output
                )
                if result is not None:
                    return result
        except Exception as error:
            if self._alone:  # the host has no answer
                raise
            fault = error
        quantized, x_sf = self._quantize_late(x, x_sf, is_sf_swizzled)
        if quantized is not x:
            output_dtype = output_dtype or x.dtype
        result = super().run_moe(
            quantized,
            token_selected_experts,
            token_final_scales,
            x_sf=x_sf,
            is_sf_swizzled=is_sf_swizzled,
            output_dtype=output_dtype,
            tuner_num_tokens=tuner_num_tokens,
            tuner_top_k=tuner_top_k,
            moe_output=moe_output,
            **kwargs,
        )
        if fault is not None:  # ours, not the call's: the host has just answered it
            self._leave_to_the_host(fault)
        return result


class ContextCalls(_Calls):
    """Generations C1 and C2: a frozen ``MoERunContext`` whose ``comm_plan`` says what the communication did."""

    def run_as_the_host(self, like: Any, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> torch.Tensor:
        """The host's own path on tokens ``(T, H)`` that are not quantized yet, in the form of the call ``like``."""
        quantized, x_sf = super().quantize_input(x, post_quant_comm=False)
        plan = dataclasses.replace(like.comm_plan, input_sf_swizzled=True, moe_output=None)
        routes = {"token_selected_experts": ids, "token_final_scales": router_weights}
        ctx = dataclasses.replace(like, x=quantized, x_sf=x_sf, output_dtype=x.dtype, comm_plan=plan, **routes)
        return super().run_moe(ctx, workspace=None)

    def run_moe(self, ctx: Any, *, workspace: dict[str, Any] | None = None) -> torch.Tensor:
        """``ctx.x (T, H)``, ``ctx.token_selected_experts (T, k)``, ``ctx.token_final_scales (T, k)``; ``(T, H)``."""
        plan, fault = ctx.comm_plan, None
        if plan is not None:  # without one the host says what is wrong
            try:
                if not self._only_cutlass(ctx.do_finalize, ctx.lora_params, plan.enable_alltoall):
                    if not self.dispatch.decided:
                        self._ask(ctx)
                    routes = ctx.token_selected_experts, ctx.token_final_scales
                    result = self._serve(ctx.x, ctx.x_sf, plan.input_sf_swizzled, *routes, ctx.output_dtype, plan.moe_output)
                    if result is not None:
                        return result
            except Exception as error:
                if self._alone:
                    raise
                fault = error
            quantized, x_sf = self._quantize_late(ctx.x, ctx.x_sf, plan.input_sf_swizzled)
            if quantized is not ctx.x:
                dtype = ctx.output_dtype or ctx.x.dtype
                ctx = dataclasses.replace(ctx, x=quantized, x_sf=x_sf, output_dtype=dtype)
        result = super().run_moe(ctx, workspace=workspace)
        if fault is not None:  # ours, not the call's: the host has just answered it
            self._leave_to_the_host(fault)
        return result
