# SPDX-License-Identifier: Apache-2.0
"""Which class serves a layer inside doubles of TensorRT-LLM, and hosts of another shape, which are left alone."""

from __future__ import annotations

import pytest

from tests.hosts.build import Change
from tests.hosts.machine import HOSTS, OURS, SHORT, Double, Machine


@pytest.mark.all
@pytest.mark.parametrize("double", SHORT, indirect=True)
def test_threads_failures_and_pipeline_ranks(double: Double) -> None:
    result = double.scenario("promotion.threads_and_failures")
    assert result["gate"] in ([], [OURS, OURS])
    assert result["threads"] == {f"torch.bfloat16 {OURS}": 60, f"torch.float16 {HOSTS}": 60}
    assert result["left"] == 0
    assert len(result["explained"]) == (24 if double.has_contexts else 48)
    for config, said, became in result["explained"]:
        assert said == became, config
    assert result["failed"] == HOSTS
    assert result["stderr"].count("promotion is off in this process") == 1


def test_a_load_balancer_keeps_the_hosts_class(double: Double) -> None:
    result = double.scenario("promotion.load_balancer")
    assert (result["backend"], result["method"]) == (HOSTS, "NVFP4CutlassFusedMoEMethod")
    assert result["reasons"] == {"LOAD_BALANCER": 1}


def test_only_lora_on_the_experts_keeps_b12x_off(double: Double) -> None:
    result = double.scenario("promotion.lora_targets")
    assert result["attention"] == [OURS, 1]
    alone, with_us = result["experts"]
    assert with_us == alone  # from C1 on the host refuses them itself


@pytest.mark.parametrize("order", ["as written", "reversed"])
def test_a_layer_is_an_instance_of_its_own_class(double: Double, order: str) -> None:
    result = double.scenario("promotion.isinstance_of_ours", order)
    assert result["isinstance"]
    assert result["classes"] == [True, True]


def test_every_backend_quantization_and_card(double: Double) -> None:
    result = double.scenario("promotion.every_backend_quantization_and_card")
    assert len(result["rows"]) == 2 * 4 * 5 * 3
    without_kernel = ("CuteDslFusedMoE",) if result["has_get_moe_cls"] else ()
    for payload, sm, backend, algo, alone, promoted in result["rows"]:
        expected = alone
        if alone == "CuteDslB12xFusedMoE" and payload == "12":
            expected = HOSTS  # its kernels would not compile
        elif algo == "NVFP4" and sm in (120, 121) and payload == "13" and alone in (HOSTS, *without_kernel):
            expected = OURS
        assert promoted == expected, (payload, sm, backend, algo, alone)


def test_every_backend_and_card_of_weight_only_formats(double: Double) -> None:
    """Hosts before C1 have no W4A16_NVFP4; CUTEDSL's own b12x stays while its kernels compile, and one line names CUTLASS."""
    scenario, algorithms = "promotion.every_backend_quantization_and_card", "W4A16_NVFP4,W4A8_MXFP4_MXFP8"
    result = double.scenario(scenario, algorithms, TRTLLM_B12X_KERNELS="triton")
    assert len(result["rows"]) == 2 * 4 * 5 * 2
    outcomes = set()
    for payload, sm, backend, algo, alone, promoted in result["rows"]:
        known = double.has_contexts or algo != "W4A16_NVFP4"
        ours = (alone == HOSTS and known) or (alone == "CuteDslB12xFusedMoE" and payload == "12")
        expected = OURS if ours and sm in (120, 121) else alone
        assert promoted == expected, (payload, sm, backend, algo, alone)
        outcomes.add((algo, promoted))
    assert ("W4A8_MXFP4_MXFP8", OURS) in outcomes
    assert (("W4A16_NVFP4", OURS) in outcomes) == double.has_contexts
    line = "W4A16_NVFP4 experts run on moe_backend CUTEDSL, which TensorRT-LLM takes where none is set: set moe_config.backend"
    assert result["stderr"].count(line) == double.has_contexts
    assert result["stderr"].count("has no W4A16NVFP4CutlassFusedMoEMethod") == (0 if double.has_contexts else 1)


def test_no_hook_is_left_to_itself(double: Double) -> None:
    streamed = [] if double.generation != "C1" else ["finalize_streamed_expert"]  # C2's
    assert double.scenario("contract.orphaned_hooks")["orphans"] == streamed


# ---- hosts of another shape ----------------------------------------------------------------------------------------------


def test_a_host_of_another_shape_is_left_alone(machine: Machine) -> None:
    changes = (
        ("quantization", "_reconcile_and_compute_alphas", "_reconcile"),
        ("fused_moe_cutlass", "        output_dtype=None,", "        out_dtype=None,"),
        ("fused_moe_cutlass", "output_dtype or x.dtype,", "out_dtype or x.dtype,"),
    )
    odd = machine.double("B", "odd", changes)
    doctor = odd.run("-m", "trtllm_b12x", "doctor")
    assert doctor.returncode == 1
    words = " ".join(doctor.stdout.split())
    assert "HOST: no adapter fits TensorRT-LLM double" in words
    assert "CutlassFusedMoE.run_moe: no parameter output_dtype" in words
    result = odd.scenario("contract.left_alone")
    assert result["classes"] == [HOSTS, HOSTS]
    assert (result["patches"], result["wrapped"]) == ([], [False, False])  # the names are the host's again
    assert result["stderr"].count("no adapter fits") == 1


