"""One run on a Hopper GPU: the real kernels' numbers, to JSON; ``report.py`` makes the tables of ``docs/``.

``python -m tests.integration.sm12x_on_hopper.run build --cache DIR`` builds every kernel of the run, on any machine;
``... measure --cache DIR --out FILE`` measures on the device.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from trtllm_b12x.tools.verify import reference, relative_l2
from trtllm_b12x.tools.verify.reference import MoECall

from .bed import Bed, sm12x_on_hopper
from .calls import DEVICE, REPETITIONS, Measured, Runner, Yardsticks
from .kernels import (
    CAPACITY,
    EXPORTS,
    SHAPES,
    SMALL_RELU2,
    SMALL_SWIGLU,
    Job,
    Shape,
    build_all,
    forced,
    halved,
    main_jobs,
    one_per_kernel,
    other_jobs,
)
from .problem import Layer, arguments, draw, draw_call, kernel_weights, wrapper


def measure_jobs(bed: Bed, jobs: list[Job], repetitions: int, seed: int = 0, note: str = "") -> Iterator[Measured]:
    """Layer by layer: draw it, take the yardsticks of all its tokens at once, run every job."""
    for shape in dict.fromkeys(job.shape for job in jobs):
        mine = [job for job in jobs if job.shape == shape]
        layer = draw(shape, DEVICE, seed)
        counts = sorted({job.tokens for job in mine})
        calls = {tokens: draw_call(layer, tokens, seed=tokens) for tokens in counts}
        everything = MoECall(*(torch.cat([getattr(calls[t], n) for t in counts]) for n in MoECall.__dataclass_fields__))
        yardsticks = Yardsticks.of(layer, everything)
        runner, seen = Runner(layer), set()
        for job in mine:
            start = sum(t for t in counts if t < job.tokens)
            try:
                outputs = [runner(bed, job, calls[job.tokens]) for _ in range(repetitions)]
            except ValueError as error:
                if "forced" not in str(error):
                    raise
                continue
            kernel = outputs[0][0]
            if (kernel, job.tokens) in seen:
                continue  # what was forced is what the dispatch takes anyway
            seen.add((kernel, job.tokens))
            rows = yardsticks.rows(slice(start, start + job.tokens))
            yield rows.measure(shape.name, kernel, [out for _, out in outputs], note or ("" if job.forced else "chosen"))


def variants(bed: Bed) -> Iterator[Measured]:
    """What the plain cases leave open: negative ids, one scale per expert, graphs, streams."""
    for shape in (SMALL_SWIGLU, SMALL_RELU2):
        for job in one_per_kernel(shape):
            layer = draw(shape, DEVICE, seed=1)
            yield _variant(bed, job, layer, draw_call(layer, job.tokens, 2, negative=0.4), "4 of 10 ids negative")
            yield _variant(bed, job, layer, draw_call(layer, job.tokens, 2, negative=1.0), "every id negative")
            yield _variant(bed, job, layer, draw_call(layer, job.tokens, 3), "captured graph, replayed", graph=True)
    yield from _expert_parallel(bed)


def _variant(bed: Bed, job: Job, layer: Layer, call: MoECall, note: str, graph: bool = False) -> Measured:
    yardsticks = Yardsticks.of(layer, call)
    runner = Runner(layer)
    results = [runner(bed, job, call) for _ in range(REPETITIONS)]
    outputs = [out for _, out in results]
    if graph:
        outputs += [_replayed(job, layer, call) for _ in range(3)]
    if bool((call.token_selected_experts[-1] < 0).all()):
        assert not any(bool(out[-1].any()) for out in outputs), "a token without experts has an output"
    return yardsticks.measure(layer.shape.name, results[0][0], outputs, note)


def _replayed(job: Job, layer: Layer, call: MoECall) -> torch.Tensor:
    """Captured with other inputs in the same buffers, replayed with this call's."""
    other = draw_call(layer, job.tokens, 99)
    buffers = [t.clone() for t in (other.x, other.token_selected_experts, other.token_final_scales)]
    with forced(job.forced):
        run = wrapper(layer.shape, DEVICE, max(CAPACITY, job.tokens)).run
        given = dict(zip(("x", "token_selected_experts", "token_final_scales"), buffers, strict=True))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(**given, **arguments(layer.weights))
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = run(**given, **arguments(layer.weights))
    for buffer, value in zip(buffers, (call.x, call.token_selected_experts, call.token_final_scales), strict=True):
        buffer.copy_(value)
    captured.replay()
    torch.cuda.synchronize()
    return out.clone()


def _expert_parallel(bed: Bed) -> Iterator[Measured]:
    """Two ranks of half the experts each, other ranks' ids negative; partial sums added in bf16, as the host reduces."""
    for shape in (SMALL_SWIGLU, SMALL_RELU2):
        whole = draw(shape, DEVICE, seed=2)
        half = shape.num_experts // 2
        part = halved(shape)
        ranks = []
        for rank in range(2):
            mine = {
                f"{int(key.split('.')[0]) - rank * half}.{key.split('.', 1)[1]}": value
                for key, value in whole.checkpoint.items()
                if int(key.split(".")[0]) // half == rank
            }
            ranks.append(Layer(part, mine, kernel_weights(part, mine)))
        for job in one_per_kernel(shape):
            call = draw_call(whole, job.tokens, 4)
            yardsticks = Yardsticks.of(whole, call)
            outputs, kernel = [], ""
            for _ in range(REPETITIONS):
                total = torch.zeros_like(call.x)
                for rank, layer in enumerate(ranks):
                    local = call.token_selected_experts - rank * half
                    local = torch.where((local >= 0) & (local < half), local, -1)
                    kernel, out = Runner(layer)(bed, job, replace(call, token_selected_experts=local))
                    total += out
                outputs.append(total)
            yield yardsticks.measure(shape.name, kernel, outputs, "two expert-parallel ranks, summed in bf16")


