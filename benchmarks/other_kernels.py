"""Other kernels for the experts that ``benchmarks.peers`` times, where they can be imported.

``triton_kernels`` is OpenAI's, part of Triton's repository (``python/triton_kernels``), with MXFP4 weights: pure Python, on
PYTHONPATH; triton-lang/triton 6cc450502 (16 December 2025) fits Triton 3.6. Its weights are random codes. A call is its own
routing from logits, both products, SwiGLU (with its ``+ 1``; none where the layer has another activation) and the sum over routes
without their weights.

FlashInfer's is its ``B12xMoEWrapper``, one for each layer as its users have it, on the package's NVFP4 weights unfolded, with
its own workspaces for captured graphs.

torch's is ``torch._grouped_mm`` (CUTLASS) on bfloat16 experts: both products, without routing, activation and sum.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.geometries import routes
from tests.nvfp4_layer import distance
from trtllm_b12x.dispatch.timing import graph_seconds
from trtllm_b12x.kernels import Geometry


def lacks_triton_kernels() -> str:
    """Return why triton_kernels cannot be measured, or an empty string."""
    if importlib.util.find_spec("triton_kernels") is None:
        return "it is not on PYTHONPATH"
    try:
        importlib.import_module("triton_kernels.matmul")
    except ImportError as error:
        return f"it is not of this Triton: {error}"
    return ""


@dataclass
class Matrix:
    """``(E, K, N)`` in MXFP4, in the layout of this GPU."""

    weight: Any
    precision: Any
    codes: torch.Tensor
    """``(E, K / 2, N)`` uint8, columns of K contiguous."""
    scales: torch.Tensor
    """``(E, K / 32, N)`` uint8."""

    def dense(self, expert: int) -> torch.Tensor:
        """float32 ``(K, N)``."""
        mxfp = importlib.import_module("triton_kernels.numerics_details.mxfp")
        one = slice(expert, expert + 1)
        values: torch.Tensor = mxfp.upcast_from_mxfp_torch(self.codes[one], self.scales[one], torch.float32, axis=1)[0]
        return values


def matrix(experts: int, inner: int, columns: int, seed: int) -> Matrix:
    generator = torch.Generator("cuda").manual_seed(seed)
    matmul, tensor = (importlib.import_module(f"triton_kernels.{name}") for name in ("matmul", "tensor"))
    layout = importlib.import_module("triton_kernels.tensor_details.layout")

    def drawn(first: int, last: int, size: int) -> torch.Tensor:
        values = torch.randint(first, last, (experts, columns, size), dtype=torch.uint8, device="cuda", generator=generator)
        return values.transpose(1, 2)

    codes, scales = drawn(0, 256, inner // 2), drawn(116, 121, -(-inner // 32))
    value_layout, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_layout, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    weight = tensor.convert_layout(tensor.wrap_torch_tensor(codes, dtype=tensor.FP4), value_layout, **value_options)
    block_scales = tensor.convert_layout(tensor.wrap_torch_tensor(scales), scale_layout, **scale_options)
    return Matrix(weight, matmul.PrecisionConfig(b_mx_scale=block_scales), codes, scales)


class TritonKernels:
    """One layer."""

    def __init__(self, geometry: Geometry, seed: int) -> None:
        g = self.geometry = geometry
        self.first = matrix(g.num_experts, g.hidden_size, (2 if g.gated else 1) * g.intermediate_size, 2 * seed)
        self.second = matrix(g.num_experts, g.intermediate_size, g.hidden_size, 2 * seed + 1)
        matmul, swiglu = (importlib.import_module(f"triton_kernels.{name}") for name in ("matmul", "swiglu"))
        specs = matmul.FnSpecs("swiglu", swiglu.swiglu_fn, ("alpha", "limit"), reduction_n=2)
        self.activation = matmul.FusedActivation(specs, (1.0, 1e6)) if g.gated else None

    def run(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """``x (T, H)`` bfloat16 and logits ``(T, E)``, whose best ``top_k`` are the routes; ``(T, H)``."""
        return self.products(x, *self.routes(logits))

    def routes(self, logits: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
        topk, tensor = (importlib.import_module(f"triton_kernels.{name}") for name in ("topk", "tensor"))
        metadata = topk.topk(logits, self.geometry.top_k).mask_metadata
        combine = metadata.col_sorted_indx
        ragged = tensor.make_ragged_tensor_metadata(metadata.col_sum, metadata.row_sorted_indx.shape[0])
        return ragged, combine // self.geometry.top_k, combine

    def products(self, x: torch.Tensor, ragged: Any, gather: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
        matmul, reduce = (importlib.import_module(f"triton_kernels.{name}") for name in ("matmul", "reduce"))
        inner = matmul.matmul(
            x,
            self.first.weight,
            None,
            ragged,
            gather_indx=gather,
            precision_config=self.first.precision,
            fused_activation=self.activation,
        )
        shares = matmul.matmul(
            inner, self.second.weight, None, ragged, scatter_indx=scatter, precision_config=self.second.precision
        )
        result: torch.Tensor = reduce.reduce(shares.view(-1, self.geometry.top_k, shares.shape[-1]), dim=1)[0]
        return result

    def expected(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """float32, of ids ``(T, k)``."""
        result = torch.zeros(x.shape, device=x.device)
        for e in ids.unique().tolist():
            token, _ = (ids == e).nonzero(as_tuple=True)
            inner = x[token].float() @ self.first.dense(e)
            if self.activation is not None:
                gate, up = inner[:, 0::2], inner[:, 1::2]
                inner = gate * torch.sigmoid(gate) * (up + 1)
            result.index_add_(0, token, inner @ self.second.dense(e))
        return result


def triton_kernels(geometry: Geometry, tokens: Sequence[int], layers: int) -> list[dict[str, Any]]:
    """Time a layer, with its routing and without, at each token count.

    Raises:
        ValueError: the layer has another format; its weights are MXFP4, comparable with NVFP4.
    """
    if geometry.format != "NVFP4":
        raise ValueError(f"no kernel for {geometry}")
    stack = [TritonKernels(geometry, seed) for seed in range(layers)]
    lines = []
    for count in tokens:
        calls = []
        for seed, layer in _turns(stack):
            ids = routes(geometry, count, seed).cuda().long()
            logits = torch.full((count, geometry.num_experts), -30.0, device="cuda")
            logits.scatter_(1, ids, torch.rand(ids.shape, device="cuda"))
            x = torch.randn(count, geometry.hidden_size, dtype=torch.bfloat16, device="cuda")
            calls.append((layer, x, logits, layer.routes(logits), ids))
        error = math.nan
        if count <= 8:
            layer, x, logits, _, ids = calls[0]
            error = distance(layer.run(x, logits), layer.expected(x, ids))

        def whole(calls: Any = calls) -> list[torch.Tensor]:
            return [layer.run(x, logits) for layer, x, logits, _, _ in calls]

        def products(calls: Any = calls) -> list[torch.Tensor]:
            return [layer.products(x, *routed) for layer, x, _, routed, _ in calls]

        us, products_us = (1e6 * graph_seconds(run) / len(calls) for run in (whole, products))
        lines.append({"tokens": count, "us": us, "products_us": products_us, "error": error})
    return lines


def _turns(layers: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yield each layer twice, with a seed for its routes."""
    yield from ((i * 97 + turn, layer) for turn in range(2) for i, layer in enumerate(layers))


