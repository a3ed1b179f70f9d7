"""NVFP4 loading of generation A: every hook pads, interleaves and writes; alphas are there when the scales are.

Both halves are concatenated and padded below; distinct ``weight_scale_2`` of gate and up become the larger one.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from tensorrt_llm._experts import of_expert
from tensorrt_llm._loading import NVFP4, Weights, create_unquantized, interleave, nvfp4_scales, nvfp4_shapes
from tensorrt_llm._torch.modules.linear import TensorParallelMode, load_weight_shard

from .interface import MoEWeightLoadingMode

__all__ = ["MoEWeightLoadingMode", "TensorParallelMode", "load_weight_shard"]

FUSED_MOE_NVFP4_WEIGHT_DTYPE = torch.int64
FUSED_MOE_NVFP4_WEIGHT_BLOCK_SCALE_DTYPE = torch.int32


def padded_copy(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Bytes into the upper left corner, zeros elsewhere."""
    target, data = destination.view(torch.uint8), source.contiguous().view(torch.uint8)
    target.zero_()
    target[: data.shape[0], : data.shape[1]].copy_(data)


class FusedMoEMethodBase(Weights):
    def load_weights(self, module: Any, weights: Any, weight_loading_mode: Any, allow_partial_loading: bool = False) -> None:
        if allow_partial_loading:
            raise NotImplementedError(f"Partial loading is not supported for {type(self).__name__}")
        names = inspect.getfullargspec(self.load_expert_w3_w1_weight).args
        more = {"allow_partial_loading": False} if "allow_partial_loading" in names else {}
        for slot, expert in enumerate(module.initial_local_expert_ids):
            w1, w3, w2 = self.halves(module, weights, expert, "weight")
            self.load_expert_w3_w1_weight(module, w1, w3, module.w3_w1_weight.data[slot], **more)
            self.load_expert_w2_weight(module, w2, module.w2_weight.data[slot])
            module._add_raw_shared_weights_for_unmap([w1, w2])
        self.load_quant_scales(module, weights)
        self.process_weights_after_loading(module)

    @staticmethod
    def halves(module: Any, weights: Any, expert: int, kind: str) -> tuple[Any, Any, Any]:
        """w1, w3 and w2; w3 without a gate is what the Nemotron-H mapper makes of it: no rows, or w1's scalar."""
        given = of_expert(module, weights, expert, kind)
        w1 = given["w1"]
        if not module.is_gated_activation:
            given.setdefault("w3", w1[:0] if w1.dim() == 2 else w1)
        return w1, given["w3"], given["w2"]

    def post_load_weights(self, module: Any) -> None:
        self.setup_quant_scales(module)

    def load_quant_scales(self, module: Any, weights: Any) -> None:
        pass

    def process_weights_after_loading(self, module: Any) -> None:
        pass

    def setup_quant_scales(self, module: Any) -> None:
        module.quant_scales = ()

    def load_expert_w3_w1_weight(self, module: Any, w1_weight: Any, w3_weight: Any, dst_w3_w1_weight: torch.Tensor) -> None:
        shards = [
            load_weight_shard(w, module.tp_size, module.tp_rank, TensorParallelMode.COLUMN, device=dst_w3_w1_weight.device)
            for w in (w3_weight, w1_weight)
        ]
        padded_copy(torch.cat(shards), dst_w3_w1_weight)

    def load_expert_w2_weight(self, module: Any, w2_weight: Any, dst_w2_weight: torch.Tensor) -> None:
        shard = load_weight_shard(w2_weight, module.tp_size, module.tp_rank, TensorParallelMode.ROW, device=dst_w2_weight.device)
        padded_copy(shard, dst_w2_weight)

    def pre_reload_weights(self, module: Any) -> None:
        pass


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    def create_weights(self, module: Any) -> None:  # type: ignore[override]
        create_unquantized(self, module)


