"""Kernels compiled ahead of time: seconds of the processor until all is compiled, and that a server's plans then take.

``python -m benchmarks.warmup OUT [SET ...]`` prints a table and writes OUT.json for Qwen3-30B-A3B on an RTX 5090, without a GPU.
One process compiles into empty caches; a start is a plan from those, on a card that is stood in for, without compilers
(``tests/warm_start.py``, which needs namespaces).
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
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


def compiled(form: str, kernels: str, variables: dict[str, str]) -> tuple[int, float]:
    """Number of kernels, and seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "trtllm_b12x", "warmup", *SIZES, "--format", form, "--target", "sm_120a", "--card", "170"]
    result = subprocess.run(
        [*command, "--jobs", "1", "--json"],
        env={**os.environ, **variables, "TRTLLM_B12X_KERNELS": kernels},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise RuntimeError(result.stderr[-2000:])
    [target] = json.loads(result.stdout)["targets"]
    return sum(row["compiled"] for row in target["rows"]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def measured(name: str) -> dict[str, Any]:
    form, families = SETS[name]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        variables = {
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "FLASHINFER_WORKSPACE_BASE": str(folder),
            "FLASHINFER_CUDA_ARCH_LIST": "12.0",
            "XDG_CACHE_HOME": str(folder / "xdg"),
            "TRITON_LIBCUDA_PATH": warm_start.LIBCUDA,
        }
        number, seconds = compiled(form, ",".join(families), variables)
        asked = [{**GEOMETRY, "format": form.upper(), "family": f, "capacity": n} for f, n in families.items()]
        started = [warm_start.start(warm_start.driver(folder), asked, CARD, variables) for _ in range(3)]
    faults = [plan["error"] for plans in started for plan in plans if plan["error"] or plan["compiled"]]
    if faults:
        raise RuntimeError(f"a start compiled, or failed: {faults}")
    planned = statistics.median(sum(plan["cpu"] for plan in plans) for plans in started)
    return {"kernels": name, "number": number, "compiled in s": round(seconds, 1), "planned in s": round(planned, 2)}


def main() -> None:
    rows = [measured(name) for name in (sys.argv[2:] or SETS)]
    print(*table(list(rows[0]), [list(row.values()) for row in rows]), sep="\n")
    versions = {name: metadata.version(name) for name in ("triton", "flashinfer-python", "nvidia-cutlass-dsl")}
    results = {"versions": versions, "geometry": GEOMETRY, "card": CARD, "rows": rows}
    Path(sys.argv[1]).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
