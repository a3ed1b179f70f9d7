# SPDX-License-Identifier: Apache-2.0
"""The one launch from router logits, on a CPU (:mod:`tests.emulator`): choices, weights, ties, and what is refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import emulator
from tests.emulator import Order, machine
from tests.nvfp4_layer import distance, random_call
from tests.unittest.test_cuda_emulated import BOUND, first_expert, in_any_order, one_token, weights_of
from trtllm_b12x.formats import BY_TURNS, ROWS, WeightLayout
from trtllm_b12x.formats.geometry import Scoring
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.call import of_logits
from trtllm_b12x.kernels.cards import models
from trtllm_b12x.kernels.catalog import KERNELS
from trtllm_b12x.kernels.cuda.decode import CudaKernel
from trtllm_b12x.kernels.scoring import routes_of
from trtllm_b12x.kernels.self_test import run_quick_self_test
from trtllm_b12x.kernels.triton.decode import TritonKernel

QWEN = Scoring()
DEEPSEEK = Scoring("sigmoid_tanh", bias=True, factor=2.5)
TOKENS = (1, 3, 9)
"""Of a variant for one token, of one whose columns are tokens, and of the one that gathers."""
LAYERS = {
    "softmax": Geometry(8, 2, 256, 128, "Swiglu", scoring=QWEN),
    "softmax over all": Geometry(40, 4, 256, 64, "Swiglu", scoring=Scoring(renormalize=False)),
    "sigmoid, a bias, a factor": Geometry(
        *(8, 3, 256, 128, "Relu2"), layout=WeightLayout(ROWS), format="W4A16_NVFP4", scoring=DEEPSEEK
    ),
    "sigmoid of MiniMax": Geometry(6, 4, 256, 64, "Swiglu", format="MXFP8", scoring=Scoring("sigmoid", bias=True)),
    "sigmoid as it is": Geometry(6, 2, 256, 64, "Swiglu", format="MXFP8", scoring=Scoring("sigmoid", renormalize=False)),
    "gpt-oss, two ranks": Geometry(
        *(4, 4, 320, 192, "SwigluBias"),
        ranks=2,
        bias=torch.bfloat16,
        layout=WeightLayout(ROWS, BY_TURNS),
        format="MXFP4",
        scoring=Scoring(higher_first=True),
    ),
}


@functools.cache
def planned(geometry: Geometry, blocks: int = 3) -> CudaKernel:
    kind: Any = KERNELS["cuda", geometry.format][0]
    return emulator.kernel_on_cpu(kind, geometry, weights_of(replace(geometry, scoring=None)), blocks, first_expert(geometry))


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch)
    monkeypatch.setattr(machine, "order", Order())


@pytest.fixture(autouse=True, scope="module")
def _compiles_ahead(selected: list[str]) -> None:
    for name in dict.fromkeys(name for name in selected if name in LAYERS):
        for tokens in TOKENS:
            emulator.begin(planned(LAYERS[name]), tokens)


def draw(geometry: Geometry, tokens: int, dtype: torch.dtype = torch.bfloat16, steps: float = 0) -> MoECall:
    """Draw a call. ``steps``: logits and bias are multiples of it, so that many tie."""
    experts, generator = geometry.num_experts * geometry.ranks, torch.Generator().manual_seed(tokens)
    x = random_call(geometry, tokens, experts, dtype=geometry.dtype)[0]
    logits = 2 * torch.randn(tokens, experts, generator=generator)
    bias = None
    assert geometry.scoring is not None
    if geometry.scoring.bias:
        bias = 0.3 * torch.randn(experts, generator=generator)
    if steps:
        logits, bias = (logits / steps).round() * steps, None if bias is None else torch.zeros_like(bias)
    return of_logits(x, logits.to(dtype), bias)


def expected(geometry: Geometry, call: MoECall) -> torch.Tensor:
    reference = planned(geometry).reference()
    reference.plan(geometry, len(call.x), torch.device("cpu"))
    reference.bind(weights_of(replace(geometry, scoring=None)), first_expert(geometry))
    return reference.run(call).float()


@pytest.mark.parametrize(("dtype", "steps"), [(torch.bfloat16, 0), (torch.float32, 0.5)], ids=["bfloat16", "float32, ties"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.all) if "softmax over" in name or name.endswith("is") else name for name in LAYERS],
)
def test_numbers(name: str, dtype: torch.dtype, steps: float) -> None:
    for tokens in TOKENS:
        call = draw(LAYERS[name], tokens, dtype, steps)
        assert distance(planned(LAYERS[name]).run(call), expected(LAYERS[name], call)) < BOUND, tokens


@pytest.mark.parametrize("name", ["softmax", "sigmoid, a bias, a factor", "gpt-oss, two ranks"])
def test_one_token(name: str) -> None:
    """Of layers of 1,920 columns or more: see ``one_token.cuh``."""
    geometry = LAYERS[name]
    weights, call = weights_of(replace(geometry, scoring=None)), draw(geometry, 1)
    found = in_any_order(lambda blocks: one_token(geometry, blocks, weights=weights), call, 3)
    assert distance(found, expected(geometry, call)) < BOUND


def test_a_router_weight_that_is_large() -> None:
    """Of an expert whose output is small; a factor of codes on it would be infinite."""
    geometry = replace(LAYERS["softmax"], scoring=None)
    for tokens in TOKENS:
        call = draw(LAYERS["softmax"], tokens)
        x = call.x * 2.0**-60
        ids = torch.arange(2, dtype=torch.int32).repeat(tokens, 1)
        found, one = (planned(geometry).run(MoECall(x, ids, torch.full((tokens, 2), weight))) for weight in (2.0**127, 2.0**60))
        assert found.isfinite().all()
        assert torch.equal(found.float(), one.float() * 2.0**67)


def test_ties_are_at_the_cut() -> None:
    """The experts that the tests above choose among equal ones are others where the higher comes first."""
    for geometry in LAYERS.values():
        call = draw(geometry, 64, steps=0.5)
        assert geometry.scoring is not None
        assert call.router_logits is not None
        one, other = (
            routes_of(replace(geometry.scoring, higher_first=higher), geometry.top_k, call.router_logits)[0].sort(1).values
            for higher in (False, True)
        )
        assert (one != other).any()


@pytest.mark.parametrize("name", ["softmax", "sigmoid, a bias, a factor"])
def test_rows_of_padding(name: str) -> None:
    """They have no routes: zeros come out, whatever their logits, and the others have the bits that they have without a mask."""
    geometry = LAYERS[name]
    for tokens in TOKENS:
        call = draw(geometry, tokens)
        first = planned(geometry).run(call)
        for rows in ([0], list(range(1, tokens, 2)), list(range(tokens))):
            mask = torch.zeros(tokens, dtype=torch.bool)
            mask[rows] = True
            found = planned(geometry).run(call._replace(padding=mask))
            assert not found[mask].any(), (tokens, rows)
            assert torch.equal(found[~mask], first[~mask]), (tokens, rows)
    with pytest.raises(ValueError, match=r"padding is torch\.uint8, expected bool"):
        planned(geometry).run(call._replace(padding=mask.byte()))
    with pytest.raises(ValueError, match=r"padding has shape \(2,\)"):
        planned(geometry).run(call._replace(padding=mask[:2]))


@pytest.mark.parametrize("value", [0.0, -torch.inf, 100.0], ids=str)
def test_rows_of_equal_logits(value: float) -> None:
    """The first experts are chosen, with equal weights; minus infinity everywhere has no weights."""
    geometry = LAYERS["softmax"]
    call = draw(geometry, 3)
    assert call.router_logits is not None
    call.router_logits[1] = value
    found = planned(geometry).run(call)
    if value == -torch.inf:
        assert found[1].isnan().all()
        call.router_logits[1] = 0
        assert distance(found[[0, 2]], expected(geometry, call)[[0, 2]]) < BOUND
    else:
        assert distance(found, expected(geometry, call)) < BOUND


@pytest.mark.parametrize("tokens", TOKENS[1:])
def test_a_logit_that_is_not_a_number(tokens: int) -> None:
    """Its token's output is none, and the others have the bits that they have beside a number."""
    geometry = LAYERS["softmax"]
    call = draw(geometry, tokens)
    first = planned(geometry).run(call)
    assert call.router_logits is not None
    call.router_logits[1, 5] = torch.nan
    found = planned(geometry).run(call)
    assert found[1].isnan().all()
    others = [token for token in range(tokens) if token != 1]
    assert torch.equal(found[others], first[others])


