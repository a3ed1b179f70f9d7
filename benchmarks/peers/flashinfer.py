"""FlashInfer's ``B12xMoEWrapper`` with FP4 activations on the package's NVFP4 weights, one wrapper for each layer.

No error is computed: the drawn input scales are not calibrated, which FP4 activations need.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.nvfp4_layer import random_layer
from trtllm_b12x.dispatch.timing import expert_bytes
from trtllm_b12x.kernels import Geometry


def lacks(geometry: Geometry, vllm: Path | None) -> str:
    """Return why the layer cannot be measured, or an empty string."""
    major, minor = torch.cuda.get_device_capability()
    if major != 12:
        return f"its kernels are for SM12x, this is SM{major}{minor}"
    if geometry.activation not in ("Swiglu", "Relu2") or geometry.bias is not None or geometry.format != "NVFP4":
        return f"it has no kernel for {geometry}"
    try:
        importlib.import_module("flashinfer").B12xMoEWrapper  # noqa: B018
    except (ImportError, AttributeError) as error:
        return f"it is not installed, or has no B12xMoEWrapper: {error}"
    return ""


class WrapperLayer:
    """One layer's wrapper and weights."""

    def __init__(self, geometry: Geometry, wrapper: Any, weights: Mapping[str, Any]) -> None:
        self.wrapper, self.weights = wrapper, weights
        self.expert_bytes = float(expert_bytes(geometry))
        self.timed: Mapping[str, Callable[..., Any]] = {"us": self.run}

    def prepare(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> tuple[Any, ...]:
        return x, ids, router_weights

    def run(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> Any:
        return self.wrapper.run(x=x, token_selected_experts=ids, token_final_scales=router_weights, **self.weights)

    def output(self, *prepared: Any) -> None:
        return None


def layers(geometry: Geometry, ours: Sequence[Any], most_tokens: int) -> list[WrapperLayer]:
    from tests.integration.sm12x_on_hopper.problem import Shape, arguments, wrapper

    sizes = (geometry.num_experts, geometry.top_k, geometry.hidden_size, geometry.intermediate_size)
    shape = Shape("", *sizes, geometry.gated)
    padded = replace(geometry, intermediate_size=shape.padded)
    return [
        WrapperLayer(padded, wrapper(shape, "cuda", most_tokens), arguments(random_layer(padded, "cuda", seed).kernel_weights()))
        for seed in range(len(ours))
    ]
