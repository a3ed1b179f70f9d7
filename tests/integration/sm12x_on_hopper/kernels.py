# SPDX-License-Identifier: Apache-2.0
"""Kernels that are compiled for ``sm_12xa``, translated and assembled on any machine, in parallel processes."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

from .bed import sm12x_on_hopper
from .build import Options
from .problem import Shape, arguments, empty_layer, wrapper

QWEN3_30B = Shape("Qwen3-30B-A3B", 128, 8, 2048, 768, True)
QWEN36_35B = Shape("Qwen3.6-35B-A3B", 256, 8, 2048, 512, True)
NEMOTRON_SUPER = Shape("Nemotron-3-Super", 512, 22, 1024, 2688, False)
NEMOTRON_NANO = Shape("Nemotron-3-Nano", 128, 6, 2688, 1856, False)
ODD_SWIGLU = Shape("SwiGLU, I 640", 64, 8, 2560, 640, True)
SMALL_SWIGLU = Shape("small SwiGLU", 16, 4, 512, 256, True)
SMALL_RELU2 = Shape("small ReLU2", 16, 4, 512, 256, False)
SHAPES = (SMALL_SWIGLU, SMALL_RELU2, QWEN3_30B, NEMOTRON_SUPER, QWEN36_35B, ODD_SWIGLU, NEMOTRON_NANO)
EXPORTS = (Shape("nemotron-h", 8, 4, 256, 320, False), Shape("qwen3-moe", 16, 4, 512, 320, True))
"""Sizes of what ``tests/integration/exports.py`` exports."""
CAPACITY = 64
"""Tokens that a wrapper with workspaces of its own is made for, as the package's crossover has it."""


@dataclass(frozen=True)
class Job:
    """One call."""

    shape: Shape
    tokens: int
    kernel: str
    """``direct_micro`` or ``static``."""
    sm_count: int = 132
    options: Options = field(default_factory=Options)


LISTED = (
    *(Job(shape, tokens, "direct_micro") for shape in (SMALL_SWIGLU, SMALL_RELU2) for tokens in (1, 4)),
    Job(QWEN36_35B, 2, "direct_micro"),
    *(Job(shape, 16, "static") for shape in (SMALL_SWIGLU, SMALL_RELU2, QWEN3_30B, NEMOTRON_SUPER)),
    Job(SMALL_SWIGLU, 16, "static", 48, Options(121)),
)
"""Every variant and activation that the package can select for ``sm_120a``, and one for ``sm_121a``."""


def main_jobs() -> Iterator[Job]:
    """Yield each kernel that the package selects, at each token count that it may serve."""
    for shape in SHAPES:
        for tokens in (1, 2, 4, 8, 16, 32, 63, 64):
            if tokens <= 8:
                yield Job(shape, tokens, "direct_micro")
            yield Job(shape, tokens, "static")


def one_per_kernel(shape: Shape, sm_count: int = 132, options: Options = Options()) -> list[Job]:  # noqa: B008 - frozen
    return [Job(shape, tokens, kernel, sm_count, options) for tokens, kernel in ((4, "direct_micro"), (32, "static"))]


def other_jobs() -> dict[str, list[Job]]:
    """Return the jobs of other builds by section: a smaller card's grid, and warps that sleep behind barriers."""
    small = (SMALL_SWIGLU, SMALL_RELU2)
    return {
        "GB10": [job for shape in small for job in one_per_kernel(shape, 48, Options(121))],
        "staggered": [job for shape in small for job in one_per_kernel(shape, options=Options(stagger=True))],
    }


def build(job: Job, cache: Path | None = None) -> list[dict[str, object]]:
    """Build what one call launches; what came out, kernel by kernel.  In a process of its own: see ``bed.py``."""
    import torch

    with sm12x_on_hopper(job.sm_count, options=job.options, cache=cache, build_only=True) as bed, forced(job.kernel):
        layer = empty_layer(job.shape)
        x = torch.empty(job.tokens, job.shape.hidden_size, dtype=torch.bfloat16)
        ids = torch.zeros(job.tokens, job.shape.top_k, dtype=torch.int32)
        run = wrapper(job.shape, "cpu", CAPACITY).run
        try:
            run(x, token_selected_experts=ids, token_final_scales=torch.zeros(ids.shape), **arguments(layer.weights))
        except ValueError as error:
            if "forced" not in str(error):
                raise
        found = [json.loads(path.with_suffix(".json").read_text()) for path in bed.built.values()]
    return [{**asdict(job), **one} for one in found]


def forced(kernel: str) -> contextlib.AbstractContextManager[object]:
    """FlashInfer's own hook for tests (``moe_dispatch._FORCED_BACKEND``)."""
    from flashinfer.fused_moe.cute_dsl.blackwell_sm12x import moe_dispatch

    return mock.patch.object(moe_dispatch, "_FORCED_BACKEND", kernel)


def build_all(jobs: Sequence[Job], processes: int, cache: Path | None = None) -> Iterator[dict[str, object]]:
    """Results in order; the first failure is raised.  Processes of their own for each card: see ``bed.py``."""
    for _, group in itertools.groupby(jobs, lambda job: job.options.sm):
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            batch = list(group)
            for found in pool.map(build, batch, [cache] * len(batch)):
                yield from found
