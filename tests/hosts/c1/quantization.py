# SPDX-License-Identifier: Apache-2.0
"""NVFP4 loading from C1 on, staged: w3 and w1 wait on the module, w2's scales lie row by row, until
``process_weights_after_loading`` joins, pads, interleaves and makes the alphas.

Hazards kept as they are: staged halves are views of what the loader gave; every w2 scale is interleaved by every
``process_weights_after_loading``; gate and up of different ``weight_scale_2`` both get the larger one.
"""

import inspect

import torch
from tensorrt_llm._experts import of_expert
from tensorrt_llm._torch.modules.linear import TensorParallelMode, load_weight_shard
from torch import nn

from trtllm_b12x.engines.trtllm.embedded import quantization as embedded
from trtllm_b12x.engines.trtllm.embedded.quantization import MXFP4Tensors

from .interface import MoEWeightLoadingMode

__all__ = ["MoEWeightLoadingMode", "TensorParallelMode", "load_weight_shard"]


def _shard(module, tensor, mode, destination):
    return load_weight_shard(tensor, module.tp_size, module.tp_rank, mode, device=destination.device)


def _interleave(scales):
    interleaved = torch.ops.trtllm.block_scale_interleave(scales.view(torch.uint8))
    scales.copy_(interleaved.view(scales.dtype).reshape(scales.shape))


def _named(hook, **arguments):
    """Those of the arguments that the hook names; the host looks only at ``.args``."""
    names = inspect.getfullargspec(hook).args
    return {name: value for name, value in arguments.items() if name in names}


class FusedMoEMethodBase(embedded.FusedMoEMethodBase):
    def load_weights(self, module, weights, weight_loading_mode, allow_partial_loading=False):
        for slot, expert in enumerate(module.initial_local_expert_ids):
            given = of_expert(module, weights, expert, "weight")
            hook = self.load_expert_w3_w1_weight
            more = _named(hook, allow_partial_loading=allow_partial_loading, expert_idx=slot)
            hook(module, given.get("w1"), given.get("w3"), module.w3_w1_weight.data[slot], **more)
            more = _named(self.load_expert_w2_weight, allow_partial_loading=allow_partial_loading)
            self.load_expert_w2_weight(module, given.get("w2"), module.w2_weight.data[slot], **more)
            module._add_raw_shared_weights_for_unmap(list(given.values()))
            if module.bias:
                biases = of_expert(module, weights, expert, "bias")
                self.load_expert_w3_w1_weight(module, biases["w1"], biases["w3"], module.w3_w1_bias.data[slot])
                self.load_expert_w2_weight(module, biases["w2"], module.w2_bias.data[slot])
        self.load_quant_scales(module, weights)
        if weights:
            module._weights_transformed = False
        if not allow_partial_loading:
            self.process_weights_after_loading(module)

    def transform_weights(self, module):
        pass

    def cache_derived_state(self, module):
        self.setup_quant_scales(module)

    def process_weights_after_loading(self, module):
        pass

    def pre_reload_weights(self, module):
        """Rebuilds what ``rebuild_tensor_metadata`` names, which is nothing for CUTLASS."""

    def load_expert_w3_w1_weight(self, module, w1_weight, w3_weight, dst_w3_w1_weight, allow_partial_loading=False):
        for half, destination in zip((w3_weight, w1_weight), dst_w3_w1_weight.tensor_split(2), strict=True):
            if half is not None and half.shape[0]:
                target = destination if module.is_gated_activation else dst_w3_w1_weight
                target.copy_(_shard(module, half, TensorParallelMode.COLUMN, dst_w3_w1_weight))

    def load_expert_w2_weight(self, module, w2_weight, dst_w2_weight, allow_partial_loading=False):
        if w2_weight is not None:
            dst_w2_weight.copy_(_shard(module, w2_weight, TensorParallelMode.ROW, dst_w2_weight))


class UnquantizedFusedMoEMethod(FusedMoEMethodBase, embedded.UnquantizedFusedMoEMethod):
    """Only the load is staged."""


