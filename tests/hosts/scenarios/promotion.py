# SPDX-License-Identifier: Apache-2.0
"""Which class serves a layer: balancers, LoRA, plain subclasses, every backend, threads."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import sys
import threading
import types
from types import SimpleNamespace
from typing import Any

import torch

import trtllm_b12x
from tests import layers
from tests.checkpoints import random_experts
from tests.hosts.scenarios import model_config
from trtllm_b12x import environment
from trtllm_b12x.core import process
from trtllm_b12x.engines.trtllm import describe as questions
from trtllm_b12x.engines.trtllm import promote
from trtllm_b12x.engines.trtllm import status as registry
from trtllm_b12x.tools.verify import kernel_calls
from trtllm_b12x.tools.verify.reference import Arithmetic


def load_balancer() -> dict[str, Any]:
    """With the host's load balancer on: a layer of the backend, and of the class the host checks its own list against."""

    class Balancer:
        def is_dynamic_routing(self) -> bool:
            return True

    host = layers.host
    importlib.import_module(f"{host.create_moe.__package__}.moe_load_balancer")._balancer = Balancer()  # type: ignore[attr-defined]
    trtllm_b12x.install()
    layer = layers.build(4, 128, 192, config=model_config(skip_create_weights_in_init=True, moe_load_balancer=object()))
    if not hasattr(layer, "backend"):
        layer.create_weights()  # later hosts bind here
    backend = getattr(layer, "backend", layer)
    backend.create_weights()
    status = trtllm_b12x.status()
    return {"backend": type(backend).__name__, "method": type(backend.quant_method).__name__, "reasons": status.reasons}


def lora_targets() -> dict[str, Any]:
    """LoRA on attention alone, and on the experts: the class, and what a call with adapters reaches."""
    tensors = random_experts(4, 128, 192)

    def outcome(targets: list[str], promote: bool) -> list[Any]:
        (trtllm_b12x.install if promote else trtllm_b12x.uninstall)()
        adapters = SimpleNamespace(lora_target_modules=targets)
        config = model_config(skip_create_weights_in_init=True, lora_config=adapters)
        try:
            layer = layers.build(4, 128, 192, config=config)
            layer.create_weights()
        except ValueError as error:
            return [type(error).__name__]
        layers.load(layer, tensors)
        if not promote:
            return [type(layer.backend).__name__]
        with kernel_calls(layer.backend) as reached:
            layer(*layers.inputs(layer, 3, tensors), lora_params={"num_seqs": 1})
        return [type(layer.backend).__name__, len(reached)]

    experts = ["attn_q", "moe_h_to_4h", "moe_4h_to_h"]
    return {"attention": outcome(["attn_q"], True), "experts": [outcome(experts, False)[0], outcome(experts, True)[0]]}


def isinstance_of_ours(order: str = "") -> dict[str, Any]:
    """Ours is equal to the host's class and no other class; each order of asking in a process of its own."""
    from trtllm_b12x.engines.trtllm.fused_moe import FlashInferNvfp4Sm12xFusedMoE

    host = layers.host
    plain = layers.create(4, 128, 192, promote=False).backend
    ours = layers.create(4, 128, 192).backend
    questions = [
        (ours, host.CutlassFusedMoE, True),
        (plain, FlashInferNvfp4Sm12xFusedMoE, False),
        (ours, FlashInferNvfp4Sm12xFusedMoE, True),
        (plain, host.CutlassFusedMoE, True),
    ]
    if order == "reversed":
        questions.reverse()
    return {
        "isinstance": all(isinstance(instance, cls) is answer for instance, cls, answer in questions * 2),
        "classes": [type(plain) is host.CutlassFusedMoE, type(ours) is FlashInferNvfp4Sm12xFusedMoE],
    }


