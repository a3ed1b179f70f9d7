"""How a checkpoint keeps matrices: one :class:`Kind` per number format, found by the format's row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch

from trtllm_b12x import formats


class Blocks(NamedTuple):
    """Of one matrix, counted by what its codes should hold where they were calibrated by the largest value."""

    counted: int
    """Blocks that tell: neither zero nor with a scale that rounds coarsely."""
    full: int
    """Those of them that hold such a code."""
    empty: float
    """Share of the blocks that stand for zeros."""


class Kind:
    """Matrices as they are, in one tensor each; a format's own has more tensors."""

    dtypes: ClassVar[Mapping[str, str]] = MappingProxyType({"weight": ""})
    """Kind of tensor to its dtype in safetensors; empty: any."""
    columns: ClassVar[Mapping[str, int]] = MappingProxyType({"weight": 1})
    """Kind of tensor to the elements of a row that one of its entries holds or scales; a kind that is not here is one number."""
    others: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """What other producers call a kind of tensor, to the kind."""
    group_size: ClassVar[int | None] = None
    """Elements that share a block scale."""
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    """``quant_method`` in config.json to what it stands for there, as TensorRT-LLM reads it."""
    full_code: ClassVar[str] = ""
    """What a block holds that was calibrated by its largest value, in words; empty: codes do not tell."""
    damaged: ClassVar[str] = ""
    """How many blocks hold it by chance, in words."""

    @property
    def scalars(self) -> frozenset[str]:
        return frozenset(self.dtypes.keys() - self.columns.keys())

    def told_by(self, kinds: set[str]) -> bool:
        """Tensors of these kinds are of this format, whatever the configuration says."""
        return False

    def fault(self, kind: str, tensor: torch.Tensor) -> str:
        """What makes a tensor unusable, or nothing."""
        return ""

    def blocks(self, get: Callable[[str], torch.Tensor]) -> Blocks:
        """Of the matrix whose tensors ``get`` reads by kind; only where :attr:`full_code` is."""
        raise NotImplementedError

    def evenly_spread(self, weight: torch.Tensor) -> bool:
        """All codes are equally frequent, as in random bytes."""
        return False


PLAIN = Kind()


def of(quant_algo: str) -> Kind:
    """:data:`PLAIN` where it is no format of ours."""
    row = formats.find(quant_algo)
    kind: Kind = PLAIN if row is None else formats.load(row.kind)
    return kind


def every() -> dict[str, Kind]:
    return {name: of(name) for name in formats.names()}
