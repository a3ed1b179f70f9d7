# SPDX-License-Identifier: Apache-2.0
"""Names and signatures of SGLang that the package relies on, with sources. ``check`` compares them with the installed SGLang.

All were read in the wheels of 0.5.20 and 0.5.23. Paths are below ``sglang/srt``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from trtllm_b12x.environment import packages

from .. import rebinding

MOE = "sglang.srt.layers.moe"
CUTLASS = f"{MOE}.moe_runner.flashinfer_cutlass"
"""Module that registers SGLang's functions when it is imported."""
FUNCTIONS = {
    ("none", "flashinfer_cutlass"): "fused_experts_none_to_flashinfer_cutlass",
    ("none", "flashinfer_mxfp4"): "fused_experts_none_to_flashinfer_mxfp4",
}
"""Replaced functions by all-to-all backend and runner backend, the keys of ``FusedOpPool._fused_funcs``.
``MoeRunner`` reads the dict when a layer is built (layers/moe/moe_runner/runner.py); ``HookRegistry`` does not reach it."""
FORMATS = {"NVFP4": "flashinfer_cutlass", "W4A16_NVFP4": "flashinfer_cutlass", "MXFP4": "flashinfer_mxfp4"}
"""SGLang's runner backend by format. Our kernels serve these formats. SGLang runs W4A16_NVFP4 as NVFP4."""
METHODS = (
    ("sglang.srt.layers.quantization.modelopt_quant", "ModelOptNvFp4FusedMoEMethod"),
    ("sglang.srt.layers.quantization.mxfp4", "Mxfp4MoEMethod"),
)
"""Quantization methods whose layers we serve, by module and class: NVFP4 and W4A16_NVFP4, and gpt-oss's MXFP4."""
LOADED = "process_weights_after_loading"
"""Method of ``METHODS`` that ends each load and each update of weights (model_loader/loader.py, ``postprocess_weights``)."""
FAMILIES = ("cuda", "triton", "gemm", "grouped")
"""Families whose kernels read SGLang's layouts."""

_PARAMETERS = {
    **{(CUTLASS, name): "dispatch_output quant_info runner_config" for name in FUNCTIONS.values()},
    (f"{MOE}.token_dispatcher.standard", "StandardCombineInput"): "hidden_states",
    ("sglang.srt.distributed.device_communicators.pynccl_allocator", "is_symmetric_memory_enabled"): "",
    ("sglang.srt.state_capturer.routed_experts", "get_global_experts_capturer"): "",
    ("sglang.srt.runtime_context", "get_exec"): "",
}
_FIELDS = {
    (CUTLASS, "FlashInferCutlassMoeQuantInfo"): "quant_type w13_weight w2_weight quant_scales output_dtype",
    (CUTLASS, "FlashInferCutlassMxfp4MoeQuantInfo"): (
        "w13_weight w2_weight w13_weight_scale w2_weight_scale mxfp4_weight_global_scale w13_bias w2_bias "
        "swiglu_alpha swiglu_beta swiglu_limit"
    ),
    (f"{MOE}.moe_runner.base", "MoeRunnerConfig"): (
        "num_experts num_local_experts hidden_size top_k num_fused_shared_experts activation is_gated "
        "apply_router_weight_on_input no_combine gemm1_clamp_limit swiglu_limit layer params_dtype"
    ),
    (f"{MOE}.token_dispatcher.standard", "StandardDispatchOutput"): "hidden_states hidden_states_scale topk_output",
    (f"{MOE}.topk", "StandardTopKOutput"): "topk_weights topk_ids router_logits",
    (f"{MOE}.topk", "BypassedTopKOutput"): "topk_config num_token_non_padded expert_location_dispatch_info",
    (f"{MOE}.topk", "TopKConfig"): "top_k renormalize scoring_func allow_routed_experts_capture",
}


def version() -> str:
    """Return the version of the installed SGLang; empty without one. Import nothing."""
    return packages.versions(["sglang"]).get("sglang", "")


def check() -> None:
    """Compare the installed SGLang with the facts above. Raise UnknownEngineError if it differs."""
    rebinding.check("SGLang", version(), _differences())


def _differences() -> Iterator[str]:
    for (module, name), expected in _PARAMETERS.items():
        if (found := " ".join(inspect.signature(getattr(importlib.import_module(module), name)).parameters)) != expected:
            yield f"{name} takes {found}"
    for module, name in METHODS:
        method = vars(getattr(importlib.import_module(module), name)).get(LOADED)
        if method is None or list(inspect.signature(method).parameters) != ["self", "layer"]:
            yield f"{name} has no {LOADED}(self, layer)"
    for (module, name), needed in _FIELDS.items():
        kind = getattr(importlib.import_module(module), name)
        fields = getattr(kind, "__dataclass_fields__", None) or kind._fields
        if absent := [field for field in needed.split() if field not in fields]:
            yield f"{name} has no {', '.join(absent)}"
    for key, name in FUNCTIONS.items():
        if pool()._fused_funcs.get(key) is not getattr(importlib.import_module(CUTLASS), name):
            yield f"FusedOpPool has another function for {key}"


def pool() -> Any:
    """Return SGLang's ``FusedOpPool``."""
    return importlib.import_module(f"{MOE}.moe_runner.base").FusedOpPool
