"""Search tiles of the Triton kernels on this GPU.

``python -m benchmarks.moe_tiles OUT`` writes OUT.json, every tile's time, and prints the best of each call: FC1 and FC2 apart,
the other's as the rule has it, then the best of both together, which are rows for ``trtllm_b12x/kernels/triton/tiles.py``.
``--calls`` narrows it; the defaults take some 8 minutes on 16 cores, most of them to compile, in as many processes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import SAME, require_gpu
from benchmarks.geometries import GEOMETRIES, MXFP8, routes
from benchmarks.moe_decode import stack
from tests import mxfp8
from tests.nvfp4_layer import distance, random_call
from trtllm_b12x.dispatch.timing import graph_seconds
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.triton.decode import TritonKernel
from trtllm_b12x.kernels.triton.decode_mxfp8 import TritonMXFP8Kernel
from trtllm_b12x.kernels.triton.decode_tiles import Tile, Tiles

CALLS: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("Qwen3-30B-A3B", 1, (1,)),
    ("Qwen3-30B-A3B", 2, (1,)),
    ("Qwen3-30B-A3B", 4, (1,)),
    ("Qwen3-30B-A3B", 8, (1, 8)),
    ("Qwen3-30B-A3B", 16, (8,)),
    ("Qwen3-30B-A3B", 64, (8,)),
    ("Nemotron-3-Super", 1, (1,)),
    ("Nemotron-3-Super", 2, (1,)),
    ("Nemotron-3-Super", 8, (8,)),
    ("Nemotron-3-Super", 32, (8,)),
    ("gpt-oss-120b-like", 1, (1,)),
    ("gpt-oss-120b-like", 2, (1,)),
    ("gpt-oss-120b-like", 8, (1, 8)),
    ("gpt-oss-120b-like", 64, (8,)),
    ("DeepSeek-like", 1, (1,)),
    ("DeepSeek-like", 16, (8,)),
    ("Qwen3-30B-A3B", 128, (16,)),
    ("Nemotron-3-Super", 256, (16,)),
)
"""Layer, tokens, and how many routes a block may have."""
MXFP8_CALLS: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("Qwen3-30B-A3B", 1, (1,)),
    ("Qwen3-30B-A3B", 8, (8,)),
    ("Qwen3-30B-A3B", 64, (8,)),
    ("gemma-4-26B-A4B", 1, (1,)),
    ("gemma-4-26B-A4B", 4, (1, 8)),
    ("gemma-4-26B-A4B", 8, (1, 8)),
    ("gemma-4-26B-A4B", 32, (8,)),
    ("MiniMax-M3, TP 8", 1, (1,)),
    ("MiniMax-M3, TP 8", 2, (1,)),
    ("MiniMax-M3, TP 8", 4, (1,)),
    ("MiniMax-M3, TP 8", 8, (1, 8)),
)
KERNEL = {"fc1": "fc1_kernel", "fc2": "fc2_kernel", "token": "fc2_token_kernel"}
PRODUCTS = tuple(KERNEL)
LAYERS = 6
JOINED = 4
"""So many of FC1's best are tried with as many of FC2's."""


@dataclass(frozen=True)
class Candidate:
    """One product's tile in one call, the other product's as the rule has it."""

    geometry: str
    tokens: int
    routes: int
    product: str
    tile: Tile


@dataclass(frozen=True)
class Format:
    """What is searched."""

    kind: type[TritonKernel]
    geometries: dict[str, Geometry]
    calls: tuple[tuple[str, int, tuple[int, ...]], ...]


FORMATS = {
    "nvfp4": Format(TritonKernel, GEOMETRIES, CALLS),
    "mxfp8": Format(TritonMXFP8Kernel, MXFP8, MXFP8_CALLS),
}


def candidates(form: Format, calls: tuple[tuple[str, int, tuple[int, ...]], ...]) -> Iterator[Candidate]:
    for (name, tokens, blocks), product in itertools.product(calls, PRODUCTS):
        geometry = form.geometries[name]
        parts = {"fc1": 1 + geometry.gated, "fc2": 1, "token": 8}[product]
        if product == "token":
            blocks = (1,) * (1 in blocks and geometry.top_k <= 8)
        for count in blocks:
            splits = (1, 2, 4, 8) if count == 1 and product != "token" else (1,)
            for split in splits:
                for tile in _tiles(count, parts, split):
                    if tile.scales_by_four(form.kind.word, 8 if product == "token" else 1):
                        yield Candidate(name, tokens, count, product, tile)


def _tiles(count: int, parts: int, split: int) -> Iterator[Tile]:
    """``parts`` times ``split`` the rows of a tile are a product's: gate's and up's, or those of eight experts."""
    for rows, columns, warps, stages in itertools.product((16, 32, 64, 128), (128, 256), (1, 2, 4, 8), (2, 3, 4, 6)):
        # A warp takes 16 rows or 32 of each product; more routes than eight spill in narrow or wide tiles.
        if parts * split * rows not in (16 * warps, 32 * warps, 64 * warps) or (
            count > 8 and (columns > 128 or parts * rows == 16 * warps)
        ):
            continue
        # What would keep less than one tile on its way, or more than shared memory has.
        if stages == 2 or (stages == 6 and columns == 256) or (parts * split * rows == 256 and columns == 256):
            continue
        yield Tile(rows, columns, warps, stages, split)


