# SPDX-License-Identifier: Apache-2.0
"""Layers that vLLM hands router logits to, on the CPU: torch stands in for our kernels, and vLLM's own router routes the rest."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.integration.vllm import layers
from trtllm_b12x.core import process, settings
from trtllm_b12x.engines.vllm import facts, plugin
from trtllm_b12x.formats.geometry import Scoring
from trtllm_b12x.kernels.reference import ReferenceKernel
from trtllm_b12x.kernels.scoring import routes_of

SIZES = 8, 2, 256, 128
FORMATS = "MXFP8", "W4A16_NVFP4", "MXFP4"


@pytest.fixture(scope="module", autouse=True)
def pretended() -> Iterator[None]:
    layers.pretend_sm120()
    with layers.vllm_config():
        yield


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(settings.KERNELS.name, raising=False)
    process.forget()
    plugin.install()
    with mock.patch("vllm._custom_ops.topk_softmax", topk_softmax):
        yield
    plugin.uninstall()
    process.forget()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a kernel had router logits."""
    found: list[bool] = []
    run = ReferenceKernel.run

    def recording(self: Any, call: Any) -> torch.Tensor:
        found.append(call.router_logits is not None)
        return run(self, call)

    monkeypatch.setattr(ReferenceKernel, "run", recording)
    return found


def monolithic() -> Any:
    """Import it once SM120 is pretended: vLLM's modules bind the platform that they find."""
    return importlib.import_module("trtllm_b12x.engines.vllm.monolithic")


