# SPDX-License-Identifier: Apache-2.0
"""A family of kernels is one class and one row of the catalog; everything else finds it there."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import trtllm_b12x
from tests import layers
from tests.checkpoints import random_experts
from trtllm_b12x import environment
from trtllm_b12x.core import child, settings
from trtllm_b12x.decision import KernelFeatures, RejectReason, families
from trtllm_b12x.environment import prove
from trtllm_b12x.kernels import PlanError, prove_child
from trtllm_b12x.kernels.b12x.compiler import ACTIVATIONS
from trtllm_b12x.kernels.b12x.kernel import B12xKernel
from trtllm_b12x.kernels.catalog import KERNELS
from trtllm_b12x.kernels.layer_tensors import ACTIVATIONS as TRITON_ACTIVATIONS
from trtllm_b12x.kernels.reference import ReferenceKernel, UnquantizedReferenceKernel
from trtllm_b12x.kernels.triton.decode import TritonKernel

FREE_OF = {RejectReason.DSL_MISSING, RejectReason.DSL_PAYLOAD, RejectReason.FLASHINFER_MISSING, RejectReason.FLASHINFER_TOO_OLD}
TOY = KernelFeatures(
    "toy",
    frozenset({"Swiglu"}),
    tile=384,
    hidden_size_multiple=128,
    negative_ids=True,
    bound_by=frozenset(RejectReason) - FREE_OF,
)


class Toy(ReferenceKernel):
    features = TOY


@pytest.fixture(autouse=True)
def _catalog(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What a row adds."""
    row = families.Family("toy", "NVFP4", lambda facts: TOY)
    monkeypatch.setitem(KERNELS, (row.name, row.format), (Toy, Toy))
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, row))
    monkeypatch.setattr(settings, "FAMILIES", (*settings.FAMILIES, "toy"))
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "b12x,toy")
    caplog.set_level(logging.INFO, logger="trtllm_b12x")


def test_what_the_catalog_says_is_what_the_kernels_say() -> None:
    machine = environment.inspect_flashinfer()
    for family in families.FAMILIES:
        assert family.features(machine) == KERNELS[family.name, family.format][0].features
        assert family.features(machine).name == family.name
    assert B12xKernel.features.activations == set(ACTIVATIONS) == ReferenceKernel.features.activations
    assert TritonKernel.features.activations == set(TRITON_ACTIVATIONS) == UnquantizedReferenceKernel.features.activations


@pytest.mark.parametrize("when", ["plan", "self_test"])
def test_the_next_one_takes_over_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    original = getattr(ReferenceKernel, when)

    def fails(self: Any, *arguments: Any) -> None:
        if type(self) is ReferenceKernel:
            raise RuntimeError("no compiler\nwith a long story")
        original(self, *arguments)

    monkeypatch.setattr(ReferenceKernel, when, fails)
    module = layers.load(layers.create(4, 128, 192), random_experts(4, 128, 192))
    assert list(module.backend.schedule.families) == ["toy"]
    assert str(module.backend.verdict).startswith("toy; not b12x: KERNEL_PLAN_FAILED: RuntimeError: no compiler")
    assert "story" not in str(module.backend.verdict)
    assert "MoE layer None is served by toy, not by b12x: KERNEL_PLAN_FAILED: RuntimeError: no compiler" in caplog.text
    assert "1 of 1 MoE layers on toy, decode below 64 tokens" in caplog.text
    status = trtllm_b12x.status()
    assert (status.promoted, status.families, status.reasons) == (1, {"toy": 1}, {})
    gone = layers.load(layers.create(4, 128, 192, gated=False), random_experts(4, 128, 192, gated=False))
    assert gone.backend.kernel is None
    assert set(gone.backend.verdict.reasons) == {RejectReason.KERNEL_PLAN_FAILED, RejectReason.ACTIVATION}


def test_doctor_compiles_what_the_family_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # is given back
    monkeypatch.setattr(Toy, "instruction", "mma.toy")
    for said, expected in (
        (["ld; mma.toy; mma.toy", "mma.toy"], (True, "", 3)),
        (["ld"], (False, "the PTX holds no mma.toy instruction", 0)),
        (PlanError("TypeError: no\nptxas fatal : unknown"), (False, "TypeError: no", 0)),
    ):
        asked = Mock(return_value=said) if isinstance(said, list) else Mock(side_effect=said)
        monkeypatch.setattr(Toy, "assembled", asked, raising=False)
        found = prove_child.proof("sm_121a", "toy")
        assert (found.compiled, found.error, found.products) == expected
        assert asked.call_args[0][1].multiprocessors == 48  # GB10's
    complaint = Mock(returncode=0, stdout=f"{capsys.readouterr().out}\n{json.dumps(dataclasses.asdict(found))}", stderr="")
    monkeypatch.setattr(child, "run", lambda *_: complaint)
    assert prove.prove("sm_121a", "toy").error == "ptxas fatal : unknown"  # the assembler's words tell more


@pytest.mark.parametrize(("cause", "tried"), [(None, 1), (torch.OutOfMemoryError("no memory"), 2)], ids=["compile", "memory"])
def test_what_failed_is_forgotten_with_its_load(monkeypatch: pytest.MonkeyPatch, cause: Exception | None, tried: int) -> None:
    """Other layers of the load do not try again, but for memory; what is built later does."""
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "b12x")
    error = PlanError("it failed")
    error.__cause__ = cause
    tensors, plan = random_experts(4, 128, 192), Mock(side_effect=error)
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceKernel, "plan", plan)
        modules = [layers.create(4, 128, 192) for _ in range(2)]
        for module in modules:
            layers.load(module, tensors)
        assert plan.call_count == tried
        assert all("KERNEL_PLAN_FAILED: it failed" in str(module.backend.verdict) for module in modules)
        layers.load(layers.create(4, 128, 192), tensors)
        assert plan.call_count == tried + 1
    assert layers.load(layers.create(4, 128, 192), tensors).backend.kernel is not None
