from dataclasses import dataclass

from trtllm_b12x.engines.trtllm.embedded import config


@dataclass(frozen=True)
class Mapping(config.Mapping):
    moe_cluster_rank: int = 0
    moe_cluster_size: int = 1
