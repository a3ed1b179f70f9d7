"""``torch.ops.trtllm``: real operators, so that a compiler sees what it would see, over the embedded host's torch code."""

from __future__ import annotations

import torch

from trtllm_b12x.engines.trtllm.embedded import ops
from trtllm_b12x.engines.trtllm.embedded.config import ActivationType

_library = torch.library.Library("trtllm", "DEF")
_library.define("fp4_quantize(Tensor x, Tensor scale, int vec, bool ue8m0=False, bool swizzled=True) -> (Tensor, Tensor)")
_library.define("block_scale_interleave(Tensor scales) -> Tensor")
_library.define("block_scale_interleave_reverse(Tensor scales) -> Tensor")
_library.define(
    "fused_moe(Tensor x, Tensor experts, Tensor? scales, Tensor fc1, Tensor? fc1_bias, Tensor fc2, Tensor? fc2_bias, "
    "ScalarType output_dtype, *, Tensor[] quant_scales, Tensor? input_sf=None, bool swizzled_input_sf=True, "
    "Tensor? swiglu_alpha=None, Tensor? swiglu_beta=None, Tensor? swiglu_limit=None, int tp_size=1, int tp_rank=0, "
    "int ep_size=1, int ep_rank=0, int cluster_size=1, int cluster_rank=0, bool enable_alltoall=False, "
    "int? tuner_num_tokens=None, int? tuner_top_k=None, int activation_type=5, Tensor(a!)? out_tensor=None) -> Tensor[]"
)


@torch.library.impl(_library, "fp4_quantize", "CompositeExplicitAutograd")
def fp4_quantize(
    x: torch.Tensor, scale: torch.Tensor, vec: int, ue8m0: bool = False, swizzled: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.fp4_quantize(x, scale, vec, ue8m0, swizzled)


@torch.library.impl(_library, "block_scale_interleave", "CompositeExplicitAutograd")
def block_scale_interleave(scales: torch.Tensor) -> torch.Tensor:
    return ops.block_scale_interleave(scales)


@torch.library.impl(_library, "block_scale_interleave_reverse", "CompositeExplicitAutograd")
def block_scale_interleave_reverse(scales: torch.Tensor) -> torch.Tensor:
    return ops.block_scale_interleave_reverse(scales).clone()


@torch.library.impl(_library, "fused_moe", "CompositeExplicitAutograd")
def fused_moe(
    x: torch.Tensor,
    experts: torch.Tensor,
    scales: torch.Tensor | None,
    fc1: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2: torch.Tensor,
    fc2_bias: torch.Tensor | None,
    output_dtype: torch.dtype,
    *,
    quant_scales: list[torch.Tensor],
    input_sf: torch.Tensor | None = None,
    swizzled_input_sf: bool = True,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    enable_alltoall: bool = False,
    tuner_num_tokens: int | None = None,
    tuner_top_k: int | None = None,
    activation_type: int = 5,
    out_tensor: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    if output_dtype is torch.uint8:
        raise RuntimeError("Invalid output type Byte")
    assert (tuner_num_tokens is not None) == (tuner_top_k is not None) == enable_alltoall
    _choose_tactics(x[:tuner_num_tokens], experts, fc1, fc2)
    result = ops.fused_moe(
        x,
        experts,
        scales,
        fc1,
        fc2,
        output_dtype,
        quant_scales=quant_scales,
        input_sf=input_sf,
        swizzled_input_sf=swizzled_input_sf,
        ep_size=ep_size,
        ep_rank=ep_rank,
        activation_type=ActivationType(activation_type),
        out_tensor=out_tensor,
        swiglu_alpha=swiglu_alpha,
        swiglu_beta=swiglu_beta,
        swiglu_limit=swiglu_limit,
    )
    return [] if out_tensor is not None else [result]


def _choose_tactics(x: torch.Tensor, experts: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor) -> None:
    """As ``custom_ops/torch_custom_ops.py`` (id 614158097): the tuner is asked for each GEMM, in buckets of powers of two."""
    from tensorrt_llm._torch.autotuner import AutoTuner, DynamicTensorSpec, TuningConfig

    config = TuningConfig((DynamicTensorSpec(0, 0, _buckets, _bucket),), tune_max_num_tokens=8192)
    for gemm_idx in (1, 2):
        name = f"trtllm::fused_moe::gemm{gemm_idx}"
        AutoTuner.get().choose_one(name, ["MoERunner"], config, [x, fc1, None, fc2, None], gemm_idx=gemm_idx)


def _bucket(tokens: int) -> int:
    return 1 << max(tokens.bit_length() - 1, 0)


def _buckets(tokens: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(_bucket(tokens).bit_length()))
