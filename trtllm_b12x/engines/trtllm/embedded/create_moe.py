"""Emulate ``get_moe_cls``, ``create_moe_backend``, ``create_moe`` and ``ConfigurableMoE``, the wrapper that a model holds.

Routing, chunking and the calls into the backend follow ``fused_moe/configurable_moe.py``, the exact-class tests
``fused_moe/create_moe.py``. One module holds all of them, so that a rebound name is seen everywhere.
"""

from __future__ import annotations

from typing import Any

import torch

from .communication import AllGatherReduceScatter, all_reduce
from .config import AuxStreamType, Fp4QuantizedTensor, ModelConfig, QuantConfig
from .fused_moe_cutlass import CutlassFusedMoE
from .interface import MoE
from .routing import BaseMoeRoutingMethod


class ConfigurableMoE(MoE):
    """MoE wrapper that a model holds. ``backend`` is the module that owns the weights.

    Without communication between ranks (``comm`` is None), every rank sees all tokens with global ids and returns its partial
    sum, or the sum over the ranks with ``reduce_results``. With attention-DP each rank has its own tokens.
    """

    def __init__(
        self,
        routing_method: BaseMoeRoutingMethod,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        model_config: ModelConfig,
        override_quant_config: QuantConfig | None = None,
        apply_router_weight_on_input: bool = False,
        layer_idx: int | None = None,
        **arguments: Any,
    ) -> None:
        sizes: dict[str, Any] = {
            "routing_method": routing_method,
            "num_experts": num_experts,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "model_config": model_config,
        }
        super().__init__(**sizes, layer_idx=layer_idx, **arguments)
        self.model_config = model_config
        self.apply_router_weight_on_input = apply_router_weight_on_input
        if apply_router_weight_on_input and routing_method.top_k != 1:
            raise AssertionError("apply_router_weight_on_input only supports top-1 routing")
        attention_dp = self.use_dp and self.parallel_size > 1
        self.comm = AllGatherReduceScatter(self.parallel_rank) if attention_dp else None

        # Both functions are looked up as module attributes, as in the host, so that a rebound name takes effect.
        moe_cls = get_moe_cls(model_config, override_quant_config=override_quant_config)
        skip = model_config.skip_create_weights_in_init
        model_config.skip_create_weights_in_init = True
        try:
            self.backend: Any = create_moe_backend(
                moe_cls=moe_cls,
                **sizes,
                **arguments,
                apply_router_weight_on_input=apply_router_weight_on_input,
                layer_idx=None,
                init_load_balancer=False,
                without_comm=True,
            )
        finally:
            model_config.skip_create_weights_in_init = skip
        self.backend.layer_idx = layer_idx
        if override_quant_config is not None:
            self.quant_config = self.backend.quant_config = override_quant_config
        if not skip:
            self.backend.create_weights()

        self.moe_max_num_tokens = model_config.moe_max_num_tokens
        self.aux_stream = None
        if self.moe_max_num_tokens < model_config.max_num_tokens * model_config.mapping.dp_size and torch.cuda.is_available():
            self.aux_stream = (self.aux_stream_dict or {}).get(AuxStreamType.MoeChunkingOverlap) or torch.cuda.Stream()
        self._weights_removed = True  # the model loader skips the wrapper and finds the backend as a submodule

    def create_weights(self) -> None:
        self.backend.create_weights()

    def load_weights(self, weights: list[Any], allow_partial_loading: bool = False) -> None:
        self.backend.load_weights(weights, allow_partial_loading)

    def post_load_weights(self) -> None:
        self.backend.post_load_weights()

    def forward_impl(
        self,
        x: torch.Tensor | Fp4QuantizedTensor,
        router_logits: torch.Tensor,
        *,
        do_finalize: bool = True,
        output_dtype: torch.dtype | None = None,
        all_rank_num_tokens: list[int] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the layer in chunks. ``all_rank_num_tokens``: rows per rank with attention-DP. ``do_finalize`` is ignored."""
        if isinstance(x, Fp4QuantizedTensor):
            assert output_dtype is not None
        else:
            output_dtype = x.dtype
        rows = x.shape[0] if all_rank_num_tokens is None else sum(all_rank_num_tokens)
        num_chunks = -(-rows // self.moe_max_num_tokens)
        if num_chunks <= 1:
            return self._forward_chunk(x, router_logits, output_dtype, all_rank_num_tokens)
        if self.comm is not None:
            raise NotImplementedError("the embedded host does not cut attention-DP batches: raise moe_max_num_tokens")
        assert isinstance(x, torch.Tensor), "chunks are cut from an unquantized tensor"
        quotient, remainder = divmod(x.shape[0], num_chunks)
        sizes = [quotient + 1] * remainder + [quotient] * (num_chunks - remainder)
        outputs = []
        for index, (x_chunk, logits_chunk) in enumerate(zip(x.split(sizes), router_logits.split(sizes), strict=True)):
            # Even chunks on the auxiliary stream, odd ones on the current one: outputs of one layer overlap in time.
            if self.aux_stream is not None and index % 2 == 0:
                self.aux_stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.aux_stream):
                    outputs.append(self._forward_chunk(x_chunk, logits_chunk, output_dtype))
            else:
                outputs.append(self._forward_chunk(x_chunk, logits_chunk, output_dtype))
        if self.aux_stream is not None:
            torch.cuda.current_stream().wait_stream(self.aux_stream)
        return torch.cat(outputs)

    def _forward_chunk(
        self,
        x: torch.Tensor | Fp4QuantizedTensor,
        router_logits: torch.Tensor,
        output_dtype: torch.dtype,
        all_rank_num_tokens: list[int] | None = None,
    ) -> torch.Tensor:
        assert self.backend._supports_load_balancer(), "only backends that leave routing to the wrapper are embedded"
        token_selected_experts, token_final_scales = self.routing_method.apply(router_logits)
        token_selected_experts = token_selected_experts.to(torch.int32)
        assert token_final_scales.dtype == torch.float32
        scales: torch.Tensor | None = token_final_scales
        if self.apply_router_weight_on_input:
            assert isinstance(x, torch.Tensor)
            x, scales = x * token_final_scales.to(x.dtype), None
        if self.comm is None:
            x, x_sf = self.backend.quantize_input(x, post_quant_comm=False)
        else:
            assert all_rank_num_tokens is not None
            x, x_sf = self.backend.quantize_input(x)
            assert isinstance(x, torch.Tensor)
            x, x_sf, token_selected_experts, scales = self.comm.dispatch(
                x, x_sf, token_selected_experts, scales, all_rank_num_tokens
            )
        output: torch.Tensor = self.backend.run_moe(
            x=x,
            token_selected_experts=token_selected_experts,
            token_final_scales=scales,
            x_sf=x_sf,
            **self._get_backend_kwargs(output_dtype),
        )
        if self.comm is not None:
            return self.comm.combine(output)
        return all_reduce(output) if self.reduce_results and self.parallel_size > 1 else output

    def _get_backend_kwargs(self, output_dtype: torch.dtype) -> dict[str, Any]:
        # Exact comparison, as in the host: a plain subclass gets no arguments.
        if self.backend.__class__ == CutlassFusedMoE:
            swizzled = self.comm is None
            return {"is_sf_swizzled": swizzled, "output_dtype": output_dtype, "enable_alltoall": False, "moe_output": None}
        return {}


def get_moe_cls(model_config: ModelConfig, override_quant_config: QuantConfig | None = None) -> type[MoE]:
    """Return the class for ``model_config.moe_backend``: CUTLASS for any quantization, also for AUTO."""
    del override_quant_config
    if model_config.moe_backend.upper() in ("CUTLASS", "AUTO"):
        return CutlassFusedMoE
    raise ValueError(f"Unsupported moe backend: {model_config.moe_backend}")


def create_moe_backend(
    moe_cls: type[MoE],
    routing_method: BaseMoeRoutingMethod,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    **arguments: Any,
) -> MoE:
    """Build the module that owns the weights. ``arguments`` are those of ``CutlassFusedMoE``."""
    if moe_cls == CutlassFusedMoE:
        return moe_cls(
            routing_method=routing_method,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            **arguments,
        )
    raise ValueError(f"Unsupported moe backend: {moe_cls}")


def create_moe(
    routing_method: BaseMoeRoutingMethod,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    model_config: ModelConfig,
    override_quant_config: QuantConfig | None = None,
    **arguments: Any,
) -> MoE:
    """Build the layer for a model: the backend class wrapped in ``ConfigurableMoE``."""
    moe_cls = get_moe_cls(model_config, override_quant_config)
    sizes = (routing_method, num_experts, hidden_size, intermediate_size)
    if moe_cls in (CutlassFusedMoE,):
        return ConfigurableMoE(*sizes, model_config=model_config, override_quant_config=override_quant_config, **arguments)
    return create_moe_backend(moe_cls, *sizes, model_config=model_config, **arguments)
