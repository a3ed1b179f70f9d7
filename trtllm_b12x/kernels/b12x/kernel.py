# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's SM12x kernels: planned once per geometry and device, launched without FlashInfer's own launcher.

``B12xMoEWrapper`` and ``launch_sm120_moe`` compile, fold, expand and validate at every call, cache weights by address, and add up
to four small launches to a call of one token. This class does the work at load time. The dynamic kernel is not used: its warps
may miss a claim (docs/flashinfer-dynamic-claim.md), and it starts above the family's ``most_routes``.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtllm_b12x import environment
from trtllm_b12x.core.log import logger
from trtllm_b12x.decision import OLDEST_FLASHINFER, families, version_tuple
from trtllm_b12x.formats import constants
from trtllm_b12x.formats.nvfp4 import NVFP4Weights
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.cards import card_of, warmup_command
from trtllm_b12x.kernels.plans import Plan, PlannedKernel
from trtllm_b12x.kernels.reference import ReferenceKernel
from trtllm_b12x.kernels.routes import ExpertRange
from trtllm_b12x.kernels.self_test import Run, SelfTestCase, SelfTestResult, run_self_test

from . import precompile, routes
from .compiler import DISPATCH, Candidate, Compiler, sizes
from .launch import DIRECT_MICRO
from .scratch import Scratch, fitting
from .streams import StreamSerializer

_RECIPROCALS = 0.02
"""Relative L2. Direct micro multiplies by reciprocals of scales also for ReLU2, where other kernels and the reference divide
(``moe_direct_micro_kernel.py:714``). Block scales on a rounding tie differ, which is frequent if a calibrated amax is a power of
two. An error of 0.014 over many tokens was seen."""


@dataclass
class _Plan(Plan):
    scratch: Scratch
    """Memory of eager calls; captured calls have memory from ``of_capture``."""
    pristine: torch.Tensor
    candidates: dict[int, list[Candidate]]
    """Candidates by token count, best first; after the self-test only those that passed."""
    serializer: StreamSerializer
    captured: tuple[int, Scratch] | None = None

    def of_capture(self, capture: int) -> Scratch:
        """Return scratch memory for the graph under capture, from the graph's own memory, which lives as long as the graph.

        So replays may overlap with each other and with eager calls. Layers of one graph share the memory. Captures that share a
        pool, whose graphs never replay at the same time, get the same memory again once it is released.
        """
        if self.captured is None or self.captured[0] != capture:
            self.captured = None
            self.captured = capture, self.scratch.another(self.pristine)
        return self.captured[1]


