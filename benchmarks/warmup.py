"""Kernels compiled ahead of time: how long, in how many processes, and what a server's start then takes.

``python -m benchmarks.warmup OUT [SET ...]`` writes OUT.json and OUT.md for Qwen3-30B-A3B on an RTX 5090, without a GPU.  One
process and one for each core take turns, from empty caches; a start is a plan from those, on a card that is stood in for, without
compilers (``tests/warm_start.py``, which needs namespaces).  The processor's time, and the cores that are free in the end, tell
what other work of the machine has cost.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests import warm_start

GEOMETRY = {"num_experts": 128, "top_k": 8, "hidden_size": 2048, "intermediate_size": 768, "activation": "Swiglu"}
SIZES = ("--experts", "128", "--top-k", "8", "--hidden", "2048", "--intermediate", "768")
CARD = {"capability": 120, "multiprocessors": 170}
SETS = {
    "triton": ("nvfp4", {"triton": 256}),
    "b12x": ("nvfp4", {"b12x": 128}),
    "grouped": ("nvfp4", {"grouped": 8192}),
    "mxfp8": ("mxfp8", {"triton": 256, "grouped": 4096}),
}
"""Name to the format, and families with the tokens that a server plans for."""
TURNS = int(os.environ.get("TURNS", "2"))


def compiled(form: str, kernels: str, jobs: int, variables: dict[str, str]) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    started = time.monotonic()
    command = [sys.executable, "-m", "trtllm_b12x", "warmup", *SIZES, "--format", form, "--target", "sm_120a", "--card", "170"]
    result = subprocess.run(
        [*command, "--jobs", str(jobs), "--json"],
        env={**os.environ, **variables, "TRTLLM_B12X_KERNELS": kernels},
        capture_output=True,
        text=True,
    )
    wall = time.monotonic() - started
    if result.returncode:
        raise RuntimeError(result.stderr[-2000:])
    [target] = json.loads(result.stdout)["targets"]
    user = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    kernels = sum(row["compiled"] for row in target["rows"])
    return {"jobs": jobs, "command": wall, "wall": target["seconds"], "user": user, "kernels": kernels}


def measured(name: str, cores: int) -> dict[str, Any]:
    form, families = SETS[name]
    runs: dict[int, list[dict[str, float]]] = {1: [], cores: []}
    for _ in range(TURNS):
        for jobs, found in runs.items():
            with tempfile.TemporaryDirectory() as text:
                folder = Path(text)
                variables = {
                    "TRTLLM_B12X_CROSSOVER": "auto",  # benchmarks have another
                    "TRITON_CACHE_DIR": str(folder / "triton"),
                    "FLASHINFER_WORKSPACE_BASE": str(folder),
                    "FLASHINFER_CUDA_ARCH_LIST": "12.0",
                    "XDG_CACHE_HOME": str(folder / "xdg"),
                    "TRITON_LIBCUDA_PATH": warm_start.LIBCUDA,
                }
                found.append(compiled(form, ",".join(families), jobs, variables))
                asked = [{**GEOMETRY, "format": form.upper(), "family": f, "capacity": n} for f, n in families.items()]
                started = [warm_start.start(warm_start.driver(folder), asked, CARD, variables) for _ in range(3)]
    faults = [plan["error"] for plans in started for plan in plans if plan["error"] or plan["compiled"]]
    if faults:
        raise RuntimeError(f"a start compiled, or failed: {faults}")
    warm, warm_cpu = (statistics.median(sum(plan[of] for plan in plans) for plans in started) for of in ("seconds", "cpu"))
    imports = statistics.median(plans[0]["imports"] for plans in started)
    best = {jobs: min(found, key=lambda run: run["wall"]) for jobs, found in runs.items()}
    speedup = best[1]["wall"] / best[cores]["wall"]
    return {
        "set": name,
        "runs": [run for found in runs.values() for run in found],
        "speedup": speedup,
        "warm": warm,
        "warm_cpu": warm_cpu,
        "imports": imports,
    }


def cores_left(cores: int) -> float:
    """How many of the machine's cores other work leaves: that of so many loops at once over one's."""

    def taken(loops: int) -> float:
        started = time.monotonic()
        running = [subprocess.Popen([sys.executable, "-c", "sum(range(60_000_000))"]) for _ in range(loops)]
        for process in running:
            process.wait()
        return time.monotonic() - started

    return cores * taken(1) / taken(cores)


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| kernels | number | one process s | user s | all cores s | user s | times | start s | cpu s | imports s |",
        f"|{' --- |' * 10}",
    ]
    for row in rows:
        one, all_ = (
            min((run for run in row["runs"] if (run["jobs"] == 1) is single), key=lambda run: run["wall"])
            for single in (True, False)
        )
        numbers = (
            one["wall"],
            one["user"],
            all_["wall"],
            all_["user"],
            row["speedup"],
            row["warm"],
            row["warm_cpu"],
            row["imports"],
        )
        lines.append(f"| {row['set']} | {one['kernels']} | {' | '.join(f'{number:.2f}' for number in numbers)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    rows = [measured(name, cores) for name in (sys.argv[2:] or SETS)]
    left = cores_left(cores)
    print(f"{markdown(rows)}\n{left:.2f} of {cores} cores were free")
    out = Path(sys.argv[1])
    out.with_suffix(".json").write_text(json.dumps({"cores": cores, "cores_left": left, "rows": rows}, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(rows))


if __name__ == "__main__":
    main()
