"""Decide which kernel families can serve a layer. Pure functions from facts to verdicts.

Facts become known in steps: selection knows the quantization, construction the shapes, weight creation the final quantization
of the layer. The same function runs at each step. ``decide`` returns every reason against one family, not only the first.
``resolve`` decides for several families.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from trtllm_b12x.formats.geometry import LayerShape

from .inputs import Deployment, Environment, Lacking, PayloadFault
from .remedies import FLASHINFERS, repair
from .rules import EXPERT_PARALLEL_FLASHINFER, OLDEST_FLASHINFER, RULES, refused_by_hosts, version_tuple
from .verdicts import UNKNOWN, KernelFeatures, Rejection, RejectReason, Resolution, Verdict

__all__ = [
    "EXPERT_PARALLEL_FLASHINFER",
    "FLASHINFERS",
    "OLDEST_FLASHINFER",
    "UNKNOWN",
    "Deployment",
    "Environment",
    "KernelFeatures",
    "Lacking",
    "PayloadFault",
    "RejectReason",
    "Rejection",
    "Resolution",
    "Verdict",
    "decide",
    "refused_by_hosts",
    "resolve",
    "version_tuple",
]

NO_GPU = "make the GPU visible: docker run --gpus all, or unset CUDA_VISIBLE_DEVICES"


@functools.lru_cache(maxsize=256)
def decide(
    shape: LayerShape,
    deployment: Deployment | None = None,
    environment: Environment | None = None,
    features: KernelFeatures = UNKNOWN,
    plan_error: str | None = None,
) -> Verdict:
    """Apply every rule that binds the family. A rule abstains if its facts are unknown. Cached: most layers of a model are equal.

    Args:
        plan_error: first line of the error that planning this family's kernels raised.
    """
    environment = environment or Environment()
    facts = (shape, deployment or Deployment(), environment, features)
    findings = {
        reason: finding for reason, rule in RULES.items() if reason in features.bound_by and (finding := rule(*facts)) is not None
    }
    if plan_error is not None:
        findings[RejectReason.KERNEL_PLAN_FAILED] = plan_error
    newer = RejectReason.FLASHINFER_TOO_OLD in features.bound_by and environment.flashinfer is not None
    newer = newer and RejectReason.EXPERT_PARALLEL in findings
    mend = repair(environment, newer) if newer or not FLASHINFERS.isdisjoint(findings) else ((), ())
    mended = FLASHINFERS | {RejectReason.EXPERT_PARALLEL} if newer else FLASHINFERS
    advice = {RejectReason.TRITON: "; ".join(item.remedy for item in environment.triton_lacks or ())}
    if environment.sm == 0:
        advice[RejectReason.SM] = NO_GPU
    return Verdict(
        tuple(Rejection(r, text, *(mend if r in mended else ((), ())), advice=advice.get(r, "")) for r, text in findings.items())
    )


def resolve(
    shape: LayerShape,
    deployment: Deployment | None,
    environment: Environment | None,
    families: Iterable[tuple[str, KernelFeatures]],
    plan_errors: Mapping[str, str] = MappingProxyType({}),
) -> Resolution:
    """Call ``decide`` for each family, in order."""
    facts = (shape, deployment, environment)
    found = tuple((name, decide(*facts, features, plan_errors.get(name))) for name, features in families)
    if found:
        return Resolution(found)
    return Resolution.left_to_the_host(RejectReason.KERNELS, "no kernels that are considered run on this device")
