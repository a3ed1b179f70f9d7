"""A layer between its loads and calls: copied, moved and converted."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from trtllm_b12x.dispatch.layer import LayerDispatch

from .quantization import Method

if TYPE_CHECKING:
    _Backend: Any
    """The host's CUTLASS class and the classes before it, as the mixin sees them."""
else:
    _Backend = object


class Carried(_Backend):
    """Kernels and derived values follow the parameters, or wait for them."""

    dispatch: LayerDispatch
    _ours: Method | None
    _memory: Mapping[tuple[str, torch.device, torch.dtype], torch.Tensor] = MappingProxyType({})
    """Our buffers on each device where they have been."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the kernel, whose views and workspace are this layer's: a copy runs on CUTLASS until its weights are loaded."""
        return {**self.__dict__, "dispatch": self.dispatch.without_kernels(), "_memory": {}}

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Moved or converted: the kernel follows, or waits until the layer is back where it can run."""
        meta = [name for name, tensor in self._buffers.items() if name.startswith("b12x_") and tensor.is_meta]
        with suppress(Exception):
            self._remember_tensors()
        module = super()._apply(*args, **kwargs)
        for name in meta:
            if not self._buffers[name].is_meta:
                self._buffers[name].zero_()  # what it is given here is not even zeros
        try:
            self._restore_tensors()
            if self.dispatch.moved_to(self.w2_weight.device):
                self._weights_are_ready()
        except Exception as error:
            self._leave_to_the_host(error)
        return module

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.data for name, tensor in self._buffers.items() if name.startswith("b12x_") and not tensor.is_meta}

    def _remember_tensors(self) -> None:
        """Keep our buffers alive where they are: captured graphs read and write them there."""
        self._memory = dict(self._memory)
        for name, tensor in self._own_tensors().items():
            self._memory.setdefault((name, tensor.device, tensor.dtype), tensor)

    @torch.inference_mode()
    def _restore_tensors(self) -> None:
        """Back on a device where they were before, our buffers take their old memory again."""
        for name, tensor in self._own_tensors().items():
            before = self._memory.get((name, tensor.device, tensor.dtype), tensor)
            if before.data_ptr() != tensor.data_ptr() and before.shape == tensor.shape:
                before.copy_(tensor)
                self._buffers[name].data = before

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Say why sizes differ where they do."""
        error_msgs = args[-1]
        errors = len(error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self._ours is not None and len(error_msgs) > errors:
            where = prefix.rstrip(".") or type(self).__name__
            error_msgs.append(
                f"{where} pads its intermediate size to a multiple of {self._ours.tile}, which its kernels need: load the "
                "checkpoint, or the state_dict of a layer with the same padding (TRTLLM_B12X=0 pads as TensorRT-LLM does)"
            )
