# SPDX-License-Identifier: Apache-2.0
"""Calls of a layer: communication, ``torch.compile``, the autotuner, the crossover during warm-up."""

from __future__ import annotations

import gc
import importlib
import os
import tempfile
from typing import Any

import torch
from tensorrt_llm._torch import autotuner, utils

import trtllm_b12x
from tests import layers
from tests.checkpoints import random_experts
from tests.clock import Clock, capturing, standing_in
from tests.hosts.scenarios import model_config
from trtllm_b12x.core import process
from trtllm_b12x.dispatch.policy import HOST
from trtllm_b12x.tools.verify import kernel_calls

ATTENTION_DP = {"world_size": 2, "tp_size": 2, "moe_ep_size": 2, "enable_attention_dp": True}


def _loopback(strategy: str) -> list[dict[str, Any]]:
    """Make every rank's tokens its own, by a subclass of that strategy; return what is sent from now on."""
    communication = importlib.import_module(f"{layers.host.create_moe.__package__}.communication")
    sent: list[dict[str, Any]] = []

    class Loopback(getattr(communication, strategy, object)):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def supports_post_quant_dispatch(self) -> bool:
            return True

        def dispatch(self, **named: Any) -> tuple[Any, ...]:
            sent.append(named)
            order = ("hidden_states", "hidden_states_sf", "token_selected_slots", "token_final_scales")
            return tuple(named[name] for name in order)

        def combine(self, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
            return hidden_states

    communication.CommunicationFactory.create_strategy = staticmethod(lambda *given, **named: Loopback())
    return sent


def alltoall() -> dict[str, Any]:
    """Attention-DP behind an all-to-all: what is said after the load, and what each call sends."""
    tensors, sent = random_experts(4, 128, 192), _loopback("AllToAll")
    trtllm_b12x.install()
    layer = layers.load(layers.create(4, 128, 192, mapping=ATTENTION_DP), tensors)
    loaded = trtllm_b12x.status().promoted
    for _ in range(2):
        layer(*layers.inputs(layer, 3, tensors), all_rank_num_tokens=[3, 3])
    status, dtypes = trtllm_b12x.status(), [str(named["hidden_states"].dtype) for named in sent]
    return {"loaded": loaded, "promoted": status.promoted, "reasons": status.reasons, "sent": dtypes}


def padded_and_empty_chunks() -> dict[str, Any]:
    """Attention-DP over one rank of two: padded to the fullest rank, and in more chunks than this rank has tokens."""
    tensors, sent = random_experts(4, 128, 256), _loopback("AllGatherReduceScatter")
    trtllm_b12x.install()
    arguments: dict[str, Any] = {"mapping": ATTENTION_DP, "max_num_tokens": 200, "moe_max_num_tokens": 32}
    layer = layers.load(layers.create(4, 128, 256, **arguments), tensors)
    x, logits = layers.inputs(layer, 9, tensors)
    zeros = torch.cat([x[:5], torch.zeros(4, 128, dtype=x.dtype)])
    calls: dict[str, tuple[Any, ...]] = {
        "even": (x, logits, [9, 9], False),
        "padded": (zeros, logits, [5, 9], True),
        "empty": (x[:3], logits[:3], [3, 100], False),
    }
    whole, result = None, {}
    for name, (rows, scores, counts, padding) in calls.items():
        sent.clear()
        with kernel_calls(layer.backend) as reached:
            output = layer(rows, scores, all_rank_num_tokens=counts, use_dp_padding=padding)
        whole = output if whole is None else whole
        of_ranks = [named["all_rank_num_tokens"] for named in sent]
        assert all(len(named["hidden_states"]) == rank[0] for named, rank in zip(sent, of_ranks, strict=True))
        equal = bool(torch.equal(output, whole[: counts[0]]))
        result[name] = [list(output.shape), equal, len(reached), of_ranks[0], of_ranks[-1]]
    return result


def torch_compile() -> dict[str, Any]:
    """A layer under ``torch.compile``, where a graph break is an error."""
    tensors = random_experts(4, 128, 192)
    config = model_config()
    module = layers.load(layers.create(4, 128, 192, layer_idx=0, config=config), tensors)
    x, logits = layers.inputs(module, 5, tensors)
    eager = module(x, logits)
    utils.set_torch_compiling(True)
    with utils.model_extra_attrs(config.extra_attrs):
        result = torch.compile(lambda a, b: module(a, b) * 1, fullgraph=True, backend="eager")(x, logits)
    return {"equal": bool(torch.equal(result, eager)), "kernel": module.backend.kernel is not None}


def tuned_calls() -> dict[str, Any]:
    """What a call reaches while the host tunes and afterwards, and what was not tuned."""
    trtllm_b12x.install()
    tensors = random_experts(4, 128, 192)
    module = layers.load(layers.create(4, 128, 192), tensors)
    x, logits = layers.inputs(module, 5, tensors)
    counts = []
    for tune in (True, False):
        with autotuner.autotune(tune), kernel_calls(module.backend) as reached:
            module(x, logits)
        counts.append(len(reached))
    tuner, missed = autotuner.AutoTuner.get(), []
    module.backend.dispatch.drop()
    for tokens in (3, 5, 40):
        module(*layers.inputs(module, tokens, tensors))
        missed.append(len(tuner.missed))
    return {"kernel_calls": counts, "missed": missed}


def crossover_at_warm_up() -> dict[str, Any]:
    """The order of ``PyTorchModelEngine.warmup`` (id 54626282323): attention alone, the autotuner, then each batch size twice and
    captured, the largest first; then requests.  When the crossover is measured, and what captures and calls run on: with and
    without the autotuner and graphs, each time as in a new process."""
    found = {}
    for tuner in ("on", "off"):
        for graphs in ("on", "off"):
            process.forget()
            gc.collect()
            found[f"{tuner} {graphs}"] = _warm_up(tuner == "on", graphs == "on")
    return found


def _warm_up(tuned: bool, graphs: bool) -> dict[str, Any]:
    os.environ.update({"TRTLLM_B12X_CROSSOVER": "auto", "XDG_CACHE_HOME": tempfile.mkdtemp()})
    tensors = random_experts(4, 128, 192)
    modules = [layers.load(layers.create(4, 128, 192, layer_idx=index), tensors) for index in range(2)]
    backends = [getattr(module, "backend", module) for module in modules]
    events: list[Any] = []
    tuner = autotuner.AutoTuner.get()

    def measured() -> None:
        events.append(["measured", now[0], tuner.is_tuning_mode, torch.cuda.is_current_stream_capturing()])

    def forward(what: str, tokens: int) -> None:
        now[0] = what
        for module, backend in zip(modules, backends, strict=True):
            with kernel_calls(backend) as reached:
                asked = len(clock.asked)
                module(*layers.inputs(module, tokens, tensors))
            if len(clock.asked) == asked:  # else it counted the measurement's, too
                events.append([what, tokens, len(reached)])

    now = [""]
    with standing_in(Clock(lambda name, tokens: 10.0 if name == HOST or tokens > 8 else 5.0, measured)) as clock:
        if tuned:
            forward("attention", 1)
            with autotuner.autotune():
                forward("tuning", 200)
        if graphs:
            for tokens in (64, 32, 8, 1):
                forward("warm", tokens)
                forward("warm", tokens)
                with capturing():
                    forward("captured", tokens)
        for tokens in (40, 8, 3):
            forward("request", tokens)
        return {"events": events, "gap": clock.largest_gap, "layers": clock.layers}
