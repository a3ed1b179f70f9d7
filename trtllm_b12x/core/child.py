# SPDX-License-Identifier: Apache-2.0
"""Start child processes: build their environment and command, run them and read their output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def variables() -> dict[str, str]:
    """Return the environment of a child process that sees no GPU, ignores the working directory and promotes no layer."""
    return {**os.environ, "TRTLLM_B12X": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``main()`` of a module of this package."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = f"import sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; from {module} import main; main()"
    return [sys.executable, "-c", code, *arguments]


def run(command: list[str], env: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a command in ``/`` without standard input. Undecodable output bytes are replaced."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout, env=env, cwd="/"
    )


def answers(
    command: list[str], request: Any, env: dict[str, str], report: Callable[[dict[str, Any]], None], timeout: float | None = None
) -> int:
    """Run a program that reads ``request`` as JSON and prints JSON lines; pass each line to ``report``; return its exit status.

    Before it returns, after ``timeout`` seconds at the latest, this call kills the program and its child processes.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        cwd="/",
        text=True,
        errors="replace",
        start_new_session=True,  # the program gets its own process group
    )

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout or threading.TIMEOUT_MAX, end)
    timer.daemon = True
    timer.start()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(BrokenPipeError), process.stdin as stream:
            stream.write(json.dumps(request))
        with process.stdout as lines:
            for line in lines:
                if line.startswith("{"):
                    report(json.loads(line))
        return process.wait()
    finally:
        timer.cancel()
        end()
        process.wait()
