"""A second number format in one file: FP8, E4M3 codes with one float32 scale per matrix, bf16 activations.

The host's path has the matrices in bf16; scales are powers of two, so both hold the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from trtllm_b12x.decision import FLASHINFERS, KernelFeatures, RejectReason
from trtllm_b12x.decision.families import Family
from trtllm_b12x.engines.trtllm.embedded.quantization import TensorParallelMode, UnquantizedFusedMoEMethod, load_weight_shard
from trtllm_b12x.engines.trtllm.quantization import Method
from trtllm_b12x.formats import Format
from trtllm_b12x.formats.weights import Weights
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.reference import ReferenceKernel, activate
from trtllm_b12x.tools.checkpoint.storage import StorageFormat
from trtllm_b12x.tools.verify.reference import Arithmetic, ReferenceDequantizer

FEATURES = KernelFeatures(
    "triton",
    activations=frozenset({"Swiglu"}),
    tile=96,
    hidden_size_multiple=32,
    negative_ids=True,
    deterministic=True,
    arithmetic="UNQUANTIZED",
    quantizations=frozenset({"FP8"}),
    group_size=16,
    bound_by=frozenset(RejectReason) - FLASHINFERS - {RejectReason.TRITON, RejectReason.TOOLKIT},
)
FORMAT = Format(
    "FP8",
    "FP8_DEFAULT_CFG",
    code_bits=8,
    group_size=16,
    activations=("Swiglu",),
)
FAMILY = Family("triton", "FP8", lambda facts: FEATURES)
"""The second row of a family that there is: kernels for another format."""


@dataclass(frozen=True)
class ToyWeights(Weights):
    fc1: torch.Tensor
    """``(E, 2*T, H)`` uint8, rows [up; gate]."""
    fc1_scale: torch.Tensor
    """``(E, 2)`` float32, up's and gate's."""
    fc2: torch.Tensor
    """``(E, H, T)`` uint8."""
    fc2_scale: torch.Tensor
    """``(E,)`` float32."""

    payload = ("fc1", "fc2")
    block_scales = ()

    def check(self, geometry: Geometry) -> None:
        experts, hidden, size = geometry.num_experts, geometry.hidden_size, geometry.intermediate_size
        assert (self.fc1.shape, self.fc2.shape) == ((experts, 2 * size, hidden), (experts, hidden, size))

    def stored(self, slot: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"weight": (self.fc1[slot], self.fc2[slot])}


class ToyKernel(ReferenceKernel):
    features = FEATURES
    multiple = 32

    def _shares(self, expert: int, x: torch.Tensor, router_weights: torch.Tensor, arrived: bool) -> Iterator[torch.Tensor]:
        w: ToyWeights = self.weights
        halves = (x.float() @ values(w.fc1[expert]).T).chunk(2, dim=1)
        up, gate = (half * scale for half, scale in zip(halves, w.fc1_scale[expert], strict=True))
        inner = activate(self.geometry.activation, up, gate)
        yield inner @ values(w.fc2[expert]).T * w.fc2_scale[expert] * router_weights


class ToyMethod(Method, UnquantizedFusedMoEMethod):
    format = "FP8"
    stored = ("toy_fc1", "toy_fc2")
    read_by_kernels = itemgetter("toy_fc1", "toy_fc1_scale", "toy_fc2", "toy_fc2_scale")

    def create_weights(self, module: Any) -> None:  # type: ignore[override]
        logical = module.intermediate_size_per_partition
        size = module.intermediate_size_per_partition = -(-logical // self.tile) * self.tile
        try:
            super().create_weights(module)
        finally:
            module.intermediate_size_per_partition = logical
        experts, hidden = module.expert_size_per_partition, module.hidden_size
        for name, shape, dtype in (
            ("toy_fc1", (experts, 2 * size, hidden), torch.uint8),
            ("toy_fc1_scale", (experts, 2), torch.float32),
            ("toy_fc2", (experts, hidden, size), torch.uint8),
            ("toy_fc2_scale", (experts,), torch.float32),
        ):
            module.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def load_expert_w3_w1_weight(self, *arguments: Any) -> None:
        """At the end of the load, with the scales."""

    def load_expert_w2_weight(self, *arguments: Any) -> None:
        """The same."""

    def load_quant_scales(self, module: Any, weights: Any) -> None:
        parameters = {name: parameter.data for name, parameter in module._parameters.items()}
        for slot, expert in enumerate(module.initial_local_expert_ids):
            column = (module.tp_size, module.tp_rank, TensorParallelMode.COLUMN)
            for half, name in enumerate(("w3", "w1")):
                codes = load_weight_shard(weights[f"{expert}.{name}.weight"], *column)
                scale = weights[f"{expert}.{name}.weight_scale"]
                parameters["toy_fc1"][slot].chunk(2)[half][: len(codes)].copy_(codes.view(torch.uint8))
                parameters["w3_w1_weight"][slot].chunk(2)[half].zero_()[: len(codes)].copy_(codes.float() * scale)
                parameters["toy_fc1_scale"][slot, half] = scale
            row = (module.tp_size, module.tp_rank, TensorParallelMode.ROW)
            codes = load_weight_shard(weights[f"{expert}.w2.weight"], *row)
            scale = weights[f"{expert}.w2.weight_scale"]
            parameters["toy_fc2"][slot, :, : codes.shape[1]].copy_(codes.view(torch.uint8))
            parameters["w2_weight"][slot].zero_()[:, : codes.shape[1]].copy_(codes.float() * scale)
            parameters["toy_fc2_scale"][slot] = scale

    def kernel_weights(self, module: Any) -> ToyWeights:
        return ToyWeights(*(module._parameters[f"toy_{name}"].data for name in ("fc1", "fc1_scale", "fc2", "fc2_scale")))

    def intermediate_size(self, module: Any) -> int:
        return int(module.toy_fc2.shape[2])


STORAGE = StorageFormat({"weight": "F8_E4M3", "weight_scale": "F32"}, {"weight": 1})


class ToyDequantizer(ReferenceDequantizer):
    quantized = True

    def matrix(self, expert: int, name: str) -> torch.Tensor:
        return self.weights[f"{expert}.{name}.weight"].float() * self.weights[f"{expert}.{name}.weight_scale"]

    def quantize(self, values: torch.Tensor, fc: int, arithmetic: Arithmetic) -> torch.Tensor:
        """FP8 activations cost what they cost; the kernels and the host have them in bf16."""
        if arithmetic is not Arithmetic.NONE:
            return values
        scale = values.abs().amax(1, keepdim=True).clamp(min=1e-30) / 448
        return (values / scale).to(torch.float8_e4m3fn).float() * scale

    def scalars(self, local: Any) -> dict[str, torch.Tensor]:
        return {"fc2_scale": torch.tensor([float(self.weights[f"{e}.w2.weight_scale"]) for e in local], dtype=torch.float64)}


def values(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def random_experts(num_experts: int, hidden_size: int, intermediate_size: int) -> dict[str, torch.Tensor]:
    """A gated layer by the host's names."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for expert in range(num_experts):
        for name in ("w1", "w3", "w2"):
            shape = (hidden_size, intermediate_size) if name == "w2" else (intermediate_size, hidden_size)
            scale = torch.tensor(2.0 ** -(10 + expert % 3))
            weight = torch.randn(shape, generator=generator) * 0.05 / scale
            tensors[f"{expert}.{name}.weight"] = weight.clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[f"{expert}.{name}.weight_scale"] = scale
    return tensors
