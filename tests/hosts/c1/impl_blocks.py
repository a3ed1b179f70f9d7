"""What every backend brings: how it is called, its weights from creation to refit, its place under a load balancer."""

from __future__ import annotations

import inspect
from typing import Any

from .impl_contract import MoEInputRequirement, MoEStaticCapability


class MoEExecutionContractMixin:
    capabilities = MoEStaticCapability()
    input_requirement = MoEInputRequirement()
    _supports_non_divisible_ep = False

    def supports_moe_output_in_alltoall_workspace(self) -> bool:
        return False

    def validate_configurable_moe(self, moe: Any) -> None:
        pass


class MoEWeightOwnerMixin:
    quant_method: Any
    quant_config: Any
    weight_loading_mode: Any
    intermediate_size_per_partition: int
    intermediate_size_expand_ratio: int
    _weights_created: bool

    def create_weights(self) -> None:
        if self._weights_created:
            return
        self.quant_method = self._get_quant_method()
        self.quant_method.create_weights(self)
        self._weights_created = True
        self._check_configs()

    def _get_quant_method(self) -> Any:
        raise NotImplementedError

    def _check_configs(self) -> None:
        pass

    def load_weights(self, weights: list[Any], allow_partial_loading: bool = False) -> None:
        assert self._weights_created
        assert len(weights) == 1
        kwargs = {}
        if "allow_partial_loading" in inspect.getfullargspec(self.quant_method.load_weights).args:
            kwargs["allow_partial_loading"] = allow_partial_loading
        self.quant_method.load_weights(self, weights[0], self.weight_loading_mode, **kwargs)

    def transform_weights(self) -> None:
        if getattr(self, "_weights_transformed", False):
            return
        self.quant_method.transform_weights(self)
        self._weights_transformed = True

    def cache_derived_state(self) -> None:
        self.quant_method.cache_derived_state(self)

    def post_load_weights(self) -> None:
        self.transform_weights()
        self.cache_derived_state()

    def process_weights_after_loading(self) -> None:
        if hasattr(self.quant_method, "process_weights_after_loading"):
            self.quant_method.process_weights_after_loading(self)

    def pre_reload_weights(self) -> None:
        assert hasattr(self.quant_method, "pre_reload_weights")
        if self._using_load_balancer():  # type: ignore[attr-defined]
            raise NotImplementedError("Weight reloading is not compatible with Expert Parallel Load Balancer (EPLB).")
        self.quant_method.pre_reload_weights(self)

    @property
    def has_any_quant(self) -> bool:
        assert self._weights_created
        return self.quant_config is not None and self.quant_config.layer_quant_mode.has_any_quant(exclude_kv_cache=True)

    @property
    def has_nvfp4(self) -> bool:
        assert self._weights_created
        return self.quant_config is not None and self.quant_config.layer_quant_mode.has_nvfp4()

    @property
    def expand_intermediate_size_per_partition(self) -> int:
        return self.intermediate_size_per_partition * self.intermediate_size_expand_ratio


class MoEEplbWeightLayoutMixin:
    layer_load_balancer: Any

    def _add_raw_shared_weights_for_unmap(self, weight_tensors: list[Any]) -> None:
        if self._using_dynamic_load_balancer():
            self.layer_load_balancer._add_raw_host_weight_for_unmap(weight_tensors)

    def _supports_load_balancer(self) -> bool:
        return False

    def _using_load_balancer(self) -> bool:
        return self.layer_load_balancer is not None

    def _using_dynamic_load_balancer(self) -> bool:
        return bool(self.layer_load_balancer and self.layer_load_balancer.is_dynamic_routing())
