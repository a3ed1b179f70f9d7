"""Commands that repair packages: one mends everything that packages cause, and what is good enough stays."""

from __future__ import annotations

from typing import Any

import pytest

from trtllm_b12x.decision import (
    Deployment,
    Environment,
    PayloadFault,
    RejectReason,
    decide,
    families,
)
from trtllm_b12x.formats.geometry import LayerShape

PINS_1_3: dict[str, Any] = {"flashinfer": "0.6.11", "dsl": "4.5.0"}
NEW: dict[str, Any] = {"flashinfer": "0.7.2.post1", "dsl": "4.8.1", "payload_cuda": (13, 4)}
BOTH = 'pip install "flashinfer-python>=0.7.2,<0.8" "nvidia-cutlass-dsl[cu13]==4.8.1"'


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
    newer = ('pip install "flashinfer-python>=0.7.2,<0.8"',)
    assert decide(LayerShape(), environment=Environment(**main)).served
    assert repair(Deployment(ep_size=2), **main) == (
        newer,
        ("flashinfer-python 0.6.18",),
    )
    old = {**main, "flashinfer": "0.6.16"}
    assert repair(**old) == (newer, ("flashinfer-python 0.6.16",))


@pytest.mark.parametrize(
    ("facts", "commands"),
    [
        ({"dsl": "none"}, ('pip install "nvidia-cutlass-dsl[cu13]==4.8.1"',)),
        ({"flashinfer": "none", "dsl": "none"}, (BOTH,)),
        (
            {**NEW, "dsl": "4.7.0", "payload_cuda": (12, 9), "payload_fault": PayloadFault.CU13_MISSING},
            ('pip install "nvidia-cutlass-dsl-libs-cu13==4.7.0"',),
        ),
        (
            {
                **NEW,
                "payload_cuda": (0, 0),
                "payload_fault": PayloadFault.IMPORT,
                "dsl_wheels": ("x", "x-cu13"),
            },
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


def test_a_pin_of_the_hosts_is_called_one() -> None:
    rejections = decide(LayerShape(), environment=Environment(host="A", **PINS_1_3, payload_cuda=(13, 1))).rejections
    assert "this moves flashinfer-python 0.6.11 (TensorRT-LLM pins and uses it)" in str(rejections[0])
