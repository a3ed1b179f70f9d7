# SPDX-License-Identifier: Apache-2.0
"""The door in a real vLLM, whose wheel is in this environment (``make vllm``), on the CPU."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import json
import logging
import math
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import starts
from tests import faults, forks
from tests.allocations import Allocations
from tests.clock import Clock, standing_in
from tests.integration.vllm import layers, whole
from trtllm_b12x.core import log, process, settings
from trtllm_b12x.dispatch.policy import HOST
from trtllm_b12x.engines import serving
from trtllm_b12x.engines.vllm import facts, machine, plugin, problem
from trtllm_b12x.formats import constants
from trtllm_b12x.kernels import MoECall
from trtllm_b12x.kernels.reference import CUTLASS

SIZES = 8, 2, 256, 128
_CUTLASS = "VLLM_CUTLASS" if importlib.util.find_spec("flashinfer") is None else "FLASHINFER_CUTLASS"
FORMATS = {
    "MXFP8": ("MARLIN", "TRITON_MXFP8"),
    "NVFP4": (_CUTLASS, _CUTLASS),
    "W4A16_NVFP4": ("MARLIN", "EMULATION"),
    "MXFP4": ("MARLIN", "EMULATION"),
}
"""Backend of vLLM's own choice, and of ours."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "LoRA": ({"is_lora_enabled": True}, "LoRA"),
    "activation": ({"activation": "swiglustep"}, "activation"),
    "dtype": ({"in_dtype": torch.float32}, "ACTIVATION_DTYPE"),
    "EPLB": ({"parallel": {"enable_eplb": True}}, "expert load balancing (EPLB)"),
    "all-to-all": ({"parallel": {"dp_size": 2, "use_ep": True, "ep_size": 2}}, "all-to-all of DP+EP"),
    "batched": (
        {"parallel": {"dp_size": 2, "use_ep": True, "all2all_backend": "deepep_low_latency"}},
        "all-to-all of DP+EP",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def pretended() -> Iterator[None]:
    layers.pretend_sm120()
    with layers.vllm_config():
        yield


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for switch in (settings.KERNELS, settings.CROSSOVER):
        monkeypatch.delenv(switch.name)
    plugin.install()
    yield
    plugin.uninstall()


def chosen(form: str, **more: Any) -> tuple[str, Any]:
    """Ask vLLM's oracle as its ModelOpt method does."""
    method = layers.method_of(form, layers.config_of(*SIZES, **more))
    backend = getattr(method, f"{form[-5:].lower()}_backend")
    return backend.name, method.experts_cls


def experts_of(method: Any) -> Any:
    return method.moe_kernel.fused_experts


def test_vllms_loader_finds_the_entry_point() -> None:
    from vllm.plugins import load_plugins_by_group

    assert load_plugins_by_group("vllm.general_plugins")["trtllm_b12x"] is plugin.register


@pytest.mark.parametrize("form", FORMATS)
def test_the_oracle_answers_ours_and_undoing_it_answers_theirs(form: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend, ours = chosen(form)
    assert (backend, ours.__name__) == (FORMATS[form][1], f"{form}Sm12xExperts")
    assert f"{form} experts run on trtllm-b12x" in caplog.text
    assert not ours.__abstractmethods__
    plugin.uninstall()
    assert chosen(form)[0] == FORMATS[form][0]
    assert "trtllm_b12x" not in chosen(form)[1].__module__
    for name in facts.REBOUND:
        modules = [module for module in list(sys.modules.values()) if name.name in vars(module)]
        assert len(modules) > 1
        assert {vars(module)[name.name].__module__ for module in modules} == {name.module}
        assert all(not hasattr(vars(module)[name.name], "__wrapped__") for module in modules)


ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "SwiGLU": ("silu", {}),
    "GELU": ("gelu_tanh", {}),
    "limit": ("silu", {"swiglu_limit": 0.5}),
    "ReLU2": ("relu2_no_mul", {}),
    "float16": ("silu", {"in_dtype": torch.float16}),
}
CASES = [
    (form, name, size)
    for form in FORMATS
    for name in ACTIVATIONS
    for size in (128, 96)
    if not (form.startswith("MX") and name == "float16")  # no kernels
]


@pytest.mark.parametrize(("form", "name", "size"), CASES)
def test_the_modular_kernel_computes_the_layer(form: str, name: str, size: int) -> None:
    """Rows of 96 columns have scales that fill no words."""
    activation, more = ACTIVATIONS[name]
    config = layers.config_of(*SIZES[:3], size, activation=activation, **more)
    experts = layers.random_experts(form, *SIZES[:1], *SIZES[2:3], size, gated=activation != "relu2_no_mul")
    method, layer = layers.loaded(form, config, experts)
    # NVFP4 beyond decode is vLLM's own, on a GPU. It refuses gate and up off the tile: ours serve every count.
    counts = (1, 5, 63) if experts_of(method).slot.pair else (1, 5, 63, 70)
    assert experts_of(method).slot.pair == (form == "NVFP4" and (size == 128 or name == "ReLU2"))
    check(form, config, experts, method, layer, counts, more.get("swiglu_limit"))


def check(
    form: str, config: Any, experts: Any, method: Any, layer: Any, counts: Sequence[int], limit: float | None = None
) -> None:
    for tokens in counts:
        x, weights, ids = layers.routes(config, tokens)
        expected = experts.expected(x, weights, ids, config.activation.value, limit or math.inf)
        error = layers.distance(layers.call(method, layer, x, weights, ids), expected)
        # In MXFP8 ``grouped`` rounds activations to eight bits beyond decode.
        assert error < (0.08 if tokens > 63 and form == "MXFP8" else 0.004), (tokens, error)


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_vllms_own_and_followed_wherever_they_go(form: str) -> None:
    config, experts = layers.config_of(*SIZES), layers.random_experts(form, SIZES[0], *SIZES[2:])
    method, layer = layers.loaded(form, config, experts)
    x, weights, ids = layers.routes(config, 5)
    before = layers.call(method, layer, x, weights, ids)
    ours = experts_of(method)
    bound = ours.dispatch.schedule.kernels[0].weights
    held = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    for name in (*bound.stored_fields, *(("fc2_alpha",) if hasattr(bound, "fc2_alpha") else ())):
        assert getattr(bound, name).untyped_storage().data_ptr() in held, name
    codes = layer.w13_weight.data
    layer.w13_weight.data.copy_(codes.roll(1, 0).clone())  # written over: a captured graph reads the same
    moved = layers.call(method, layer, x, weights, ids)
    assert layers.distance(moved, before.float()) > 0.1
    layer.w13_weight.data = layer.w13_weight.data.roll(-1, 0).clone()  # elsewhere
    assert torch.equal(layers.call(method, layer, x, weights, ids), before)
    method, again = layers.loaded(form, config, experts, method)  # as a reload builds the kernel anew
    assert torch.equal(layers.call(method, again, x, weights, ids), before)


@pytest.mark.parametrize(
    ("form", "more"),
    [*((form, {"swiglu_limit": 0.5}) for form in FORMATS), ("MXFP4", {"activation": "swigluoai", "has_bias": True})],
)
def test_sleep_level_2_discards_nothing_that_a_reload_does_not_write(
    form: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM builds and loads a model in a pool of its thread. Level 2 discards what lies there, and buffers alone are restored."""
    monkeypatch.setattr(constants, "_tensors", {})  # as in a process that loads this model first
    machine._rehearsed.clear()
    config, turns = layers.config_of(*SIZES, **more), "activation" in more
    experts = layers.random_experts(form, SIZES[0], *SIZES[2:], bias=turns)
    stored = layers.by_turns(experts) if turns else experts
    with Allocations() as pool:
        method, layer = layers.loaded(form, config, stored)
    x, weights, ids = layers.routes(config, 5)
    expected = experts.expected(x, weights, ids, config.activation.value, config.swiglu_limit or math.inf)
    assert layers.distance(layers.call(method, layer, x, weights, ids), expected) < 0.004
    captured = experts_of(method).dispatch.schedule.at(5)
    pool.discard()
    layers.reload(method, layer, stored)
    assert layers.distance(layers.call(method, layer, x, weights, ids), expected) < 0.004
    assert layers.distance(captured.run(MoECall(x, ids, weights)), expected) < 0.004


@pytest.mark.parametrize("backend", dict.fromkeys(("VLLM_CUTLASS", _CUTLASS)))
@pytest.mark.parametrize("spread", [1.0, 2.0])
def test_graphs_captured_on_dummy_weights_are_right_with_others(
    backend: str, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's dummy scales are equal; a checkpoint's differ from expert to expert, and between gate and up."""
    if backend != _CUTLASS:
        theirs = importlib.import_module(f"{layers.FUSED_MOE}.experts.flashinfer_cutlass_moe").FlashInferExperts
        monkeypatch.setattr(theirs, "_supports_current_device", staticmethod(lambda: False))
    config, experts = layers.config_of(*SIZES), layers.random_experts("NVFP4", SIZES[0], *SIZES[2:], seed=1)
    experts.parameters["w13_input_scale"] *= torch.linspace(1, spread, 8).view(-1, 1)
    method, layer = layers.loaded("NVFP4", config, layers.random_experts("NVFP4", SIZES[0], *SIZES[2:]))
    assert method.nvfp4_backend.name == backend
    x, weights, ids = layers.routes(config, 5)
    layers.call(method, layer, x, weights, ids)
    captured = experts_of(method).dispatch.schedule.at(5)
    for other in (experts, layers.unequal(experts, 3.0), experts):
        layers.reload(method, layer, other)
        expected = other.expected(x, weights, ids)
        assert layers.distance(layers.call(method, layer, x, weights, ids), expected) < 0.003
        assert layers.distance(captured.run(MoECall(x, ids, weights)), expected) < 0.003


@pytest.mark.parametrize("ratio", [0.3, 1.004, 1.29, 8.3])
@pytest.mark.parametrize("form", ["NVFP4", "W4A16_NVFP4", "compressed NVFP4", "compressed NVFP4A16"])
def test_gate_and_up_with_scales_of_their_own(form: str, ratio: float, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM takes gate's for both, so that its prompts are wrong; that is said once, with the layer."""
    config = layers.config_of(*SIZES)
    experts = stored = layers.unequal(layers.random_experts("NVFP4", SIZES[0], *SIZES[2:]), ratio)
    if form.startswith("compressed"):
        stored, method = layers.compressed(experts), layers.compressed_method(config, form.endswith("A16"))
    else:
        method = layers.method_of(form, config)
    for _ in range(2):
        method, layer = layers.loaded(form, config, stored, method)
        for call in (layers.routes(config, tokens) for tokens in (1, 5, 63)):
            assert layers.distance(layers.call(method, layer, *call), experts.expected(*call)) < 0.003
    assert "trtllm_b12x" in method.experts_cls.__module__
    lines = [line for line in caplog.messages if "weight_scale_2 (up to" in line]
    assert len(lines) == (ratio != 1.004 and "A16" not in form)
    assert all(f"(up to {max(ratio, 1 / ratio):.3g} times)" in line and f"vLLM's {_CUTLASS}" in line for line in lines)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("placed", ["neighbors", "in turn"])
def test_partial_sums_of_two_ranks_make_the_layer(form: str, placed: str) -> None:
    """Without FlashInfer vLLM takes Marlin for NVFP4 with expert parallelism, which W4A16_NVFP4 replaces."""
    whole = layers.random_experts(form, SIZES[0], *SIZES[2:])
    x, weights, ids = layers.routes(layers.config_of(*SIZES), 5)
    total = torch.zeros(x.shape)
    for rank in (0, 1):
        local = torch.arange(8)[rank * 4 :][:4] if placed == "neighbors" else torch.arange(8)[rank::2]
        parallel = {"ep_size": 2, "ep_rank": rank, "use_ep": True}
        config = layers.config_of(*SIZES, num_local_experts=4, parallel=parallel)
        part = layers.Experts({name: tensor[local] for name, tensor in whole.parameters.items()}, whole.w13, whole.w2)
        method, layer = layers.loaded(form, config, part)
        assert "trtllm_b12x" in method.experts_cls.__module__
        layer.expert_map = torch.full((8,), -1, dtype=torch.int32)
        layer.expert_map[local] = torch.arange(4, dtype=torch.int32)
        result, table = layers.call(method, layer, x, weights, ids), experts_of(method)._local
        assert (table is not None) == (placed != "neighbors")
        layers.reload(method, layer, part)  # vLLM makes other experts; a captured graph reads the table of the first
        assert torch.equal(layers.call(method, layer, x, weights, ids), result)
        assert experts_of(method)._local is table
        total += result.float()
    assert layers.distance(total, whole.expected(x, weights, ids)) < 0.004


@pytest.mark.parametrize("form", ["MXFP8", "W4A16_NVFP4", "MXFP4"])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_biases_and_gate_and_up_by_turns(form: str, activation: str) -> None:
    """vLLM's own methods load biases in MXFP4 and for MXFP8 that it quantizes itself."""
    config = layers.config_of(*SIZES[:3], 96, activation=activation, has_bias=True)
    experts = layers.random_experts(form, SIZES[0], 256, 96, bias=True)
    method, layer = layers.loaded(form, config, layers.by_turns(experts) if activation == "swigluoai" else experts)
    if form != "MXFP4":
        given = method.moe_kernel.fused_experts
        for part, bias in ((given.quant_config._w1, layer.w13_bias), (given.quant_config._w2, layer.w2_bias)):
            part.bias = bias
        method.moe_kernel.impl.fused_experts = type(given)(config, given.quant_config)
        experts_of(method).process_weights_after_loading(layer)
    check(form, config, experts, method, layer, (1, 5, 70))


def test_zeros_fill_what_vllm_rounds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that Marlin, which cannot run here, gets gpt-oss as vLLM loads it."""
    config = layers.config_of(*SIZES[:3], 96, activation="swigluoai", has_bias=True)
    experts = layers.random_experts("MXFP4", SIZES[0], 256, 96, bias=True)
    method = layers.method_of("MXFP4", config)
    monkeypatch.setattr(method, "maybe_roundup_sizes", lambda *sizes: (512, 128))
    method, layer = layers.loaded("MXFP4", config, layers.by_turns(experts), method)
    assert (layer.w13_weight.shape, layer.w2_weight.shape) == ((8, 256, 256), (8, 512, 64))
    x, weights, ids = layers.routes(layers.config_of(*SIZES), 5)
    result = layers.call(method, layer, x, weights, ids)
    assert layers.distance(result, experts.expected(x, weights, ids, "swigluoai")) < 0.004


def test_large_scales_of_mxfp4_are_multiplied_by_gemm_alone() -> None:
    config, experts = layers.config_of(*SIZES), layers.random_experts("MXFP4", SIZES[0], *SIZES[2:])
    experts.parameters["w2_weight_scale"][3] = 140
    method, layer = layers.loaded("MXFP4", config, experts)
    assert bool(layers.call(method, layer, *layers.routes(config, 5)).isfinite().all())
    assert set(experts_of(method).dispatch.schedule.families) == {"gemm"}
    experts.parameters["w2_weight_scale"][3] = 195
    method, layer = layers.loaded("MXFP4", config, experts)
    with pytest.raises(RuntimeError, match=r"block scales of .* reach 2\*\*68: kernels take 2\*\*67 at most"):
        layers.call(method, layer, *layers.routes(config, 5))


def test_biases_of_a_pair_stay_vllms(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert "trtllm_b12x" not in chosen("NVFP4", has_bias=True)[1].__module__
    assert "BIAS" in caplog.text
    assert "trtllm_b12x" not in chosen("NVFP4", activation="swigluoai_uninterleave", has_bias=True)[1].__module__


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", REFUSED)
def test_what_ours_do_not_serve_stays_vllms(form: str, case: str, caplog: pytest.LogCaptureFixture) -> None:
    more, reason = REFUSED[case]
    caplog.set_level(logging.INFO)
    try:
        choice = chosen(form, **more)
    except (NotImplementedError, ValueError):  # vLLM's own answer
        plugin.uninstall()
        with pytest.raises((NotImplementedError, ValueError)):
            chosen(form, **more)
        return
    assert "trtllm_b12x" not in choice[1].__module__
    (line,) = (record for record in caplog.records if record.name == "trtllm_b12x")
    assert line.levelno == logging.INFO
    assert reason in line.getMessage()


def test_the_toolchain_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads Triton's cache folder, which may be large."""
    lacking = mock.Mock(return_value=())
    monkeypatch.setattr(serving.toolchain, "lacking", lacking)
    monkeypatch.setattr(machine, "candidate_kernels", lambda slot, device: {})
    for _ in range(3):
        machine.resolve(facts.SLOTS[0], layers.config_of(*SIZES, device="cuda:0"))
    lacking.assert_called_once_with(120)


@pytest.mark.parametrize("form", FORMATS)
def test_a_limit_of_zero_stays_vllms(form: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its kernels clamp to zero or do not clamp, by whether experts are parallel."""
    caplog.set_level(logging.INFO)
    assert "trtllm_b12x" not in chosen(form, swiglu_limit=0.0)[1].__module__
    assert "a SwiGLU limit of 0.0" in caplog.text
    assert "trtllm_b12x" in chosen(form, swiglu_limit=0.1)[1].__module__


def test_off_the_tile_vllm_is_left_alone_where_ours_do_not_serve_every_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(settings.KERNELS.name, "cuda,triton")
    method = layers.method_of("NVFP4", layers.config_of(*SIZES[:3], 160))
    assert "trtllm_b12x" not in method.experts_cls.__module__
    assert "experts (8 of 256 x 160): " in caplog.text


def test_mxfp4_that_vllm_converts_for_no_slot_stays_vllms(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in 0.26, whose conversion of models but gpt-oss raises for EMULATION."""
    caplog.set_level(logging.INFO)
    convert = "convert_weight_to_mxfp4_moe_kernel_format"
    monkeypatch.setattr(f"{layers.FUSED_MOE}.oracle.mxfp4.{convert}", lambda *args, **kwargs: 1 / 0)
    assert chosen("MXFP4")[0] == "MARLIN"
    assert "converts no weights for EMULATION" in caplog.text
    assert chosen("MXFP4", activation="swigluoai", has_bias=True)[0] == "EMULATION"


def test_a_layer_on_two_devices_is_not_bound(caplog: pytest.LogCaptureFixture) -> None:
    """``--cpu-offload-gb`` without UVA leaves scales on the CPU. vLLM's own experts get the call where they read the tensors."""
    for form in FORMATS:
        config, experts = layers.config_of(*SIZES), layers.random_experts(form, SIZES[0], *SIZES[2:])
        method, layer = layers.loaded(form, config, experts)
        quant = experts_of(method).quant_config
        quant._w2.scale = quant._w2.scale.to("meta")
        with pytest.raises((RuntimeError, AttributeError)) as raised:  # NVFP4: the CPU has no kernels of vLLM's
            layers.call(method, layer, *layers.routes(config, 5))
        message = "tensors of a layer are on cpu and meta: "
        assert message in (experts_of(method).fault if form == "NVFP4" else str(raised.value))


def test_a_method_that_never_prepares_scales_stays_vllms(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of ModelOpt, compressed-tensors and vLLM's own quantization call the experts' hook; Quark's of NVFP4 does not."""
    loguru = types.ModuleType("loguru")  # of compressed-tensors, which is not installed whole
    monkeypatch.setattr(loguru, "logger", mock.MagicMock(), raising=False)
    monkeypatch.setitem(sys.modules, "loguru", loguru)
    asking = {}
    for name in ("modelopt", "online.nvfp4", "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4"):
        module = importlib.import_module(f"vllm.model_executor.layers.quantization.{name}")
        for kind in vars(module).values():
            code = getattr(getattr(kind, "__init__", None), "__code__", None)
            if code and "select_nvfp4_moe_backend" in code.co_names:
                asking[name] = plugin.calls_hook(kind)
    assert list(asking.values()) == [True] * 3
    quark = importlib.import_module("vllm.model_executor.layers.quantization.quark.quark_moe")
    plugin.uninstall()
    plugin.install()
    caplog.set_level(logging.INFO)
    named = {"moe": layers.config_of(*SIZES), "quant_config": None, "weight_config": {}, "input_config": {}}
    named["activation_quant_key"] = importlib.import_module(f"{quark.kNvfp4Static.__module__}").kNvfp4Dynamic
    kind = quark.QuarkNvfp4MoEMethod
    method = kind(**{name: named[name] for name in inspect.signature(kind).parameters})
    assert "trtllm_b12x" not in method.experts_cls.__module__
    assert "does not multiply alphas by input scales" in caplog.text


@contextmanager
def configured(**fields: Any) -> Iterator[Any]:
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig(**fields)
    with set_current_vllm_config(config):
        yield config


def test_the_key_of_vllms_compile_cache_has_our_choices() -> None:
    """A graph that was compiled with Marlin pads x, ours does not: a start with us and one without share no graph."""
    hashes = []
    for forms in (("MXFP8", "MXFP4"), ("MXFP4", "MXFP8", "MXFP4"), ("MXFP8",), ()):
        with configured() as config:
            for form in forms:
                chosen(form)
        hashes.append(config.compute_hash())
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
    with configured() as config:
        for more in ({"is_lora_enabled": True}, {"parallel": {"enable_eplb": True}}):
            chosen("MXFP4", **more)
    assert config.additional_config == {}
    assert config.compute_hash() == hashes[-1]
    plugin.uninstall()
    with configured() as config:
        chosen("MXFP8")
    assert config.compute_hash() == hashes[-1]


def test_a_configuration_that_hashes_itself_leaves_vllms_choice(caplog: pytest.LogCaptureFixture) -> None:
    class Additional:
        def compute_hash(self) -> str:
            return "additional"

    caplog.set_level(logging.INFO)
    with configured(additional_config=Additional()):
        assert chosen("MXFP4")[0] == "MARLIN"
    (line,) = (record.getMessage() for record in caplog.records if record.name == "trtllm_b12x")
    assert "additional_config is not a dict" in line


def test_a_model_inside_another_has_our_choices_in_its_key() -> None:
    """vLLM gives it a copy of the configuration, which is not the current one, and compiles it with that."""
    from vllm.compilation.decorators import support_torch_compile

    @support_torch_compile(dynamic_arg_dims={"x": 0}, enable_if=lambda config: False)
    class LanguageModel(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            self.backend = chosen("MXFP8")[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with configured() as config:
        inner = copy.copy(config)
        inner.additional_config = {}
        model = LanguageModel(vllm_config=inner)
    assert model.backend == "TRITON_MXFP8"
    assert [model.vllm_config] == [inner]
    assert inner.additional_config == config.additional_config != {}


def test_a_line_names_the_layers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    layers.method_of("MXFP4", layers.config_of(8, 2, 256, 96))
    layers.method_of("MXFP4", layers.config_of(4, 2, 256, 96, is_lora_enabled=True))
    taken, left = (record.getMessage() for record in caplog.records if record.name == "trtllm_b12x")
    line = r"MXFP4 experts run on trtllm-b12x, in place of vLLM's MARLIN \(8 of 256 x 96\): kernels ready in \d+\.\d s"
    assert re.fullmatch(line, taken)
    assert left.startswith("vLLM's MARLIN keeps the MXFP4 experts (4 of 256 x 96): ")


def choices(**more: Any) -> list[str]:
    """Return the backend of each format, or vLLM's error."""
    found = []
    for form in FORMATS:
        try:
            found.append(chosen(form, **more)[0])
        except (NotImplementedError, ValueError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("sm", [0, 90, 100])
def test_other_cards_stay_vllms(sm: int) -> None:
    with layers.pretended(sm):
        ours = choices()
        plugin.uninstall()
        assert ours == choices()


@pytest.fixture
def hopper(pretended: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(settings.HOPPER.name, "1")
    with layers.pretended(90):
        yield


@pytest.mark.usefixtures("hopper")
def test_hopper_is_served_by_a_switch_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert choices() == ["TRITON_MXFP8", "EMULATION", "EMULATION", "EMULATION"]
    assert chosen("NVFP4")[1].slot.keys == facts._A4
    assert choices(moe_backend="marlin") == ["MARLIN"] * 4
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING and record.name == "trtllm_b12x"]
    assert [record.getMessage() for record in warnings] == [
        "TRTLLM_B12X_HOPPER=1: experts run on SM90 as on SM120, to be measured and not to serve"
    ]
    plugin.uninstall()
    assert choices() == ["MARLIN"] * 4


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("form", "module", "kinds", "backend"),
    [
        *((form, "fused_humming_moe", ("HummingGroupedExperts",), "HUMMING") for form in FORMATS),
        ("MXFP4", "gpt_oss_triton_kernels_moe", ("OAITritonExperts", "OAITritonMxfp4ExpertsMonolithic"), "TRITON"),
    ],
)
def test_ours_replace_whatever_vllm_takes_on_hopper(
    form: str,
    module: str,
    kinds: tuple[str, ...],
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With Humming and OpenAI's triton_kernels, which are not installed here. Only gpt-oss is given the latter."""
    caplog.set_level(logging.INFO)
    theirs = pytest.importorskip(f"{layers.FUSED_MOE}.experts.{module}")
    for kind in kinds:
        monkeypatch.setattr(getattr(theirs, kind), "is_supported_config", staticmethod(lambda *arguments: (True, None)))
    gpt_oss: dict[str, Any] = {"activation": "swigluoai", "has_bias": True} if backend == "TRITON" else {}
    plugin.uninstall()
    alone = chosen(form, **gpt_oss)[0]
    plugin.install()
    assert alone in ((backend, "MARLIN") if backend == "HUMMING" else (backend,))  # before 0.33 Marlin is before Humming
    assert "Sm12xExperts" in chosen(form, **gpt_oss)[1].__name__
    assert f"in place of vLLM's {alone}" in caplog.text


@pytest.mark.parametrize("on", ["SM90", "SM120"])
def test_nvfp4_in_place_of_marlin_reads_no_input_scales(
    on: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM chooses on Hopper, and on SM12x where neither of its CUTLASS backends serves."""
    if on == "SM90":
        request.getfixturevalue("hopper")
    for name in ("flashinfer_cutlass_moe.FlashInferExperts", "cutlass_moe.CutlassExpertsFp4"):
        monkeypatch.setattr(f"{layers.FUSED_MOE}.experts.{name}._supports_current_device", staticmethod(lambda: False))
    config = layers.config_of(*SIZES)
    experts = layers.unequal(layers.random_experts("NVFP4", SIZES[0], *SIZES[2:]), 1.29)
    method, layer = layers.loaded("NVFP4", config, experts)
    assert type(experts_of(method)).__name__ == "W4A16_NVFP4Sm12xExperts"
    check("W4A16_NVFP4", config, experts, method, layer, (1, 5, 63, 70))
    call = layers.routes(config, 5)
    before = layers.call(method, layer, *call)
    experts.parameters["w13_input_scale"] *= torch.linspace(1, 7, 8).view(-1, 1)
    experts.parameters["w2_input_scale"] *= 3
    layers.reload(method, layer, experts)
    assert torch.equal(layers.call(method, layer, *call), before)


def test_a_named_backend_is_kept_and_one_line_names_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert chosen("W4A16_NVFP4", moe_backend="marlin")[0] == "MARLIN"
    assert "drop --moe-backend marlin" in caplog.text
    process.forget()
    caplog.clear()
    assert chosen("W4A16_NVFP4", moe_backend="marlin", activation="swiglustep")[0] == "MARLIN"
    assert "drop" not in caplog.text


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that call the entry point: they log as a child of vLLM's logger, whose records pytest does not see otherwise."""
    monkeypatch.setattr(log.logger, "logger", log.logger.logger)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


LOGGED = """
import sys
from vllm.logger import _configure_vllm_root_logger as configure, init_logger
from trtllm_b12x.core import log
from trtllm_b12x.engines.vllm import plugin
if sys.argv[1] == "vLLM first":
    configure()
plugin.register()
if sys.argv[1] == "plugin first":  # in an engine of this process, or forked from it
    configure()
init_logger("vllm.theirs").info("theirs")
log.once("ours", 20)
log.once("a warning")
"""
JSON_LINES: dict[str, Any] = {
    "version": 1,
    "formatters": {"json": {"format": '{"logger": "%(name)s", "message": "%(message)s"}'}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"}},
    "loggers": {"vllm": {"handlers": ["console"], "level": "INFO", "propagate": False}},
}
"""As vLLM's documentation has it, without ``disable_existing_loggers``."""


@pytest.mark.parametrize(
    ("order", "with_file", "variables", "expected"),
    [
        ("plugin first", True, {}, ["theirs", "ours", "a warning"]),
        ("vLLM first", True, {}, ["theirs", "ours", "a warning"]),
        ("vLLM first", True, {"TRTLLM_B12X_LOG": "WARNING"}, ["theirs", "a warning"]),
        ("vLLM first", False, {"VLLM_LOGGING_LEVEL": "ERROR"}, []),
    ],
)
def test_lines_are_vllms(order: str, with_file: bool, variables: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    """They have vLLM's handlers, format and level, whichever of both is set up first."""
    file = tmp_path / "logging.json"
    file.write_text(json.dumps(JSON_LINES))
    environment = {
        **os.environ,
        "TRTLLM_B12X": "0",
        **variables,
        **({"VLLM_LOGGING_CONFIG_PATH": str(file)} if with_file else {}),
    }
    command = [sys.executable, "-c", LOGGED, order]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr.splitlines()
    names = {"theirs": "vllm.theirs"}
    records = [{"logger": names.get(message, "vllm.trtllm_b12x"), "message": message} for message in expected]
    found = [line for line in lines if any(message in line for message in ("theirs", "ours", "a warning"))]
    assert [json.loads(line) for line in found] == records


@pytest.mark.usefixtures("registered")
def test_the_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.uninstall()
    monkeypatch.setenv(settings.ENABLED.name, "0")
    plugin.register()
    assert chosen("MXFP8")[0] == "MARLIN"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("fact", "value"), [("APPLY", ("self",)), ("ABSTRACT", ()), ("CONFIG", ("no_such_field",))])
def test_an_unknown_vllm_is_left_alone_with_one_line(
    fact: str, value: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.uninstall()
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(facts, fact, value)
    plugin.register()
    assert chosen("MXFP8")[0] == "MARLIN"
    (line,) = (record.getMessage() for record in caplog.records if record.name == "vllm.trtllm_b12x")
    assert facts.version() in line
    assert "no adapter" in line


def test_the_output_given_is_written_and_workspaces_suffice_for_both_of_a_pair() -> None:
    config, experts = layers.config_of(*SIZES), layers.random_experts("NVFP4", SIZES[0], *SIZES[2:])
    method, layer = layers.loaded("NVFP4", config, experts)
    ours = experts_of(method)
    shape = 5, 256, 256, 2, 8, 8, None, config.activation
    theirs = 5, 256, 256 if ours._own.expects_unquantized_inputs else 128, 2, 8, 8, None, config.activation
    first, (second,), out_shape = ours.workspace_shapes(*shape)
    assert (first, out_shape) == ours._own.workspace_shapes(*theirs)[::2]
    assert second >= math.prod(ours._own.workspace_shapes(*theirs)[1])
    assert out_shape == (5, 256)
    x, weights, ids = layers.routes(config, 5)
    out = torch.full_like(x, torch.nan)
    arguments: dict[str, Any] = {name: None for name in facts.APPLY if name != "self"}
    arguments |= {"output": out, "hidden_states": x, "w1": layer.w13_weight, "w2": layer.w2_weight, "topk_weights": weights}
    ours.apply(**arguments | {"topk_ids": ids, "apply_router_weight_on_input": False})
    assert layers.distance(out, experts.expected(x, weights, ids)) < 0.004


def test_theirs_serves_beyond_ours_and_after_a_fault(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Their kernel needs a GPU; what it is given is looked at instead."""
    config = layers.config_of(*SIZES)
    method, layer = layers.loaded("NVFP4", config, layers.random_experts("NVFP4", SIZES[0], *SIZES[2:]))
    seen: list[int] = []

    def theirs(self: Any, out: torch.Tensor, x: torch.Tensor, *rest: Any) -> None:
        seen.append(len(x))
        out.fill_(7)

    quantize = "trtllm_b12x.engines.vllm.experts._quantize_input"
    monkeypatch.setattr(quantize, lambda x, config: (x, None))
    monkeypatch.setattr(type(experts_of(method)._own), "apply", theirs)
    assert bool((layers.call(method, layer, *layers.routes(config, 200)) == 7).all())
    assert not bool((layers.call(method, layer, *layers.routes(config, 5)) == 7).any())
    monkeypatch.setattr(experts_of(method), "call", lambda *args: 1 / 0)
    assert bool((layers.call(method, layer, *layers.routes(config, 5)) == 7).all())
    assert seen == [200, 5]
    assert "ZeroDivisionError" in caplog.text


def test_wrong_experts_of_vllms_are_found_and_replaced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where the card has measured, as a stand-in for its clock says, that they are the fastest at every count."""
    config, experts = layers.config_of(*SIZES), layers.random_experts("NVFP4", SIZES[0], *SIZES[2:])
    method, layer = layers.loaded("NVFP4", config, experts)
    monkeypatch.setattr("trtllm_b12x.engines.vllm.experts._quantize_input", lambda x, config: (x, None))
    monkeypatch.setattr(type(experts_of(method)._own), "apply", lambda self, out, *rest: out.fill_(7))
    # Of VLLM_CUTLASS each expert has an input scale of its own, which ``grouped`` does not take.
    instead, tokens = ("grouped", 200) if _CUTLASS == "FLASHINFER_CUTLASS" else ("triton", 100)
    call = layers.routes(config, tokens)
    with standing_in(Clock(lambda name, tokens: 1.0 if name == HOST else 2.0)):
        result = layers.call(method, layer, *call)
    (line,) = (text for text in caplog.messages if "wrongly" in text)
    assert line.startswith(f"vLLM {facts.version()} computes experts in ")
    assert f"{instead} serves instead" in line
    assert line.endswith("https://github.com/vllm-project/vllm/issues/48898")
    assert layers.distance(result, experts.expected(*call)) < 0.2  # activations in FP4


class Theirs:
    """Stands in for vLLM's own NVFP4 experts: the same arithmetic in torch, on its tensors, times a factor."""

    def __init__(self, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.method, self.factor, self.counts = method, 1.0, list[int]()
        monkeypatch.setattr("trtllm_b12x.engines.vllm.experts._quantize_input", lambda x, config: (x, None))
        monkeypatch.setattr(type(experts_of(method)._own), "apply", lambda _, *arguments: self.apply(*arguments))

    def apply(self, out: torch.Tensor, x: torch.Tensor, w1: Any, w2: Any, weights: Any, ids: Any, *rest: Any) -> None:
        self.counts.append(len(x))
        ours = experts_of(self.method)
        kernel, bound = CUTLASS["NVFP4"](), ours.dispatch.schedule.kernels[0]
        kernel.plan(bound.geometry, len(x), bound.device)
        kernel.bind(replace(bound.weights, fc1_alpha=ours.g1_alphas, fc1_half_alphas=None))
        out.copy_(kernel.run(MoECall(x, ids, weights)) * self.factor)


def test_prompts_of_layers_with_scales_of_their_own_run_on_grouped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is faster, where ``grouped`` takes the input scales; vLLM's experts take gate's scale for both."""
    caplog.set_level(logging.INFO, logger="trtllm_b12x")
    config, experts = layers.config_of(*SIZES), layers.random_experts("NVFP4", SIZES[0], *SIZES[2:])
    unequal = layers.unequal(experts, 0.25)
    method, layer = layers.loaded("NVFP4", config, unequal)
    theirs, call = Theirs(method, monkeypatch), layers.routes(config, 300)
    with standing_in(Clock(lambda name, tokens: 1.0 if name == HOST else 2.0)):
        served = layers.call(method, layer, *call)
        (line,) = (line for line in caplog.messages if "weight_scale_2 (up to 4 times)" in line)
        if _CUTLASS == "FLASHINFER_CUTLASS":
            assert layers.distance(served, unequal.expected(*call)) < 0.2
            assert line.endswith("applies gate's to both: grouped serves prompts instead")
        else:
            assert layers.distance(served, experts.expected(*call)) < 0.2
            assert line.endswith("prompts, which it serves, are off by a factor of up to 4")
            assert theirs.counts[-1] == 300
    assert "wrongly" not in caplog.text


@pytest.mark.parametrize("chosen_by", ["this process", "an earlier one"])
def test_vllms_experts_are_measured_and_judged_again_once_flashinfer_is_tuned(
    chosen_by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """vLLM tunes after its profile run, and captures later. The tactic that is chosen here is wrong."""
    autotuner = pytest.importorskip("flashinfer.autotuner")
    tuner = autotuner.AutoTuner.get()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, experts = layers.config_of(*SIZES), layers.random_experts("NVFP4", SIZES[0], *SIZES[2:])
    method, layer = layers.loaded("NVFP4", config, experts)

    def error(tokens: int) -> float:
        call = layers.routes(config, tokens)
        return layers.distance(layers.call(method, layer, *call), experts.expected(*call))

    theirs = Theirs(method, monkeypatch)
    with standing_in(Clock(lambda name, tokens: (1.0 if tokens > 100 else 3.0) if name == HOST else 2.0)) as clock:
        assert error(200) < 0.2  # in the profile run
        assert error(200) < 0.2
        assert len(clock.asked) == 1
        if chosen_by == "this process":
            with autotuner.autotune():
                theirs.counts.clear()
                error(5)
                assert theirs.counts == [5]  # it must see every count
        else:
            monkeypatch.setattr(tuner, "_file_configs", {"a call": ("a runner", 0)})  # of ``load_configs``
        theirs.factor = 1.5
        assert error(200) < 0.2
        assert error(200) < 0.2
        assert len(clock.asked) == 2
    assert "wrongly" in caplog.text
    tables = [json.loads(file.read_text()) for file in tmp_path.rglob("crossover-*.json")]
    assert sorted(table["paths"]["tuned"] for table in tables) == [False, True]


ITSELF = (
    "engines.vllm.plugin._wrapped",
    "engines.vllm.plugin._recording",
    "engines.rebinding.keeps",
    "engines.serving.measur",
    "dispatch.layer.LayerDispatch.measuring",
    "core.process",
)
"""What catches a fault, and what the test calls."""


@pytest.mark.parametrize("form", FORMATS)
def test_a_fault_in_any_function_leaves_a_layer_that_computes(form: str) -> None:
    """The rehearsal calls what a load and a call will call, so that a fault shows while vLLM chooses, and its choice stands."""
    config, experts = layers.config_of(*SIZES), layers.random_experts(form, SIZES[0], *SIZES[2:])
    x, weights, ids = layers.routes(config, 5)
    expected = experts.expected(x, weights, ids)

    def choose() -> Any:
        machine._rehearsed.clear()
        return layers.method_of(form, config)

    def serve(method: Any) -> float:
        method, layer = layers.loaded(form, config, experts, method)
        return layers.distance(layers.call(method, layer, x, weights, ids), expected)

    def ours(method: Any) -> bool:
        return "trtllm_b12x" in method.experts_cls.__module__

    assert ours(choose())
    targets = [code for code in faults.called(choose) if not faults.name(code).startswith(ITSELF)]
    rehearsed, method = {faults.name(code) for code in targets}, choose()
    later = {faults.name(code) for code in faults.called(lambda: serve(method))}
    assert {name for name in later - rehearsed if not name.startswith(ITSELF)} == set()
    among, left = faults.functions(), 0
    for target in targets:
        name = faults.name(target)
        if form == "MXFP8" or name.startswith("engines.vllm"):
            with faults.injected(target, among):
                method = choose()
                left += not ours(method)
                # ``grouped``, which rounds activations of MXFP8, may be left alone.
                assert not ours(method) or serve(method) < (0.08 if form == "MXFP8" else 0.004), name
    assert left > 20


def test_activations_have_kernels() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    assert {activation.value for activation in MoEActivation} > set(problem.ACTIVATIONS)


def test_in_tritons_interpreter() -> None:
    """The very kernels on layers of two experts: ``apply`` allocates nothing, for experts that are no neighbors too."""
    mxfp8, mxfp4 = forks.in_the_interpreter("tests.integration.vllm.interpreted:cases")
    assert mxfp8["kernels"] == ["TritonMXFP8Kernel", "GroupedKernel"]
    assert mxfp4["kernels"] == ["TritonMXFP4Kernel", "MXFP4ReferenceKernel"]
    assert mxfp8["errors"][0] < 0.004
    assert mxfp8["errors"][1] < 0.08  # of activations in eight bits
    assert mxfp4["errors"][0] < 0.004
    for case, calls in ((mxfp8, 2), (mxfp4, 1)):
        assert case["allocated"] == []
        assert len(case["without a workspace"]) == calls


def test_doctor_says_what_the_oracles_would_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_b12x.decision import Environment
    from trtllm_b12x.engines.vllm.report import vllm_lines

    recognized, *lines = vllm_lines(Environment(sm=120))
    assert recognized == f"{facts.version()}, recognized"
    assert [line.split(" experts run on ")[0] for line in lines] == ["NVFP4", "W4A16_NVFP4", "MXFP4", "MXFP8"]
    assert all("SM: the GPU is SM90" in line for line in list(vllm_lines(Environment(sm=90)))[1:])
    monkeypatch.setenv(settings.HOPPER.name, "1")
    assert list(vllm_lines(Environment(sm=90))) == [recognized, *lines]


def test_doctor_says_that_no_family_serves_every_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the rehearsal would find. NVFP4 has vLLM's own experts beside ours."""
    from trtllm_b12x.decision import Environment
    from trtllm_b12x.engines.vllm.report import vllm_lines

    monkeypatch.setenv(settings.KERNELS.name, "triton,grouped")
    _, nvfp4, w4a16, mxfp4, mxfp8 = vllm_lines(Environment(sm=120))
    assert nvfp4.startswith("NVFP4 experts run on triton and grouped, before ")
    assert w4a16.startswith("W4A16_NVFP4 experts stay on MARLIN: PREFILL: ")
    assert mxfp4.startswith("MXFP4 experts stay on MARLIN: PREFILL: ")
    assert mxfp8.startswith("MXFP8 experts run on triton and grouped, in place of ")
    assert "PREFILL" in machine.resolve(facts.SLOTS[-1], layers.config_of(*SIZES)).findings


@pytest.mark.parametrize("plugins", ["lora_filesystem_resolver", "", "a, trtllm_b12x", "a,trtllm_b12x"])
def test_doctor_says_that_vllm_loads_other_plugins_alone(plugins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.plugins import load_plugins_by_group

    from trtllm_b12x.decision import Environment
    from trtllm_b12x.engines.vllm.report import vllm_lines

    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    loaded = "trtllm_b12x" in load_plugins_by_group("vllm.general_plugins")
    first = next(iter(vllm_lines(Environment(sm=120))))
    assert first.endswith("recognized") is loaded
    assert (f"loads only VLLM_PLUGINS={plugins}: add trtllm_b12x to it" in first) is not loaded


@pytest.fixture(scope="module")
def one_rank(pretended: None) -> Iterator[None]:
    with whole.one_rank():
        yield


@pytest.mark.parametrize("form", ["MXFP4", "MXFP8", "W4A16_NVFP4", "NVFP4"])
@pytest.mark.usefixtures("one_rank")
def test_vllms_whole_layer_loads_computes_and_loads_again(
    form: str, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    """Compute behind vLLM's runner and weight loader. Load again: into the same tensors, and as ``reload_weights`` does.

    NVFP4 as on Hopper, in place of Marlin.
    """
    caplog.set_level(logging.INFO)
    if form == "NVFP4":
        request.getfixturevalue("hopper")
    drawn = [layers.random_experts(form, SIZES[0], *SIZES[2:], seed=seed) for seed in range(3)]
    block = whole.Block(form, SIZES, "cpu")
    assert f"{form} experts run on trtllm-b12x" in caplog.text
    assert block.load(drawn[0]) == {name.rsplit(".", 1)[-1] for name, _ in block.named_parameters()}
    calls = {tokens: whole.inputs(SIZES, tokens) for tokens in (1, 8, 63)}
    x, logits = calls[8]
    weights, ids = whole.route(x, logits, SIZES[1], renormalize=True)

    def check(experts: layers.Experts) -> None:
        for tokens, call in calls.items():
            error = layers.distance(block(*call), whole.expected(experts, SIZES, *call))
            assert error < 0.004, (tokens, error)
        # A graph that was captured before holds the addresses of the first kernel.
        error = layers.distance(first.run(MoECall(x, ids, weights)), whole.expected(experts, SIZES, x, logits))
        assert error < 0.004, error

    block(x, logits)
    assert type(block.fused_experts).__name__.endswith(f"{form}Sm12xExperts")
    first = block.fused_experts.dispatch.schedule.at(8)
    check(drawn[0])
    held = {name: parameter.data_ptr() for name, parameter in block.named_parameters()}
    if form == "MXFP8":  # of the other, vLLM derives scalars after a load
        block.load_weights(whole.checkpoint(drawn[1]))
        check(drawn[1])
    block.reload(drawn[2])
    check(drawn[2])
    assert {name: parameter.data_ptr() for name, parameter in block.named_parameters()} == held
    block.reload(drawn[1])
    check(drawn[1])


@pytest.mark.usefixtures("one_rank")
def test_torch_compile_sees_one_graph() -> None:
    block = whole.Block("W4A16_NVFP4", SIZES, "cpu")
    block.load(layers.random_experts("W4A16_NVFP4", SIZES[0], *SIZES[2:]))
    x, logits = whole.inputs(SIZES, 8)
    with block.context(8):
        explained = torch._dynamo.explain(block.experts)(hidden_states=x, router_logits=logits)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons
    operators = [str(node.target) for node in explained.graphs[0].graph.nodes if node.op == "call_function"]
    assert any(name.startswith("vllm.moe_forward") for name in operators), operators
    assert block.fused_experts.dispatch.schedule.kernels


def test_the_benchmark_of_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its processes, on the CPU, where nothing is compiled."""
    monkeypatch.setattr(starts, "STARTS", {"first": {settings.KERNELS.name: "triton,grouped"}})
    monkeypatch.setattr(sys, "argv", ["starts", str(tmp_path / "starts"), "--only", "MXFP8"])
    starts.main()
    (row,) = json.loads((tmp_path / "starts.json").read_text())["rows"]
    assert (row["start"], row["experts"]) == ("first", "MXFP8Sm12xExperts")
    assert set(row["seconds"]) == {"choice", "other choices", "load", "first call", "second call"}
    assert any("kernels ready in" in line for _, line in row["lines"])
