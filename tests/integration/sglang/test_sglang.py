# SPDX-License-Identifier: Apache-2.0
"""Layers of SGLang with the package, on the CPU: torch stands in for ``cuda`` and for FlashInfer."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.clock import Clock, standing_in
from tests.integration.sglang import layers
from trtllm_b12x.core import process, settings
from trtllm_b12x.dispatch.policy import HOST
from trtllm_b12x.engines import rebinding
from trtllm_b12x.engines.sglang import experts, facts, plugin

EXPERTS, TOP_K, HIDDEN, SIZE = 8, 2, 256, 128
BOUND = 0.003


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for switch in (settings.KERNELS, settings.CROSSOVER):
        monkeypatch.delenv(switch.name, raising=False)
    process.forget()
    layers.pretend_sm120()
    monkeypatch.setattr(importlib.import_module("trtllm_b12x.engines.sglang.experts"), "pretended_sm", 120)
    monkeypatch.setenv(settings.CROSSOVER.name, "65")
    plugin.install()
    with torch.no_grad():
        yield
    plugin.uninstall()
    process.forget()


def built(checkpoint: layers.Checkpoint, **more: Any) -> Any:
    return layers.layer(checkpoint, EXPERTS, HIDDEN, SIZE, TOP_K, **more)


def called(made: Any, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Any, bool]:
    """Call a layer. Return its output, x, routes, and whether SGLang served the call."""
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    topk = layers.routes(tokens, EXPERTS, TOP_K, seed)
    layers.served_by_sglang.clear()
    return layers.call(made, x.clone(), topk), x, topk, bool(layers.served_by_sglang)


def error(made: Any, checkpoint: layers.Checkpoint, tokens: int, *more: Any) -> float:
    """Return the distance from float32 of a call that we serve."""
    output, x, topk, theirs = called(made, tokens)
    assert not theirs
    return layers.distance(output, checkpoint.expected(x, topk.topk_ids, topk.topk_weights, *more))


def test_calls_and_reloads() -> None:
    checkpoint = layers.draw(EXPERTS, HIDDEN, SIZE)
    made = built(checkpoint)
    for tokens in (1, 5, 64):
        assert error(made, checkpoint, tokens) < BOUND
    assert called(made, 65)[3]
    other = layers.draw(EXPERTS, HIDDEN, SIZE, seed=7, unequal=True)
    layers.load(made, other)
    for tokens in (1, 5, 64):
        assert error(made, other, tokens) < BOUND
    made.w13_weight.data, made.g2_alphas.data = made.w13_weight.data.clone(), made.g2_alphas.data.clone()
    assert error(made, other, 5) < BOUND


def test_prompts_are_sglangs_to_the_bit() -> None:
    checkpoint = layers.draw(EXPERTS, HIDDEN, SIZE)
    with_us = called(built(checkpoint), 70)
    plugin.uninstall()
    without = called(built(checkpoint), 70)
    assert with_us[3]
    assert torch.equal(with_us[0], without[0])


def test_scales_that_sglang_takes_otherwise() -> None:
    """Gate and up that differ, and W4A16_NVFP4 without input scales: ours are right, and SGLang's are not."""
    unequal = layers.draw(EXPERTS, HIDDEN, SIZE, seed=3, unequal=True)
    made = built(unequal)
    assert error(made, unequal, 5) < BOUND
    output, x, topk, theirs = called(made, 70)
    assert theirs
    assert layers.distance(output, unequal.expected(x, topk.topk_ids, topk.topk_weights)) > 0.1
    weights_only = layers.draw(EXPERTS, HIDDEN, SIZE, seed=4, inputs=False)
    assert error(built(weights_only, algo="W4A16_NVFP4"), weights_only, 5) < BOUND


@pytest.mark.parametrize(
    ("more", "constants"),
    [
        ({"swiglu_limit": 0.5}, (1.0, 0.0, 0.5)),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.5}, (1.702, 1.0, 0.5)),
    ],
    ids=["clamped", "gpt-oss"],
)
def test_constants_of_swiglu(more: dict[str, float], constants: tuple[float, float, float]) -> None:
    checkpoint = layers.draw(EXPERTS, HIDDEN, SIZE)
    made = built(checkpoint, **more)
    if layers.has_limits():
        assert error(made, checkpoint, 5, "Swiglu", constants) < 0.004
        kernel = vars(made)["trtllm_b12x"].dispatch.schedule.kernels[0]
        before = kernel.weights.epilogue.swiglu_limit.data_ptr()
        layers.load(made, checkpoint)
        assert kernel.weights.epilogue.swiglu_limit.data_ptr() == before  # captured graphs read it
    else:
        assert called(made, 5)[3]


