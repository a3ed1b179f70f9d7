"""Which families of kernels are considered in this process, and which of them serve a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from trtllm_b12x.core import settings

from . import decision, environment, families, formats, host
from .decision import Environment, KernelFeatures, Resolution
from .host.questions import Question
from .kernels import Kernel


def machine() -> Environment:
    """What a decision is to know of this process's machine, inside TensorRT-LLM.

    The embedded host runs on any machine, so there the machine says nothing.
    """
    return replace(
        environment.probe(host.state()) if host.installed() else Environment(),
        enabled=settings.ENABLED(),
    )


def considered(device: str | None = None, quant_algo: str | None = None) -> dict[str, type[Kernel]]:
    """Family to its kernels, in order, for layers that are made on ``device``, torch's default one if not given.

    A family that has kernels for several formats is considered with those for ``quant_algo``.

    TensorRT-LLM's layers are on its GPU.  Where torch sees no card that the family's kernels run on, what stands in for them; but
    kernels that run on the CPU (Triton's, in its interpreter) stand in for themselves.
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
    """Which families serve a layer in this process, and why not the others.

    Args:
        question: of :mod:`trtllm_b12x.host.questions`; where its format is not known yet, what serves any of ours.
        kernels: :func:`considered`, for its format.
        plan_errors: family to what planning its kernels for the layer has raised.
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
    sm = (
        environment.probe(host.state()).sm if host.installed() else None
    )  # torch's answer would create a CUDA context in whoever only asks
    if not sm:
        major, minor = torch.cuda.get_device_capability()
        sm = 10 * major + minor
    return features.oldest_sm <= sm <= features.newest_sm
