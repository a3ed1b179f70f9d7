# SPDX-License-Identifier: Apache-2.0
"""Layers whose kernel routes by itself, inside doubles of TensorRT-LLM from C1 on: earlier ones hand no logits to CUTLASS."""

from __future__ import annotations

import pytest

from tests.hosts.machine import Double, of

CALLED_WITH_LOGITS = {"logits": [True], "routed": []}


@pytest.mark.parametrize("double", of("C1", "C2"), indirect=True)
def test_every_method(double: Double) -> None:
    """Methods that a kernel knows are routed by it up to 63 tokens; the others, and prompts, as TensorRT-LLM does: bit-equal."""
    found = double.scenario("logits.every_method", TRTLLM_B12X_KERNELS="cuda,triton")
    known = {name for name, method in found.items() if isinstance(method, dict) and method["scoring"]}
    left = {"Llama4", "SqrtSoftplus", "DeepSeekV3 in groups"}
    assert known == found.keys() - left - {"stderr"}
    for name in known | left:
        for what, call in found[name]["calls"].items():
            tokens, softmax = int(what.split()[0]), name in ("Default", "Renormalize", "RenormalizeNaive")
            by_kernel = name in known and tokens < 64 and (softmax or not what.endswith("bfloat16"))
            assert call["routed"] == ([] if by_kernel else [tokens]), (name, what)
            assert call["logits"] == ([by_kernel] if tokens < 64 else []), (name, what)
            assert call["gap"] < (0.002 if by_kernel else 1e-9), (name, what)


@pytest.mark.parametrize("double", of("C1", "C2"), indirect=True)
def test_ids_that_others_read(double: Double) -> None:
    found = double.scenario("logits.left_alone", TRTLLM_B12X_KERNELS="cuda,triton")
    assert {name: found["plain"][name] for name in CALLED_WITH_LOGITS} == CALLED_WITH_LOGITS
    assert found["captured"]
    for name in ("capture", "get_calibrator", "ExpertStatistic", "RouteCapture", "weights on the input"):
        assert found[name]["routed"] == [5], name
        assert found[name]["logits"] == [False], name
        assert found[name]["equal"], name
    assert (found["tuning"]["logits"], found["tuning"]["routed"]) == ([], [5])  # the autotuner sees TensorRT-LLM's kernels
    for call in (found["attention DP of one rank"], *found["expert parallel"]):
        assert call["routed"] == []
        assert call["gap"] < 0.002


@pytest.mark.parametrize("double", of("C1", "C2"), indirect=True)
def test_faults(double: Double) -> None:
    """Each leaves the call, and all further ones, to ids, with one line."""
    for name, found in double.scenario("logits.faults", TRTLLM_B12X_KERNELS="cuda,triton").items():
        if name == "stderr":
            continue
        assert found["equal"] == [True, True], name
        assert found["logits"] == [False], name
        assert found["served"], name
        (line,) = found["lines"]
        assert "calls are routed by the engine after an error of ours: RuntimeError: injected" in line


@pytest.mark.parametrize("double", of("C2"), indirect=True)
def test_parameters_that_move(double: Double) -> None:
    found = double.scenario("logits.moved", TRTLLM_B12X_KERNELS="cuda,triton")
    assert (found["equal"], found["zero"]) == (True, True)
