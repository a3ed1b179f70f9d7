"""The floor of a decode step: bytes, experts, and that the model of skewed routes is that of drawn ones."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks import floor
from benchmarks.floor_models import CARDS, MODELS, Model, zipf
from benchmarks.geometries import GEOMETRIES, MXFP8, routes
from trtllm_b12x.dispatch.timing import expected_hits, expert_bytes

BY_NAME = {model.name: model for model in MODELS}


@pytest.mark.parametrize("model", [m for m in MODELS if m.geometry in GEOMETRIES], ids=lambda model: model.name)
def test_a_layer_is_that_which_is_measured(model: Model) -> None:
    geometry = GEOMETRIES[model.geometry]
    assert (model.experts, model.top_k) == (geometry.num_experts, geometry.top_k)
    assert model.hits(8) == pytest.approx(expected_hits(geometry, 8))
    if model.name != "gpt-oss-120b":  # MXFP4 and biases
        assert model.expert_bytes == expert_bytes(geometry)


def test_an_mxfp8_layer_is_that_which_is_measured() -> None:
    model, geometry = BY_NAME["gemma-4-26B-A4B"], MXFP8["gemma-4-26B-A4B"]
    assert model.expert_bytes == 3 * geometry.hidden_size * geometry.intermediate_size * 33 / 32


@pytest.mark.parametrize(
    ("name", "attention", "router", "total", "within"),
    [
        ("Qwen3-30B-A3B", 9 / 16, 2, 30.53e9, 1e-3),
        ("Nemotron-3-Super", 2, 4, 123.61e9 - 2.94e9, 5e-4),  # without the MTP layer: attention, MoE, a projection of 8192 x 4096
        ("Qwen3.6-35B-A3B", 1, 2, 35e9, 0.01),
    ],
)
def test_parameters_are_those_of_the_model(name: str, attention: float, router: int, total: float, within: float) -> None:
    """Bytes over the width of each part."""
    model = BY_NAME[name]
    widths = {"attention": attention, "router": router, "LM head": 2, "latent projections": 2}
    fixed = sum(size / widths.get(part, 1) for part, size in model.fixed.items()) + model.embedding / 2
    experts = model.moe_layers * model.experts * model.expert_bytes * 16 / 9
    assert fixed + experts == pytest.approx(total, rel=within)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Nemotron-3-Super"])
def test_skewed_hits_are_those_of_drawn_routes(name: str) -> None:
    model, geometry = BY_NAME[name], GEOMETRIES[name]
    assert sum(zipf(model.experts, model.top_k)) == pytest.approx(model.top_k, rel=1e-6)
    for tokens in (1, 8, 64):
        # Each call of routes draws another order of experts, the same for all of its tokens.
        drawn = statistics.mean(routes(geometry, tokens, seed, skewed=True).unique().numel() for seed in range(40))
        assert model.hits(tokens, skewed=True) == pytest.approx(drawn, rel=0.025)
        assert model.hits(tokens, skewed=True) <= model.hits(tokens) + 1e-6


def test_predictions_are_not_below_the_floor() -> None:
    measured = floor.measured()
    layer = floor.Layer(seconds=100e-6, bytes=1e6)
    for model in MODELS:
        for card in CARDS:
            least = model.floor(card, 4)
            slow = floor.predicted(model, card, 4, {4: layer})
            assert slow is not None
            assert slow.by_rate > least
            assert slow.by_cycles == pytest.approx(
                least
                + model.moe_layers
                * max(0, 100e-6 * floor.H200.clock / card.clock - model.hits(4) * model.expert_bytes / card.bandwidth)
            )
            assert model.geometry.removesuffix(", MXFP8") in {**GEOMETRIES, **MXFP8}
            real = floor.predicted(model, card, 4, measured.get(model.geometry, {}))
            assert real is None or min(real.by_rate, real.by_cycles) >= least * (1 - 1e-9)
    assert floor.predicted(MODELS[0], CARDS[0], 8, {1: layer, 4: layer}) is None


def test_layers_are_those_of_the_files(tmp_path: Path) -> None:
    line = {"geometry": "A", "split": "TP1", "routing": "random", "tokens": 4, "us": 70.0, "fraction": 1e9 / 70e-6 / 4.24e12}
    others = [{**line, "us": 1.0, "routing": "skewed"}, {**line, "us": 1.0, "split": "EP4"}, {**line, "kernel": "grouped"}]
    (tmp_path / "moe-decode.json").write_text(json.dumps({"copy": 4.24e12, "lines": [line, *others]}))
    (tmp_path / "moe-mxfp8.json").write_text(json.dumps({"copy": 4e12, "lines": [{**line, "kernel": "triton", "fraction": 0.5}]}))
    layers = floor.measured(tmp_path)
    assert (layers["A"][4].seconds, layers["A"][4].bytes) == pytest.approx((70e-6, 1e9))
    assert layers["A, MXFP8"][4].bytes == pytest.approx(0.5 * 70e-6 * 4e12)
