"""The floor of a decode step: bytes, experts, and that the model of skewed routes is that of drawn ones."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from benchmarks import floor, layer_times
from benchmarks.floor_models import CARDS, MODELS, Model, zipf
from benchmarks.geometries import GEOMETRIES, routes
from trtllm_b12x.dispatch.timing import expected_hits, expert_bytes

BY_NAME = {model.name: model for model in MODELS}


@pytest.mark.parametrize("model", [m for m in MODELS if m.geometry in GEOMETRIES], ids=lambda model: model.name)
def test_a_layer_is_that_which_is_measured(model: Model) -> None:
    geometry = GEOMETRIES[model.geometry]
    assert (model.experts, model.top_k) == (geometry.num_experts, geometry.top_k)
    assert model.hits(8) == pytest.approx(expected_hits(geometry, 8))
    if model.name != "gpt-oss-120b":  # MXFP4 and biases
        assert model.expert_bytes == expert_bytes(geometry)


@pytest.mark.parametrize(
    ("name", "widths", "total", "within"),
    [
        ("Qwen3-30B-A3B", {"attention": 9 / 16}, 30.53e9, 1e-3),
        # Without the MTP layer: attention, MoE, a projection of 8192 x 4096.
        ("Nemotron-3-Super", {"attention": 2, "router": 4}, 123.61e9 - 2.94e9, 5e-4),
        ("Qwen3.6-35B-A3B", {"LM head": 9 / 16, "shared experts": 9 / 16}, 35e9, 0.01),
    ],
)
def test_parameters_are_those_of_the_model(name: str, widths: dict[str, float], total: float, within: float) -> None:
    """Bytes over the width of each part."""
    model = BY_NAME[name]
    widths = {"router": 2, "LM head": 2, "latent projections": 2, **widths}
    fixed = sum(size / widths.get(part, 1) for part, size in model.fixed.items()) + model.embedding / 2
    experts = model.moe_layers * model.experts * model.expert_bytes * 16 / 9
    assert fixed + experts == pytest.approx(total, rel=within)


def test_qwen36_as_its_checkpoint_is() -> None:
    """Experts, shared experts and LM head in W4A16_NVFP4: 2,403 MB a step, 746 tokens/s on an RTX 5090."""
    model, card = BY_NAME["Qwen3.6-35B-A3B"], next(card for card in CARDS if card.name == "RTX 5090")
    assert sum(model.parts(1).values()) == pytest.approx(2403e6, rel=1e-3)
    assert 1 / model.floor(card, 1) == pytest.approx(746, rel=1e-3)


def test_drafted_tokens_read_more_experts_and_nothing_else() -> None:
    for model in MODELS:
        one, several, as_many = model.parts(4), model.parts(4, draft=3), model.parts(12)
        assert several["experts"] == as_many["experts"] > one["experts"]
        assert {**several, "experts": 0} == {**one, "experts": 0}
    rows = [line for line in floor.page({}).splitlines() if line.startswith("| Qwen3.6-35B-A3B | ") and line.count("(") == 7]
    assert len(rows) == len(CARDS) + 4


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Nemotron-3-Super"])
def test_skewed_hits_are_those_of_drawn_routes(name: str) -> None:
    model, geometry = BY_NAME[name], GEOMETRIES[name]
    assert sum(zipf(model.experts, model.top_k)) == pytest.approx(model.top_k, rel=1e-6)
    for tokens in (1, 8, 64):
        # Each call of routes draws another order of experts, the same for all of its tokens.
        drawn = statistics.mean(routes(geometry, tokens, seed, skewed=True).unique().numel() for seed in range(40))
        assert model.hits(tokens, skewed=True) == pytest.approx(drawn, rel=0.025)
        assert model.hits(tokens, skewed=True) <= model.hits(tokens) + 1e-6


def test_a_layer_s_time_is_fitted_to_what_was_measured() -> None:
    lines: list[dict[str, Any]] = [{"megabytes": m, "us": 8 + 1.25 * m / 4.0} for m in (20.0, 40.0, 160.0)]
    fixed, factor, off = layer_times.fit(lines, 4e12)
    assert (round(1e6 * fixed, 6), round(factor, 6), round(off, 6)) == (8, 1.25, 0)
    whole = {"split": "TP1", "routing": "random", "geometry": "a", "bytes_per_clock_sm": 5.0}
    measured = [{**line, **whole, "tokens": tokens} for line, tokens in zip(lines, (1, 2, 8), strict=True)]
    run = {"gpu": "NVIDIA H200", "copy": 4e12, "lines": measured}
    found = {"moe-decode.json": run, "moe-mxfp8.json": {**run, "gpu": "NVIDIA H100 80GB HBM3"}}
    text = "\n".join(layer_times.section(found))
    one, two, _, eight, *_ = (8 + 1.25 * m * 1e6 / (4 / 4.8 * 1792e9) * 1e6 for m in (20, 40, 0, 160))
    assert f"| a, NVFP4 | 8.0 | 1.25 | 0% | RTX 5090, RTX PRO 6000 | {one:.0f} | {two:.0f} | - | {eight:.0f} | - |" in text
    assert "MXFP8 |" not in text  # another card's
    assert layer_times.section({"moe-decode.json": {**run, "gpu": "NVIDIA RTX 5090"}}) == []
    assert "4.4 on RTX 5090, 4.0 on RTX PRO 6000, 2.4 on GB10" in text
    assert layer_times.section({}) == []
