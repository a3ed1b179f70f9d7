"""One line per process and reason, at the level that fits."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from trtllm_b12x import log
from trtllm_b12x.decision import Environment, Problem, RejectReason, decide


@pytest.fixture(autouse=True)
def _fresh(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    log.forget()
    caplog.set_level(logging.DEBUG, logger="trtllm_b12x")
    yield
    log.forget()


MENDABLE = decide(Problem(), environment=Environment(dsl="none"))
ANOTHER_CARD = decide(Problem(), environment=Environment(sm=90))


def test_once_per_reason(caplog: pytest.LogCaptureFixture) -> None:
    for layer in range(48):
        log.announce(MENDABLE, f"layer {layer}")
    log.announce(ANOTHER_CARD, "layer 0")
    assert len(caplog.records) == 2


def test_levels(caplog: pytest.LogCaptureFixture) -> None:
    log.announce(MENDABLE, "MoE layer 3")
    log.announce(ANOTHER_CARD, "MoE layer 3")
    warning, information = caplog.records
    assert (warning.levelno, information.levelno) == (logging.WARNING, logging.DEBUG)
    assert "rank 0: MoE layer 3 stays on CUTLASS: DSL_MISSING" in warning.getMessage()
    assert "pip install nvidia-cutlass-dsl==" in warning.getMessage()


def test_what_a_setting_let_pass(caplog: pytest.LogCaptureFixture) -> None:
    verdict = decide(Problem(), environment=Environment(flashinfer="0.6.16", exact_scales=False, allow_baked_scales=True))
    for layer in range(3):
        log.announce(verdict, f"MoE layer {layer}")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "MoE layer 0: flashinfer-python 0.6.16 decodes subnormal block scales wrongly" in record.getMessage()


def test_what_would_not_help_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    log.announce(decide(Problem(), environment=Environment(sm=90, dsl="none", flashinfer="none")), "MoE layer 0")
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert len(caplog.records) == 3


def test_other_ranks_do_not_repeat_it(caplog: pytest.LogCaptureFixture) -> None:
    log.announce(MENDABLE, "MoE layer 3", rank=1)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    assert "rank 1" in caplog.records[0].getMessage()


def test_what_is_mendable() -> None:
    assert not any(r.mendable for r in (RejectReason.SM, RejectReason.LORA, RejectReason.ACTIVATION))
    assert all(r.mendable for r in (RejectReason.DSL_PAYLOAD, RejectReason.FLASHINFER_TOO_OLD, RejectReason.TOOLKIT))
