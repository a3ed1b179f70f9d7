"""Search tiles of the Triton kernels on this GPU.

``python -m benchmarks.moe_tiles OUT`` writes OUT.json, every tile's time, and prints rows for
``trtllm_b12x/kernels/triton/tiles.py``: for each number of routes in a block the tile with the least time over all geometries
relative to the best of each.  FC1's and FC2's are searched apart, the other's as the rule has it.  The defaults take 8 minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import require_gpu
from benchmarks.moe_decode import GEOMETRIES, graph_seconds, routes, stack
from tests.nvfp4_layer import random_call
from trtllm_b12x.kernels.triton import TritonKernel
from trtllm_b12x.kernels.triton.tiles import Row, Tile, Tiles, fitted

CANDIDATES: dict[int, tuple[Tile, ...]] = {
    count: tuple(
        Tile(rows, columns, warps, stages)
        for rows, columns, warps, stages in itertools.product((16, 32, 64), (128, 256), (1, 2, 4), (3, 4, 6))
        # A warp takes 16 rows or 32; more routes than that spill in narrow tiles.
        if 16 * warps <= rows <= 32 * warps and not (count >= 32 and (rows < 64 or columns > 128))
    )
    for count in (8, 16, 32)
}
TOKENS = {8: (1, 4, 16, 64), 16: (64, 128), 32: (256,)}
"""Of a call, by how many routes a block has."""


def seconds(kernels: list[TritonKernel], calls: list[Any], tokens: int, found: Tiles) -> float:
    """Of a layer; infinity where it does not fit the card."""
    for kernel in kernels:
        kernel.set_tiles(tokens, found)
    try:
        return graph_seconds(lambda: [kernels[i].run(*call) for i, call in calls], replays=3) / len(calls)
    except Exception:  # out of shared memory or registers
        torch.cuda.synchronize()
        return math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--geometry", action="append", choices=list(GEOMETRIES), default=None)
    parser.add_argument("--routes", type=int, action="append", choices=list(CANDIDATES), default=None)
    parser.add_argument("--seconds", type=float, default=540)
    given = parser.parse_args()
    require_gpu()
    deadline = time.monotonic() + given.seconds
    times: list[dict[str, Any]] = []
    names = given.geometry or ["Qwen3-30B-A3B", "Nemotron-3-Super"]
    for name in names:
        geometry = GEOMETRIES[name]
        layers = stack(geometry, 4)
        kernels = []
        for layer in layers:
            kernel = TritonKernel()
            kernel.plan(geometry, 1, torch.device("cuda", torch.cuda.current_device()))
            kernel.bind(layer.kernel_weights(), 0, layer.epilogue)
            kernels.append(kernel)
        for count in given.routes or list(CANDIDATES):
            for tokens, which in itertools.product(TOKENS[count], ("fc1", "fc2")):
                x, _, scales = random_call(geometry, tokens, device="cuda")
                calls = [(i, (x, routes(geometry, tokens, geometry.num_experts, False, i), scales)) for i in range(len(kernels))]
                rule = replace(kernels[0].step(tokens).tiles, routes=count)
                inner = geometry.hidden_size if which == "fc1" else geometry.intermediate_size
                for tile in dict.fromkeys(fitted(tile, inner) for tile in CANDIDATES[count]):
                    if time.monotonic() > deadline:
                        break
                    took = seconds(kernels, calls, tokens, replace(rule, fc1=tile) if which == "fc1" else replace(rule, fc2=tile))
                    line = {"geometry": name, "routes": count, "tokens": tokens, "product": which, "us": 1e6 * took}
                    times.append({**line, "tile": asdict(tile)})
                    print(*line.values(), tile, flush=True)
        del kernels, layers
        torch.cuda.empty_cache()
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.with_suffix(".json").write_text(json.dumps(times, indent=1) + "\n")
    for count in CANDIDATES:
        best = {which: best_of([t for t in times if t["routes"] == count and t["product"] == which]) for which in ("fc1", "fc2")}
        if all(best.values()):
            print(f"        {Row({8: 5.0, 16: 11.0}.get(count, math.inf), count, Tile(**best['fc1']), Tile(**best['fc2']))},")


def best_of(times: list[dict[str, Any]]) -> dict[str, int]:
    """The tile whose times are the least multiples of the best of their call, on the geometric mean."""
    least: dict[tuple[str, int], float] = defaultdict(lambda: math.inf)
    for line in times:
        call = (line["geometry"], line["tokens"])
        least[call] = min(least[call], line["us"])
    ratios: dict[Any, list[float]] = defaultdict(list)
    for line in times:
        ratios[tuple(line["tile"].items())].append(line["us"] / least[line["geometry"], line["tokens"]])
    most = max(map(len, ratios.values()), default=0)
    found = {tile: math.prod(r) ** (1 / len(r)) for tile, r in ratios.items() if len(r) == most}
    return dict(min(found, key=lambda tile: found[tile])) if found else {}


if __name__ == "__main__":
    main()
