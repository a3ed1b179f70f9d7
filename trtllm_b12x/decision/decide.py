# SPDX-License-Identifier: Apache-2.0
"""Apply the rules: ``decide`` for one family, ``resolve`` for a layer.

Facts become known in steps: selection knows the quantization, construction the shapes, weight creation the final quantization
of the layer. The same functions run at each step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from trtllm_b12x import formats
from trtllm_b12x.formats.geometry import LayerShape

from .inputs import Deployment, Environment
from .remedies import FLASHINFERS, repair
from .rules import deployment_findings, layer_findings, machine_findings
from .verdicts import UNKNOWN, KernelFeatures, Rejection, RejectReason, Resolution, Verdict

NO_GPU = "make the GPU visible: docker run --gpus all, or unset CUDA_VISIBLE_DEVICES"


@functools.lru_cache(maxsize=256)
def decide(
    shape: LayerShape,
    deployment: Deployment | None = None,
    environment: Environment | None = None,
    features: KernelFeatures = UNKNOWN,
    plan_error: str | None = None,
) -> Verdict:
    """Apply every rule that binds the family. A rule with unknown facts abstains. Results are cached: most layers are equal.

    ``plan_error`` is the first line of the error that planning this family's kernels raised.
    """
    deployment, environment = deployment or Deployment(), environment or Environment()
    rules = (
        machine_findings(environment),
        layer_findings(shape, deployment, features),
        deployment_findings(deployment, features),
    )
    findings = {reason: text for rule in rules for reason, text in rule if reason in features.bound_by}
    if plan_error is not None:
        findings[RejectReason.KERNEL_PLAN_FAILED] = plan_error
    # A newer FlashInfer also supports expert parallelism.
    newer = RejectReason.EXPERT_PARALLEL in findings and environment.flashinfer is not None
    newer = newer and RejectReason.FLASHINFER_TOO_OLD in features.bound_by
    pips = FLASHINFERS | {RejectReason.EXPERT_PARALLEL} if newer else FLASHINFERS
    repairs = repair(environment, newer) if not pips.isdisjoint(findings) else ((), ())
    advice = {RejectReason.TRITON: "; ".join(item.remedy for item in environment.triton_lacks or ())}
    if "PermissionError" in environment.flashinfer_fault:
        advice[RejectReason.FLASHINFER_BROKEN] = "name a folder that can be written in FLASHINFER_WORKSPACE_BASE"
    if environment.sm == 0:
        advice[RejectReason.SM] = NO_GPU
    return Verdict(
        tuple(Rejection(r, text, *(repairs if r in pips else ((), ())), advice=advice.get(r, "")) for r, text in findings.items())
    )


def resolve(
    shape: LayerShape,
    deployment: Deployment | None,
    environment: Environment | None,
    families: Mapping[str, KernelFeatures],
    plan_errors: Mapping[str, str] = MappingProxyType({}),
    hosts_path: bool = True,
) -> Resolution:
    """Decide for each family, in order of preference.

    If TensorRT-LLM has no path for the format, or vLLM has no path for the tensors (``hosts_path`` is False), one of the
    families must serve every call. ``plan_errors`` maps a family to the ``plan_error`` of ``decide``.
    """
    facts = (shape, deployment, environment)
    verdicts = tuple((name, decide(*facts, features, plan_errors.get(name))) for name, features in families.items())
    if not verdicts:
        return Resolution.left_to_the_host(
            RejectReason.KERNELS, "no kernels of this format that are considered run on this device"
        )
    resolution, form = Resolution(verdicts), formats.find(shape.quant_algo or "")
    if form is None or (form.hosts_path and hosts_path) or any(families[name].every_count for name in resolution.families):
        return resolution
    if not resolution.served:
        return resolution
    detail = "the host has no path for prefill, and no family that has one is eligible"
    unfit = " or ".join(name for name, features in families.items() if features.every_count)
    prefill = Rejection(RejectReason.PREFILL, detail, advice=f"fix what keeps {unfit} from serving" if unfit else "")
    return Resolution(tuple((name, Verdict((*verdict.rejections, prefill))) for name, verdict in verdicts))