class B12xKernel(PlannedKernel):
    """FlashInfer's static and direct micro kernel on one layer: views of its tensors, and the plan of its geometry."""

    _flashinfer = environment.inspect_flashinfer()
    features = families.b12x(_flashinfer)
    instruction = "kind::mxf4nvf4"
    reference = ReferenceKernel

    @classmethod
    def available(cls) -> bool:
        return version_tuple(cls._flashinfer.flashinfer or "") >= OLDEST_FLASHINFER

    @classmethod
    def assembled(cls, geometry: Geometry, card: Any, directory: Path) -> list[str]:
        """Compile static for two tokens with FlashInfer's own compile function, 0.6.18 to 0.7.2. Return the PTX."""
        target = f"sm_{card.capability}a"
        os.environ.update(CUTE_DSL_ARCH=target, CUTE_DSL_KEEP_PTX="1", CUTE_DSL_DUMP_DIR=str(directory))
        os.environ.update({"CUTE_DSL_DISABLE_FILE_CACHING": "1", "FLASHINFER_CUTE_DSL_DISABLE_CACHE": "1"})
        precompile.describe(card.multiprocessors, target)
        dispatch, e = importlib.import_module(DISPATCH), geometry.num_experts
        sizes = {"k": geometry.hidden_size, "n": geometry.intermediate_size, "num_topk": geometry.top_k}
        dispatch._get_static_kernel(e, e, m=2, max_rows=2 * geometry.top_k, **sizes)
        return [path.read_text(errors="replace") for path in directory.glob("*.ptx")]

    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        self.check(geometry, (self.features.hidden_size_multiple, self.features.tile))
        asked, capacity = capacity, fitting(geometry, capacity)
        self.geometry, self.capacity, self.device = geometry, capacity, device
        self.limited = f"FlashInfer has no offsets for more than {capacity} tokens of this geometry" if capacity < asked else ""
        self._share(("b12x", geometry, capacity, str(device)), lambda: _make_plan(geometry, capacity, device))

    def bind(self, weights: NVFP4Weights, first_expert: int = 0) -> None:
        weights.check(self.geometry)
        self.weights = weights  # the kernels take addresses, so these views keep the memory alive
        self.first_expert = first_expert
        self._bound = self._bind_to(self._plan.scratch)
        count = self.geometry.num_experts
        self._tables = {True: ExpertRange(first_expert, count), False: ExpertRange(first_expert, count, unrouted=0)}

    def _bind_to(self, scratch: Scratch) -> dict[str, list[Any]]:
        signatures = {c.kind.name: c.signature for candidates in self._plan.candidates.values() for c in candidates}
        return {name: signature.bind(scratch, self.weights) for name, signature in signatures.items()}

    def _test(self) -> list[SelfTestResult] | None:
        return run_self_test(self._cases(), self.geometry, self.weights, self.first_expert)

    def _leave_out(self, failed: list[SelfTestResult]) -> None:
        bad = {(result.case.kernel, result.case.variant) for result in failed}
        for tokens, candidates in self._plan.candidates.items():
            self._plan.candidates[tokens] = [c for c in candidates if (c.kind.name, c.variant) not in bad]
            if not self._plan.candidates[tokens]:
                super()._leave_out(failed)

    def _cases(self) -> dict[SelfTestCase, Run]:
        """Return each compiled kernel at the largest and the smallest token count that it could serve."""
        origin, cases = f"(flashinfer-python {self._flashinfer.flashinfer})", dict[SelfTestCase, Run]()
        served: dict[tuple[str, int], dict[int, Candidate]] = {}
        for tokens, candidates in self._plan.candidates.items():
            for candidate in candidates:
                served.setdefault((candidate.kind.name, candidate.variant), {})[tokens] = candidate
        for (name, variant), by_count in served.items():
            for tokens in dict.fromkeys((max(by_count), min(by_count))):
                case = SelfTestCase(name, tokens, variant, not self.features.deterministic, origin)
                cases[case] = functools.partial(self._run_candidate, by_count[tokens])
        return cases

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        return device.type == "cuda"

    def serves(self, tokens: int) -> bool:
        plan = self._plan
        return plan.tested and tokens in plan.candidates

    def rounding(self, tokens: int) -> float:
        kind = self._plan.candidates[tokens][0].kind
        if kind is DIRECT_MICRO:
            return 0.0 if self.geometry.gated else _RECIPROCALS
        return self.geometry.atomic_rounding if not self.features.deterministic else 0.0

    def summary(self) -> tuple[str, ...]:
        served: dict[str, list[int]] = {}
        for tokens, candidates in self._plan.candidates.items():
            served.setdefault(candidates[0].kind.name, []).append(tokens)
        lines = [f"{name}: {_ranges(sizes)} tokens" for name, sizes in served.items()]
        left_out = (f"left out: {result}" for result in self._plan.results if not result.passed)
        return (*lines, *self._pending(), *left_out)

    @property
    def workspace(self) -> tuple[int, int] | None:
        return id(self._plan), self._plan.scratch.nbytes()

    def _launch(self, call: MoECall) -> None:
        tokens = call.x.shape[0]
        candidates = self._plan.candidates.get(tokens)
        if candidates is None:
            planned = _ranges(sorted(self._plan.candidates))
            raise ValueError(
                f"no kernel is planned for {tokens} tokens, only for {planned}: plan() with a capacity that covers it"
            )
        self._launch_candidate(candidates[0], call)

    def _launch_candidate(self, candidate: Candidate, call: MoECall) -> None:
        table = self._tables[candidate.kind.skips_negative_ids and bool(self.features.negative_ids)]
        with self._plan.serializer as capture:
            scratch, bound = self._plan.scratch, self._bound
            if capture:
                scratch = self._plan.of_capture(capture)
                bound = self._bind_to(scratch)
            arguments, inputs = bound[candidate.kind.name], self.weights.input_scales
            candidate.launch(arguments, scratch, table, inputs, call)

    def _run_candidate(self, candidate: Candidate, call: MoECall) -> torch.Tensor:
        prepared = call.prepared(self.geometry, False, self.weights.fc1_weight.get_device())
        self._launch_candidate(candidate, prepared)
        assert prepared.out is not None
        return prepared.out


def _ranges(numbers: list[int]) -> str:
    """Format ``[1, 2, 3, 8]`` as ``1-3, 8``."""
    runs = [[number for _, number in run] for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join("-".join(map(str, dict.fromkeys((run[0], run[-1])))) for run in runs)


def _make_plan(geometry: Geometry, capacity: int, device: torch.device) -> _Plan:
    started = time.monotonic()
    logger.info("b12x kernels for %s: compiling, or loading from FlashInfer's cache", geometry)
    dispatch = importlib.import_module(DISPATCH)
    scratch = Scratch.allocate(dispatch, geometry, capacity, device)
    compiler = Compiler(dispatch, geometry, scratch, device)
    candidates = {tokens: list(compiler.candidates(tokens)) for tokens in sizes(dispatch, capacity)}
    routes.warm_up(device, warmup_command(geometry, card_of(device)))
    logger.info("b12x kernels for %s: %d in %.1f s", geometry, len(compiler.variants), time.monotonic() - started)
    pristine = constants.kept(("b12x", geometry, capacity, device), scratch.pristine, device)
    return _Plan(scratch, pristine, candidates, StreamSerializer.of(device))
