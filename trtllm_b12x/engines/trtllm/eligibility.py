"""Select the kernel families that this process considers, and those that can serve a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from trtllm_b12x import decision, environment, formats
from trtllm_b12x.core import settings
from trtllm_b12x.decision import Environment, KernelFeatures, Resolution, families
from trtllm_b12x.kernels import Kernel

from . import host
from .describe import Question


def machine() -> Environment:
    """Return the machine facts for a decision in this process.

    The embedded host runs on any machine, so with it all facts except the switch are unknown.
    """
    return replace(
        environment.probe(host.state()) if host.installed() else Environment(),
        enabled=settings.ENABLED(),
    )


def considered(device: str | None = None, quant_algo: str | None = None) -> dict[str, type[Kernel]]:
    """Map each family to its kernel class, in order, for layers on ``device`` (default: torch's default device).

    A family with kernels for several formats contributes those for ``quant_algo``.

    Layers of TensorRT-LLM are on the GPU. If torch sees no suitable card, the family's torch implementation stands in. Kernels
    that run on the CPU (Triton in its interpreter) are used themselves.
    """
    on_gpu = host.installed() or torch.device(device or torch.get_default_device()).type == "cuda"
    found: dict[str, type[Kernel]] = {}
    for row in families.rows(settings.KERNELS.listed(), quant_algo):
        kernel = formats.load(row.kernel)
        there = _card_is_there(kernel.features) if on_gpu else kernel.runs_on(torch.device("cpu"))
        if there and kernel.available():
            found[row.name] = kernel
        elif row.stand_in:
            found[row.name] = formats.load(row.stand_in)
    return found


def resolve(
    question: Question, kernels: Mapping[str, type[Kernel]] | None = None, plan_errors: Mapping[str, str] = MappingProxyType({})
) -> Resolution:
    """Resolve which families serve a layer in this process, and why the others do not.

    Args:
        question: from ``trtllm_b12x.engines.trtllm.describe``. If its format is unknown, every format is tried.
        kernels: result of ``considered`` for the layer's format.
        plan_errors: maps a family to the error that planning its kernels for the layer raised.
    """
    algorithm = question[0].quant_algo
    found = []
    for name in formats.names() if algorithm is None and kernels is None else (algorithm,):
        asked = considered(quant_algo=name) if kernels is None else kernels
        rows = tuple((family, kernel.features) for family, kernel in asked.items())
        resolution = decision.resolve(*question, machine(), rows, plan_errors)
        form = formats.find(name or "")
        found.append(resolution if form is None or form.hosts_path else families.complete(resolution, dict(rows)))
    return next((resolution for resolution in found if resolution.served), found[0])


def _card_is_there(features: KernelFeatures) -> bool:
    if not torch.cuda.is_available():
        return False
    sm = environment.probe(host.state()).sm if host.installed() else None  # asking torch would create a CUDA context
    if not sm:
        major, minor = torch.cuda.get_device_capability()
        sm = 10 * major + minor
    return features.oldest_sm <= sm <= features.newest_sm