class MXFP8CutlassFusedMoEMethod(FusedMoEMethodBase):
    """``load_quant_scales`` writes each half and interleaves an expert at once (3729c14d)."""

    BLOCK_SIZE = 32

    def create_weights(self, module):
        raise NotImplementedError("of SM100 and SM103 alone")

    def setup_quant_scales(self, module):
        module.quant_scales = module.w3_w1_weight_scale, module.w2_weight_scale


class NVFP4FusedMoEMethod(FusedMoEMethodBase):
    def load_quant_scales(self, module, weights):
        if not hasattr(module, "tmp_raw_input_scales"):
            module.tmp_raw_input_scales = {}
        for expert in range(module.num_experts):  # of all ranks
            entry = module.tmp_raw_input_scales.setdefault(expert, {})
            scales = of_expert(module, weights, expert, "input_scale")
            entry.update({half: scale[...].reshape([]) for half, scale in scales.items()})
        if not hasattr(module, "tmp_weight_scale_2"):
            module.tmp_weight_scale_2 = {}
        hook = self.load_expert_w3_w1_weight_scale_nvfp4
        for slot, expert in enumerate(module.initial_local_expert_ids):
            given = of_expert(module, weights, expert, "weight_scale")
            if "w1" in given or "w3" in given:
                more = _named(hook, expert_idx=slot)
                hook(module, given.get("w1"), given.get("w3"), module.w3_w1_weight_scale.data[slot], **more)
            if "w2" in given:
                self.load_expert_w2_weight_scale_nvfp4(module, given["w2"], module.w2_weight_scale.data[slot])
            scales = of_expert(module, weights, expert, "weight_scale_2")
            if scales:
                module.tmp_weight_scale_2.setdefault(slot, {}).update(scales)

    def _reconcile_and_compute_alphas(
        self,
        module,
        tmp_weight_scale_2,
        dst_fc31_alpha,
        dst_fc2_alpha,
        dst_fc31_weight_scale_2=None,
        dst_fc2_weight_scale_2=None,
        load_expert_ids=None,
    ):
        for slot, scales in tmp_weight_scale_2.items():
            if not {"w1", "w3", "w2"} <= scales.keys():
                continue
            w1, w3, w2 = (scales[half][...].reshape([]).float().to(dst_fc31_alpha.device) for half in ("w1", "w3", "w2"))
            if not torch.allclose(w1, w3):
                w1 = torch.maximum(w1, w3)
            dst_fc31_alpha[slot].copy_(1.0 / (module.fc31_input_scale.data * (1.0 / w1)))
            dst_fc2_alpha[slot].copy_(1.0 / (module.fc2_input_scale.data * (1.0 / w2)))

    def process_weights_after_loading(self, module):
        if not hasattr(module, "tmp_raw_input_scales"):
            return
        entries = list(module.tmp_raw_input_scales.values())
        pairs = [(entry["w1"], entry["w3"]) for entry in entries if "w1" in entry and "w3" in entry]
        assert all(torch.allclose(w1, w3) for w1, w3 in pairs), "w1_input_scale != w3_input_scale"
        fc31, fc2 = [w1 for w1, _ in pairs], [entry["w2"] for entry in entries if "w2" in entry]
        for scales, parameter in ((fc31, module.fc31_input_scale), (fc2, module.fc2_input_scale)):
            if scales:
                parameter.data.copy_(torch.stack(scales).float().max().reciprocal())
        alphas = module.fc31_alpha.data, module.fc2_alpha.data
        self._reconcile_and_compute_alphas(
            module, module.tmp_weight_scale_2, *alphas, None, None, module.initial_local_expert_ids
        )
        del module.tmp_weight_scale_2
        del module.tmp_raw_input_scales
        self.setup_quant_scales(module)


