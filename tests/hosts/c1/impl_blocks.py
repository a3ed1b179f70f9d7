# SPDX-License-Identifier: Apache-2.0
"""What every backend brings: how it is called, its weights from creation to refit, its place under a load balancer."""

import inspect

from .impl_contract import MoEInputRequirement, MoEStaticCapability


class MoEExecutionContractMixin:
    capabilities = MoEStaticCapability()
    input_requirement = MoEInputRequirement()

    def validate_configurable_moe(self, moe):
        pass


class MoEWeightOwnerMixin:
    def create_weights(self):
        if self._weights_created:
            return
        self.quant_method = self._get_quant_method()
        self.quant_method.create_weights(self)
        self._weights_created = True

    def load_weights(self, weights, allow_partial_loading=False):
        assert self._weights_created
        assert len(weights) == 1
        names = inspect.getfullargspec(self.quant_method.load_weights).args
        kwargs = {"allow_partial_loading": allow_partial_loading} if "allow_partial_loading" in names else {}
        self.quant_method.load_weights(self, weights[0], self.weight_loading_mode, **kwargs)

    def transform_weights(self):
        if getattr(self, "_weights_transformed", False):
            return
        self.quant_method.transform_weights(self)
        self._weights_transformed = True

    def cache_derived_state(self):
        self.quant_method.cache_derived_state(self)

    def post_load_weights(self):
        self.transform_weights()
        self.cache_derived_state()

    def process_weights_after_loading(self):
        self.quant_method.process_weights_after_loading(self)

    def pre_reload_weights(self):
        self.quant_method.pre_reload_weights(self)

    @property
    def quant_algo(self):
        assert self._weights_created
        return None if self.quant_config is None else self.quant_config.quant_algo


class MoEEplbWeightLayoutMixin:
    def _add_raw_shared_weights_for_unmap(self, weight_tensors):
        pass

    def _supports_load_balancer(self):
        return False

    def _using_dynamic_load_balancer(self):
        return bool(self.layer_load_balancer and self.layer_load_balancer.is_dynamic_routing())
