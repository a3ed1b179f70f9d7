# SPDX-License-Identifier: Apache-2.0
"""The package's kernels for SM12x on a Hopper GPU, every form that a card of the list may take: numbers, to JSON.

``python -m tests.integration.sm12x_on_hopper.own_run measure OUT.json [NAME ...]`` runs the layers of these names and adds their
rows to the file, one set for each Triton and target (``--sm``). It exits with 1 if a number is beyond its bound.
``... mutate OUT.json`` breaks each replaced instruction in turn. ``... start OUT.json [CARD ...]`` starts layers on cards of the
list, from empty caches and from those that ``warmup`` filled. ``python -m benchmarks.results --take FILE`` keeps the file.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.geometries import GEOMETRIES, MXFP4, W4A16
from benchmarks.geometries import MXFP8 as OF_MXFP8
from benchmarks.results import beyond_bounds
from benchmarks.warmup import CARDS
from tests.integration.test_kernels_device import BOUNDS, KINDS, TOKENS, bounds_of, built, weights_of
from tests.nvfp4_layer import INPUT_SCALE, distance, worst_token
from trtllm_b12x.core import process
from trtllm_b12x.dispatch.timing import router_logits
from trtllm_b12x.formats.geometry import Scoring
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.call import of_logits
from trtllm_b12x.kernels.cards import MODELS, SHARED_MEMORY, Card
from trtllm_b12x.kernels.cuda import nvrtc
from trtllm_b12x.kernels.scoring import routes_of
from trtllm_b12x.tools.cli import main as cli
from trtllm_b12x.tools.verify.reference_formats import move_off_ties

from .build import MUTATION
from .own import card_on_hopper

CUDA = torch.device("cuda", 0)
FAMILIES = ("grouped", "triton", "cuda")
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 31, 33, 64, 100, 128, 200, 256, 300, 700, 1024, 2048, 4096)
RANKS = 4
SMALL = Geometry(16, 4, 512, 256, "Swiglu")
MUTATIONS = {
    ("NVFP4", "nothing"): ("", ""),
    ("MXFP8", "nothing"): ("", ""),
    ("NVFP4", "another byte of the scales"): ("(2u * half + ((lane & 3u) >> 1))", "(2u * half + 1u - ((lane & 3u) >> 1))"),
    ("NVFP4", "the scales of another column"): ("sfb, first + tid_b)", "sfb, (first ^ 4u) + tid_b)"),
    ("NVFP4", "rows' scales exchanged"): ("sfa, first + 2u * tid_a + 1u)", "sfa, (first ^ 4u) + 2u * tid_a + 1u)"),
    ("NVFP4", "codes of a pair exchanged"): (
        "encode_e2m1(high) << 4 | encode_e2m1(low)",
        "encode_e2m1(low) << 4 | encode_e2m1(high)",
    ),
    ("MXFP8", "another byte of the scales"): (">> (8u * byte_a) & 0xFFu", ">> (8u * (byte_a ^ 1u)) & 0xFFu"),
    ("MXFP8", "the scales of another column"): ("4u * (column + (i & 1u)) + tid_b", "4u * (column + (~i & 1u)) + tid_b"),
    ("MXFP8", "rows' scales exchanged"): ("2u * tid_a + (i >> 1))", "2u * tid_a + (~i >> 1 & 1u))"),
    ("MXFP8", "the halves of a pair of float32 exchanged"): ("{d0, d1};", "{d1, d0};"),
}
"""Format, and what is broken: a place of ``instructions.cu`` or of translated PTX, and what stands there instead."""


def layers() -> dict[str, list[Geometry]]:
    """Return the layers by name: with NVFP4 and MXFP8, and in the format that their owners run; that also for a rank of four."""
    found: dict[str, list[Geometry]] = {}
    for name, g in {**GEOMETRIES, "gemma-4-26B-A4B": OF_MXFP8["gemma-4-26B-A4B"]}.items():
        if name != "DeepSeek-like":
            found[name.removesuffix("-like")] = [g, replace(g, bias=None, format="MXFP8")]
    for name, g in (W4A16 | MXFP4).items():
        found[name].append(g)
    for name, of in list(found.items()):
        g = of[0] if name == "Nemotron-3-Super" else of[-1]
        found[f"{name}, EP {RANKS}"] = [replace(g, num_experts=g.num_experts // RANKS, ranks=RANKS)]
    return found


def row(name: str, geometry: Geometry, family: str) -> dict[str, Any] | None:
    """Run every form of a family that a card may take, at those of ``COUNTS`` that it serves; even and skewed routes by turns.

    The self-test before it has each form at its fewest and its most tokens. A geometry with a scoring gets router logits.

    Returns:
        None if the family does not serve the layer.
    """
    if (family, geometry.format) not in KINDS:
        return None
    kind, capacity = KINDS[family, geometry.format], TOKENS[family][-1]
    multiprocessors = sorted({count for cards in MODELS.values() for count in cards.values()}, reverse=True)
    try:
        cards = list(differing(kind, geometry, capacity, multiprocessors))
    except ValueError:
        return None
    weights, first_expert = weights_of(geometry), geometry.num_experts * (geometry.ranks - 1)
    yardstick, from_ids = kind.reference(), replace(geometry, scoring=None)
    yardstick.plan(from_ids, capacity, CUDA)
    yardstick.bind(weights, first_expert)
    off_ties = family == "grouped" and geometry.format == "NVFP4"
    calls = {n: _drawn(geometry, n, turn % 2 == 1, off_ties) for turn, n in enumerate(COUNTS)}
    expected: dict[int, torch.Tensor] = {}
    done: set[str] = set()
    codes: set[str] = set()
    errors: list[tuple[float, float]] = []
    ran = 0
    for card in cards:
        kernel = kind(card)
        kernel.plan(geometry, capacity, CUDA)
        kernel.bind(weights, first_expert)
        kernel.self_test()
        codes |= _codes(kernel)
        for label, form in kernel.forms().items():
            if label in done:
                continue
            done.add(label)
            for n in COUNTS:
                if n > capacity or not form.serves(n):
                    continue
                routed, logits = calls[n]
                call = routed if geometry.scoring is None else of_logits(routed.x, logits)
                if n not in expected:
                    expected[n] = yardstick.run(routed._replace(out=torch.zeros(call.x.shape, device=CUDA)))
                first = form.run(call)
                assert all(torch.equal(form.run(call), first) for _ in range(2)), (name, family, label, n)
                errors.append((distance(first, expected[n]), worst_token(first, expected[n])))
                ran += 3
                if n > 1:
                    _beside_nan(form, call, first)
                    ran += 1
    found = {"layer": name, "format": geometry.format, "family": family + ", logits" * (geometry.scoring is not None)}
    worst, token = torch.tensor(errors).amax(0).tolist()  # NaN if one is
    digest = hashlib.sha256("".join(sorted(codes)).encode()).hexdigest()[:12]
    bound, token_bound = bounds_of((family, geometry.format))
    numbers = {"error": worst, "bound": bound, "token error": token, "token bound": token_bound}
    return {**found, "forms": len(done), "kernels": len(codes), "digest": digest, "calls": ran, **numbers}


def differing(kind: Any, geometry: Geometry, capacity: int, multiprocessors: Iterable[int]) -> Iterator[Card]:
    """Yield the cards of the list that add a kernel."""
    seen: set[Any] = set()
    for count in multiprocessors:
        kernel = kind(Card(count, SHARED_MEMORY, 120))
        kernel.describe(geometry, capacity, CUDA)
        keys = {getattr(variant, "key", variant) for variant in kernel.variants()}
        if not keys <= seen:
            yield kernel.card
        seen |= keys


def _codes(kernel: Any) -> set[str]:
    """Return a digest of each machine code of a plan: identical code counts once."""
    if hasattr(kernel._plan, "functions"):
        contents = [variant.cached(kernel.target) for variant in kernel.variants()]
    else:
        contents = [made.asm["cubin"] for made in kernel._plan.compiled.values()]
    return {hashlib.sha256(content).hexdigest() for content in contents}


def _drawn(geometry: Geometry, tokens: int, skewed: bool, off_ties: bool) -> tuple[MoECall, torch.Tensor]:
    """Draw a call, and the logits that its routes come from."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, geometry.hidden_size, device=CUDA, generator=generator).to(geometry.dtype)
    logits = router_logits(geometry, tokens, tokens, skewed).to(CUDA)
    logits[-1, -1] = logits[-1].max() + 1  # the last token has a route on the last rank
    routes = routes_of(geometry.scoring or Scoring(), geometry.top_k, logits)
    return MoECall(move_off_ties(x, INPUT_SCALE[0]) if off_ties else x, *routes), logits


