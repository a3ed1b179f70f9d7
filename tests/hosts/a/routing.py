# SPDX-License-Identifier: Apache-2.0
from trtllm_b12x.engines.trtllm.embedded.routing import RenormalizeMoeRoutingMethod

__all__ = ["RenormalizeMoeRoutingMethod"]
