# SPDX-License-Identifier: Apache-2.0
"""The door on a real GPU (Hopper counts as SM120): calls beside other streams, graphs, and vLLM's whole layer."""

from __future__ import annotations

import gc
import importlib
import logging
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.vllm import layers, whole
from trtllm_b12x.core import process, settings
from trtllm_b12x.dispatch.policy import HOST
from trtllm_b12x.engines.vllm import facts, machine, marlin, plugin
from trtllm_b12x.kernels import MoECall

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = 128, 8, 2048, 768
REFUSAL = marlin.refusal
CALLS = 20_000
FORMATS = ("MXFP4", "MXFP8", "W4A16_NVFP4", "NVFP4")
"""NVFP4 on Hopper, where W4A16_NVFP4 stands in for Marlin."""


@pytest.fixture(scope="module", params=FORMATS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any, Any, layers.Experts]]:
    with pytest.MonkeyPatch.context() as patch, layers.vllm_config("cuda"), torch.no_grad():
        for switch in (settings.KERNELS, settings.CROSSOVER):
            patch.delenv(switch.name, raising=False)
        patch.setenv(settings.HOPPER.name, "1")
        patch.setattr(marlin, "refusal", lambda *layer: "")  # ours serve, whatever is faster
        plugin.install()
        config = layers.config_of(*SIZES, device="cuda")
        experts = layers.random_experts(request.param, SIZES[0], *SIZES[2:], "cuda")
        method, layer = layers.loaded(request.param, config, experts)
        assert "Sm12x" in type(method.moe_kernel.fused_experts).__name__
        layers.call(method, layer, *layers.routes(config, 4096, 0, "cuda"))  # the profile run
        assert not method.moe_kernel.fused_experts.dispatch.should_measure()
        yield method, layer, config, experts
        plugin.uninstall()


