"""A layer between its loads and calls: copied, moved, converted, its parameters saved and handed on."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from .dispatch.layer import LayerDispatch
from .quantization import Method

if TYPE_CHECKING:
    _Backend: Any
    """What it is mixed in before, the host's CUTLASS class the last."""
else:
    _Backend = object


class Carried(_Backend):
    """Kernels and derived values follow the parameters, or wait for them."""

    dispatch: LayerDispatch
    _ours: Method | None
    _memory: Mapping[tuple[str, torch.device, torch.dtype], torch.Tensor] = MappingProxyType({})
    """Our parameters and buffers on each device where they have been."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the kernel, whose views and workspace are this layer's: a copy runs on CUTLASS until its weights are loaded."""
        return {**self.__dict__, "dispatch": self.dispatch.without_kernels(), "_memory": {}}

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Moved or converted: the kernel follows, or waits until the layer is back where it can run."""
        own = {} if self._ours is None else self._ours.neutral
        meta = [name for name in own if name in self._parameters and self._parameters[name].is_meta]
        with suppress(Exception):
            self._remember_tensors()
        module = super()._apply(*args, **kwargs)
        for name in meta:
            if not self._parameters[name].is_meta:
                self._parameters[name].data.fill_(own[name])  # what it is given here is not even zeros
        try:
            self._restore_tensors()
            if self.dispatch.moved_to(self.w2_weight.device):
                self._weights_are_ready()
        except Exception as error:
            self._leave_to_the_host(error)
        return module

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        named = {**self._parameters, **self._buffers}
        return {name: tensor.data for name, tensor in named.items() if name.startswith("b12x_") and not tensor.is_meta}

    def _remember_tensors(self) -> None:
        """Keep our parameters and buffers alive where they are: captured graphs read and write them there."""
        self._memory = dict(self._memory)
        for name, tensor in self._own_tensors().items():
            self._memory.setdefault((name, tensor.device, tensor.dtype), tensor)

    @torch.inference_mode()
    def _restore_tensors(self) -> None:
        """Back on a device where they were before, our parameters and buffers take their old memory again."""
        for name, tensor in self._own_tensors().items():
            before = self._memory.get((name, tensor.device, tensor.dtype), tensor)
            if before.data_ptr() != tensor.data_ptr() and before.shape == tensor.shape:
                before.copy_(tensor)
                (self._parameters if name in self._parameters else self._buffers)[name].data = before

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The host's keys, where they say it all."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        with suppress(Exception):
            if self._ours is not None:
                for name in filter(functools.partial(self._ours.is_neutral, self), self._ours.neutral):
                    destination.pop(prefix + name, None)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Also of the host's own layers, and what is derived follows."""
        errors = len(error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        method = self._ours
        if method is None or not method.neutral.keys() <= self._parameters.keys():
            return
        for name, value in method.neutral.items():
            if prefix + name not in state_dict and prefix + method.stored[0] in state_dict:
                self._parameters[name].data.fill_(value)
                if prefix + name in missing_keys:
                    missing_keys.remove(prefix + name)
        if len(error_msgs) > errors:
            where, tile = prefix.rstrip(".") or type(self).__name__, method.tile
            error_msgs.append(
                f"{where} keeps its intermediate size on its kernels' tile of {tile}: load the state_dict of a layer that does "
                "not with TRTLLM_B12X=0, or load the checkpoint"
            )
        method.refresh(self)
        if self.dispatch.schedule.kernels:
            self._weights_are_ready()
