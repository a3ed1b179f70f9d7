"""What the package costs a process that starts, and one that imports it: ``make bench``.

``--baseline COMMIT``, or ``--against FOLDER`` for another checkout: only the host time of a decode call, of both in one run.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import timeit
import venv
from contextlib import nullcontext
from pathlib import Path

from benchmarks.calls import ROOT, checked_out, compared

REPEATS = 15
PAIRS = 150


def seconds(code: str) -> float:
    """Median run time of an interpreter on ``code``."""
    run = [sys.executable, "-c", code]
    return statistics.median(timeit.repeat(lambda: subprocess.run(run, check=True), number=1, repeat=REPEATS))


def startup(pth: str) -> float:
    """CPU seconds that a ``.pth`` adds to an interpreter's start: median over pairs, with and without it, in either order."""
    with tempfile.TemporaryDirectory() as directory:
        pythons = {}
        for name in ("without", "with"):
            folder = Path(directory) / name
            venv.create(folder, with_pip=False, symlinks=True)
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "trtllm_b12x").symlink_to(ROOT / "trtllm_b12x")
            if name == "with":
                (site / "trtllm_b12x.pth").write_text(pth)
            pythons[name] = str(folder / "bin" / "python")

        def once(name: str) -> float:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([pythons[name], "-c", "pass"], check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        once("with")  # writes bytecode
        added = []
        for pair in range(PAIRS):
            times = {name: once(name) for name in (pythons if pair % 2 else reversed(pythons))}
            added.append(times["with"] - times["without"])
        return statistics.median(added)


def compare(baseline: str | None, against: Path | None) -> None:
    """Print what became of the host time of a decode call."""
    with nullcontext(against) if against is not None else checked_out(str(baseline)) as other:
        found = compared(other.absolute())
    for name, row in found.items():
        spread = f"quartiles {row['low']:.3f} and {row['high']:.3f}"
        print(f"{name}: {row['us']:.2f} us, before {row['us before']:.2f}, {row['ratio']:.3f} times that ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--baseline", metavar="COMMIT", help="of this repository")
    which.add_argument("--against", metavar="FOLDER", type=Path, help="another checkout")
    given = parser.parse_args()
    if given.baseline or given.against:
        compare(given.baseline, given.against)
        return
    for name, pth in (("trtllm_b12x.pth:", (ROOT / "trtllm_b12x.pth").read_text()), ("a comment in one:", "# nothing\n")):
        print(f"{name:19} {1e3 * startup(pth):6.2f} ms of CPU time at an interpreter's start")
    added = seconds("import trtllm_b12x") - seconds("pass")
    print(f"import trtllm_b12x: {1e3 * added:6.1f} ms beyond an empty interpreter")


if __name__ == "__main__":
    main()