def exports(bed: Bed, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure exact against baked scale preparation on real ModelOpt exports."""
    from trtllm_b12x.tools.checkpoint import Checkpoint

    for directory in sorted(path.parent for path in folder.glob("*/nvfp4/config.json")):
        checkpoint, name = Checkpoint(directory), directory.parent.name
        for found in checkpoint.layers:
            shape = Shape(name, found.num_experts, found.top_k, found.hidden_size, found.intermediate_size, found.gated)
            tensors = {key: value.to(DEVICE) for key, value in checkpoint.weights(found).items()}
            layer = Layer(shape, tensors, kernel_weights(shape, tensors))
            yield from _preparations(bed, layer, found.index)


def _preparations(bed: Bed, layer: Layer, index: int) -> Iterator[dict[str, Any]]:
    shape = layer.shape
    # Without input_global_scale the alphas are the input scales, one per expert.
    baked = kernel_weights(shape, layer.checkpoint, baked=True)
    baked = replace(baked, fc1_alpha=baked.fc1_alpha * baked.fc1_divisor)
    prepared = {"exact": (layer.weights, ()), "baked": (baked, ("input_global_scale",))}
    weight_error = reference.reference_for(layer.checkpoint, shape.num_experts, shape.gated).baked_weight_error(
        range(shape.num_experts), DEVICE
    )
    for job in one_per_kernel(shape):
        calls = [draw_call(layer, job.tokens, seed) for seed in range(-(-64 // job.tokens))]
        yardsticks = [Yardsticks.of(layer, call) for call in calls]
        true, float32, points = (
            torch.cat([getattr(y, name) for y in yardsticks]) for name in ("unquantized", "float32", "kernel_points")
        )
        for name, (weights, drop) in prepared.items():
            runner = Runner(layer, weights, drop)
            results = [runner(bed, job, call) for call in calls]
            out = torch.cat([out for _, out in results]).float()
            yield {
                "export": shape.name,
                "layer": index,
                "kernel": results[0][0],
                "preparation": name,
                "weight_error": weight_error if "baked" in name else 0.0,
                "unquantized": relative_l2(out, true),
                "reference": relative_l2(float32, true),
                "kernel_points": relative_l2(out, points),
            }


def versions() -> dict[str, str]:
    names = ("flashinfer-python", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi", "torch", "triton")
    found = {name: importlib.metadata.version(name) for name in names}
    found |= {"GPU": torch.cuda.get_device_name(), "CUDA of torch": str(torch.version.cuda)}
    return {**found, "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat()}


def measure(cache: Path, out: Path, folder: Path, budget: float) -> None:
    """Section by section; what was measured when time ran out, or something broke, is kept."""
    started = time.monotonic()
    result: dict[str, Any] = {"versions": versions()}

    def collect(section: str, rows: Iterator[Any]) -> None:
        kept = result.setdefault(section, [])
        begun = time.monotonic()
        try:
            for row in rows:
                kept.append(row if isinstance(row, dict) else asdict(row))
                if time.monotonic() - started > budget:
                    result.setdefault("unfinished", []).append(f"{section}: out of time")
                    break
        except Exception as error:
            result.setdefault("unfinished", []).append(f"{section}: {type(error).__name__}: {error}")
            import traceback

            traceback.print_exc()
        out.write_text(json.dumps(result, indent=1))
        print(f"{section}: {len(kept)} rows, {time.monotonic() - begun:.0f} s", flush=True)

    with sm12x_on_hopper(cache=cache) as bed:
        collect("variants", variants(bed))
        collect("exports", exports(bed, folder))
        for shape in (SMALL_SWIGLU, SMALL_RELU2, *SHAPES):
            collect("numbers", measure_jobs(bed, [job for job in main_jobs() if job.shape == shape], REPETITIONS))
    for section, jobs in other_jobs().items():
        with sm12x_on_hopper(sm_count=jobs[0].sm_count, options=jobs[0].options, cache=cache) as bed:
            collect(section, measure_jobs(bed, jobs, REPETITIONS))
    out.write_text(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("build", "measure"))
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--exports", type=Path, default=Path("exports"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--budget", type=float, default=400, help="seconds")
    given = parser.parse_args()
    if given.what == "build":
        small = (*EXPORTS, halved(SMALL_SWIGLU), halved(SMALL_RELU2))
        wanted = {*main_jobs(), *(job for shape in small for job in one_per_kernel(shape))}
        wanted.update(*other_jobs().values())
        jobs = sorted(wanted, key=lambda job: (job.options.sm, job.shape.name, str(job.forced), job.tokens, str(job.options)))
        count = sum(1 for _ in build_all(jobs, given.processes, given.cache))
        print(f"{len(jobs)} calls, {count} kernels", file=sys.stderr)
    else:
        measure(given.cache, given.out, given.exports, given.budget)


if __name__ == "__main__":
    main()
