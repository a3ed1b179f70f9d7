# SPDX-License-Identifier: Apache-2.0
"""One run on a Hopper GPU: the real kernels' numbers, to JSON.

``python -m tests.integration.sm12x_on_hopper.run build --cache DIR`` builds every kernel of the run, on any machine;
``... measure --cache DIR --out FILE`` measures on the device. ``python -m benchmarks.results --take FILE`` keeps it in ``docs/``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trtllm_b12x.formats.nvfp4 import NVFP4Weights, round_to_e4m3
from trtllm_b12x.tools.checkpoint import Checkpoint
from trtllm_b12x.tools.verify import reference as strict_reference
from trtllm_b12x.tools.verify import relative_l2
from trtllm_b12x.tools.verify.reference import Arithmetic, MoECall
from trtllm_b12x.tools.verify.reference_formats import dequantize_nvfp4

from .bed import Bed, sm12x_on_hopper
from .kernels import CAPACITY, EXPORTS, SHAPES, Job, build_all, forced, main_jobs, one_per_kernel, other_jobs
from .problem import Layer, Shape, arguments, draw, draw_call, kernel_weights, reference, wrapper

REPETITIONS = 10
DEVICE = "cuda"
BOUND = 0.005
"""Of the distance from the reference with the kernels' rounding points."""


class Runner:
    """Calls of one layer under the bed; wrappers are kept as a server keeps them."""

    def __init__(self, layer: Layer, weights: NVFP4Weights | None = None, drop: tuple[str, ...] = ()) -> None:
        self.layer = layer
        self.arguments = {k: v for k, v in arguments(weights or layer.weights).items() if k not in drop}
        self.wrappers: dict[str, Any] = {}

    def __call__(self, bed: Bed, job: Job, call: MoECall) -> tuple[str, torch.Tensor]:
        """The kernel's kind and its output."""
        with forced(job.kernel):
            if job.kernel not in self.wrappers:
                self.wrappers[job.kernel] = wrapper(self.layer.shape, DEVICE, CAPACITY)
            out = self.wrappers[job.kernel].run(
                call.x,
                token_selected_experts=call.token_selected_experts,
                token_final_scales=call.token_final_scales,
                **self.arguments,
            )
        torch.cuda.synchronize()
        return bed.launched[-1].split("_")[0], out.clone()


@dataclass
class Yardsticks:
    """What outputs are compared with, a row per token."""

    kernel_points: torch.Tensor
    """float32 with the rounding points that all kernels share."""
    float32: torch.Tensor
    unquantized: torch.Tensor
    torch_kernel: torch.Tensor
    """``kernels/reference.py``."""

    @classmethod
    def of(cls, layer: Layer, call: MoECall) -> Yardsticks:
        shape = layer.shape
        points = (Arithmetic.KERNEL, Arithmetic.NONE, Arithmetic.UNQUANTIZED)
        strict = strict_reference.outputs(layer.checkpoint, shape.num_experts, shape.gated, [call], points, DEVICE)[0]
        kernel_points, float32, unquantized = strict
        return cls(kernel_points, float32, unquantized, reference(layer, call).float())

    def rows(self, part: slice) -> Yardsticks:
        return Yardsticks(*(getattr(self, name)[..., part, :] for name in self.__dataclass_fields__))

    def measure(self, case: str, kernel: str, outputs: list[torch.Tensor]) -> dict[str, Any]:
        """Relative L2 of the worst repetition; ``unquantized`` over the float32 reference's own, which quantizes activations."""

        def worst(yardstick: torch.Tensor) -> float:
            return max(relative_l2(out.float(), yardstick) for out in outputs)

        return {
            "case": case,
            "kernel": kernel,
            "tokens": outputs[0].shape[0],
            "kernel_points": worst(self.kernel_points),
            "float32": worst(self.float32),
            "unquantized": worst(self.unquantized) / relative_l2(self.float32, self.unquantized),
            "torch_kernel": worst(self.torch_kernel),
            "reruns": worst(outputs[0].float()),
        }


