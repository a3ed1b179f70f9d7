"""Scratch memory of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scratch(NamedTuple):
    """One allocation, and its parts at multiples of 128 bytes."""

    nbytes: int
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, *parts: tuple[int, torch.dtype]) -> Scratch:
        """Place parts of so many bytes one after the other. A part of -1 bytes is the one before it, as another dtype."""
        begins, ends = [0], [0]
        for size, _ in parts:
            begins.append(begins[-1] if size < 0 else -(-ends[-1] // 128) * 128)
            ends.append(ends[-1] if size < 0 else begins[-1] + size)
        return cls(max(ends[-1], 1), tuple(begins[1:]), tuple(ends[1:]), tuple(dtype for _, dtype in parts))

    def cut(self, memory: torch.Tensor) -> list[torch.Tensor]:
        spans = zip(self.begins, self.ends, self.dtypes, strict=True)
        return [memory[begin:end].view(dtype) for begin, end, dtype in spans]
