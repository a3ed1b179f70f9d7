# SPDX-License-Identifier: Apache-2.0
"""The bed: FlashInfer's own host code believes in an SM12x card, and every kernel it launches is a translated one.

What is patched, why, and what would make it unnecessary (FlashInfer 0.7.2.post1 and 0.6.18; all below
``fused_moe/cute_dsl/blackwell_sm12x`` unless named):

* ``torch.cuda.get_device_capability``: the entry points ask it (``utils.py``, ``supported_compute_capability``).
* ``get_num_sm``, ``get_max_active_clusters``: the grid of a card, for instance 48 for GB10.  The CTAs of a grid wait for each
  other, so it must not exceed what the GPU holds at once.
* ``moe_dispatch.build_and_load_cute_dsl_kernel``: the one door through which static, micro and dynamic kernels come, and every
  kernel of the package's driver.
* ``compile_direct_micro_kernel``, ``MoEDirectMicroKernel.launch``: FlashInfer's own launcher goes past that door with direct
  micro, without TVM-FFI.  The package's driver does not use them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from .build import FUNCTION, Builder, Options

_DISPATCH = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_dispatch"
_DIRECT = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_direct_micro_kernel"
_DIRECT_POINTERS = (
    "x w1_fp4 w1_blockscale w1_alphas a1_gscale a2_gscale inter_fp32 w2_fp4 w2_blockscale w2_alphas topk_ids topk_weights out"
)


class Bed:
    """What happened on the bed."""

    def __init__(self, builder: Builder, build_only: bool) -> None:
        self.builder, self.build_only = builder, build_only
        self.launched: list[str] = []
        """FlashInfer's names of the kernels launched, in order; they start with the kernel's kind."""
        self.built: dict[str, Path] = {}

    def kernel(self, name: str, compile_kernel: Callable[[], Any]) -> Callable[..., Any]:
        """What FlashInfer gets in place of the compiled kernel ``name``."""
        path = self.built[name] = self.builder.get(name, compile_kernel)
        if self.build_only:
            function: Callable[..., Any] = lambda *arguments: None  # noqa: E731
        else:
            import tvm_ffi

            function = getattr(tvm_ffi.load_module(str(path)), FUNCTION)

        def launch(*arguments: Any) -> Any:
            self.launched.append(name)
            return function(*arguments)

        return launch


@contextlib.contextmanager
def sm12x_on_hopper(
    sm_count: int = 132,
    *,
    options: Options = Options(),  # noqa: B008 - frozen
    cache: Path | None = None,
    build_only: bool = False,
) -> Iterator[Bed]:
    """FlashInfer's SM12x MoE kernels on the Hopper GPU of this machine.

    Enter it before anything in the process uses the CuTe DSL, which reads its settings once: a process builds for one card and
    runs whatever is built.

    Args:
        sm_count: SMs of the card that FlashInfer compiles for, at most those of the GPU.
        options: how kernels are built.
        cache: where built kernels are kept; they may be built elsewhere.
        build_only: on a machine without a GPU: give FlashInfer CPU tensors, kernels are built and not launched.
    """
    dump = _dump_directory()
    environment = {
        "CUTE_DSL_ARCH": options.target,
        "CUTE_DSL_KEEP_PTX": "1",
        "CUTE_DSL_DUMP_DIR": str(dump),
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        _answer_for_the_card(stack, options.sm, sm_count, build_only)
        bed = Bed(Builder(cache or default_cache(), dump, options), build_only)
        _take_the_doors(stack, bed, sm_count)
        yield bed


@functools.cache
def _dump_directory() -> Path:
    """One for the process: the CuTe DSL reads the setting at its first use."""
    directory = tempfile.mkdtemp(prefix="sm12x_on_hopper_")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sm12x_on_hopper"


def _answer_for_the_card(stack: contextlib.ExitStack, sm: int, sm_count: int, build_only: bool) -> None:
    def patch(owner: Any, name: str, value: Any) -> None:
        stack.enter_context(mock.patch.object(owner, name, value))

    if build_only:
        properties = mock.Mock(major=sm // 10, minor=sm % 10, multi_processor_count=sm_count, total_memory=96 << 30)
        patch(torch.cuda, "current_device", lambda: 0)
        patch(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch(torch.cuda, "get_device_properties", lambda *arguments: properties)
        patch(torch.cuda, "current_stream", lambda *arguments: mock.Mock(cuda_stream=0))
    else:
        import triton

        triton.runtime.driver.active.get_current_target()  # Triton remembers the real card
        _load_runtime()
    patch(torch.cuda, "get_device_capability", lambda *arguments: divmod(sm, 10))


def _load_runtime() -> None:
    """What built objects are linked against, before TVM-FFI loads the first."""
    for file in importlib.metadata.files("nvidia-cutlass-dsl-libs-cu13") or ():
        if file.name == "libcute_dsl_runtime.so":
            ctypes.CDLL(str(file.locate()), ctypes.RTLD_GLOBAL)
            return
    raise ImportError("nvidia-cutlass-dsl-libs-cu13 holds no libcute_dsl_runtime.so")


def _take_the_doors(stack: contextlib.ExitStack, bed: Bed, sm_count: int) -> None:
    from importlib import import_module

    import flashinfer.cute_dsl.utils as utils
    from flashinfer.jit import cpp_ext

    dispatch, direct = import_module(_DISPATCH), import_module(_DIRECT)

    def patch(owner: Any, name: str, value: Any) -> None:
        stack.enter_context(mock.patch.object(owner, name, value))

    for module in (dispatch, direct, utils):
        for name in ("get_num_sm", "get_max_active_clusters"):
            if hasattr(module, name):
                patch(module, name, lambda *arguments: sm_count)
    if bed.build_only:
        from flashinfer.fused_moe.cute_dsl.blackwell_sm12x import triton_compact
        from packaging.version import Version

        patch(cpp_ext, "get_cuda_version", lambda: Version("13.0"))
        patch(triton_compact, "compact_topk_ids", lambda *arguments: None)

    def build_and_load(module_name: str, kernel_name: str, compile_kernel: Any, **ignored: Any) -> Any:
        return bed.kernel(kernel_name, compile_kernel)

    patch(dispatch, "build_and_load_cute_dsl_kernel", build_and_load)
    _take_direct_micro(patch, bed, dispatch, direct)
    dispatch.clear_sm120_moe_caches()  # kernels from before, and ours when it is over
    stack.callback(dispatch.clear_sm120_moe_caches)


def _take_direct_micro(patch: Callable[[Any, str, Any], None], bed: Bed, dispatch: Any, direct: Any) -> None:
    compile_direct = direct.compile_direct_micro_kernel

    def compile_for_tvm_ffi(kernel: Any, *, topk_ids_dtype: torch.dtype = torch.int32, options: str | None = None) -> Any:
        key = hashlib.sha256(repr((kernel.__cache_key__, topk_ids_dtype)).encode()).hexdigest()[:16]

        def compile_kernel() -> Any:
            from cutlass.cute.runtime import make_fake_stream

            stream = make_fake_stream(use_tvm_ffi_env_stream=True)
            with mock.patch.object(direct, "current_cuda_stream", return_value=stream):
                return compile_direct(kernel, topk_ids_dtype=topk_ids_dtype, options=f"--enable-tvm-ffi {options or ''}".strip())

        return bed.kernel(f"direct_{key}", compile_kernel)

    def launch(compiled: Any, **given: Any) -> None:
        """``MoEDirectMicroKernel.launch`` with what TVM-FFI takes: addresses for pointers, no stream."""
        addresses = [given[name].data_ptr() for name in _DIRECT_POINTERS.split()]
        barriers = [given[name][:1] for name in ("barrier_count", "barrier_epoch")]  # compiled for one element, used as an array
        compiled(*addresses, *barriers, int(given["m"]), int(given["grid_x"]))

    patch(dispatch, "compile_direct_micro_kernel", compile_for_tvm_ffi)
    patch(dispatch, "compiled_direct_micro_accepts_block_dim", lambda compiled, block_dim: True)
    patch(direct.MoEDirectMicroKernel, "launch", staticmethod(launch))
