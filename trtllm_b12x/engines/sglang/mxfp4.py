# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's MXFP4 experts as ``Mxfp4MoEMethod`` stores them for ``flashinfer_mxfp4`` on SM120. Calls have router logits."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from trtllm_b12x.formats import WeightLayout
from trtllm_b12x.formats.geometry import Scoring
from trtllm_b12x.formats.mxfp4 import MXFP4Weights
from trtllm_b12x.formats.weights import Epilogue
from trtllm_b12x.kernels import MoECall
from trtllm_b12x.kernels.call import of_logits

from .experts import Experts, of_sglang

_READ_ELSEWHERE = {"layer_id", "output_format", "runner_backend", "routing_method_type", "allow_routed_experts_capture"}
"""Fields of ``TopKConfig`` that do not change a token's experts."""

MOST_ROWS = 256
"""Length of ``_rows``: more tokens than ``cuda`` serves."""


class MXFP4Experts(Experts):
    format = "MXFP4"
    layout = WeightLayout(hidden_multiple=256)
    """FusedMoE rounds the hidden size up to 256 (layers/moe/fused_moe_triton/layer.py)."""
    parameters = (
        *("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_weight_bias", "w2_weight_bias"),
        *("swiglu_alpha", "swiglu_beta", "swiglu_limit"),
    )
    scoring: Scoring | None = Scoring("softmax")
    _config: Any = None
    """Last ``TopKConfig`` that routes as ``scoring`` does."""
    _rows: torch.Tensor | None = None
    """Row indices, to find rows without a token. Captured graphs read this tensor."""

    def refusal(self, layer: Any) -> str:
        if of_sglang("runtime_context").get_exec().moe.expert_distribution_recorder_mode is not None:
            self.scoring = None
        if layer._mxfp4_backend != "flashinfer_cutlass_sm120":
            return f"a layout for {layer._mxfp4_backend}"
        stored, expected = layer.w2_weight.shape[1], self.layout.stored_hidden(layer.hidden_size_unpadded)
        return "" if stored == expected else f"a hidden size of {layer.hidden_size_unpadded} that is stored as {stored}"

    def view(self, layer: Any, tensors: tuple[torch.Tensor, ...]) -> MXFP4Weights:
        w1, w2, scales_1, scales_2, *others = tensors
        if self._rows is None or self._rows.device != w1.device:
            self._rows = torch.arange(MOST_ROWS, device=w1.device)
        found: Any = MXFP4Weights.on_storage((w1, w2), (scales_1, scales_2), self.layout, epilogue=Epilogue(*others))
        return found

    def with_logits(self, x: torch.Tensor, routes: Any, out: torch.Tensor | None) -> MoECall | None:
        config = getattr(routes, "topk_config", None)
        if config is None or routes.expert_location_dispatch_info is not None:
            return None
        if config is not self._config:
            if not _plain(config):
                return None
            self._config = config
        recorded = of_sglang("state_capturer.routed_experts").get_global_experts_capturer() is not None
        if recorded and config.allow_routed_experts_capture:
            return None
        padding, count = None, x.shape[0]
        if routes.num_token_non_padded is not None:
            if self._rows is None or count > MOST_ROWS:
                return None
            padding = self._rows[:count] >= routes.num_token_non_padded
        return of_logits(x, routes.router_logits, padding=padding, out=out)


def _plain(config: Any) -> bool:
    """Return whether a router applies only the softmax over the chosen logits."""
    usual = type(config)(config.top_k)
    names = [field.name for field in fields(config) if field.init and field.name not in _READ_ELSEWHERE]
    return all(getattr(config, name) == getattr(usual, name) for name in names)
