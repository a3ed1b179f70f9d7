# SPDX-License-Identifier: Apache-2.0
"""Router logits on a real GPU (Hopper counts as SM120): the rules beside vLLM's operators, and layers that route."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integration.vllm import layers
from tests.routes import ROWS, Row
from trtllm_b12x.core import settings
from trtllm_b12x.engines.vllm import marlin, plugin
from trtllm_b12x.formats.geometry import Scoring
from trtllm_b12x.kernels.scoring import routes_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = 128, 8, 2048, 768
ROUTED = {"softmax": "RenormalizeNaive", "sigmoid": "MiniMax2", "sigmoid_tanh": "DeepSeekV3"}


@pytest.fixture(scope="module", autouse=True)
def config() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, layers.vllm_config("cuda"), torch.no_grad():
        for switch in (settings.KERNELS, settings.CROSSOVER):
            patch.delenv(switch.name, raising=False)
        patch.setenv(settings.HOPPER.name, "1")
        patch.setattr(marlin, "refusal", lambda *layer: "")
        yield


def routed(scoring: Scoring, logits: torch.Tensor, top_k: int, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights by vLLM's own router."""
    create = importlib.import_module("vllm.model_executor.layers.fused_moe.router.router_factory").create_fused_moe_router
    groups = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1} if scoring.kind == "sigmoid_tanh" else {}
    router = create(
        top_k, logits.shape[1], scoring.renormalize, scoring_func=scoring.kind.partition("_")[0],
        routed_scaling_factor=scoring.factor, e_score_correction_bias=bias, **groups,
    )  # fmt: skip
    weights, ids = router.select_experts(logits.new_zeros(len(logits), 8, dtype=torch.bfloat16), logits)
    return ids, weights


@pytest.mark.parametrize("row", [row for row in ROWS.values() if len(row.logits) > 2], ids=str)
def test_vllms_operators_have_the_rules(row: Row) -> None:
    logits, bias = row.tensors()
    # Operators take some numbers of experts: more of them, whose logits lose.
    wide = torch.full((1, 64), -200.0, dtype=row.dtype)
    if float("-inf") in row.logits:
        wide[:] = float("-inf")
    wide[:, : logits.shape[1]] = logits
    more = None if bias is None else torch.cat([bias, torch.zeros(64 - len(bias))]).cuda()
    ids, weights = routed(row.scoring, wide.cuda(), len(row.ids), more)
    assert ids.tolist() == [list(row.ids)]
    torch.testing.assert_close(weights.cpu(), torch.tensor([row.weights]), rtol=4e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(128, 8), (32, 4), (512, 10), (256, 8)], ids=str)
@pytest.mark.parametrize("scoring", [Scoring(), Scoring("sigmoid", bias=True), Scoring("sigmoid_tanh", bias=True)], ids=str)
def test_vllms_operators_choose_alike(scoring: Scoring, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    experts, top_k = sizes
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (2 * torch.randn(1 << 16, experts, generator=generator, device="cuda")).to(dtype)
    bias = torch.randn(experts, generator=generator, device="cuda") if scoring.bias else None
    ids, weights = routed(scoring, logits, top_k, bias)
    expected, of_expected = routes_of(scoring, top_k, logits, bias)
    same = (ids == expected).all(1)
    print(scoring, sizes, dtype, "rows with other experts or another order:", int((~same).sum()))
    assert int((~same).sum()) <= (0 if scoring.kind == "softmax" else 32)  # of sigmoids that one operation rounds otherwise
    # 0.5 * tanh + 0.5 has the absolute error of numbers near 1.
    torch.testing.assert_close(weights[same], of_expected[same], rtol=2e-6, atol=5e-7 if scoring.kind == "sigmoid_tanh" else 0)


@pytest.mark.parametrize("kind", ROUTED)
@pytest.mark.parametrize("form", ["NVFP4", "W4A16_NVFP4", "MXFP4", "MXFP8"])
def test_a_layer(form: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From logits as from ids, captured as eager, rows of padding empty, and beyond the kernel bit for bit the other class."""
    names = importlib.import_module("vllm.model_executor.layers.fused_moe.config").RoutingMethodType
    plugin.install()
    experts = layers.random_experts(form, SIZES[0], *SIZES[2:], "cuda")
    of_logits = layers.Routed().loaded(form, layers.config_of(*SIZES, device="cuda", routing_method=names[ROUTED[kind]]), experts)
    of_ids = layers.loaded(form, layers.config_of(*SIZES, device="cuda"), experts)
    plugin.uninstall()
    assert of_logits[0].is_monolithic
    assert not of_ids[0].is_monolithic
    scoring = of_logits[0].moe_kernel.fused_experts.experts.scoring
    more: dict[str, Any] = {}
    if scoring.bias:
        more["e_score_correction_bias"] = torch.randn(SIZES[0], device="cuda")
    if kind == "sigmoid_tanh":
        more |= {"num_expert_group": 1, "topk_group": 1}

    def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(tokens, SIZES[2], device="cuda").bfloat16(), 2 * torch.randn(tokens, SIZES[0], device="cuda")

    def from_logits(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return layers.call_with_logits(*of_logits, x, logits, **more)

    from_logits(*inputs(4096))  # the profile run
    x, logits = inputs(4096)
    layers.call(*of_ids, x, *routed(scoring, logits, SIZES[1], more.get("e_score_correction_bias"))[::-1])
    schedule = of_logits[0].moe_kernel.fused_experts.experts.dispatch.schedule
    served = 0
    for tokens in (1, 3, 8, 17, 33, 48, 64, 200, 1024):
        x, logits = inputs(tokens)
        ids, weights = routed(scoring, logits, SIZES[1], more.get("e_score_correction_bias"))
        expected, found = layers.call(*of_ids, x, weights, ids), from_logits(x, logits)
        if schedule.with_logits(tokens) is None:
            assert torch.equal(found, expected), tokens
            continue
        served += 1
        assert layers.distance(found, expected.float()) < 0.004, tokens
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = from_logits(x, logits)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, found), tokens
        mask = torch.arange(64, device="cuda") % 3 == 1
        with monkeypatch.context() as patch:
            patch.setattr("vllm.forward_context.is_forward_context_available", lambda: True)
            forward = SimpleNamespace(is_padding=mask)
            patch.setattr("vllm.forward_context.get_forward_context", lambda forward=forward: forward)
            masked = from_logits(x, logits)
        assert not masked[mask[:tokens]].any()
        assert layers.distance(masked[~mask[:tokens]], found[~mask[:tokens]].float()) < 0.004
    assert served >= 3, schedule.summary
