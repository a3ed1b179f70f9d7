# SPDX-License-Identifier: Apache-2.0
from trtllm_b12x.engines.trtllm.embedded.config import Mapping

__all__ = ["Mapping"]
