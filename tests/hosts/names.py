# SPDX-License-Identifier: Apache-2.0
"""What a test needs of a host beside what the package uses, from a double of TensorRT-LLM."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from trtllm_b12x.engines.trtllm import embedded
from trtllm_b12x.engines.trtllm.host import Host


def extended(host: Host) -> Any:
    """The adapter's names with the records that a test builds."""
    if host.generation == "embedded":
        return SimpleNamespace(**{**{name: getattr(embedded, name) for name in embedded.__all__}, **vars(host)})
    sources = {
        "tensorrt_llm._torch.model_config": ["ModelConfig"],
        "tensorrt_llm.mapping": ["Mapping"],
        "tensorrt_llm.models.modeling_utils": ["QuantAlgo", "QuantConfig"],
        f"{host.create_moe.__package__}.routing": ["RenormalizeMoeRoutingMethod"],
        f"{host.create_moe.__package__}.quantization": ["MoEWeightLoadingMode"],
    }
    more = {name: getattr(importlib.import_module(module), name) for module, names in sources.items() for name in names}
    return SimpleNamespace(**vars(host), **more)