# ---- FlashInfer's wrapper ------------------------------------------------------------------------------------------------


def lacks_flashinfer() -> str:
    """Return why FlashInfer's wrapper cannot be measured, or an empty string."""
    major, minor = torch.cuda.get_device_capability()
    if major != 12:
        return f"its kernels are for SM12x, this is SM{major}{minor}"
    try:
        importlib.import_module("flashinfer").B12xMoEWrapper  # noqa: B018
    except (ImportError, AttributeError) as error:
        return f"it is not installed, or has no B12xMoEWrapper: {error}"
    return ""


def flashinfer(geometry: Geometry, tokens: Sequence[int], layers: int) -> list[dict[str, Any]]:
    """Time a layer at each token count. No error: the drawn input scales are not calibrated, which its FP4 activations need.

    Raises:
        ValueError: its kernels have no such layer.
    """
    from tests.integration.sm12x_on_hopper.problem import Shape, arguments, wrapper
    from tests.nvfp4_layer import random_call, random_layer

    if geometry.activation not in ("Swiglu", "Relu2") or geometry.bias is not None or geometry.format != "NVFP4":
        raise ValueError(f"no kernel for {geometry}")
    sizes = (geometry.num_experts, geometry.top_k, geometry.hidden_size, geometry.intermediate_size)
    shape = Shape("", *sizes, geometry.gated)
    padded = replace(geometry, intermediate_size=shape.padded)
    stack = [
        (wrapper(shape, "cuda", max(tokens)), arguments(random_layer(padded, "cuda", seed).kernel_weights()))
        for seed in range(layers)
    ]
    lines = []
    for count in tokens:
        x, _, router_weights = random_call(padded, count, device="cuda")
        calls = [(layer, routes(geometry, count, seed).cuda()) for seed, layer in _turns(stack)]

        def run(calls: Any = calls, x: Any = x, router_weights: Any = router_weights) -> list[torch.Tensor]:
            return [
                layer.run(x=x, token_selected_experts=ids, token_final_scales=router_weights, **weights)
                for (layer, weights), ids in calls
            ]

        lines.append({"tokens": count, "us": 1e6 * graph_seconds(run) / len(calls), "error": math.nan})
    return lines


