# SPDX-License-Identifier: Apache-2.0
"""Every reason, each alone, and all at once."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_b12x.decision import (
    Deployment,
    Environment,
    KernelFeatures,
    Lacking,
    PayloadFault,
    RejectReason,
    decide,
    refused_by_hosts,
    resolve,
    version_tuple,
)
from trtllm_b12x.formats.geometry import LayerShape

KERNEL = Environment()
FEATURES = KernelFeatures("k", frozenset({"Swiglu", "Relu2"}), 128, 128, negative_ids=True, graph_safe=True)
FEATURES = replace(FEATURES, bound_by=frozenset(RejectReason))
POOR = replace(FEATURES, negative_ids=False, graph_safe=False)
CASES: list[tuple[RejectReason, dict[str, Any]]] = [
    (RejectReason.DISABLED, {"enabled": False}),
    (RejectReason.HOST, {"host": "unsupported"}),
    (RejectReason.SM, {"sm": 90}),
    (RejectReason.SM, {"sm": 0}),
    (RejectReason.TOOLKIT, {"toolkit_cuda": (12, 9)}),
    (RejectReason.TOOLKIT, {"toolkit_cuda": (0, 0)}),
    (RejectReason.DSL_MISSING, {"dsl": "none"}),
    *(
        (RejectReason.DSL_PAYLOAD, {"dsl": dsl, "payload_cuda": (12, 9), "payload_fault": fault})
        for fault in (*PayloadFault, None)
        for dsl in ("4.5.0", "4.8.1")
    ),
    (RejectReason.FLASHINFER_MISSING, {"flashinfer": "none"}),
    *((RejectReason.FLASHINFER_TOO_OLD, {"flashinfer": version}) for version in ("0.6.0", "0.6.16", "0.6.17", "0.6.17.post9")),
    (RejectReason.FLASHINFER_BROKEN, {"flashinfer": "0.7.2", "flashinfer_fault": "cut off"}),
    (RejectReason.REQUIREMENT, {"unmet": ("nvidia-cutlass-dsl>=4.6.2a0 (4.5.0 is installed)",)}),
    (RejectReason.REQUIREMENT, {"unmet": ("apache-tvm-ffi>=0.1.11 (0.1.6 is installed)",)}),
    (RejectReason.TRITON, {"triton_lacks": (Lacking("no gcc", "apt-get install gcc"),)}),
    (RejectReason.NVRTC, {"nvrtc": False}),
    (RejectReason.UPCAST, {"upcast": "Triton 3.5.1 multiplies bfloat16"}),
    (RejectReason.QUANTIZATION, {"quant_algo": "FP8"}),
    (RejectReason.QUANTIZATION, {"quant_algo": "none"}),
    (RejectReason.GROUP_SIZE, {"quant_algo": "NVFP4", "group_size": 32}),
    (RejectReason.PRE_QUANT_SCALE, {"pre_quant_scale": True}),
    (RejectReason.UNEQUAL_SCALES, {"unequal_scales": True}),
    (RejectReason.DYNAMIC_QUANTIZATION, {"dynamic_quantization": True}),
    (RejectReason.ACTIVATION_DTYPE, {"dtype": "float16"}),
    (RejectReason.ACTIVATION, {"activation": "Geglu"}),
    (RejectReason.ACTIVATION_CONSTANTS, {"activation_constants": True}),
    (RejectReason.HIDDEN_SIZE, {"hidden_size": 192}),
    (RejectReason.INTERMEDIATE_SIZE, {"intermediate_size": 24}),
    (RejectReason.INTERMEDIATE_SIZE, {"intermediate_size": 48, "tp_size": 2}),
    (RejectReason.INTERMEDIATE_SIZE, {"intermediate_size": 128, "tp_size": 7}),
    (RejectReason.BIAS, {"bias": True}),
    (RejectReason.ROUTER_WEIGHT_ON_INPUT, {"apply_router_weight_on_input": True}),
    (RejectReason.EXPERT_PARALLEL, {"ep_size": 2}),
    (RejectReason.LOAD_BALANCER, {"load_balancer": "dynamic"}),
    (RejectReason.LOAD_BALANCER, {"load_balancer": "static"}),
    (RejectReason.ATTENTION_DP, {"attention_dp": True}),
    (RejectReason.ALLTOALL, {"alltoall": True}),
    (RejectReason.CUDA_GRAPHS, {"cuda_graphs": True}),
    (RejectReason.LORA, {"lora": True}),
]
RECORDS: tuple[Any, ...] = (LayerShape, Deployment, Environment)


def records(facts: dict[str, Any]) -> list[Any]:
    """The records that hold these fields."""
    return [kind(**{f.name: facts[f.name] for f in fields(kind) if f.name in facts}) for kind in RECORDS]


@pytest.mark.parametrize(("reason", "facts"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_each_reason_alone(reason: RejectReason, facts: dict[str, Any]) -> None:
    features = POOR if reason in POORLY else FEATURES
    verdict = decide(*records(facts), features)
    assert verdict.reasons == (reason,)
    assert not verdict.served
    assert verdict.rejections[0].remedy in str(verdict)
    free = replace(features, bound_by=features.bound_by - {reason})
    assert decide(*records(facts), free).served


POORLY = {RejectReason.EXPERT_PARALLEL, RejectReason.CUDA_GRAPHS}


def test_every_reason_has_a_case() -> None:
    (plan,) = decide(LayerShape(), plan_error="ptxas failed").rejections
    (none,) = resolve(LayerShape(), None, None, {}).rejections
    alone = {RejectReason.PREFILL}  # of a format, not of a family: test_number_formats.py
    assert {case[0] for case in CASES} | {plan.reason, none.reason} | alone == set(RejectReason)


def test_unknown_facts_speak_against_nothing() -> None:
    assert decide(LayerShape()).served
    assert decide(LayerShape(quant_algo="NVFP4", group_size=128), Deployment(ep_size=8), Environment()).served


VERSIONS = ["none", "0.6.0", "0.6.8", "0.6.16", "0.6.17", "0.7.0", "0.7.2.post1", "4.5.0", "4.8.1", "x", ""]
CUDA = [(0, 0), (0, 9), (11, 8), (12, 9), (13, 0), (13, 1), (14, 9)]
SIZES = [0, 1, 16, 24, 64, 100, 128, 192, 2688, 4096]
VALUES: dict[str, list[Any]] = {
    "quant_algo": ["NVFP4", "FP8", "none", "NVFP4_AWQ", ""],
    "group_size": [0, 16, 32, 128],
    "dtype": ["bfloat16", "float16"],
    "activation": ["Swiglu", "Relu2", "Geglu", ""],
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_experts", "top_k", "ep_size", "tp_size"), SIZES),
    **dict.fromkeys(("toolkit_cuda", "payload_cuda"), CUDA),
    **dict.fromkeys(("dsl", "flashinfer"), VERSIONS),
    "load_balancer": ["none", "static", "dynamic"],
    "unmet": [("apache-tvm-ffi>=0.1.11 (0.1.6 is installed)",)],
    "missing": [("triton",)],
    "flashinfer_fault": ["cut off"],
    "host": ["none", "unsupported", "1.2"],
    "sm": [0, 90, 100, 120, 121],
    "payload_fault": list(PayloadFault),
}


def any_of(kind: Any, **known: Any) -> Any:
    """Records of any values, each field's default among them."""
    values = {f.name: [True, False] for f in fields(kind) if f.type == "bool | None"} | VALUES
    among = {f.name: st.sampled_from([f.default, *values[f.name]]) for f in fields(kind) if f.name in values}
    return st.builds(kind, **{**among, **known})


