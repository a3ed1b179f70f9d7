"""The grouped NVFP4 kernels' numbers in Triton's interpreter, against the strict reference and the same layer in torch.

``test_kernels_device.py`` has a GPU's; MXFP8's are in ``test_mxfp8_kernels.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import forks, layers
from tests.checkpoints import random_experts
from tests.nvfp4_layer import distance, random_call, random_layer
from trtllm_b12x.engines.trtllm.embedded.ops import fp4_quantize
from trtllm_b12x.formats import nvfp4
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.reference import QuantizedReferenceKernel, ReferenceKernel
from trtllm_b12x.kernels.triton.grouped import GroupedNVFP4Kernel
from trtllm_b12x.tools.verify import reference
from trtllm_b12x.tools.verify.reference import Arithmetic
from trtllm_b12x.tools.verify.reference_formats import move_off_ties

CPU = torch.device("cpu")
BOUND = 0.004
"""Relative L2 of the rounding of shares and of the output to bfloat16; seen: 0.0029."""
OTHERS = {
    "off every tile": Geometry(3, 2, 192, 192, "Geglu"),
    "not gated": Geometry(3, 2, 64, 64, "Silu"),
    "alpha, beta and limit": Geometry(3, 2, 128, 64, "SwigluBias"),
    "a rank of two": Geometry(5, 3, 128, 64, "Gelu", ranks=2),
}


def planned(geometry: Geometry, weights: object, first: int = 0, kind: Any = GroupedNVFP4Kernel) -> tuple[Any, Any]:
    """A kernel, and the torch kernel with its rounding points."""
    found = kind(), QuantizedReferenceKernel()
    for kernel in found:
        kernel.plan(geometry, 100, CPU)
        kernel.bind(weights, first)
    return found


def quantized(kernel: GroupedNVFP4Kernel, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales that a call makes of ``x``."""
    hidden = kernel.geometry.hidden_size
    codes, scales = torch.empty(len(x), hidden // 2, dtype=torch.uint8), torch.empty(len(x), hidden // 64, dtype=torch.int32)
    quantize, *_ = kernel.variants_of_call(kernel.rule(len(x)), torch.int32, torch.float32)
    factor = kernel._layers[False][0].quantize
    quantize.function[(-(-len(x) // 4), 1)](x, *factor, codes, scales, len(x), **quantize.constants)
    return codes, scales.view(torch.float8_e4m3fn)


def of_a_checkpoint(gated: bool, ratio: float, tokens: int) -> dict[str, float | bool]:
    """A layer that was loaded; with a gate also quantized input, and what a token that is no number does to others."""
    tensors = random_experts(4, 128, 192, gated, up_to_gate=ratio)
    module = layers.load(layers.create(4, 128, 192, gated=gated), tensors)
    backend = module.backend
    x, logits = layers.inputs(module, tokens, tensors)
    call = reference.MoECall(x, *module.routing_method.apply(logits))
    routes = call.token_selected_experts, call.token_final_scales
    ((wanted,),) = reference.outputs(tensors, 4, gated, [call], [Arithmetic.KERNEL])
    kernel, yardstick = planned(backend._geometry(), backend._kernel_weights())
    found = kernel.run(MoECall(x, *routes))
    result: dict[str, float | bool] = {
        "from the strict reference": distance(found, wanted),
        "ten times from the reference kernel": 10 * distance(found, yardstick.run(MoECall(x, *routes)).float()),
    }
    ties = torch.randn(100, 128).bfloat16()  # where a division and a reciprocal round apart
    codes = nvfp4.dequantize(*quantized(kernel, ties))
    result["codes"] = torch.equal(codes, yardstick._quantized(ties, backend._kernel_weights().input_scales.fc1_divisor[0]))
    if not gated:
        return result
    for swizzled in (True, False):
        codes, scales = fp4_quantize(x, backend.fc31_input_scale, is_sf_swizzled_layout=swizzled)
        arrived = MoECall(codes, *routes, x_sf=scales, swizzled=swizzled)
        same = kernel.run(arrived)
        result[f"quantized, {swizzled}"] = torch.equal(same, found)
        result[f"quantized in torch, {swizzled}"] = distance(yardstick.run(arrived), wanted)
    x[0], x[1, 3] = torch.inf, torch.nan  # what is too large saturates
    beside = kernel.run(MoECall(x, *routes))
    result["others"] = torch.equal(beside[2:], found[2:])
    result["its own"] = bool(beside[0].isfinite().all() & beside[1].isnan().all())
    return result


def of_a_layer(geometry: Geometry) -> dict[str, float | bool]:
    """A form or activation against the reference kernel. Each expert has its own FC2 input scale, and its own ratio of up."""
    weights = random_layer(geometry, ratio=geometry.activation != "SwigluBias").kernel_weights()
    first = 5 if geometry.expert_parallel else 0
    kernel, yardstick = planned(geometry, weights, first)
    x, ids, router_weights = random_call(geometry, 9, geometry.num_experts * geometry.ranks)
    x, ids[0] = move_off_ties(x, 0.0123), -1
    out, wide = torch.full(x.shape, torch.nan, dtype=torch.bfloat16), ids.long()
    wide[0] = 2**32 + first  # of no expert, though its lower 32 bits are the first's
    kernel.run(MoECall(x, wide, router_weights, out=out))
    wanted = yardstick.run(MoECall(x, ids, router_weights, out=torch.zeros(x.shape)))
    return {"distance": distance(out, wanted), "nothing": not out[0].any().item()}


def of_scales_that_are_no_number() -> dict[str, float | bool]:
    """A third of the block scales negative; NaN of either sign in FC1's of one expert, and in one row of FC2's of another."""
    geometry = OTHERS["off every tile"]
    layer, generator = random_layer(geometry), torch.Generator().manual_seed(0)
    for scales in (layer.s1.view(torch.uint8), layer.s2.view(torch.uint8)):
        scales |= (torch.rand(scales.shape, generator=generator) < 0.3).to(torch.uint8) << 7
    layer.s1.view(torch.uint8)[1, 7, 3], layer.s2.view(torch.uint8)[2, 5, 0] = 0x7F, 0xFF
    kernel, yardstick = planned(geometry, layer.kernel_weights())
    x, ids, router_weights = random_call(geometry, 3)
    x = move_off_ties(x, 0.0123)
    ids[:] = torch.tensor([[0, 0], [1, 0], [2, 0]])
    call = MoECall(x, ids, router_weights)
    found, wanted = kernel.run(call), yardstick.run(call._replace(out=torch.zeros(x.shape)))
    wrong = wanted.isnan()
    counts = wrong.sum(1).tolist() == [0, geometry.hidden_size, 1]
    return {"distance": distance(found[~wrong], wanted[~wrong]), "NaN": torch.equal(found.isnan(), wrong), "counts": counts}


def of_sorting() -> dict[str, float | bool]:
    """More routes than a program looks at at a time, against torch: places, router weights, and what is of no expert here."""
    from trtllm_b12x.kernels.triton.routing import sort_kernel

    experts, first, generator = 5, 3, torch.Generator().manual_seed(0)
    found: dict[str, float | bool] = {}
    for dtype, routes in ((torch.int32, 1), (torch.int32, 4096), (torch.int64, 9001)):
        ids = torch.randint(0, 11, (routes,), generator=generator, dtype=dtype)
        ids[::97], ids[::101] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        router_weights = torch.rand(routes, generator=generator)
        order, starts, by_place = torch.full((routes,), -1).int(), torch.zeros(experts + 1).int(), torch.zeros(routes)
        sort_kernel[(experts, 1)](ids, router_weights, order, starts, by_place, routes, first, EXPERTS=experts, BLOCK=4096)
        wanted = [(ids == first + expert).nonzero()[:, 0] for expert in range(experts)]
        places = torch.cat(wanted)
        count = len(places)
        found[f"{routes} places"] = torch.equal(order[:count].long(), places) and bool((order[count:] == -1).all())
        found[f"{routes} starts"] = starts.tolist() == [sum(map(len, wanted[:e])) for e in range(experts + 1)]
        found[f"{routes} router weights"] = torch.equal(by_place[:count], router_weights[places])
    return found


CASES: dict[str, tuple[Callable[[], dict[str, float | bool]], int]] = {
    "gated": (lambda: of_a_checkpoint(True, 0.7, 17), 9),
    "squared": (lambda: of_a_checkpoint(False, 1.0, 3), 3),
    **{name: (functools.partial(of_a_layer, geometry), 2) for name, geometry in OTHERS.items()},
    "no number": (of_scales_that_are_no_number, 3),
    "sorting": (of_sorting, 9),
}
"""What computes a case, and how many answers it has."""


def in_the_interpreter(names: list[str]) -> dict[str, dict[str, float | bool]]:
    return {name: CASES[name][0]() for name in names}


@pytest.fixture(scope="module")
def results(selected: list[str]) -> dict[str, dict[str, float | bool]]:
    found: dict[str, dict[str, float | bool]] = forks.in_the_interpreter(
        f"{__name__}:in_the_interpreter", selected, TRTLLM_B12X_LOG="ERROR"
    )
    return found


@pytest.mark.embedded
@pytest.mark.all("squared", "off every tile", "not gated", "no number")
@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, results: dict[str, dict[str, float | bool]]) -> None:
    answers = results[name]
    assert len(answers) == CASES[name][1]
    assert all(value is not False and float(value) <= (1 if value is True else BOUND) for value in answers.values()), answers


def test_what_the_kernels_do_not_take() -> None:
    geometry = Geometry(3, 2, 128, 64, "Swiglu")
    layer = random_layer(geometry)
    kernel = GroupedNVFP4Kernel()
    kernel.describe(geometry, 100, CPU)
    with pytest.raises(ValueError, match="of FC1 one for all experts"):
        kernel.bind(layer.kernel_weights(one_for_all=False))
    with pytest.raises(ValueError, match="the host's input scales"):
        kernel.bind(dataclasses.replace(layer.kernel_weights(), input_scales=None))
    kernel.bind(layer.kernel_weights())
    codes, scales = (torch.zeros(size, dtype=torch.uint8) for size in ((2, 64), (16,)))
    with pytest.raises(ValueError, match="x_sf has 16 scales, expected 1024 for 2 tokens"):
        kernel.run(MoECall(codes, torch.zeros(2, 2).int(), torch.zeros(2, 2), scales, swizzled=True))
    with pytest.raises(ValueError, match="SiTu is none of"):
        kernel.describe(dataclasses.replace(geometry, activation="SiTu"), 100, CPU)
    with pytest.raises(ValueError, match="must be multiples of 64 and 16"):
        kernel.describe(dataclasses.replace(geometry, hidden_size=96), 100, CPU)


def test_what_stands_in_has_its_own_rounding_points() -> None:
    """b12x's rounding of FC2's partial sums is not among them."""
    layer = random_layer(Geometry(3, 2, 128, 256, "Swiglu"))
    x, ids, router_weights = random_call(layer.geometry, 70)
    x = move_off_ties(x, 0.0123)
    kernels = planned(layer.geometry, layer.kernel_weights(), kind=ReferenceKernel)
    other, result = (kernel.run(MoECall(x, ids, router_weights, out=torch.zeros(x.shape))) for kernel in kernels)
    assert 0.0005 < distance(result, other) < 0.005
    assert distance(result, layer.expected(x, ids, router_weights)) > 0.05  # of activations that are not quantized
