# SPDX-License-Identifier: Apache-2.0
"""Functions called in processes of their own, forked from an interpreter that has imported what takes long.

``python -m tests.forks MODULE ...`` imports the modules, then forks a child for each request it reads.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300


class ForkServer:
    """Fork children of one interpreter, which starts at the first call."""

    def __init__(self, *modules: str, environment: dict[str, str], python: str = sys.executable, folder: Path = ROOT) -> None:
        self._command = [python, "-m", "tests.forks", *modules]
        self._environment, self._folder = environment, folder
        self._streams = tempfile.TemporaryDirectory()

    def run(self, function: str, *arguments: Any, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
        """Call ``module:function`` in a child; its result is the last line of its output, as JSON.

        Args:
            environment: variables of the child. Folders of its ``PYTHONPATH`` that the interpreter lacks come first on its path.

        Returns:
            Exit code, standard output, standard error.
        """
        files = [str(Path(self._streams.name) / name) for name in ("output", "errors")]
        request = {"function": function, "arguments": arguments, "environment": environment, "files": files}
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps({**request, "environment": environment or self._environment}), file=process.stdin, flush=True)
        code = int(process.stdout.readline())
        output, errors = (Path(file).read_text(encoding="utf-8") for file in files)
        return code, output, errors

    @functools.cached_property
    def _process(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(self._command, env=self._environment, cwd=self._folder, text=True, stdin=pipe, stdout=pipe)
        atexit.register(process.communicate)  # closes its input, which ends it
        return process


def result(answer: tuple[int, str, str]) -> Any:
    """Parse the last line of a child's output."""
    code, output, errors = answer
    assert code == 0, output + errors
    return json.loads(output.splitlines()[-1])


_INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


@functools.cache
def _interpreter() -> ForkServer:
    return ForkServer("torch", "triton.language", environment={**os.environ, **_INTERPRETED})


def in_the_interpreter(function: str, *arguments: Any, **variables: str) -> Any:
    """Call ``module:function`` where Triton interprets kernels on the CPU; return its JSON."""
    return result(_interpreter().run(function, *arguments, environment={**os.environ, **_INTERPRETED, **variables}))


def call(function: str, arguments: list[Any]) -> None:
    """Print the JSON of what ``module:function`` returns."""
    module, _, name = function.partition(":")
    print("\n" + json.dumps(getattr(importlib.import_module(module), name)(*arguments)))


def _child(request: dict[str, Any]) -> None:
    signal.alarm(TIMEOUT_S)
    for stream, path in zip((1, 2), request["files"], strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    code = 1
    try:
        call(request["function"], request["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "call":
        call(sys.argv[2], sys.argv[3:])
        return
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _child(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
