"""Calls of one layer under the bed, and what each is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.formats.nvfp4 import NVFP4Weights
from trtllm_b12x.tools.verify import reference as strict_reference
from trtllm_b12x.tools.verify import relative_l2
from trtllm_b12x.tools.verify.reference import Arithmetic, MoECall

from .bed import Bed
from .kernels import CAPACITY, Job, forced
from .problem import Layer, arguments, reference, wrapper

REPETITIONS = 10
DEVICE = "cuda"
BOUND = 0.005
"""Of the distance from the reference with the kernels' rounding points."""


@dataclass
class Measured:
    """One call, repeated: relative L2 distances."""

    case: str
    kernel: str
    """The kind that ran."""
    tokens: int
    kernel_points: float
    """Against float32 with the rounding points that all kernels share; the worst of the repetitions, as all of these."""
    float32: float
    unquantized: float
    """Over the same distance of the float32 reference with quantized activations."""
    torch_kernel: float
    """Against ``kernels/reference.py``."""
    reruns: float
    """Largest distance between repetitions; 0 is bit-identical."""
    note: str = ""


class Runner:
    """Calls of one layer under the bed; wrappers are kept as a server keeps them."""

    def __init__(self, layer: Layer, weights: NVFP4Weights | None = None, drop: tuple[str, ...] = ()) -> None:
        self.layer = layer
        self.arguments = {k: v for k, v in arguments(weights or layer.weights).items() if k not in drop}
        self.wrappers: dict[tuple[int, str | None], Any] = {}

    def __call__(self, bed: Bed, job: Job, call: MoECall) -> tuple[str, torch.Tensor]:
        """The kernel's kind and its output."""
        capacity = CAPACITY if job.tokens <= CAPACITY else 0
        with forced(job.forced):
            key = capacity, job.forced
            if key not in self.wrappers:
                self.wrappers[key] = wrapper(self.layer.shape, DEVICE, capacity)
            out = self.wrappers[key].run(
                call.x,
                token_selected_experts=call.token_selected_experts,
                token_final_scales=call.token_final_scales,
                **self.arguments,
            )
        torch.cuda.synchronize()
        return bed.launched[-1].split("_")[0], out.clone()


@dataclass
class Yardsticks:
    kernel_points: torch.Tensor
    float32: torch.Tensor
    unquantized: torch.Tensor
    torch_kernel: torch.Tensor

    @classmethod
    def of(cls, layer: Layer, call: MoECall) -> Yardsticks:
        shape = layer.shape
        points = (Arithmetic.KERNEL, Arithmetic.NONE, Arithmetic.UNQUANTIZED)
        strict = strict_reference.outputs(layer.checkpoint, shape.num_experts, shape.gated, [call], points, DEVICE)[0]
        kernel_points, float32, unquantized = strict
        return cls(kernel_points, float32, unquantized, reference(layer, call).float())

    def rows(self, part: slice) -> Yardsticks:
        return Yardsticks(*(getattr(self, name)[..., part, :] for name in self.__dataclass_fields__))

    def measure(self, case: str, kernel: str, outputs: list[torch.Tensor], note: str = "") -> Measured:
        def worst(yardstick: torch.Tensor) -> float:
            return max(relative_l2(out.float(), yardstick) for out in outputs)

        base = relative_l2(self.float32, self.unquantized)
        return Measured(
            case,
            kernel,
            outputs[0].shape[0],
            worst(self.kernel_points),
            worst(self.float32),
            worst(self.unquantized) / base if base else 1.0,
            worst(self.torch_kernel),
            max(relative_l2(out.float(), outputs[0].float()) for out in outputs),
            note,
        )
