# SPDX-License-Identifier: Apache-2.0
"""Define the base of our quantization methods, for any number format. Importing this module imports TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, ClassVar

import torch

from trtllm_b12x import formats
from trtllm_b12x.formats import WeightLayout
from trtllm_b12x.formats.catalog import WEIGHTS
from trtllm_b12x.formats.layouts import interleave, interleaved_rows
from trtllm_b12x.formats.weights import Weights

from .host import load

_HOST = load()
_Method: Any = object
"""Stand-in base class for TensorRT-LLM's method of the format."""


class Method(_Method):
    """Base of a quantization method whose tensors serve both TensorRT-LLM's path and our kernels.

    The intermediate size is padded to a multiple of ``tile``, which suits every eligible kernel.
    """

    format: ClassVar[str]
    """Name of the format in ``trtllm_b12x.formats.FORMATS``."""
    stored: ClassVar[tuple[str, ...]] = ("w3_w1_weight", "w2_weight", "w3_w1_weight_scale", "w2_weight_scale")
    """Parameters that hold the checkpoint's codes and block scales."""
    read_by_kernels: itemgetter[Any]
    """Getter of the parameters that kernels read or that a call derives a value from."""

    def __init__(self, tile: int) -> None:
        super().__init__()
        self.tile = tile

    def kernel_weights(self, module: Any) -> Weights:
        """Return the kernels' arguments as views of the module's storage. Keep the object alive with the module.

        Raise ValueError, naming the parameter, if one is not contiguous or not aligned.
        """
        return self._views(module)

    def _views(self, module: Any, also: tuple[str, ...] = (), **others: Any) -> Weights:
        """Return codes and block scales with ``others``. Kernels also read the parameters named in ``also``."""
        for name in (*self.stored, *also):
            tensor = getattr(module, name)
            if not tensor.is_contiguous() or tensor.data_ptr() % 16:
                raise ValueError(
                    f"{name} is not contiguous, or not at a multiple of 16 bytes: kernels read it 16 bytes at a time"
                )
        tensors = [getattr(module, name).data for name in self.stored]
        return WEIGHTS[self.format].on_storage(tensors[:2], tensors[2:], self.layout(), **others)

    @classmethod
    def layout(cls) -> WeightLayout:
        return next(row.layout for row in formats.FORMATS if row.name == cls.format)

    def intermediate_size(self, module: Any) -> int:
        """Return the intermediate size on this rank, padded to the kernels' tile."""
        columns = module.w2_weight.data
        return int(columns.shape[2]) * columns.element_size() * WEIGHTS[self.format].packed

    @torch.no_grad()
    def fill(self, module: Any, generator: torch.Generator) -> None:
        """Fill in random weights that give outputs of about one. ``generator`` is on the parameters' device."""
        fc1, fc2, scales1, scales2 = (getattr(module, name).data for name in self.stored)
        for codes, scales in ((fc1, scales1), (fc2, scales2)):
            WEIGHTS[self.format].draw(codes, scales, generator)

    def check(self, module: Any) -> None:
        """Raise ValueError if kernels cannot serve the loaded weights. May synchronize."""

    def scale_ratio(self, module: Any) -> float:
        """Return the largest ratio between an expert's gate and up scales, 1 if CUTLASS applies both. May synchronize."""
        return 1.0

    def padding_bytes(self, module: Any) -> int:
        """Return the bytes of zero padding in codes and block scales on this rank, including TensorRT-LLM's own padding."""
        logical, padded = module.intermediate_size_per_partition, self.intermediate_size(module)
        total = sum(getattr(module, name).data.nbytes for name in self.stored)
        return int(total * (padded - logical) // padded)

    def scalar_bytes(self, module: Any) -> int:
        return sum(int(tensor.nbytes) for name, tensor in module.named_buffers(recurse=False) if name.startswith("b12x_"))


class PaddedMethod(Method):
    """Base of a method that pads each half of FC1, and the columns of FC2, to the tile, after tensor parallelism has cut them."""

    # TensorRT-LLM inspects the names of these arguments (``inspect.getfullargspec``) before it passes the last two.

    def load_expert_w3_w1_weight(
        self,
        module: Any,
        w1_weight: torch.Tensor | None,
        w3_weight: torch.Tensor | None,
        dst_w3_w1_weight: torch.Tensor,
        allow_partial_loading: bool = False,
        expert_idx: int = -1,
    ) -> None:
        """Copy this rank's rows, as bytes. Each half goes to the start of its own half of ``dst (r*T, ...)``.

        Without a gate only w1 is used; TensorRT-LLM passes None or a tensor without rows as w3. A half that is None stays
        unchanged (partial loading).
        """
        halves = (w3_weight, w1_weight) if module.is_gated_activation else (w1_weight,)
        for half, destination in zip(halves, dst_w3_w1_weight.view(torch.uint8).chunk(len(halves)), strict=True):
            self._place(module, half, "COLUMN", destination)

    def load_expert_w2_weight(
        self, module: Any, w2_weight: torch.Tensor | None, dst_w2_weight: torch.Tensor, allow_partial_loading: bool = False
    ) -> None:
        """Copy this rank's columns, as bytes, to the start of ``dst (H, ...)``."""
        self._place(module, w2_weight, "ROW", dst_w2_weight.view(torch.uint8))

    def _place_scales(self, destination: torch.Tensor, place: Callable[[torch.Tensor], None]) -> None:
        """Let ``place`` write block scales into a byte matrix with one row per weight row. Then interleave them."""
        rows = interleaved_rows(destination).flatten(0, 2).flatten(1)
        place(rows)
        interleave(rows, destination)

    @staticmethod
    def _place(module: Any, tensor: torch.Tensor | None, mode: str, destination: torch.Tensor) -> None:
        """Copy this rank's slice into the upper left corner and zero the rest.

        On integrated GPUs TensorRT-LLM leaves the slice on the CPU, whatever device is passed.
        """
        if tensor is None:
            return
        ranks = module.tp_size, module.tp_rank, _HOST.TensorParallelMode[mode]
        shard = _HOST.load_weight_shard(tensor, *ranks, destination.device).contiguous().view(torch.uint8)
        if shard.shape != destination.shape:
            destination.zero_()
        destination[: shard.shape[0], : shard.shape[1]].copy_(shard)
