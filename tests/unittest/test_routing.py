# SPDX-License-Identifier: Apache-2.0
"""Routes from router logits: the rules, and TensorRT-LLM's routing methods that have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.routes import ROWS, Row
from trtllm_b12x.engines.trtllm import routing
from trtllm_b12x.formats.geometry import Scoring
from trtllm_b12x.kernels.scoring import routes_of


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_rules(row: Row) -> None:
    logits, bias = row.tensors()
    ids, weights = routes_of(row.scoring, len(row.ids), logits, bias)
    assert ids.tolist() == [list(row.ids)]
    torch.testing.assert_close(weights, torch.tensor([row.weights]), rtol=2e-6, atol=0)


def method(name: str, **attributes: Any) -> Any:
    return type(name, (), {"top_k": 2, "routing_impl": SimpleNamespace(n_group=1, routed_scaling_factor=1.0), **attributes})()


@pytest.mark.parametrize("name", routing.METHODS)
def test_methods_by_name(name: str) -> None:
    assert routing.scoring_of(method(name)) == routing.METHODS[name]
    assert routing.scoring_of(method(f"{name}OfAnotherModel")) is None
    assert routing.scoring_of(method(name, output_dtype=torch.bfloat16)) is None
    assert routing.scoring_of(method(name, requires_separated_routing=True)) is None


def test_arguments_of_methods() -> None:
    implementation = SimpleNamespace(n_group=1, topk_group=1, routed_scaling_factor=2.5)
    deepseek = method("DeepSeekV3MoeRoutingMethod", routing_impl=implementation)
    assert routing.scoring_of(deepseek) == Scoring("sigmoid_tanh", bias=True, factor=2.5)
    implementation.n_group = 8
    assert routing.scoring_of(deepseek) is None
    with pytest.raises(AttributeError):  # of a version that has it elsewhere
        routing.scoring_of(method("DeepSeekV3MoeRoutingMethod", routing_impl=SimpleNamespace()))
    assert routing.scoring_of(method("SigmoidRenormMoeRoutingMethod", renormalize=False)) == Scoring("sigmoid", renormalize=False)


def test_dtypes_of_logits() -> None:
    """TensorRT-LLM rounds weights of sigmoid methods to the dtype of the logits."""
    half, single = torch.zeros(1, 4, dtype=torch.bfloat16), torch.zeros(1, 4)
    for kind, of_half in (("softmax", True), ("sigmoid", False), ("sigmoid_tanh", False)):
        assert routing.takes(Scoring(kind), single)
        assert routing.takes(Scoring(kind), half) == of_half
        assert not routing.takes(Scoring(kind), half.half())
