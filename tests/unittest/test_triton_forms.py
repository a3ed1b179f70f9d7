# SPDX-License-Identifier: Apache-2.0
"""What layers hand on to Triton's kernels beside weights and bf16: SwiGLU's constants, scaled input, quantized input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts
from tests.nvfp4_layer import distance
from trtllm_b12x.decision import RejectReason
from trtllm_b12x.engines.trtllm.embedded.ops import fp4_quantize
from trtllm_b12x.formats.nvfp4 import dequantize
from trtllm_b12x.tools.verify import kernel_calls, reference

pytestmark = pytest.mark.usefixtures("triton_alone")
host = layers.host
BOUND = 0.004
"""Relative L2 from the layer in float32, on the input that it was given."""
HOSTS_BOUND = 0.6
"""Of the host's own path, which quantizes the activations; it is the host's own to the bit besides."""
EXPERTS, HIDDEN, SIZE = 4, 128, 192


def in_float32(
    tensors: dict[str, torch.Tensor], x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor, **constants: float
) -> torch.Tensor:
    """SwiGLU experts on ``x (T, H)``, ids and router weights ``(T, k)``, with ``alpha``, ``beta`` or ``limit``."""
    swiglu = constants.get("alpha", 1.0), constants.get("beta", 0.0), constants.get("limit", math.inf)
    call, points = reference.MoECall(x, ids, router_weights), [reference.Arithmetic.UNQUANTIZED]
    ((found,),) = reference.outputs(tensors, EXPERTS, True, [call], points, swiglu=swiglu)
    return found


def constants(*names: str) -> dict[str, float]:
    return {name: value for name, value in (("alpha", 1.5), ("beta", 0.5), ("limit", 0.3)) if name in names}


def twins(tensors: dict[str, torch.Tensor], device: str, **arguments: Any) -> tuple[Any, Any]:
    """The same layer, ours and the host's."""
    with torch.device(device):
        made = [layers.create(EXPERTS, HIDDEN, SIZE, promote=promote, **arguments) for promote in (True, False)]
    ours, hosts = (layers.load(module, tensors) for module in made)
    return ours, hosts


def with_constants(names: tuple[str, ...], tokens: int, device: str = "cpu") -> tuple[Any, float, int]:
    """A layer, its error, and how many calls were the kernel's."""
    tensors, given = random_experts(EXPERTS, HIDDEN, SIZE), constants(*names)
    there = {name: torch.full((EXPERTS,), value, device=device) for name, value in given.items()}
    module, hosts = twins(tensors, device, **layers.swiglu_constants(**there))
    x, logits = layers.inputs(module, tokens, tensors)
    call = x.to(device), logits.to(device)
    with kernel_calls(module.backend) as reached:
        found = module(*call)
    ids, router_weights = module.routing_method.apply(logits)
    expected = in_float32(tensors, x, ids, router_weights, **given)
    plain = in_float32(tensors, x, ids, router_weights)
    assert distance(plain, expected) > 0.1  # what it would be without
    assert len(reached) or torch.equal(found, hosts(*call))
    return module, distance(found, expected), len(reached)


@pytest.mark.parametrize(("tokens", "served"), [(1, 1), (63, 1), (64, 0)])
@pytest.mark.parametrize("names", [("limit",), ("alpha", "beta"), ("alpha", "beta", "limit")])
def test_swiglu_with_constants(names: tuple[str, ...], tokens: int, served: int) -> None:
    module, error, calls = with_constants(names, tokens)
    assert calls == served
    assert error < (BOUND if served else HOSTS_BOUND)
    assert module.backend.kernel.geometry.activation == "SwigluBias"


def test_b12x_goes_on_refusing_constants(every_family: None) -> None:
    module, _, calls = with_constants(("alpha", "beta", "limit"), 9)
    assert calls == 1
    verdict = module.backend.verdict
    assert verdict.families == ("triton", "grouped")
    assert RejectReason.ACTIVATION_CONSTANTS in [rejection.reason for family, rejection in verdict.refused if family == "b12x"]


def test_constants_that_no_kernel_reads_leave_the_layer_to_the_host() -> None:
    """Another type than the operator's; or a number alone, which its tensors do not have."""
    tensors = random_experts(EXPERTS, HIDDEN, SIZE)
    module = layers.load(
        layers.create(EXPERTS, HIDDEN, SIZE, **layers.swiglu_constants(limit=torch.full((EXPERTS,), 0.3))), tensors
    )
    backend = module.backend
    name = "act_clamp" if hasattr(backend, "act_clamp") else "swiglu_limit"
    delattr(backend, name)
    setattr(backend, name, torch.ones(EXPERTS, dtype=torch.float64))
    backend.dispatch.drop()
    backend._weights_are_ready()
    assert backend.kernel is None
    assert "swiglu_limit" in str(backend.verdict)