KERNELS = {"group_size": st.just(16), "activations": st.sampled_from([frozenset(), FEATURES.activations]), "name": st.just("k")}
FACTS = st.tuples(*map(any_of, RECORDS), any_of(KernelFeatures, **KERNELS, hidden_size_multiple=st.sampled_from([1, 128])))
ALONE = {name: value for _, facts in CASES if len(facts) == 1 for name, value in facts.items()}
STRICTER = {
    **ALONE,
    "group_size": 32,
    "payload_cuda": (12, 9),
    "negative_ids": False,
    "graph_safe": False,
    "flashinfer_fault": "cut off",
}
"""The value of each field that its rule likes least."""


@settings(max_examples=500, deadline=None)
@given(FACTS)
def test_it_never_raises_and_every_rejection_can_be_read(facts: Any) -> None:
    verdict = decide(*facts)
    problem, deployment, environment, _ = facts
    assert verdict.served == (verdict.reasons == ())
    assert len(set(verdict.reasons)) == len(verdict.reasons)
    for rejection in verdict.rejections:
        assert rejection.detail
        assert rejection.remedy
        assert all(command.startswith(("pip install ", "pip uninstall -y ")) for command in rejection.commands)
    if verdict.served:
        assert problem.quant_algo in (None, "NVFP4")
        assert environment.sm in (None, 120, 121)
        assert environment.enabled is not False
        assert environment.dsl != "none"
        assert environment.flashinfer != "none"
        assert environment.payload_cuda is None or environment.payload_cuda >= (13, 0)
        assert not any((problem.bias, problem.pre_quant_scale, problem.unequal_scales, deployment.lora, deployment.alltoall))
        assert deployment.load_balancer in (None, "none")


@settings(max_examples=500, deadline=None)
@given(FACTS, st.sampled_from(sorted(STRICTER)))
def test_a_stricter_fact_never_turns_no_into_yes(before: Any, field: str) -> None:
    after = [replace(record, **{field: STRICTER[field]}) if hasattr(record, field) else record for record in before]
    assert decide(*before).served or not decide(*after).served


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"quant_algo": "NVFP4", "activation": "Swiglu", "intermediate_size": 320}, ["160 per rank is not a multiple of 64"]),
        ({"quant_algo": "NVFP4", "activation": "Swiglu", "intermediate_size": 384}, []),
        ({"quant_algo": "NVFP4", "activation": "Relu2", "intermediate_size": 320}, []),
        ({"quant_algo": "FP8", "activation": "Swiglu", "intermediate_size": 320}, []),
        ({"quant_algo": "NVFP4", "group_size": 32, "intermediate_size": 384}, ["NVFP4 with group size 32"]),
        ({"quant_algo": "NVFP4", "group_size": 16}, []),
        ({}, []),
    ],
)
def test_what_hosts_refuse_before_us(facts: dict[str, Any], words: list[str]) -> None:
    found = refused_by_hosts(LayerShape(**facts), Deployment(tp_size=2), served=False)
    assert len(found) == len(words)
    assert all(line.startswith("TensorRT-LLM from August 2026 on") for line in found)
    assert all(word in line for word, line in zip(words, found, strict=True))
    served = refused_by_hosts(LayerShape(**facts), Deployment(tp_size=2), served=True)
    assert served == [line for line in found if "group size" in line]


@pytest.mark.parametrize(
    ("text", "release"),
    [("0.7.2", (0, 7, 2)), ("0.7.2+cu130", (0, 7, 2)), ("0.7.2.post1", (0, 7, 2)), ("0.7.2rc1", (0, 7)), ("x", ()), ("none", ())],
)
def test_versions(text: str, release: tuple[int, ...]) -> None:
    assert version_tuple(text) == release
