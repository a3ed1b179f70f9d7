# SPDX-License-Identifier: Apache-2.0
"""The kernels of one geometry, compiled or loaded from FlashInfer's cache.

FlashInfer only builds the kernels, by ``moe_dispatch._get_static_kernel``, ``build_direct_micro_kernel``,
``compile_direct_micro_kernel``, ``build_and_load_cute_dsl_kernel`` and its tuning tables, the same from 0.6.18 to 0.7.2. TVM-FFI
launches both kinds on the stream of the call. FlashInfer's cache stores both on disk.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trtllm_b12x.core import locks, process, settings
from trtllm_b12x.environment import payload_child, prove
from trtllm_b12x.kernels import Geometry, PlanError
from trtllm_b12x.kernels.cards import card_of, warmup_command

from .launch import DIRECT_MICRO, STATIC, B12xKernelKind, Candidate, Signature
from .scratch import Scratch

DISPATCH = payload_child.DISPATCH
ACTIVATIONS = {"Swiglu": "silu", "Relu2": "relu2"}
"""FlashInfer's activation by name of TensorRT-LLM's ``ActivationType``."""
FIXED_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56, 64)
"""Token counts to plan if each kernel is compiled for a single count (FlashInfer before 0.7.2): the engine's default batch sizes
of CUDA graphs. Triton kernels or CUTLASS serve other counts."""

_compiled: dict[tuple[Any, ...], Any] = {}
"""Kernels to which FlashInfer has no reference. They stay, since captured graphs launch them without a reference."""
_lock = locks.new()


def sizes(dispatch: Any, capacity: int) -> list[int]:
    """Return the token counts to plan: all counts from FlashInfer 0.7.2 on, whose static kernel does not depend on the count."""
    key = getattr(dispatch, "_static_kernel_cache_key", None)
    free = key is not None and "m" not in inspect.signature(key).parameters
    return [size for size in (range(1, capacity + 1) if free else FIXED_SIZES) if size <= capacity]


def signatures(dispatch: Any) -> dict[str, Signature]:
    """Return the run-time arguments of each kind. Raise ValueError if a FlashInfer kernel takes an unknown argument."""
    return {kind.name: Signature(kind, dispatch) for kind in (STATIC, DIRECT_MICRO)}


def _build(
    build: Callable[..., Any],
    remedy: str,
    device: torch.device,
    module: str,
    name: str,
    compile_kernel: Callable[[], Any],
    **others: Any,
) -> Any:
    """Load a kernel from FlashInfer's cache, or compile it.

    Inside an engine, an installation's first compile runs in a child process, since it might end the server's process.
    """

    def compile_now() -> Any:
        if settings.FREEZE():
            raise PlanError(f"{name} is not in FlashInfer's cache, and none is compiled: {settings.FREEZE.name}=1 ({remedy})")
        if process.in_server and device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            if error := prove.compile_error(f"sm_{major}{minor}a"):
                raise PlanError(error)
        return compile_kernel()

    return build(module, name, compile_now, **others)


class Compiler:
    """Compiler of one geometry's candidates, in the sizes and with the grids that FlashInfer's launcher would choose."""

    def __init__(
        self, dispatch: Any, geometry: Geometry, scratch: Scratch, device: torch.device, build: Callable[..., Any] | None = None
    ) -> None:
        """``build`` replaces FlashInfer's ``build_and_load_cute_dsl_kernel``, which compiles kernels that its cache lacks."""
        self.dispatch, self.geometry, self.workspace, self.device = dispatch, geometry, scratch.workspace, device
        remedy = warmup_command(geometry, card_of(device))
        self._build = build or functools.partial(_build, dispatch.build_and_load_cute_dsl_kernel, remedy, device)
        self.signatures = signatures(dispatch)
        self.variants: dict[int, int] = {}
        sms = dispatch.get_num_sm(torch.device("cuda"))
        self.max_clusters = min(dispatch.get_max_active_clusters(1), sms)

    def candidates(self, tokens: int) -> Iterator[Candidate]:
        """Yield direct micro if it serves ``tokens`` (moe_dispatch.py:1552 of 0.7.2.post1), then static.

        FlashInfer's micro kernel is not used: it lacks a barrier in every release (docs/flashinfer-micro-barrier.md).
        """
        if not self.geometry.expert_parallel and (kernel := self._direct_micro(tokens)) is not None:
            yield self._candidate(DIRECT_MICRO, self._compiled_direct(kernel), m_val=tokens, grid_x=kernel.grid_x)
        yield self._candidate(STATIC, self._static(tokens))

    def _candidate(self, kind: B12xKernelKind, function: Any, **constants: Any) -> Candidate:
        signature, variant = self.signatures[kind.name], self.variants.setdefault(id(function), len(self.variants))
        places = {signature.names.index(name): value for name, value in constants.items()}
        return Candidate(function, signature, variant, places)

    def _static(self, tokens: int) -> Any:
        d, g, ws, rows = self.dispatch, self.geometry, self.workspace, tokens * self.geometry.top_k
        clusters = min(d._lookup_mac_ladder(d._STATIC_MAC_LADDER, rows) or self.max_clusters, self.max_clusters)
        if rows < 40:
            clusters = min(clusters, 64)
        get = _with_globals(d._get_static_kernel, build_and_load_cute_dsl_kernel=self._build)
        function, _ = get(
            state_E=int(ws.row_counts.shape[0]),
            weight_E=g.num_experts,
            m=tokens,
            k=g.hidden_size,
            n=g.intermediate_size,
            num_topk=g.top_k,
            max_rows=ws.max_rows,
            topk_ids_dtype=torch.int32,
            activation=ACTIVATIONS[g.activation],
            mac_override=clusters,
        )
        return function

    def _direct_micro(self, tokens: int) -> Any:
        """Return FlashInfer's uncompiled kernel object, or None if direct micro does not serve ``tokens``."""
        d, g = self.dispatch, self.geometry
        rows, barriers = tokens * g.top_k, getattr(self.workspace, "dm_barrier_count", None)
        if tokens > getattr(d, "_MICRO_MAX_TOKENS", 0) or barriers is None or barriers.numel() < rows + tokens * 16:
            return None
        build = self._direct.build_direct_micro_kernel
        # Before 0.7.2 it multiplied by the input scales by which other kernels divide (docs/flashinfer-direct-micro-scales.md).
        if "input_scales_are_reciprocal" not in inspect.signature(build).parameters:
            return None
        if rows >= d._DIRECT_MICRO_CUTOVER_PAIRS or g.intermediate_size > d._DIRECT_MICRO_MAX_N:
            return None
        sizes = tokens, g.hidden_size, g.intermediate_size, g.top_k
        if not d.MoEDirectMicroKernel.is_supported(*sizes, g.num_experts):
            return None
        # Without a gate, all experts share both input scales. FlashInfer detects this by tensors of one element.
        shared = not g.gated
        return build(
            g.num_experts,
            *sizes,
            activation=ACTIVATIONS[g.activation],
            fast_math=True,
            share_input_across_experts=shared and tokens == 1,
            share_expert_scales=shared,
            single_token=tokens == 1,
            device=self.device,
        )

    @functools.cached_property
    def _direct(self) -> Any:
        return importlib.import_module(DISPATCH.replace("moe_dispatch", "moe_direct_micro_kernel"))

    def _compiled_direct(self, kernel: Any) -> Any:
        """Compile as FlashInfer does, but through TVM-FFI and FlashInfer's cache on disk, like the static kernel.

        The body is compiled for its own block size, so that its registers never prevent a launch.
        """
        d, direct, key = self.dispatch, self._direct, ("direct_micro", kernel.__cache_key__)
        with _lock:
            if key not in _compiled:
                runtime = importlib.import_module("cutlass.cute.runtime")
                compile_kernel = _with_globals(
                    direct.compile_direct_micro_kernel,
                    current_cuda_stream=lambda: runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
                )
                # The kernel has its own module: FlashInfer empties a module if the sources of its last kernel differ.
                _compiled[key] = self._build(
                    f"{d._CUTE_DSL_MODULE}_direct_micro",
                    d._disk_kernel_name("direct_micro", key),
                    lambda: compile_kernel(kernel, topk_ids_dtype=torch.int32, options="--enable-tvm-ffi"),
                    extra_key_files=(*d._kernel_source_files(), direct.__file__),
                )
            return _compiled[key]


def _with_globals(function: Any, **replaced: Any) -> Any:
    """Return a copy of ``function`` with some globals of its module replaced."""
    module = {**function.__globals__, **replaced}
    copy = types.FunctionType(function.__code__, module, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
