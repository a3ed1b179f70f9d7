# SPDX-License-Identifier: Apache-2.0
"""Decide which kernel families can serve a layer. Pure functions map facts to verdicts."""

from .decide import decide, resolve
from .inputs import Deployment, Environment, Lacking, PayloadFault
from .rules import EXPERT_PARALLEL_FLASHINFER, OLDEST_FLASHINFER, refused_by_hosts, version_tuple
from .verdicts import UNKNOWN, KernelFeatures, Rejection, RejectReason, Resolution, Verdict

__all__ = [
    "EXPERT_PARALLEL_FLASHINFER",
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
