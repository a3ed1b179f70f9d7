# SPDX-License-Identifier: Apache-2.0
"""Time whole MoE layers on our kernels, beside other kernels for the same experts and the card's bandwidth.

``python -m benchmarks.peers OUT`` on a GPU of capability 8.0 or newer (8.9 for MXFP8) writes OUT.json, OUT.md and, with
matplotlib, OUT.png. The defaults take at most 9 minutes; ``--help`` lists the rest.

Marlin and triton_kernels come from the installed vLLM, or from parts of its wheel: ``--parts WHEEL FOLDER`` extracts the parts,
``--vllm FOLDER`` uses them. Bytes are the codes and scales of the experts that are hit, each read once. A copy in the same run
measures the bandwidth, read plus written. ``trtllm-b12x tune`` measures TensorRT-LLM's own CUTLASS.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import require_gpu
from benchmarks.geometries import GEOMETRIES, MXFP4, MXFP8, W4A16
from benchmarks.on_card.steps import gpu_state, write_json, write_text
from benchmarks.peers import pages, parts, plots
from benchmarks.peers.layers import l2_bytes, measure_peer, stack
from benchmarks.peers.others import PEERS
from benchmarks.peers.ours import BOUND, GROUPED_QUANTIZATION, KERNELS, QUANTIZATION, SPLITS, Layers, measure, split
from trtllm_b12x.core.version import __version__
from trtllm_b12x.dispatch.timing import copy_bandwidth

LAYERS = {"nvfp4": GEOMETRIES, "w4a16_nvfp4": W4A16, "mxfp4": MXFP4, "mxfp8": MXFP8}
TOKENS = {
    "cuda": (1, 2, 4, 8, 16, 32, 64),
    "triton": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "gemm": (1, 16, 64, 128, 256, 1024, 4096),
    "grouped": (1, 16, 64, 128, 256, 1024, 4096),
}
SPLIT_TOKENS = (1, 8, 64)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="path of the results without suffix")
    parser.add_argument("--format", choices=list(KERNELS), default="nvfp4", help="default: %(default)s")
    parser.add_argument("--kernel", choices=list(TOKENS), nargs="+", help="default: all of the format; for nvfp4 cuda and triton")
    parser.add_argument("--geometry", action="append", help=f"default: all of the format; for nvfp4 {', '.join(pages.SHOWN)}")
    parser.add_argument("--split", action="append", choices=list(SPLITS), help="default: TP1; peers are measured on TP1 alone")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument(
        "--layers", type=int, default=64, help="at most; a graph needs those that four L2 caches hold (default: %(default)s)"
    )
    parser.add_argument(
        "--peer", choices=list(PEERS), nargs="*", default=list(PEERS), help="default: all; none with an empty list"
    )
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="parts of vLLM's wheel; default: the installed vLLM")
    parser.add_argument(
        "--seconds", type=float, default=500, help="begin no further kernel of a layer after this time (default: 500)"
    )
    parser.add_argument(
        "--parts", type=Path, nargs=2, metavar=("WHEEL", "FOLDER"), help="only take the parts out of vLLM's wheel"
    )
    parser.add_argument(
        "--plot", type=Path, nargs="+", metavar="FILE", help="only draw the last FILE, a PNG, of the others, JSON"
    )
    options = parser.parse_args()
    known = LAYERS[options.format]
    options.geometry = options.geometry or list(pages.SHOWN if options.format == "nvfp4" else known)
    if not {*options.geometry} <= known.keys():
        parser.error(f"--geometry: {options.format} has {', '.join(known)}")
    options.kernel = options.kernel or (list(pages.DECODE) if options.format == "nvfp4" else list(KERNELS[options.format]))
    if not {*options.kernel} <= KERNELS[options.format].keys():
        parser.error(f"--kernel: {options.format} has {', '.join(KERNELS[options.format])}")
    options.split = options.split or ["TP1"]
    if options.plot and len(options.plot) < 2:
        parser.error("--plot takes at least one JSON and the PNG")
    try:
        options.vllm = parts.find(options.vllm)
    except ValueError as error:
        parser.error(str(error))
    return options


def measure_ours(
    options: argparse.Namespace, name: str, part: str, layers: Any, copy: float, deadline: float
) -> Iterator[dict[str, Any]]:
    """Yield the lines of one layer."""
    whole = replace(LAYERS[options.format][name], format=options.format.upper())
    for family in options.kernel:
        counts = options.tokens or [n for n in TOKENS[family] if part == "TP1" or n in SPLIT_TOKENS]
        kernels = Layers(KERNELS[options.format][family], split(whole, *SPLITS[part]), layers, max(counts))
        for tokens in counts:
            if time.monotonic() > deadline:
                raise TimeoutError(f"stopped before {family} at {tokens} tokens; --seconds gives it longer")
            of = GROUPED_QUANTIZATION if family == "grouped" else QUANTIZATION
            facts = {"geometry": name, "kernel": family, "split": part, "tokens": tokens, "quantization": of[options.format]}
            yield {**facts, **measure(kernels, whole, tokens, copy)}


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """Return the conditions that every number depends on, and empty lists of results."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", "")
    copy = copy_bandwidth()
    state = next(iter(gpu_state(("driver_version", "clocks.sm", "clocks.mem"), f"GPU-{uuid}" if uuid else "")), {})
    driver = state.pop("driver_version", None)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "vllm": parts.version(options.vllm)}
    return {
        "gpu": torch.cuda.get_device_name(),
        "copy": copy,
        "l2_megabytes": l2_bytes() / 1e6,
        "clocks": {"after the copy": state},
        "versions": {**versions, "driver": driver, "trtllm-b12x": __version__},
        "format": options.format.upper(),
        "lines": [],
        **{peer: [] for peer in PEERS},
        "not_measured": [],
    }


