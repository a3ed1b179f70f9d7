"""Search tiles of the grouped products on this GPU.

``python -m benchmarks.grouped_tiles OUT`` writes OUT.json, every tile's time, and prints the best of each call: FC1's with FC2's
as the table has it, FC2's likewise, then the best of both together.  Those are rows for ``trtllm_b12x/kernels/grouped``, where
``tests/unittest/test_grouped_compiled.py`` says what SM120 can hold.  A minute, most of it to compile, in as many processes as
there are cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import require_gpu
from benchmarks.geometries import MXFP8, routes
from tests import mxfp8
from trtllm_b12x.dispatch.timing import graph_seconds
from trtllm_b12x.kernels.triton.grouped import GroupedKernel, Row, Tile

CALLS = (
    ("Qwen3-30B-A3B", 64),
    ("Qwen3-30B-A3B", 256),
    ("Qwen3-30B-A3B", 1024),
    ("Qwen3-30B-A3B", 4096),
    ("gemma-4-26B-A4B", 256),
    ("gemma-4-26B-A4B", 4096),
)
"""Layer and tokens: 4 to 256 routes of an expert."""
SHAPES = {
    "fc1": "16x32x128x2 16x64x64x4 16x64x128x4 16x128x64x4 32x32x128x2 32x64x64x4 32x64x128x4 32x128x64x4 32x128x64x8 "
    "64x64x64x4 64x64x128x4 64x128x64x4 64x128x64x8 64x128x128x8 64x256x64x8 128x64x64x4 128x64x64x8 128x64x128x8 "
    "128x128x64x8 256x64x64x8",
    "fc2": "16x64x128x2 16x128x64x4 16x128x128x4 16x256x64x4 32x64x128x2 32x128x64x4 32x128x128x4 32x256x64x8 "
    "64x64x64x4 64x64x128x4 64x128x64x4 64x128x64x8 64x256x64x8 128x64x64x4 128x64x64x8 128x64x128x8 128x128x64x4 "
    "128x128x64x8 128x256x64x8 256x128x64x8",
}
"""Routes, rows, columns and warps of those that are tried where Triton 3.6 compiles them for sm_90 without spills."""
STAGES = (3, 4)
LAYERS = 3
JOINED = 3


def tiles(product: str) -> Iterator[Tile]:
    for shape, stages in itertools.product(SHAPES[product].split(), STAGES):
        count, rows, columns, warps = map(int, shape.split("x"))
        yield Tile(count, rows, columns, warps, stages)


class Tried(GroupedKernel):
    """With tiles that it is told."""

    tried: Row | None = None

    def row(self, tokens: int) -> Row:
        return self.tried or super().row(tokens)


def compile_one(asked: tuple[str, str, Tile]) -> dict[str, Any]:
    """Into Triton's cache; what there is to know of it."""
    name, product, tile = asked
    kernel = GroupedKernel()
    kernel.describe(MXFP8[name], 4096, torch.device("cuda", 0))
    variant = kernel._fc1(tile) if product == "fc1" else kernel._fc2(tile)
    found: dict[str, Any] = {"geometry": name, "product": product, "tile": asdict(tile)}
    try:
        made = variant.warm_up()
        made._init_handles()
        return {**found, "registers": made.n_regs, "spills": made.n_spills, "shared": made.metadata.shared}
    except Exception as error:
        return {**found, "error": str(error)[:200]}


class Timed:
    """A call on several layers' weights."""

    def __init__(self, name: str, tokens: int, kernels: list[Tried]) -> None:
        geometry = MXFP8[name]
        self.kernels, self.table = kernels, GroupedKernel.row(kernels[0], tokens)
        self.routes = tokens * geometry.top_k // geometry.num_experts
        x, _, scales = mxfp8.random_call(geometry, tokens, device="cuda")
        self.calls = [(kernel, (x, routes(geometry, tokens, i).cuda(), scales)) for i, kernel in enumerate(kernels)]

    def worth(self, tile: Tile) -> bool:
        """It is not mostly empty, nor are there many of it for an expert."""
        return self.routes // 4 <= tile.routes <= max(16, 4 * self.routes)

    def us(self, fc1: Tile, fc2: Tile) -> float:
        """Of a layer; infinity where it does not fit the card."""
        for kernel in self.kernels:
            kernel.tried = Row(math.inf, fc1, fc2)
            kernel._plan.calls.clear()
        try:
            return 1e6 * graph_seconds(lambda: [kernel.run(*call) for kernel, call in self.calls], replays=3) / len(self.calls)
        except Exception:  # out of shared memory or registers
            torch.cuda.synchronize()
            return math.inf

    def error(self) -> float:
        """Relative L2 of the tiles tried last, from the same layer in torch with the same rounding points."""
        kernel, (x, ids, scales) = self.calls[0]
        yardstick = kernel.reference()
        yardstick.plan(kernel.geometry, x.shape[0], x.device)
        yardstick.bind(kernel.weights)
        expected = yardstick.run(x, ids, scales, out=torch.zeros(x.shape, device=x.device))
        return float((kernel.run(x, ids, scales).float() - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?")
    given = parser.parse_args()
    require_gpu()
    started = time.monotonic()
    plan = [
        (name, product, tile)
        for name in dict.fromkeys(name for name, _ in CALLS)
        for product in SHAPES
        for tile in tiles(product)
    ]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        compiled = list(pool.map(compile_one, plan, chunksize=2))
    fit = {ask for ask, made in zip(plan, compiled, strict=True) if made.get("spills") == 0}
    print(f"{len(plan)} kernels in {time.monotonic() - started:.0f} s, {len(fit)} without spills", flush=True)
    times: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for name, _ in CALLS):
        kernels = []
        for seed in range(LAYERS):
            kernel = Tried()
            kernel.plan(MXFP8[name], 4096, torch.device("cuda", torch.cuda.current_device()))
            kernel.bind(mxfp8.random_weights(MXFP8[name], "cuda", seed))
            kernels.append(kernel)
        for tokens in (tokens for called, tokens in CALLS if called == name):
            call = Timed(name, tokens, kernels)
            fc1, fc2 = call.table.fc1, call.table.fc2
            print(f"{name}, {tokens} tokens: {call.us(fc1, fc2):.0f} us by the table, {fc1}, {fc2}", flush=True)
            best: dict[str, list[Tile]] = {}
            for product in SHAPES:
                own = [tile for tile in tiles(product) if (name, product, tile) in fit and call.worth(tile)]
                found = [(call.us(tile, fc2) if product == "fc1" else call.us(fc1, tile), tile) for tile in own]
                times += [{"geometry": name, "tokens": tokens, product: asdict(tile), "us": us} for us, tile in found]
                best[product] = [tile for _, tile in sorted(found, key=lambda pair: pair[0])[:JOINED]]
            pairs = [(call.us(*pair), *pair) for pair in itertools.product(best["fc1"], best["fc2"])]
            times += [{"geometry": name, "tokens": tokens, "fc1": asdict(a), "fc2": asdict(b), "us": us} for us, a, b in pairs]
            for us, a, b in sorted(pairs, key=lambda pair: pair[0])[:3]:
                print(f"    {us:.0f} us: {a}, {b}", flush=True)
            print(f"    {call.error():.5f} from torch", flush=True)
        del kernels
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - started:.0f} s in all")
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.with_suffix(".json").write_text(json.dumps({"compiled": compiled, "times": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
