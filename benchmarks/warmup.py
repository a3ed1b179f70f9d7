# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU seconds to compile all kernels ahead of time, and the CPU seconds of a server's plans afterwards.

``python -m benchmarks.warmup OUT [CARD ...]`` writes OUT.json for Qwen3-30B-A3B on cards of the list, without a GPU. One process
compiles into empty caches. A start then plans from these caches, on a simulated card without compilers
(``tests/warm_start.py``), and its log is kept.
"""

from __future__ import annotations

import argparse
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

from tests import warm_start

GEOMETRY = {"num_experts": 128, "top_k": 8, "hidden_size": 2048, "intermediate_size": 768, "activation": "Swiglu"}
SIZES = ("--experts", "128", "--top-k", "8", "--hidden", "2048", "--intermediate", "768")
CARDS = {"RTX PRO 6000": (120, 188), "RTX 5090": (120, 170), "GB10": (121, 48)}
"""Capability and multiprocessors."""
OURS = {"cuda": 64, "triton": 256, "gemm": 8192, "grouped": 8192}
SETS = (("NVFP4", OURS), ("NVFP4", {"b12x": 128}), ("MXFP8", OURS))
"""Format, and families in the order of their plans with the tokens that a server plans for."""


def compiled(form: str, kernels: str, card: tuple[int, int], variables: dict[str, str]) -> tuple[dict[str, int], float]:
    """Compile all kernels. Return their number by family, and CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "trtllm_b12x", "warmup", *SIZES, "--format", form.lower(), "--jobs", "1", "--json"]
    result = subprocess.run(
        [*command, "--target", f"sm_{card[0]}a", "--card", str(card[1])],
        env={**os.environ, **variables, "TRTLLM_B12X_KERNELS": kernels},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise RuntimeError(result.stderr[-2000:])
    [target] = json.loads(result.stdout)["targets"]
    numbers: dict[str, int] = {}
    for row in target["rows"]:
        numbers[row["family"]] = numbers.get(row["family"], 0) + row["compiled"] + row["cached"]
    return numbers, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def measured(card: str, form: str, families: dict[str, int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        variables = {
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "FLASHINFER_WORKSPACE_BASE": str(folder),
            "FLASHINFER_CUDA_ARCH_LIST": "12.0",
            "XDG_CACHE_HOME": str(folder / "xdg"),
            "TRITON_LIBCUDA_PATH": warm_start.LIBCUDA,
        }
        numbers, seconds = compiled(form, ",".join(families), CARDS[card], variables)
        asked = [{**GEOMETRY, "format": form, "family": f, "capacity": n} for f, n in families.items()]
        there = dict(zip(("capability", "multiprocessors"), CARDS[card], strict=True))
        started = [warm_start.start(warm_start.driver(folder), asked, there, variables) for _ in range(3)]
    faults = [plan["error"] for plans in started for plan in plans if plan["error"] or plan["compiled"]]
    if faults:
        raise RuntimeError(f"a start compiled, or failed: {faults}")
    planned = statistics.median(sum(plan["cpu"] for plan in plans) for plans in started)
    said = [line for plan in started[0] for line in plan["said"]]
    row = {"card": card, "format": form, "kernels": {name: numbers[name] for name in families}}
    return {**row, "compiled in s": round(seconds, 1), "planned in s": round(planned, 2), "said": said}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warmup", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="file of the results, without its suffix")
    parser.add_argument("cards", nargs="*", metavar="CARD", help=f"{', '.join(CARDS)}; default: all")
    given = parser.parse_args()
    if unknown := set(given.cards) - set(CARDS):
        parser.error(f"CARD {unknown.pop()!r}: choose from {', '.join(CARDS)}")
    rows = []
    for card in given.cards or CARDS:
        for form, families in SETS:
            if "b12x" not in families or card == "RTX 5090":
                rows.append(measured(card, form, families))
                print(rows[-1], flush=True)
    versions = {name: metadata.version(name) for name in ("triton", "flashinfer-python", "nvidia-cutlass-dsl")}
    given.out.with_suffix(".json").write_text(
        json.dumps({"versions": versions, "geometry": GEOMETRY, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