def test_relu2() -> None:
    checkpoint = layers.draw(EXPERTS, HIDDEN, SIZE, gated=False)
    assert error(built(checkpoint, activation="relu2", is_gated=False), checkpoint, 5, "Relu2") < BOUND


@pytest.fixture
def gpt_oss() -> Iterator[None]:
    with layers.published(moe_runner_backend="flashinfer_mxfp4", quantization="mxfp4"):
        yield


@pytest.mark.usefixtures("gpt_oss")
def test_gpt_oss_routes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = layers.draw_gpt_oss(EXPERTS, 224, SIZE)
    made = layers.gpt_oss_layer(checkpoint, EXPERTS, 224, SIZE, TOP_K)
    bypassed = importlib.import_module(f"{facts.MOE}.topk").BypassedTopKOutput

    def by_sglang(self: Any, layer_id: int | None = None) -> Any:
        values, ids = self.router_logits.topk(TOP_K)
        return layers.routes(1, EXPERTS, TOP_K)._replace(topk_ids=ids.int(), topk_weights=values.softmax(1))

    routed = mock.Mock(side_effect=by_sglang)
    monkeypatch.setattr(bypassed, "to_standard", lambda *given, **more: routed(*given, **more))
    for tokens, config, ours in ((1, {}, True), (5, {}, True), (64, {}, True), (5, {"renormalize": False}, False)):
        x = torch.randn(tokens, 224).to(torch.bfloat16)
        logits = torch.randn(tokens, EXPERTS)
        values, ids = logits.topk(TOP_K)
        layers.served_by_sglang.clear()
        routed.reset_mock()
        output = layers.call(made, x, layers.logits_routes(x, logits, TOP_K, **config))
        assert layers.distance(output, checkpoint.expected(x, ids, values.softmax(1))) < 0.004
        assert not layers.served_by_sglang
        assert routed.called != ours
    rows = vars(made)["trtllm_b12x"]._rows
    long = torch.randn(500, 224).to(torch.bfloat16)
    layers.call(made, long, layers.logits_routes(long, torch.randn(500, EXPERTS), TOP_K, padded=400))
    assert vars(made)["trtllm_b12x"]._rows is rows  # captured graphs read it
    padded = layers.call(made, x, layers.logits_routes(x, logits, TOP_K, padded=3))
    assert torch.equal(padded[:3], output[:3])
    assert not padded[3:].any()


def test_experts_that_are_recorded_are_chosen_by_sglang() -> None:
    recorded = {"expert_distribution_recorder_mode": "stat"}
    with layers.published(moe_runner_backend="flashinfer_mxfp4", quantization="mxfp4", **recorded):
        made = layers.gpt_oss_layer(layers.draw_gpt_oss(EXPERTS, 224, SIZE), EXPERTS, 224, SIZE, TOP_K)
    ours = vars(made)["trtllm_b12x"]
    assert ours.dispatch is not None
    assert ours.dispatch.schedule.with_logits(5) is None


@pytest.mark.parametrize("kind", ["ep", "tp"])
def test_ranks(kind: str) -> None:
    """Of expert parallelism: ids are global, and -1 is no expert."""
    checkpoint, total = layers.draw(EXPERTS, HIDDEN, 2 * SIZE), torch.zeros(5, HIDDEN)
    try:
        for rank in range(2):
            layers.place(**{kind: 2, f"{kind}_rank": rank})
            made = layers.layer(checkpoint, EXPERTS, HIDDEN, 2 * SIZE, TOP_K)
            output, x, topk, theirs = called(made, 5)
            assert not theirs
            total += output.float()
            topk.topk_ids[2:] = -1
            assert not layers.call(made, x, topk)[2:].any()
    finally:
        layers.place()
    topk = layers.routes(5, EXPERTS, TOP_K)
    assert layers.distance(total, checkpoint.expected(x, topk.topk_ids, topk.topk_weights)) < 0.004


