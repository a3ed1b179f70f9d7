"""What became of a process's layers, and the one line about it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

import trtllm_b12x
from tests import layers
from tests.checkpoints import random_experts
from trtllm_b12x import log, registry


@pytest.fixture(autouse=True)
def _fresh(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    registry.forget()
    log.forget()
    caplog.set_level(logging.INFO, logger="trtllm_b12x")
    yield
    registry.forget()
    log.forget()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "MoE layers on b12x" in record.getMessage()]


def test_layers_are_counted_while_they_live(caplog: pytest.LogCaptureFixture) -> None:
    tensors = random_experts(4, 128, 192)
    modules = [layers.create(4, 128, 192) for _ in range(3)]
    modules.append(layers.create(4, 128, 192, bias=False, apply_router_weight_on_input=True, top_k=1))
    for module in modules:
        layers.load(module, tensors)
    assert lines(caplog) == ["rank 0: 3 of 4 MoE layers on b12x, decode below 64 tokens"]
    status = trtllm_b12x.status()
    assert (status.generation, status.layers, status.promoted) == ("embedded", 4, 3)
    assert status.reasons == {"ROUTER_WEIGHT_ON_INPUT": 1}
    # (256 - 192) columns or rows of three matrices, four experts, 4.5 bits each.
    assert status.padding_bytes == 3 * 3 * 4 * 64 * 128 * 9 // 16
    assert 0 < status.scalar_bytes <= 3 * (16 * 4 + 4)
    del module, modules[1:]
    assert trtllm_b12x.status().layers == 1


def test_a_later_draft_model_gets_a_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    tensors = random_experts(4, 128, 192)
    main = layers.load(layers.create(4, 128, 192), tensors)
    main.post_load_weights()  # a refit says nothing new
    draft = layers.load(layers.create(4, 128, 192), tensors)
    assert lines(caplog) == [f"rank 0: {n} of {n} MoE layers on b12x, decode below 64 tokens" for n in (1, 2)]
    assert draft is not main


def test_nothing_is_said_where_nothing_is_on_b12x(caplog: pytest.LogCaptureFixture) -> None:
    layers.load(layers.create(4, 128, 192, promote=False), random_experts(4, 128, 192))
    assert lines(caplog) == []
    status = trtllm_b12x.status()
    assert (status.layers, status.promoted, status.active, status.patches) == (0, 0, False, ())


def test_patches_are_named() -> None:
    trtllm_b12x.install()
    try:
        names = {name.rpartition("create_moe.")[2] for name in trtllm_b12x.status().patches}
        assert names == {"get_moe_cls", "create_moe_backend"}
        assert trtllm_b12x.status().active
    finally:
        trtllm_b12x.uninstall()
