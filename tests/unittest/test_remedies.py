# SPDX-License-Identifier: Apache-2.0
"""What is said of a refusal: one line per process and reason, and the command that repairs packages."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from trtllm_b12x.decision import (
    UNKNOWN,
    Deployment,
    Environment,
    Lacking,
    PayloadFault,
    RejectReason,
    Resolution,
    decide,
    families,
    resolve,
)
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


@pytest.mark.parametrize(
    ("refused", "rank", "levels", "words"),
    [
        (MENDABLE, 0, [logging.WARNING], ["stays on CUTLASS: DSL_MISSING", 'pip install "nvidia-cutlass-dsl[cu13]==']),
        (MENDABLE, 1, [logging.DEBUG], []),  # other ranks do not repeat it
        (ANOTHER_CARD, 0, [logging.DEBUG], []),
        (b12x(sm=90, dsl="none", flashinfer="none"), 0, [logging.DEBUG] * 3, []),  # what would not help
        (b12x(sm=0), 0, [logging.WARNING], ["SM: no GPU is visible (make the GPU visible", "--gpus all"]),
    ],
)
def test_levels(refused: Resolution, rank: int, levels: list[int], words: list[str], caplog: pytest.LogCaptureFixture) -> None:
    announce(refused, "MoE layer 3", rank)
    assert [record.levelno for record in caplog.records] == levels
    line = caplog.records[0].getMessage()
    assert line.startswith(f"rank {rank}: MoE layer 3 stays on CUTLASS: ")
    assert all(word in line for word in words)


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


SPEAKS = """
from types import ModuleType
from trtllm_b12x import bootstrap
from trtllm_b12x.core import hook
hook.hand_over(ModuleType("create_moe"), bootstrap.patch)  # warns of the setting, and of a module without what is rebound
print("alive", bool(hook.failure))
"""


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
            preexec_fn=(lambda: os.close(2)) if stream == "closed" else None,
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


# ---- commands that repair packages -------------------------------------------------------------------------------------


PINS_1_3: dict[str, Any] = {"flashinfer": "0.6.11", "dsl": "4.5.0"}
NEW: dict[str, Any] = {"flashinfer": "0.7.2.post1", "dsl": "4.8.1", "payload_cuda": (13, 4)}
BOTH = 'pip install "flashinfer-python>=0.7.2,<0.7.4" "nvidia-cutlass-dsl[cu13]==4.8.1"'


def repair(deployment: Deployment | None = None, **facts: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Commands and moves, which are the same whichever of the packages' reasons one reads."""
    e = Environment(**facts)
    found = {(r.commands, r.moves) for r in decide(LayerShape(), deployment, e, families.b12x(e)).rejections}
    (only,) = found
    return only


@pytest.mark.parametrize("fault", [PayloadFault.CU13_MISSING, PayloadFault.SHADOWED, PayloadFault.CRASH])
def test_one_command_mends_everything_that_packages_cause(fault: PayloadFault) -> None:
    facts = {**PINS_1_3, "payload_cuda": (12, 9), "payload_fault": fault}
    assert decide(LayerShape(), environment=Environment(**facts)).reasons == (
        RejectReason.DSL_PAYLOAD,
        RejectReason.FLASHINFER_TOO_OLD,
    )
    commands, moves = repair(**facts)
    assert commands == (BOTH,)
    assert moves == ("flashinfer-python 0.6.11", "nvidia-cutlass-dsl 4.5.0")


def test_what_is_good_enough_stays() -> None:
    main = {**NEW, "flashinfer": "0.6.18", "dsl": "4.7.0", "expert_parallel": False}
    newer = ('pip install "flashinfer-python>=0.7.2,<0.7.4"',)
    assert decide(LayerShape(), environment=Environment(**main)).served
    assert repair(Deployment(ep_size=2), **main) == (newer, ("flashinfer-python 0.6.18",))
    old = {**main, "flashinfer": "0.6.16"}
    assert repair(**old) == (newer, ("flashinfer-python 0.6.16",))


@pytest.mark.parametrize(
    ("facts", "commands"),
    [
        ({"dsl": "none"}, ('pip install "nvidia-cutlass-dsl[cu13]==4.8.1"',)),
        ({"flashinfer": "none", "dsl": "none"}, (BOTH,)),
        ({**NEW, "flashinfer": "none"}, ('pip install "flashinfer-python>=0.7.2,<0.7.4"',)),
        (
            {**NEW, "dsl": "4.7.0", "payload_cuda": (12, 9), "payload_fault": PayloadFault.CU13_MISSING},
            ('pip install "nvidia-cutlass-dsl-libs-cu13==4.7.0"',),
        ),
        (
            {**NEW, "payload_cuda": (0, 0), "payload_fault": PayloadFault.IMPORT, "dsl_wheels": ("x", "x-cu13")},
            ("pip install --force-reinstall --no-deps x==4.8.1 x-cu13==4.8.1",),
        ),
        (
            {**NEW, "payload_cuda": (0, 0), "payload_fault": PayloadFault.IMPORT, "missing": ("cuda-bindings>=12.8",)},
            ('pip install "cuda-bindings>=12.8"',),
        ),
        ({**NEW, "payload_cuda": (0, 0), "payload_fault": PayloadFault.FOREIGN}, ()),
        ({**NEW, "payload_cuda": (0, 0), "payload_fault": PayloadFault.NO_ANSWER}, ()),
        ({**NEW, "payload_cuda": (12, 9), "payload_fault": PayloadFault.DRIVER}, ()),
        ({**NEW, "flashinfer_fault": "SyntaxError"}, ("pip install --force-reinstall --no-deps flashinfer-python==0.7.2.post1",)),
        ({**NEW, "flashinfer_fault": "RuntimeError: flashinfer-cubin version (0.6.13) does not match"}, ()),
        ({**NEW, "flashinfer_fault": "PermissionError: [Errno 13] Permission denied: '/root/.cache'"}, ()),
        ({**NEW, "flashinfer_fault": "No module named 'triton'", "missing": ("triton",)}, ('pip install "triton"',)),
        (
            {**NEW, "dsl": "4.6.0", "unmet": ("nvidia-cutlass-dsl>=4.6.2a0 (4.6.0 is installed)",)},
            ('pip install "nvidia-cutlass-dsl[cu13]==4.8.1"',),
        ),
        (
            {**NEW, "unmet": ("nvidia-cutlass-dsl-libs-base==4.8.1 (4.7.0 is installed)",)},
            ('pip install "nvidia-cutlass-dsl[cu13]==4.8.1"',),
        ),
        ({**NEW, "unmet": ("apache-tvm-ffi<0.2,>=0.1.11 (0.1.6 is installed)",)}, ('pip install "apache-tvm-ffi<0.2,>=0.1.11"',)),
    ],
)
def test_commands(facts: dict[str, Any], commands: tuple[str, ...]) -> None:
    """Each is run in a real environment in ``tests/integration/test_payload.py``."""
    assert repair(**facts)[0] == commands


def test_a_cache_without_permission_is_no_reason_to_install_anew() -> None:
    (rejection,) = (r for _, r in b12x(**NEW, flashinfer_fault="PermissionError: '/root/.cache'").refused)
    assert rejection.remedy == "name a folder that can be written in FLASHINFER_WORKSPACE_BASE"


def test_a_pin_of_the_hosts_is_called_one() -> None:
    rejections = decide(LayerShape(), environment=Environment(host="A", **PINS_1_3, payload_cuda=(13, 1))).rejections
    assert "this moves flashinfer-python 0.6.11 (TensorRT-LLM pins and uses it)" in str(rejections[0])
