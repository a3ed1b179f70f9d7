# SPDX-License-Identifier: Apache-2.0
"""Names and signatures of vLLM that the package relies on, with sources. ``check`` compares them with the installed vLLM.

All were read in the wheels of 0.26.0 to 0.33.0 and are equal there. Also used are ``VllmConfig.additional_config``
(config/vllm.py), ``_EP`` and ``_TP`` (distributed/parallel_state.py). Paths are below ``vllm/model_executor/layers``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trtllm_b12x.decision import KernelFeatures
from trtllm_b12x.environment import packages
from trtllm_b12x.formats import GATE_UP, ROWS, TILES, UP_GATE, WeightLayout

from .. import rebinding

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
FAMILIES = ("cuda", "triton", "gemm", "grouped")
"""Families whose kernels read vLLM's layouts."""


@dataclass(frozen=True)
class ReboundName:
    """Function of vLLM that is wrapped, in its module and in every module that has imported it by name."""

    module: str
    name: str
    parameters: tuple[str, ...]
    reason: str
    source: str
    keys: tuple[str, str | None] = ("", None)
    """Weight key and activation key of calls that do not pass them."""
    chooses: bool = True
    """True if the function returns (backend, experts class). Others are only observed, and later versions may add parameters."""


MXFP8_KEYS = ("kMxfp8Static", "kMxfp8Dynamic")
"""Weight key and activation key that the MXFP8 oracle passes to its classes (oracle/mxfp8.py, ``_select_kernel_cls``)."""
MXFP4_KEYS = ("kMxfp4Static", None)
"""Weight key and activation key of the MXFP4 oracle for 16-bit activations (oracle/mxfp4.py, ``_backend_activation_key``)."""
_MXFP4 = f"{FUSED_MOE}.oracle.mxfp4"
_CONVERT = "nvfp4_backend layer w13 w13_scale w13_scale_2 a13_scale w2 w2_scale w2_scale_2 a2_scale is_act_and_mul"
_BY_NAME = "fused_moe/oracle/mxfp4.py; by name in mxfp4, online/mxfp4, quark_moe, inc_mxfp4_moe"
REBOUND = (
    ReboundName(
        f"{FUSED_MOE}.oracle.mxfp8",
        "select_mxfp8_moe_backend",
        ("config",),
        "No registry of experts exists; its list of backends ends at MARLIN on family 120, whose weights are packed anew.",
        "fused_moe/oracle/mxfp8.py; by name in modelopt, compressed_tensors_moe_w8a8_mxfp8, online, quark, inc",
        MXFP8_KEYS,
    ),
    ReboundName(
        f"{FUSED_MOE}.oracle.nvfp4",
        "select_nvfp4_moe_backend",
        ("config", "weight_key", "activation_key"),
        "Its list of backends is local, so that only its answer can name the slot that leaves W4A16 weights in rows.",
        "fused_moe/oracle/nvfp4.py; by name in modelopt, compressed_tensors_moe_w4a4_nvfp4, online/nvfp4, quark_moe",
    ),
    ReboundName(_MXFP4, "select_mxfp4_moe_backend", ("config", "activation_key"), "As MXFP8's: gpt-oss.", _BY_NAME, MXFP4_KEYS),
    ReboundName(_MXFP4, "select_deepseek_v4_mxfp4_moe_backend", ("config",), "The same: others.", _BY_NAME, MXFP4_KEYS),
    ReboundName(
        f"{FUSED_MOE}.oracle.nvfp4",
        "convert_to_nvfp4_moe_kernel_format",
        tuple(_CONVERT.split()),
        "Its caller has taken gate's weight_scale_2 for both halves; while it runs the layer has both.",
        "fused_moe/oracle/nvfp4.py; by name as the choice of NVFP4",
        chooses=False,
    ),
)
"""Either all are rebound or none. The chosen backend also selects vLLM's conversion of weights."""


@dataclass(frozen=True)
class Slot:
    """Oracle backend that is returned with our experts class. The backend decides how vLLM converts the weights."""

    format: str
    keys: tuple[str, str | None]
    """Names of the weight key and the activation key in ``quant_utils``."""
    oracle: str
    enum: str
    backend: str
    layout: WeightLayout
    instead: tuple[str, ...]
    """Backends that ours replaces when vLLM chooses them."""
    multiple: int = 1
    """vLLM pads the intermediate size of a rank to a multiple of this."""
    rows: int = 1
    """vLLM's conversion of weights raises if the rows of gate and up are not a multiple of this."""
    pair: bool = False
    """True if vLLM's own experts read the same tensors and serve the calls that ours do not."""


