# SPDX-License-Identifier: Apache-2.0
"""Which class serves a layer, what became of a process's layers, and the one line about it."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trtllm_b12x
from tests import layers
from tests.checkpoints import random_experts
from trtllm_b12x import environment
from trtllm_b12x.decision import Environment, RejectReason, Resolution, families
from trtllm_b12x.engines.trtllm import promote
from trtllm_b12x.engines.trtllm.fused_moe import FlashInferNvfp4Sm12xFusedMoE
from trtllm_b12x.kernels.reference import ReferenceKernel

host = layers.host
create_moe = host.create_moe


@pytest.fixture(autouse=True)
def _restored(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, logger="trtllm_b12x")
    trtllm_b12x.uninstall()
    original = create_moe.get_moe_cls
    yield
    trtllm_b12x.uninstall()
    assert create_moe.get_moe_cls is original


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "MoE layers on b12x" in record.getMessage()]


def test_layers_are_counted_while_they_live(caplog: pytest.LogCaptureFixture) -> None:
    tensors = random_experts(4, 128, 192)
    modules = [layers.create(4, 128, 192) for _ in range(3)]
    modules.append(layers.create(4, 128, 192, bias=False, apply_router_weight_on_input=True, top_k=1))
    for module in modules:
        layers.load(module, tensors)
    assert lines(caplog) == ["rank 0: 3 of 4 MoE layers on b12x, decode below 64 tokens (NVFP4)"]
    status = trtllm_b12x.status()
    assert (status.generation, status.layers, status.promoted) == ("embedded", 4, 3)
    assert status.reasons == {"ROUTER_WEIGHT_ON_INPUT": 1}
    # (256 - 192) columns or rows of three matrices, four experts, 4.5 bits each.
    assert status.padding_bytes == 3 * 3 * 4 * 64 * 128 * 9 // 16
    assert 0 < status.scalar_bytes <= 3 * (16 * 4 + 4)
    del module, modules[1:]
    assert trtllm_b12x.status().layers == 1


def test_a_later_draft_model_gets_a_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    tensors = random_experts(4, 128, 192)
    main = layers.load(layers.create(4, 128, 192), tensors)
    main.post_load_weights()  # a refit says nothing new
    draft = layers.load(layers.create(4, 128, 192), tensors)
    assert lines(caplog) == [f"rank 0: {n} of {n} MoE layers on b12x, decode below 64 tokens (NVFP4)" for n in (1, 2)]
    assert draft is not main


def test_sums_of_atomics_are_named_after_the_load(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    old = families.b12x(Environment(tile=128))
    monkeypatch.setattr(ReferenceKernel, "features", dataclasses.replace(ReferenceKernel.features, caveat=old.caveat))
    layers.load(layers.create(4, 128, 192), random_experts(4, 128, 192))
    (line,) = lines(caplog)
    assert line == f"rank 0: 1 of 1 MoE layers on b12x, decode below 64 tokens (NVFP4); {families.ATOMIC_SUMS}"
    assert "TRTLLM_B12X_KERNELS=triton" in line
    assert not families.b12x(Environment(tile=256)).caveat


def test_while_a_layer_is_built_and_where_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may ask at any time."""
    create_weights = layers.host.methods["NVFP4"].create_weights
    seen = []

    def asking(self: Any, module: Any) -> None:
        seen.append(trtllm_b12x.status())
        create_weights(self, module)
        seen.append(trtllm_b12x.status())

    monkeypatch.setattr(layers.host.methods["NVFP4"], "create_weights", asking)
    module = layers.create(4, 128, 192)
    assert [(status.promoted, status.padding_bytes) for status in seen] == [(1, 0), (1, 0)]
    assert trtllm_b12x.status().padding_bytes > 0
    module.backend._parameters.clear()
    assert trtllm_b12x.status().padding_bytes == 0


FORKS = """
import os, signal, threading, torch
torch.set_num_threads(1)
from tests import layers
import trtllm_b12x
inside, go = threading.Event(), threading.Event()
init = layers.host.CutlassFusedMoE.__init__
def waiting(self, *args, **kwargs):
    if threading.current_thread() is not threading.main_thread():
        inside.set()
        go.wait()
    init(self, *args, **kwargs)
layers.host.CutlassFusedMoE.__init__ = waiting
trtllm_b12x.install()
thread = threading.Thread(target=layers.build, args=(4, 128, 192))
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)  # where it hangs
    module = layers.build(4, 128, 192)
    os._exit(0 if trtllm_b12x.status().promoted == 1 else 3)
_, code = os.waitpid(child, 0)
go.set()
thread.join()
print(code)
"""


def test_a_fork_while_a_thread_builds() -> None:
    result = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.stdout == "0\n", result.stdout + result.stderr


def test_nothing_is_said_where_nothing_is_on_b12x(caplog: pytest.LogCaptureFixture) -> None:
    layers.load(layers.create(4, 128, 192, promote=False), random_experts(4, 128, 192))
    assert lines(caplog) == []
    status = trtllm_b12x.status()
    assert (status.layers, status.promoted, status.active, status.patches) == (0, 0, False, ())


