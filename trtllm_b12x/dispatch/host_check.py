# SPDX-License-Identifier: Apache-2.0
"""Judge the engine's own path, which serves prefill: users report SM12x cards on which its NVFP4 products are wrong.

The reference has the checkpoint's scales and the path's own arithmetic. In float32 it would differ by 0.13 and more, because
activations are quantized, which would hide half of an error.

Every process judges once per geometry, device and stage, on the weights of the first layer that calls ``judge``.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.core import locks, log, process
from trtllm_b12x.formats.weights import Weights
from trtllm_b12x.kernels import Geometry, Kernel, MoECall, first_line
from trtllm_b12x.kernels.reference import CUTLASS, ReferenceKernel
from trtllm_b12x.kernels.self_test import Run, SelfTestCase, SelfTestResult, activations, compared

REPORTS = {
    "TensorRT-LLM": "https://github.com/NVIDIA/TensorRT-LLM/issues/14154",
    "SGLang": "https://github.com/flashinfer-ai/flashinfer/issues/2723",
    "vLLM": "https://github.com/vllm-project/vllm/issues/48898",
}
"""Reports of wrong NVFP4 products on these cards, by engine. SGLang's concerns FlashInfer's experts; others, dense layers."""
TOKENS = (8, 64)
"""Token counts of the calls."""
BOUNDS = (0.18, 0.25)
"""Relative L2 of all calls of an engine's path, and of its worst token.

A correct engine may round to 16 bits elsewhere than the reference. This moves FC2's input across ties of its quantizer. Two
roundings of one vector differ by at most the sum of their errors. In NVFP4 an error is 0.09 of a token on average, and was at
most 0.122 in 2,400 tokens. The bounds are twice these errors, since FC2 keeps a relative error. Over 1,000 draws of weights each
with SwiGLU and ReLU2, the embedded TensorRT-LLM gave at most 0.042 and 0.102. An engine that does not round products and the
activation's result to 16 bits, or rounds elsewhere, gave 0.085 and 0.186. An expert that is 1.5 times as large gave its token at
least 0.45. A forgotten route gave at least 0.43 over all calls.
"""


@dataclass(frozen=True)
class Verdict:
    """Result of judging an engine's path."""

    wrong: bool
    """True if an error is beyond its bound."""
    text: str
    """The error and its bound, or why nothing was judged."""


@dataclass(frozen=True)
class HostPath:
    """An engine's own path through one layer, with the names for a warning."""

    run: Run
    engine: str
    """A key of ``REPORTS``."""
    version: str
    layer: str
    """For example "MoE layer 3"."""


_lock = locks.new()
_verdicts: dict[tuple[Any, ...], Verdict] = {}
process.kept(_verdicts.clear)
_prepared: set[tuple[str, str]] = set()
process.kept(_prepared.clear)


def prepare(geometry: Geometry, weights: Any, device: torch.device) -> None:
    """Load torch's kernels that ``judge`` calls, once per format and device, at weight loading, so that no request waits."""
    key = geometry.format, str(device)
    if geometry.format in CUTLASS and key not in _prepared:
        _prepared.add(key)
        with suppress(Exception), torch.inference_mode():
            _load(geometry, weights)


def judge(kernel: Kernel, first_expert: int, path: HostPath, stage: int, instead: str, one_scale: bool = False) -> Verdict:
    """Compare the engine's path with the reference, once per stage; warn if the path is wrong. An exception is not a verdict.

    Args:
        instead: the warning's words on what serves if the path is wrong.
        one_scale: gate and up have different scales, and the path applies one to both. Weight loading has logged it.
    """
    geometry, device = kernel.geometry, kernel.device
    key = geometry, str(device), stage, one_scale
    with _lock:
        if key not in _verdicts:
            _verdicts[key] = Verdict(False, "not judged")  # judged only once, even after an exception
            try:
                _verdicts[key] = verdict = _judged(geometry, kernel.weights, first_expert, path)
            except Exception as error:
                log.logger.debug("judging %s", geometry, exc_info=error)
                _verdicts[key] = verdict = Verdict(False, f"not judged: {first_line(error)}")
            if not verdict.wrong:
                log.once(f"{path.engine}'s own path for {geometry}: {verdict.text}", logging.INFO)
            elif not one_scale:
                card = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
                where = f"{path.engine} {path.version} computes {path.layer} ({geometry}) wrongly on {card}"
                log.once(f"{where}: {verdict.text}; {instead}. A similar report: {REPORTS[path.engine]}")
        return _verdicts[key]


