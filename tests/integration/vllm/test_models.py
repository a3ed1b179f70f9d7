# SPDX-License-Identifier: Apache-2.0
"""Models of two layers, built and loaded by vLLM's own loader and model classes on the CPU, and their life after sleep level 2.

vLLM's own kernels need a GPU: without the package a model is built and loaded, and its experts are not called.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.allocations import Allocations
from tests.integration.vllm import layers, models, whole
from trtllm_b12x.core import log, settings
from trtllm_b12x.engines.vllm import plugin
from trtllm_b12x.formats.geometry import Scoring
from trtllm_b12x.kernels import MoECall
from trtllm_b12x.kernels.scoring import routes_of

FORMATS = {"NVFP4": "NVFP4", "W4A16_NVFP4": "W4A16_NVFP4", "MXFP8": "MXFP8", "gpt-oss": "MXFP4"}
"""Names of ``models``, and the format of their experts."""
COUNT = 2
TOKENS = 5


@pytest.fixture(scope="module", autouse=True)
def pretended() -> Iterator[None]:
    """Stand-ins for what asks for a device, or for an extension that a CPU build cannot load."""
    layers.pretend_sm120()
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("loguru") is None:  # of compressed-tensors, which is not installed whole
            patch.setitem(sys.modules, "loguru", mock.MagicMock())
        for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
            patch.setattr(torch.accelerator, name, lambda *_: 0)
        patch.setattr(importlib.import_module(f"{layers.FUSED_MOE}.router.fused_topk_router"), "vllm_topk_softmax", _route)
        kind = importlib.import_module("trtllm_b12x.engines.vllm.monolithic").Sm12xMonolithicExperts
        patch.setattr(kind, "apply", _recording(kind.apply))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(log.logger, "logger", log.logger.logger)  # vLLM calls our entry point, which replaces it
        with layers.vllm_config(), whole.one_rank():
            yield


routes: list[tuple[torch.Tensor, torch.Tensor]] = []
"""Router weights and ids of each call that had logits."""


def _route(weights: torch.Tensor, ids: torch.Tensor, _: Any, logits: torch.Tensor, renormalize: bool = False, *rest: Any) -> Any:
    """Route as vLLM's operator does, on the CPU."""
    chosen, values = routes_of(Scoring("softmax", renormalize), weights.shape[1], logits)
    return weights.copy_(values), ids.copy_(chosen)


def _recording(apply: Any) -> Any:
    def applied(self: Any, **named: Any) -> Any:
        routes.append(routes_of(Scoring(), self.moe_config.experts_per_token, named["router_logits"])[::-1])
        return apply(self, **named)

    return applied


@dataclass
class Loaded:
    """A model, its configuration, and what was allocated while it was built and loaded."""

    name: str
    config: Any
    model: Any
    pool: Allocations

    def blocks(self) -> list[Any]:
        return [layer.mlp for layer in self.model.model.layers]

    def experts(self) -> list[Any]:
        methods = [block.experts.routed_experts.quant_method for block in self.blocks()]
        return [method.moe_kernel.fused_experts.experts for method in methods]  # behind vLLM's router

    def outputs(self) -> list[torch.Tensor]:
        """Call the MoE blocks as the model does, each on its own random x."""
        from vllm.forward_context import set_forward_context

        found = []
        with torch.no_grad(), set_forward_context(None, self.config, num_tokens=TOKENS):
            for number, block in enumerate(self.blocks()):
                found.append(block(self.x(number)))
        return found

    def x(self, number: int) -> torch.Tensor:
        hidden = self.model.config.hidden_size
        return torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}


def config_of(folder: Path) -> Any:
    """Return the configuration that ``vllm serve`` would make, on the CPU."""
    from vllm.config import DeviceConfig
    from vllm.engine.arg_utils import EngineArgs

    made: Any = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=256,
        enforce_eager=True,
        attention_config={"backend": "TRITON_ATTN"},
    ).create_engine_config()
    made.device_config = DeviceConfig(torch.device("cpu"))
    return made


