# SPDX-License-Identifier: Apache-2.0
"""Layers that get router logits alone, as TensorRT-LLM's model engine calls them, beside the same layers with ids."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from tensorrt_llm._torch import autotuner, route_capture, utils

from tests import layers
from tests.checkpoints import random_experts
from tests.hosts.scenarios import logged
from trtllm_b12x.core import process
from trtllm_b12x.engines.trtllm import routing
from trtllm_b12x.kernels.reference import ReferenceKernel

EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 128, 192
COUNTS = 1, 5, 63, 64, 80


def methods() -> dict[str, Any]:
    """Routing methods of the host, by what tells them apart."""
    names = importlib.import_module(f"{layers.host.create_moe.__package__}.routing")
    bias = torch.linspace(-0.2, 0.2, EXPERTS)
    deepseek = names.DeepSeekV3MoeRoutingMethod
    return {
        "Default": names.DefaultMoeRoutingMethod(TOP_K),
        "Renormalize": names.RenormalizeMoeRoutingMethod(TOP_K),
        "RenormalizeNaive": names.RenormalizeNaiveMoeRoutingMethod(TOP_K),
        "DeepSeekV3": deepseek(TOP_K, 1, 1, 2.5, lambda: bias),
        "MiniMaxM2": names.MiniMaxM2MoeRoutingMethod(TOP_K, EXPERTS, lambda: bias),
        "MiniMaxM3": names.MiniMaxM3MoeRoutingMethod(TOP_K, EXPERTS, lambda: bias, 2.0),
        "SigmoidRenorm": names.SigmoidRenormMoeRoutingMethod(TOP_K, EXPERTS),
        "SigmoidRenorm, as it is": names.SigmoidRenormMoeRoutingMethod(TOP_K, EXPERTS, False),
        "Llama4": names.Llama4RenormalizeMoeRoutingMethod(TOP_K),
        "SqrtSoftplus": names.SqrtSoftplusMoeRoutingMethod(TOP_K, EXPERTS, lambda: bias),
        "DeepSeekV3 in groups": deepseek(TOP_K, 2, 1, 2.5, lambda: bias),
    }


def layer(method: Any = None, **arguments: Any) -> tuple[Any, Any]:
    """A promoted layer with this routing method, and its tensors."""
    tensors = random_experts(EXPERTS, HIDDEN, INNER)
    default = methods()["Renormalize"]
    with mock.patch.object(layers.host, "RenormalizeMoeRoutingMethod", return_value=method or default):
        module = layers.create(EXPERTS, HIDDEN, INNER, (method or default).top_k, layer_idx=3, **arguments)
    return layers.load(module, tensors), tensors


def scheduler() -> dict[str, Any]:
    """The names in the module that calls layers."""
    return vars(importlib.import_module(f"{layers.host.create_moe.__package__}.moe_scheduler"))


def forward(**attributes: Any) -> Any:
    """Within a forward of the model engine, which sets attributes of its model."""
    return utils.model_extra_attrs({"attention_metadata": None, **attributes})


@contextlib.contextmanager
def watched(module: Any) -> Iterator[dict[str, list[Any]]]:
    """What kernels are called with, and what the host's method routes."""
    found: dict[str, list[Any]] = {"logits": [], "routed": []}
    run, apply = ReferenceKernel.run, module.routing_method.apply

    def running(kernel: Any, call: Any) -> torch.Tensor:
        found["logits"].append(call.router_logits is not None)
        return run(kernel, call)

    def applying(logits: torch.Tensor, *more: Any) -> Any:
        found["routed"].append(len(logits))
        return apply(logits, *more)

    with mock.patch.object(ReferenceKernel, "run", running), mock.patch.object(module.routing_method, "apply", applying):
        yield found


def beside(module: Any, x: torch.Tensor, logits: torch.Tensor, **attributes: Any) -> dict[str, Any]:
    """Call a layer in a forward and outside one, where it gets ids."""
    with_ids = module(x, logits)
    with forward(**attributes), watched(module) as found:
        output = module(x, logits)
    gap = float((output.float() - with_ids.float()).norm() / with_ids.float().norm())
    return {**found, "equal": bool(torch.equal(output, with_ids)), "gap": gap}