def test_calls_beside_other_streams(served: Any) -> None:
    method, layer, config, experts = served
    counts = (1, 3, 8, 17, 64, 200)
    calls = {tokens: layers.routes(config, tokens, 0, "cuda") for tokens in counts}
    expected = {tokens: layers.call(method, layer, *call) for tokens, call in calls.items()}
    for tokens in counts:
        error = layers.distance(expected[tokens], experts.expected(*calls[tokens]))
        assert error < 0.06, (tokens, error)
    # vLLM calls a layer on one stream at a time: its workspace is one for the process.
    stream, *others = (torch.cuda.Stream() for _ in range(3))
    a = torch.randn(1024, 1024, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for n in range(CALLS):
        tokens = counts[n % len(counts)]
        with torch.cuda.stream(stream):
            wrong += (layers.call(method, layer, *calls[tokens]) != expected[tokens]).any()
        with torch.cuda.stream(others[n % 2]):
            a @ a
        if n % 500 == 499:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert int(wrong) == 0


def test_graphs_in_random_order(served: Any) -> None:
    method, layer, config, _ = served
    captured: dict[int, Any] = {}
    pool = torch.cuda.graph_pool_handle()
    for tokens in (256, 200, 128, 96, 64, 48, 32, 16, 8, 4, 2, 1):
        inputs = layers.routes(config, tokens, 5, "cuda")
        expected = layers.call(method, layer, *inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = layers.call(method, layer, *inputs)
        captured[tokens] = graph, result, expected, inputs  # which the graph reads
    order = random.Random(0)
    for _ in range(500):
        graph, result, expected, _ = captured[order.choice(list(captured))]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


def test_apply_allocates_nothing(served: Any) -> None:
    method, layer, config, experts = served
    ours, sizes = method.moe_kernel.fused_experts, (config.num_experts, config.num_experts, None, config.activation)
    for tokens in (1, 8, 64, 300, 2000):
        x, weights, ids = layers.routes(config, tokens, 3, "cuda")
        shapes = ours.workspace_shapes(tokens, layer.w13_weight.shape[1], config.hidden_dim, ids.shape[1], *sizes)
        first, second, out = (torch.empty(shape, dtype=x.dtype, device="cuda") for shape in shapes)
        arguments: dict[str, Any] = dict.fromkeys(facts.APPLY[1:])
        arguments |= {"output": out, "hidden_states": x, "w1": layer.w13_weight, "w2": layer.w2_weight, "topk_ids": ids}
        arguments |= {"topk_weights": weights, "workspace13": first, "workspace2": second, "apply_router_weight_on_input": False}
        ours.apply(**arguments)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        ours.apply(**arguments)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, tokens
        assert layers.distance(out, experts.expected(x, weights, ids)) < 0.08, tokens


def test_a_locked_workspace_suffices_for_fewer_tokens(served: Any) -> None:
    from vllm.v1.worker.workspace import lock_workspace, unlock_workspace

    method, layer, config, _ = served
    lock_workspace()  # after the profile run, as vLLM does
    try:
        for tokens in (*range(1, 260), 511, 1000, 4095):
            layers.call(method, layer, *layers.routes(config, tokens, 0, "cuda"))
    finally:
        unlock_workspace()


@pytest.mark.parametrize("sizes", [(32, 4, 2880, 2880), (32, 4, 2880, 736)], ids=["TP 1", "TP 4"])
@pytest.mark.parametrize("crossover", [None], indirect=True)
def test_gpt_oss(sizes: whole.Sizes, crossover: int | None) -> None:
    """Biases, and gate and up by turns. A row of scales has 90 bytes, or 23: an odd number."""
    with layers.vllm_config("cuda"), torch.no_grad():
        config = layers.config_of(*sizes, device="cuda", activation="swigluoai", has_bias=True)
        experts = layers.random_experts("MXFP4", sizes[0], *sizes[2:], "cuda", bias=True)
        method, layer = layers.loaded("MXFP4", config, layers.by_turns(experts))
        layers.call(method, layer, *layers.routes(config, 4096, 0, "cuda"))
        families = set(method.moe_kernel.fused_experts.dispatch.schedule.families)
        assert families == {"cuda", "triton", "gemm"}
        for tokens in (1, 8, 64, 200, 1024):
            x, weights, ids = layers.routes(config, tokens, 0, "cuda")
            expected = experts.expected(x, weights, ids, "swigluoai")
            assert layers.distance(layers.call(method, layer, x, weights, ids), expected) < 0.005, tokens


TIMED: dict[str, tuple[whole.Sizes, dict[str, Any]]] = {
    "MXFP4": ((8, 4, 2880, 2880), {"activation": "swigluoai", "has_bias": True}),
    "W4A16_NVFP4": ((16, 4, 2048, 736), {}),
    "MXFP8": ((16, 4, 2048, 704), {}),
}
"""Sizes of layers that are timed beside Marlin. vLLM pads the first two for it."""


@pytest.mark.parametrize("form", TIMED)
def test_marlin_is_timed_beside_ours(
    form: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    record_property: Callable[[str, object], None],
) -> None:
    """On random bytes, in the memory of our weights. Another start reads the times."""
    from trtllm_b12x.engines.vllm import experts

    for switch in (settings.KERNELS, settings.CROSSOVER):
        monkeypatch.delenv(switch.name, raising=False)
    monkeypatch.setenv(settings.HOPPER.name, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.DEBUG)
    results: list[torch.Tensor] = []
    timings: list[Any] = []
    runner, verdict = marlin.runner, marlin.verdict

    def watched(*layer: Any) -> Any:
        run = runner(*layer)

        def call(given: MoECall) -> torch.Tensor:
            result = run(given)
            if not torch.cuda.is_current_stream_capturing():
                results.append(result.clone())
            return result

        return call

    def decided(times: Any) -> str:
        timings.append(times)
        return verdict(times)

    monkeypatch.setattr(marlin, "refusal", REFUSAL)  # ``served`` may be alive
    monkeypatch.setattr(marlin, "runner", watched)
    monkeypatch.setattr(marlin, "verdict", decided)
    theirs = importlib.import_module(f"{layers.FUSED_MOE}.experts.marlin_moe").MarlinExperts
    slot, (sizes, more) = next(slot for slot in facts.SLOTS if slot.format == form), TIMED[form]
    with layers.vllm_config("cuda"):
        config = layers.config_of(*sizes, device="cuda", **more)
        for _ in range(2):
            process.forget()
            answer = machine.rehearse(experts.experts_class(slot, theirs), config)
            assert timings, caplog.text
            assert answer == verdict(timings[-1])
            record_property("answer", answer or "ours serve")
    first, second = timings
    record_property("microseconds", first.rows)
    assert tuple(first.rows) == marlin.COUNTS
    assert all(math.isfinite(row[name]) and row[name] > 0 for row in first.rows.values() for name in (HOST, marlin.OURS))
    assert second.rows == {n: {name: round(t, 3) for name, t in row.items()} for n, row in first.rows.items()}
    assert {len(result) for result in results} == set(marlin.COUNTS)
    assert {result.shape[1] for result in results} == {3072 if form == "MXFP4" else sizes[2]}
    assert all(bool(result.isfinite().all()) and bool(result.any()) for result in results)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    with layers.vllm_config("cuda"), whole.one_rank(), torch.no_grad():
        yield


@pytest.fixture
def crossover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int | None]:
    """Let the decode kernel serve fewer tokens than this. None: measure."""
    monkeypatch.delenv(settings.KERNELS.name, raising=False)
    monkeypatch.delenv(settings.CROSSOVER.name, raising=False)
    if request.param is not None:
        monkeypatch.setenv(settings.CROSSOVER.name, str(request.param))
    monkeypatch.setenv(settings.HOPPER.name, "1")
    monkeypatch.setattr(marlin, "refusal", lambda *layer: "")
    plugin.install()
    yield request.param
    plugin.uninstall()


def captured(block: whole.Block, x: torch.Tensor, logits: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    block(x, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = block(x, logits)
    return graph, result


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("crossover", [65, None], ids=["decode", "measured"], indirect=True)
def test_vllms_whole_layer(
    form: str, crossover: int | None, caplog: pytest.LogCaptureFixture, record_property: Callable[[str, object], None]
) -> None:
    """Compare our experts with Marlin behind vLLM's own router and weight loader: eager, captured, and with weights loaded again.

    Beyond decode, ``grouped`` rounds activations of MXFP8 to eight bits, as the checkpoint says. Marlin leaves them as they are.
    """
    if form == "NVFP4" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("vLLM has experts of its own for NVFP4")
    caplog.set_level(logging.INFO)
    drawn = layers.random_experts(form, SIZES[0], *SIZES[2:], "cuda")
    block, marlin = whole.Block(form, SIZES, "cuda"), whole.Block(form, SIZES, "cuda", "marlin")
    assert f"{form} experts run on trtllm-b12x, in place of vLLM's MARLIN" in caplog.text
    for made in (block, marlin):
        names = {name.rsplit(".", 1)[-1] for name, _ in made.named_parameters()}
        assert made.load(drawn) == names
        made(*whole.inputs(SIZES, 2048, "cuda"))  # the profile run
    assert type(block.fused_experts).__name__.endswith(f"{form}Sm12xExperts")
    assert "Marlin" in type(marlin.fused_experts).__name__
    graphs = {}
    for tokens in (1, 8, 64):
        call = whole.inputs(SIZES, tokens, "cuda")
        graph, result = captured(block, *call)
        graphs[tokens] = graph, result, call
        graph.replay()
        expected = whole.expected(drawn, SIZES, *call)
        schedule = getattr(block.fused_experts, "experts", block.fused_experts).dispatch.schedule  # behind vLLM's router
        family = schedule.at(tokens).features.name
        assert crossover is None or family == "cuda"
        ours = layers.distance(result, expected)  # before the next call: layers share their workspace
        eager, theirs = (layers.distance(layer(*call), expected) for layer in (block, marlin))
        record_property(f"{tokens} tokens", f"{family} {ours:.6f} captured, {eager:.6f} eager, Marlin {theirs:.6f}")
        if family == "grouped" and form == "MXFP8":
            assert max(ours, eager) < 0.08, tokens
        else:
            assert max(ours, eager) <= theirs, (tokens, family)

    def check(experts: layers.Experts) -> None:
        for tokens, (graph, result, call) in graphs.items():
            expected = whole.expected(experts, SIZES, *call)
            result.zero_()
            graph.replay()
            assert layers.distance(result, expected) < 0.08, tokens
            assert layers.distance(block(*call), expected) < 0.08, tokens

    held = {name: parameter.data_ptr() for name, parameter in block.named_parameters()}
    del drawn, marlin, made
    for seed in (1, 2):
        drawn = layers.random_experts(form, SIZES[0], *SIZES[2:], "cuda", seed)
        if form == "MXFP8" and seed == 1:  # of the other, vLLM derives scalars after a load
            block.load_weights(whole.checkpoint(drawn))
        else:
            block.reload(drawn)
            gc.collect()
        # Over memory that no layer holds any more.
        junk = [torch.full((1 << n,), 0xFF, dtype=torch.uint8, device="cuda") for n in range(9, 28) for _ in range(8)]
        check(drawn)
        del junk
    assert {name: parameter.data_ptr() for name, parameter in block.named_parameters()} == held
