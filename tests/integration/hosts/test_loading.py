# SPDX-License-Identifier: Apache-2.0
"""Weights arrive in every form that a generation has, inside doubles of TensorRT-LLM."""

from __future__ import annotations

import pytest

from tests.hosts.machine import Double, of

EACH = "b12x,triton"
"""Families: b12x serves gate and up with one scale, Triton with two."""
EQUAL = {ratio: [True, True] for ratio in ("1.0", "0.4", "3.0")}


@pytest.mark.parametrize("double", of("B", "C1", "C2"), indirect=True)
def test_parameters_from_a_peer(double: Double) -> None:
    """Since late 1.3; gate and up with one scale, and with two."""
    assert double.scenario("loading.from_a_peer", "loaded", TRTLLM_B12X_KERNELS=EACH)["equal"] == EQUAL


@pytest.mark.parametrize("double", of("C1", "C2"), indirect=True)
def test_parameters_from_a_peer_as_they_were_derived(double: Double) -> None:
    found = double.scenario("loading.from_a_peer", "transformed", TRTLLM_B12X_KERNELS=EACH)
    assert found["equal"] == EQUAL


@pytest.mark.parametrize("double", of("C1", "C2"), indirect=True)
def test_groups(double: Double) -> None:
    """Earlier hosts have no such stream."""
    assert double.scenario("loading.in_groups", TRTLLM_B12X_KERNELS=EACH)["equal"]


def test_buckets_in_any_order(double: Double) -> None:
    """Hosts of 1.2 refuse parts, with us as without."""
    answer = double.scenario("loading.in_buckets", "yes", TRTLLM_B12X_KERNELS=EACH)
    if double.generation == "A":
        assert answer["error"] == double.scenario("loading.in_buckets", "no")["error"]
    else:
        assert answer["equal"] == [True] * 6


@pytest.mark.all
@pytest.mark.parametrize("double", of("C1", "C2"), indirect=True)
def test_w4a16_in_every_form(double: Double) -> None:
    """Scales stay in rows, however often the host ends a load, whose own method would reverse them again."""
    algo, kernels = "W4A16_NVFP4", {"TRTLLM_B12X_KERNELS": "triton"}
    assert double.scenario("loading.in_buckets", "yes", algo, **kernels)["equal"] == [True] * 6
    assert double.scenario("loading.in_groups", algo, **kernels)["equal"]
    for form in ("loaded", "transformed"):
        assert double.scenario("loading.from_a_peer", form, algo, **kernels)["equal"] == EQUAL


def test_fused_gate_and_up(double: Double) -> None:
    assert double.scenario("loading.fused_gate_up")["equal"]
