"""Every reason, each alone, and all at once."""

from __future__ import annotations

import pytest

from trtllm_b12x.decision import Deployment, Environment, Problem, RejectReason, decide

KERNEL = Environment(kernel="k", activations=frozenset({"Swiglu", "Relu2"}), hidden_size_multiple=128, expert_parallel=True)

CASES = [
    (RejectReason.QUANTIZATION, Problem(quant_algo="FP8"), Deployment(), KERNEL),
    (RejectReason.QUANTIZATION, Problem(quant_algo="none"), Deployment(), KERNEL),
    (RejectReason.GROUP_SIZE, Problem(quant_algo="NVFP4", group_size=32), Deployment(), KERNEL),
    (RejectReason.PRE_QUANT_SCALE, Problem(pre_quant_scale=True), Deployment(), KERNEL),
    (RejectReason.ACTIVATION_DTYPE, Problem(activation_dtype="float16"), Deployment(), KERNEL),
    (RejectReason.ACTIVATION, Problem(activation="Geglu"), Deployment(), KERNEL),
    (RejectReason.ACTIVATION_CONSTANTS, Problem(activation_constants=True), Deployment(), KERNEL),
    (RejectReason.HIDDEN_SIZE, Problem(hidden_size=192), Deployment(), KERNEL),
    (RejectReason.INTERMEDIATE_SIZE, Problem(intermediate_size=24), Deployment(), KERNEL),
    (RejectReason.BIAS, Problem(bias=True), Deployment(), KERNEL),
    (RejectReason.ROUTER_WEIGHT_ON_INPUT, Problem(apply_router_weight_on_input=True), Deployment(), KERNEL),
    (RejectReason.EXPERT_PARALLEL, Problem(), Deployment(ep_size=2), Environment(kernel="k", expert_parallel=False)),
    (RejectReason.LOAD_BALANCER, Problem(), Deployment(load_balancer=True), KERNEL),
    (RejectReason.LORA, Problem(), Deployment(lora=True), KERNEL),
]


@pytest.mark.parametrize(("reason", "problem", "deployment", "environment"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_each_reason_alone(reason: RejectReason, problem: Problem, deployment: Deployment, environment: Environment) -> None:
    verdict = decide(problem, deployment, environment)
    assert verdict.reasons == (reason,)
    assert not verdict.served
    assert reason.remedy in str(verdict)


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
        assert str(decide(problem, Deployment(2, 2, False, False), KERNEL)) == "b12x"
