# SPDX-License-Identifier: Apache-2.0
"""Judge the engine's own path, which serves prefill: users report SM12x cards on which its NVFP4 products are wrong.

The reference has the checkpoint's scales and the path's own arithmetic. In float32 it would differ by 0.13 and more, because
activations are quantized, which would hide half of an error.

Every process judges once per geometry, device and stage, on the weights of the first layer that calls ``judge``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.core import locks, log, process
from trtllm_b12x.kernels import Geometry, Kernel, MoECall, first_line
from trtllm_b12x.kernels.reference import CUTLASS
from trtllm_b12x.kernels.self_test import judge_host_path, load_judge

REPORTS = {
    "TensorRT-LLM": "https://github.com/NVIDIA/TensorRT-LLM/issues/14154",
    "SGLang": "https://github.com/flashinfer-ai/flashinfer/issues/2723",
    "vLLM": "https://github.com/vllm-project/vllm/issues/48898",
}
"""Reports of wrong NVFP4 products on these cards, by engine. SGLang's concerns FlashInfer's experts; others, dense layers."""


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

    run: Callable[[MoECall], torch.Tensor]
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
            load_judge(geometry, weights)


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
        results = judge_host_path(geometry, weights, first_expert, path.run)
    if results is None:
        return Verdict(False, "not judged: the weights are all zero or not finite")
    took = f"judged in {time.monotonic() - started:.2f} s"
    failed = [result for result in results if not result.passed]
    return Verdict(bool(failed), "; ".join(map(str, failed or results)) + f", {took}")
