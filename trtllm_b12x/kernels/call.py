# SPDX-License-Identifier: Apache-2.0
"""One call of a layer's experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trtllm_b12x.formats.geometry import Geometry

from .routes import ID_TYPES, ROUTER_WEIGHT_TYPES, of_known_types

_SCALE_TYPES = (torch.uint8, torch.float8_e4m3fn)


class MoECall(NamedTuple):
    """The tensors of one call of a layer's experts."""

    x: torch.Tensor
    """``(tokens, H)`` in the layer's dtype. With ``x_sf``: ``(tokens, H/2)`` bytes, each with two FP4 codes."""
    ids: torch.Tensor
    """``(tokens, top_k)`` integers of any type, global ids. Kernels skip routes to experts of other ranks."""
    router_weights: torch.Tensor
    """``(tokens, top_k)``, any float type."""
    x_sf: torch.Tensor | None = None
    """E4M3 bytes for blocks of 16 columns, if the engine has quantized ``x`` by ``fc31_input_scale``."""
    swizzled: bool = False
    """``x_sf`` is 128x4-interleaved, not in rows of ``H/16``."""
    out: torch.Tensor | None = None
    """``(tokens, H)``, written if given."""
    scratch: torch.Tensor | None = None
    """uint8 memory for intermediate results, ``Kernel.scratch_bytes`` or more at a multiple of 16. Allocated if not given."""
    router_logits: torch.Tensor | None = None
    """``(tokens, E)`` for all experts, if the geometry has a ``scoring``. Then ``ids`` and ``router_weights`` are not read."""
    router_bias: torch.Tensor | None = None
    """``(E,)`` float32, if ``scoring.bias``."""
    padding: torch.Tensor | None = None
    """``(tokens,)`` bool, for calls with logits: True for rows without a token. They have no routes, and their output is zero."""

    def check(self, geometry: Geometry, quantized_input: bool) -> None:
        """Raise ValueError, naming the tensor, if its shape is wrong, or if kernels do not take the given ``x_sf``."""
        x, x_sf, swizzled = self.x, self.x_sf, self.swizzled
        tokens, hidden = x.shape[0], geometry.hidden_size
        if x_sf is not None and not quantized_input:
            raise ValueError("x_sf is given, but the kernel takes unquantized x")
        columns, routes = (hidden if x_sf is None else hidden // 2), (tokens, geometry.top_k)
        expected: dict[str, tuple[int, ...]] = {"x": (tokens, columns), "out": (tokens, hidden)}
        if (scoring := geometry.scoring) is None:
            expected |= {"ids": routes, "router_weights": routes}
        else:
            experts = geometry.num_experts * geometry.ranks
            expected |= {"router_logits": (tokens, experts)} | ({"router_bias": (experts,)} if scoring.bias else {})
        if self.padding is not None:
            if scoring is None or self.padding.dtype is not torch.bool:
                raise ValueError(f"padding is {self.padding.dtype}, expected bool, in a call with router_logits")
            expected["padding"] = (tokens,)
        for name in ("router_logits", "router_bias"):
            if (getattr(self, name) is None) == (name in expected):
                raise ValueError(f"{name} is {'missing' if name in expected else 'given, but the layer has no use for it'}")
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
        if x_sf is not None:
            if x.dtype is not torch.uint8 or x_sf.dtype not in _SCALE_TYPES:
                raise ValueError(f"x is {x.dtype} and x_sf {x_sf.dtype}, expected bytes of FP4 codes and of E4M3 scales")
            needed = -(-tokens // 128) * -(-hidden // 64) * 512 if swizzled else tokens * (hidden // 16)
            if x_sf.nbytes < needed:
                raise ValueError(f"x_sf has {x_sf.nbytes} scales, expected {needed} for {tokens} tokens")

    def prepared(self, geometry: Geometry, quantized_input: bool, device: int) -> MoECall:
        """Return the checked call for kernels: contiguous tensors of supported dtypes, and an output that kernels can write.

        ``device``: number of the layer's device, as ``get_device`` returns it. Raise ValueError as ``check`` does. Also raise it
        if ``x`` does not have the layer's dtype, ``out`` has integers, a device differs, or ``scratch`` is not aligned.
        """
        x, ids, router_weights, x_sf, swizzled, out, scratch, logits, bias, padding = self
        shape, hidden, dtype = x.shape, geometry.hidden_size, geometry.dtype
        tokens = shape[0]
        routes = tokens, geometry.top_k
        out_shape = shape if out is None else out.shape
        # Each access to a tensor takes 0.1 us, and so does each function call.
        fits = out_shape == shape == (tokens, hidden) and ids.shape == routes == router_weights.shape
        if not fits or x_sf is not None or geometry.scoring is not None or logits is not None or padding is not None:
            self.check(geometry, quantized_input)
        if (
            not device == x.get_device() == ids.get_device() == router_weights.get_device()
            or (out is not None and out.get_device() != device) or (scratch is not None and scratch.get_device() != device)
            or (x_sf is not None and x_sf.get_device() != device) or (logits is not None and logits.get_device() != device)
            or (bias is not None and bias.get_device() != device) or (padding is not None and padding.get_device() != device)
        ):  # fmt: skip
            self._name_device(device)
        if scratch is not None and scratch.data_ptr() % 16:
            raise ValueError(f"scratch is at address {scratch.data_ptr():#x}, expected a multiple of 16")
        if x_sf is not None:
            x_sf = aligned16(x_sf).view(torch.uint8)
        elif x.dtype is not dtype:
            raise ValueError(f"x is {x.dtype}, expected {dtype}")
        x = x if x.is_contiguous() and not x.data_ptr() % 16 else aligned16(x)
        if out is not None and not (out.dtype is dtype or out.is_floating_point()):
            raise ValueError(f"out is {out.dtype}, expected {dtype}")
        if out is None or out.dtype is not dtype or not out.is_contiguous() or out.data_ptr() % 16:
            out = x.new_empty(tokens, hidden) if x_sf is None else x.new_empty(tokens, hidden, dtype=dtype)
        if logits is not None:
            if not logits.is_floating_point():
                raise ValueError(f"router_logits is {logits.dtype}, expected floats")
            logits = (logits if logits.dtype in ROUTER_WEIGHT_TYPES else logits.float()).contiguous()
            ids = router_weights = logits  # kernels do not read these fields
            bias = None if bias is None else bias.float().contiguous()
            padding = None if padding is None else padding.contiguous()
        elif ids.dtype not in ID_TYPES or router_weights.dtype not in ROUTER_WEIGHT_TYPES:
            ids, router_weights = of_known_types(ids, router_weights)
        fields = x, ids.contiguous(), router_weights.contiguous(), x_sf, swizzled, out, scratch, logits, bias, padding
        return tuple.__new__(MoECall, fields)  # half the time of MoECall(*fields)

    def of_tokens(self, first: int, end: int) -> MoECall:
        """Return the call for tokens ``first:end``, without ``out``. With swizzled ``x_sf``, ``first`` is a multiple of 128."""
        names = ("x", "ids", "router_weights") if self.router_logits is None else ("x", "router_logits", "padding")
        part = self._replace(out=None, **{name: part[first:end] for name in names if (part := getattr(self, name)) is not None})
        if self.x_sf is None:
            return part
        row = 2 * self.x.shape[1] // 16
        if self.swizzled:  # 128 rows of scales lie together, in columns of 4
            row, end = -(-row // 4) * 4, -(-end // 128) * 128
        return part._replace(x_sf=self.x_sf.reshape(-1)[first * row : end * row])

    def _name_device(self, device: int) -> None:
        for name, value in self._asdict().items():
            if isinstance(value, torch.Tensor) and value.get_device() != device:
                raise ValueError(f"{name} is on {value.device}, expected {f'cuda:{device}' if device >= 0 else 'cpu'}")


def of_logits(x: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor | None = None, **more: Any) -> MoECall:
    """Return a call that has router logits. ``more`` contains other fields."""
    return MoECall(x, logits, logits, router_logits=logits, router_bias=bias, **more)


def aligned16(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor at a multiple of 16 bytes. A chunk of a longer call may begin at any address."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
