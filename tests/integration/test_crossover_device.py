# SPDX-License-Identifier: Apache-2.0
"""The crossover as a GPU measures it: against delays in the host's place, in layers, and from the command line."""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nvfp4_layer import distance
from trtllm_b12x.dispatch import timing
from trtllm_b12x.dispatch.policy import GAIN, HOST, MeasuredPolicy, Timings, counts_to_measure, fastest
from trtllm_b12x.dispatch.timing import LONGEST_S, PathTimer, RouteSampler, TimedPath
from trtllm_b12x.engines.trtllm import build_layer, host_path
from trtllm_b12x.formats.geometry import Geometry, LayerShape

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU of capability 8.0 or newer"
)
CUDA = torch.device("cuda", 0)
SMALL, LARGE = LayerShape(64, 8, 1024, 512, "Swiglu", "NVFP4"), LayerShape(128, 8, 2048, 768, "Swiglu", "NVFP4")
LAST = 64
"""Counts from 1 on that are measured one by one afterwards."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "triton")
    monkeypatch.setenv("TRTLLM_B12X_CROSSOVER", "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    torch.cuda.empty_cache()


def built(shape: LayerShape, ep: int = 1) -> tuple[list[Any], Geometry, RouteSampler]:
    modules = build_layer.build(shape, CUDA, ep=ep)
    geometry = modules[0].backend.schedule.kernels[0].geometry
    return [module.backend for module in modules], geometry, host_path.route_sampler(modules[0].backend, geometry, CUDA)


def delay(microseconds: float) -> timing.Runner:
    cycles = 1_000_000
    cycles_per_us = cycles / (1e6 * timing.graph_seconds(lambda: torch.cuda._sleep(cycles)))
    return lambda call: torch.cuda._sleep(round(microseconds * cycles_per_us))


@pytest.mark.parametrize(("shape", "ep"), [(SMALL, 1), (LARGE, 4)], ids=["64 experts", "128 experts, a quarter of them"])
def test_the_choice_is_near_the_best_of_every_count(shape: LayerShape, ep: int) -> None:
    """Against hosts that take as long at every count as the kernels do at one."""
    backends, geometry, sampler = built(shape, ep)
    kernels = [backend.schedule.families["triton"] for backend in backends]
    triton = TimedPath([kernel.run for kernel in kernels], kernels[0].serves)
    counts = counts_to_measure(timing.largest_served({"triton": triton}).values())
    alone = PathTimer({"triton": triton, HOST: triton}, geometry, sampler, CUDA)(counts).rows
    brute = {
        n: PathTimer({HOST: triton}, geometry, sampler, CUDA, budget_s=0.1, seed=7)([n]).rows[n][HOST] for n in range(1, LAST + 1)
    }
    for crossing in (4, 12, 24, 48):
        host = alone[crossing]["triton"] / GAIN
        timer = PathTimer({"triton": triton, HOST: TimedPath([delay(host)] * len(kernels))}, geometry, sampler, CUDA)
        policy = MeasuredPolicy(timer(counts), f"measured in {timer.spent_s:.2f} s")
        losses = []
        for tokens, kernel in brute.items():
            chosen = kernel if policy.select(tokens, ["triton"]) else GAIN * host
            losses.append(chosen / min(kernel, GAIN * host) - 1)
        print(f"\n{crossing}: {policy.summary()}; mean {statistics.mean(losses):.2%}, worst {max(losses):.2%}")
        assert timer.spent_s <= LONGEST_S
        assert policy.timings.counts == sorted(counts)
        assert statistics.mean(losses) <= 0.02


def test_two_measurements_agree_and_a_host_that_is_made_fast_serves_everything() -> None:
    backends, geometry, sampler = built(SMALL)
    kernels = [backend.schedule.families["triton"] for backend in backends]
    host: timing.Runner = lambda call: call.x.clone()  # noqa: E731
    paths = {"triton": TimedPath([kernel.run for kernel in kernels], kernels[0].serves), HOST: TimedPath([host] * len(kernels))}
    found = [PathTimer(paths, geometry, sampler, CUDA, seed=seed)((1, 8, 64)) for seed in (0, 1, 2)]
    for tokens in (1, 8, 64):
        times = [timings.rows[tokens]["triton"] for timings in found]
        print(f"{tokens} tokens: {', '.join(f'{t:.2f}' for t in times)} us")
        assert max(times) / min(times) < 1.1
    assert MeasuredPolicy(found[0], "").ranges(256, {"triton": 256}) == [(1, 256, HOST)]


def test_a_layer_measures_once_outside_capture_and_keeps_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Against the embedded host's own operator."""
    caplog.set_level(logging.INFO, logger="trtllm_b12x")
    measured: list[PathTimer] = []

    class Counted(PathTimer):
        def __call__(self, counts: Sequence[int]) -> Timings:
            assert not torch.cuda.is_current_stream_capturing()
            measured.append(self)
            return super().__call__(counts)

    monkeypatch.setattr(timing, "PathTimer", Counted)
    backends, geometry, sampler = built(SMALL)
    before = torch.cuda.get_rng_state()
    ids, router_weights = sampler(4, 0, False)
    x = torch.randn(4, geometry.hidden_size, device=CUDA, generator=torch.Generator(CUDA).manual_seed(0)).bfloat16()

    def call(backend: Any) -> torch.Tensor:
        result: torch.Tensor = backend.run_moe(x, ids, router_weights, output_dtype=x.dtype)
        return result

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = call(backends[0])
    assert not measured
    graph.replay()
    expected = captured.clone()
    results = [call(backend) for backend in backends]  # perhaps with other tiles, whose sums have another order
    assert distance(results[0], expected.float()) < 0.004
    assert not any(torch.equal(result, expected) for result in results[1:])
    assert len(measured) == 1
    assert measured[0].spent_s <= LONGEST_S  # whatever the embedded host's operator takes
    assert torch.equal(torch.cuda.get_rng_state(), before)
    graph.replay()
    assert torch.equal(captured, expected)
    policy = backends[0].schedule.policy
    print(f"\n{policy.summary()}: {policy.timings.rows}")
    assert all(backend.schedule.policy is policy for backend in backends)
    for tokens, paths in policy.timings.rows.items():
        assert (backends[0].schedule.at(tokens) is None) == (fastest(paths) is None)

    assert list((tmp_path / "trtllm_b12x").glob("crossover-*.json"))


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trtllm_b12x", "tune", "--hidden", "1024", "--intermediate", "512", "--experts", "64"]
    command += ["--top-k", "8", "--activation", "swiglu", "--ep", "2", "--out", str(tmp_path / "out.json")]
    result = subprocess.run(command, env=os.environ, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    (table,) = json.loads((tmp_path / "out.json").read_text())["tables"]
    assert len(table["microseconds"]) >= 5
    assert table["seconds"] <= LONGEST_S
    assert torch.cuda.get_device_name() in result.stdout
