"""A plan's kernels compiled for a card that is not here: for tests, and to say beforehand whether an environment can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.kernels import Geometry

from . import TritonKernel
from .tiles import Card
from .variants import function

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


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
) -> Iterator[Compiled]:
    """The kernels that a call of ``tokens`` launches on ``card``.

    Args:
        inline: whether programs find their routes by themselves, as some calls may; None: as the plan has it.
        only: names; all if empty.
    """
    kernel = TritonKernel(card)
    kernel.describe(geometry, tokens, torch.device("cuda"))
    step = kernel.build.step(tokens)
    for variant in kernel.build.variants(step, step.inline if inline is None else inline, quantized):
        if only and variant.name not in only:
            continue
        made = assemble(function(variant.name), variant.types, variant.constants, variant.options, card.capability)
        code = (made.asm[stage] for stage in ("ttgir", "ptx", "cubin"))
        yield Compiled(variant.name, variant.constants, variant.options["num_warps"], made.metadata.shared, *code)


def assemble(jit: Any, types: Iterable[Any], constants: dict[str, Any], options: dict[str, Any], capability: int) -> Any:
    """One kernel as Triton's JIT would compile it, with every pointer at a multiple of 16 that may be.

    Args:
        types: of the arguments up to the constants, tensors' dtypes and examples of integers.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(jit.arg_names, "constexpr")
    given = dict(zip(jit.arg_names, types, strict=False))
    signature |= {argument: _POINTERS[kind] if isinstance(kind, torch.dtype) else "i32" for argument, kind in given.items()}
    # What alignment changes is specialized by it at a launch too (``launch.py``).
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, parameter in enumerate(jit.params)
        if signature[parameter.name].startswith("*") and not parameter.do_not_specialize_on_alignment
    }
    source = ASTSource(jit, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
