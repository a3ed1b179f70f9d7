"""Every reason, each alone, and all at once."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_b12x.decision import (
    FLASHINFERS,
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
CASES = [
    (RejectReason.DISABLED, LayerShape(), Deployment(), Environment(enabled=False)),
    (RejectReason.HOST, LayerShape(), Deployment(), Environment(host="unsupported")),
    (RejectReason.SM, LayerShape(), Deployment(), Environment(sm=90)),
    (RejectReason.SM, LayerShape(), Deployment(), Environment(sm=0)),
    (RejectReason.TOOLKIT, LayerShape(), Deployment(), Environment(toolkit_cuda=(12, 9))),
    (RejectReason.TOOLKIT, LayerShape(), Deployment(), Environment(toolkit_cuda=(0, 0))),
    (RejectReason.DSL_MISSING, LayerShape(), Deployment(), Environment(dsl="none", payload_cuda=None)),
    *(
        (RejectReason.DSL_PAYLOAD, LayerShape(), Deployment(), Environment(dsl=dsl, payload_cuda=(12, 9), payload_fault=fault))
        for fault in (*PayloadFault, None)
        for dsl in ("4.5.0", "4.8.1")
    ),
    (RejectReason.FLASHINFER_MISSING, LayerShape(), Deployment(), Environment(flashinfer="none")),
    *(
        (RejectReason.FLASHINFER_TOO_OLD, LayerShape(), Deployment(), Environment(flashinfer=version, exact_scales=exact))
        for version, exact in (("0.6.0", False), ("0.6.16", False), ("0.6.17", True), ("0.6.17.post9", True))
    ),
    (RejectReason.FLASHINFER_BROKEN, LayerShape(), Deployment(), Environment(flashinfer="0.7.2", flashinfer_fault="cut off")),
    (RejectReason.FLASHINFER_BROKEN, LayerShape(), Deployment(), Environment(flashinfer="0.7.2", exact_scales=False)),
    (
        RejectReason.FLASHINFER_BROKEN,
        LayerShape(),
        Deployment(),
        Environment(flashinfer="0.6.18", mismatched=("flashinfer-cubin",)),
    ),
    (RejectReason.REQUIREMENT, LayerShape(), Deployment(), Environment(unmet=("nvidia-cutlass-dsl>=4.6.2a0 (4.5.0 installed)",))),
    (RejectReason.REQUIREMENT, LayerShape(), Deployment(), Environment(unmet=("apache-tvm-ffi>=0.1.11 (0.1.6 is installed)",))),
    (RejectReason.TRITON, LayerShape(), Deployment(), Environment(triton_lacks=(Lacking("no gcc", "apt-get install gcc"),))),
    (RejectReason.QUANTIZATION, LayerShape(quant_algo="FP8"), Deployment(), KERNEL),
    (RejectReason.QUANTIZATION, LayerShape(quant_algo="none"), Deployment(), KERNEL),
    (RejectReason.GROUP_SIZE, LayerShape(quant_algo="NVFP4", group_size=32), Deployment(), KERNEL),
    (RejectReason.PRE_QUANT_SCALE, LayerShape(pre_quant_scale=True), Deployment(), KERNEL),
    (RejectReason.UNEQUAL_SCALES, LayerShape(unequal_scales=True), Deployment(), KERNEL),
    (RejectReason.DYNAMIC_QUANTIZATION, LayerShape(dynamic_quantization=True), Deployment(), KERNEL),
    (RejectReason.ACTIVATION_DTYPE, LayerShape(dtype="float16"), Deployment(), KERNEL),
    (RejectReason.ACTIVATION, LayerShape(activation="Geglu"), Deployment(), KERNEL),
    (RejectReason.ACTIVATION_CONSTANTS, LayerShape(activation_constants=True), Deployment(), KERNEL),
    (RejectReason.HIDDEN_SIZE, LayerShape(hidden_size=192), Deployment(), KERNEL),
    (RejectReason.INTERMEDIATE_SIZE, LayerShape(intermediate_size=24), Deployment(), KERNEL),
    (RejectReason.BIAS, LayerShape(bias=True), Deployment(), KERNEL),
    (RejectReason.ROUTER_WEIGHT_ON_INPUT, LayerShape(apply_router_weight_on_input=True), Deployment(), KERNEL),
    (RejectReason.EXPERT_PARALLEL, LayerShape(), Deployment(ep_size=2), KERNEL),
    (RejectReason.LOAD_BALANCER, LayerShape(), Deployment(load_balancer="dynamic"), KERNEL),
    (RejectReason.LOAD_BALANCER, LayerShape(), Deployment(load_balancer="static"), KERNEL),
    (RejectReason.ATTENTION_DP, LayerShape(), Deployment(attention_dp=True), KERNEL),
    (RejectReason.ALLTOALL, LayerShape(), Deployment(alltoall=True), KERNEL),
    (RejectReason.CUDA_GRAPHS, LayerShape(), Deployment(cuda_graphs=True), KERNEL),
    (RejectReason.LORA, LayerShape(), Deployment(lora=True), KERNEL),
    (RejectReason.UPCAST, LayerShape(), Deployment(), Environment(upcast="Triton 3.5.1 multiplies bfloat16")),
]


@pytest.mark.parametrize(("reason", "problem", "deployment", "environment"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_each_reason_alone(reason: RejectReason, problem: LayerShape, deployment: Deployment, environment: Environment) -> None:
    features = POOR if reason in POORLY else FEATURES
    verdict = decide(problem, deployment, environment, features)
    assert verdict.reasons == (reason,)
    assert not verdict.served
    assert verdict.rejections[0].remedy in str(verdict)
    free = replace(features, bound_by=features.bound_by - {reason})
    assert decide(problem, deployment, environment, free).served


POORLY = {RejectReason.EXPERT_PARALLEL, RejectReason.CUDA_GRAPHS}


def test_every_reason_has_a_case() -> None:
    (plan,) = decide(LayerShape(), plan_error="ptxas failed").rejections
    (none,) = resolve(LayerShape(), None, None, {}).rejections
    alone = {RejectReason.PREFILL}  # of a format, not of a family: test_mxfp8.py
    assert {case[0] for case in CASES} | {plan.reason, none.reason} | alone == set(RejectReason)


def test_a_family_is_bound_by_its_own_rules_alone() -> None:
    """W4A16 in another compiler: any card from SM80 on, other activations, dtypes and sizes, and nothing of FlashInfer's."""
    own = FLASHINFERS | {RejectReason.TOOLKIT, RejectReason.BIAS, RejectReason.ACTIVATION_CONSTANTS}
    other = KernelFeatures(
        "other",
        frozenset({"Swiglu", "Geglu"}),
        tile=16,
        hidden_size_multiple=16,
        negative_ids=True,
        dtypes=frozenset({"bfloat16", "float16"}),
        bound_by=frozenset(RejectReason) - own,
    )
    bare = Environment(enabled=True, host="B", sm=120, toolkit_cuda=(12, 9), dsl="none", flashinfer="none")
    asked = LayerShape(
        quant_algo="NVFP4", activation="Geglu", dtype="float16", bias=True, activation_constants=True, hidden_size=80
    )
    found = resolve(asked, Deployment(ep_size=2), bare, {"b12x": FEATURES, "other": other})
    assert (found.served, found.families, found.reasons) == (True, ("other",), ())
    refused = {rejection.reason for name, rejection in found.refused if name == "b12x"}
    assert refused >= own - {RejectReason.DSL_PAYLOAD, RejectReason.FLASHINFER_TOO_OLD} - {
        RejectReason.FLASHINFER_BROKEN,
        RejectReason.REQUIREMENT,
    }
    assert str(found).startswith("other; not b12x: TOOLKIT: ")
    neither = resolve(replace(asked, quant_algo="FP8"), None, bare, {"b12x": FEATURES, "other": other})
    assert not neither.served
    assert [name for name, rejection in neither.refused if rejection.reason is RejectReason.QUANTIZATION] == ["b12x"]  # once
    assert not resolve(asked, None, replace(bare, sm=90), {"other": other}).served