OTHERS: dict[str, tuple[str, tuple[Change, ...]]] = {
    # A staged host less one hook must not pass for one that does not stage: its numbers would be wrong.
    "one hook has another name": ("B", (("quantization", "_interleave_w2_weight_scale", "_interleave_w2"),)),
    # Early 1.2.
    "run_moe is not told of an all-to-all": (
        "A",
        (
            (
                "configurable_moe",
                "return super().backend_kwargs(counts, **call)",
                'return {n: v for n, v in super().backend_kwargs(counts, **call).items() if n != "enable_alltoall"}',
            ),
            ("fused_moe_cutlass", "        enable_alltoall=None,\n", ""),
            ("fused_moe_cutlass", "bool(enable_alltoall)", "False"),
        ),
    ),
    # A class per quantization: the family's name is where it was, its signatures too, and nothing that is built is equal to it.
    "CUTLASS means another class": (
        "C2",
        (
            ("moe_resolution", "frozenset({CutlassFusedMoE})", "frozenset({CutlassNvfp4})"),
            ("moe_resolution", "    CutlassFusedMoE,\n", "    CutlassNvfp4,\n"),
            ("moe_resolution", "IMPL_PRIORITY = ", "class CutlassNvfp4(CutlassFusedMoE): ...\n\n\nIMPL_PRIORITY = "),
            ("moe_resolution", "FALLBACK_IMPL = CutlassFusedMoE", "FALLBACK_IMPL = CutlassNvfp4"),
            ("create_moe", "moe_cls in (CutlassFusedMoE, MarlinFusedMoE)", "issubclass(moe_cls, CutlassFusedMoE)"),
        ),
    ),
    "no such table": ("C2", (("moe_resolution", "BACKEND_FAMILY", "FAMILY_OF_BACKEND"),)),
    "a field of a call has another name": (
        "C2",
        tuple((module, "moe_output", "output") for module in ("impl_contract", "moe_scheduler", "fused_moe_cutlass")),
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_generations_are_left_alone_with_one_line(machine: Machine, case: str) -> None:
    generation, changes = OTHERS[case]
    result = machine.double(generation, case, changes).scenario("starts.by_itself")
    assert result["generation"] == "unsupported"
    assert result["promoted"] == 0
    assert OURS not in result["backends"]
    assert [line[:15] for line in result["log"]] == ["no adapter fits"]


NEWEST: tuple[Change, ...] = (
    ("configurable_moe", "LATE = True", "LATE = False"),
    ("create_moe", '("dtype", "bias", "layer_idx")', '("dtype", "bias", "layer_idx", "intermediate_size", "activation")'),
    ("impl_contract", "    bias: bool\n", "    bias: bool\n    intermediate_size: int\n    activation: Any\n"),
    (
        "fused_moe_cutlass",
        "        return None\n",
        "        if p.quant_algo is QuantAlgo.NVFP4 and p.activation.kind.name == 'Swiglu' and p.intermediate_size % 64:\n"
        "            return 'shape_unaligned'\n        return None\n",
    ),
)
"""Code of October 2026: the wrapper builds its backend at once, and CUTLASS refuses sizes of NVFP4."""


def test_the_newest_host(machine: Machine) -> None:
    newest = machine.double("C2", "newest", NEWEST)
    started = newest.scenario("starts.by_itself", FAKE_COMPUTE_CAP="12.0", DOUBLE_SM="120")
    assert (started["generation"], started["backends"], started["kernels"]) == ("C2", [OURS] * 3, [True, True, False])
    result = newest.scenario("promotion.a_refused_size", TRTLLM_B12X_KERNELS="triton", DOUBLE_SM="120")
    assert result["class"] == OURS
    assert max(result["errors"].values()) < 0.05
    assert all("shape_unaligned" in result[name] for name in ("alone", "left"))
    assert "no MoE implementation can serve this layer" in result["lora"]


LOADED = "(self, module):\n        self.setup_quant_scales(module)\n"
WITHOUT = f'{LOADED}        module._parameters.pop("fc2_input_scale", None)\n'


@pytest.mark.all
@pytest.mark.parametrize(
    ("name", "edits"),
    [
        ("slot_start", (("interface", "slot_start", "first_slot"),)),
        ("fc2_input_scale", (("quantization", LOADED, WITHOUT),)),
    ],
)
def test_layers_without_an_attribute_are_the_hosts(machine: Machine, name: str, edits: tuple[tuple[str, str, str], ...]) -> None:
    result = machine.double("C2", f"no {name}", edits).scenario("starts.by_itself")
    assert (result["generation"], result["promoted"], result["finite"]) == ("C2", 0, True)
    assert name in " ".join(result["log"])


@pytest.mark.all
def test_a_class_that_cannot_be_built_is_the_hosts(machine: Machine) -> None:
    line = "        super().__init__()\n"
    refuses = f'{line}        assert type(self).__name__ == "CutlassFusedMoE"\n'
    result = machine.double("C2", "refuses", (("fused_moe_cutlass", line, refuses),)).scenario("starts.by_itself")
    assert result["backends"] == [HOSTS] * 3
    assert [line.partition(",")[0] for line in result["log"]] == ["promotion is off in this process"]
