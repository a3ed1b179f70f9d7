# SPDX-License-Identifier: Apache-2.0
"""Calls of layers inside doubles of TensorRT-LLM, and the embedded host's own tests there."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.hosts.machine import OURS, SHORT, Double, of
from trtllm_b12x.engines.trtllm.contract import GENERATIONS


def test_behind_an_alltoall(double: Double) -> None:
    """Late 1.3 and later tell a backend at once; earlier ones at the first call."""
    result = double.scenario("calls.alltoall", TRTLLM_B12X_KERNELS="triton")
    assert result["loaded"] == (1 if double.generation == "A" else 0)
    assert result["promoted"] == 0
    assert result["reasons"] == {"ALLTOALL": 1}
    assert result["sent"] == ["torch.uint8"] * 2


@pytest.mark.parametrize("double", of("B", "C1", "C2"), indirect=True)  # the double of A cuts no attention-DP batches
def test_padded_and_empty_chunks(double: Double) -> None:
    """A rank without tokens in a chunk sends its first chunk again (B), or one of zeros; all of it runs on the kernels."""
    result = double.scenario("calls.padded_and_empty_chunks", TRTLLM_B12X_KERNELS="triton")
    assert result["even"] == [[9, 128], True, 1, [9, 9], [9, 9]]
    assert result["padded"] == [[5, 128], True, 1, [9, 9], [9, 9]]
    chunks, last = (7, [1, 14]) if double.has_contexts else (4, [1, 25])
    assert result["empty"] == [[3, 128], True, chunks, [1, last[1] + double.has_contexts], last]


@pytest.mark.parametrize("backend", ["CUTLASS", "AUTO", "TRTLLM"])  # AUTO is CUTLASS before it gets to a resolver
@pytest.mark.parametrize("double", of("C1", "C2"), indirect=True)  # those before do not know the format
def test_mxfp8_which_the_host_has_no_implementation_for(double: Double, backend: str) -> None:
    """Hosts that know the format refuse the layer; it is served at every count, in graphs too, and loaded however a host hands
    it on."""
    found = double.scenario("mxfp8.without_a_host_path", backend, TRTLLM_B12X_KERNELS="triton,grouped")
    assert "no MoE implementation can serve this layer" in found["host"] or backend == "AUTO"  # CUTLASS, before it gets here
    assert (found["class"], found["families"]) == (OURS, ["triton", "grouped"])
    assert max(found["errors"] + found["captured"] + found["constants"]) < 0.005
    assert re.search(r"no kernel serves the MoE layer of 4 experts.* taken away", found["nobody"])
    if backend == "CUTLASS":
        assert found["built"] == [OURS, ["swiglu_alpha", "swiglu_beta", "swiglu_limit"]]
    assert found["measured"] == [0, 1]
    assert re.search(r"measured in .* s: triton 1-39, then grouped$", found["crossover"])
    assert found["stacked"]
    assert "nvidia-modelopt's MXFP8 exports of Llama 4 and gpt-oss have them along the rows" in found["along rows"]
    assert found["parts"] == [False, True]


@pytest.mark.all("B")
def test_compile_finds_no_graph_break(double: Double) -> None:
    result = double.scenario("calls.torch_compile")
    assert result["equal"]
    assert result["kernel"]


def test_the_autotuner(double: Double) -> None:
    result = double.scenario("calls.tuned_calls")
    assert result["kernel_calls"] == [0, 1]  # while it tunes, CUTLASS sees the small counts
    assert result["missed"] == [0, 0, 2]  # and has tactics for them: 40 tokens were never tuned, for either GEMM


@pytest.mark.all
def test_the_crossover_is_measured_once_the_host_has_tuned_and_never_under_capture(double: Double) -> None:
    found = double.scenario("calls.crossover_at_warm_up")
    for tuner, graphs in itertools.product(("on", "off"), repeat=2):
        result = found[f"{tuner} {graphs}"]
        measured = [event for event in result["events"] if event[0] == "measured"]
        assert all(event[2:] == [False, False] for event in measured)
        first = "warm" if graphs == "on" else "request"
        assert [event[1] for event in measured] == (["attention", first] if tuner == "on" else [first]), (tuner, graphs)
        assert result["layers"] == 2
        assert 0 < result["gap"] < 0.2  # the host's own path, in this generation's form, computes the layer
        served = [event for event in result["events"] if event[0] in ("captured", "request")]
        assert served == [[what, tokens, int(tokens <= 8)] for what, tokens, _ in served], (tuner, graphs)
        assert len(served) == (14 if graphs == "on" else 5)
        assert all(event[2] == 0 for event in result["events"] if event[0] == "tuning")


# ---- the embedded host's own tests ---------------------------------------------------------------------------------------

SUITE = [
    "tests/unittest/test_fused_moe.py",
    "tests/unittest/test_refit.py",
    "tests/unittest/test_faults.py",
    "tests/unittest/test_triton_layer.py",
    "tests/unittest/test_unequal_scales.py",
    "tests/unittest/test_triton_forms.py",
    "tests/unittest/test_mxfp4_layer.py",
]
W4A16 = "tests/unittest/test_w4a16_layer.py"
"""Hosts before C1 have no such layers."""
DISTRIBUTED = "tests/integration/test_distributed.py"
KEYWORDS = "tests/unittest/test_calls.py"
"""Calls ``run_moe`` by keywords."""


def rerun(double: Double, part: str, *files: str) -> list[str]:
    """Run tests of the embedded host that hold for every host; return those that passed."""
    found = double.scenario("suite.rerun", part, *files, W4A16 if double.has_contexts else KEYWORDS)
    assert not found["failed"], found["failed"]
    assert not found["skipped"]
    passed: list[str] = found["passed"]
    return passed


@pytest.mark.all("A", "B", "C1")
@pytest.mark.parametrize("double", sorted(GENERATIONS), indirect=True)
def test_each_of_the_embedded_hosts_tests_holds_once(double: Double) -> None:
    files = SUITE if double.generation in SHORT else [*SUITE, DISTRIBUTED]
    assert len(rerun(double, "first", *files)) >= len(files)


@pytest.mark.all
@pytest.mark.parametrize("double", SHORT, indirect=True)
def test_the_embedded_hosts_tests_hold_with_other_parameters(double: Double) -> None:
    """A has the calls of B, and C1 those of C2."""
    assert rerun(double, "others", *SUITE, DISTRIBUTED)