def test_unknown_facts_speak_against_nothing() -> None:
    assert decide(LayerShape()).served
    assert decide(LayerShape(quant_algo="NVFP4", group_size=128), Deployment(ep_size=8), Environment()).served


def test_all_reasons_at_once() -> None:
    problem = LayerShape(quant_algo="FP8", bias=True, intermediate_size=8, dtype="float16")
    assert decide(problem, Deployment(lora=True), KERNEL).reasons == (
        RejectReason.QUANTIZATION,
        RejectReason.ACTIVATION_DTYPE,
        RejectReason.INTERMEDIATE_SIZE,
        RejectReason.BIAS,
        RejectReason.LORA,
    )


def test_what_the_field_runs_is_served() -> None:
    for activation, hidden, inner in (("Swiglu", 2048, 768), ("Relu2", 1024, 2688), ("Relu2", 2688, 1856), ("Swiglu", 2560, 640)):
        problem = LayerShape(
            quant_algo="NVFP4",
            group_size=16,
            dtype="bfloat16",
            activation=activation,
            activation_constants=False,
            pre_quant_scale=False,
            hidden_size=hidden,
            intermediate_size=inner,
            bias=False,
            apply_router_weight_on_input=False,
        )
        deployment = Deployment(2, attention_dp=False, alltoall=False, load_balancer="none", lora=False, cuda_graphs=True)
        assert str(resolve(problem, deployment, KERNEL, {"b12x": FEATURES})) == "b12x"