@contextmanager
def switches(on: bool) -> Iterator[None]:
    """Remove the suite's own switches, and install the package or not."""
    with pytest.MonkeyPatch.context() as patch:
        for switch in (settings.KERNELS, settings.CROSSOVER):
            patch.delenv(switch.name, raising=False)
        patch.setenv(settings.ENABLED.name, "1" if on else "0")  # as vLLM's own call of the entry point reads it
        if on:
            plugin.install()
        else:
            plugin.uninstall()
        try:
            yield
        finally:
            plugin.uninstall()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: models.write(name, folder / name, count=COUNT) for name in FORMATS}


@pytest.fixture(scope="module", params=FORMATS)
def loaded(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Loaded]:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    with ExitStack() as stack:
        stack.enter_context(switches(True))
        config = config_of(folders[request.param])
        stack.enter_context(set_current_vllm_config(config))
        with Allocations() as pool:
            model = get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)
        yield Loaded(request.param, config, model, pool)


def check(loaded: Loaded, outputs: list[torch.Tensor]) -> None:
    """Compare outputs with the experts in float32, by the routes of their calls."""
    activation = "swigluoai" if loaded.name == "gpt-oss" else "silu"
    for number, (output, (weights, ids)) in enumerate(zip(outputs, routes[-COUNT:], strict=True)):
        expected = models.experts_of(loaded.name, number).expected(loaded.x(number), weights, ids, activation)
        assert layers.distance(output, expected) < 0.004


def test_blocks_compute_the_experts_of_the_checkpoint(loaded: Loaded) -> None:
    assert {type(experts).__name__ for experts in loaded.experts()} == {f"{FORMATS[loaded.name]}Sm12xExperts"}
    first, second = loaded.experts()
    assert first.dispatch is not second.dispatch
    check(loaded, loaded.outputs())


def test_sleep_level_2_and_a_reload_leave_every_bit(loaded: Loaded) -> None:
    """vLLM's pool of a load is given other pages. vLLM itself keeps only a model's buffers (``gpu_worker.sleep``)."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    before, parameters = loaded.outputs(), loaded.tensors()
    captured = [
        (experts.dispatch.schedule.at(TOKENS), MoECall(loaded.x(number), routes[number - COUNT][1], routes[number - COUNT][0]))
        for number, experts in enumerate(loaded.experts())
    ]
    computed = [kernel.run(call).clone() for kernel, call in captured]
    buffers = {name: buffer.clone() for name, buffer in loaded.model.named_buffers()}
    loaded.pool.discard()
    for name, buffer in loaded.model.named_buffers():
        buffer.copy_(buffers[name])
    asleep = loaded.tensors()
    assert not any(torch.equal(_bytes(parameters[name]), _bytes(asleep[name])) for name in parameters if "weight" in name)
    runner = types.SimpleNamespace(
        vllm_config=loaded.config,
        model_config=loaded.config.model_config,
        load_config=loaded.config.load_config,
        lora_config=None,
        get_model=lambda: loaded.model,
    )
    for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
        setattr(runner, name, lambda: None)
    GPUModelRunner.reload_weights(runner)
    after = loaded.tensors()
    experts = [name for name in parameters if ".mlp." in name]  # vLLM 0.28 reloads no attention sinks, as its warning says
    assert [name for name in experts if not torch.equal(_bytes(parameters[name]), _bytes(after[name]))] == []
    outputs = loaded.outputs()
    assert all(map(torch.equal, before, outputs))
    check(loaded, outputs)
    assert all(torch.equal(kernel.run(call), output) for (kernel, call), output in zip(captured, computed, strict=True))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("name", FORMATS)
def test_without_the_package_the_same_bits_are_loaded(name: str, folders: dict[str, Path]) -> None:
    """Before the backends process them, in all that both allocate. Marlin rounds gpt-oss up."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    found = []
    for on in (True, False):
        with switches(on):
            config = config_of(folders[name])
            with set_current_vllm_config(config), layers.model_dtype():
                model = initialize_model(vllm_config=config, model_config=config.model_config)
                get_model_loader(config.load_config).load_weights(model, config.model_config)
        kinds = {layer.mlp.experts.routed_experts.quant_method.experts_cls.__module__ for layer in model.model.layers}
        assert all(kind.startswith("trtllm_b12x") == on for kind in kinds), kinds
        found.append(dict(model.named_parameters()))
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        shared = tuple(slice(min(sizes)) for sizes in zip(tensor.shape, theirs[key].shape, strict=True))
        assert torch.equal(_bytes(tensor[shared].detach()), _bytes(theirs[key][shared].detach())), key
