"""ModelOpt checkpoints: which MoE layers they hold, and their tensors one at a time.

A checkpoint is a directory as ``modelopt.torch.export.export_hf_checkpoint`` writes it: ``config.json``, ``hf_quant_config.json``
(or ``quantization_config`` inside ``config.json``) and safetensors, in one file or in shards with an index.  Only headers
are read until a tensor is asked for; tensors are memory-mapped.
"""

from .files import CheckpointError
from .layers import Checkpoint, LayerWeights, MoELayer

__all__ = ["Checkpoint", "CheckpointError", "LayerWeights", "MoELayer"]