def test_fp4_that_ranks_have_gathered() -> None:
    """Ranks of attention DP send codes, and their scales arrive interleaved."""
    checkpoint = layers.draw(EXPERTS, HIDDEN, SIZE)
    made = built(checkpoint)
    x = torch.randn(5, HIDDEN).to(torch.bfloat16)
    topk = layers.routes(5, EXPERTS, TOP_K)
    codes, scales, rounded = layers.quantized(x, made.w13_input_scale_quant)
    layers.served_by_sglang.clear()
    output = made.quant_method.apply(made, layers.dispatched(codes, topk, scales)).hidden_states
    assert not layers.served_by_sglang
    assert layers.distance(output, checkpoint.expected(rounded, topk.topk_ids, topk.topk_weights)) < BOUND


def test_what_changes_after_the_load() -> None:
    """Nemotron-3-Super's decode of SGLang rewrites w2 between phases, and DWDP pages experts in and out."""
    checkpoint = layers.draw(EXPERTS, HIDDEN, SIZE, gated=False)
    made = built(checkpoint, activation="relu2", is_gated=False)
    for name, value in (("_nvfp4_layout_slot", (mock.Mock(is_pair=False), 0)), ("_dwdp_bound", True)):
        assert not called(made, 5)[3]
        vars(made)[name] = value
        dispatched = layers.dispatched(torch.randn(5, HIDDEN).to(torch.bfloat16), layers.routes(5, EXPERTS, TOP_K))
        layers.served_by_sglang.clear()
        made.quant_method.apply(made, dispatched)
        assert layers.served_by_sglang, name
        vars(made)[name] = False
        del vars(made)[name]


def test_what_stays_sglangs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    checkpoint = layers.draw(EXPERTS, HIDDEN, SIZE)
    for argument, reason in (
        ({"enable_eplb": True}, "EPLB, which moves experts and calls no hook"),
        ({"cpu_offload_gb": 1}, "offloading, which moves weights between calls"),
    ):
        with layers.published(**argument):
            assert called(built(checkpoint), 5)[3]
        assert reason in caplog.text
    half = built(checkpoint, params_dtype=torch.float16)
    assert vars(half)["trtllm_b12x"].dispatch is None
    assert "activations of torch.float16" in caplog.text
    made = built(checkpoint)
    vars(made).pop("trtllm_b12x")
    assert called(made, 5)[3]
    assert "another method than ModelOpt's NVFP4 or gpt-oss's MXFP4" in caplog.text


def test_what_sglang_computes_otherwise_is_said(caplog: pytest.LogCaptureFixture) -> None:
    built(layers.draw(EXPERTS, HIDDEN, SIZE, seed=3, unequal=True))
    assert (
        "SGLang's flashinfer_cutlass applies gate's to both: prompts, which it serves, are off by a factor of up to 1."
        in caplog.text
    )
    built(layers.draw(EXPERTS, HIDDEN, SIZE, seed=4, inputs=False), algo="W4A16_NVFP4")
    assert "by a scale of 1, with a relative error of about 0.17" in caplog.text
    runner = importlib.import_module("trtllm_b12x.engines.sglang.runner")
    backend = mock.Mock(runner_backend=mock.Mock(value="flashinfer_trtllm"))
    runner.loading(mock.Mock(quant_method=mock.Mock(runner=backend)))
    assert "With --moe-runner-backend flashinfer_cutlass our kernels serve them" in caplog.text


def test_output_that_ranks_share() -> None:
    """Symmetric memory comes from SGLang's own context."""
    made = built(layers.draw(EXPERTS, HIDDEN, SIZE))
    expected = called(made, 5)[0]
    module: Any = importlib.import_module(facts.CUTLASS)
    vars(made)["trtllm_b12x"]._symmetric = True
    entered = mock.MagicMock()
    with mock.patch.object(module, "use_symmetric_memory", mock.Mock(return_value=entered)) as used:
        output = called(made, 5)[0]
    used.assert_called_once()
    entered.__enter__.assert_called_once()
    assert torch.equal(output, expected)