def every_backend_quantization_and_card(algorithms: str = "NVFP4,FP8,") -> dict[str, Any]:
    """Backend x quantization x SM: the host alone, and with us."""
    host = layers.host

    def answer(backend: str, algo: str | None) -> str:
        try:
            layer = layers.build(4, 128, 192, config=model_config(backend, algo, skip_create_weights_in_init=True))
            if hasattr(layer, "create_weights") and not hasattr(layer, "backend"):
                layer.create_weights()  # later hosts bind here
        except (ValueError, AssertionError) as error:
            return type(error).__name__
        return type(getattr(layer, "backend", layer)).__name__

    rows = []
    for payload in ("13", "12"):
        for sm in (90, 100, 120, 121):
            os.environ["FAKE_COMPUTE_CAP"] = f"{sm // 10}.{sm % 10}"
            os.environ["DOUBLE_SM"] = str(sm)
            environment.forget()
            if payload == "12":  # found for real in tests/integration/test_payload.py
                environment.inspect_payload = functools.partial(dataclasses.replace, dsl="4.8.1", payload_cuda=(12, 9))
            for backend in ("CUTLASS", "TRTLLM", "CUTEDSL", "VANILLA", "DEEPGEMM"):
                for algo in (name or None for name in algorithms.split(",")):
                    trtllm_b12x.uninstall()
                    alone = answer(backend, algo)
                    trtllm_b12x.install()
                    rows.append((payload, sm, backend, algo, alone, answer(backend, algo)))
    return {"rows": rows, "has_get_moe_cls": host.has_get_moe_cls}


def a_refused_size() -> dict[str, Any]:
    """NVFP4 of 160 columns in a host that refuses them: alone, with us, with LoRA, and once we leave a layer to the host."""
    tensors = random_experts(4, 128, 160)

    def answer(promote: bool, **arguments: Any) -> Any:
        (trtllm_b12x.install if promote else trtllm_b12x.uninstall)()
        try:
            layer = layers.build(4, 128, 160, config=model_config(skip_create_weights_in_init=True, **arguments))
            layer.create_weights()
        except ValueError as error:
            return str(error)
        return layers.load(layer, tensors)

    alone, layer = answer(False), answer(True)
    found = {}
    for tokens in (3, 300):
        x, logits = layers.inputs(layer, tokens, tensors)
        found[tokens] = layers.errors(layer, x, logits, layer(x, logits), tensors, Arithmetic.UNQUANTIZED)[tokens < 64]
    lora = answer(True, lora_config=SimpleNamespace(lora_target_modules=["moe_gate"]))
    promote._backend_for = lambda call, host_class: (host_class, None)
    left = answer(True)
    return {"alone": alone, "class": type(layer.backend).__name__, "errors": found, "lora": lora, "left": left}


def threads_and_failures() -> dict[str, Any]:
    """What goes wrong, or on at the same time, between the host's two questions."""
    host = layers.host
    create_moe = host.create_moe.create_moe
    trtllm_b12x.uninstall()
    # As modeling_qwen3_moe does for its gate.
    early = types.ModuleType("tensorrt_llm._torch.models.early")
    vars(early).update({name: f for name, f in vars(host.create_moe).items() if name == "get_moe_cls"})
    sys.modules[early.__name__] = early
    trtllm_b12x.install()
    gate = [m.get_moe_cls(model_config()).__name__ for m in (early, host.create_moe)] if host.has_get_moe_cls else []

    def build(dtype: torch.dtype = torch.bfloat16) -> Any:
        config = model_config(skip_create_weights_in_init=True)
        routing = host.RenormalizeMoeRoutingMethod(2)
        layer = create_moe(routing, 4, 128, 192, dtype=dtype, model_config=config, **layers.activation(True))
        if not getattr(layer, "backend", layer)._weights_created:
            layer.create_weights()  # C2 has no backend before
        return getattr(layer, "backend", layer)

    built: list[str] = []

    def several(dtype: torch.dtype) -> None:
        for _ in range(60):
            built.append(f"{dtype} {type(build(dtype)).__name__}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=several, args=(dtype,)) for dtype in (torch.bfloat16, torch.float16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)

    # Another pipeline rank's layer: built with all others, then without weights.
    other = build()
    other._parameters.clear()
    other._buffers.clear()
    other._weights_removed = True
    process.forget()
    registry.record(other, other.verdict, ready=False)
    left = trtllm_b12x.status().layers

    explained = layers.explained()
    questions._activation = None  # type: ignore[assignment]
    failed = type(build()).__name__
    return {
        "gate": gate,
        "threads": {name: built.count(name) for name in built},
        "left": left,
        "failed": failed,
        "explained": explained,
    }
