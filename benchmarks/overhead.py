"""What the package costs a process that imports it and a host that asks it: ``make bench``."""

from __future__ import annotations

import statistics
import subprocess
import sys
import timeit

from tests.facts import GOOD
from trtllm_b12x.decision import Deployment, Environment, Problem, decide

REPEATS = 15


def seconds(code: str) -> float:
    """Median run time of an interpreter on ``code``."""
    run = [sys.executable, "-c", code]
    return statistics.median(timeit.repeat(lambda: subprocess.run(run, check=True), number=1, repeat=REPEATS))


def main() -> None:
    nothing, ours, click = seconds("pass"), seconds("import trtllm_b12x"), seconds("import click")
    print(f"import trtllm_b12x: {1e3 * (ours - nothing):6.1f} ms beyond an empty interpreter")
    print(f"import click:       {1e3 * (click - nothing):6.1f} ms, for comparison")
    problem = Problem(
        quant_algo="NVFP4",
        group_size=16,
        activation_dtype="bfloat16",
        activation="Swiglu",
        activation_constants=False,
        hidden_size=2048,
        intermediate_size=768,
        num_experts=128,
        top_k=8,
        bias=False,
    )
    for name, facts in (
        ("yes", GOOD),
        ("no, four reasons", Environment(enabled=False, sm=90, dsl="none", flashinfer="none")),
    ):
        number = 20_000
        best = min(timeit.repeat(lambda: decide(problem, Deployment(1, 1), facts), number=number, repeat=5))  # noqa: B023
        print(f"decide ({name}): {1e6 * best / number:6.1f} us")


if __name__ == "__main__":
    main()