def test_memory_of_a_load_is_in_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region of torch_memory_saver is one of a thread. What is allocated there is lost at a release."""
    threads, load = [], experts.Experts.load

    def noted(self: Any, layer: Any) -> None:
        threads.append(threading.current_thread())
        load(self, layer)

    monkeypatch.setattr(experts.Experts, "load", noted)
    assert not called(built(layers.draw(EXPERTS, HIDDEN, SIZE)), 5)[3]
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_torch_compile_traces_nothing_of_ours() -> None:
    checkpoint = layers.draw(EXPERTS, HIDDEN, SIZE)
    made = built(checkpoint)
    x, topk = torch.randn(5, HIDDEN).to(torch.bfloat16), layers.routes(5, EXPERTS, TOP_K)
    dispatched = layers.dispatched(x, topk)
    compiled = torch.compile(lambda given: made.quant_method.apply(made, given).hidden_states * 2, backend="eager")
    layers.served_by_sglang.clear()
    assert torch.equal(compiled(dispatched), made.quant_method.apply(made, dispatched).hidden_states * 2)
    assert not layers.served_by_sglang


def test_a_fault_of_ours_leaves_the_layer_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = layers.draw(EXPERTS, HIDDEN, SIZE)
    plugin.uninstall()
    without = called(built(checkpoint), 5)[0]
    plugin.install()
    fault = mock.Mock(side_effect=RuntimeError("injected"))
    for name in ("runner.loaded", "nvfp4.NVFP4Experts.view", "experts.Experts._planned", "experts.Experts.call"):
        with monkeypatch.context() as patch:
            patch.setattr(f"trtllm_b12x.engines.sglang.{name}", fault)
            output, _, _, theirs = called(built(checkpoint), 5)
        assert theirs, name
        assert torch.equal(output, without), name


def test_found_by_sglangs_own_loader() -> None:
    """In a process that has imported nothing of ours. What imports no layers pays for none, torch included."""
    code = (
        "import sys\n"
        "from trtllm_b12x.engines.sglang import facts, plugin\n"
        "plugin.register()\n"
        "assert 'torch' not in sys.modules\n"
        "from tests.integration.sglang import layers\n"
        "layers._without_torchvision()\n"
        "from sglang.srt import plugins\n"
        "plugin.hook.stop()\n"
        "plugins.load_plugins()\n"
        "import importlib\n"
        "assert not plugin._rebound or facts.CUTLASS in sys.modules\n"
        "module = importlib.import_module(facts.CUTLASS)\n"
        "ours = facts.pool()._fused_funcs\n"
        "assert all(ours[key].__wrapped__ is getattr(module, name) for key, name in facts.FUNCTIONS.items())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_undo_reaches_old_layers() -> None:
    checkpoint = layers.draw(EXPERTS, HIDDEN, SIZE)
    made = built(checkpoint)
    assert not called(made, 5)[3]
    plugin.uninstall()
    assert called(made, 5)[3]


def test_another_sglang_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.uninstall()
    functions = dict(facts.pool()._fused_funcs)
    module = importlib.import_module(facts.CUTLASS)
    changed = next(iter(facts.FUNCTIONS.values()))
    monkeypatch.setattr(module, changed, lambda dispatch_output, quant_info, runner_config, more: None)
    with pytest.raises(rebinding.UnknownEngineError, match="takes dispatch_output quant_info runner_config more"):
        plugin.install()
    assert facts.pool()._fused_funcs == functions


@pytest.mark.parametrize("wrong", [False, True])
def test_sglangs_own_path_is_judged_and_measured(
    wrong: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(settings.CROSSOVER.name)
    caplog.set_level(logging.INFO)
    if wrong:
        run = layers.cutlass_in_torch

        def one_and_a_half(output: torch.Tensor, **rest: Any) -> list[torch.Tensor]:
            return [run(output, **rest)[0].mul_(1.5)]

        monkeypatch.setattr(layers, "cutlass_in_torch", one_and_a_half)
    checkpoint = layers.draw(EXPERTS, HIDDEN, SIZE)
    with standing_in(Clock(lambda name, tokens: (1.0 if tokens > 20 else 3.0) if name == HOST else 2.0)) as clock:
        made = built(checkpoint)
        called(made, 5)
        for tokens, ours in ((5, True), (16, True), (30, wrong)):
            assert called(made, tokens)[3] != ours, tokens
    assert len(clock.asked) == 1
    assert ("SGLang 0.5" in caplog.text and "wrongly" in caplog.text) == wrong
    assert list(tmp_path.rglob("crossover-*.json"))