def with_tile(tiles: Tiles, asked: Candidate) -> Tiles:
    own = {"fc1": tiles.fc1, "fc2": tiles.fc2, asked.product: asked.tile}
    token = tiles.token if asked.product == "fc1" else own.get("token")
    return Tiles(asked.routes, own["fc1"], own["fc2"], token)


def compile_one(form: Format, asked: Candidate) -> None:
    """Into Triton's cache; what does not compile is left out when its turn comes."""
    kernel = form.kind()
    kernel.describe(form.geometries[asked.geometry], asked.tokens, torch.device("cuda", 0))
    tiles = with_tile(kernel.build.step(asked.tokens).tiles, asked)
    step = kernel.build.step(asked.tokens, tiles)
    for v in kernel.build.variants(step, step.inline):
        if v.name == KERNEL[asked.product]:
            try:
                v.warm_up()
            except Exception as error:
                print(f"{asked}: {error}"[:300], flush=True)


class Timed:
    """A call on several layers' weights."""

    def __init__(self, kernels: list[TritonKernel], tokens: int) -> None:
        geometry = kernels[0].geometry
        self.kernels, self.tokens = kernels, tokens
        self.expected: torch.Tensor | None = None
        """What the first tiles gave, which are the rule's."""
        x, _, scales = random_call(geometry, tokens, device="cuda")
        self.calls = [(k, (x, routes(geometry, tokens, i).cuda(), scales)) for i, k in enumerate(kernels)]

    def us(self, tiles: Tiles) -> float:
        """Of a layer; infinity where it does not fit the card, or computes something else than the rule's."""
        for kernel in self.kernels:
            kernel.set_tiles(self.tokens, tiles)
        try:
            result = self.kernels[0].run(*self.calls[0][1]).float()
            self.expected = result if self.expected is None else self.expected
            if not distance(result, self.expected) < SAME:
                print(f"WRONG: {tiles}", flush=True)
                return math.inf
            return 1e6 * graph_seconds(lambda: [kernel.run(*call) for kernel, call in self.calls], replays=3) / len(self.calls)
        except Exception:  # out of shared memory or registers
            torch.cuda.synchronize()
            return math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--format", choices=list(FORMATS), default="nvfp4")
    parser.add_argument("--calls", type=int, nargs="+", help="places in CALLS (MXFP8_CALLS)", default=None)
    given = parser.parse_args()
    require_gpu()
    form = FORMATS[given.format]
    if not {*(given.calls or ())} <= {*range(len(form.calls))}:
        parser.error(f"--calls: {given.format} has 0 to {len(form.calls) - 1}")
    started = time.monotonic()
    calls = form.calls if given.calls is None else tuple(form.calls[place] for place in given.calls)
    plan = list(candidates(form, calls))
    # Calls that differ in their number of tokens alone have kernels in common.
    distinct = {replace(c, tokens=c.tokens * form.geometries[c.geometry].top_k <= 64): c for c in plan}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(functools.partial(compile_one, form), distinct.values(), chunksize=2))
    print(f"{len(distinct)} kernels in {time.monotonic() - started:.0f} s", flush=True)
    times: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for name, *_ in calls):
        geometry = form.geometries[name]
        if form.kind.word == 4:
            layers: list[Any] = [mxfp8.random_weights(geometry, "cuda", seed) for seed in range(LAYERS)]
        else:
            layers = [layer.kernel_weights() for layer in stack(geometry, LAYERS)]
        kernels = []
        for layer in layers:
            kernel = form.kind()
            kernel.plan(geometry, 1, torch.device("cuda", torch.cuda.current_device()))
            kernel.bind(layer)
            kernels.append(kernel)
        for tokens, blocks in [(tokens, blocks) for called, tokens, blocks in calls if called == name]:
            call, rule = Timed(kernels, tokens), kernels[0].build.step(tokens).tiles
            print(f"{name}, {tokens} tokens: {call.us(rule):.1f} us by the rule, {rule}", flush=True)
            best: dict[tuple[int, str], list[tuple[float, Tile]]] = defaultdict(list)
            for asked in [c for c in plan if (c.geometry, c.tokens) == (name, tokens)]:
                us = call.us(with_tile(rule, asked))
                best[asked.routes, asked.product].append((us, asked.tile))
                times.append({**asdict(asked), "us": us})
            joint = []
            for count in blocks:
                fc1, fc2, token = (sorted(best[count, product], key=lambda pair: pair[0])[:JOINED] for product in PRODUCTS)
                joint += [Tiles(count, a, b) for (_, a), (_, b) in itertools.product(fc1, fc2)]
                joint += [Tiles(count, a, fc2[0][1], b) for (_, a), (_, b) in itertools.product(fc1, token)]
            found = sorted(((call.us(tiles), tiles) for tiles in joint), key=lambda pair: pair[0])
            for us, tiles in found[:3]:
                print(f"    {us:.1f} us: {tiles}", flush=True)
        del kernels, layers
        torch.cuda.empty_cache()
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.with_suffix(".json").write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
