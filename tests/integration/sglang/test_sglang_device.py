# SPDX-License-Identifier: Apache-2.0
"""Layers of SGLang on a GPU, with our real kernels: eager and captured, with reloads between. Hopper counts as SM120."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.sglang import layers
from trtllm_b12x.core import process, settings
from trtllm_b12x.engines.sglang import plugin

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = EXPERTS, HIDDEN, SIZE, TOP_K = 128, 2048, 768, 8
COUNTS = (1, 2, 4, 8, 16, 32, 64)
BOUND = 0.003


@pytest.fixture(scope="module")
def checkpoints() -> list[layers.Checkpoint]:
    layers.pretend_sm120()
    return [layers.draw(*SIZES[:3]), layers.draw(*SIZES[:3], seed=7, unequal=True)]


@pytest.fixture(scope="module", params=["cuda", "triton"])
def made(request: pytest.FixtureRequest, checkpoints: list[layers.Checkpoint]) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setenv(settings.KERNELS.name, request.param)
        patch.setenv(settings.CROSSOVER.name, "65")
        patch.setenv(settings.HOPPER.name, "1")
        process.forget()
        plugin.install()
        made = layers.layer(checkpoints[0], *SIZES, device="cuda")
        layers.call(made, *given(1))  # judges SGLang's path
        layers.served_by_sglang.clear()
        yield made
        plugin.uninstall()


def given(tokens: int) -> tuple[torch.Tensor, Any]:
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to("cuda", torch.bfloat16)
    return x, layers.routes(tokens, EXPERTS, TOP_K, tokens, "cuda")


def captured(run: Callable[[], torch.Tensor], times: int = 1) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            output = run()
    return graph, output


def test_calls_graphs_and_reloads(made: Any, checkpoints: list[layers.Checkpoint]) -> None:
    graphs, took = {}, {}
    for tokens in COUNTS:
        x, topk = given(tokens)
        eager = layers.call(made, x, topk)
        assert layers.distance(eager, checkpoints[0].expected(x, topk.topk_ids, topk.topk_weights)) < BOUND
        graph, output = captured(functools.partial(layers.call, made, x, topk))
        output.zero_()
        graph.replay()
        assert torch.equal(output, eager), tokens
        graphs[tokens] = graph, output, x, topk
        many, _ = captured(functools.partial(layers.call, made, x, topk), 20)
        took[tokens] = round(_microseconds(many) / 20, 1)
    print(f"us a call of a graph: {took}")
    layers.load(made, checkpoints[1])
    for tokens, (graph, output, x, topk) in graphs.items():
        expected = checkpoints[1].expected(x, topk.topk_ids, topk.topk_weights)
        output.zero_()
        graph.replay()
        assert layers.distance(output, expected) < BOUND, tokens
        assert layers.distance(layers.call(made, x, topk), expected) < BOUND
    x, topk = given(4)
    topk.topk_ids[1:, 3:] = -1
    output = layers.call(made, x, topk)
    assert layers.distance(output, checkpoints[1].expected(x, topk.topk_ids, topk.topk_weights)) < BOUND
    assert not layers.served_by_sglang
    layers.load(made, checkpoints[0])


def _microseconds(graph: torch.cuda.CUDAGraph) -> float:
    times = []
    for _ in range(15):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) * 1000)
    return sorted(times)[7]


def test_the_time_of_the_host(made: Any) -> None:
    """Printed, not bounded: machines differ."""
    x, topk = given(1)
    dispatched, best = made.dispatcher.dispatch(x, topk), []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            made.quant_method.apply(made, dispatched)
        best.append((time.perf_counter() - start) / 20 * 1e6)
    print(f"host's time of apply at one token: {min(best):.1f} us")
    assert not layers.served_by_sglang


def test_torch_compile(made: Any) -> None:
    x, topk = given(3)
    dispatched = made.dispatcher.dispatch(x, topk)
    compiled = torch.compile(lambda given: made.quant_method.apply(made, given).hidden_states * 2, backend="eager")
    assert torch.equal(compiled(dispatched), made.quant_method.apply(made, dispatched).hidden_states * 2)


def test_gpt_oss(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = 32, 2880, 2880
    monkeypatch.setenv(settings.KERNELS.name, "cuda")
    monkeypatch.setenv(settings.CROSSOVER.name, "65")
    monkeypatch.setenv(settings.HOPPER.name, "1")
    layers.pretend_sm120()
    process.forget()
    plugin.install()
    with torch.no_grad(), layers.published(moe_runner_backend="flashinfer_mxfp4", quantization="mxfp4"):
        checkpoint = layers.draw_gpt_oss(*sizes, device="cuda")
        made = layers.gpt_oss_layer(checkpoint, *sizes, 4, "cuda")
        for tokens in COUNTS:
            x = torch.randn(tokens, 2880, device="cuda").to(torch.bfloat16)
            logits = torch.randn(tokens, 32, device="cuda").to(torch.bfloat16)
            values, ids = logits.float().topk(4)
            topk = layers.logits_routes(x, logits, 4, padded=tokens)
            eager = layers.call(made, x, topk)
            if tokens == 1:
                layers.served_by_sglang.clear()  # judged
            assert layers.distance(eager, checkpoint.expected(x, ids, values.softmax(1))) < 0.004, tokens
            graph, output = captured(functools.partial(layers.call, made, x, topk))
            output.zero_()
            graph.replay()
            assert torch.equal(output, eager)
    assert not layers.served_by_sglang
    plugin.uninstall()


SAVED = """
import gc, json
import torch
from torch_memory_saver import torch_memory_saver as saver
from tests.integration.sglang import layers
from tests.integration.sglang.test_sglang_device import captured, given, SIZES
from trtllm_b12x.engines.sglang import plugin
layers.pretend_sm120()
plugin.install()
first, second = layers.draw(*SIZES[:3]), layers.draw(*SIZES[:3], seed=7, unequal=True)
with torch.no_grad():
    with saver.region(tag="weights"):
        made = layers.layer(first, *SIZES, device="cuda")
    experts = vars(made)["trtllm_b12x"]
    calls = {tokens: given(tokens) for tokens in (1, 64)}
    graphs = {tokens: captured(lambda call=call: layers.call(made, *call)) for tokens, call in calls.items()}
    layers.served_by_sglang.clear()
    before = torch.cuda.mem_get_info()[0]
    saver.pause("weights")
    freed = torch.cuda.mem_get_info()[0] - before
    theirs = {tensor.untyped_storage().data_ptr() for tensor in made.state_dict().values()}
    ours = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.is_cuda]
    for tensor in ours:
        if tensor.untyped_storage().data_ptr() not in theirs:
            tensor.clone()
    torch.cuda.synchronize()  # an address of the region would fault
    saver.resume("weights")
    layers.load(made, second)
    errors = []
    for tokens, (graph, output) in graphs.items():
        x, topk = calls[tokens]
        output.zero_()
        graph.replay()
        expected = second.expected(x, topk.topk_ids, topk.topk_weights)
        errors += [layers.distance(output, expected), layers.distance(layers.call(made, x, topk), expected)]