def run(options: argparse.Namespace, results: dict[str, Any], deadline: float) -> Iterator[None]:
    """Add lines to ``results``; yield after each kernel of a layer, whether it was measured or failed."""
    for part in options.split:
        for name in options.geometry:
            whole = replace(LAYERS[options.format][name], format=results["format"])
            if time.monotonic() > deadline:
                results["not_measured"].append(f"{name}, {part}: no time was left; --seconds gives it longer")
                continue
            torch.cuda.empty_cache()
            try:
                layers: Any = stack(split(whole, *SPLITS[part]), options.layers)
                for line in measure_ours(options, name, part, layers, results["copy"], deadline):
                    results["lines"].append(line)
                    print(" | ".join(pages.row(line)), "WRONG" if line["error"] > BOUND else "", flush=True)
            except Exception as error:  # one kernel's failure must not stop the others
                results["not_measured"].append(f"ours, {name}, {part}: {_reason(error)}")
                print(results["not_measured"][-1], flush=True)
            yield
            for peer in options.peer if part == "TP1" else ():
                why = ""
                try:
                    why = PEERS[peer].lacks(whole, options.vllm)
                    if not why and time.monotonic() > deadline:
                        why = "no time was left; --seconds gives it longer"
                    counts = options.tokens or sorted({n for family in options.kernel for n in TOKENS[family]})
                    for found in measure_peer(PEERS[peer], whole, layers, counts) if not why else ():
                        results[peer].append({"geometry": name, **found})
                        print(f"{peer}, {name}: {found}", flush=True)
                        if time.monotonic() > deadline and found["tokens"] != counts[-1]:
                            raise TimeoutError(f"stopped after {found['tokens']} tokens; --seconds gives it longer")
                except Exception as error:  # a failure of the peer
                    why = _reason(error)
                if why:
                    results["not_measured"].append(f"{peer}, {name}: {why}")
                    print(results["not_measured"][-1], flush=True)
                torch.cuda.empty_cache()
                yield


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main() -> int:
    options = arguments()
    if options.parts:
        try:
            parts.take(*options.parts)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
    if options.plot:
        *files, target = options.plot
        try:
            if not plots.plot([json.loads(file.read_text(encoding="utf-8")) for file in files], target):
                raise ValueError("matplotlib is not installed")
        except (OSError, LookupError, TypeError, ValueError) as error:
            print(f"error: {target} cannot be drawn: {type(error).__name__}: {error}", file=sys.stderr)
            return 2
        return 0
    require_gpu()
    started = time.monotonic()
    results = facts(options)
    print(results, flush=True)
    for _ in run(options, results, started + options.seconds):
        results["seconds"] = round(time.monotonic() - started, 1)
        if options.out:
            write_json(options.out.with_suffix(".json"), results)
    text = pages.markdown(results)
    print(text)
    if options.out:
        write_json(options.out.with_suffix(".json"), results)
        write_text(options.out.with_suffix(".md"), text)
        if results["lines"] and not plots.plot([results], options.out.with_suffix(".png")):
            print("no plot: matplotlib is not installed")
    return 1 if any(line.startswith("ours") for line in results["not_measured"]) else 0


if __name__ == "__main__":
    sys.exit(main())