# ---- torch's grouped product ---------------------------------------------------------------------------------------------


def torch_grouped(geometry: Geometry, tokens: Sequence[int], layers: int) -> list[dict[str, Any]]:
    """Time both products on bfloat16 experts at each token count, as many layers as half of the memory holds."""
    hidden, size, experts = geometry.hidden_size, geometry.intermediate_size, geometry.num_experts
    rows = (2 if geometry.gated else 1) * size
    fit = int(0.5 * torch.cuda.mem_get_info()[0]) // (2 * experts * (rows + size) * hidden)
    shapes = (experts, rows, hidden), (experts, hidden, size)
    stack = [
        [torch.randn(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for shape in shapes]
        for _ in range(max(1, min(layers, fit)))
    ]
    lines = []
    for count in tokens:
        x, h = (torch.randn(count * geometry.top_k, width, dtype=torch.bfloat16, device="cuda") for width in (hidden, size))
        calls = []
        for seed, weights in _turns(stack):
            counts = torch.bincount(routes(geometry, count, seed).cuda().flatten().long(), minlength=experts)
            calls.append((weights, counts.cumsum(0).int()))

        def run(calls: Any = calls, x: Any = x, h: Any = h) -> list[torch.Tensor]:
            return [torch._grouped_mm(a, w, offs=ends) for weights, ends in calls for a, w in zip((x, h), weights, strict=True)]

        lines.append({"tokens": count, "us": 1e6 * graph_seconds(run) / len(calls), "error": math.nan})
    return lines


PEERS: dict[str, tuple[str, Callable[[], str], Callable[[Geometry, Sequence[int], int], list[dict[str, Any]]]]] = {
    "triton_kernels": ("OpenAI's triton_kernels, MXFP4 weights, with its routing", lacks_triton_kernels, triton_kernels),
    "flashinfer": ("FlashInfer's B12xMoEWrapper, FP4 activations", lacks_flashinfer, flashinfer),
    "torch_grouped": ("torch._grouped_mm on bfloat16 experts, products alone", lambda: "", torch_grouped),
}
"""Name of a peer's lines to its title, the function that says why it cannot be measured, and the function that measures it."""