def _beside_nan(form: Any, call: MoECall, first: torch.Tensor) -> None:
    """A token that is not a number leaves the others as they are."""
    x = call.x.clone()
    x[-1] = torch.nan
    after = form.run(call._replace(x=x))
    assert torch.equal(after[:-1], first[:-1])
    assert after[-1].isnan().all()


def measure(out: Path, names: list[str], sm: int, families: list[str]) -> None:
    """Add rows to ``out``, layer by layer; what is there of others stays.

    Raise SystemExit, with each number that is beyond its bound, after the last layer.
    """
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    target, triton = f"sm_{sm}a", versions()["triton"]
    added = []
    with card_on_hopper(torch.cuda.get_device_properties(0).multi_processor_count, sm):
        for name in names or layers():
            of = layers()[name]
            scored = replace(of[-1], scoring=Scoring())
            rows = []
            for geometry, family in (*product(of, FAMILIES), (scored, "cuda")):
                line = row(name, geometry, family) if family in families else None
                process.forget()
                gc.collect()
                torch.cuda.empty_cache()
                if line is not None:
                    compiler = {"nvrtc": nvrtc.version()} if family == "cuda" else {"triton": triton}
                    rows.append({**line, **compiler, "target": target, "gpu": torch.cuda.get_device_name()})
                    print(rows[-1], flush=True)
            _add(result, rows)
            added += rows
            out.write_text(json.dumps(result | versions(), indent=1))
    _refuse_wrong_numbers({"own": added})


