# SPDX-License-Identifier: Apache-2.0
"""``ModelConfig``: frozen after construction but for ``quant_config`` and ``extra_attrs``, as the host's."""

from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm.mapping import Mapping
from trtllm_b12x.engines.trtllm.embedded import config


@dataclass
class ModelConfig(config.ModelConfig):
    mapping: Any = field(default_factory=Mapping)
    extra_attrs: dict[str, Any] = field(default_factory=dict)
    force_dynamic_quantization: bool = False

    def __setattr__(self, name, value):
        if getattr(self, "_frozen", False) and name not in ("_frozen", "extra_attrs", "quant_config"):
            raise AttributeError(f"Cannot modify ModelConfig.'{name}' - instance is frozen")
        super().__setattr__(name, value)
