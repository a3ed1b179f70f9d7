# SPDX-License-Identifier: Apache-2.0
"""What the tests do inside a double of TensorRT-LLM, each in a process of its own; each returns what JSON can hold."""

from __future__ import annotations

import logging
from typing import Any


def model_config(backend: str = "CUTLASS", algo: str | None = "NVFP4", **arguments: Any) -> Any:
    from tensorrt_llm._torch.model_config import ModelConfig
    from tensorrt_llm.models.modeling_utils import QuantAlgo, QuantConfig

    from trtllm_b12x import formats

    group_size = formats.group_size(algo or "") or 16
    quant_config = QuantConfig(quant_algo=None if algo is None else QuantAlgo(algo), group_size=group_size)
    return ModelConfig(quant_config=quant_config, moe_backend=backend, **arguments)


def logged(least: int = logging.NOTSET) -> list[str]:
    """What the package says from now on, for as long as this process lives, at this level or above."""
    lines: list[str] = []
    handler = logging.Handler(least)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trtllm_b12x").addHandler(handler)
    return lines


def build_and_run(config: Any = None, listen: bool = True) -> dict[str, Any]:
    """A model through the file that bound ``create_moe`` early, by the host's own loader, and one decode call."""
    import torch
    from tensorrt_llm._torch.models.modeling_double import Model
    from tensorrt_llm._torch.pyexecutor import model_loader

    import trtllm_b12x
    from tests.checkpoints import random_experts

    lines = logged() if listen else []
    warnings = logged(logging.WARNING) if listen else []
    config = config or model_config(skip_create_weights_in_init=True)
    tensors = random_experts(4, 128, 192)
    model = model_loader.load(lambda: Model(config, 3, excluded=(2,)), {f"layer{i}": tensors for i in (0, 1)})
    layers = [getattr(model, f"layer{i}") for i in range(3)]
    backends = [getattr(layer, "backend", layer) for layer in layers]
    x, logits = torch.ones(3, 128, dtype=torch.bfloat16), torch.randn(3, 4)
    output = layers[0](x, logits)
    status = trtllm_b12x.status()
    return {
        "wrappers": [type(layer).__name__ for layer in layers],
        "backends": [type(backend).__name__ for backend in backends],
        "methods": [type(backend.quant_method).__name__ for backend in backends],
        "kernels": [getattr(backend, "kernel", None) is not None for backend in backends],
        "finite": bool(output.isfinite().all()),
        "built_once": model.built_once,
        "generation": status.generation,
        "promoted": status.promoted,
        "families": status.families,
        "layers": status.layers,
        "patches": list(status.patches),
        "log": lines,
        "warnings": warnings,
    }
