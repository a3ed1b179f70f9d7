"""NVFP4 loading from C1 on, staged: w3 and w1 wait on the module, w2's scales lie row by row, until
``process_weights_after_loading`` joins, pads, interleaves and makes the alphas.

Hazards kept as they are: staged halves are views of what the loader gave; every w2 scale is interleaved by every
``process_weights_after_loading``; gate and up of different ``weight_scale_2`` both get the larger one.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from tensorrt_llm._experts import of_expert
from tensorrt_llm._loading import NVFP4, Weights, create_unquantized, interleave, nvfp4_scales, nvfp4_shapes, register
from tensorrt_llm._torch.modules.linear import TensorParallelMode, load_weight_shard
from torch import nn

from trtllm_b12x.engines.trtllm.embedded.quantization import FusedMoEQuantScalesMXFP8

from .interface import MoEWeightLoadingMode

__all__ = ["MoEWeightLoadingMode", "TensorParallelMode", "load_weight_shard"]

FUSED_MOE_NVFP4_WEIGHT_DTYPE = torch.int64
FUSED_MOE_NVFP4_WEIGHT_BLOCK_SCALE_DTYPE = torch.int32


def _shard(module: Any, tensor: torch.Tensor, mode: TensorParallelMode, destination: torch.Tensor) -> torch.Tensor:
    return load_weight_shard(tensor, module.tp_size, module.tp_rank, mode, device=destination.device)


def _named(hook: Any, **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that the hook names; the host looks only at ``.args``."""
    names = inspect.getfullargspec(hook).args
    return {name: value for name, value in arguments.items() if name in names}


class FusedMoEMethodBase(Weights, ABC):
    def load_expert_weights_to_dst(
        self,
        module: Any,
        weights: Any,
        weight_loading_mode: MoEWeightLoadingMode,
        load_expert_ids: list[int],
        dst_w3_w1_weights_tensor: torch.Tensor,
        dst_w2_weights_tensor: torch.Tensor,
        dst_w3_w1_bias_tensor: torch.Tensor | None,
        dst_w2_bias_tensor: torch.Tensor | None,
        allow_partial_loading: bool = False,
    ) -> None:
        for slot, expert in enumerate(load_expert_ids):
            given = of_expert(module, weights, expert, "weight")
            hook = self.load_expert_w3_w1_weight
            more = _named(hook, allow_partial_loading=allow_partial_loading, expert_idx=slot)
            hook(module, given.get("w1"), given.get("w3"), dst_w3_w1_weights_tensor[slot], **more)
            more = _named(self.load_expert_w2_weight, allow_partial_loading=allow_partial_loading)
            self.load_expert_w2_weight(module, given.get("w2"), dst_w2_weights_tensor[slot], **more)
            module._add_raw_shared_weights_for_unmap(list(given.values()))

    def load_weights(
        self, module: Any, weights: Any, weight_loading_mode: MoEWeightLoadingMode, allow_partial_loading: bool = False
    ) -> None:
        self.load_expert_weights_to_dst(
            module,
            weights,
            weight_loading_mode,
            module.initial_local_expert_ids,
            module.w3_w1_weight.data,
            module.w2_weight.data,
            None,
            None,
            **_named(self.load_expert_weights_to_dst, allow_partial_loading=allow_partial_loading),
        )
        self.load_quant_scales(module, weights)
        if weights:
            module._weights_transformed = False
        if not allow_partial_loading:
            self.process_weights_after_loading(module)

    def transform_weights(self, module: Any) -> None:
        pass

    def cache_derived_state(self, module: Any) -> None:
        self.setup_quant_scales(module)

    def post_load_weights(self, module: Any) -> None:
        """Nobody calls it any more."""
        self.transform_weights(module)
        self.cache_derived_state(module)

    def load_quant_scales(self, module: Any, weights: Any) -> None:
        pass

    def process_weights_after_loading(self, module: Any) -> None:
        pass

    def pre_reload_weights(self, module: Any) -> None:
        """Rebuilds what ``rebuild_tensor_metadata`` names, which is nothing for CUTLASS."""

    @abstractmethod
    def setup_quant_scales(self, module: Any) -> None: ...

    def load_expert_w3_w1_weight(
        self, module: Any, w1_weight: Any, w3_weight: Any, dst_w3_w1_weight: torch.Tensor, allow_partial_loading: bool = False
    ) -> None:
        for half, destination in zip((w3_weight, w1_weight), dst_w3_w1_weight.tensor_split(2), strict=True):
            if half is not None and half.shape[0]:
                target = destination if module.is_gated_activation else dst_w3_w1_weight
                target.copy_(_shard(module, half, TensorParallelMode.COLUMN, dst_w3_w1_weight))

    def load_expert_w2_weight(
        self, module: Any, w2_weight: Any, dst_w2_weight: torch.Tensor, allow_partial_loading: bool = False
    ) -> None:
        if w2_weight is not None:
            dst_w2_weight.copy_(_shard(module, w2_weight, TensorParallelMode.ROW, dst_w2_weight))


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    def create_weights(self, module: Any) -> None:  # type: ignore[override]
        create_unquantized(self, module)

    def setup_quant_scales(self, module: Any) -> None:
        module.quant_scales = ()


