"""What a test needs of a host beside what the package uses, from a double of TensorRT-LLM."""

from __future__ import annotations

import importlib
from types import SimpleNamespace


def extend(host: SimpleNamespace) -> None:
    """Give the adapter the records that the embedded host exports."""
    sources = {
        "tensorrt_llm._torch.model_config": ["ModelConfig"],
        "tensorrt_llm.mapping": ["Mapping"],
        "tensorrt_llm.models.modeling_utils": ["QuantAlgo", "QuantConfig"],
        "tensorrt_llm._torch.utils": ["AuxStreamType"],
        f"{host.create_moe.__package__}.routing": ["BaseMoeRoutingMethod", "RenormalizeMoeRoutingMethod"],
    }
    for module, names in sources.items():
        for name in names:
            setattr(host, name, getattr(importlib.import_module(module), name))
