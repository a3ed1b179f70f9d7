"""What CUTLASS does to activations before a call; the split gives it and the call files of their own."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._torch.utils import Fp4QuantizedTensor


def quantize_nvfp4(impl: Any, x: Any, post_quant_comm: bool = True) -> tuple[Any, torch.Tensor | None]:
    if getattr(impl, "fc31_act_scale", None) is not None:
        x = x * impl.fc31_act_scale
    if impl.force_dynamic_quantization and hasattr(impl, "fc31_weight_scale_2"):
        scale = 448.0 * 6.0 / x.abs().amax().float()
        impl.fc31_alpha.data.copy_(impl.fc31_weight_scale_2.data / scale)
        impl.fc31_input_scale.data.copy_(scale)
    if isinstance(x, Fp4QuantizedTensor):
        if not post_quant_comm:
            return x, None
        assert not x.is_sf_swizzled, "Fp4QuantizedTensor should not be swizzled before communication"
        x, x_sf = x.fp4_tensor, x.scaling_factor
    else:
        swizzled = not post_quant_comm
        x, x_sf = torch.ops.trtllm.fp4_quantize(x, impl.fc31_input_scale, impl.scaling_vector_size, False, swizzled)
    return x, x_sf.view(x.shape[0], -1) if post_quant_comm else x_sf