@pytest.mark.parametrize(
    ("experts", "top_k"), [(4, 4), pytest.param(33, 5, marks=pytest.mark.all), pytest.param(512, 22, marks=pytest.mark.all)]
)
def test_numbers_of_experts(experts: int, top_k: int) -> None:
    geometry = Geometry(experts, top_k, 256, 64, "Relu2", scoring=DEEPSEEK)
    for tokens in (1, 9):
        call = draw(geometry, tokens)
        assert distance(planned(geometry).run(call), expected(geometry, call)) < BOUND, tokens


def test_any_order() -> None:
    geometry = LAYERS["sigmoid, a bias, a factor"]
    for tokens in TOKENS:
        in_any_order(functools.partial(planned, geometry), draw(geometry, tokens), 3)
        machine.order = Order()


@pytest.mark.parametrize("name", ["sigmoid, a bias, a factor"])
def test_self_test(name: str) -> None:
    kernel = planned(LAYERS[name])
    results = run_quick_self_test(kernel, kernel.reference(), 0, {tokens: [kernel] for tokens in TOKENS})
    assert results
    assert all(result.passed for result in results), results
    kernel = planned(replace(LAYERS[name], scoring=replace(LAYERS[name].scoring or QWEN, factor=1.5)))
    wrong = planned(LAYERS[name])
    results = run_quick_self_test(wrong, kernel.reference(), 0, {1: [kernel]})
    assert results
    assert not results[0].passed