def _judged(geometry: Geometry, weights: Any, first_expert: int, path: HostPath) -> Verdict:
    if geometry.format not in CUTLASS:
        return Verdict(False, "not judged: the engine has none for this format")
    started = time.monotonic()
    with torch.inference_mode():
        results = results_of(geometry, weights, first_expert, path.run)
    if results is None:
        return Verdict(False, "not judged: the weights are all zero or not finite")
    took = f"judged in {time.monotonic() - started:.2f} s"
    failed = [result for result in results if not result.passed]
    return Verdict(bool(failed), "; ".join(map(str, failed or results)) + f", {took}")


def results_of(geometry: Geometry, weights: Weights, first_expert: int, run: Run) -> list[SelfTestResult] | None:
    """Compare an engine's path with CUTLASS's arithmetic in torch, in calls of ``TOKENS`` that reach every local expert.

    One expert of a token has a router weight of one, the others zero. In the last call of each size all have one, so that the
    sum over routes is compared too. ``weights`` are in our kernels' layout, with the checkpoint's scales. The error of an engine
    with one ``weight_scale_2`` for gate and up is as large as their difference. Return None if the weights are all zero or not
    finite.
    """
    experts, top_k, device = geometry.num_experts, geometry.top_k, weights.device
    with torch.device("cpu"):
        order, group, routes = _routes_of_groups(experts, min(top_k, experts))
        # A rank of expert parallelism may have fewer experts than a token has routes.
        elsewhere = (first_expert + torch.arange(experts, max(experts, top_k))) % (experts * geometry.ranks)
    order, group, routes, elsewhere = (tensor.to(device) for tensor in (order, group, routes, elsewhere))
    x = activations(geometry, weights, experts)[group]
    each, results = _cutlass(geometry, weights).each_expert(x), []
    finite = each.isfinite().all(1)
    if float((finite & each.any(1)).float().mean()) <= 0.25:
        return None
    for tokens in TOKENS:
        rows = (-(-experts // tokens) + 1) * tokens
        local = routes[order[torch.arange(rows, device=device) % experts]]
        router_weights = torch.zeros(rows, top_k, device=device)
        router_weights[:, 0] = router_weights[-tokens:] = 1
        ids = torch.cat((local + first_expert, elsewhere.expand(rows, -1)), 1).int()
        parts = zip(x[local[:, 0]].split(tokens), ids.split(tokens), router_weights.split(tokens), strict=True)
        sums = torch.cat((each[local[:-tokens, 0]], each[local[-tokens:]].sum(1)))
        sums[~finite[local].all(1)] = torch.nan  # zero times NaN or infinity is NaN
        case = SelfTestCase("host", tokens, atomic=True)
        results.append(compared(case, run, [MoECall(*part) for part in parts], sums, BOUNDS))
    return results


def _load(geometry: Geometry, weights: Weights) -> None:
    """Run two experts as ``results_of`` does, so that torch loads its kernels, which takes 45 to 93 ms on an H100."""
    _cutlass(geometry, weights).each_expert(activations(geometry, weights, min(2, geometry.num_experts)))


def _cutlass(geometry: Geometry, weights: Weights) -> ReferenceKernel:
    reference = CUTLASS[geometry.format]()
    reference.plan(geometry, geometry.num_experts, weights.device)
    reference.bind(weights)
    return reference


def _routes_of_groups(experts: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the experts in random order, the group of each, and ``(experts, width)``: each expert, then others of its group.

    All tokens of a group have the same activations, so that one run of each expert gives every sum over a group.
    """
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0))
    place = torch.arange(experts)
    first = (place // width).clamp(max=experts // width - 1) * width
    size = torch.where(first + 2 * width > experts, experts - first, width)
    turns = first[:, None] + ((place - first)[:, None] + torch.arange(width)) % size[:, None]
    back = order.argsort()
    return order, first[back], order[turns[back]]