def _add(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Put rows in the place of those of the same layer, target, family and Triton."""

    def place(line: dict[str, Any]) -> tuple[str, ...]:
        triton = "" if line["family"].startswith("cuda") else line["triton"]
        return line["layer"], line["target"], line["format"], line["family"], triton

    places = set(map(place, rows))
    result["own"] = [line for line in result.get("own", []) if place(line) not in places] + rows


def _refuse_wrong_numbers(found: dict[str, Any]) -> None:
    wrong = beyond_bounds(found)
    if wrong:
        sys.exit("\n".join(("wrong numbers:", *wrong)))


def measure_beside(out: Path, names: list[str], sm: int, families: list[str], processes: int) -> None:
    """As :func:`measure`, with a process for each layer, ``processes`` at a time, which share this machine's CPUs and GPUs."""
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    cpus, gpus = sorted(os.sched_getaffinity(0)), torch.cuda.device_count()
    shares = [cpus[i::processes] or cpus for i in range(processes)]
    free, failed = list(range(processes)), []

    def of_a_layer(name: str) -> tuple[int, dict[str, Any]]:
        place = free.pop()
        os.sched_setaffinity(0, shares[place])  # of this thread: the process that it starts inherits it
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / "part.json"
            command = [sys.executable, "-m", __spec__.name, "measure", str(part), name, "--sm", str(sm), "--families", *families]
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(place % gpus)}
            status = subprocess.run(command, env=env, check=False).returncode
            free.append(place)
            return status, json.loads(part.read_text()) if part.exists() else {}

    with ThreadPoolExecutor(processes) as pool:
        for name, (status, part) in zip(names, pool.map(of_a_layer, names), strict=True):
            if status and not part:
                failed.append(f"{name}: its process ended with {status}")
            _add(result, part.get("own", []))
            out.write_text(json.dumps(result | versions(), indent=1))
    if failed:
        sys.exit("\n".join(failed))
    _refuse_wrong_numbers({"own": [line for line in result["own"] if line["layer"] in names and line["target"] == f"sm_{sm}a"]})


def mutate(out: Path) -> None:
    """Add the error of ``grouped`` with each instruction broken, on a small layer, in a process each, four at a time."""
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}

    def error(form: str, change: tuple[str, str]) -> float:
        command = [sys.executable, "-m", __spec__.name, "small", "-", form]
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "XDG_CACHE_HOME": folder} | ({MUTATION: " => ".join(change)} if any(change) else {})
            return float(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])

    with ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(error, (form for form, _ in MUTATIONS), MUTATIONS.values()))
    of = zip(MUTATIONS, errors, strict=True)
    result["mutations"] = [{"format": form, "what": what, "error": e, "bound": BOUNDS["grouped"]} for (form, what), e in of]
    print(*result["mutations"], sep="\n", flush=True)
    out.write_text(json.dumps(result | versions(), indent=1))
    _refuse_wrong_numbers({"mutations": result["mutations"]})


