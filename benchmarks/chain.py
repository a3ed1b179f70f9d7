# SPDX-License-Identifier: Apache-2.0
"""Time what an engine runs for a MoE layer of a decode step: RMSNorm, router product, top-k, experts.

The one-launch kernel (``cuda``) takes router logits, so its chain does not need top-k. Both chains run in turn, in captured
graphs over more layers than fit in the L2 cache, with programmatic overlap between all launches.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import require_gpu
from benchmarks.geometries import GEOMETRIES
from benchmarks.markdown import table
from benchmarks.peers.layers import stack
from benchmarks.peers.ours import KERNELS, Layers
from tests.nvfp4_layer import distance
from trtllm_b12x.core import disk
from trtllm_b12x.dispatch.timing import graph_seconds
from trtllm_b12x.formats.geometry import Scoring
from trtllm_b12x.kernels import Geometry, MoECall, driver
from trtllm_b12x.kernels.call import of_logits
from trtllm_b12x.kernels.cuda import nvrtc, variant

_TURNS, _REPLAYS, _MOST_LAYERS = 5, 9, 12
_MOST_TOKENS = 8
_SOURCE = Path(__file__).with_suffix(".cu")
_CALL = struct.Struct("PPPPPi4x")
NORM, ROUTER, TOP_K = "rms_norm", "router", "top_k"


class _Fixed(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("residual", "router")),
        *((name, ctypes.c_int) for name in ("hidden", "experts", "top_k")),
    )


def files() -> dict[str, str]:
    """Return the sources of the kernels around the experts, and the header that they include, by file name."""
    return {_SOURCE.name: _SOURCE.read_text(encoding="utf-8"), "ptx.cuh": variant.sources()["ptx.cuh"]}


class Chain:
    """The layers of a chain, for calls of ``tokens`` tokens."""

    def __init__(self, geometry: Geometry, weights: Sequence[Any], tokens: int) -> None:
        g, self.tokens = geometry, tokens
        kind = KERNELS[g.format.lower()]["cuda"]
        self.from_ids = Layers(kind, g, weights, tokens).kernels
        self.from_logits = Layers(kind, replace(g, scoring=Scoring()), weights, tokens).kernels
        generator, count = torch.Generator("cuda").manual_seed(0), len(self.from_ids)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda").bfloat16()

        self.residuals = [drawn(_MOST_TOKENS, g.hidden_size) for _ in range(count)]
        self.routers = [drawn(g.num_experts, g.hidden_size) / g.hidden_size**0.5 for _ in range(count)]
        self.x, self.out = drawn(tokens, g.hidden_size), torch.zeros(tokens, g.hidden_size, dtype=torch.bfloat16, device="cuda")
        self.logits = torch.zeros(tokens, g.num_experts, device="cuda")
        self.ids = torch.zeros(tokens, g.top_k, dtype=torch.int32, device="cuda")
        self.weights = torch.zeros(tokens, g.top_k, device="cuda")
        major, minor = torch.cuda.get_device_capability()
        cubin, _ = nvrtc.compiled(_SOURCE.name, files(), f"sm_{major}{minor}a")
        blocks = {NORM: tokens, ROUTER: g.num_experts, TOP_K: 1}
        module = driver.Module(cubin)
        functions = {name: driver.Function(module, name) for name in blocks}
        fixed = [
            _Fixed(residual.data_ptr(), router.data_ptr(), g.hidden_size, g.num_experts, g.top_k)
            for residual, router in zip(self.residuals, self.routers, strict=True)
        ]
        self._launches = [{name: functions[name].launcher(blocks[name], each, _CALL) for name in blocks} for each in fixed]

    def around(self, layer: int, name: str) -> None:
        """Launch a kernel ahead of a layer's experts."""
        source = self.out if name == NORM else self.x
        tensors = source, self.x, self.logits, self.ids, self.weights
        stream = torch.cuda.current_stream().cuda_stream
        self._launches[layer][name](stream, *(tensor.data_ptr() for tensor in tensors), self.tokens)

    def run(self, names: Sequence[str], experts: Sequence[Any] | None) -> None:
        for layer in range(len(self.from_ids)):
            for name in names:
                self.around(layer, name)
            if experts is not None:
                if experts is self.from_logits:
                    call = of_logits(self.x, self.logits, out=self.out)
                else:
                    call = MoECall(self.x, self.ids, self.weights, out=self.out)
                experts[layer].run(call)

    def forms(self) -> dict[str, Callable[[], None]]:
        """Return the timed variants by name."""
        return {
            "norm, router": lambda: self.run((NORM, ROUTER), None),
            "norm, router, top-k, experts": lambda: self.run((NORM, ROUTER, TOP_K), self.from_ids),
            "norm, router, experts from logits": lambda: self.run((NORM, ROUTER), self.from_logits),
            "experts": lambda: self.run((), self.from_ids),
            "experts from logits": lambda: self.run((), self.from_logits),
        }

    def check(self) -> float:
        """Return the distance between both chains' outputs. Raise ValueError if a kernel around the experts is wrong."""
        forms, outputs = self.forms(), []
        for name in list(forms)[1:3]:
            self.out.zero_()
            forms[name]()
            outputs.append(self.out.float())
        residual = self.residuals[-1][: self.tokens].float()
        x = residual * (residual.square().mean(1, keepdim=True) + 1e-6).rsqrt()
        logits = self.x.float() @ self.routers[-1].float().T
        weights, ids = logits.softmax(1).topk(self.ids.shape[1], dim=1)
        wrong = [
            name
            for name, found, right in (
                (NORM, self.x.float(), x),
                (ROUTER, self.logits, logits),
                (TOP_K, self.weights, weights / weights.sum(1, keepdim=True)),
                (TOP_K, self.ids.float(), ids.float()),
            )
            if not distance(found, right) < 0.01
        ]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} of the last layer: numbers differ from torch's")
        return distance(outputs[1], outputs[0])


def measure(geometry: Geometry, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Return for each token count: microseconds per layer of each variant, and the distance between both chains' outputs."""
    weights, lines = stack(geometry, _MOST_LAYERS), []
    for count in tokens:
        chain = Chain(geometry, weights, count)
        difference = chain.check()
        times: dict[str, list[float]] = {name: [] for name in chain.forms()}
        for _ in range(_TURNS):
            for name, run in chain.forms().items():
                times[name].append(1e6 * graph_seconds(run, _REPLAYS) / len(weights))
        us = {name: statistics.median(values) for name, values in times.items()}
        lines.append({"tokens": count, "us": us, "difference": difference})
        said = ", ".join(f"{name} {value:.2f} us" for name, value in us.items())
        print(f"{count} tokens: {said}", file=sys.stderr, flush=True)
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chain", description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="JSON file of the results")
    layers = [name for name, g in GEOMETRIES.items() if g.hidden_size in range(256, 4097, 256) and g.num_experts <= 512]
    parser.add_argument("--geometry", choices=layers, default="Qwen3-30B-A3B", help="layer (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", choices=range(1, _MOST_TOKENS + 1), default=[1, 2, 4, 8])
    given = parser.parse_args(arguments)
    require_gpu()
    lines = measure(GEOMETRIES[given.geometry], given.tokens)
    found = {"gpu": torch.cuda.get_device_name(), "geometry": given.geometry, "lines": lines}
    disk.replace(given.out, json.dumps(found, indent=1).encode())
    titles = ["tokens", *lines[0]["us"], "difference"]
    rows = [[line["tokens"], *(f"{us:.1f}" for us in line["us"].values()), f"{line['difference']:.4f}"] for line in lines]
    print("\n".join(table(titles, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