class MXFP8CutlassFusedMoEMethod(FusedMoEMethodBase):
    """``load_quant_scales`` writes each half and interleaves an expert at once (3729c14d)."""

    BLOCK_SIZE = 32

    def create_weights(self, module: Any) -> None:  # type: ignore[override]
        module.scaling_vector_size = self.BLOCK_SIZE
        experts, hidden = module.expert_size_per_partition, module.hidden_size
        rows, inner = module.expand_intermediate_size_per_partition, module.intermediate_size_per_partition
        super().create_weights(module, torch.float8_e4m3fn, (experts, rows, hidden), (experts, hidden, inner))
        assert hidden % 128 == inner % 128 == 0
        shapes = {"w3_w1_weight_scale": (rows, hidden // 128), "w2_weight_scale": (hidden, inner // 128)}
        register(module, {name: torch.empty((experts, *shape), dtype=torch.int32) for name, shape in shapes.items()})
        self.setup_quant_scales(module)

    def setup_quant_scales(self, module: Any) -> None:
        module.quant_scales = FusedMoEQuantScalesMXFP8(
            fc31_weight_block_scale=module.w3_w1_weight_scale, fc2_weight_block_scale=module.w2_weight_scale
        )


class NVFP4FusedMoEMethod(FusedMoEMethodBase, NVFP4):
    @abstractmethod
    def get_weights_shapes(self, module: Any, weight_vec_size: int, block_scales_vec_size: int) -> tuple[Any, ...]: ...

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
        w3_w1, w2, _, _, w3_w1_scale, w2_scale = self.get_weights_shapes(module, weight_vec_size, block_scales_vec_size)
        self.create_scales(module, w3_w1_scale, w2_scale, block_scales_dtype)
        if getattr(module, "force_dynamic_quantization", False):
            names, experts = ("fc31_weight_scale_2", "fc2_weight_scale_2"), module.expert_size_per_partition
            register(module, {name: torch.ones(experts, dtype=torch.float32) for name in names})
        super().create_weights(module, weight_dtype, w3_w1, w2)
        self.setup_quant_scales(module)

    @abstractmethod
    def load_expert_w3_w1_weight_scale_nvfp4(
        self, module: Any, w1_weight_scale: Any, w3_weight_scale: Any, dst_w3_w1_weight_scale: torch.Tensor
    ) -> None: ...

    @abstractmethod
    def load_expert_w2_weight_scale_nvfp4(self, module: Any, w2_weight_scale: Any, dst_w2_weight_scale: torch.Tensor) -> None: ...

    def load_fp4_weight_block_scales(
        self,
        module: Any,
        weights: Any,
        load_expert_ids: list[int],
        dst_w3_w1_weight_scale: torch.Tensor,
        dst_w2_weight_scale: torch.Tensor,
        tmp_weight_scale_2: dict[int, dict[str, torch.Tensor]],
        ignore_weight_scale: bool = False,
    ) -> None:
        hook = self.load_expert_w3_w1_weight_scale_nvfp4
        for slot, expert in enumerate(load_expert_ids):
            given = {} if ignore_weight_scale else of_expert(module, weights, expert, "weight_scale")
            if "w1" in given or "w3" in given:
                more = _named(hook, expert_idx=slot)
                hook(module, given.get("w1"), given.get("w3"), dst_w3_w1_weight_scale[slot], **more)
            if "w2" in given:
                self.load_expert_w2_weight_scale_nvfp4(module, given["w2"], dst_w2_weight_scale[slot])
            module._add_raw_shared_weights_for_unmap(list(given.values()))
            scales = of_expert(module, weights, expert, "weight_scale_2")
            if scales:
                tmp_weight_scale_2.setdefault(slot, {}).update(scales)

    def load_quant_scales(self, module: Any, weights: Any) -> None:
        if not hasattr(module, "tmp_raw_input_scales"):
            module.tmp_raw_input_scales = {}
        for expert in range(module.num_experts):  # of all ranks
            entry = module.tmp_raw_input_scales.setdefault(expert, {})
            scales = of_expert(module, weights, expert, "input_scale")
            entry.update({half: scale[...].reshape([]) for half, scale in scales.items()})
        if not hasattr(module, "tmp_weight_scale_2"):
            module.tmp_weight_scale_2 = {}
        self.load_fp4_weight_block_scales(
            module,
            weights,
            module.initial_local_expert_ids,
            module.w3_w1_weight_scale.data,
            module.w2_weight_scale.data,
            module.tmp_weight_scale_2,
        )

    def _reconcile_and_compute_alphas(
        self,
        module: Any,
        tmp_weight_scale_2: dict[int, dict[str, torch.Tensor]],
        dst_fc31_alpha: torch.Tensor,
        dst_fc2_alpha: torch.Tensor,
        dst_fc31_weight_scale_2: torch.Tensor | None = None,
        dst_fc2_weight_scale_2: torch.Tensor | None = None,
        load_expert_ids: list[int] | None = None,
    ) -> None:
        for slot, scales in tmp_weight_scale_2.items():
            if not {"w1", "w3", "w2"} <= scales.keys():
                continue
            w1, w3, w2 = (scales[half][...].reshape([]).float().to(dst_fc31_alpha.device) for half in ("w1", "w3", "w2"))
            if not torch.allclose(w1, w3):
                w1 = w3 = torch.maximum(w1, w3)
            self.load_expert_fc31_alpha_nvfp4(w1, w3, module.fc31_input_scale.data, dst_fc31_alpha[slot])
            self.load_expert_fc2_alpha_nvfp4(w2, module.fc2_input_scale.data, dst_fc2_alpha[slot])
            if dst_fc31_weight_scale_2 is not None and dst_fc2_weight_scale_2 is not None:
                dst_fc31_weight_scale_2[slot].copy_(w1)
                dst_fc2_weight_scale_2[slot].copy_(w2)

    def process_weights_after_loading(self, module: Any) -> None:
        if not hasattr(module, "tmp_raw_input_scales"):
            return
        entries = list(module.tmp_raw_input_scales.values())
        pairs = [(entry["w1"], entry["w3"]) for entry in entries if "w1" in entry and "w3" in entry]
        assert all(torch.allclose(w1, w3) for w1, w3 in pairs), "w1_input_scale != w3_input_scale"
        fc31, fc2 = [w1 for w1, _ in pairs], [entry["w2"] for entry in entries if "w2" in entry]
        for scales, parameter in ((fc31, module.fc31_input_scale), (fc2, module.fc2_input_scale)):
            if scales:
                parameter.data.copy_(torch.stack(scales).float().max().reciprocal())
        dynamic = [getattr(module, name, None) for name in ("fc31_weight_scale_2", "fc2_weight_scale_2")]
        self._reconcile_and_compute_alphas(
            module,
            module.tmp_weight_scale_2,
            module.fc31_alpha.data,
            module.fc2_alpha.data,
            *(None if parameter is None else parameter.data for parameter in dynamic),
            module.initial_local_expert_ids,
        )
        del module.tmp_weight_scale_2
        del module.tmp_raw_input_scales
        self.setup_quant_scales(module)

    def setup_quant_scales(self, module: Any) -> None:
        module.quant_scales = nvfp4_scales(module)


class NVFP4CutlassFusedMoEMethod(NVFP4FusedMoEMethod):
    weight_dtype = FUSED_MOE_NVFP4_WEIGHT_DTYPE
    block_scales_dtype = FUSED_MOE_NVFP4_WEIGHT_BLOCK_SCALE_DTYPE
    NVFP4_ROW_ALIGNMENT = 128
    NVFP4_COL_ALIGNMENT = 4

    def get_weights_shapes(self, module: Any, weight_vec_size: int, block_scales_vec_size: int) -> tuple[Any, ...]:
        if module.hidden_size % self.NVFP4_COL_ALIGNMENT:
            raise ValueError(f"hidden_size {module.hidden_size} must be divisible by {self.NVFP4_COL_ALIGNMENT}")
        weights, scales = nvfp4_shapes(module, self.NVFP4_ROW_ALIGNMENT, weight_vec_size, block_scales_vec_size), (None, None)
        return (*weights[:2], *scales, *weights[2:])

    def create_weights(self, module: Any) -> None:  # type: ignore[override]
        self.block_scales_vec_size = 4
        super().create_weights(module, self.weight_dtype, 16, self.block_scales_dtype, self.block_scales_vec_size)

    def load_expert_w3_w1_weight(
        self,
        module: Any,
        w1_weight: Any,
        w3_weight: Any,
        dst_w3_w1_weight: torch.Tensor,
        allow_partial_loading: bool = False,
        expert_idx: int = -1,
    ) -> None:
        if not allow_partial_loading:
            assert w1_weight is not None
            assert w3_weight is not None
        self._stage(module, "tmp_cutlass_w3_w1_weights", w1_weight, w3_weight, dst_w3_w1_weight, expert_idx)

    def load_expert_w3_w1_weight_scale_nvfp4(
        self,
        module: Any,
        w1_weight_scale: Any,
        w3_weight_scale: Any,
        dst_w3_w1_weight_scale: torch.Tensor,
        expert_idx: int = -1,
    ) -> None:
        name = "tmp_cutlass_w3_w1_weight_scales"
        self._stage(module, name, w1_weight_scale, w3_weight_scale, dst_w3_w1_weight_scale, expert_idx)

    @staticmethod
    def _stage(module: Any, name: str, w1: Any, w3: Any, destination: torch.Tensor, expert_idx: int) -> None:
        """By storage and slot, for ``process_weights_after_loading``."""
        halves = {half: tensor for half, tensor in (("w1", w1), ("w3", w3)) if tensor is not None}
        if not halves:
            return
        assert expert_idx >= 0, "expert_idx must be provided for stable dict key"
        if not hasattr(module, name):
            setattr(module, name, {})
        entry = getattr(module, name).setdefault((destination.untyped_storage().data_ptr(), expert_idx), {})
        entry["dst"] = destination
        for half, tensor in halves.items():
            shard = _shard(module, tensor, TensorParallelMode.COLUMN, destination)
            entry[half] = shard.contiguous().view(destination.dtype)

    def load_expert_w2_weight(
        self, module: Any, w2_weight: Any, dst_w2_weight: torch.Tensor, allow_partial_loading: bool = False
    ) -> None:
        if not allow_partial_loading:
            assert w2_weight is not None
        if w2_weight is not None:
            shard = _shard(module, w2_weight, TensorParallelMode.ROW, dst_w2_weight).contiguous().view(dst_w2_weight.dtype)
            dst_w2_weight.copy_(self._maybe_padding_shape(shard, dst_w2_weight))

    def load_expert_w2_weight_scale_nvfp4(self, module: Any, w2_weight_scale: Any, dst_w2_weight_scale: torch.Tensor) -> None:
        """Row by row; the interleave is left to ``process_weights_after_loading``."""
        shard = _shard(module, w2_weight_scale, TensorParallelMode.ROW, dst_w2_weight_scale).contiguous().view(torch.uint8)
        columns = dst_w2_weight_scale.shape[1] * self.block_scales_vec_size
        padded = nn.functional.pad(shard, (0, columns - shard.shape[1]))
        dst_w2_weight_scale.copy_(padded.view(dst_w2_weight_scale.dtype))

    def _maybe_padding_shape(self, source_tensor: torch.Tensor, dst_tensor: torch.Tensor) -> torch.Tensor:
        rows, columns = (d - s for d, s in zip(dst_tensor.shape, source_tensor.shape, strict=True))
        return nn.functional.pad(source_tensor, (0, columns, 0, rows))

    def _resolve_staged(self, entry: dict[str, torch.Tensor]) -> bool:
        """Both halves into their place; a half alone is dropped (C1)."""
        if "w1" not in entry or "w3" not in entry:
            return False
        joined = torch.cat([entry["w3"], entry["w1"]])
        entry["dst"].copy_(self._maybe_padding_shape(joined, entry["dst"]))
        return True

    def _interleave_w3_w1_weight_scale(self, dst_w3_w1_weight_scale: torch.Tensor) -> None:
        interleave(dst_w3_w1_weight_scale)

    def _interleave_w2_weight_scale(self, dst_w2_weight_scale: torch.Tensor) -> None:
        interleave(dst_w2_weight_scale)

    def process_weights_after_loading(self, module: Any) -> None:
        if hasattr(module, "tmp_cutlass_w3_w1_weights"):
            for entry in module.tmp_cutlass_w3_w1_weights.values():
                self._resolve_staged(entry)
            del module.tmp_cutlass_w3_w1_weights
        if hasattr(module, "tmp_cutlass_w3_w1_weight_scales"):
            for entry in module.tmp_cutlass_w3_w1_weight_scales.values():
                if self._resolve_staged(entry):
                    self._interleave_w3_w1_weight_scale(entry["dst"])
            del module.tmp_cutlass_w3_w1_weight_scales
        for scale in module.w2_weight_scale.data:
            self._interleave_w2_weight_scale(scale)
        super().process_weights_after_loading(module)
