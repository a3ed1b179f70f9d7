"""A program that answers in JSON lines, and ends with everything that it started."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trtllm_b12x.core import child

PROGRAM = """
import json, os, subprocess, sys, time
request = json.load(sys.stdin)
print("not JSON")
print(json.dumps({"asked": request}), flush=True)
other = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
print(json.dumps({"other": other.pid}), flush=True)
time.sleep(request["seconds"])
os._exit(3)
"""


@pytest.mark.parametrize(("seconds", "timeout", "status"), [(0, None, 3), (60, 1.0, -9)])
def test_a_program_that_dies_or_takes_too_long(seconds: int, timeout: float | None, status: int) -> None:
    answers: list[dict[str, Any]] = []
    command = [sys.executable, "-c", PROGRAM]
    assert child.answers(command, {"seconds": seconds}, dict(os.environ), answers.append, timeout) == status
    assert answers[0] == {"asked": {"seconds": seconds}}
    process = Path("/proc") / str(answers[1]["other"])
    for _ in range(100):
        if not process.exists() or "State:\tZ" in (process / "status").read_text():
            return
        time.sleep(0.05)
    pytest.fail("what the program started still runs")


def test_a_program_that_does_not_read_its_request() -> None:
    assert child.answers([sys.executable, "-c", "raise SystemExit(1)"], ["x" * 10**6], dict(os.environ), print) == 1
