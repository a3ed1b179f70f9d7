# SPDX-License-Identifier: Apache-2.0
"""Measure what the package costs a process that starts, and a process that imports it: ``make bench``.

``--baseline COMMIT``, or ``--against FOLDER``, compares only the host time of a decode call with another checkout, in one run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import timeit
from contextlib import nullcontext
from pathlib import Path

from benchmarks.calls import ROOT, checked_out, compared

REPEATS = 100


def seconds(code: str) -> float:
    """Return the least run time of an interpreter on ``code``, in seconds."""
    run = [sys.executable, "-c", code]
    return min(timeit.repeat(lambda: subprocess.run(run, check=True), number=1, repeat=REPEATS))


def compare(baseline: str | None, against: Path | None) -> None:
    """Print the host time of a decode call, now and before."""
    with nullcontext(against) if against is not None else checked_out(str(baseline)) as other:
        found = compared(other.absolute())
    for name, row in found.items():
        spread = f"quartiles {row['low']:.3f} and {row['high']:.3f}"
        print(f"{name}: {row['us']:.2f} us, before {row['us before']:.2f}, {row['ratio']:.3f} times that ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--baseline", metavar="COMMIT", help="of this repository")
    which.add_argument("--against", metavar="FOLDER", type=Path, help="another checkout")
    given = parser.parse_args()
    if given.baseline or given.against:
        compare(given.baseline, given.against)
        return
    nothing = seconds("pass")
    for name, code in (("trtllm_b12x.pth", (ROOT / "trtllm_b12x.pth").read_text()), ("import trtllm_b12x", "import trtllm_b12x")):
        print(f"{name}: {1e3 * (seconds(code) - nothing):.2f} ms beyond an empty interpreter")


if __name__ == "__main__":
    main()