def routed(logits: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The best expert, by a weight that is not 1."""
    best = logits.max(1, keepdim=True)
    return best.indices.int(), torch.sigmoid(best.values)


def on_scaled_input(tokens: int, device: str = "cpu") -> tuple[float, int]:
    tensors = random_experts(EXPERTS, HIDDEN, SIZE)
    module, hosts = twins(tensors, device, top_k=1, apply_router_weight_on_input=True)
    for each in (module, hosts):
        each.routing_method.apply = routed
    x, logits = layers.inputs(module, tokens, tensors)
    ids, router_weights = module.routing_method.apply(logits)
    call = x.to(device), logits.to(device)
    with kernel_calls(module.backend) as reached:
        found = module(*call)
    assert len(reached) or torch.equal(found, hosts(*call))
    return distance(found, in_float32(tensors, x * router_weights.bfloat16(), ids, torch.ones_like(router_weights))), len(reached)


@pytest.mark.parametrize(("tokens", "served"), [(1, 1), (63, 1), (64, 0)])
def test_the_router_weight_on_the_input(tokens: int, served: int) -> None:
    """Hosts scale the input themselves, and hand on no scales of routes."""
    error, calls = on_scaled_input(tokens)
    assert calls == served
    assert error < (BOUND if served else HOSTS_BOUND)


def as_ranks_gather(tokens: int, ranks: int = 2, device: str = "cpu") -> tuple[float, int]:
    """Error of the ranks' sum, and calls that were kernels'."""
    tensors, total, calls = random_experts(EXPERTS, HIDDEN, SIZE), torch.zeros(tokens, HIDDEN), 0
    for rank in range(ranks):
        mapping = {"world_size": ranks, "rank": rank, "tp_size": ranks, "moe_ep_size": ranks, "enable_attention_dp": True}
        module, hosts = twins(tensors, device, mapping=mapping)
        assert module.backend.verdict.families == ("triton",)
        x, logits = layers.inputs(module, tokens, tensors)
        ids, router_weights = module.routing_method.apply(logits)
        routes = ids.to(device), router_weights.to(device)
        sent, sf = module.backend.quantize_input(x.to(device))  # what goes to the other ranks is as without us
        scale = module.backend.fc31_input_scale.data
        packed, plain = fp4_quantize(x.to(device), scale, is_sf_swizzled_layout=False)
        assert sf is not None
        assert torch.equal(sent, packed)
        assert torch.equal(sf.view(torch.uint8).flatten(), plain)
        form: dict[str, Any] = {"is_sf_swizzled": False, "output_dtype": torch.bfloat16}
        with kernel_calls(module.backend) as reached:
            part = layers.run_moe(module.backend, sent, *routes, sf, **form)
        assert len(reached) or torch.equal(part, layers.run_moe(hosts.backend, sent, *routes, sf, **form))
        total += part.float().cpu()
        calls += len(reached)
        blocks = plain.view(tokens, -1).view(torch.float8_e4m3fn)
        given = (dequantize(packed, blocks) / scale).cpu()
    return distance(total, in_float32(tensors, given, ids, router_weights)), calls


@pytest.mark.parametrize(("tokens", "served"), [(1, 2), (63, 2), (64, 0)])
def test_tokens_that_ranks_gather_quantized(tokens: int, served: int) -> None:
    error, calls = as_ranks_gather(tokens)
    assert calls == served
    assert error < (0.006 if served else HOSTS_BOUND)  # bfloat16 of each rank


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("tokens", [1, 40])
def test_input_that_a_model_has_quantized(tokens: int, swizzled: bool) -> None:
    tensors = random_experts(EXPERTS, HIDDEN, SIZE)
    module = layers.load(layers.create(EXPERTS, HIDDEN, SIZE), tensors)
    x, logits = layers.inputs(module, tokens, tensors)
    ids, router_weights = module.routing_method.apply(logits)
    packed, sf = fp4_quantize(x, module.backend.fc31_input_scale, is_sf_swizzled_layout=swizzled)
    given, none = module.backend.quantize_input(host.Fp4QuantizedTensor(packed, sf, swizzled), post_quant_comm=False)
    with kernel_calls(module.backend) as reached:
        found = layers.run_moe(module.backend, given, ids, router_weights, none, output_dtype=torch.bfloat16)
    assert len(reached) == 1
    _, plain = fp4_quantize(x, module.backend.fc31_input_scale, is_sf_swizzled_layout=False)
    values = dequantize(packed, plain.view(tokens, -1).view(torch.float8_e4m3fn)) / module.backend.fc31_input_scale
    assert distance(found, in_float32(tensors, values, ids, router_weights)) < BOUND
