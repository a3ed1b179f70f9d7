# SPDX-License-Identifier: Apache-2.0
"""``CutlassFusedMoE`` of generation A, which can also forward by itself (``ENABLE_CONFIGURABLE_MOE=0``)."""

from tensorrt_llm._ops import quantized_input, run_operator
from tensorrt_llm._scheduling import KeywordScheduler
from tensorrt_llm.models.modeling_utils import QuantAlgo

from ...model_config import ModelConfig
from .communication import CommunicationFactory
from .interface import MoE
from .quantization import NVFP4CutlassFusedMoEMethod, UnquantizedFusedMoEMethod, W4A8MXFP4MXFP8CutlassFusedMoEMethod

_METHODS = {
    None: UnquantizedFusedMoEMethod,
    QuantAlgo.NVFP4: NVFP4CutlassFusedMoEMethod,
    QuantAlgo.W4A8_MXFP4_MXFP8: W4A8MXFP4MXFP8CutlassFusedMoEMethod,
}


class CutlassFusedMoE(MoE):
    enable_alltoall = False

    def __init__(
        self,
        *,
        model_config=ModelConfig(),  # noqa: B008 - as the host's
        apply_router_weight_on_input=False,
        without_comm=False,
        **arguments,
    ):
        super().__init__(model_config=model_config, **arguments)
        self.moe_max_num_tokens = model_config.moe_max_num_tokens
        self.comm = None if without_comm else CommunicationFactory.create_strategy(model_config)
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self._weights_created = False
        if not model_config.skip_create_weights_in_init:
            self.create_weights()

    def _supports_load_balancer(self):
        return True

    def _get_quant_method(self):
        algo = None if self.quant_config is None else self.quant_config.quant_algo
        if algo not in _METHODS:
            raise ValueError(f"Unsupported quantization mode: {algo}")
        return _METHODS[algo]()

    def create_weights(self):
        if self._weights_created:
            return
        self.quant_method = self._get_quant_method()
        self.quant_method.create_weights(self)
        self._weights_created = True

    def load_weights(self, weights, allow_partial_loading=False):
        assert self._weights_created
        assert len(weights) == 1
        if not isinstance(self.quant_method, UnquantizedFusedMoEMethod):
            assert not allow_partial_loading, "Partial loading is not supported for quantized MoE now"
        self.quant_method.load_weights(self, weights[0], self.weight_loading_mode)

    def post_load_weights(self):
        self.quant_method.post_load_weights(self)

    def quantize_input(self, x, post_quant_comm=True, **kwargs):
        return (x, None) if self.quant_algo is None else quantized_input(self, x, post_quant_comm)

    def run_moe(
        self,
        x,
        token_selected_experts,
        token_final_scales,
        x_sf=None,
        is_sf_swizzled=True,
        output_dtype=None,
        tuner_num_tokens=None,
        tuner_top_k=None,
        moe_output=None,
        enable_alltoall=None,
    ):
        return run_operator(
            self,
            x,
            token_selected_experts,
            token_final_scales,
            x_sf,
            moe_output,
            swizzled_input_sf=is_sf_swizzled,
            output_dtype=output_dtype or x.dtype,
            enable_alltoall=bool(enable_alltoall),
            tuner_num_tokens=tuner_num_tokens,
            tuner_top_k=tuner_top_k,
            swiglu_alpha=self.swiglu_alpha,
            swiglu_beta=self.swiglu_beta,
            swiglu_limit=self.swiglu_limit,
        )

    def forward_impl(self, x, router_logits, **kwargs):
        return _Alone(self, self).forward(x, router_logits, **kwargs)


class _Alone(KeywordScheduler):
    """It says nothing of an all-to-all."""

    def backend_kwargs(self, counts, **call):
        kwargs = super().backend_kwargs(counts, **call)
        del kwargs["enable_alltoall"]
        return kwargs
