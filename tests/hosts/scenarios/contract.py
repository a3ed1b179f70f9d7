# SPDX-License-Identifier: Apache-2.0
"""What the package relies on in a host: hooks and names."""

from __future__ import annotations

import importlib
from typing import Any

from tests.hosts.scenarios import model_config


def orphaned_hooks() -> dict[str, Any]:
    """Hooks of ours that this host's own method does not have, and would never call."""
    from trtllm_b12x.engines.trtllm import host as hosts

    host = hosts.load()
    ours = {name for cls in host.Weights.__mro__[:-1] for name in vars(cls) if callable(getattr(cls, name))}
    parent = host.methods["NVFP4"]
    return {"orphans": sorted(name for name in ours if not name.startswith("__") and not hasattr(parent, name))}


def left_alone() -> dict[str, Any]:
    """A host that no adapter fits: which class it names, twice, and what is left of the patches."""
    create_moe = importlib.import_module("tensorrt_llm._torch.modules.fused_moe.create_moe")
    early = create_moe.get_moe_cls
    classes = [early(model_config()).__name__ for _ in range(2)]
    import trtllm_b12x

    names, status = [create_moe.get_moe_cls, create_moe.create_moe_backend], trtllm_b12x.status()
    wrapped = [hasattr(name, "__wrapped__") for name in names]
    return {"classes": classes, "generation": status.generation, "patches": status.patches, "wrapped": wrapped}
