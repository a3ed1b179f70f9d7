"""Define the base of our quantization methods: what a layer asks of one, for any number format."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from trtllm_b12x.formats.weights import Weights

from . import host

if TYPE_CHECKING:
    _Method: Any
    """The host's class for the format and the classes before it, as the mixin sees them."""
else:
    _Method = object


class Method(_Method):
    """One set of tensors for the host's path and the kernels.

    Args:
        tile: that the intermediate size is padded to, a multiple of every eligible kernel's.
    """

    format: ClassVar[str]
    """Name of the format in :data:`trtllm_b12x.formats.FORMATS`."""
    stored: ClassVar[tuple[str, ...]]
    """Parameters that hold the checkpoint's payload and block scales."""
    read_by_kernels: ClassVar[itemgetter[Any]]
    """Get the parameters whose memory kernels read, or that a call derives a value from."""

    def __init__(self, tile: int) -> None:
        super().__init__()
        self.tile = tile

    # The host looks at the names of these arguments (``inspect.getfullargspec``) before it passes the last two.

    def load_expert_w3_w1_weight(
        self,
        module: Any,
        w1_weight: torch.Tensor | None,
        w3_weight: torch.Tensor | None,
        dst_w3_w1_weight: torch.Tensor,
        allow_partial_loading: bool = False,
        expert_idx: int = -1,
    ) -> None:
        """Rows of this rank, each half at the start of its own half of ``dst (r*T, ...)``, as bytes.

        Without a gate there is w1 alone, whatever comes as w3: hosts pass None or a tensor without rows.  A half that is None
        stays what it was (partial loading).
        """
        halves = (w3_weight, w1_weight) if module.is_gated_activation else (w1_weight,)
        for half, destination in zip(halves, dst_w3_w1_weight.view(torch.uint8).chunk(len(halves)), strict=True):
            self._place(module, half, "COLUMN", destination)

    def load_expert_w2_weight(
        self,
        module: Any,
        w2_weight: torch.Tensor | None,
        dst_w2_weight: torch.Tensor,
        allow_partial_loading: bool = False,
    ) -> None:
        """Columns of this rank at the start of ``dst (H, ...)``, as bytes."""
        self._place(module, w2_weight, "ROW", dst_w2_weight.view(torch.uint8))

    @staticmethod
    def _place(module: Any, tensor: torch.Tensor | None, mode: str, destination: torch.Tensor) -> None:
        """This rank's slice into the upper left corner, zeros elsewhere.

        On integrated GPUs the host leaves the slice on the CPU, whatever device it is asked for.
        """
        if tensor is None:
            return
        trtllm = host.load()
        ranks = module.tp_size, module.tp_rank, trtllm.TensorParallelMode[mode]
        shard = trtllm.load_weight_shard(tensor, *ranks, destination.device).contiguous().view(torch.uint8)
        if shard.shape != destination.shape:
            destination.zero_()
        destination[: shard.shape[0], : shard.shape[1]].copy_(shard)

    @abstractmethod
    def kernel_weights(self, module: Any) -> Weights:
        """The kernels' arguments as views of the module's storage; keep the returned object alive with the module.

        Raises:
            ValueError: a parameter does not lie as kernels read it; the message names it.
        """

    @staticmethod
    def readable(module: Any, names: Iterable[str]) -> None:
        """Raise ValueError, naming the parameter, where one does not lie as kernels read it."""
        for name in names:
            tensor = getattr(module, name)
            if not tensor.is_contiguous() or tensor.data_ptr() % 16:
                raise ValueError(
                    f"{name} is not contiguous, or not at a multiple of 16 bytes: kernels read it 16 bytes at a time"
                )

    @abstractmethod
    def intermediate_size(self, module: Any) -> int:
        """Return the intermediate size on this rank, padded to the kernels' tile."""

    @abstractmethod
    def fill(self, module: Any, generator: torch.Generator) -> None:
        """Random weights, finite and such that outputs are about one: the host's dummy load, with sense.

        Args:
            generator: of the parameters' device.
        """

    def scale_ratio(self, module: Any) -> float:
        """Return the largest ratio of gate's and up's scales of an expert, 1 if CUTLASS has them both.  Synchronizes."""
        return 1.0

    def addresses(self, module: Any) -> tuple[int, ...]:
        return tuple(map(torch.Tensor.data_ptr, self.read_by_kernels(module._parameters)))

    def padding_bytes(self, module: Any) -> int:
        """Zeros in payload and block scales that fill the tile, on this rank; those that the host has too."""
        logical, padded = module.intermediate_size_per_partition, self.intermediate_size(module)
        total = sum(getattr(module, name).data.nbytes for name in self.stored)
        return int(total * (padded - logical) // padded)

    def scalar_bytes(self, module: Any) -> int:
        """Bytes of this method's buffers."""
        return sum(int(tensor.nbytes) for name, tensor in module.named_buffers(recurse=False) if name.startswith("b12x_"))
