# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks.on_card`` relies on in vLLM, in the wheel of this environment, on the CPU."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.on_card import in_vllm, package_log
from benchmarks.on_card.steps import StepError
from tests.integration.vllm import layers
from trtllm_b12x.core import settings
from trtllm_b12x.engines.vllm import plugin


@pytest.fixture(scope="module", autouse=True)
def pretended() -> Iterator[None]:
    layers.pretend_sm120()
    with layers.vllm_config():
        yield


def test_vllm_takes_the_options_of_greedy_prompts() -> None:
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    assert set(in_vllm.options("model")) <= set(inspect.signature(EngineArgs).parameters)
    sampling = SamplingParams(max_tokens=64, temperature=0.0, logprobs=2)
    assert (sampling.max_tokens, sampling.temperature, sampling.logprobs) == (64, 0.0, 2)
    inspect.signature(LLM.generate).bind(None, "a prompt", sampling, use_tqdm=False)
    output = inspect.signature(importlib.import_module("vllm.outputs").CompletionOutput).parameters
    assert {"text", "token_ids", "logprobs"} <= set(output)
    assert "logprob" in inspect.signature(importlib.import_module("vllm.logprobs").Logprob).parameters


def test_comparators_are_backends_of_this_vllm() -> None:
    from typing import get_args

    kernel = importlib.import_module("vllm.config.kernel")
    found = in_vllm.backends()
    assert found["marlin"] == ""
    for name, why in found.items():
        assert (name in get_args(kernel.MoEBackend)) == (not why.startswith("this vLLM has no"))


@pytest.mark.parametrize("form", ["MXFP8", "NVFP4"])
def test_its_log_says_what_the_package_serves(
    form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines in vLLM's own form, with and without the package."""
    from vllm.logging_utils import NewLineFormatter

    for switch in (settings.KERNELS, settings.CROSSOVER):
        monkeypatch.delenv(switch.name)
    caplog.set_level(logging.INFO)
    log, formatter = tmp_path / "log", NewLineFormatter("%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s")

    def written() -> Path:
        log.write_text("\n".join(f"(EngineCore pid=7) {formatter.format(record)}" for record in caplog.records))
        caplog.clear()
        return log

    plugin.install()
    try:
        layers.method_of(form, layers.config_of(8, 2, 256, 128))
        ((line,), said) = package_log.served(written(), True)
        assert line.startswith(f"{form} experts run on trtllm-b12x, ")
        assert "(8 of 256 x 128): kernels ready in" in line
        assert line in said
        layers.method_of(form, layers.config_of(8, 2, 256, 128, is_lora_enabled=True))
        with pytest.raises(StepError, match=rf"keeps the (W4A16_)?{form} experts \(8 of 256 x 128\): .*LoRA"):
            package_log.served(written(), True)
    finally:
        plugin.uninstall()
    layers.method_of(form, layers.config_of(8, 2, 256, 128))
    assert package_log.served(written(), False) == ([], [])


def test_layers_of_on_card_are_layers_of_the_benchmark() -> None:
    cases = {name for name, *_ in importlib.import_module("benchmarks.vllm.__main__").CASES}
    assert set(in_vllm.LAYERS) <= cases