def small(form: str) -> None:
    """Print the worst error of ``grouped`` on a small layer."""
    with card_on_hopper(48):
        geometry = replace(SMALL, format=form)
        kernel = KINDS["grouped", form](Card(48, SHARED_MEMORY, 120))
        weights = weights_of(geometry)
        pair = kernel, kernel.reference()
        for each in pair:
            each.plan(geometry, 256, CUDA)
            each.bind(weights)
        errors = []
        for tokens in (1, 33, 256):
            call, _ = _drawn(geometry, tokens, False, form == "NVFP4")
            wanted = pair[1].run(call._replace(out=torch.zeros(call.x.shape, device=CUDA)))
            errors.append(distance(kernel.run(call), wanted))
        print(max(errors))


def start(out: Path, names: list[str]) -> None:
    """Add what a first start on a card is like: a process each for an empty cache, for what that left, and for a filled one."""
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    result["starts"] = [line for line in result.get("starts", []) if line["card"] not in (names or CARDS)]
    for name, form in product(names or CARDS, ("NVFP4", "MXFP8")):
        with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as filled:
            for what, folder in (("empty", empty), ("second", empty), ("warmup", filled), ("filled", filled)):
                env = {**os.environ, "XDG_CACHE_HOME": folder, "TRTLLM_B12X_CROSSOVER": "auto"}
                env["TRTLLM_B12X_KERNELS"] = "cuda,triton,grouped"
                command = [sys.executable, "-m", __spec__.name, "once", what, name, form]
                said = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
                result["starts"].append({"card": name, "format": form, "caches": what, **json.loads(said.splitlines()[-1])})
                print(result["starts"][-1], flush=True)
                out.write_text(json.dumps(result | versions(), indent=1))


def once(what: str, name: str, form: str) -> None:
    """Start one layer on a card, or fill the cache for it; print seconds, what was said, and what serves."""
    sm, multiprocessors = CARDS[name]
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trtllm_b12x").addHandler(handler)
    with card_on_hopper(multiprocessors, sm):
        torch.zeros(1, device=CUDA)
        begun = time.monotonic()
        if what == "warmup":
            sizes = ["--hidden", "512", "--intermediate", "256", "--experts", "16", "--top-k", "4", "--format", form.lower()]
            arguments = [*sizes, "--activation", "swiglu", "--target", f"sm_{sm}a", "--card", str(multiprocessors)]
            assert cli.main(["warmup", *arguments], standalone_mode=False) in (None, 0)
            print(json.dumps({"seconds": round(time.monotonic() - begun, 2)}))
            return
        module, _ = built(form, size=256)
        loaded = time.monotonic()
        x, logits = torch.randn(8, 512, device=CUDA).bfloat16(), torch.randn(8, 16, device=CUDA)
        module(x, logits)  # measures, and waits for what a measurement needs
        measured, first = time.monotonic(), module(x, logits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = module(x, logits)
        kept.fill_(torch.nan)
        graph.replay()
        schedule = module.backend.schedule
        summary, families = schedule.schedule.summary, list(schedule.families)
        seconds = {"load": round(loaded - begun, 2), "first call": round(measured - loaded, 2)}
        same = torch.equal(kept, first)
        print(json.dumps({"seconds": seconds, "families": families, "serves": summary, "captured": same, "warnings": said}))


def versions() -> dict[str, str]:
    import triton

    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"gpu": torch.cuda.get_device_name(), "date": today, "triton": triton.__version__, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("measure", "mutate", "start", "small", "once"))
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="layers; of small, a format")
    parser.add_argument("--sm", type=int, choices=(120, 121), default=120, help="of measure: the card's architecture")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="of measure: default all")
    parser.add_argument("--processes", type=int, default=1, help="of measure: how many layers at a time")
    given = parser.parse_args()
    if given.what == "measure" and given.processes > 1:
        measure_beside(given.out, given.names or list(layers()), given.sm, given.families, given.processes)
    elif given.what == "measure":
        measure(given.out, given.names, given.sm, given.families)
    elif given.what == "mutate":
        mutate(given.out)
    elif given.what == "start":
        start(given.out, given.names)
    elif given.what == "once":
        once(str(given.out), *given.names)
    else:
        small(given.names[0])


if __name__ == "__main__":
    main()
