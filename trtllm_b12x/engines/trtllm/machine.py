# SPDX-License-Identifier: Apache-2.0
"""Select the kernel classes that this process may use, and decide which of them serve a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from trtllm_b12x import decision, environment, formats
from trtllm_b12x.core import settings
from trtllm_b12x.decision import Environment, KernelFeatures, RejectReason, Resolution, families
from trtllm_b12x.kernels import Kernel

from .. import serving
from . import host
from .describe import LayerQuery


def candidate_kernels(device: str | None = None, quant_algo: str | None = None) -> dict[str, type[Kernel]]:
    """Map each family to its kernel class, in order, for layers of a format on ``device`` (default: torch's default device).

    TensorRT-LLM's layers are on the GPU. If torch sees no suitable card, the family's torch class is used instead. Kernels that
    can run on the CPU (Triton in its interpreter) need no replacement.
    """
    on_gpu = host.installed() or torch.device(device or torch.get_default_device()).type == "cuda"
    cpu = torch.device("cpu")
    rows = families.rows(settings.KERNELS(), quant_algo)
    return serving.classes(rows, lambda kernel: _card_suits(kernel.features) if on_gpu else kernel.runs_on(cpu))


def resolve(
    question: LayerQuery, kernels: Mapping[str, type[Kernel]] | None = None, plan_errors: Mapping[str, str] = MappingProxyType({})
) -> Resolution:
    """Return which families serve the layer in this process, and why the others do not.

    If the format is unknown, every format is tried. ``kernels`` is the result of ``candidate_kernels`` for the layer's format.
    """
    shape, deployment = question
    # The embedded TensorRT-LLM runs on any machine, so all facts except the switch are then unknown.
    known = environment.probe(host.state()) if host.installed() else Environment()
    facts = replace(known, enabled=settings.ENABLED())
    resolutions = []
    every_format = shape.quant_algo is None and kernels is None
    for quant_algo in [row.quant_algo for row in formats.FORMATS] if every_format else [shape.quant_algo]:
        form = formats.find(quant_algo)
        if form is not None and host.lacks(form.name):
            detail = f"this TensorRT-LLM has no {host.METHODS[form.name]}"
            resolutions.append(Resolution.left_to_the_host(RejectReason.QUANTIZATION, detail))
            continue
        candidates = candidate_kernels(quant_algo=quant_algo) if kernels is None else kernels
        features = {name: kernel.features for name, kernel in candidates.items()}
        one_format = replace(shape, quant_algo=quant_algo)
        resolutions.append(decision.resolve(one_format, deployment, facts, features, plan_errors))
    return next((resolution for resolution in resolutions if resolution.served), resolutions[0])


def _card_suits(features: KernelFeatures) -> bool:
    if not torch.cuda.is_available():
        return False
    sm = environment.probe(host.state()).sm if host.installed() else None  # torch would create a CUDA context
    if not sm:
        major, minor = torch.cuda.get_device_capability()
        sm = 10 * major + minor
    return features.oldest_sm <= sm <= features.newest_sm
