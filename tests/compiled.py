"""What a call launches on a card that is not here: Triton's kernels, compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.triton.decode import TritonKernel


@dataclass(frozen=True)
class Compiled:
    """One kernel."""

    name: str
    constants: dict[str, Any]
    num_warps: int
    shared_memory: int
    """Bytes."""
    ttgir: str
    ptx: str
    cubin: bytes


def compile_for(
    card: Card,
    geometry: Geometry,
    tokens: int,
    *,
    quantized: bool = False,
    inline: bool | None = None,
    only: tuple[str, ...] = (),
    kind: type[TritonKernel] = TritonKernel,
) -> Iterator[Compiled]:
    """The kernels that a call of ``tokens`` launches on ``card``.

    Args:
        inline: whether programs find their routes by themselves, as some calls may; None: as the plan has it.
        only: names; all if empty.
    """
    kernel = kind(card)
    kernel.describe(geometry, tokens, torch.device("cuda"))
    config = kernel.spec.config(tokens)
    for variant in kernel.spec.variants(config, config.inline if inline is None else inline, quantized):
        if only and variant.name not in only:
            continue
        made = variant.assemble(card.capability)
        code = (made.asm[stage] for stage in ("ttgir", "ptx", "cubin"))
        yield Compiled(variant.name, variant.constants, variant.options["num_warps"], made.metadata.shared, *code)
