# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.trtllm``: real operators, so that a compiler sees what it would see, over the embedded host's torch code."""

import torch

from trtllm_b12x.engines.trtllm.embedded import ops
from trtllm_b12x.engines.trtllm.embedded.config import ActivationType, Fp4QuantizedTensor, QuantAlgo

_library = torch.library.Library("trtllm", "DEF")
_library.define("fp4_quantize(Tensor x, Tensor scale, int vec, bool ue8m0=False, bool swizzled=True) -> (Tensor, Tensor)")
_library.define("mxfp8_quantize(Tensor x, bool swizzled=True, int alignment=32) -> (Tensor, Tensor)")
_library.define("block_scale_interleave(Tensor scales) -> Tensor")
_library.define("block_scale_interleave_reverse(Tensor scales) -> Tensor")
_library.define(
    "fused_moe(Tensor x, Tensor experts, Tensor? scales, Tensor fc1, Tensor fc2, ScalarType output_dtype, *, "
    "Tensor? fc1_expert_biases, Tensor? fc2_expert_biases, int tp_rank, int unpadded_hidden_size, "
    "Tensor[] quant_scales, Tensor? input_sf, bool swizzled_input_sf, Tensor? swiglu_alpha, Tensor? swiglu_beta, "
    "Tensor? swiglu_limit, int ep_size, int ep_rank, bool enable_alltoall, int? tuner_num_tokens, int? tuner_top_k, "
    "int activation_type, Tensor(a!)? out_tensor) -> Tensor[]"
)


for _name, _function in {
    "fp4_quantize": lambda x, scale, vec, ue8m0=False, swizzled=True: ops.fp4_quantize(x, scale, swizzled),
    "mxfp8_quantize": lambda x, swizzled=True, alignment=32: ops.mxfp8_quantize(x, swizzled, alignment),
    "block_scale_interleave": ops.block_scale_interleave,
    "block_scale_interleave_reverse": lambda scales: ops.block_scale_interleave_reverse(scales).clone(),
}.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.impl(_library, "fused_moe", "CompositeExplicitAutograd")
def fused_moe(
    x,
    experts,
    scales,
    fc1,
    fc2,
    output_dtype,
    *,
    enable_alltoall,
    tuner_num_tokens,
    tuner_top_k,
    activation_type,
    out_tensor,
    **named,
):
    if output_dtype is torch.uint8:
        raise RuntimeError("Invalid output type Byte")
    assert (tuner_num_tokens is not None) == (tuner_top_k is not None) == enable_alltoall
    _choose_tactics(x[:tuner_num_tokens], experts, fc1, fc2)
    named |= {"activation_type": ActivationType(activation_type), "out_tensor": out_tensor}
    result = ops.fused_moe(x, experts, scales, fc1, fc2, output_dtype, **named)
    return [] if out_tensor is not None else [result]


def quantized_input(module, x, post_quant_comm):
    """``quantize_input`` of NVFP4 and MXFP4 layers, in every generation."""
    if getattr(module, "fc31_act_scale", None) is not None:
        x = x * module.fc31_act_scale
    if isinstance(x, Fp4QuantizedTensor):
        if not post_quant_comm:
            return x, None
        assert not x.is_sf_swizzled, "Fp4QuantizedTensor should not be swizzled before communication"
        x, x_sf = x.fp4_tensor, x.scaling_factor
    elif module.quant_algo is QuantAlgo.W4A8_MXFP4_MXFP8:
        x, x_sf = torch.ops.trtllm.mxfp8_quantize(x, not post_quant_comm, alignment=module.quant_method.weight_alignment)
    else:
        given = module.fc31_input_scale, module.scaling_vector_size, False
        x, x_sf = torch.ops.trtllm.fp4_quantize(x, *given, not post_quant_comm)
    return x, x_sf.view(x.shape[0], -1) if post_quant_comm else x_sf


def run_operator(module, x, experts, scales, x_sf, moe_output, *, output_dtype, dequantized=None, **named):
    """``run_moe`` of a backend of any generation; ``dequantized``: experts in 16 bits, of the moment."""
    results = torch.ops.trtllm.fused_moe(
        x,
        experts,
        scales,
        *(dequantized or (module.w3_w1_weight, module.w2_weight)),
        output_dtype,
        fc1_expert_biases=module.w3_w1_bias,
        fc2_expert_biases=module.w2_bias,
        tp_rank=module.tp_rank,
        unpadded_hidden_size=module.hidden_size,
        quant_scales=[] if dequantized else list(module.quant_scales),
        input_sf=x_sf,
        ep_size=module.ep_size,
        ep_rank=module.ep_rank,
        activation_type=int(module.activation_type),
        out_tensor=moe_output,
        **named,
    )
    return moe_output if moe_output is not None else results[0]


def _choose_tactics(x, experts, fc1, fc2):
    """As ``custom_ops/torch_custom_ops.py`` (id 614158097): the tuner is asked for each GEMM, in buckets of powers of two."""
    from tensorrt_llm._torch.autotuner import AutoTuner, DynamicTensorSpec, TuningConfig

    config = TuningConfig((DynamicTensorSpec(0, 0, _buckets, _bucket),), tune_max_num_tokens=8192)
    for gemm_idx in (1, 2):
        name = f"trtllm::fused_moe::gemm{gemm_idx}"
        AutoTuner.get().choose_one(name, ["MoERunner"], config, [x, fc1, None, fc2, None], gemm_idx=gemm_idx)


def _bucket(tokens):
    return 1 << max(tokens.bit_length() - 1, 0)


def _buckets(tokens):
    return tuple(1 << power for power in range(_bucket(tokens).bit_length()))
