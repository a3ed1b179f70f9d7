"""What a run calls: the dispatch's own choices, forced kernels, other grids, exports and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .build import Options
from .kernels import CAPACITY, SHAPES, SMALL_RELU2, SMALL_SWIGLU, Job, Shape

GB10, BARE = Options(121), Options(mend_micro=False)
TOKENS = (1, 2, 4, 8, 16, 32, 63, 64, 200, 1000)


def main_jobs() -> Iterator[Job]:
    """The dispatch's own choice for every token count, and each kernel where it can be forced."""
    for shape in SHAPES:
        for tokens in TOKENS:
            yield Job(shape, tokens)
            if tokens <= 8:
                yield Job(shape, tokens, "micro")
            if tokens <= CAPACITY:
                yield Job(shape, tokens, "static")
            yield Job(shape, tokens, "dynamic")
    for shape in (SMALL_SWIGLU, SMALL_RELU2):
        for tokens in TOKENS:
            yield Job(shape, tokens)
            if tokens <= 8:
                yield Job(shape, tokens, "micro")
                yield Job(shape, tokens, "direct_micro")
            if tokens <= CAPACITY:
                yield Job(shape, tokens, "static")
            yield Job(shape, tokens, "dynamic")


def card_jobs() -> Iterator[Job]:
    """The grid of GB10, compiled for ``sm_121a``."""
    for shape in (SMALL_SWIGLU, SMALL_RELU2):
        for tokens, backend in ((4, "direct_micro"), (4, "micro"), (32, "static"), (200, "dynamic")):
            yield Job(shape, tokens, backend, 48, GB10)


def bare_jobs() -> Iterator[Job]:
    """The micro kernel as it is, without the barrier that it lacks."""
    for shape in (SMALL_SWIGLU, SMALL_RELU2):
        for tokens in (1, 2, 4, 8):
            yield Job(shape, tokens, "micro", options=BARE)


EXPORTS = (Shape("nemotron-h", 8, 4, 256, 320, False), Shape("qwen3-moe", 16, 4, 512, 320, True))
"""Sizes of what ``tests/integration/exports.py`` exports."""


def one_per_kernel(shape: Shape) -> list[Job]:
    return [Job(shape, t, backend) for t, backend in ((4, "direct_micro"), (4, "micro"), (32, "static"), (200, "dynamic"))]


def halved(shape: Shape) -> Shape:
    return replace(shape, num_experts=shape.num_experts // 2, name=f"{shape.name}, half its experts")


def other_jobs() -> Iterator[Job]:
    """What exports and expert parallelism launch."""
    for shape in (*EXPORTS, halved(SMALL_SWIGLU), halved(SMALL_RELU2)):
        yield from one_per_kernel(shape)
