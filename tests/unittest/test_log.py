"""One line per process and reason, at the level that fits."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from trtllm_b12x.decision import UNKNOWN, Environment, Lacking, Rejection, RejectReason, Resolution, families, resolve
from trtllm_b12x.decision.announce import announce
from trtllm_b12x.formats.geometry import LayerShape


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="trtllm_b12x")


def b12x(**facts: Any) -> Resolution:
    return resolve(LayerShape(), None, Environment(**facts), {"b12x": UNKNOWN})


MENDABLE, ANOTHER_CARD = b12x(dsl="none"), b12x(sm=90)


def test_once_per_reason(caplog: pytest.LogCaptureFixture) -> None:
    for layer in range(48):
        announce(MENDABLE, f"layer {layer}")
    announce(ANOTHER_CARD, "layer 0")
    assert len(caplog.records) == 2


def test_levels(caplog: pytest.LogCaptureFixture) -> None:
    announce(MENDABLE, "MoE layer 3")
    announce(ANOTHER_CARD, "MoE layer 3")
    warning, information = caplog.records
    assert (warning.levelno, information.levelno) == (logging.WARNING, logging.DEBUG)
    assert "rank 0: MoE layer 3 stays on CUTLASS: DSL_MISSING" in warning.getMessage()
    assert 'pip install "nvidia-cutlass-dsl[cu13]==' in warning.getMessage()


def test_what_would_not_help_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    announce(b12x(sm=90, dsl="none", flashinfer="none"), "MoE layer 0")
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert len(caplog.records) == 3


def test_what_stands_against_one_family_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The layer is served: a line of information for each family, with all that is wrong.  It is not: what keeps the nearest."""
    facts = Environment(dsl="none", flashinfer="none")
    rows = {row.name: row.features(facts) for row in families.rows(("b12x", "triton", "grouped"), "NVFP4")}
    for layer in range(3):
        announce(resolve(LayerShape(quant_algo="NVFP4"), None, facts, rows), f"MoE layer {layer}")
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert "MoE layer 0 is served by triton, not by b12x: DSL_MISSING: " in line.getMessage()
    assert "; FLASHINFER_MISSING: " in line.getMessage()
    assert line.getMessage().count("pip install") == 1
    caplog.clear()
    announce(resolve(LayerShape(quant_algo="FP8"), None, facts, rows), "MoE layer 3")
    (line,) = caplog.records
    assert "MoE layer 3 stays on CUTLASS: QUANTIZATION" in line.getMessage()
    announce(
        resolve(LayerShape(quant_algo="NVFP4"), None, replace(facts, triton_lacks=(Lacking("no gcc", "cc"),)), rows), "layer"
    )
    assert "layer stays on CUTLASS: TRITON: no gcc (cc)" in caplog.text


def test_other_ranks_do_not_repeat_it(caplog: pytest.LogCaptureFixture) -> None:
    announce(MENDABLE, "MoE layer 3", rank=1)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    assert "rank 1" in caplog.records[0].getMessage()


def test_what_is_fixable() -> None:
    assert not any(Rejection(r, "").fixable for r in (RejectReason.SM, RejectReason.LORA, RejectReason.ACTIVATION))
    fixable = (RejectReason.DSL_PAYLOAD, RejectReason.FLASHINFER_TOO_OLD, RejectReason.TOOLKIT)
    assert all(Rejection(r, "").fixable for r in fixable)


def test_a_gpu_that_is_not_visible_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    announce(b12x(sm=0), "MoE layer 0")
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith("rank 0: MoE layer 0 stays on CUTLASS: SM: no GPU is visible (make the GPU visible")
    assert "--gpus all" in line.getMessage()


SPEAKS = """
from types import ModuleType
from trtllm_b12x import bootstrap
from trtllm_b12x.core import hook
hook.hand_over(ModuleType("create_moe"), bootstrap.patch)  # warns of the setting, and of a module without what is rebound
print("alive", bool(hook.failure))
"""


def _closed() -> None:
    os.close(2)


@pytest.mark.parametrize("stream", ["fine", "full", "closed", "nobody reads"])
def test_standard_error_that_takes_nothing(stream: str) -> None:
    """The process lives, and its standard output stays its own."""
    environment = {**os.environ, "TRTLLM_B12X_NO_SUCH_SETTING": "1"}
    environment.pop("PYTHONUNBUFFERED", None)  # a stream that buffers keeps what it could not write
    reader, writer = os.pipe()
    with open("/dev/full", "w") as full:
        if stream == "nobody reads":
            os.close(reader)
        result = subprocess.run(
            [sys.executable, "-c", SPEAKS],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=full if stream == "full" else writer,
            preexec_fn=_closed if stream == "closed" else None,
            text=True,
        )
    os.close(writer)
    assert (result.stdout, result.returncode) == ("alive True\n", 0)
    if stream != "nobody reads":
        with open(reader) as pipe:
            lines = pipe.read().splitlines()
        assert [("NO_SUCH_SETTING" in line, "is left alone" in line) for line in lines] == (
            [(True, False), (False, True)] if stream == "fine" else []
        )