maybe_bool = st.none() | st.booleans()
sizes = st.none() | st.integers(0, 4096)
versions = st.none() | st.sampled_from(
    ["none", "0.6.0", "0.6.8", "0.6.16", "0.6.17", "0.7.0", "0.7.2.post1", "4.5.0", "4.8.1", "x", ""]
)
cuda = st.none() | st.tuples(st.integers(0, 14), st.integers(0, 9))
problems = st.builds(
    LayerShape,
    quant_algo=st.none() | st.sampled_from(["NVFP4", "FP8", "none", "NVFP4_AWQ", ""]),
    group_size=st.none() | st.sampled_from([0, 16, 32, 128]),
    dtype=st.none() | st.sampled_from(["bfloat16", "float16"]),
    activation=st.none() | st.sampled_from(["Swiglu", "Relu2", "Geglu", ""]),
    activation_constants=maybe_bool,
    pre_quant_scale=maybe_bool,
    unequal_scales=maybe_bool,
    hidden_size=sizes,
    intermediate_size=sizes,
    num_experts=sizes,
    top_k=sizes,
    bias=maybe_bool,
    apply_router_weight_on_input=maybe_bool,
)
deployments = st.builds(
    Deployment,
    ep_size=sizes,
    attention_dp=maybe_bool,
    alltoall=maybe_bool,
    load_balancer=st.none() | st.sampled_from(["none", "static", "dynamic"]),
    lora=maybe_bool,
    cuda_graphs=maybe_bool,
)
environments = st.builds(
    Environment,
    enabled=maybe_bool,
    mismatched=st.just(()) | st.just(("flashinfer-cubin 0.6.11",)),
    unmet=st.just(()) | st.just(("apache-tvm-ffi>=0.1.11 (0.1.6 is installed)",)),
    missing=st.just(()) | st.just(("triton",)),
    flashinfer_fault=st.sampled_from(["", "cut off"]),
    unrecorded=st.just(()) | st.just(("nvidia-cutlass-dsl",)),
    host=st.none() | st.sampled_from(["none", "unsupported", "1.2"]),
    sm=st.none() | st.sampled_from([0, 90, 100, 120, 121]),
    toolkit_cuda=cuda,
    dsl=versions,
    payload_cuda=cuda,
    payload_fault=st.none() | st.sampled_from(PayloadFault),
    flashinfer=versions,
    exact_scales=maybe_bool,
)
kinds = st.builds(
    KernelFeatures,
    name=st.just("k"),
    activations=st.just(frozenset()) | st.just(frozenset({"Swiglu", "Relu2"})),
    hidden_size_multiple=st.just(1) | st.just(128),
    negative_ids=maybe_bool,
    graph_safe=maybe_bool,
)
STRICTER: dict[str, Any] = {
    "quant_algo": "FP8",
    "group_size": 32,
    "dtype": "float16",
    "activation": "Geglu",
    "activation_constants": True,
    "pre_quant_scale": True,
    "unequal_scales": True,
    "bias": True,
    "apply_router_weight_on_input": True,
    "intermediate_size": 24,
    "hidden_size": 100,
    "ep_size": 2,
    "attention_dp": True,
    "alltoall": True,
    "load_balancer": "dynamic",
    "lora": True,
    "cuda_graphs": True,
    "graph_safe": False,
    "enabled": False,
    "host": "unsupported",
    "sm": 90,
    "toolkit_cuda": (12, 9),
    "payload_cuda": (12, 9),
    "exact_scales": False,
    "negative_ids": False,
    "mismatched": ("flashinfer-cubin 0.6.11",),
    "unmet": ("apache-tvm-ffi>=0.1.11 (0.1.6 is installed)",),
    "flashinfer_fault": "cut off",
}
"""The value of each field that its rule likes least."""