_A4, _NVFP4 = ("kNvfp4Static", "kNvfp4Dynamic"), ("nvfp4", "NvFp4MoeBackend")
_ROWS = WeightLayout(ROWS, GATE_UP)
_PACKED = "MARLIN", "HUMMING", "EMULATION"
"""Backends without SM12x instructions. vLLM prefers HUMMING to MARLIN on SM90 (quantization/utils/humming/priority.py)."""
_CUTLASS = "FLASHINFER_CUTLASS", "VLLM_CUTLASS"
_OPENAIS = "TRITON", "TRITON_UNFUSED"
"""OpenAI's triton_kernels. vLLM prefers them to MARLIN on SM90, and MARLIN to them on SM12x."""
SLOTS = (
    # fp8.convert_to_fp8_moe_kernel_format returns the tensors of TRITON_MXFP8 unchanged.
    Slot("MXFP8", MXFP8_KEYS, "fp8", "Fp8MoeBackend", "TRITON_MXFP8", _ROWS, _PACKED),
    # prepare_nvfp4_moe_layer_for_fi_or_cutlass tiles block scales 128x4 and, for FlashInfer, turns [w1; w3] into [w3; w1].
    Slot("NVFP4", _A4, *_NVFP4, _CUTLASS[0], WeightLayout(TILES, UP_GATE), _CUTLASS[:1], rows=128, pair=True),
    Slot("NVFP4", _A4, *_NVFP4, _CUTLASS[1], WeightLayout(TILES, GATE_UP), _CUTLASS[1:], rows=128, pair=True),
    # In 0.28 and 0.33 nvfp4.convert_to_nvfp4_moe_kernel_format changes only EMULATION's input scales, which these kernels do not
    # read. Alphas are ``weight_scale_2``. NVFP4 uses this slot if vLLM chooses Marlin or raises for the sizes of a pair.
    Slot("W4A16_NVFP4", ("kNvfp4Static", None), *_NVFP4, "EMULATION", _ROWS, _PACKED),
    Slot("W4A16_NVFP4", _A4, *_NVFP4, "EMULATION", _ROWS, (*_PACKED, *_CUTLASS)),
    # Both mxfp4.convert_*_to_mxfp4_moe_kernel_format return EMULATION's tensors unchanged; sizes are padded to 32
    # (mxfp4_round_up_hidden_size_and_intermediate_size). The methods of compressed-tensors and INC do not call an oracle.
    Slot("MXFP4", MXFP4_KEYS, "mxfp4", "Mxfp4MoeBackend", "EMULATION", _ROWS, (*_PACKED, *_OPENAIS), multiple=32),
)
"""Slots in order of preference. A slot fits if its keys match and ``instead`` has vLLM's choice."""

ABSTRACT, APPLY, IS_SUPPORTED, CONFIG = (
    tuple(names.split())
    for names in (
        "_supports_activation _supports_current_device _supports_no_act_and_mul _supports_parallel_config _supports_quant_scheme "
        "activation_format apply finalize_weight_and_reduce_impl workspace_shapes",
        "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map a1q_scale a2_scale "
        "workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input",
        "cls moe_config weight_key activation_key activation_format",
        "activation device experts_per_token has_bias hidden_dim in_dtype intermediate_size intermediate_size_per_partition "
        "is_lora_enabled moe_backend moe_parallel_config num_experts num_local_experts swiglu_alpha swiglu_beta swiglu_limit",
    )
)
"""Abstract methods of ``FusedMoEExpertsModular`` (fused_moe/modular_kernel.py; vLLM 0.22 has one more), parameters of ``apply``
and ``is_supported_config``, and the fields of ``FusedMoEConfig`` (fused_moe/config.py) that are read."""


_OF_LOGITS, _ROUTER = (
    names.split()
    for names in (
        "self hidden_states w1 w2 router_logits activation global_num_experts expert_map a1q_scale apply_router_weight_on_input "
        "num_expert_group e_score_correction_bias routed_scaling_factor topk_group",
        "top_k global_num_experts renormalize use_grouped_topk num_expert_group topk_group scoring_func routed_scaling_factor "
        "e_score_correction_bias",
    )
)
"""Parameters of ``FusedMoEExpertsMonolithic.apply``, and those of ``create_fused_moe_router`` that are passed by name."""


def for_every_call(features: KernelFeatures) -> KernelFeatures:
    """Return the capabilities in a slot that is not a pair, where families for many tokens serve every count."""
    return replace(features, every_count=True, measured_from=0) if features.measured_from else features


def version() -> str:
    """Return the version of the installed vLLM; empty without one. Import nothing."""
    return packages.versions(["vllm"]).get("vllm", "")


def check() -> None:
    """Compare the installed vLLM with the facts above. Raise UnknownEngineError if it differs."""
    rebinding.check("vLLM", version(), _differences())


def _differences() -> Iterator[str]:
    modular = importlib.import_module(f"{FUSED_MOE}.modular_kernel")
    experts = modular.FusedMoEExpertsModular
    if changed := experts.__abstractmethods__ ^ set(ABSTRACT):
        yield f"FusedMoEExpertsModular is abstract in other methods: {', '.join(sorted(changed))}"
    for function, expected in ((experts.apply, APPLY), (modular.FusedMoEExperts.is_supported_config, IS_SUPPORTED)):
        if (names := _parameters(function)) != expected:
            yield f"{function.__qualname__} takes {', '.join(names)}"
    config = importlib.import_module(f"{FUSED_MOE}.config").FusedMoEConfig
    if absent := [name for name in CONFIG if name not in config.__dataclass_fields__]:
        yield f"FusedMoEConfig has no {', '.join(absent)}"
    for rebound in REBOUND:
        function = getattr(importlib.import_module(rebound.module), rebound.name, None)
        count = None if rebound.chooses else len(rebound.parameters)
        if function is None or _parameters(function)[:count] != rebound.parameters:
            yield f"{rebound.module} has no {rebound.name}({', '.join(rebound.parameters)})"
    for slot in SLOTS:
        if not hasattr(getattr(importlib.import_module(f"{FUSED_MOE}.oracle.{slot.oracle}"), slot.enum), slot.backend):
            yield f"{slot.enum} has no {slot.backend}"


@functools.cache
def hands_over_logits() -> bool:
    """Return whether experts that take router logits have the contract of 0.28 or 0.33 in the installed vLLM."""
    monolithic = importlib.import_module(f"{FUSED_MOE}.modular_kernel").FusedMoEExpertsMonolithic
    router = importlib.import_module(f"{FUSED_MOE}.router.router_factory").create_fused_moe_router
    names = _parameters(monolithic.apply)
    known = monolithic.__abstractmethods__ <= set(ABSTRACT) and set(_ROUTER) <= set(_parameters(router))
    return known and names in (tuple(_OF_LOGITS), (*_OF_LOGITS, "routing_replay_out"))


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
