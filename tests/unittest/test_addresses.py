# SPDX-License-Identifier: Apache-2.0
"""Addresses that launches are given: the host's tensors, or memory that outlives every load. Captured graphs hold them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from tests import forks, layers, mxfp8
from tests.allocations import weights_left
from tests.checkpoints import random_experts
from tests.nvfp4_layer import random_call, random_layer
from trtllm_b12x.formats.weights import Epilogue
from trtllm_b12x.kernels import Geometry, MoECall, catalog
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.triton.decode import TritonKernel, TritonMXFP8Kernel
from trtllm_b12x.kernels.triton.grouped import GroupedKernel, GroupedNVFP4Kernel

KERNELS = {"MXFP8": (TritonMXFP8Kernel, GroupedKernel), "NVFP4": (TritonKernel, GroupedNVFP4Kernel)}
CPU = torch.device("cpu")


def held(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that ``value`` holds, in any nesting of records and containers, with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from held(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from held(one, f"{path}[{name}]")
    elif isinstance(value, tuple | list):
        for at, one in enumerate(value):
            yield from held(one, f"{path}[{at}]")


def addresses(kernel: Any) -> dict[str, int]:
    return {path: tensor.data_ptr() for path, tensor in held(vars(kernel)) if tensor.numel()}


def weights_of(geometry: Geometry) -> Any:
    """Return random weights, of any format."""
    if geometry.format == "MXFP8":
        return mxfp8.random_weights(geometry)
    return random_layer(geometry).kernel_weights()


@pytest.mark.parametrize(
    ("activation", "constant"),
    [(name, "") for name in ("Swiglu", "SwigluBias", "Geglu", "Relu2", "Silu", "Gelu")]
    + [("SwigluBias", name) for name in ("alpha", "beta", "limit")],
)
@pytest.mark.parametrize("number_format", KERNELS)
def test_kernels_that_are_bound_again_or_made_again_launch_with_the_same_addresses(
    number_format: str, activation: str, constant: str
) -> None:
    """Reloads bind again; a layer that was refused and loaded again has new kernels. Nothing keeps the first ones alive."""
    geometry = Geometry(6, 2, 128, 128, activation, format=number_format)
    weights = weights_of(geometry)
    if activation == "SwigluBias" and constant:  # the others are neutral constants of ours
        only = {f"swiglu_{constant}": getattr(weights.epilogue, f"swiglu_{constant}")}
        weights = dataclasses.replace(weights, epilogue=Epilogue(**only))
    for kind in KERNELS[number_format]:
        seen = []
        for _ in range(3):
            kernel = kind(Card(132, 228 << 10, 90))
            kernel.describe(geometry, 100, CPU)
            for _ in range(2):
                kernel.bind(weights)
                seen.append(addresses(kernel))
                garbage = [torch.full((size,), torch.nan) for size in (1, 2, 6, 7) * 50]
            del kernel, garbage
        assert seen[0]
        assert all(one == seen[0] for one in seen), kind


@pytest.mark.parametrize(("family", "top_k"), [("b12x", 2), ("triton", 2), ("triton", 1)])
def test_a_layers_own_tensors_stay_where_they_are(monkeypatch: pytest.MonkeyPatch, family: str, top_k: int) -> None:
    """With one route of a token the router weight scales the input, and kernels read ones in its place."""
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", family)
    tensors = random_experts(4, 128, 256, up_to_gate=1.0 if family == "b12x" else 1.5)
    module = layers.load(layers.create(4, 128, 256, top_k, apply_router_weight_on_input=top_k == 1), tensors)
    backend = module.backend

    def own() -> dict[str, int]:
        named = {**dict(backend.named_buffers()), "ones": backend._ones}
        return {name: t.data_ptr() for name, t in named.items() if t is not None and (name.startswith("b12x_") or name == "ones")}

    first, call = own(), layers.inputs(module, 9, tensors)
    assert len(first) == 3 + (top_k == 1)
    expected = module(*call)
    for way in (
        lambda: layers.load(module, tensors),
        lambda: backend._apply(torch.clone),  # as a trip to another device and back
        lambda: module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}),
        lambda: backend._apply(torch.clone),
    ):
        way()
        assert own() == first
        assert torch.equal(module(*call), expected)
    assert not backend._memory or not copy.deepcopy(backend)._memory


def test_a_limit_that_is_replaced_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads the attribute at every call, so a tensor that takes its place counts at once."""
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "triton")
    tensors = random_experts(4, 128, 256)
    limits = [torch.full((4,), value) for value in (0.01, 0.3)]
    modules = [layers.load(layers.create(4, 128, 256, **layers.swiglu_constants(limit=limit)), tensors) for limit in limits]
    x, logits = layers.inputs(modules[0], 9, tensors)
    first, second = (module(x, logits) for module in modules)
    assert not torch.equal(first, second)
    name = "swiglu_limit" if hasattr(modules[0].backend, "swiglu_limit") else "act_clamp"
    setattr(modules[0].backend, name, limits[1])
    assert torch.equal(modules[0](x, logits), second)


@pytest.mark.parametrize("family", ["triton", "grouped"])
def test_a_plan_keeps_no_weights(family: str) -> None:
    """Layers share it, and it is made once: what it kept of the first layer would never be freed."""
    left = forks.in_the_interpreter(f"{__name__}:in_the_interpreter", family)
    assert left == {form: [] for name, form in catalog.KERNELS if name == family}


def in_the_interpreter(family: str) -> dict[str, list[str]]:
    left = {}
    for form in (form for name, form in catalog.KERNELS if name == family):
        geometry = Geometry(2, 1, 128, 128, "Swiglu", format=form)
        kernel = catalog.KERNELS[family, form][0]()
        kernel.plan(geometry, 1, CPU)
        kernel.bind(weights_of(geometry))
        kernels = [kernel]
        del kernel
        left[form] = weights_left(kernels, MoECall(*random_call(geometry, 1)))
    return left
