"""Resolve layers for this machine, or for a card that is not here."""

from __future__ import annotations

import dataclasses

from trtllm_b12x.core import settings
from trtllm_b12x.decision import Deployment, Environment, Resolution, families, resolve
from trtllm_b12x.formats.geometry import LayerShape

TARGETS = {"sm_120a": 120, "sm_121a": 121}


def machine(target: str | None) -> Environment:
    """Probe this machine; replace its card by ``target``."""
    from trtllm_b12x import environment
    from trtllm_b12x.engines.trtllm import host
    from trtllm_b12x.environment import triton

    here = environment.probe(host.state(), always_look=True)
    if target is None:
        return here
    # The other machine's toolkit is unknown if this one has none.
    toolkit, sm = here.toolkit_cuda if here.toolkit_cuda != (0, 0) else None, TARGETS[target]
    return dataclasses.replace(here, sm=sm, toolkit_cuda=toolkit, triton_lacks=triton.lacking(sm), upcast=triton.upcast(sm))


def judged(shape: LayerShape, facts: Environment, deployment: Deployment | None = None) -> Resolution:
    """Return which families serve the layer."""
    rows = families.rows(settings.KERNELS.listed(), shape.quant_algo)
    return resolve(shape, deployment, facts, {row.name: row.features(facts) for row in rows})
