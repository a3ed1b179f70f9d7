"""What ``ConfigurableMoE`` of C1 and C2 have in common: all but when and how the backend is bound."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._torch.utils import Fp4QuantizedTensor

from .communication import AllGatherReduceScatter, CommunicationFactory
from .interface import MoE


class Wrapper(MoE):
    def _create_comm_strategy_auto(self) -> Any:
        return CommunicationFactory.create_strategy(
            model_config=self.model_config,
            num_experts=self.num_experts,
            top_k=self.routing_method.experts_per_token,
            communication_method=self.communication_method,
        )

    def validate_config(self) -> None:
        if self.apply_router_weight_on_input:
            assert self.routing_method.top_k == 1, "apply_router_weight_on_input only supports top-1 routing"

    def validate_backend(self, backend: Any) -> None:
        if self._using_load_balancer() and not backend._supports_load_balancer():
            raise ValueError(f"EPLB is enabled but backend {type(backend).__name__} does not support load balancer.")
        backend.validate_configurable_moe(self)

    def _supports_load_balancer(self) -> bool:
        return bool(self.backend._supports_load_balancer()) if hasattr(self, "backend") else self.use_dp

    def load_weights(self, weights: list[Any], allow_partial_loading: bool = False) -> None:
        self.backend.load_weights(weights, allow_partial_loading)
        if weights:
            self._weights_transformed = False

    def transform_weights(self) -> None:
        if getattr(self, "_weights_transformed", False):
            return
        self.backend.transform_weights()
        self._weights_transformed = True

    def cache_derived_state(self) -> None:
        self.backend.cache_derived_state()

    def process_weights_after_loading(self) -> None:
        self.backend.process_weights_after_loading()

    def pre_reload_weights(self) -> None:
        self.backend.pre_reload_weights()

    @property
    def enable_alltoall(self) -> bool:
        return self.comm is not None and not isinstance(self.comm, AllGatherReduceScatter)

    @property
    def has_nvfp4(self) -> bool:
        return bool(getattr(self.backend, "has_nvfp4", False))

    def calculate_num_chunks(self, all_rank_num_tokens: list[int]) -> int:
        """With attention-DP every rank counts as the fullest one."""
        if self.use_dp and self.comm is not None:
            rows = len(all_rank_num_tokens) * max(all_rank_num_tokens)
        else:
            assert len(all_rank_num_tokens) == 1, f"non-DP path expects a single-element list, got {all_rank_num_tokens}"
            rows = all_rank_num_tokens[0]
        return -(-rows // self.moe_max_num_tokens)

    @staticmethod
    def split_chunk(split_token_num: int, split_num_chunks: int) -> list[int]:
        quotient, remainder = divmod(split_token_num, split_num_chunks)
        return [quotient + 1] * remainder + [quotient] * (split_num_chunks - remainder)

    def forward_impl(
        self,
        x: Any,
        router_logits: torch.Tensor,
        *,
        do_finalize: bool = True,
        output_dtype: torch.dtype | None = None,
        all_rank_num_tokens: list[int] | None = None,
        use_dp_padding: bool | None = None,
        lora_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if isinstance(x, Fp4QuantizedTensor):
            assert output_dtype is not None
        else:
            output_dtype = x.dtype
        outputs: torch.Tensor = self.scheduler.forward(
            x,
            router_logits,
            do_finalize=do_finalize,
            output_dtype=output_dtype,
            all_rank_num_tokens=all_rank_num_tokens,
            use_dp_padding=use_dp_padding,
            input_ids=kwargs.get("input_ids"),
            lora_params=lora_params,
        )
        self.repeat_idx = (self.repeat_idx + 1) % self.repeat_count
        return outputs