# ---- promotion on the embedded host ------------------------------------------------------------------------------------


def config(algo: Any = host.QuantAlgo.NVFP4, **arguments: Any) -> Any:
    return host.ModelConfig(quant_config=host.QuantConfig(quant_algo=algo, group_size=16), **arguments)


@pytest.mark.embedded
def test_a_format_that_neither_side_serves(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not stay on CUTLASS, which has nothing for it on this card."""
    trtllm_b12x.install()
    verdict = Resolution.left_to_the_host(RejectReason.TRITON, "no gcc")
    mxfp8 = config(host.QuantAlgo.MXFP8, moe_backend="AUTO")
    monkeypatch.setattr(promote, "_resolve", lambda *_: verdict)
    assert promote._class_without_host_path(mxfp8, None) is None
    assert "MoE layer in MXFP8 has no implementation: TRITON: no gcc" in caplog.text


def test_threads_that_install_at_once() -> None:
    original = create_moe.create_moe_backend
    threads = [threading.Thread(target=trtllm_b12x.install) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert create_moe.create_moe_backend.__wrapped__ is original
    assert len(trtllm_b12x.status().patches) == 2
    trtllm_b12x.uninstall()
    assert create_moe.create_moe_backend is original
    assert trtllm_b12x.status().patches == ()


def test_arguments_that_the_function_may_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create_moe, "get_moe_cls", lambda *a, **k: host.CutlassFusedMoE)
    trtllm_b12x.install()
    assert create_moe.get_moe_cls(config(), None, 3) is FlashInferNvfp4Sm12xFusedMoE
    assert create_moe.get_moe_cls(config(), layer_idx=3, more=1) is FlashInferNvfp4Sm12xFusedMoE
    assert create_moe.get_moe_cls(cfg=config()) is host.CutlassFusedMoE
    assert create_moe.get_moe_cls(object()) is host.CutlassFusedMoE
    trtllm_b12x.uninstall()


def test_explain_agrees_with_what_is_built() -> None:
    trtllm_b12x.install()
    rows = layers.explained()
    adapters = SimpleNamespace(lora_target_modules=["MOE_H_to_4h"])
    assert trtllm_b12x.explain(config(lora_config=adapters)).reasons == (RejectReason.LORA,)
    assert {reason for _, said, _ in rows for reason in said} == {"LORA", "DYNAMIC_QUANTIZATION", "ATTENTION_DP", "CUDA_GRAPHS"}
    for asked, said, became in rows:
        assert said == became, asked
    for algo in (host.QuantAlgo.FP8, None):
        assert trtllm_b12x.explain(config(algo)).reasons == (RejectReason.QUANTIZATION,)
        assert create_moe.get_moe_cls(config(algo)) is host.CutlassFusedMoE


def test_a_name_bound_early_answers_as_the_host_after_uninstall() -> None:
    trtllm_b12x.install()
    bound = create_moe.get_moe_cls
    trtllm_b12x.uninstall()
    assert bound(config()) is host.CutlassFusedMoE


@pytest.mark.parametrize(("sm", "promoted"), [(120, True), (121, True), (100, False), (0, False)])
@pytest.mark.parametrize("name", ["TRTLLMGenFusedMoE", "CuteDslFusedMoE", "DeepGemmFusedMoE"])
def test_named_backends_without_a_kernel_on_this_card(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, sm: int, promoted: bool
) -> None:
    """TRTLLM is the models' own word for a protocol: it stays, and one line says what to set."""
    named = type(name, (host.CutlassFusedMoE,), {})
    monkeypatch.setattr(create_moe, "get_moe_cls", lambda *a, **k: named)
    monkeypatch.setattr(environment, "probe", lambda host, always_look=False: Environment(sm=sm))
    trtllm_b12x.install()
    expected = FlashInferNvfp4Sm12xFusedMoE if promoted and name == "CuteDslFusedMoE" else named
    for _ in range(2):
        assert create_moe.get_moe_cls(config()) is expected
    told = [record for record in caplog.records if "set moe_config.backend: CUTLASS" in record.getMessage()]
    assert len(told) == (promoted and name == "TRTLLMGenFusedMoE")
    assert create_moe.get_moe_cls(config(host.QuantAlgo.FP8)) is named
    trtllm_b12x.uninstall()


@pytest.mark.parametrize(
    ("imported", "unloaded"),
    [("trtllm_b12x; trtllm_b12x.install()", "trtllm_b12x.engines.trtllm.fused_moe"), ("trtllm_b12x.tools.cli", "torch")],
    ids=["a pipeline rank without layers", "a command without torch"],
)
def test_what_is_not_loaded_before_it_is_needed(imported: str, unloaded: str) -> None:
    code = f"import sys, {imported}; sys.exit({unloaded!r} in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