class NVFP4CutlassFusedMoEMethod(NVFP4FusedMoEMethod, embedded.NVFP4CutlassFusedMoEMethod):
    weight_dtype = torch.int64
    block_scales_dtype = torch.int32
    NVFP4_ROW_ALIGNMENT = 128
    NVFP4_COL_ALIGNMENT = 4

    def create_weights(self, module):
        super().create_weights(module)
        module.register_parameter("fc31_act_scale", None)

    def load_expert_w3_w1_weight(
        self, module, w1_weight, w3_weight, dst_w3_w1_weight, allow_partial_loading=False, expert_idx=-1
    ):
        if not allow_partial_loading:
            assert w1_weight is not None
            assert w3_weight is not None
        self._stage(module, "tmp_cutlass_w3_w1_weights", w1_weight, w3_weight, dst_w3_w1_weight, expert_idx)

    def load_expert_w3_w1_weight_scale_nvfp4(
        self, module, w1_weight_scale, w3_weight_scale, dst_w3_w1_weight_scale, expert_idx=-1
    ):
        name = "tmp_cutlass_w3_w1_weight_scales"
        self._stage(module, name, w1_weight_scale, w3_weight_scale, dst_w3_w1_weight_scale, expert_idx)

    @staticmethod
    def _stage(module, name, w1, w3, destination, expert_idx):
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

    def load_expert_w2_weight(self, module, w2_weight, dst_w2_weight, allow_partial_loading=False):
        if not allow_partial_loading:
            assert w2_weight is not None
        if w2_weight is not None:
            shard = _shard(module, w2_weight, TensorParallelMode.ROW, dst_w2_weight).contiguous().view(dst_w2_weight.dtype)
            dst_w2_weight.copy_(self._maybe_padding_shape(shard, dst_w2_weight))

    def load_expert_w2_weight_scale_nvfp4(self, module, w2_weight_scale, dst_w2_weight_scale):
        """Row by row; the interleave is left to ``process_weights_after_loading``."""
        shard = _shard(module, w2_weight_scale, TensorParallelMode.ROW, dst_w2_weight_scale).contiguous().view(torch.uint8)
        columns = dst_w2_weight_scale.shape[1] * 4
        padded = nn.functional.pad(shard, (0, columns - shard.shape[1]))
        dst_w2_weight_scale.copy_(padded.view(dst_w2_weight_scale.dtype))

    def _maybe_padding_shape(self, source_tensor, dst_tensor):
        rows, columns = (d - s for d, s in zip(dst_tensor.shape, source_tensor.shape, strict=True))
        return nn.functional.pad(source_tensor, (0, columns, 0, rows))

    def _resolve_staged(self, entry):
        """Both halves into their place; a half alone is dropped (C1)."""
        if "w1" not in entry or "w3" not in entry:
            return False
        joined = torch.cat([entry["w3"], entry["w1"]])
        entry["dst"].copy_(self._maybe_padding_shape(joined, entry["dst"]))
        return True

    def _interleave_w2_weight_scale(self, dst_w2_weight_scale):
        _interleave(dst_w2_weight_scale)

    def process_weights_after_loading(self, module):
        if hasattr(module, "tmp_cutlass_w3_w1_weights"):
            for entry in module.tmp_cutlass_w3_w1_weights.values():
                self._resolve_staged(entry)
            del module.tmp_cutlass_w3_w1_weights
        if hasattr(module, "tmp_cutlass_w3_w1_weight_scales"):
            for entry in module.tmp_cutlass_w3_w1_weight_scales.values():
                if self._resolve_staged(entry):
                    _interleave(entry["dst"])
            del module.tmp_cutlass_w3_w1_weight_scales
        for scale in module.w2_weight_scale.data:
            self._interleave_w2_weight_scale(scale)
        super().process_weights_after_loading(module)


class W4A16NVFP4CutlassFusedMoEMethod(NVFP4CutlassFusedMoEMethod):
    """Interleaves as its parent does, then reverses both whole parameters, loaded or not (commit 02320c35)."""

    def process_weights_after_loading(self, module):
        super().process_weights_after_loading(module)
        for parameter in (module.w3_w1_weight_scale, module.w2_weight_scale):
            scales = parameter.data.view(torch.uint8)
            scales.copy_(torch.ops.trtllm.block_scale_interleave_reverse(scales))

    dequant_active_experts_to_hp = embedded.W4A16NVFP4CutlassFusedMoEMethod.dequant_active_experts_to_hp


class W4A8MXFP4MXFP8CutlassFusedMoEMethod(MXFP4Tensors, FusedMoEMethodBase):
    """Eager; refuses parts."""

    def load_weights(self, module, weights, weight_loading_mode, allow_partial_loading=False):
        if allow_partial_loading:
            raise NotImplementedError("partial loading of MXFP4")
        super().load_weights(module, weights, weight_loading_mode)
