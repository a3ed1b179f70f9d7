"""Every kernel that may serve, beside other work on the GPU, in overlapping replays and beside eager calls: how many are wrong.

``python -m benchmarks.soak OUT`` on a Hopper GPU, where the SM120 kernels run translated (docs/sm12x-on-hopper.md), writes
OUT.json and OUT.md.  The kernels are those that ship: what is compiled is what a card gets, but for the translation.  A
call is wrong where its distance from the torch kernel is more than three times what the same call has on a quiet GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import require_gpu
from tests.integration.sm12x_on_hopper import sm12x_on_hopper
from tests.integration.sm12x_on_hopper.kernels import SMALL_SWIGLU, Shape
from tests.integration.sm12x_on_hopper.problem import draw
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.b12x.kernel import B12xKernel
from trtllm_b12x.kernels.reference import ReferenceKernel

WIDE = Shape("SwiGLU, 2048 x 768", 16, 8, 2048, 768, True)
CASES: tuple[tuple[Shape, int, str], ...] = (
    (SMALL_SWIGLU, 4, "direct_micro"),
    (SMALL_SWIGLU, 8, "static"),
    (WIDE, 5, "static"),
    (SMALL_SWIGLU, 16, "static"),
)
BATCH = 32
"""Different calls of one graph."""
QUIET = 20
"""Replays that say what a call's distance is when nothing else runs."""


@dataclass
class Soaked:
    """One kernel beside one kind of work."""

    layer: str
    tokens: int
    kernel: str
    beside: str
    calls: int
    wrong: int
    quiet: float
    """Largest distance of a call alone, relative L2."""
    worst: float
    seconds: float


@dataclass
class Prepared:
    """A captured batch of calls and what came of them."""

    kernel: B12xKernel
    graph: torch.cuda.CUDAGraph
    errors: torch.Tensor
    """``(BATCH,)``, of the last replay."""
    results: list[torch.Tensor]
    held: list[Any]
    """What the graph reads."""


def kernel_for(shape: Shape) -> B12xKernel:
    layer = draw(shape, "cuda")
    kernel = B12xKernel()
    activation = "Swiglu" if shape.gated else "Relu2"
    geometry = Geometry(shape.num_experts, shape.top_k, shape.hidden_size, shape.padded, activation)
    kernel.plan(geometry, 63, torch.device("cuda", 0))
    kernel.bind(layer.weights)
    kernel.self_test()
    return kernel


