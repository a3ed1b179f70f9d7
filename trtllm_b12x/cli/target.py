"""A verdict for a card that need not be here."""

from __future__ import annotations

import dataclasses

from trtllm_b12x import families, formats
from trtllm_b12x.core import settings
from trtllm_b12x.decision import Deployment, Environment, Problem, Resolution, resolve

TARGETS = {"sm_120a": 120, "sm_121a": 121}


def machine(target: str | None) -> Environment:
    """This machine's facts, with the card of ``target`` for its own."""
    from trtllm_b12x import environment, host
    from trtllm_b12x.environment import triton

    here = environment.probe(host.state(), always_look=True)
    if target is None:
        return here
    # Another machine's card; its toolkit is unknown where this one has none.
    toolkit, sm = here.toolkit_cuda if here.toolkit_cuda != (0, 0) else None, TARGETS[target]
    return dataclasses.replace(here, sm=sm, toolkit_cuda=toolkit, triton_lacks=triton.lacking(sm), upcast=triton.upcast(sm))


def judged(problem: Problem, facts: Environment, deployment: Deployment | None = None) -> Resolution:
    rows = families.rows(settings.KERNELS.listed(), problem.quant_algo)
    asked = [(row.name, row.features(facts)) for row in rows]
    verdict, form = resolve(problem, deployment, facts, asked), formats.find(problem.quant_algo or "")
    return verdict if form is None or form.hosts_path else families.complete(verdict, dict(asked))