class NVFP4FusedMoEMethod(FusedMoEMethodBase, NVFP4):
    def get_weights_shapes(self, module: Any, weight_vec_size: int, block_scales_vec_size: int) -> tuple[Any, ...]:
        raise NotImplementedError

    def create_weights(  # type: ignore[override]
        self,
        module: Any,
        weight_dtype: torch.dtype,
        weight_vec_size: int,
        block_scales_dtype: torch.dtype,
        block_scales_vec_size: int,
        scaling_vector_size: int = 16,
    ) -> None:
        module.scaling_vector_size = scaling_vector_size
        w3_w1, w2, w3_w1_scale, w2_scale = self.get_weights_shapes(module, weight_vec_size, block_scales_vec_size)
        self.create_scales(module, w3_w1_scale, w2_scale, block_scales_dtype)
        super().create_weights(module, weight_dtype, w3_w1, w2)
        self.setup_quant_scales(module)

    def load_expert_w3_w1_weight_scale_nvfp4(
        self, module: Any, w1_weight_scale: Any, w3_weight_scale: Any, dst_w3_w1_weight_scale: torch.Tensor
    ) -> None:
        raise NotImplementedError

    def load_expert_w2_weight_scale_nvfp4(self, module: Any, w2_weight_scale: Any, dst_w2_weight_scale: torch.Tensor) -> None:
        raise NotImplementedError

    def load_quant_scales(self, module: Any, weights: Any) -> None:
        every = [self.halves(module, weights, e, "input_scale") for e in range(module.num_experts)]
        w1, w3, w2 = (torch.stack([scale.reshape(()) for scale in scales]) for scales in zip(*every, strict=True))
        assert torch.allclose(w1, w3), "w1_input_scale != w3_input_scale"
        module.fc31_input_scale.data.copy_(w1.max().reciprocal())
        module.fc2_input_scale.data.copy_(w2.max().reciprocal())
        self.load_all_fp4_weight_scales_and_alphas(
            module,
            weights,
            module.initial_local_expert_ids,
            module.w3_w1_weight_scale.data,
            module.w2_weight_scale.data,
            module.fc31_alpha.data,
            module.fc2_alpha.data,
        )

    def load_all_fp4_weight_scales_and_alphas(
        self,
        module: Any,
        weights: Any,
        load_expert_ids: list[int],
        dst_w3_w1_weight_scale: torch.Tensor,
        dst_w2_weight_scale: torch.Tensor,
        dst_fc31_alpha: torch.Tensor,
        dst_fc2_alpha: torch.Tensor,
    ) -> None:
        for slot, e in enumerate(load_expert_ids):
            w1, w3, w2 = (scale.reshape(()).float() for scale in self.halves(module, weights, e, "weight_scale_2"))
            if not torch.allclose(w1, w3):
                w1 = w3 = torch.maximum(w1, w3)
            gate, up, down = self.halves(module, weights, e, "weight_scale")
            self.load_expert_w3_w1_weight_scale_nvfp4(module, gate, up, dst_w3_w1_weight_scale[slot])
            self.load_expert_w2_weight_scale_nvfp4(module, down, dst_w2_weight_scale[slot])
            self.load_expert_fc31_alpha_nvfp4(w1, w3, module.fc31_input_scale.data, dst_fc31_alpha[slot])
            self.load_expert_fc2_alpha_nvfp4(w2, module.fc2_input_scale.data, dst_fc2_alpha[slot])

    def setup_quant_scales(self, module: Any) -> None:
        module.quant_scales = nvfp4_scales(module)


class NVFP4CutlassFusedMoEMethod(NVFP4FusedMoEMethod):
    weight_dtype = FUSED_MOE_NVFP4_WEIGHT_DTYPE
    block_scales_dtype = FUSED_MOE_NVFP4_WEIGHT_BLOCK_SCALE_DTYPE
    NVFP4_ROW_ALIGNMENT = 128
    NVFP4_COL_ALIGNMENT = 4

    def get_weights_shapes(self, module: Any, weight_vec_size: int, block_scales_vec_size: int) -> tuple[Any, ...]:
        return nvfp4_shapes(module, self.NVFP4_ROW_ALIGNMENT, weight_vec_size, block_scales_vec_size)

    def create_weights(self, module: Any) -> None:  # type: ignore[override]
        super().create_weights(module, self.weight_dtype, 16, self.block_scales_dtype, 4)

    def load_expert_w3_w1_weight_scale_nvfp4(
        self, module: Any, w1_weight_scale: Any, w3_weight_scale: Any, dst_w3_w1_weight_scale: torch.Tensor
    ) -> None:
        self.load_expert_w3_w1_weight(module, w1_weight_scale, w3_weight_scale, dst_w3_w1_weight_scale)
        interleave(dst_w3_w1_weight_scale)

    def load_expert_w2_weight_scale_nvfp4(self, module: Any, w2_weight_scale: Any, dst_w2_weight_scale: torch.Tensor) -> None:
        self.load_expert_w2_weight(module, w2_weight_scale, dst_w2_weight_scale)
        interleave(dst_w2_weight_scale)

    def load_expert_w3_w1_weight(self, module: Any, w1_weight: Any, w3_weight: Any, dst_w3_w1_weight: torch.Tensor) -> None:
        super().load_expert_w3_w1_weight(module, w1_weight, w3_weight, dst_w3_w1_weight)

    def load_expert_w2_weight(self, module: Any, w2_weight: Any, dst_w2_weight: torch.Tensor) -> None:
        super().load_expert_w2_weight(module, w2_weight, dst_w2_weight)
