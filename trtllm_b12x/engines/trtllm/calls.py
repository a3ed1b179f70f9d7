# SPDX-License-Identifier: Apache-2.0
"""Adapt the two calling conventions of a MoE backend, and detect when its weights are loaded.

Both pass the call to ``_serve`` of our layer class. Calls that ``_serve`` declines go to the original ``run_moe``.
``_quantize_late`` then quantizes the input if ``quantize_input`` returned it unquantized.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from . import guard

if TYPE_CHECKING:
    import torch

    from trtllm_b12x.kernels import MoECall

_Backend: Any = object
"""Stand-in base class for our layer class and its TensorRT-LLM parent class."""


class EndsWithPostLoad(_Backend):
    """Mixin for TensorRT-LLM generations whose last hook after a weight load or refit is ``post_load_weights``."""

    def post_load_weights(self) -> None:
        super().post_load_weights()
        self._weights_are_ready()


class EndsWithCachedState(_Backend):
    """Mixin for TensorRT-LLM generations whose last hook is ``cache_derived_state``, the only one for shared weights."""

    def cache_derived_state(self) -> None:
        super().cache_derived_state()
        self._weights_are_ready()


class _Calls(_Backend):
    def validate_configurable_moe(self, moe: Any) -> None:
        """Read whether the wrapper uses all-to-all (late 1.3 and later). Earlier versions pass the flag with each call."""
        super().validate_configurable_moe(moe)
        with guard.host_takes_over(self):
            if getattr(moe, "enable_alltoall", False):
                self._behind_alltoall()


class KeywordCalls(_Calls):
    """Calling convention of generations A and B (TensorRT-LLM 1.2 and 1.3) and of the embedded TensorRT-LLM: keywords.

    Versions that compare classes exactly pass all keywords only to ``CutlassFusedMoE`` (``ConfigurableMoE._get_backend_kwargs``).
    """

    def run_as_the_host(self, like: dict[str, Any], call: MoECall) -> torch.Tensor:
        """Run TensorRT-LLM's path on unquantized tokens, with the other arguments of its call ``like``."""
        x, x_sf = super().quantize_input(call.x, post_quant_comm=False)
        others = {"x_sf": x_sf, "is_sf_swizzled": True, "output_dtype": call.x.dtype, **like}
        return super().run_moe(x, call.ids, call.router_weights, **others)

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
        """Run the experts on ``x (T, H)``, ids ``(T, k)``, scales ``(T, k)`` float32. Return ``(T, H)`` in ``output_dtype``."""
        enable_alltoall = kwargs.get("enable_alltoall")
        if enable_alltoall is None:  # the forward path of late 1.3 omits it; see run_moe in its fused_moe_cutlass.py
            enable_alltoall = getattr(self, "enable_alltoall", False)
        result, fault = self._serve(
            kwargs, kwargs.get("do_finalize", True), kwargs.get("lora_params"), enable_alltoall,
            x, x_sf, is_sf_swizzled, token_selected_experts, token_final_scales, output_dtype, moe_output,
        )  # fmt: skip
        if result is not None:
            return result
        quantized, x_sf = self._quantize_late(x, x_sf, is_sf_swizzled)
        result = super().run_moe(
            quantized,
            token_selected_experts,
            token_final_scales,
            x_sf=x_sf,
            is_sf_swizzled=is_sf_swizzled,
            output_dtype=output_dtype if quantized is x else output_dtype or x.dtype,
            tuner_num_tokens=tuner_num_tokens,
            tuner_top_k=tuner_top_k,
            moe_output=moe_output,
            **kwargs,
        )
        if fault is not None:  # our error: TensorRT-LLM has just served the same call
            self._leave_to_the_host(fault)
        return result


class ContextCalls(_Calls):
    """Calling convention of generations C1 and C2: a frozen ``MoERunContext`` whose ``comm_plan`` describes the communication."""

    def run_as_the_host(self, like: Any, call: MoECall) -> torch.Tensor:
        """Run TensorRT-LLM's path on unquantized tokens, with the other arguments of its call ``like``."""
        x, x_sf = super().quantize_input(call.x, post_quant_comm=False)
        plan = dataclasses.replace(like.comm_plan, input_sf_swizzled=True, moe_output=None)
        routes = {"token_selected_experts": call.ids, "token_final_scales": call.router_weights}
        ctx = dataclasses.replace(like, x=x, x_sf=x_sf, output_dtype=call.x.dtype, comm_plan=plan, **routes)
        return super().run_moe(ctx, workspace=None)

    def _supports_load_balancer(self) -> bool:
        """Return False to get logits without ids. TensorRT-LLM calls this before it routes a call (``moe_scheduler.py``)."""
        return bool(super()._supports_load_balancer()) and not self._takes_logits()

    def run_moe(self, ctx: Any, *, workspace: dict[str, Any] | None = None) -> torch.Tensor:
        """Run the experts on ``ctx.x (T, H)`` with ids and scales of ``ctx``, ``(T, k)`` each, or with logits ``(T, E)``.

        Return ``(T, H)``. This method routes calls without ids if no kernel does, with TensorRT-LLM's routing method.
        """
        plan, fault = ctx.comm_plan, None
        if plan is not None and ctx.token_selected_experts is None and ctx.router_logits is not None:
            if not plan.enable_alltoall and ctx.do_finalize and not ctx.lora_params:
                x, x_sf, swizzled = ctx.x, ctx.x_sf, plan.input_sf_swizzled
                result = self._serve_logits(x, x_sf, swizzled, ctx.router_logits, ctx.output_dtype, plan.moe_output)
                if result is not None:
                    return result
            ids, scales = self.routing_method.apply(ctx.router_logits)
            ctx = dataclasses.replace(ctx, token_selected_experts=ids.int(), token_final_scales=scales)
        if plan is not None:  # without a plan TensorRT-LLM raises an error
            result, fault = self._serve(
                ctx, ctx.do_finalize, ctx.lora_params, plan.enable_alltoall, ctx.x, ctx.x_sf, plan.input_sf_swizzled,
                ctx.token_selected_experts, ctx.token_final_scales, ctx.output_dtype, plan.moe_output,
            )  # fmt: skip
            if result is not None:
                return result
            quantized, x_sf = self._quantize_late(ctx.x, ctx.x_sf, plan.input_sf_swizzled)
            if quantized is not ctx.x:
                dtype = ctx.output_dtype or ctx.x.dtype
                ctx = dataclasses.replace(ctx, x=quantized, x_sf=x_sf, output_dtype=dtype)
        result = super().run_moe(ctx, workspace=workspace)
        if fault is not None:
            self._leave_to_the_host(fault)
        return result
