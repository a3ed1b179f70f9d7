"""Every other backend by name, those of generation B last: what is compared, and what a named backend would get."""

from __future__ import annotations

from typing import Any

from .interface import MoE


class _Other(MoE):
    def __init__(self, **arguments: Any) -> None:
        known = ("apply_router_weight_on_input", "without_comm")
        super().__init__(**{name: value for name, value in arguments.items() if name not in known})

    def create_weights(self) -> None:
        self._weights_created = True

    def load_weights(self, weights: list[Any], allow_partial_loading: bool = False) -> None:
        pass

    def quantize_input(self, x: Any, **kwargs: Any) -> tuple[Any, None]:
        return x, None

    def run_moe(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{type(self).__name__} has no kernels here")


class CuteDslFusedMoE(_Other):
    pass


class DeepGemmFusedMoE(_Other):
    pass


class TRTLLMGenFusedMoE(_Other):
    pass


class TritonFusedMoE(_Other):
    pass


class VanillaMoE(_Other):
    pass


class WideEPMoE(_Other):
    pass


class DenseGEMMFusedMoE(_Other):
    _SUPPORTED_SM_VERSIONS = (100, 103)


class MegaMoEDeepGemm(_Other):
    pass


class MegaMoECuteDsl(_Other):
    pass


class CuteDslB12xFusedMoE(CuteDslFusedMoE):
    """The host's own b12x; its kernels compile while the weights are prepared."""

    _SUPPORTED_SM_VERSIONS = (120, 121)
