"""FlashInfer's SM12x kernels: planned once per geometry and device, launched without FlashInfer's own launcher.

``B12xMoEWrapper`` and ``launch_sm120_moe`` compile, fold, expand and validate at every call, cache weights by address, pick the
kernel by rules of their own and add up to four small launches to a call of one token.  Here all of that is done at load.  What
remains of FlashInfer is what makes its kernels: ``moe_dispatch._get_*_kernel``, ``allocate_sm120_static_workspace`` and the
tuning tables, the same from 0.6.17 to 0.7.2; arguments go by the names of the kernels' own signatures.

The dynamic kernel is not used: its warps may miss a claim (docs/flashinfer-dynamic-claim.md), and
:func:`trtllm_b12x.crossover.crossover` ends before it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_b12x import environment, settings
from trtllm_b12x.log import logger

from . import Geometry, Kernel, KernelFeatures, KernelWeights, PlanError, Workspace, first_line
from .self_test import Outcome, examine
from .streams import Turn

_DISPATCH = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_dispatch"
_NO_CACHE = "FLASHINFER_CUTE_DSL_DISABLE_CACHE"
_ACTIVATIONS = {"Swiglu": "silu", "Relu2": "relu2"}
"""Names of the host's ``ActivationType`` to FlashInfer's."""
_OF_THE_CALL = ("a_input", "topk_ids", "topk_weights", "scatter_output")
_COMPILED_IN = ("self", "max_active_clusters", "stream")
FIXED_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56, 64)
"""Token counts that are planned where a kernel is compiled for one only (FlashInfer before 0.7.2): the host's default batch sizes
of CUDA graphs.  Calls of other sizes are CUTLASS's."""


def _features(flashinfer: environment.FlashInfer) -> KernelFeatures:
    return KernelFeatures(
        name="b12x",
        activations=frozenset(_ACTIVATIONS),
        tile=flashinfer.tile,
        hidden_size_multiple=128,
        negative_ids=flashinfer.negative_ids,
        graph_safe=True,
        # From 0.7.0 static keeps each route's result and adds them up in order, in the groups of 256 columns that make its tile.
        deterministic=flashinfer.tile == 256,
        versions="flashinfer-python>=0.6.17" if flashinfer.b12x else "",
    )


@dataclass(frozen=True)
class Kind:
    """One of FlashInfer's kernels, as data."""

    name: str
    deterministic: bool
    skips_negative_ids: bool
    """micro and direct micro compute expert 0 for a negative id and multiply by 0, which is NaN where expert 0 overflows."""
    atomic_sums: bool
    """Adds one bf16 per route and 128 columns to the output, in any order."""


DIRECT_MICRO = Kind("direct_micro", deterministic=True, skips_negative_ids=False, atomic_sums=False)
MICRO = Kind("micro", deterministic=False, skips_negative_ids=False, atomic_sums=True)
STATIC = Kind("static", deterministic=True, skips_negative_ids=True, atomic_sums=False)

_RECIPROCALS = 0.02
"""Relative L2.  Direct micro multiplies by reciprocals of scales also for ReLU2, where the others and the reference divide
(``moe_direct_micro_kernel.py:714``).  Block scales on a rounding tie fall apart, which is frequent where a calibrated amax is a
power of two; seen: 0.014 over many tokens."""