@settings(max_examples=500, deadline=None)
@given(problems, deployments, environments, kinds)
def test_it_never_raises_and_every_rejection_can_be_read(
    problem: LayerShape, deployment: Deployment, environment: Environment, features: KernelFeatures
) -> None:
    verdict = decide(problem, deployment, environment, features)
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
@given(problems, deployments, environments, kinds, st.sampled_from(sorted(STRICTER)))
def test_a_stricter_fact_never_turns_no_into_yes(
    problem: LayerShape, deployment: Deployment, environment: Environment, features: KernelFeatures, field: str
) -> None:
    facts: list[Any] = [problem, deployment, environment, features]
    before = decide(*facts)
    position = next(i for i, record in enumerate(facts) if field in {f.name for f in fields(record)})
    facts[position] = replace(facts[position], **{field: STRICTER[field]})
    if not before.served:
        assert not decide(*facts).served


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (LayerShape(quant_algo="NVFP4", activation="Swiglu", intermediate_size=320), ["160 per rank is no multiple of 64"]),
        (LayerShape(quant_algo="NVFP4", activation="Swiglu", intermediate_size=384), []),
        (LayerShape(quant_algo="NVFP4", activation="Relu2", intermediate_size=320), []),
        (LayerShape(quant_algo="FP8", activation="Swiglu", intermediate_size=320), []),
        (LayerShape(quant_algo="NVFP4", group_size=32, intermediate_size=384), ["NVFP4 with group size 32"]),
        (LayerShape(quant_algo="NVFP4", group_size=16), []),
        (LayerShape(), []),
    ],
)
def test_what_hosts_refuse_before_us(shape: LayerShape, words: list[str]) -> None:
    found = refused_by_hosts(shape, Deployment(tp_size=2))
    assert len(found) == len(words)
    assert all(line.startswith("TensorRT-LLM from August 2026 on") for line in found)
    assert all(word in line for word, line in zip(words, found, strict=True))


@pytest.mark.parametrize(
    ("text", "release"),
    [("0.7.2", (0, 7, 2)), ("0.7.2+cu130", (0, 7, 2)), ("0.7.2.post1", (0, 7, 2)), ("0.7.2rc1", (0, 7)), ("x", ()), ("none", ())],
)
def test_versions(text: str, release: tuple[int, ...]) -> None:
    assert version_tuple(text) == release


def test_weight_only_experts_are_named() -> None:
    (rejection,) = decide(LayerShape(quant_algo="W4A16_NVFP4")).rejections
    assert rejection.reason is RejectReason.QUANTIZATION
    assert "W4A16_NVFP4" in rejection.detail
    assert "not NVFP4" not in rejection.detail
    assert "bf16 activations" in rejection.detail
