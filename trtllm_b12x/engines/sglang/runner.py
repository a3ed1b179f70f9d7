# SPDX-License-Identifier: Apache-2.0
"""Find our experts of an SGLang layer when its load ends and in each call."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from trtllm_b12x.core import log
from trtllm_b12x.decision.verdicts import SERVED_SM

from . import facts
from .experts import Experts, of_sglang, sm
from .mxfp4 import MXFP4Experts
from .nvfp4 import NVFP4Experts

NAME = "trtllm_b12x"
"""Attribute of SGLang's layer that has our experts. It is not a tensor, so SGLang's walks over tensors skip it."""
_KINDS: dict[str, type[Experts]] = {facts.FORMATS[kind.format]: kind for kind in (NVFP4Experts, MXFP4Experts)}
_CombineInput = of_sglang("layers.moe.token_dispatcher.standard").StandardCombineInput


def _backend(layer: Any) -> str:
    """Return the runner backend that a layer was built with. SGLang's global backend differs while a draft model runs."""
    runner = getattr(layer.quant_method, "runner", None)
    return "" if runner is None else str(runner.runner_backend.value)


def loading(layer: Any) -> None:
    """Log before a load how our kernels would serve, as the load may raise on this card."""
    if _backend(layer).startswith("flashinfer_trtllm") and sm() in SERVED_SM:
        log.once(
            "SGLang runs the NVFP4 experts of this checkpoint on flashinfer_trtllm, whose kernels are for SM100. "
            "With --moe-runner-backend flashinfer_cutlass our kernels serve them"
        )


def loaded(layer: Any) -> None:
    """Load our experts after SGLang has converted the tensors, before it sizes its KV cache, and after each update of weights.

    A separate thread loads them: SGLang loads in a torch_memory_saver region, which holds what the calling thread allocates. A
    release discards that memory.
    """
    kind = _KINDS.get(_backend(layer))
    if kind is None:
        return
    experts = vars(layer).get(NAME)
    if experts is None:
        experts = vars(layer)[NAME] = kind()
        vars(layer.moe_runner_config)[NAME] = weakref.ref(layer)  # 0.5.20 leaves ``MoeRunnerConfig.layer`` empty
    device = layer.w13_weight.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def load() -> None:
        # A thread begins on GPU 0. Leaving the stream context there would create a CUDA context on GPU 0.
        with torch.cuda.device(device if stream else -1), torch.cuda.stream(stream), torch.no_grad():
            experts.load(layer)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(load).result()


def serve(dispatched: Any, quant_info: Any, config: Any, theirs: Callable[..., Any]) -> Any:
    """Return SGLang's ``StandardCombineInput`` with our output; None if SGLang serves the call."""
    layer = config.layer
    if layer is None:
        noted = vars(config).get(NAME)
        layer = None if noted is None else noted()
    experts: Experts | None = None if layer is None else vars(layer).get(NAME)
    if experts is None:
        log.once("SGLang keeps experts that another method than ModelOpt's NVFP4 or gpt-oss's MXFP4 loads", logging.INFO)
        return None
    if experts.dispatch is None:
        return None
    try:
        output = experts.call(layer, dispatched, lambda other: theirs(other, quant_info, config))
    except Exception as error:
        experts.fail(error)
        return None
    return None if output is None else _CombineInput(output)
