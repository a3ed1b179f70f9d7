"""What the package costs a process that starts, one that imports it, and a host that asks it: ``make bench``.

``--baseline COMMIT``, or ``--against FOLDER`` for another checkout: only the host time of a decode call, of both in one run.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import timeit
import venv
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.calls import ROOT, checked_out, compared
from tests import layers
from tests.checkpoints import random_experts
from tests.facts import GOOD
from trtllm_b12x.decision import Deployment, Environment, decide
from trtllm_b12x.formats.geometry import LayerShape

REPEATS = 15
PAIRS = 150


def seconds(code: str) -> float:
    """Median run time of an interpreter on ``code``."""
    run = [sys.executable, "-c", code]
    return statistics.median(timeit.repeat(lambda: subprocess.run(run, check=True), number=1, repeat=REPEATS))


def startup(pth: str, bytecode: bool) -> float:
    """CPU seconds that a ``.pth`` adds to an interpreter's start: median over pairs, with and without it, in either order.

    Without ``bytecode`` no .pyc file is found, as in an image built with ``pip install --no-compile``.
    """
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
            options = [] if bytecode else ["-B", "-X", f"pycache_prefix={directory}/none"]
            subprocess.run([pythons[name], *options, "-c", "pass"], check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        once("with")  # writes what bytecode there is to write
        added = []
        for pair in range(PAIRS):
            times = {name: once(name) for name in (pythons if pair % 2 else reversed(pythons))}
            added.append(times["with"] - times["without"])
        return statistics.median(added)


def compare(baseline: str | None, against: Path | None, file: Path | None) -> None:
    """Print what became of the host time of a decode call, and write it as JSON."""
    with nullcontext(against) if against is not None else checked_out(str(baseline)) as other:
        found = compared(other.absolute())
    for name, row in found.items():
        spread = f"quartiles {row['low']:.3f} and {row['high']:.3f}"
        print(f"{name}: {row['us']:.2f} us, before {row['us before']:.2f}, {row['ratio']:.3f} times that ({spread})")
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--baseline", metavar="COMMIT", help="of this repository")
    which.add_argument("--against", metavar="FOLDER", type=Path, help="another checkout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison's numbers")
    given = parser.parse_args()
    if given.baseline or given.against:
        compare(given.baseline, given.against, given.json)
        return
    for name, pth in (("trtllm_b12x.pth:", (ROOT / "trtllm_b12x.pth").read_text()), ("a comment in one:", "# nothing\n")):
        compiled, plain = (1e3 * startup(pth, bytecode) for bytecode in (True, False))
        print(f"{name:19} {compiled:6.2f} ms of CPU time at an interpreter's start, {plain:.2f} without .pyc files")
    nothing, ours, click = seconds("pass"), seconds("import trtllm_b12x"), seconds("import click")
    print(f"import trtllm_b12x: {1e3 * (ours - nothing):6.1f} ms beyond an empty interpreter")
    print(f"import click:       {1e3 * (click - nothing):6.1f} ms, for comparison")
    shape = LayerShape(
        quant_algo="NVFP4",
        group_size=16,
        dtype="bfloat16",
        activation="Swiglu",
        activation_constants=False,
        hidden_size=2048,
        intermediate_size=768,
        num_experts=128,
        top_k=8,
        bias=False,
    )
    for name, facts in (
        ("yes", GOOD),
        ("no, four reasons", Environment(enabled=False, sm=90, dsl="none", flashinfer="none")),
    ):
        number = 20_000
        best = min(timeit.repeat(lambda: decide(shape, Deployment(1), facts), number=number, repeat=5))  # noqa: B023
        print(f"decide ({name}): {1e6 * best / number:6.1f} us")
    backend = layers.load(layers.create(8, 128, 256), random_experts(8, 128, 256)).backend
    x, number = torch.zeros(1, 128, dtype=torch.bfloat16), 20_000
    for name, call in (
        ("is it a kernel's", lambda: backend._kernel_for(x)),
        ("are the addresses those that the kernel was given", lambda: backend.quant_method.addresses(backend)),
    ):
        best = min(timeit.repeat(call, number=number, repeat=5))
        print(f"each decode call, {name}: {1e9 * best / number:6.0f} ns")


if __name__ == "__main__":
    main()
