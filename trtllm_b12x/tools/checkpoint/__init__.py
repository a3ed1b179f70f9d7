# SPDX-License-Identifier: Apache-2.0
"""Read ModelOpt checkpoints: their MoE layers, and the tensors of a layer one at a time.

A checkpoint is a directory as ``modelopt.torch.export.export_hf_checkpoint`` writes it: ``config.json``, ``hf_quant_config.json``
(or ``quantization_config`` in ``config.json``) and safetensors. Headers are read first; tensors are memory-mapped on demand.
"""

from .files import CheckpointError
from .layers import Checkpoint, LayerWeights, MoELayer

__all__ = ["Checkpoint", "CheckpointError", "LayerWeights", "MoELayer"]
