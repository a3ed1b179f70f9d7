"""The kernels of one geometry, compiled or loaded from FlashInfer's cache.

What remains of FlashInfer is what makes its kernels: ``moe_dispatch._get_static_kernel``, ``build_direct_micro_kernel``,
``compile_direct_micro_kernel``, ``build_and_load_cute_dsl_kernel`` and the tuning tables, the same from 0.6.18 to 0.7.2. Both
kinds come through TVM-FFI, which takes the stream of the call, and are kept on disk.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.core import locks, process, settings
from trtllm_b12x.environment import prove
from trtllm_b12x.kernels import Geometry, PlanError
from trtllm_b12x.kernels.cards import card_of
from trtllm_b12x.kernels.triton import jit_monitor

from .launch import DIRECT_MICRO, STATIC, Kind, Launch, Signature
from .scratch import Scratch

DISPATCH = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_dispatch"
_DIRECT = DISPATCH.replace("moe_dispatch", "moe_direct_micro_kernel")
ACTIVATIONS = {"Swiglu": "silu", "Relu2": "relu2"}
"""Names of the host's ``ActivationType`` to FlashInfer's."""
FIXED_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56, 64)
"""Token counts that are planned where a kernel is compiled for one only (FlashInfer before 0.7.2): the host's default batch sizes
of CUDA graphs.  Calls of other sizes are CUTLASS's."""
_COMPILED_IN = ("self", "max_active_clusters", "stream")

_compiled: dict[tuple[Any, ...], Any] = {}
"""Kernels that FlashInfer keeps no hold of.  Never emptied: a captured graph launches them without holding them."""
_lock = locks.new()


@dataclass
class Candidate:
    """A compiled kernel for one token count."""

    kind: Kind
    launch: Launch
    variant: int
    """Kernels of one variant are the same code."""


def sizes(dispatch: Any, capacity: int) -> list[int]:
    """Every token count from 0.7.2 on, whose static kernel does not depend on it."""
    key = getattr(dispatch, "_static_kernel_cache_key", None)
    free = key is not None and "m" not in inspect.signature(key).parameters
    return [size for size in (range(1, capacity + 1) if free else FIXED_SIZES) if size <= capacity]


