# SPDX-License-Identifier: Apache-2.0
"""Kernel families: plan, bind and run for plain tensors. ``catalog.py`` lists the classes."""

from trtllm_b12x.formats.geometry import GATED, Geometry

from .base import Kernel, PlanError, first_line
from .call import MoECall

__all__ = ["GATED", "Geometry", "Kernel", "MoECall", "PlanError", "first_line"]