def test_what_is_refused() -> None:
    geometry = LAYERS["softmax"]
    call = draw(geometry, 2)
    with pytest.raises(ValueError, match="router_logits is missing"):
        planned(geometry).run(MoECall(call.x, torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2)))
    with pytest.raises(ValueError, match=r"router_logits has shape \(2, 7\), expected \(2, 8\)"):
        planned(geometry).run(of_logits(call.x, torch.zeros(2, 7)))
    with pytest.raises(ValueError, match="router_bias is given, but"):
        planned(geometry).run(call._replace(router_bias=torch.zeros(8)))
    with pytest.raises(ValueError, match="router_bias is missing"):
        planned(LAYERS["sigmoid of MiniMax"]).run(of_logits(torch.zeros(1, 256, dtype=torch.bfloat16), torch.zeros(1, 6)))
    with pytest.raises(ValueError, match="router_logits is given, but"):
        planned(replace(geometry, scoring=None)).run(call)
    card, cuda = models("sm_120a", ["RTX 5090"])[0], torch.device("cuda")
    with pytest.raises(ValueError, match="at most 512 experts, not 513"):
        CudaKernel(card).describe(replace(geometry, num_experts=513, ranks=1), 8, cuda)
    with pytest.raises(ValueError, match="not take a bias with softmax"):
        CudaKernel(card).describe(replace(geometry, scoring=Scoring(bias=True)), 8, cuda)
    with pytest.raises(ValueError, match="router_logits is missing"):
        planned(geometry).run(MoECall(call.x, torch.zeros(0, 0, dtype=torch.int32), torch.zeros(0, 0)))
    with pytest.raises(ValueError, match="triton takes ids and router weights"):
        TritonKernel(card).describe(geometry, 8, cuda)