def signatures(dispatch: Any) -> dict[str, Signature]:
    """The run-time arguments of each kind.

    Raises:
        ValueError: FlashInfer's kernels take an argument that is not known here.
    """
    kernels = {STATIC: dispatch.MoEStaticKernel, DIRECT_MICRO: dispatch.MoEDirectMicroKernel}
    found = {}
    for kind, kernel in kernels.items():
        names = tuple(name for name in inspect.signature(kernel.__call__).parameters if name not in _COMPILED_IN)
        found[kind.name] = Signature(kind, names)
    return found


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

    Inside TensorRT-LLM the first compile of an installation runs in a child: it might end the server's process.
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
    """Makes the candidates of one geometry, in the sizes and with the grids that FlashInfer's launcher would choose."""

    def __init__(
        self,
        dispatch: Any,
        geometry: Geometry,
        scratch: Scratch,
        device: torch.device,
        build: Callable[..., Any] | None = None,
    ) -> None:
        """
        Args:
            build: instead of FlashInfer's ``build_and_load_cute_dsl_kernel``, which compiles what its cache does not hold.
        """
        self.dispatch, self.geometry, self.scratch, self.device = dispatch, geometry, scratch, device
        remedy = jit_monitor.remedy(geometry, card_of(device))
        self._build = build or functools.partial(_build, dispatch.build_and_load_cute_dsl_kernel, remedy, device)
        self.signatures = signatures(dispatch)
        self.activation = ACTIVATIONS[geometry.activation]
        self.variants: dict[int, int] = {}
        sms = dispatch.get_num_sm(torch.device("cuda"))
        self.most_clusters = min(dispatch.get_max_active_clusters(1), sms)
        # Without a gate both input scales are the same for all experts, which FlashInfer tells by tensors of one element.
        self.shared = not geometry.gated

    def candidates(self, tokens: int) -> Iterator[Candidate]:
        """Yield direct micro if it serves so many tokens (moe_dispatch.py:1552 of 0.7.2.post1), and static behind it.

        FlashInfer's micro kernel is not used: no release has its barrier (docs/flashinfer-micro-barrier.md).
        """
        makers: tuple[tuple[Kind, Callable[[int], Launch | None]], ...] = (
            (DIRECT_MICRO, self._direct_micro),
            (STATIC, self._static),
        )
        for kind, make in makers:
            if self.geometry.expert_parallel and not kind.skips_negative_ids:
                continue
            launch = make(tokens)
            if launch is not None:
                yield Candidate(kind, launch, self.variants.setdefault(id(launch.function), len(self.variants)))

    def _static(self, tokens: int) -> Launch:
        d, rows = self.dispatch, tokens * self.geometry.top_k
        clusters = min(d._lookup_mac_ladder(d._STATIC_MAC_LADDER, rows) or self.most_clusters, self.most_clusters)
        if rows < 40:
            clusters = min(clusters, 64)
        get = _with_globals(d._get_static_kernel, build_and_load_cute_dsl_kernel=self._build)
        function, _ = get(**self._sizes(tokens), mac_override=clusters)
        return Launch(function, self.signatures[STATIC.name])

    def _direct_micro(self, tokens: int) -> Launch | None:
        d, g, ws = self.dispatch, self.geometry, self.scratch.workspace
        if tokens > getattr(d, "_MICRO_MAX_TOKENS", 0):
            return None
        rows, barriers = tokens * g.top_k, getattr(ws, "dm_barrier_count", None)
        if barriers is None or barriers.numel() < rows + tokens * 16:
            return None
        direct = importlib.import_module(_DIRECT)
        # Before 0.7.2 it multiplied by the input scales that all others divide by (docs/flashinfer-direct-micro-scales.md).
        if "input_scales_are_reciprocal" not in inspect.signature(direct.build_direct_micro_kernel).parameters:
            return None
        if rows >= d._DIRECT_MICRO_CUTOVER_PAIRS or g.intermediate_size > d._DIRECT_MICRO_MAX_N:
            return None
        size = (tokens, g.hidden_size, g.intermediate_size, g.top_k, g.num_experts)
        if not d.MoEDirectMicroKernel.is_supported(*size):
            return None
        kernel = direct.build_direct_micro_kernel(
            g.num_experts,
            tokens,
            *size[1:4],
            activation=self.activation,
            fast_math=True,
            share_input_across_experts=self.shared and tokens == 1,
            share_expert_scales=self.shared,
            single_token=tokens == 1,
            device=self.device,
        )
        constants = {"m_val": tokens, "grid_x": kernel.grid_x}
        return Launch(self._compiled_direct(direct, kernel), self.signatures[DIRECT_MICRO.name], constants=constants)

    def _compiled_direct(self, direct: Any, kernel: Any) -> Any:
        """As FlashInfer compiles it, but through TVM-FFI and its cache on disk, as the other kinds.

        The body is compiled for its own block size, so that registers cannot keep it from being launched.
        """
        d = self.dispatch
        key = ("direct_micro", kernel.__cache_key__)
        with _lock:
            if key not in _compiled:
                runtime = importlib.import_module("cutlass.cute.runtime")
                compile_kernel = _with_globals(
                    direct.compile_direct_micro_kernel,
                    current_cuda_stream=lambda: runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
                )
                # A module of its own: FlashInfer empties one whose sources are not those of the last kernel.
                _compiled[key] = self._build(
                    f"{d._CUTE_DSL_MODULE}_direct_micro",
                    d._disk_kernel_name("direct_micro", key),
                    lambda: compile_kernel(kernel, topk_ids_dtype=torch.int32, options="--enable-tvm-ffi"),
                    extra_key_files=(*d._kernel_source_files(), direct.__file__),
                )
            return _compiled[key]

    def _sizes(self, tokens: int) -> dict[str, Any]:
        g, ws = self.geometry, self.scratch.workspace
        return {
            "state_E": int(ws.row_counts.shape[0]),
            "weight_E": g.num_experts,
            "m": tokens,
            "k": g.hidden_size,
            "n": g.intermediate_size,
            "num_topk": g.top_k,
            "max_rows": ws.max_rows,
            "topk_ids_dtype": torch.int32,
            "activation": self.activation,
        }


def _with_globals(function: Any, **replaced: Any) -> Any:
    """Return a copy of ``function`` for which some names of its module mean something else."""
    module = {**function.__globals__, **replaced}
    copy = types.FunctionType(function.__code__, module, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