def topk_softmax(
    weights: torch.Tensor, ids: torch.Tensor, unused: torch.Tensor, logits: torch.Tensor, renormalize: bool, bias: Any = None,
    is_padding: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Compute what vLLM's operator of this name does: of equal logits the lower id is first, and padding has no expert."""
    assert bias is None
    chosen, of_chosen = routes_of(Scoring("softmax", renormalize), ids.shape[1], logits)
    ids.copy_(chosen if is_padding is None else chosen.masked_fill(is_padding.unsqueeze(1), -1))
    weights.copy_(of_chosen)


def config_of(method: str = "RenormalizeNaive", **more: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType

    return layers.config_of(*SIZES, **{"routing_method": RoutingMethodType[method], **more})


def built(form: str, config: Any, **routed: Any) -> tuple[Any, Any, layers.Experts]:
    experts = layers.random_experts(form, SIZES[0], *SIZES[2:])
    return *layers.Routed(**routed).loaded(form, config, experts), experts


def draw(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return (torch.randn(tokens, n, generator=generator).to(d) for n, d in ((SIZES[2], torch.bfloat16), (SIZES[0], dtype)))  # type: ignore[return-value]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("routing", ["RenormalizeNaive", "Default"])
def test_numbers_with_and_without_logits(form: str, routing: str, calls: list[bool]) -> None:
    method, layer, experts = built(form, config_of(routing))
    assert method.is_monolithic
    for tokens, dtype in ((1, torch.bfloat16), (5, torch.float32), (63, torch.bfloat16), (64, torch.bfloat16)):
        x, logits = draw(tokens, dtype)
        layers.call_with_logits(method, layer, x, logits)  # the profile run loads
        calls.clear()
        found = layers.call_with_logits(method, layer, x, logits)
        assert calls == [tokens < 64]
        ids, weights = routes_of(monolithic().SCORINGS[routing], SIZES[1], logits)
        assert layers.distance(found, experts.expected(x, weights, ids)) < 0.06, tokens


def test_calls_that_vllm_routes_are_those_of_the_modular_class() -> None:
    """Bit for bit, of as many tokens as no kernel takes logits of."""
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType

    method, layer, experts = built("W4A16_NVFP4", config_of())
    plain = config_of(routing_method=RoutingMethodType.Unspecified)
    modular, same = layers.loaded("W4A16_NVFP4", plain, experts)
    assert not modular.is_monolithic
    x, logits = draw(80)
    ids, weights = routes_of(Scoring(), SIZES[1], logits)
    assert torch.equal(layers.call_with_logits(method, layer, x, logits), layers.call(modular, same, x, weights, ids))


def test_rows_of_padding_have_no_experts(monkeypatch: pytest.MonkeyPatch, calls: list[bool]) -> None:
    """Neither in a kernel that takes logits, nor in vLLM's operator."""
    method, layer, _ = built("W4A16_NVFP4", config_of())
    x, logits = draw(6)
    plain = [layers.call_with_logits(method, layer, x, logits) for _ in range(2)][-1]
    mask = torch.tensor([False, False, False, True, False, True, True, True])
    forward = SimpleNamespace(is_padding=mask)
    monkeypatch.setattr("vllm.forward_context.is_forward_context_available", lambda: True)
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: forward)
    calls.clear()
    found = layers.call_with_logits(method, layer, x, logits)
    assert calls == [True]
    assert not found[mask[:6]].any()
    assert layers.distance(found[~mask[:6]], plain[~mask[:6]].float()) < 0.004


@pytest.mark.parametrize(
    "more",
    [
        {"num_expert_group": 2, "topk_group": 1},
        {"num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
        {"e_score_correction_bias": torch.zeros(8)},
    ],
    ids=["groups", "a factor", "a bias that the method has not"],
)
def test_what_the_kernel_does_not_route_vllm_does(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, calls: list[bool]
) -> None:
    method, layer, _ = built("MXFP4", config_of())
    x, logits = draw(4)
    for _ in range(2):
        layers.call_with_logits(method, layer, x, logits)
    calls.clear()
    asked = []

    def router(*arguments: Any, **named: Any) -> Any:
        asked.append(named)
        select = lambda x, logits: routes_of(Scoring(), SIZES[1], logits)[::-1]  # noqa: E731
        return SimpleNamespace(select_experts=select)

    monkeypatch.setattr(monolithic(), "create_fused_moe_router", router)
    layers.call_with_logits(method, layer, x, logits, **more)
    (named,) = asked
    assert calls == [False]
    assert named.get("num_expert_group") == more.get("num_expert_group")
    assert named["routed_scaling_factor"] == more.get("routed_scaling_factor", 1.0)
    assert named["e_score_correction_bias"] is more.get("e_score_correction_bias")


def test_a_factor_in_the_weights(calls: list[bool]) -> None:
    """Of a method with a bias, as GLM-5 has it."""
    method, layer, experts = built("W4A16_NVFP4", config_of("MiniMax2"), routed_scaling_factor=2.5)
    x, logits = draw(5, torch.float32)
    bias = torch.linspace(-0.2, 0.2, SIZES[0])
    found = layers.call_with_logits(method, layer, x, logits, e_score_correction_bias=bias, routed_scaling_factor=2.5)
    assert calls[-1]
    ids, weights = routes_of(Scoring("sigmoid", bias=True, factor=2.5), SIZES[1], logits, bias)
    assert layers.distance(found, experts.expected(x, weights, ids)) < 0.06


def test_layers_whose_ids_are_captured_are_routed_by_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses to capture ids of monolithic experts. 0.28 has the option in another configuration."""
    from vllm.config import ModelConfig, get_current_vllm_config

    config, option = get_current_vllm_config(), "enable_return_routed_experts"
    assert built("W4A16_NVFP4", config_of())[0].is_monolithic
    if option in ModelConfig.__dataclass_fields__:
        monkeypatch.setattr(config, "model_config", SimpleNamespace(**{option: True}))
    else:
        kind = importlib.import_module("vllm.config.aux_output").AuxOutputConfig
        monkeypatch.setattr(config, "aux_output_config", kind(**{option: True}))
    assert not built("W4A16_NVFP4", config_of())[0].is_monolithic


def test_methods_and_versions_without_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(facts, "_OF_LOGITS", [*facts._OF_LOGITS, "new"])
        facts.hands_over_logits.cache_clear()
        method = built("W4A16_NVFP4", config_of())[0]
        assert not method.is_monolithic
        assert "Sm12x" in type(method.moe_kernel.fused_experts).__name__
    facts.hands_over_logits.cache_clear()
    assert plugin._scoring(None, config_of()) is None
    experts = layers.random_experts("W4A16_NVFP4", SIZES[0], *SIZES[2:])
    assert not layers.loaded("W4A16_NVFP4", config_of(), experts)[0].is_monolithic  # its router is not known


def test_a_fault_of_the_kernel_leaves_routing_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    method, layer, experts = built("MXFP8", config_of())
    x, logits = draw(3)
    layers.call_with_logits(method, layer, x, logits)
    schedule = method.moe_kernel.fused_experts.experts.dispatch.schedule
    monkeypatch.setattr(schedule.with_logits(3), "run", mock.Mock(side_effect=RuntimeError("a fault")))
    found = layers.call_with_logits(method, layer, x, logits)
    ids, weights = routes_of(Scoring(), SIZES[1], logits)
    assert layers.distance(found, experts.expected(x, weights, ids)) < 0.06
    assert method.moe_kernel.fused_experts.experts.dispatch.schedule.with_logits(3) is None
    assert torch.equal(layers.call_with_logits(method, layer, x, logits), found)


def test_a_kernel_that_cannot_be_planned_leaves_routing_to_vllm(monkeypatch: pytest.MonkeyPatch, calls: list[bool]) -> None:
    plan = ReferenceKernel.plan

    def refused(self: Any, geometry: Any, *rest: Any) -> None:
        if geometry.scoring is not None:
            raise ValueError("no logits")
        plan(self, geometry, *rest)

    monkeypatch.setattr(ReferenceKernel, "plan", refused)
    method, layer, experts = built("W4A16_NVFP4", config_of())
    x, logits = draw(5)
    for _ in range(2):
        found = layers.call_with_logits(method, layer, x, logits)
    assert not any(calls)
    ids, weights = routes_of(Scoring(), SIZES[1], logits)
    assert layers.distance(found, experts.expected(x, weights, ids)) < 0.06


def test_layers_whose_logits_are_not_taken() -> None:
    def scoring(routed: dict[str, Any] | None = None, **more: Any) -> Scoring | None:
        found: Scoring | None = monolithic().scoring_of(config_of(**more), layers.Routed(**routed or {}))
        return found

    two = {"parallel": {"tp_size": 2}}
    assert scoring() == scoring(**two) == scoring({"num_expert_group": 1}) == Scoring()
    biased = Scoring("sigmoid", bias=True)
    assert scoring(method="MiniMax2") == biased
    assert scoring({"routed_scaling_factor": 2.5}, method="MiniMax2") == replace(biased, factor=2.5)
    cases: list[dict[str, Any]] = [{"method": name} for name in ("Custom", "DeepseekV4", "Unspecified", "Llama4", "Simulated")]
    cases += [{"router_logits_dtype": torch.float16}, {"is_lora_enabled": True}, {"parallel": {"dp_size": 2}}]
    cases += [{"method": "MiniMax2", **two}, {"num_local_experts": 3, "parallel": {"ep_size": 3}}]
    newer = [{"require_decomposed_backend": True}, {"has_hash_routing": True}]  # 0.28 has no such fields
    for more in (*cases, *(more for more in newer if hasattr(config_of(), next(iter(more))))):
        assert scoring(**more) is None, more
    for routed in ({"num_expert_group": 8}, {"custom_routing_function": len}, {"routed_scaling_factor": 2.5}):
        assert scoring(routed) is None, routed


def test_names_of_routing_methods_are_vllms() -> None:
    from vllm.model_executor.layers.fused_moe.config import get_routing_method_type

    for scoring_func, renormalize, groups, bias, expected in (
        ("softmax", True, None, False, "RenormalizeNaive"),
        ("softmax", False, None, False, "Default"),
        ("sigmoid", True, 1, True, "DeepSeekV3"),
        ("sigmoid", True, None, True, "MiniMax2"),
        ("sigmoid", True, None, False, "SigmoidRenorm"),
        ("sigmoid", False, None, False, "Sigmoid"),
    ):
        found = get_routing_method_type(
            scoring_func=scoring_func, top_k=8, renormalize=renormalize, num_expert_group=groups, has_e_score_bias=bias
        )
        assert found.name == expected
        scoring = monolithic().SCORINGS[expected]
        assert (scoring.kind.partition("_")[0], scoring.renormalize, scoring.bias) == (scoring_func, renormalize, bias)
