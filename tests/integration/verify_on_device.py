"""A real export of nvidia-modelopt, verified by the command line on a GPU that has neither modelopt nor the package's own needs.

``python -m tests.integration.verify_on_device prepare FOLDER`` exports an MXFP8 Qwen3-MoE, or with ``--model minimax-m3`` another
one, and copies what the command line needs; ``run FOLDER OUT``, with FOLDER carried to the GPU, writes OUT.json and exits with 1
where a number is beyond :data:`BOUND`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BOUND = 0.005
"""Relative L2 from the strict reference with the kernels' rounding points."""
RANKS = ((1, 1), (2, 1), (1, 3))
"""TP and EP."""
TOKENS = (1, 63, 64, 300, 1024, 4096)
_NEEDED = ("click", "filelock", "markdown_it", "mdurl", "packaging", "pygments", "rich", "safetensors")
"""Pure Python, or built for any Python from 3.8 on."""


def prepare(folder: Path, model: str) -> None:
    from .exports import export, minimax_m3, qwen3_moe

    shutil.rmtree(folder, ignore_errors=True)
    made = minimax_m3(num_local_experts=12, intermediate_size=192) if model == "minimax-m3" else qwen3_moe(num_experts=12)
    export(made, folder, form="mxfp8")
    for name in _NEEDED:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        shutil.copytree(Path(found.origin).parent, folder / "site" / name, ignore=shutil.ignore_patterns("__pycache__"))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 1e6:.0f} MB")


def verified(folder: Path, device: str, tokens: str, tp: int, ep: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "trtllm_b12x", "verify", str(folder / "mxfp8"), "--require-b12x", "--device", device]
        options = ["--tokens", tokens, "--tp", str(tp), "--ep", str(ep), "--json", str(report)]
        # What the machine has comes before what was carried.
        paths = [path for path in (*sys.path, str(folder / "site")) if path]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        started = time.monotonic()
        result = subprocess.run([*command, *options], env=variables, capture_output=True, text=True)
        print(result.stdout + result.stderr, flush=True)
        found = json.loads(report.read_text()) if report.exists() else {"layers": []}
        return {**found, "exit": result.returncode, "seconds": round(time.monotonic() - started, 1)}


def run(folder: Path, out: Path, device: str, tokens: str) -> int:
    import torch
    import triton

    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else "none"
    reports = {f"TP{tp} EP{ep}": verified(folder, device, tokens, tp, ep) for tp, ep in RANKS}
    cases = [(name, case) for name, report in reports.items() for layer in report["layers"] for case in layer["cases"]]
    worst = max((case["rel_l2_kernel"] for _, case in cases), default=float("inf"))
    failed = {name: report["exit"] for name, report in reports.items() if report["exit"]}
    for name, case in cases:
        print(f"{name}, {case['tokens']} tokens, {case['path']}: {case['rel_l2_kernel']:.5f}")
    facts = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "worst": worst, "failed": failed}
    print(facts)
    out = out.with_suffix(".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**facts, "reports": reports}, indent=1) + "\n")
    return 1 if failed or worst > BOUND else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_subparsers(dest="what", required=True)
    here = what.add_parser("prepare")
    here.add_argument("folder", type=Path)
    here.add_argument("--model", default="qwen3-moe", choices=["qwen3-moe", "minimax-m3"])
    there = what.add_parser("run")
    there.add_argument("folder", type=Path)
    there.add_argument("out", type=Path)
    there.add_argument("--device", default="cuda")
    there.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    given = parser.parse_args()
    if given.what == "prepare":
        prepare(given.folder, given.model)
    else:
        sys.exit(run(given.folder, given.out, given.device, given.tokens))


if __name__ == "__main__":
    main()
