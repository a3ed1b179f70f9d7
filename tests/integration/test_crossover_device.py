"""The crossover as a GPU measures it: against stand-ins of the host's path, in layers, and from the command line."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as File
from typing import Any

import pytest
import torch
from trtllm_b12x.crossover import deciding, layers, measuring
from trtllm_b12x.crossover.search import Search

from trtllm_b12x import process
from trtllm_b12x.dispatch.policy import HOST, Measured, Times, winner
from trtllm_b12x.dispatch.schedule import DEFAULT_CROSSOVER
from trtllm_b12x.dispatch.timing import BUDGET_S, Bench, Path, Run
from trtllm_b12x.host.build_layer import Shape
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.reference import activate, dequantized

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU of capability 8.0 or newer"
)
SHAPES = {
    "8 experts, top 4": Shape(8, 4, 2048, 1024, "Swiglu"),
    "64 experts, top 8": Shape(64, 8, 1024, 512, "Swiglu"),
    "128 experts, top 8, a quarter of them": Shape(128, 8, 2048, 768, "Swiglu", ep=4),
}
AFTERWARDS = (1, 3, 6, 12, 24, 48, 96, 192)
WITHIN = 0.03
NOISE = 0.01
"""Beyond it: what two measurements of the same differ by."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: File) -> Iterator[None]:
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "triton")
    monkeypatch.setenv("TRTLLM_B12X_CROSSOVER", "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    process.forget()
    yield
    process.forget()
    torch.cuda.empty_cache()


def dense(module: Any, first: int) -> Run:
    """FP4 dequantized once, cuBLAS in bf16: every expert on every token, routes as weights.  It asks the GPU nothing."""
    backend, geometry = module.backend, layers.geometry(module)
    weights, experts = backend.schedule.kernels[0].weights, range(geometry.num_experts)
    assert weights.input_scales is not None
    scales = (
        weights.fc1_alpha * weights.input_scales.fc31_input_scale,
        weights.fc2_alpha * weights.input_scales.fc2_input_scale,
    )
    w1, w2 = (
        torch.stack([(dequantized(weight, sf, e) * scale[e]).bfloat16() for e in experts])
        for weight, sf, scale in (
            (weights.fc1_weight, weights.fc1_weight_sf, scales[0]),
            (weights.fc2_weight, weights.fc2_weight_sf, scales[1]),
        )
    )
    size = geometry.intermediate_size

    def run(x: torch.Tensor, ids: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        parts = (x.expand(len(w1), -1, -1) @ w1.transpose(1, 2)).split(size, dim=2)
        inner = activate(geometry.activation, *(part.float() for part in parts)).bfloat16()
        share = torch.zeros(x.shape[0], geometry.num_experts * geometry.ranks, device=x.device)
        share = share.scatter_(1, ids.long(), routed)[:, first : first + len(w1)]
        return torch.einsum("eth,te->th", (inner @ w2.transpose(1, 2)).float(), share).to(x.dtype)

    return run


def built(shape: Shape) -> tuple[list[Any], Geometry, Any]:
    made = layers.build(shape, torch.device("cuda", 0))
    return made, layers.geometry(made[0]), deciding.draw_of(made[0].backend, layers.geometry(made[0]), torch.device("cuda", 0))


def families(made: list[Any]) -> dict[str, Path]:
    kernels = [module.backend.schedule.families["triton"] for module in made]
    return {"triton": Path([kernel.run for kernel in kernels], kernels[0].serves)}


def searched(both: dict[str, Path], geometry: Geometry, draw: Any) -> tuple[Measured, float]:
    """The choice, and the seconds that it took."""
    started, steps = time.monotonic(), measuring.steps(both)
    times = Search(measuring.served(both), steps).run(Bench(both, geometry, draw, torch.device("cuda", 0)))
    assert times is not None
    return Measured(times, "measured", DEFAULT_CROSSOVER, steps), time.monotonic() - started


def test_near_a_crossing_the_choice_is_right_at_every_count() -> None:
    """Paths that are within 10 % of each other for octaves; ``python -m benchmarks.crossover`` has more of them."""
    from benchmarks import crossover  # it sets what is not set

    summaries, numbers = crossover.run("Qwen3-30B-A3B", (11,))
    assert {one.stand_in for one in summaries} == {"delay", "other tiles"}
    for one, behind in zip(summaries, numbers, strict=True):
        assert one.seconds <= BUDGET_S
        assert one.counts == 22
        if one.routes == crossover.MIXED:
            assert one.close >= 6
            assert {path for *_, path in one.chosen} == {"triton", HOST}
            assert one.worst <= WITHIN + one.noise_worst, [count for count in behind["later"] if count["behind"] > WITHIN]


@pytest.mark.parametrize("name", SHAPES)
def test_the_choice_is_the_best_of_a_later_measurement(name: str) -> None:
    """Against a host that is far behind: routes of either kind, and counts between."""
    made, geometry, draw = built(SHAPES[name])
    both = families(made) | {HOST: Path([dense(module, 0) for module in made])}
    split, seconds = searched(both, geometry, draw)
    first = split.times
    print(f"\n{name}: {len(made)} layers, {seconds:.2f} s, {first.counts}, {split.summary()}")
    assert seconds <= BUDGET_S
    x = torch.randn(5, geometry.hidden_size, device="cuda").bfloat16()
    ids, router_weights = draw(5, 1, False)
    assert ids.max() >= geometry.num_experts or geometry.ranks == 1
    results = [path.runs[0](x, ids, router_weights).float() for path in both.values()]
    assert float((results[0] - results[1]).norm() / results[0].norm()) < 0.02
    counts = [tokens for tokens in AFTERWARDS if both["triton"].serves(tokens)]
    worst = {}
    for skewed in (False, True):
        later = Bench(both, geometry, draw, torch.device("cuda", 0), seed=7, skewed=skewed)(counts)
        assert later.counts == counts
        losses = []
        for tokens, paths in later.points.items():
            chosen = split.pick(tokens, ["triton"]) or HOST
            losses.append(paths[chosen] / min(paths.values()) - 1)
            predicted = ", ".join(f"{path} {t:.1f} us ({first.at(tokens)[path]:.1f})" for path, t in paths.items())
            rows = tokens * geometry.top_k / geometry.num_experts / geometry.ranks
            print(f"  {tokens} tokens, {rows:.2f} rows an expert: {predicted}: {chosen}, {100 * losses[-1]:.1f} % behind")
        worst[skewed] = max(losses)
        print(f"  worst {100 * worst[skewed]:.1f} %{', skewed' if skewed else ''}")
    assert max(worst.values()) <= WITHIN + NOISE


def test_two_measurements_agree() -> None:
    made, geometry, draw = built(SHAPES["8 experts, top 4"])
    both = families(made) | {HOST: Path([dense(module, 0) for module in made])}
    found = [Bench(both, geometry, draw, torch.device("cuda", 0), seed=seed)((1, 8, 64)) for seed in (0, 1, 2)]
    for tokens in (1, 8, 64):
        for path in both:
            times = [times.points[tokens][path] for times in found]
            print(f"  {path}, {tokens} tokens: {', '.join(f'{t:.2f}' for t in times)} us")
            assert max(times) / min(times) < 1.1


def test_a_path_that_is_made_fast_is_chosen_everywhere() -> None:
    made, geometry, draw = built(SHAPES["64 experts, top 8"])
    fast: Callable[..., Any] = lambda x, ids, router_weights: x.clone()  # noqa: E731
    both = families(made) | {HOST: Path([fast] * len(made))}
    split, seconds = searched(both, geometry, draw)
    print(f"\n{seconds:.2f} s, {split.summary()}")
    assert split.times.counts == [1, 2, 4, 8, 16]  # won twice in the first round
    assert [split.pick(tokens, ["triton"]) for tokens in range(1, 257)] == [None] * 256


def test_a_layer_measures_once_outside_capture_and_keeps_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: File
) -> None:
    """Against the embedded host's own operator."""
    caplog.set_level(logging.INFO, logger="trtllm_b12x")
    measured: list[Counted] = []

    class Counted(Bench):
        def __call__(self, counts: Sequence[int]) -> Times:
            assert not torch.cuda.is_current_stream_capturing()
            if not self.spent:
                measured.append(self)
            return super().__call__(counts)

    monkeypatch.setattr(measuring, "Bench", Counted)
    made, geometry, draw = built(SHAPES["64 experts, top 8"])
    backends = [module.backend for module in made]
    before = torch.cuda.get_rng_state()
    ids, router_weights = draw(4, 0, False)
    x = torch.randn(4, geometry.hidden_size, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = backends[0].run_moe(x, ids, router_weights, output_dtype=x.dtype)
    assert not measured
    graph.replay()
    expected = captured.clone()
    for backend in backends:
        assert torch.equal(backend.run_moe(x, ids, router_weights, output_dtype=x.dtype), expected) == (backend is backends[0])
    print(f"\n{len(measured)} measurement, {measured[0].spent:.2f} s, {backends[0].schedule.summary}")
    assert len(measured) == 1
    assert measured[0].spent <= deciding.UNTUNED_S  # whatever the embedded host's operator takes
    assert all(isinstance(backend.schedule.split, Measured) for backend in backends)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    graph.replay()
    assert torch.equal(captured, expected)
    (file,) = (tmp_path / "trtllm_b12x").glob("crossover-*.json")
    times = backends[0].schedule.split.times
    for tokens, paths in times.points.items():
        print(f"  {tokens} tokens: {', '.join(f'{path} {t:.1f} us' for path, t in paths.items())}")
        served = backends[0].schedule.at(tokens)
        assert (served is None) == (winner(paths) is None)
    process.forget()
    again, _, _ = built(SHAPES["64 experts, top 8"])
    again[0].backend.run_moe(x, ids, router_weights, output_dtype=x.dtype)
    assert len(measured) == 1
    assert again[0].backend.schedule.split.source == "stored"
    assert caplog.text.count("measured in") == 1
    content = json.loads(file.read_text())
    content["card"]["name"] = "another"
    file.write_text(json.dumps(content))
    process.forget()
    other, _, _ = built(SHAPES["64 experts, top 8"])
    other[0].backend.run_moe(x, ids, router_weights, output_dtype=x.dtype)
    assert len(measured) == 2
    assert "of another card (name)" in caplog.text


def test_the_command(tmp_path: File) -> None:
    command = [sys.executable, "-m", "trtllm_b12x", "tune", "--hidden", "1024", "--intermediate", "512", "--experts", "64"]
    command += ["--top-k", "8", "--activation", "swiglu", "--ep", "2", "--skewed", "--json", str(tmp_path / "out.json")]
    result = subprocess.run(command, env=os.environ, capture_output=True, text=True, cwd=File(__file__).parents[2])
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["tables"][0]["microseconds"]) >= 5
    assert found["tables"][0]["seconds"] <= BUDGET_S
    assert torch.cuda.get_device_name() in result.stdout
