# SPDX-License-Identifier: Apache-2.0
"""``MoE``: metaclass ``type``."""

from tensorrt_llm._wrapping import CompleteLayer

from trtllm_b12x.engines.trtllm.embedded import interface
from trtllm_b12x.engines.trtllm.embedded.config import MoEWeightLoadingMode

from ...model_config import ModelConfig
from .moe_load_balancer import get_moe_load_balancer

__all__ = ["MoE", "MoEWeightLoadingMode"]


class MoE(CompleteLayer, interface.MoE):
    def __init__(
        self,
        *,
        model_config=ModelConfig(),  # noqa: B008 - as the host's
        weight_loading_mode=None,
        layer_idx=None,
        reduce_results=False,
        aux_stream_dict=None,
        init_load_balancer=True,
        **arguments,
    ):
        mode = weight_loading_mode or MoEWeightLoadingMode.VANILLA
        super().__init__(model_config=model_config, weight_loading_mode=mode, layer_idx=layer_idx, **arguments)
        self.reduce_results, self.aux_stream_dict = reduce_results, aux_stream_dict
        self.complete(layer_idx, model_config, get_moe_load_balancer() if init_load_balancer else None)

    def _add_raw_shared_weights_for_unmap(self, weights):
        pass

    def process_weights_after_loading(self):
        self.quant_method.process_weights_after_loading(self)

    def pre_reload_weights(self):
        self.quant_method.pre_reload_weights(self)
