"""One Triton kernel with its constants and compiler options."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

PACKAGE = "trtllm_b12x.kernels"
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
class Variant:
    """A kernel that is compiled once."""

    module: str
    """Below ``PACKAGE``."""
    name: str
    types: tuple[Any, ...]
    """Types of the arguments up to the constants: tensors' dtypes and examples of integers."""
    constants: dict[str, Any]
    options: dict[str, Any]
    """Options of the compiler."""

    @cached_property
    def key(self) -> tuple[Any, ...]:
        types = (kind if isinstance(kind, torch.dtype) else int for kind in self.types)
        return (self.name, *types, *sorted(self.constants.items()), *sorted(self.options.items()))

    @property
    def function(self) -> Any:
        """The function of Triton's JIT or of its interpreter."""
        return getattr(importlib.import_module(f"{PACKAGE}.{self.module}"), self.name)

    def warm_up(self) -> Any:
        """Compile the kernel for the current device as the JIT does, or find it in Triton's cache."""
        return self.function.warmup(*self.types, grid=(1,), **self.constants, **self.options)

    def assemble(self, capability: int) -> Any:
        """Compile the kernel as the JIT would for another card, with every pointer at a multiple of 16 that may be."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        jit = self.function
        signature = dict.fromkeys(jit.arg_names, "constexpr")
        types = zip(jit.arg_names, self.types, strict=False)
        signature |= {argument: _POINTERS[kind] if isinstance(kind, torch.dtype) else "i32" for argument, kind in types}
        # What alignment changes is specialized by it at a launch too.
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, parameter in enumerate(jit.params)
            if signature[parameter.name].startswith("*") and not parameter.do_not_specialize_on_alignment
        }
        source = ASTSource(jit, signature=signature, constexprs=self.constants, attrs=aligned)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)
