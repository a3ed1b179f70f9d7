"""Every reason, each alone, and all at once."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_b12x.decision import Deployment, Environment, PayloadFault, Problem, RejectReason, decide

KERNEL = Environment(kernel="k", activations=frozenset({"Swiglu", "Relu2"}), hidden_size_multiple=128, expert_parallel=True)

SHAPE = Problem(num_experts=512, top_k=10, hidden_size=2560, intermediate_size=640)

CASES = [
    (RejectReason.DISABLED, Problem(), Deployment(), Environment(enabled=False)),
    (RejectReason.HOST, Problem(), Deployment(), Environment(host="unsupported")),
    (RejectReason.SM, Problem(), Deployment(), Environment(sm=90)),
    (RejectReason.SM, Problem(), Deployment(), Environment(sm=0)),
    (RejectReason.TOOLKIT, Problem(), Deployment(), Environment(toolkit_cuda=(12, 9))),
    (RejectReason.TOOLKIT, Problem(), Deployment(), Environment(toolkit_cuda=(0, 0))),
    (RejectReason.DSL_MISSING, Problem(), Deployment(), Environment(dsl="none", payload_cuda=None)),
    *(
        (RejectReason.DSL_PAYLOAD, Problem(), Deployment(), Environment(dsl=dsl, payload_cuda=(12, 9), payload_fault=fault))
        for fault in (*PayloadFault, None)
        for dsl in ("4.5.0", "4.8.1")
    ),
    (RejectReason.FLASHINFER_MISSING, Problem(), Deployment(), Environment(flashinfer="none")),
    (RejectReason.FLASHINFER_TOO_OLD, Problem(), Deployment(), Environment(flashinfer="0.6.16", exact_scales=False)),
    (RejectReason.FLASHINFER_SHAPE, SHAPE, Deployment(), Environment(flashinfer="0.6.18.post1", exact_scales=True)),
    (RejectReason.FLASHINFER_SHAPE, SHAPE, Deployment(), Environment(flashinfer="0.7.0", exact_scales=True)),
    (RejectReason.QUANTIZATION, Problem(quant_algo="FP8"), Deployment(), KERNEL),
    (RejectReason.QUANTIZATION, Problem(quant_algo="none"), Deployment(), KERNEL),
    (RejectReason.GROUP_SIZE, Problem(quant_algo="NVFP4", group_size=32), Deployment(), KERNEL),
    (RejectReason.PRE_QUANT_SCALE, Problem(pre_quant_scale=True), Deployment(), KERNEL),
    (RejectReason.DYNAMIC_QUANTIZATION, Problem(dynamic_quantization=True), Deployment(), KERNEL),
    (RejectReason.KERNEL_PLAN_FAILED, Problem(), Deployment(), Environment(plan_error="ptxas failed")),
    (RejectReason.ACTIVATION_DTYPE, Problem(activation_dtype="float16"), Deployment(), KERNEL),
    (RejectReason.ACTIVATION, Problem(activation="Geglu"), Deployment(), KERNEL),
    (RejectReason.ACTIVATION_CONSTANTS, Problem(activation_constants=True), Deployment(), KERNEL),
    (RejectReason.HIDDEN_SIZE, Problem(hidden_size=192), Deployment(), KERNEL),
    (RejectReason.INTERMEDIATE_SIZE, Problem(intermediate_size=24), Deployment(), KERNEL),
    (RejectReason.BIAS, Problem(bias=True), Deployment(), KERNEL),
    (RejectReason.ROUTER_WEIGHT_ON_INPUT, Problem(apply_router_weight_on_input=True), Deployment(), KERNEL),
    (RejectReason.EXPERT_PARALLEL, Problem(), Deployment(ep_size=2), Environment(kernel="k", expert_parallel=False)),
    (RejectReason.LOAD_BALANCER, Problem(), Deployment(load_balancer="dynamic"), KERNEL),
    (RejectReason.LOAD_BALANCER, Problem(), Deployment(load_balancer="static"), KERNEL),
    (RejectReason.ATTENTION_DP, Problem(), Deployment(attention_dp=True), KERNEL),
    (RejectReason.ALLTOALL, Problem(), Deployment(alltoall=True), KERNEL),
    (RejectReason.CUDA_GRAPHS, Problem(), Deployment(cuda_graphs=True), Environment(kernel="k", graph_safe=False)),
    (RejectReason.LORA, Problem(), Deployment(lora=True), KERNEL),
    (
        RejectReason.DETERMINISTIC,
        Problem(),
        Deployment(),
        Environment(flashinfer="0.6.18", deterministic=False, only_deterministic=True),
    ),
]


@pytest.mark.parametrize(("reason", "problem", "deployment", "environment"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_each_reason_alone(reason: RejectReason, problem: Problem, deployment: Deployment, environment: Environment) -> None:
    verdict = decide(problem, deployment, environment)
    assert verdict.reasons == (reason,)
    assert not verdict.served
    assert verdict.rejections[0].remedy in str(verdict)


def test_every_reason_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(RejectReason)


def test_unknown_facts_speak_against_nothing() -> None:
    assert decide(Problem()).served
    assert decide(Problem(quant_algo="NVFP4", group_size=128), Deployment(ep_size=8), Environment()).served


def test_all_reasons_at_once() -> None:
    problem = Problem(quant_algo="FP8", bias=True, intermediate_size=8, activation_dtype="float16")
    assert decide(problem, Deployment(lora=True), KERNEL).reasons == (
        RejectReason.QUANTIZATION,
        RejectReason.ACTIVATION_DTYPE,
        RejectReason.INTERMEDIATE_SIZE,
        RejectReason.BIAS,
        RejectReason.LORA,
    )


def test_what_the_field_runs_is_served() -> None:
    for activation, hidden, inner in (("Swiglu", 2048, 768), ("Relu2", 1024, 2688), ("Relu2", 2688, 1856), ("Swiglu", 2560, 640)):
        problem = Problem(
            quant_algo="NVFP4",
            group_size=16,
            activation_dtype="bfloat16",
            activation=activation,
            activation_constants=False,
            pre_quant_scale=False,
            hidden_size=hidden,
            intermediate_size=inner,
            bias=False,
            apply_router_weight_on_input=False,
        )
        deployment = Deployment(2, 2, attention_dp=False, alltoall=False, load_balancer="none", lora=False, cuda_graphs=True)
        assert str(decide(problem, deployment, KERNEL)) == "b12x"


def test_force_needs_a_proof() -> None:
    bad = Environment(dsl="4.8.1", payload_cuda=(12, 9), force=True)
    assert decide(Problem(), environment=bad).reasons == (RejectReason.DSL_PAYLOAD,)
    assert decide(Problem(), environment=replace(bad, compile_proved=False)).reasons == (RejectReason.DSL_PAYLOAD,)
    assert decide(Problem(), environment=replace(bad, compile_proved=True)).served
    assert not decide(Problem(), environment=replace(bad, compile_proved=True, force=False)).served


@pytest.mark.parametrize(("version", "served"), [("0.6.8", False), ("0.6.9", True), ("0.6.16", True)])
def test_baked_scales_are_admitted_by_name_only(version: str, served: bool) -> None:
    old = Environment(flashinfer=version, exact_scales=False, dsl="4.8.1", payload_cuda=(13, 0))
    assert not decide(Problem(), environment=old).served
    verdict = decide(Problem(), environment=replace(old, allow_baked_scales=True))
    assert verdict.served == served
    assert [("subnormal" in warning) for warning in verdict.warnings] == [True] * served


def test_remedies_fit_what_is_installed() -> None:
    def commands(**facts: Any) -> tuple[str, ...]:
        (rejection,) = decide(Problem(), environment=Environment(**facts)).rejections
        return rejection.commands

    old = {"flashinfer": "0.6.16", "exact_scales": False}
    assert commands(**old, dsl="4.5.0", payload_cuda=(13, 1)) == ('pip install "flashinfer-python==0.6.17"',)
    assert commands(**old, dsl="4.6.2", payload_cuda=(13, 1)) == ('pip install "flashinfer-python>=0.7.2,<0.8"',)
    assert commands(dsl="4.5.0", payload_cuda=(12, 9), payload_fault=PayloadFault.CU13_MISSING) == (
        "pip install nvidia-cutlass-dsl-libs-cu13==4.5.0",
    )
    assert commands(dsl="4.5.0", payload_cuda=(12, 9), payload_fault=PayloadFault.SHADOWED) == (
        "pip install --force-reinstall --no-deps nvidia-cutlass-dsl-libs-cu13==4.5.0",
    )
    assert commands(dsl="4.8.1", payload_cuda=(0, 0), payload_fault=PayloadFault.CRASH)[-1].endswith("libs-cu13==4.8.1")


def test_moving_a_pin_is_said() -> None:
    (rejection,) = decide(Problem(), environment=Environment(host="1.2", flashinfer="0.6.0", exact_scales=False)).rejections
    assert "TensorRT-LLM pins it" in rejection.detail


# ---- properties ----------------------------------------------------------------------------------------------------------

maybe_bool = st.none() | st.booleans()
sizes = st.none() | st.integers(0, 4096)
versions = st.none() | st.sampled_from(
    ["none", "0.6.0", "0.6.8", "0.6.16", "0.6.17", "0.7.0", "0.7.2.post1", "4.5.0", "4.8.1", "x", ""]
)
cuda = st.none() | st.tuples(st.integers(0, 14), st.integers(0, 9))
problems = st.builds(
    Problem,
    quant_algo=st.none() | st.sampled_from(["NVFP4", "FP8", "none", "NVFP4_AWQ", ""]),
    group_size=st.none() | st.sampled_from([0, 16, 32, 128]),
    activation_dtype=st.none() | st.sampled_from(["bfloat16", "float16"]),
    activation=st.none() | st.sampled_from(["Swiglu", "Relu2", "Geglu", ""]),
    activation_constants=maybe_bool,
    pre_quant_scale=maybe_bool,
    hidden_size=sizes,
    intermediate_size=sizes,
    num_experts=sizes,
    top_k=sizes,
    bias=maybe_bool,
    apply_router_weight_on_input=maybe_bool,
)
deployments = st.builds(
    Deployment,
    tp_size=sizes,
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
    force=st.booleans(),
    compile_proved=maybe_bool,
    allow_baked_scales=st.booleans(),
    host=st.none() | st.sampled_from(["none", "unsupported", "1.2"]),
    sm=st.none() | st.sampled_from([0, 90, 100, 120, 121]),
    toolkit_cuda=cuda,
    dsl=versions,
    payload_cuda=cuda,
    payload_fault=st.none() | st.sampled_from(PayloadFault),
    flashinfer=versions,
    activations=st.none() | st.just(frozenset({"Swiglu", "Relu2"})),
    hidden_size_multiple=st.none() | st.just(128),
    exact_scales=maybe_bool,
    expert_parallel=maybe_bool,
    graph_safe=maybe_bool,
    gather_bf16=st.booleans(),
    deterministic=maybe_bool,
    only_deterministic=st.booleans(),
)

STRICTER: dict[str, Any] = {
    "quant_algo": "FP8",
    "group_size": 32,
    "activation_dtype": "float16",
    "activation": "Geglu",
    "activation_constants": True,
    "pre_quant_scale": True,
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
    "gather_bf16": False,
    "enabled": False,
    "host": "unsupported",
    "sm": 90,
    "toolkit_cuda": (12, 9),
    "payload_cuda": (12, 9),
    "exact_scales": False,
    "expert_parallel": False,
    "compile_proved": False,
    "force": False,
    "allow_baked_scales": False,
    "deterministic": False,
    "only_deterministic": True,
}
"""The value of each field that its rule likes least."""


@settings(max_examples=500, deadline=None)
@given(problems, deployments, environments)
def test_it_never_raises_and_every_rejection_can_be_read(
    problem: Problem, deployment: Deployment, environment: Environment
) -> None:
    verdict = decide(problem, deployment, environment)
    assert verdict.served == (verdict.reasons == ())
    assert len(set(verdict.reasons)) == len(verdict.reasons)
    for rejection in verdict.rejections:
        assert rejection.detail
        assert rejection.remedy
        assert all(command.startswith("pip install ") for command in rejection.commands)
    if verdict.served:
        assert problem.quant_algo in (None, "NVFP4")
        assert environment.sm in (None, 120, 121)
        assert environment.enabled is not False
        assert environment.dsl != "none"
        assert environment.flashinfer != "none"
        proved = environment.force and environment.compile_proved
        assert environment.payload_cuda is None or environment.payload_cuda >= (13, 0) or proved
        assert not any((problem.bias, problem.pre_quant_scale, deployment.lora, deployment.alltoall))
        assert deployment.load_balancer in (None, "none")


@settings(max_examples=500, deadline=None)
@given(problems, deployments, environments, st.sampled_from(sorted(STRICTER)))
def test_a_stricter_fact_never_turns_no_into_yes(
    problem: Problem, deployment: Deployment, environment: Environment, field: str
) -> None:
    facts: list[Any] = [problem, deployment, environment]
    before = decide(*facts)
    position = next(i for i, record in enumerate(facts) if field in {f.name for f in fields(record)})
    facts[position] = replace(facts[position], **{field: STRICTER[field]})
    if not before.served:
        assert not decide(*facts).served