_Launch = Callable[[dict[str, Any], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(what :meth:`B12xKernel.bind` made, x, ids, scales, out); ids and scales flat and contiguous, ids of any integer type."""


@dataclass
class _Candidate:
    """A compiled kernel for one token count."""

    kind: Kind
    launch: _Launch
    variant: int
    """Kernels of one variant are the same code."""


@dataclass
class _Plan:
    """Everything that layers of one geometry share on one device."""

    geometry: Geometry
    device: torch.device
    workspace: Any
    signatures: dict[str, tuple[str, ...]]
    """Kind to the names of its arguments, in order."""
    candidates: dict[int, list[_Candidate]]
    """Token count to what could serve it, best first; after the self-test what may."""
    turn: Turn
    outcomes: list[Outcome] = field(default_factory=list)
    tested: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def nbytes(self) -> int:
        tensors = [value for value in vars(self.workspace).values() if isinstance(value, torch.Tensor)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


_plans: weakref.WeakValueDictionary[tuple[Any, ...], _Plan] = weakref.WeakValueDictionary()
_failed: dict[tuple[Any, ...], str] = {}
_lock = threading.RLock()


class B12xKernel(Kernel):
    """FlashInfer's static, micro and direct micro kernel on one layer: views of its tensors, and the plan of its geometry."""

    features = _features(environment.inspect_flashinfer())

    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Allocate one workspace and compile every kernel for up to ``capacity`` tokens, or share what another layer planned.

        Raises:
            ValueError: an activation or a size that the kernels do not take.
            PlanError: compiling or allocating failed, for every layer of the geometry; nothing is kept.
        """
        if geometry.activation not in _ACTIVATIONS:
            raise ValueError(f"activation {geometry.activation} is none of {', '.join(sorted(_ACTIVATIONS))}")
        if geometry.hidden_size % self.features.hidden_size_multiple or geometry.intermediate_size % self.features.tile:
            raise ValueError(
                f"hidden size {geometry.hidden_size} and intermediate size {geometry.intermediate_size} must be multiples of "
                f"{self.features.hidden_size_multiple} and {self.features.tile}"
            )
        capacity = _fitting(geometry, capacity)
        self.geometry, self.capacity = geometry, capacity
        key = (geometry, capacity, str(device), settings.DETERMINISTIC())
        with _lock:
            if key in _failed:
                raise PlanError(_failed[key])
            plan = _plans.get(key)
            if plan is None:
                try:
                    plan = _plans[key] = _cached_or_not(functools.partial(_make_plan, geometry, capacity, device))
                except Exception as error:
                    _failed[key] = first_line(error)  # not the error, whose frames hold the workspace
                    raise PlanError(_failed[key]) from error
        self._plan, self._key = plan, key
        self._sizes = frozenset(plan.candidates)

    def bind(self, weights: KernelWeights) -> None:
        weights.check(self.geometry)
        self.weights = weights  # the kernels are given addresses: these views keep the memory
        self._bound: dict[str, Any] = {n: _arguments(names, self._plan, weights) for n, names in self._plan.signatures.items()}
        self._bound[DIRECT_MICRO.name] = {
            "w1_fp4": weights.w1_weight,
            "w1_blockscale": weights.w1_weight_sf,
            "w1_alphas": weights.folded_w1_alpha,
            "a1_gscale": weights.input_global_scale,
            "a2_gscale": weights.fc2_input_scale,
            "w2_fp4": weights.w2_weight,
            "w2_blockscale": weights.w2_weight_sf,
            "w2_alphas": weights.w2_alpha,
        }

    def self_test(self) -> None:
        """Run every kernel of the plan on the card, once per plan, and drop those that miss their bound.

        Raises:
            PlanError: no kernel is left for some token count; the message has the numbers.
        """
        plan = self._plan
        with plan.lock:
            if plan.tested:
                return
            started = time.monotonic()
            try:
                plan.outcomes = examine(self._tests(), self.geometry, self.weights, self.capacity)
                bad = {(o.kernel, o.variant) for o in plan.outcomes if not o.passed}
                for tokens, candidates in plan.candidates.items():
                    plan.candidates[tokens] = [c for c in candidates if (c.kind.name, c.variant) not in bad]
                    if not plan.candidates[tokens]:
                        raise PlanError("; ".join(str(o) for o in plan.outcomes if not o.passed))
            except Exception as error:
                with _lock:
                    _plans.pop(self._key, None)
                    _failed[self._key] = first_line(error)
                raise PlanError(_failed[self._key]) from error
            plan.tested = True
            logger.info("b12x kernels for %s: tested in %.2f s", self.geometry, time.monotonic() - started)
            for outcome in plan.outcomes:
                log = logger.debug if outcome.passed else logger.warning
                log("self-test, %s: %s", self.geometry, outcome)

    def _tests(self) -> Iterator[tuple[str, int, int, bool, Callable[..., torch.Tensor]]]:
        """Each compiled kernel once: name, variant, token count, atomic sums, and how to run it."""
        seen = set()
        for tokens in sorted(self._plan.candidates, reverse=True):
            for candidate in self._plan.candidates[tokens]:
                if (candidate.kind.name, candidate.variant) not in seen:
                    seen.add((candidate.kind.name, candidate.variant))
                    run = functools.partial(self._launch, candidate)
                    # Before 0.7.0 static adds up in atomics too.
                    atomic = candidate.kind.atomic_sums or not self.features.deterministic
                    yield candidate.kind.name, candidate.variant, tokens, atomic, run

    def serves(self, tokens: int) -> bool:
        return tokens in self._sizes

    def rounding(self, tokens: int) -> float:
        kind = self._plan.candidates[tokens][0].kind
        if kind is DIRECT_MICRO:
            return 0.0 if self.geometry.gated else _RECIPROCALS
        return self.geometry.atomic_rounding if kind.atomic_sums or not self.features.deterministic else 0.0

    def summary(self) -> tuple[str, ...]:
        served: dict[str, list[int]] = {}
        for tokens, candidates in self._plan.candidates.items():
            served.setdefault(candidates[0].kind.name, []).append(tokens)
        lines = [f"{name}: {_ranges(sizes)} tokens" for name, sizes in served.items()]
        return (*lines, *(f"left out: {outcome}" for outcome in self._plan.outcomes if not outcome.passed))

    @property
    def workspace(self) -> Workspace | None:
        return Workspace(id(self._plan), self._plan.nbytes())

    def run(
        self,
        x: torch.Tensor,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        candidates = self._plan.candidates.get(x.shape[0])
        if candidates is None:
            planned = _ranges(sorted(self._sizes))
            raise ValueError(
                f"no kernel is planned for {x.shape[0]} tokens, only for {planned}: plan() with a capacity that covers it"
            )
        return self._launch(candidates[0], x, token_selected_experts, token_final_scales, out)

    def _launch(
        self,
        candidate: _Candidate,
        x: torch.Tensor,
        ids: torch.Tensor,
        scales: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = _aligned(x.contiguous())
        scales, ids = scales.to(torch.float32).contiguous(), ids.contiguous()
        direct = out is not None and out.is_contiguous() and out.data_ptr() % 16 == 0
        result = out if direct and out is not None else torch.empty_like(x)
        with self._plan.turn:
            candidate.launch(self._bound, x, ids.view(-1), scales.view(-1), result)
        return result if out is None or direct else out.copy_(result)


def _ranges(numbers: list[int]) -> str:
    """``[1, 2, 3, 8]`` to ``1-3, 8``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


# ---- planning ------------------------------------------------------------------------------------------------------------


def _cached_or_not(make: Callable[[], _Plan]) -> _Plan:
    """``make()``; once more without FlashInfer's kernel cache where that is what failed, as in a home that cannot be written."""
    before = os.environ.get(_NO_CACHE, "0")
    try:
        return make()
    except OSError as error:
        if before == "1":
            raise
        advice = "FLASHINFER_WORKSPACE_BASE names another folder"
        logger.warning("FlashInfer cannot use its kernel cache, kernels are compiled at every start: %s (%s)", error, advice)
    os.environ[_NO_CACHE] = "1"
    try:
        return make()
    finally:
        os.environ[_NO_CACHE] = before


def _make_plan(geometry: Geometry, capacity: int, device: torch.device) -> _Plan:
    started = time.monotonic()
    logger.info("b12x kernels for %s: compiling, or loading from FlashInfer's cache", geometry)
    dispatch = importlib.import_module(_DISPATCH)
    workspace = dispatch.allocate_sm120_static_workspace(
        state_E=geometry.num_experts,
        weight_E=geometry.num_experts,
        max_rows=capacity * geometry.top_k,
        k=geometry.hidden_size,
        n=geometry.intermediate_size,
        num_topk=geometry.top_k,
        device=device,
    )
    plan = _Plan(geometry, device, workspace, _signatures(dispatch), {}, Turn.of(device))
    make = _Maker(dispatch, plan)
    for tokens in _sizes(dispatch, capacity):
        plan.candidates[tokens] = list(make.candidates(tokens))
    seconds = time.monotonic() - started
    logger.info("b12x kernels for %s: %d in %.1f s", geometry, len(make.variants), seconds)
    return plan


def _fitting(geometry: Geometry, capacity: int) -> int:
    """As many tokens up to ``capacity`` as FlashInfer has 32-bit offsets for in its largest plane, the packed activations.

    ``(experts + rows / 32) x rows x hidden_size / 2`` bytes (``_check_memref_limit``, moe_dispatch.py:148 of 0.7.2.post1).
    """

    def plane(tokens: int) -> int:
        rows = tokens * geometry.top_k
        return (geometry.num_experts + -(-rows // 32)) * rows * geometry.hidden_size // 2

    return next((tokens for tokens in range(capacity, 1, -1) if plane(tokens) < 2**31), 1)


def _sizes(dispatch: Any, capacity: int) -> list[int]:
    """Every token count from 0.7.2 on, whose static kernel does not depend on it."""
    key = getattr(dispatch, "_static_kernel_cache_key", None)
    free = key is not None and "m" not in inspect.signature(key).parameters
    return [size for size in (range(1, capacity + 1) if free else FIXED_SIZES) if size <= capacity]


def _signatures(dispatch: Any) -> dict[str, tuple[str, ...]]:
    """The run-time arguments of static and micro, by name.

    Raises:
        ValueError: FlashInfer's kernels take an argument that is not known here.
    """
    found = {}
    for kind, kernel in ((STATIC, dispatch.MoEStaticKernel), (MICRO, dispatch.MoEMicroKernel)):
        names = tuple(name for name in inspect.signature(kernel.__call__).parameters if name not in _COMPILED_IN)
        unknown = [name for name in names if name not in _OF_THE_CALL and name not in _SOURCES]
        if unknown:
            raise ValueError(f"FlashInfer's {kind.name} kernel takes {', '.join(unknown)}, which this trtllm-b12x does not know")
        found[kind.name] = names
    return found


_SOURCES: dict[str, Callable[[Any, KernelWeights], Any]] = {
    # Workspace and weights to the kernels' arguments (moe_dispatch.py:1774 of 0.7.2.post1); pointers go as integers.
    "packed_a": lambda ws, w: ws.packed_a_view,
    "sfa_ptr": lambda ws, w: ws.packed_input_scale.data_ptr(),
    "packed_a_storage": lambda ws, w: ws.packed_a_flat,
    "route_output_scratch": lambda ws, w: ws.route_output_scratch.view(-1),
    "scale_storage": lambda ws, w: ws.scale_flat,
    "barrier_count": lambda ws, w: ws.barrier_count,
    "barrier_epoch": lambda ws, w: ws.barrier_epoch,
    "b_w13": lambda ws, w: w.w1_weight.permute(1, 2, 0).view(torch.float4_e2m1fn_x2),
    "sfb_w13_ptr": lambda ws, w: w.w1_weight_sf.data_ptr(),
    "b_down": lambda ws, w: w.w2_weight.permute(1, 2, 0).view(torch.float4_e2m1fn_x2),
    "sfb_down_ptr": lambda ws, w: w.w2_weight_sf.data_ptr(),
    "row_counts": lambda ws, w: ws.row_counts,
    "active_expert_count": lambda ws, w: ws.active_expert_count,
    "weight_expert_ids": lambda ws, w: ws.weight_expert_ids,
    "global_to_local_expert": lambda ws, w: ws.global_to_local_expert,
    "virt_route_scratch": lambda ws, w: ws.virt_route_scratch,
    "input_global_scale": lambda ws, w: w.input_global_scale,
    "alpha": lambda ws, w: w.folded_w1_alpha,
    "down_alpha": lambda ws, w: w.w2_alpha,
    "global_scale": lambda ws, w: w.fc2_input_scale,
    "token_map": lambda ws, w: ws.token_map,
    "token_weights": lambda ws, w: ws.token_weights,
}


def _arguments(names: tuple[str, ...], plan: _Plan, weights: KernelWeights) -> list[Any]:
    """In the kernel's order, None for those of the call."""
    return [None if name in _OF_THE_CALL else _SOURCES[name](plan.workspace, weights) for name in names]


class _Maker:
    """Compiles the kernels of one plan, in the sizes and with the grids that FlashInfer's launcher would choose."""

    def __init__(self, dispatch: Any, plan: _Plan) -> None:
        self.dispatch, self.plan = dispatch, plan
        self.activation = _ACTIVATIONS[plan.geometry.activation]
        self.variants: dict[int, int] = {}
        sms = dispatch.get_num_sm(torch.device("cuda"))
        self.most_clusters = min(dispatch.get_max_active_clusters(1), sms)
        self.positions: dict[str, Any] = {
            kind: tuple(names.index(name) for name in _OF_THE_CALL) for kind, names in plan.signatures.items()
        }
        self.slots = torch.arange(plan.geometry.top_k, dtype=torch.int32, device=plan.device)
        self.count = torch.full((1,), plan.geometry.top_k, dtype=torch.int32, device=plan.device)
        # Without a gate both input scales are the same for all experts, which FlashInfer tells by tensors of one element.
        self.shared = not plan.geometry.gated

    def candidates(self, tokens: int) -> Iterator[_Candidate]:
        """What FlashInfer would take for so many tokens (moe_dispatch.py:1552 and :1636 of 0.7.2.post1), and static behind it."""
        d, g = self.dispatch, self.plan.geometry
        small = False
        for kind, compiled in ((DIRECT_MICRO, self._direct_micro), (MICRO, self._micro), (STATIC, self._static)):
            if g.expert_parallel and not kind.skips_negative_ids:
                continue
            if settings.DETERMINISTIC() and not kind.deterministic:
                continue
            if kind is not STATIC and tokens > getattr(d, "_MICRO_MAX_TOKENS", 0):
                continue
            found = None if small and kind is MICRO else compiled(tokens)
            if found is not None:
                small = True
                function, launch = found
                yield _Candidate(kind, launch, self._variant(function))

    def _variant(self, function: Any) -> int:
        return self.variants.setdefault(id(function), len(self.variants))

    def _static(self, tokens: int) -> tuple[Any, _Launch]:
        d, g = self.dispatch, self.plan.geometry
        rows = tokens * g.top_k
        clusters = min(d._lookup_mac_ladder(d._STATIC_MAC_LADDER, rows) or self.most_clusters, self.most_clusters)
        if rows < 40:
            clusters = min(clusters, 64)
        function, _ = d._get_static_kernel(**self._sizes(tokens), mac_override=clusters)
        return function, _Plain(function, STATIC.name, self.positions[STATIC.name])

    def _micro(self, tokens: int) -> tuple[Any, _Launch] | None:
        d, g, ws = self.dispatch, self.plan.geometry, self.plan.workspace
        rows = tokens * g.top_k
        if rows > (d._MICRO_COMPACT_CUTOVER_PAIRS_MULTI_TOPK if g.top_k > 1 else d._MICRO_COMPACT_CUTOVER_PAIRS):
            return None
        tiles = rows * max(1, -(-g.intermediate_size // 128))
        clusters = min(d._lookup_mac_ladder(d._MICRO_MAC_LADDER, rows) or self.most_clusters, tiles, self.most_clusters)
        function, _ = d._get_micro_kernel(
            **self._sizes(tokens),
            share_input_across_experts=self.shared and tokens == 1,
            share_expert_scales=self.shared,
            single_token=tokens == 1,
            mac_override=clusters,
        )
        at = self.positions[MICRO.name]
        if tokens == 1 and not g.gated:
            return function, _Plain(function, MICRO.name, at)
        if tokens == 1:
            count_at = self.plan.signatures[MICRO.name].index("active_expert_count")
            return function, _OneToken(function, at, count_at, self.slots, self.count, ws.weight_expert_ids[: g.top_k])
        compact = importlib.import_module(_DISPATCH.replace("moe_dispatch", "triton_compact")).compact_topk_ids
        into = (ws.compact_topk_ids[:rows], ws.weight_expert_ids, ws.active_expert_count)
        if self.plan.device.type == "cuda":  # Triton compiles per type, now rather than at a host's first call
            for dtype in (torch.int32, torch.int64):
                compact(torch.zeros(rows, dtype=dtype, device=self.plan.device), *into)
        return function, _Compacted(function, at, compact, into)

    def _direct_micro(self, tokens: int) -> tuple[Any, _Launch] | None:
        d, g, ws = self.dispatch, self.plan.geometry, self.plan.workspace
        rows, barriers = tokens * g.top_k, getattr(ws, "dm_barrier_count", None)
        if barriers is None or barriers.numel() < rows + tokens * 16:
            return None
        # Before 0.7.2 it multiplied by the input scales that all others divide by (docs/flashinfer-direct-micro-scales.md).
        if "input_scales_are_reciprocal" not in inspect.signature(d._get_direct_micro_kernel).parameters:
            return None
        sizes = (tokens, g.hidden_size, g.intermediate_size, g.top_k, g.num_experts)
        if rows >= d._DIRECT_MICRO_CUTOVER_PAIRS or g.intermediate_size > d._DIRECT_MICRO_MAX_N:
            return None
        if not d.MoEDirectMicroKernel.is_supported(*sizes):
            return None
        function, grid, fits = d._get_direct_micro_kernel(
            weight_E=g.num_experts,
            m=tokens,
            k=g.hidden_size,
            n=g.intermediate_size,
            num_topk=g.top_k,
            topk_ids_dtype=torch.int32,
            share_input_across_experts=self.shared and tokens == 1,
            share_expert_scales=self.shared,
            activation=self.activation,
            device=self.plan.device,
        )
        if not fits:
            return None
        fixed = {
            "inter_fp32": ws.dm_intermediate,
            "barrier_count": ws.dm_barrier_count,
            "barrier_epoch": ws.dm_barrier_epoch,
            "m": tokens,
            "grid_x": grid,
        }
        return function, _Direct(d.MoEDirectMicroKernel.launch, function, fixed)

    def _sizes(self, tokens: int) -> dict[str, Any]:
        g, ws = self.plan.geometry, self.plan.workspace
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


# ---- launching -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plain:
    """One launch with the routes as they come."""

    function: Any
    kind: str
    at: tuple[int, int, int, int]
    """Places of x, ids, scales and out."""

    def __call__(self, bound: dict[str, Any], x: Any, ids: Any, scales: Any, out: Any) -> None:
        call = bound[self.kind].copy()
        call[self.at[0]], call[self.at[1]], call[self.at[2]], call[self.at[3]] = x, _int32(ids), scales, out
        self.function(*call)


@dataclass(frozen=True)
class _OneToken:
    """Micro on one token with a gate: every slot is an expert of its own.  Of FlashInfer's four helper launches, three make
    constants; the fourth copies the ids, and casts them."""

    function: Any
    at: tuple[int, int, int, int]
    count_at: int
    slots: torch.Tensor
    count: torch.Tensor
    experts: torch.Tensor

    def __call__(self, bound: dict[str, Any], x: Any, ids: Any, scales: Any, out: Any) -> None:
        self.experts.copy_(ids)
        call = bound[MICRO.name].copy()
        call[self.at[0]], call[self.at[1]], call[self.at[2]], call[self.at[3]] = x, self.slots, scales, out
        call[self.count_at] = self.count
        self.function(*call)


@dataclass(frozen=True)
class _Compacted:
    """Micro on several tokens: FlashInfer's Triton kernel numbers the experts that occur; it takes any integers, and compiles
    once more for an address that is not aligned."""

    function: Any
    at: tuple[int, int, int, int]
    compact: Callable[..., None]
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def __call__(self, bound: dict[str, Any], x: Any, ids: Any, scales: Any, out: Any) -> None:
        self.compact(_aligned(ids), *self.into)
        call = bound[MICRO.name].copy()
        call[self.at[0]], call[self.at[1]], call[self.at[2]], call[self.at[3]] = x, self.into[0], scales, out
        self.function(*call)


@dataclass(frozen=True)
class _Direct:
    """``MoEDirectMicroKernel.launch``, by keywords; it assumes that every address is aligned."""

    launch: Callable[..., None]
    function: Any
    fixed: dict[str, Any]

    def __call__(self, bound: dict[str, Any], x: Any, ids: Any, scales: Any, out: Any) -> None:
        call = bound[DIRECT_MICRO.name]
        ids, scales = _aligned(_int32(ids)), _aligned(scales)
        self.launch(self.function, x=x, topk_ids=ids, topk_weights=scales, out=out, **self.fixed, **call)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """At an address that the kernels can load 16 bytes from: a chunk of a longer call may begin anywhere."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _int32(ids: torch.Tensor) -> torch.Tensor:
    return ids if ids.dtype is torch.int32 else ids.to(torch.int32)