def measure_jobs(bed: Bed, jobs: list[Job]) -> Iterator[dict[str, Any]]:
    """Layer by layer: draw it, take the yardsticks of all its tokens at once, run every job."""
    for shape in dict.fromkeys(job.shape for job in jobs):
        mine = [job for job in jobs if job.shape == shape]
        layer = draw(shape, DEVICE)
        counts = sorted({job.tokens for job in mine})
        calls = {tokens: draw_call(layer, tokens, seed=tokens) for tokens in counts}
        everything = MoECall(*(torch.cat([getattr(calls[t], n) for t in counts]) for n in MoECall.__dataclass_fields__))
        yardsticks, runner = Yardsticks.of(layer, everything), Runner(layer)
        for job in mine:
            start = sum(t for t in counts if t < job.tokens)
            try:
                outputs = [runner(bed, job, calls[job.tokens]) for _ in range(REPETITIONS)]
            except ValueError as error:
                if "forced" not in str(error):
                    raise
                continue
            rows = yardsticks.rows(slice(start, start + job.tokens))
            yield rows.measure(shape.name, outputs[0][0], [out for _, out in outputs])


def exports(bed: Bed, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure exact against baked scale preparation on real ModelOpt exports."""
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
    weight_error = _weight_error(layer)
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
                "weight_error": weight_error if name == "baked" else 0.0,
                "unquantized": relative_l2(out, true),
                "reference": relative_l2(float32, true),
                "kernel_points": relative_l2(out, points),
            }


def _weight_error(layer: Layer) -> float:
    """Return the relative L2 change of the weights when ``weight_scale_2`` is multiplied into the E4M3 block scales."""
    difference = norm = 0.0
    for expert, name in itertools.product(
        range(layer.shape.num_experts), ("w1", "w3", "w2") if layer.shape.gated else ("w1", "w2")
    ):
        codes, scales, scale_2 = (layer.checkpoint[f"{expert}.{name}.{k}"] for k in ("weight", "weight_scale", "weight_scale_2"))
        exact = dequantize_nvfp4(codes, scales, scale_2).double()
        baked = dequantize_nvfp4(codes, round_to_e4m3(scales.float() * scale_2), torch.ones_like(scale_2)).double()
        difference, norm = difference + float((baked - exact).square().sum()), norm + float(exact.square().sum())
    return (difference / norm) ** 0.5


def versions() -> dict[str, str]:
    names = ("flashinfer-python", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi", "torch", "triton")
    found = {name: importlib.metadata.version(name) for name in names}
    found |= {"GPU": torch.cuda.get_device_name(), "CUDA of torch": str(torch.version.cuda)}
    return {**found, "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat()}


def measure(cache: Path, out: Path, folder: Path) -> None:
    """Section by section; what is measured is kept if a later one breaks."""
    result: dict[str, Any] = {"versions": versions()}

    def collect(section: str, rows: Iterator[dict[str, Any]]) -> None:
        result.setdefault(section, []).extend(rows)
        out.write_text(json.dumps(result, indent=1))

    with sm12x_on_hopper(cache=cache) as bed:
        collect("exports", exports(bed, folder))
        for shape in SHAPES:
            collect("numbers", measure_jobs(bed, [job for job in main_jobs() if job.shape == shape]))
    for section, jobs in other_jobs().items():
        with sm12x_on_hopper(sm_count=jobs[0].sm_count, options=jobs[0].options, cache=cache) as bed:
            collect(section, measure_jobs(bed, jobs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("build", "measure"))
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--exports", type=Path, default=Path("exports"))
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.cache, given.out, given.exports)
        return
    wanted = {*main_jobs(), *(job for shape in EXPORTS for job in one_per_kernel(shape))}
    wanted.update(*other_jobs().values())
    jobs = sorted(wanted, key=lambda job: (job.options.sm, job.shape.name, job.kernel, job.tokens, str(job.options)))
    count = sum(1 for _ in build_all(jobs, given.processes, given.cache))
    print(f"{len(jobs)} calls, {count} kernels", file=sys.stderr)


if __name__ == "__main__":
    main()
