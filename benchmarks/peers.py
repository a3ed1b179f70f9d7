"""Peers of :mod:`benchmarks.moe_decode`: other kernels for the same experts, where they can be imported.

``triton_kernels`` is OpenAI's, part of Triton's repository (``python/triton_kernels``), with MXFP4 weights: pure Python, on
PYTHONPATH; triton-lang/triton 6cc450502 (16 December 2025) goes with Triton 3.6.  Its weights are random codes; a call is its own
routing from logits, both products, SwiGLU (with its ``+ 1``; none where the layer has another activation) and the sum over routes
without their weights.

FlashInfer's is its ``B12xMoEWrapper``, one for each layer as its users have it, on the package's NVFP4 weights unfolded, with
workspaces of its own for captured graphs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from trtllm_b12x.kernels import Geometry


def lacking() -> str:
    """Why triton_kernels cannot be measured; "" where it is there, of a form that is known here."""
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


def _run(calls: list[Any], whole: bool) -> list[torch.Tensor]:
    return [layer.run(x, logits) if whole else layer.products(x, *routed) for layer, x, logits, routed, _ in calls]


def measured(
    geometry: Geometry, tokens: tuple[int, ...], layers: int, graph_seconds: Callable[[Callable[[], Any]], float], routes: Any
) -> list[dict[str, Any]]:
    """Microseconds of a layer, whole and without its routing, for each token count; random routing.

    Args:
        graph_seconds, routes: of :mod:`benchmarks.moe_decode`.
    """
    made = [TritonKernels(geometry, seed) for seed in range(layers)]
    found = []
    for count in tokens:
        calls = []
        for turn in range(2):
            for i, layer in enumerate(made):
                ids = routes(geometry, count, i * 97 + turn).cuda().long()
                logits = torch.full((count, geometry.num_experts), -30.0, device="cuda")
                logits.scatter_(1, ids, torch.rand(ids.shape, device="cuda"))
                x = torch.randn(count, geometry.hidden_size, dtype=torch.bfloat16, device="cuda")
                calls.append((layer, x, logits, layer.routes(logits), ids))
        error = float("nan")
        if count <= 8:
            layer, x, logits, _, ids = calls[0]
            expected = layer.expected(x, ids)
            error = float((layer.run(x, logits).float() - expected).norm() / expected.norm())
        whole = graph_seconds(functools.partial(_run, calls, True))
        alone = graph_seconds(functools.partial(_run, calls, False))
        line = {"tokens": count, "us": 1e6 * whole / len(calls), "products_us": 1e6 * alone / len(calls), "error": error}
        print(f"triton_kernels, {geometry}: {line}", flush=True)
        found.append(line)
    return found


# ---- FlashInfer's wrapper ------------------------------------------------------------------------------------------------


def lacking_flashinfer() -> str:
    """Why FlashInfer's wrapper cannot be measured; "" where it can."""
    major, minor = torch.cuda.get_device_capability()
    if major != 12:
        return f"its kernels are for SM12x, this is SM{major}{minor}"
    try:
        importlib.import_module("flashinfer").B12xMoEWrapper  # noqa: B018
    except (ImportError, AttributeError) as error:
        return f"it is not installed, or has no B12xMoEWrapper: {error}"
    return ""


def measured_flashinfer(
    geometry: Geometry, tokens: tuple[int, ...], layers: int, graph_seconds: Callable[[Callable[[], Any]], float], routes: Any
) -> list[dict[str, Any]]:
    """As :func:`measured`, without an error: drawn input scales are not calibrated, which its quantization of activations feels.

    Raises:
        ValueError: its kernels have no such layer.
    """
    from tests.integration.sm12x_on_hopper.problem import Shape, arguments, wrapper
    from tests.nvfp4_layer import random_call, random_layer

    if geometry.activation not in ("Swiglu", "Relu2") or geometry.bias is not None:
        raise ValueError(f"no kernel for {geometry.activation}")
    sizes = (geometry.num_experts, geometry.top_k, geometry.hidden_size, geometry.intermediate_size)
    shape = Shape("", *sizes, geometry.gated)
    padded = replace(geometry, intermediate_size=shape.padded)
    made = []
    for seed in range(layers):
        weights = random_layer(padded, "cuda", seed).kernel_weights()
        made.append((wrapper(shape, "cuda", max(tokens)), arguments(weights)))

    def call(i: int, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> torch.Tensor:
        layer, given = made[i]
        result: torch.Tensor = layer.run(x=x, token_selected_experts=ids, token_final_scales=router_weights, **given)
        return result

    found = []
    for count in tokens:
        x, _, router_weights = random_call(padded, count, device="cuda")
        calls = [(i, routes(geometry, count, i * 97 + turn).cuda()) for turn in range(2) for i in range(layers)]

        def run(calls: Any = calls, x: Any = x, router_weights: Any = router_weights) -> list[torch.Tensor]:
            return [call(i, x, ids, router_weights) for i, ids in calls]

        line = {"tokens": count, "us": 1e6 * graph_seconds(run) / len(calls)}
        print(f"flashinfer, {geometry}: {line}", flush=True)
        found.append(line)
    return found


PEERS = {"triton_kernels": (lacking, measured), "flashinfer": (lacking_flashinfer, measured_flashinfer)}
"""By the name of its lines: why it cannot be measured, and how it is."""
