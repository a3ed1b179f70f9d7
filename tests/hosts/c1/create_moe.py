"""``create_moe_backend`` and ``create_moe`` of C1, with their comparisons word by word.  There is no ``get_moe_cls``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tensorrt_llm._torch.utils import ActivationType  # noqa: F401 - in signatures

from ...model_config import ModelConfig  # noqa: F401 - in signatures
from .configurable_moe import ConfigurableMoE
from .fused_moe_cute_dsl_b12x import CuteDslB12xFusedMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .impl_base import MoEImplBase
from .interface import MoEWeightLoadingMode  # noqa: F401 - in signatures
from .moe_load_balancer import get_moe_load_balancer
from .moe_resolution import derive_shapes, infer_swiglu_gptoss_style, resolve_moe_cls, resolve_moe_impl
from .other_backends import (
    CuteDslFusedMoE,
    DeepGemmFusedMoE,
    DenseGEMMFusedMoE,
    MarlinFusedMoE,
    MegaMoECuteDsl,
    MegaMoEDeepGemm,
    TritonFusedMoE,
    TRTLLMGenFusedMoE,
    VanillaMoE,
)

__all__ = ["create_moe", "create_moe_backend", "infer_swiglu_gptoss_style", "resolve_moe_cls", "resolve_moe_impl"]
_SHARED = (
    "routing_method",
    "num_experts",
    "hidden_size",
    "intermediate_size",
    "dtype",
    "reduce_results",
    "model_config",
    "weight_loading_mode",
    "layer_idx",
    "init_load_balancer",
    "activation_type",
)
_TRTLLM_GEN = ("aux_stream_dict", "bias", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
_CUTE_DSL = ("apply_router_weight_on_input", "swiglu_limit_scalar")


def create_moe_backend(facts: SimpleNamespace) -> Any:
    derive_shapes(facts)
    moe_cls = facts.moe_cls
    if get_moe_load_balancer() is not None:
        supported_load_balancer_backends = (
            CutlassFusedMoE,
            TRTLLMGenFusedMoE,
            CuteDslFusedMoE,
            DeepGemmFusedMoE,
            DenseGEMMFusedMoE,
            MegaMoEDeepGemm,
            MegaMoECuteDsl,
        )
        assert moe_cls in supported_load_balancer_backends, "MoE Load Balance is only supported in ..."
    if facts.bias:
        assert moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE], f"bias not supported in {moe_cls.__name__}."
    if facts.swiglu_alpha is not None or facts.swiglu_beta is not None:
        assert moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE], "swiglu_alpha and swiglu_beta are not supported"
        assert facts.swiglu_alpha is not None, "Both swiglu_alpha and swiglu_beta must be provided."
        assert facts.swiglu_beta is not None, "Both swiglu_alpha and swiglu_beta must be provided."
    if facts.swiglu_limit is not None:
        supported = moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE, DeepGemmFusedMoE, MegaMoECuteDsl]
        assert supported, f"swiglu_limit is not supported in {moe_cls.__name__}."
    if facts.swiglu_limit_scalar is not None:
        supported = moe_cls in [
            CutlassFusedMoE,
            TRTLLMGenFusedMoE,
            DeepGemmFusedMoE,
            MegaMoEDeepGemm,
            CuteDslFusedMoE,
            MegaMoECuteDsl,
        ]
        assert supported, f"swiglu_limit_scalar is not supported in {moe_cls.__name__}."
    arguments = {name: getattr(facts, name) for name in _SHARED}
    if moe_cls == TRTLLMGenFusedMoE:
        return moe_cls(**{name: getattr(facts, name) for name in (*_SHARED, *_TRTLLM_GEN)})
    if (
        any(value is not None for value in (facts.activation, facts.situ_beta, facts.situ_linear_beta))
        and moe_cls is not MegaMoEDeepGemm
    ):
        raise ValueError(f"MegaMoE DeepGEMM activation options require MegaMoEDeepGemm, got {moe_cls.__name__}")
    if any(value is not None for name, value in vars(facts).items() if name.startswith("trtllm_gen_")):
        raise ValueError(f"TRTLLM-Gen activation options are only supported by TRTLLMGenFusedMoE, got {moe_cls.__name__}")
    if moe_cls in (CutlassFusedMoE, MarlinFusedMoE):
        return moe_cls(**{name: getattr(facts, name) for name in (*_SHARED, *_TRTLLM_GEN, *_CUTE_DSL)})
    if moe_cls == VanillaMoE:
        return moe_cls(**arguments)
    if moe_cls in (CuteDslFusedMoE, CuteDslB12xFusedMoE):
        return moe_cls(**{name: getattr(facts, name) for name in (*_SHARED, "aux_stream_dict", *_CUTE_DSL)})
    if moe_cls in (DeepGemmFusedMoE, TritonFusedMoE, DenseGEMMFusedMoE, MegaMoEDeepGemm, MegaMoECuteDsl):
        return moe_cls(**arguments)
    raise ValueError(f"Unsupported moe backend: {moe_cls}")


def create_moe(facts: SimpleNamespace) -> Any:
    derive_shapes(facts)
    arguments = vars(facts)
    override_quant_config, method = arguments.pop("override_quant_config"), arguments.pop("communication_method")
    names = ("dtype", "num_experts", "hidden_size", "intermediate_size", "bias", "activation_type", "layer_idx")
    gptoss = {name: arguments[name] for name in ("bias", "swiglu_alpha", "swiglu_beta", "activation_type")}
    moe_cls = resolve_moe_cls(
        facts.model_config,
        override_quant_config=override_quant_config,
        swiglu_gptoss_style=infer_swiglu_gptoss_style(**gptoss),
        routing=facts.routing_method,
        **{name: arguments[name] for name in names},
    )
    if issubclass(moe_cls, MoEImplBase):
        return ConfigurableMoE(
            moe_cls=moe_cls,
            **arguments,
            override_quant_config=override_quant_config,
            communication_method=method,
        )
    if method is not None:
        raise ValueError("communication_method requires ConfigurableMoE.")
    return create_moe_backend(moe_cls=moe_cls, **arguments)
