"""The two forms in which hosts call a backend, and tell it that its weights are there.

Both hand the call to ``_serve`` of the class they are mixed into; what it does not serve goes on to the host's own ``run_moe``,
quantized by ``_quantize_late`` where the host's ``quantize_input`` was passed through.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:

    class _Backend:
        """What the mixins find behind and before them."""

        def run_moe(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...

        def post_load_weights(self) -> None: ...

        def cache_derived_state(self) -> None: ...

        def _weights_are_ready(self) -> None: ...

        def _serve(self, *args: Any) -> torch.Tensor | None: ...

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


class KeywordCalls(_Backend):
    """Generations A and B (TensorRT-LLM 1.2 and 1.3), and the embedded host: one keyword per fact.

    A host that compares classes exactly gives them to nobody but ``CutlassFusedMoE`` (``ConfigurableMoE._get_backend_kwargs``).
    """

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
        cutlass_only = (
            not kwargs.get("do_finalize", True) or kwargs.get("lora_params") is not None or kwargs.get("enable_alltoall")
        )
        if not cutlass_only:
            result = self._serve(x, x_sf, token_selected_experts, token_final_scales, output_dtype, moe_output)
            if result is not None:
                return result
        quantized, scales = self._quantize_late(x, x_sf, is_sf_swizzled)
        if quantized is not x:
            output_dtype = output_dtype or x.dtype
        return super().run_moe(
            quantized,
            token_selected_experts,
            token_final_scales,
            x_sf=scales,
            is_sf_swizzled=is_sf_swizzled,
            output_dtype=output_dtype,
            tuner_num_tokens=tuner_num_tokens,
            tuner_top_k=tuner_top_k,
            moe_output=moe_output,
            **kwargs,
        )


class ContextCalls(_Backend):
    """Generations C1 and C2: a frozen ``MoERunContext`` whose ``comm_plan`` says what the communication did."""

    def run_moe(self, ctx: Any, *, workspace: dict[str, Any] | None = None) -> torch.Tensor:
        """``ctx.x (T, H)``, ``ctx.token_selected_experts (T, k)``, ``ctx.token_final_scales (T, k)``; ``(T, H)``."""
        plan = ctx.comm_plan
        if plan is not None:  # without one the host says what is wrong
            if ctx.do_finalize and ctx.lora_params is None and not plan.enable_alltoall:
                result = self._serve(
                    ctx.x, ctx.x_sf, ctx.token_selected_experts, ctx.token_final_scales, ctx.output_dtype, plan.moe_output
                )
                if result is not None:
                    return result
            quantized, scales = self._quantize_late(ctx.x, ctx.x_sf, plan.input_sf_swizzled)
            if quantized is not ctx.x:
                dtype = ctx.output_dtype or ctx.x.dtype
                ctx = dataclasses.replace(ctx, x=quantized, x_sf=scales, output_dtype=dtype)
        return super().run_moe(ctx, workspace=workspace)
