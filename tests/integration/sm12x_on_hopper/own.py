# SPDX-License-Identifier: Apache-2.0
"""The package's own kernels for an SM12x card, on a Hopper GPU: whatever Triton and NVRTC make for the card is translated.

Inside :func:`card_on_hopper` the package believes in the card. It chooses tiles for it, compiles for it, and keeps what is
compiled in a cache of its own. Only the last step differs: PTX is translated before ptxas makes machine code of it.

What is patched: the backend's ``make_cubin`` in Triton, here and in the processes that compile (``pool.py``), and the target that
its driver names; ``kernels.cuda.nvrtc.compiled``; torch's properties and capability of the GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from trtllm_b12x.kernels import cards

from .bed import default_cache
from .build import MUTATION, BuildError, assemble, device_functions, instructions, mutated
from .translate import translate

_HERE = Path(__file__).parent
SHARED_MEMORY = cards.SHARED_MEMORY - (1 << 10)
"""Bytes that a block of an SM12x card may have: the driver keeps 1 KB."""


@contextlib.contextmanager
def translating_triton() -> Iterator[None]:
    """Let Triton, in this process, make machine code for Hopper of what it compiled for an SM12x card."""
    from triton.backends.nvidia.compiler import CUDABackend

    make = CUDABackend.make_cubin

    def make_cubin(self: Any, source: str, metadata: Any, options: Any, capability: int) -> Any:
        if capability // 10 != 12:
            return make(self, source, metadata, options, capability)
        if metadata["shared"] > SHARED_MEMORY:
            raise _too_large(metadata["name"], metadata["shared"])
        return machine_code(source)[0]

    with mock.patch.object(CUDABackend, "make_cubin", make_cubin):
        yield


def _too_large(name: str, nbytes: int) -> BuildError:
    return BuildError(f"{name} takes {nbytes} bytes of shared memory; a block of the card has {SHARED_MEMORY}")


def machine_code(ptx: str) -> tuple[bytes, str]:
    """Translate and assemble: a cubin for ``sm_90a``, and what ptxas said."""
    with tempfile.TemporaryDirectory() as folder:
        cubin, words = assemble(mutated(translate(ptx, device_functions()).ptx), Path(folder))
        return cubin.read_bytes(), words


@contextlib.contextmanager
def card_on_hopper(multiprocessors: int, sm: int = 120) -> Iterator[None]:
    """Let the package believe in a card. Enter it before the process runs a kernel of Triton's.

    Triton's cache is a folder for each state of the translator, below ``XDG_CACHE_HOME``.

    Args:
        multiprocessors: of the card. Blocks of the one launch wait for each other, so it launches at most as many as the GPU has.
        sm: 120 or 121.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from trtllm_b12x.kernels.cuda import decode, nvrtc
    from trtllm_b12x.kernels.triton import compile_pool

    real, compile_cuda, driver = torch.cuda.get_device_properties, nvrtc.compiled, triton.runtime.driver.active
    limit = real(0).multi_processor_count
    folder = default_cache() / f"triton-{fingerprint()}"
    major, minor = divmod(sm, 10)

    def properties(device: Any = None) -> Any:
        found = real(device)
        kept = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
        kept |= {"major": major, "minor": minor, "multi_processor_count": multiprocessors}
        return SimpleNamespace(**kept | {"shared_memory_per_multiprocessor": cards.SHARED_MEMORY})

    def compiled(name: str, files: Any, target: str) -> tuple[bytes, str]:
        if not target.startswith("sm_12"):
            return compile_cuda(name, files, target)
        ptx, _ = compile_cuda(name, files, target.replace("sm", "compute"))
        return machine_code(ptx.rstrip(b"\0").decode())

    class Launched(decode.driver.Function):
        def __init__(self, module: Any, name: str, of: str = "") -> None:
            super().__init__(module, name, of)
            if self.shared_bytes > SHARED_MEMORY:
                raise _too_large(name, self.shared_bytes)

        def launcher(self, blocks: int, *arguments: Any) -> Any:
            return super().launcher(min(blocks, limit), *arguments)

    with contextlib.ExitStack() as stack:
        stack.enter_context(translating_triton())
        stack.enter_context(mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": str(folder)}))
        for owner, attribute, value in (
            (driver, "get_current_target", lambda: GPUTarget("cuda", sm, 32)),
            (torch.cuda, "get_device_properties", properties),
            (torch.cuda, "get_device_capability", lambda *arguments: (major, minor)),
            (nvrtc, "compiled", compiled),
            (decode.driver, "Function", Launched),
            (compile_pool, "__file__", str(_HERE / "pool.py")),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        yield


def fingerprint() -> str:
    """Of all that machine code depends on besides what Triton and NVRTC make."""
    content = (os.environ.get(MUTATION), instructions(), (_HERE / "translate.py").read_text(), (_HERE / "build.py").read_text())
    return hashlib.sha256(repr(content).encode()).hexdigest()[:10]