def every_method() -> dict[str, Any]:
    """Each method of the host at each count, with logits of both dtypes."""
    found: dict[str, Any] = {}
    for name, method in methods().items():
        module, tensors = layer(method)
        rows = {}
        for dtype in (torch.float32, torch.bfloat16):
            for tokens in COUNTS:
                x, logits = layers.inputs(module, tokens, tensors)
                if name.startswith("DeepSeekV3") and dtype is torch.bfloat16:
                    logits = logits * 4  # weights in 16 bits
                rows[f"{tokens} {dtype}"] = beside(module, x, logits.to(dtype))
        found[name] = {"scoring": routing.scoring_of(method) is not None, "calls": rows}
    return found


def left_alone() -> dict[str, Any]:
    """Layers and calls whose ids are read by others, or whose logits are another rank's."""
    found: dict[str, Any] = {}
    captured: list[Any] = []
    module, tensors = layer()
    x, logits = layers.inputs(module, 5, tensors)
    found["plain"] = beside(module, x, logits)
    found["capture"] = beside(module, x, logits, route_capture=lambda number, ids: captured.append((number, ids.tolist())))
    found["captured"] = captured == [(3, module.routing_method.apply(logits)[0].tolist())]
    route_capture.assert_capturable(module.backend)
    with autotuner.autotune():
        found["tuning"] = beside(module, x, logits)
    for name, stands in {
        "get_calibrator": lambda: mock.Mock(mode=mock.Mock()),
        "ExpertStatistic": mock.Mock(get=lambda: "statistic"),
        "RouteCapture": mock.Mock(get=lambda: "capture"),
    }.items():
        with mock.patch.dict(scheduler(), {name: stands}):
            found[name] = beside(module, x, logits)
    attention_dp = {"world_size": 1, "tp_size": 1, "moe_ep_size": 1, "enable_attention_dp": True}
    found["attention DP of one rank"] = beside(layer(mapping=attention_dp)[0], x, logits)
    one = type(methods()["Renormalize"])(1)
    weighted = layer(one, apply_router_weight_on_input=True)[0]
    found["weights on the input"] = beside(weighted, x, logits)
    two = {"world_size": 2, "tp_size": 2, "moe_ep_size": 2}
    ranks = [layer(mapping={**two, "rank": rank}, reduce_results=False)[0] for rank in range(2)]
    found["expert parallel"] = [beside(rank, x, logits) for rank in ranks]
    return found


def faults() -> dict[str, Any]:
    """An error in each function between the logits and a kernel; the lines that say so."""
    found: dict[str, Any] = {}

    def broken(*given: Any, **named: Any) -> Any:
        raise RuntimeError("injected")

    places: dict[str, Callable[[Any], Any]] = {
        "reads_ids": lambda module: mock.patch.dict(scheduler(), {"get_calibrator": broken}),
        "takes": lambda module: mock.patch.object(routing, "takes", broken),
        "run_logits": lambda module: mock.patch.object(type(module.backend.dispatch), "run_logits", broken),
        "with_logits": lambda module: mock.patch.object(type(module.backend.dispatch.schedule), "with_logits", broken),
        "run": lambda module: mock.patch.object(module.backend.dispatch.schedule.with_logits(5), "run", broken),
    }
    for name, where in places.items():
        process.forget()
        module, tensors = layer()
        x, logits = layers.inputs(module, 5, tensors)
        expected, lines = module(x, logits), logged()
        with where(module), forward():
            first = module(x, logits)
        with forward(), watched(module) as after:
            second = module(x, logits)
        found[name] = {
            "equal": [bool(torch.equal(expected, output)) for output in (first, second)],
            "logits": after["logits"],
            "lines": [line for line in lines if "injected" in line],
            "served": module.backend.verdict.served,
        }
    return found


def moved() -> dict[str, Any]:
    """A refit that puts parameters at other addresses, of a layer that gets logits."""
    module, tensors = layer()
    x, logits = layers.inputs(module, 5, tensors)
    with forward():
        first = module(x, logits)
        for parameter in module.backend.parameters():
            parameter.data = parameter.data.clone()
        again = module(x, logits)
        module.backend.w2_weight.data.zero_()
        none = module(x, logits)
    return {"equal": bool(torch.equal(first, again)), "zero": not bool(none.any())}
