"""What hangs on timing: staggered calls and compute-sanitizer, with and without the fixes; each call in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .fixes import mended_copy

TIMEOUT_S = 90
_ACTIVATIONS = ("SwiGLU", "ReLU2")
_CALLS = tuple(f"small {a},{call}" for a in _ACTIVATIONS for call in ("4,direct_micro", "4,micro", "16,static", "200,dynamic"))
_BARE = tuple(f"small {a},4,micro,bare" for a in _ACTIVATIONS)
_STAGGERED = (
    *(
        f"small {a},{call},stagger"
        for a in _ACTIVATIONS
        for call in (
            *("4,direct_micro", "4,micro,bare", "32,static", "1,dynamic", "2,dynamic"),
            *("16,dynamic", "64,dynamic", "200,dynamic", "1000,dynamic,gb10"),
        )
    ),
    "Nemotron-3-Super,63,dynamic,stagger",
)
_OTHER_VERSION = tuple(
    f"small {a},{call}"
    for a in _ACTIVATIONS
    for call in (
        *("4,direct_micro", "4,micro", "4,micro,bare", "4,micro,bare,stagger", "16,static"),
        *("200,dynamic", "200,dynamic,stagger", "1000,dynamic"),
    )
)
"""In a FlashInfer before 0.7.2 the scales of direct micro are of another kind (docs/flashinfer-direct-micro-scales.md)."""


@dataclass
class Finding:
    tool: str
    call: str
    fixed: bool
    """With the fixes of ``fixes.py`` in FlashInfer's source."""
    summary: str
    places: dict[str, int] = field(default_factory=dict)
    """Kind of hazard and both lines of FlashInfer's source, with how many bytes were hit."""


def findings(cache: Path, fixed: Path, processes: int = 7) -> Iterator[Finding]:
    """racecheck with and without the fixes, memcheck without."""
    jobs: list[tuple[str, str, Path | None]] = [("racecheck", call, None) for call in (*_CALLS, *_BARE)]
    jobs += [("memcheck", call, None) for call in _CALLS]
    jobs += [("memcheck", f"small {a},200,dynamic,stagger", where) for a in _ACTIVATIONS for where in (None, fixed)]
    jobs += [("racecheck", call, fixed) for call in (*_BARE, *(call for call in _CALLS if "dynamic" in call))]
    with ThreadPoolExecutor(processes) as pool:
        yield from pool.map(lambda job: _sanitize(job[0], job[1], job[2], cache), jobs)


def staggered(cache: Path, fixed: Path) -> Iterator[dict[str, Any]]:
    """Every warp sleeping at random behind each barrier; FlashInfer as it is, and with the fixes."""
    jobs = [(call, where) for call in _STAGGERED for where in (None, fixed)]
    for (_, where), row in zip(jobs, _outcomes(jobs, cache), strict=True):
        yield {**row, "fixed": where is not None}


def _outcomes(jobs: Sequence[tuple[str, Path | None]], cache: Path, processes: int = 7) -> Iterator[dict[str, Any]]:
    """What each call measured, or its error."""

    def run(job: tuple[str, Path | None]) -> dict[str, Any]:
        output, words = _one(job[0], cache, job[1])
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        errors = [line for line in words.splitlines() if "Error" in line]
        outcome = rows[0] if rows else {"error": errors[-1] if errors else words[-200:]}
        return {"call": job[0], **outcome}

    with ThreadPoolExecutor(processes) as pool:
        yield from pool.map(run, jobs)


def _one(call: str, cache: Path, source: Path | None, prefix: tuple[str, ...] = ()) -> tuple[str, str]:
    """What the call's process wrote, with the FlashInfer below ``source`` if given; a hang is an answer too."""
    environment = dict(os.environ)
    if source is not None:
        environment["PYTHONPATH"] = f"{source}:{environment.get('PYTHONPATH', '')}"
        cache = source / "kernels"
    command = [*prefix, sys.executable, "-m", f"{__package__}.run", "one", call, "--cache", str(cache)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        return process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return output, f"Error: no end within {TIMEOUT_S} s"


def _sanitize(tool: str, call: str, fixed: Path | None, cache: Path) -> Finding:
    prefix = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kernel_substring=kernel_cutlass", "--print-limit", "100000"]
    if tool == "racecheck":
        prefix += ["--racecheck-report", "hazard"]
    words = "\n".join(_one(f"{call},lines,once", cache, fixed, tuple(prefix)))
    summary = re.findall(r"={9} ((?:RACECHECK|ERROR) SUMMARY: .*)", words)
    return Finding(tool, call, fixed is not None, summary[-1] if summary else words[-400:], dict(_places(words)))


def _places(words: str) -> Counter[str]:
    """Hazards by kind and pair of places; shared memory's address where the lines do not tell."""
    found: Counter[str] = Counter()
    for access, place in re.findall(r"={9} (Invalid __\w+__ \w+) of size.*\n={9}\s+at .*?\+0x\w+(?: in (\S+))?", words):
        found[f"{access} at {place}"] += 1
    for block in re.split(r"(?==========\s(?:Error|Warning): )", words):
        kind = re.search(r"(?:Error|Warning): (?:Potential )?(\w+ hazard) detected at __shared__ (0x\w+)", block)
        sides = re.findall(r"(Read|Write) Thread \((\d+),.*?\+0x\w+(?: in (\S+))?", block)
        if kind and len(sides) == 2:
            lines = ", ".join(f"{what.lower()} by warp {int(thread) // 32} at {where}" for what, thread, where in sides)
            if "moe_dispatch" in lines:
                lines = f"shared address {int(kind[2], 16) & ~3:#x}"
            found[f"{kind[1]}: {lines}"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cache", type=Path)
    parser.add_argument("folder", type=Path, help="for the mended copy of FlashInfer")
    parser.add_argument("out", type=Path)
    parser.add_argument("--other", type=Path, help="a folder that another version of flashinfer-python is unpacked in")
    given = parser.parse_args()
    fixed = mended_copy(given.folder)
    result: dict[str, list[dict[str, Any]]] = {}
    sections: dict[str, Iterator[dict[str, Any]]] = {"staggered": staggered(given.cache, fixed)}
    if given.other:
        sections["other version"] = _outcomes([(call, given.other) for call in _OTHER_VERSION], given.cache)
    sections["sanitizer"] = (asdict(found) for found in findings(given.cache, fixed))
    for name, rows in sections.items():
        for row in rows:
            result.setdefault(name, []).append(row)
            given.out.write_text(json.dumps(result, indent=1))
            print(
                name, *(str(row[key]) for key in ("call", "fixed", "error", "kernel_points", "summary") if key in row), flush=True
            )


if __name__ == "__main__":
    main()