print(json.dumps([freed, errors, len(layers.served_by_sglang)]))
"""


def test_memory_that_is_released_and_resumed() -> None:
    """The load is in SGLang's region of weights, whose memory is another after a release; weights come with an update."""
    saver = pytest.importorskip("torch_memory_saver")
    switches = {settings.KERNELS.name: "cuda", settings.CROSSOVER.name: "65", settings.HOPPER.name: "1"}
    with saver.configure_subprocess():
        environment = {**os.environ, **switches}
        done = subprocess.run([sys.executable, "-c", SAVED], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    freed, errors, theirs = json.loads(done.stdout.splitlines()[-1])
    assert freed > 3e8
    assert max(errors) < BOUND
    assert theirs == 0


SECOND = """
import torch
from tests.integration.sglang import layers
from tests.integration.sglang.test_sglang_device import SIZES
from trtllm_b12x.engines.sglang import plugin
layers.pretend_sm120()
plugin.install()
torch.cuda.set_device(1)
checkpoint = layers.draw(*SIZES[:3])
with torch.no_grad():
    made = layers.layer(checkpoint, *SIZES, device="cuda:1")
    x, topk = torch.randn(4, SIZES[1], device="cuda:1").to(torch.bfloat16), layers.routes(4, SIZES[0], SIZES[3], device="cuda:1")
    output = layers.call(made, x, topk)
print(layers.distance(output, checkpoint.expected(x, topk.topk_ids, topk.topk_weights)), torch._C._cuda_hasPrimaryContext(0))
"""


def test_a_rank_on_another_gpu() -> None:
    """It makes no context on GPU 0, which costs that rank memory."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    switches = {settings.KERNELS.name: "cuda", settings.CROSSOVER.name: "65", settings.HOPPER.name: "1"}
    environment = {**os.environ, **switches}
    done = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    error, context = done.stdout.split()[-2:]
    assert float(error) < BOUND
    assert context == "False"


def test_the_crossover_is_measured(
    checkpoints: list[layers.Checkpoint], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Not in a capture; at the first eager call, beside SGLang's path. Dense products in torch stand in for it here."""
    caplog.set_level("INFO")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(settings.CROSSOVER.name, raising=False)
    monkeypatch.setenv(settings.KERNELS.name, "cuda,gemm")
    monkeypatch.setenv(settings.HOPPER.name, "1")
    process.forget()
    plugin.install()
    checkpoint = checkpoints[0]
    values = [
        checkpoint.values(e, name, torch.device("cuda")).to(torch.bfloat16) for e in range(EXPERTS) for name in ("w3", "w1", "w2")
    ]
    fc1 = torch.stack([torch.cat(pair) for pair in zip(values[::3], values[1::3], strict=True)])
    fc2 = torch.stack(values[2::3])

    def dense(
        output: torch.Tensor, input: torch.Tensor, token_selected_experts: Any, token_final_scales: Any, **rest: Any
    ) -> Any:
        up, gate = (input @ fc1.mT).chunk(2, dim=-1)
        each = (torch.nn.functional.silu(gate) * up) @ fc2.mT  # (E, T, H)
        share = torch.zeros(len(input), EXPERTS, device="cuda").scatter_add_(1, token_selected_experts.long(), token_final_scales)
        return [output.copy_((each * share.T.unsqueeze(-1)).sum(0))]

    monkeypatch.setattr(layers, "cutlass_in_torch", dense)
    with torch.no_grad():
        made = layers.layer(checkpoint, *SIZES, device="cuda")
        dispatch = vars(made)["trtllm_b12x"].dispatch
        x, topk = given(8)
        layers.call(made, *given(1))
        assert "measured in" in caplog.text
        assert "wrongly" not in caplog.text
        print([line for line in caplog.messages if "measured in" in line or "own path" in line])
        assert dispatch.schedule.policy.measured
        for tokens in (1, 8, 64, 256):
            x, topk = given(tokens)
            expected = checkpoint.expected(x, topk.topk_ids, topk.topk_weights)
            assert layers.distance(layers.call(made, x, topk), expected) < 0.01
    assert list(tmp_path.rglob("crossover-*.json"))
    plugin.uninstall()
