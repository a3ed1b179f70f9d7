# SPDX-License-Identifier: Apache-2.0
"""Find models that the package would not serve, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import models
from trtllm_b12x.core import settings
from trtllm_b12x.decision import Deployment, Environment, families, resolve
from trtllm_b12x.engines.vllm import facts
from trtllm_b12x.formats.geometry import LayerShape
from trtllm_b12x.tools.options import opened, shapes_in


def refusal(model: str, engine: str) -> str:
    """Return why a comparison would compare nothing, or an empty string. Raise UnusableError if a folder cannot be read.

    A folder is read as ``doctor --checkpoint`` reads it. Of names on the hub, only those in ``benchmarks.models`` are known, as
    TensorRT-LLM serves them. vLLM also serves checkpoints that TensorRT-LLM does not load. The step ``doctor`` reports what this
    machine lacks.
    """
    vllm = engine == "vllm"
    if not Path(model).is_dir():
        found = None if vllm else models.known(model)
        if found is None:
            return ""
        answer = models.answer(found)
        return "" if answer.startswith("yes") else f"its {found.format} experts are not served: {answer.removeprefix('no: ')}"
    checkpoint = opened(Path(model))
    shapes, remarks = shapes_in(checkpoint), checkpoint.remarks
    if remarks and not (vllm and shapes):
        return remarks[0]
    reasons = {name: _reasons(shape, facts.FAMILIES if vllm else settings.FAMILIES) for name, shape in shapes.items()}
    return "; ".join(f"{name} is not served ({why})" for name, why in reasons.items()) if all(reasons.values()) else ""


def _reasons(shape: LayerShape, names: Sequence[str]) -> str:
    """Return why no family serves a layer on any machine, or an empty string."""
    nowhere = Environment()
    kernels = {row.name: row.features(nowhere) for row in families.rows(names, shape.quant_algo)}
    resolution = resolve(shape, Deployment(tp_size=1, ep_size=1), nowhere, kernels)
    return "" if resolution.served else ", ".join(dict.fromkeys(str(rejection) for _, rejection in resolution.refused))
