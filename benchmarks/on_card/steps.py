# SPDX-License-Identifier: Apache-2.0
"""Steps of a run: each step writes one file, runs once, and may fail without stopping the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_b12x.core import disk
from trtllm_b12x.environment.gpu import smi_program

ROOT = Path(__file__).parents[2]
DONE, FAILED = "done", "failed"
_SAMPLED = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_EVERY_S = 10.0
_UNKNOWN = {"", "n/a", "not supported", "not available", "unknown", "unknown error", "err!"}
"""Values that nvidia-smi writes, with brackets or without, for an unknown field (WSL2, GB10, older drivers)."""
_TEXT = {"name", "uuid", "driver_version", "vbios_version"}
"""Fields that stay text: as a number, driver 581.80 would be 581.8."""
_LAST_LINES = 15


class StepError(Exception):
    """Line for the report: what cannot be measured, why, and what would fix it."""


@dataclass(frozen=True)
class Step:
    """One thing to measure."""

    name: str
    """Name of the step and of its file."""
    title: str
    asked: dict[str, Any]
    """Inputs that the result depends on. If they change, the step is measured again."""
    measure: Callable[[Runner], Any]
    minutes: float
    """Estimated minutes."""
    needs: tuple[str, ...] = ()
    """Steps that must have succeeded before."""


@dataclass
class Runner:
    """Runs steps in ``out``, one after the other."""

    out: Path
    timeout_s: float
    """Limit of one command, in seconds."""
    say: Callable[[str], None] = print
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    on: dict[str, Any] = field(default_factory=dict)
    """Card and versions. Results of a different card or version are measured again."""
    gpu: str = ""
    """Measured GPU as ``nvidia-smi`` names it; "" for the first GPU."""

    def path(self, name: str, suffix: str = ".json") -> Path:
        return self.out / "steps" / f"{name}{suffix}"

    def stored(self, step: Step) -> dict[str, Any] | None:
        """Return an earlier run's record of exactly this step on this card, or None."""
        try:
            found: dict[str, Any] = json.loads(self.path(step.name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        same = found.get("asked") == _plain(step.asked) and found.get("on") == _plain(self.on)
        return found if same and found.get("state") == DONE else None

    def result(self, name: str) -> Any:
        """Return the result of a step, from this run or else from an earlier run."""
        return json.loads(self.path(name).read_text(encoding="utf-8"))["result"]

    def state(self, name: str) -> str:
        """Return the state that the file of a step has, or an empty string."""
        try:
            return str(json.loads(self.path(name).read_text(encoding="utf-8")).get("state", ""))
        except (OSError, ValueError, AttributeError):
            return ""

    def run(self, step: Step) -> dict[str, Any]:
        """Measure a step and write its record. An interruption writes nothing and propagates to the caller."""
        started = time.time()
        record: dict[str, Any] = {"name": step.name, "title": step.title, "asked": step.asked, "on": self.on, "started": started}
        try:
            record |= {"state": DONE, "result": step.measure(self)}
        except StepError as error:
            record |= {"state": FAILED, "because": str(error)}
        except Exception as error:  # a defect of ours must not stop the other steps
            record |= {"state": FAILED, "because": f"{type(error).__name__}: {error}"}
        record["seconds"] = round(time.time() - started, 1)
        write_json(self.path(step.name), record)
        return record

    def command(self, name: str, command: Sequence[str], ok: Sequence[int] = (0,), **environment: str) -> Finished:
        """Run a command to its end, with standard output and error in ``name``.log, and sample the GPU's clocks.

        Raises:
            StepError: the command cannot be started, takes too long, or ends with a status that is not in ``ok``.
        """
        log = self.path(name, ".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        samples: list[dict[str, float]] = []
        with log.open("w", encoding="utf-8") as file:
            file.write(f"$ {' '.join([f'{k}={v}' for k, v in environment.items()] + list(command))}\n")
            file.flush()
            try:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=self.environment | environment,
                    cwd=ROOT,  # where ``benchmarks`` is
                    start_new_session=True,  # so that its workers end with it
                )
            except OSError as error:
                raise StepError(f"{command[0]} cannot be started: {error.strerror}") from None
            began = sampled = time.monotonic()
            try:
                while (status := _wait(child, 0.5)) is None:
                    now = time.monotonic()
                    if now - began > self.timeout_s:
                        raise StepError(
                            f"{log.name}: not done after {self.timeout_s / 60:.0f} minutes; --timeout gives it longer"
                        )
                    if now - sampled >= _EVERY_S:
                        sampled = now
                        samples += gpu_state(_SAMPLED, self.gpu)[:1]
            finally:
                if child.poll() is None:
                    _end(child)
        if status not in ok:
            tail = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][
                -_LAST_LINES:
            ]
            raise StepError(f"{' '.join(command[:4])} ... ended with {status} ({log}): " + " / ".join(tail)[-1500:])
        return Finished(log, summary(samples))


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    log: Path
    clocks: dict[str, dict[str, float]]
    """Least, median and most of each value that nvidia-smi reported meanwhile; empty without samples."""


def need_package(runner: Runner) -> None:
    """Raise StepError if the package is not installed."""
    if "trtllm-b12x" not in runner.on.get("versions", {}):
        raise StepError("the package is not installed in this environment, so nothing would be compared: pip install .")


def _wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a command and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        _wait(child, 10.0)
        os.killpg(child.pid, signal.SIGKILL)  # and workers that outlived it
    _wait(child, 10.0)


def gpu_state(fields: Sequence[str], gpu: str = "") -> list[dict[str, Any]]:
    """Query ``nvidia-smi`` for one GPU or for all GPUs. Numbers are float.

    Unknown fields are left out. The list is empty if ``nvidia-smi`` is missing, fails or lists no GPU.
    """
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *([f"--id={gpu}"] if gpu else [])]
    try:
        done = subprocess.run([smi_program() or "nvidia-smi", *query], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:  # this driver lacks a field: query each field separately
        if len(fields) == 1:
            return []
        apart = [gpu_state([one], gpu) for one in fields]
        count = max(map(len, apart), default=0)
        return [{k: v for gpus in apart if len(gpus) > i for k, v in gpus[i].items()} for i in range(count)]
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [
        {name: cell if name in _TEXT else _number(cell) for name, cell in zip(fields, row, strict=True) if _known(cell)}
        for row in rows
        if len(row) == len(fields)
    ]


def _known(cell: str) -> bool:
    return not cell.startswith("[") and cell.lower() not in _UNKNOWN


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = {}
    for name in _SAMPLED:
        values = [sample[name] for sample in samples if isinstance(sample.get(name), float)]
        if values:
            found[name] = {"least": min(values), "median": statistics.median(values), "most": max(values)}
    return found


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write the whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.replace(path, text)


def _plain(value: Any) -> Any:
    """Return a value as JSON reads it back from a file."""
    return json.loads(json.dumps(value))