def calls(kernel: B12xKernel, tokens: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    g = kernel.geometry
    generator = torch.Generator("cuda").manual_seed(seed)
    made = []
    for _ in range(BATCH):
        x = torch.randn(tokens, g.hidden_size, device="cuda", generator=generator).to(torch.bfloat16)
        ids = torch.rand(tokens, g.num_experts, device="cuda", generator=generator).argsort(1)[:, : g.top_k].int().contiguous()
        router_weights = torch.softmax(torch.randn(tokens, g.top_k, device="cuda", generator=generator), 1)
        made.append((x, ids, router_weights))
    return made


def prepared(kernel: B12xKernel, tokens: int, seed: int = 0) -> Prepared:
    given = calls(kernel, tokens, seed)
    reference = ReferenceKernel()
    reference.plan(kernel.geometry, tokens, torch.device("cuda", 0))
    reference.bind(kernel.weights)
    expected = [reference.run(*call).float() for call in given]
    sizes = torch.stack([each.norm() for each in expected])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [kernel.run(*call) for call in given]
        errors = torch.stack([(a.float() - b).norm() for a, b in zip(results, expected, strict=True)]) / sizes
    return Prepared(kernel, graph, errors, results, [given, expected, sizes])


def quiet(batch: Prepared) -> torch.Tensor:
    """Largest distance of each call over some replays."""
    worst = torch.zeros_like(batch.errors)
    for _ in range(QUIET):
        batch.graph.replay()
        worst = torch.maximum(worst, batch.errors.nan_to_num(nan=1e9))
    return worst


# ---- other work ----------------------------------------------------------------------------------------------------------


def arithmetic() -> Callable[[], None]:
    a = torch.randn(64, 256, 256, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for _ in range(20):
            torch.bmm(a, a)

    return run


def memory_traffic() -> Callable[[], None]:
    source = torch.randint(0, 255, (64 << 20,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def run() -> None:
        for _ in range(4):
            target.copy_(source)

    return run


WORK: dict[str, Callable[[], Callable[[], None]]] = {"arithmetic": arithmetic, "memory traffic": memory_traffic}


def milliseconds(run: Callable[[], Any]) -> float:
    run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started)


def soak(batch: Prepared, beside: str, count: int, most_seconds: float, tokens: int, name: tuple[str, str]) -> Soaked:
    """Replays of ``batch`` while a graph of other work is replayed on another stream, without a pause."""
    baseline = quiet(batch)
    limit = 3 * baseline.clamp(min=1e-4)
    run, other, side = WORK[beside](), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    run()
    with torch.cuda.graph(other):
        run()
    rounds = max(1, round(milliseconds(batch.graph.replay) / milliseconds(other.replay)))
    wrong, worst = torch.zeros((), dtype=torch.int64, device="cuda"), torch.zeros((), device="cuda")
    replay, replays = 0, -(-count // BATCH)
    torch.cuda.synchronize()
    started = time.perf_counter()
    while replay < replays:
        with torch.cuda.stream(side):
            for _ in range(rounds):
                other.replay()
        batch.graph.replay()
        errors = batch.errors.nan_to_num(nan=1e9)
        wrong += (errors > limit).sum()
        worst = torch.maximum(worst, errors.max())
        replay += 1
        if replay % 8 == 0:
            torch.cuda.synchronize()  # keep both queues short, hence side by side
            if time.perf_counter() - started > most_seconds:
                break
    torch.cuda.synchronize()
    seconds = round(time.perf_counter() - started, 1)
    return Soaked(name[0], tokens, name[1], beside, replay * BATCH, int(wrong), float(baseline.max()), float(worst), seconds)


def overlapping(kernel: B12xKernel, tokens: int, count: int, name: tuple[str, str]) -> list[Soaked]:
    """Two graphs of the same kernel, replayed on two streams at once; and one beside calls that are launched."""
    first, second = prepared(kernel, tokens, 1), prepared(kernel, tokens, 2)
    given = calls(kernel, tokens, 2)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    found = []
    for beside in ("another replay", "eager calls"):
        limits = [3 * quiet(batch).clamp(min=1e-4) for batch in (first, second)]
        expected = [result.clone() for result in second.results]
        sizes = [each.float().norm() for each in expected]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        worst = torch.zeros((), device="cuda")
        replays = -(-count // BATCH)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(replays):
            with torch.cuda.stream(streams[0]):
                first.graph.replay()
            with torch.cuda.stream(streams[1]):
                if beside == "another replay":
                    second.graph.replay()
                    late = second.errors
                else:
                    results = [kernel.run(*call) for call in given]
                    distance = [(a - b).float().norm() / s for a, b, s in zip(results, expected, sizes, strict=True)]
                    # From another run of the kernel, not from the reference.
                    late = torch.stack(distance) / 2
            torch.cuda.synchronize()
            for errors, limit in zip((first.errors, late), limits, strict=True):
                errors = errors.nan_to_num(nan=1e9)
                wrong += (errors > limit).sum()
                worst = torch.maximum(worst, errors.max())
        seconds = round(time.perf_counter() - started, 1)
        done = 2 * replays * BATCH
        alone = max(float(limit.max()) / 3 for limit in limits)
        found.append(Soaked(name[0], tokens, name[1], beside, done, int(wrong), alone, float(worst), seconds))
    return found


def measure(kinds: list[str], count: int, replays: int, most_seconds: float) -> list[Soaked]:
    found: list[Soaked] = []
    for shape, tokens, kind in (case for case in CASES if case[2] in kinds):
        kernel = kernel_for(shape)
        candidate = kernel._plan.candidates[tokens][0]
        assert candidate.kind.name == kind, (candidate.kind.name, kernel.summary())
        batch = prepared(kernel, tokens)
        for beside in WORK:
            found.append(soak(batch, beside, count, most_seconds, tokens, (shape.name, kind)))
            print(found[-1], flush=True)
        found += overlapping(kernel, tokens, replays * BATCH, (shape.name, kind))
        print(*found[-2:], sep="\n", flush=True)
    return found


def markdown(rows: list[Soaked]) -> str:
    lines = [
        "| layer | tokens | kernel | beside | calls | wrong | alone | worst |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        cells = (r.layer, r.tokens, r.kernel, r.beside, f"{r.calls:,}", r.wrong, f"{r.quiet:.4f}", f"{r.worst:.4f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--calls", type=int, default=100_000, help="of each kernel beside each kind of work")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, for one kernel beside one kind of work")
    parser.add_argument("--replays", type=int, default=300, help="overlapping ones")
    kinds = list(dict.fromkeys(kind for _, _, kind in CASES))
    parser.add_argument("--kernel", action="append", choices=kinds, default=None, help="one kind alone, or several")
    arguments = parser.parse_args()
    require_gpu()
    kinds = arguments.kernel or kinds
    versions = {name: importlib.metadata.version(name) for name in ("flashinfer-python", "nvidia-cutlass-dsl", "torch")}
    with sm12x_on_hopper():
        rows = measure(kinds, arguments.calls, arguments.replays, arguments.seconds)
    result = {"gpu": torch.cuda.get_device_name(), "versions": versions, "rows": [asdict(row) for row in rows]}
    arguments.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(markdown(rows))
    print(markdown(rows))


if __name__ == "__main__":
    main()
