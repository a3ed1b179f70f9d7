# SPDX-License-Identifier: Apache-2.0
from trtllm_b12x.engines.trtllm.embedded.quantization import TensorParallelMode, load_weight_shard

__all__ = ["TensorParallelMode", "load_weight_shard"]
