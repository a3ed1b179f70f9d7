# SPDX-License-Identifier: Apache-2.0
"""Compilations of ``layer.cu``: sizes that fit a multiprocessor, and the cache of cubins."""

from __future__ import annotations

import contextlib
import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from trtllm_b12x.core import disk, settings
from trtllm_b12x.environment import triton
from trtllm_b12x.formats import BY_TURNS, ROWS, Format
from trtllm_b12x.formats.geometry import Scoring
from trtllm_b12x.kernels import Geometry, PlanError
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.layer_tensors import ACTIVATIONS, ORDERS
from trtllm_b12x.kernels.plans import OwnKernel

from . import nvrtc

_SOURCE = "layer.cu"
TOKENS = (1, 2, 4, 8, 64)
"""Maximum number of tokens of each variant. A call takes the first variant that holds it."""
_COLUMNS = 8  # columns of a product; calls of more tokens gather an expert's routes
_SHARED_MEMORY = 99 << 10  # bytes per block on SM12x
_RING = 75 << 10  # bytes of weights in flight per multiprocessor: more did not help on an H200, and the rest holds sums
_WARPS = 20  # maximum number of warps that read: with 20 a thread has 80 registers, with 16 it has 96
_TASKS = 120  # minimum number of tasks of FC1 and of FC2, so that every multiprocessor of a large card has one
MOST_BLOCKS = 256
"""Maximum number of blocks of a launch. A block has room for as many virtual blocks."""
_MAX_TOP_K = 32
MOST_SCORED = 512
"""Maximum number of experts whose logits a warp compares."""
_BIASES = (None, torch.bfloat16, torch.float16, torch.float32)  # in the order of the values of BIAS in matrix.cuh
_SCORING = ("softmax", "sigmoid", "sigmoid_tanh")  # in the order of the values of SCORING in scoring.cuh
SPIN_SECONDS = 30
"""Seconds that a block may wait for other warps and blocks. Then the kernel traps."""


@dataclass(frozen=True)
class Compilation:
    """A kernel's source and its cached cubin."""

    name: str
    source: str

    def files(self) -> dict[str, str]:
        """Return the source and all headers, by name."""
        return _texts(self.source, "ptx.cuh")

    def compile(self, target: str) -> tuple[bytes, str]:
        """Compile for ``target`` (``sm_120a``). Return the cubin and the compiler's log."""
        return nvrtc.compiled(self.source, self.files(), target)

    def assembled(self, target: str) -> str:
        """Compile for ``target``, assembler included, and return the PTX."""
        self.compile(target)
        return self.compile(target.replace("sm", "compute"))[0].decode()

    def file(self, target: str) -> Path:
        """Return the cubin's path in Triton's cache folder, which images are built with."""
        text = repr((sorted(self.files().items()), target))
        name = f"{target}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.cubin"
        return triton.cache_folder() / "trtllm_b12x" / name

    def cached(self, target: str) -> bytes | None:
        try:
            return disk.owned_bytes(self.file(target))
        except (OSError, ValueError):
            return None


@dataclass(frozen=True)
class Variant(Compilation):
    tokens: int
    sizes: tuple[tuple[str, float], ...]
    """Constants of ``sizes.cuh``, by name."""

    def files(self) -> dict[str, str]:
        sizes = [f"constexpr {type(value).__name__} {name} = {str(value).lower()};\n" for name, value in self.sizes]
        return {**sources(self.source), "sizes.cuh": "#pragma once\n" + "".join(sizes)}


class NvrtcKernel(OwnKernel):
    target: str
    """Architecture that the kernel is compiled for (``sm_120a``)."""

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)

    @abstractmethod
    def variants(self) -> tuple[Variant, ...]: ...

    def describe(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        super().describe(geometry, capacity, device)
        self.target = f"sm_{self.card.capability}a"

    @classmethod
    def assembled(cls, geometry: Geometry, card: Card, directory: Path) -> Iterator[str]:
        kernel = cls(card)
        kernel.describe(geometry, TOKENS[-1], torch.device("cuda"))
        return (variant.assembled(kernel.target) for variant in kernel.variants()[:1])  # the others are the same source

    def summary(self) -> tuple[str, ...]:
        return (*super().summary(), *self._pending())


def _texts(*names: str) -> dict[str, str]:
    """Return files of this folder, by name."""
    return {name: (Path(__file__).parent / name).read_text(encoding="utf-8") for name in names}


def sources(source: str = _SOURCE) -> dict[str, str]:
    """Return the files that all variants of a source share, by name."""
    return _texts(source, *(path.name for path in Path(__file__).parent.glob("*.cuh")))


def variants(g: Geometry, form: Format, subnormals: bool = True) -> tuple[Variant, ...]:
    """Return the variants for a layer's calls: those of ``TOKENS`` that pay.

    ``subnormals``: whether mma.sync multiplies bfloat16 subnormals. Variants whose FC2 goes by slices depend on this.
    Raise ValueError if the kernel does not take a size or the layout.
    """
    check_sizes(g, form)
    if g.top_k > _MAX_TOP_K:
        raise ValueError(f"one launch takes at most {_MAX_TOP_K} experts a token, not {g.top_k}")
    if g.scoring is not None and g.scoring.kind == "softmax" and g.scoring.bias:
        raise ValueError("one launch does not take a bias with softmax: it is not known whether logits or probabilities get it")
    if g.scoring is not None and g.num_experts * g.ranks > MOST_SCORED:
        raise ValueError(f"one launch takes the logits of at most {MOST_SCORED} experts, not {g.num_experts * g.ranks}")
    taken = [tokens for tokens in TOKENS if tokens <= _most_apart(g) or tokens > _COLUMNS]
    found = [_variant(g, form, tokens, subnormals) for tokens in taken]
    if found[-1] is None:
        raise ValueError(f"one launch of {taken[-1]} tokens at {g.hidden_size} x {g.intermediate_size} needs more shared memory")
    return tuple(variant for variant in found if variant is not None)  # a larger variant serves instead


def check_sizes(g: Geometry, form: Format) -> None:
    """Raise ValueError if the kernels do not take a size, the layout or the dtype."""
    tiled, by_turns = g.layout.scales != ROWS, g.layout.fc1 == BY_TURNS
    # 64 rows: gate's rows follow up's rows. 64 columns: with gate/up interleaved, rows of scales begin at even addresses.
    rows, columns = 64 if tiled else 32, 64 if by_turns and form.group_size == 32 else 32
    if g.intermediate_size % rows or g.stored_hidden % columns or (tiled and by_turns):
        sizes = f"{g.hidden_size} x {g.intermediate_size}, {g.layout.fc1}, scales in {g.layout.scales}"
        raise ValueError(f"cuda does not take {sizes}")
    if g.dtype is torch.float16 and form.group_size != 16:
        raise ValueError(f"cuda takes {g.format} in bfloat16, not float16: E8M0 scales have a larger range")


def _most_apart(g: Geometry) -> int:
    """Return the maximum number of tokens of calls whose tokens are the columns of every product; larger calls gather.

    On an H100, gathering is faster if a warp has several blocks of columns or a token has many experts. With and without it,
    Nemotron-3-Super takes 202 and 228 us at 8 tokens, but 113 and 101 at 4. In MXFP8, gemma-4-26B-A4B takes 130 and 142.
    MiniMax-M3 takes 50 and 61 at 4 tokens, Qwen3-30B-A3B 64 and 60 at 8 tokens, then without slices.
    """
    return 1 if g.stored_hidden > 32 * 128 else 4 if g.stored_hidden > 16 * 128 or g.top_k > 16 else _COLUMNS


def _slices(tokens: int, bits: int) -> bool:
    """Return whether the columns of FC2's products are slices of one token's columns, see ``slices.cuh``.

    On an H100, Qwen3-30B-A3B at 8 tokens takes 58.3 us with slices and 58.6 without. At 2 tokens, it takes 31.8 and 32.7 in
    MXFP8, but 22.3 and 21.8 in FP4. gpt-oss-120b at 2 tokens takes 54.0 and 51.3.
    """
    return tokens == 1 or (tokens <= _COLUMNS and (bits == 8 or tokens == _COLUMNS))


def _variant(g: Geometry, form: Format, tokens: int, subnormals: bool) -> Variant | None:
    """Return the variant for calls of up to ``tokens`` tokens, or None if its blocks need too much shared memory."""
    bits, gather = form.code_bits, tokens > _COLUMNS
    # Warps that share FC1's columns, in blocks of 128 each, and rows of such warps. Each token has a warp that reads its routes.
    blocks = -(-g.stored_hidden // 128)
    split = -(-blocks // -(-blocks // (16 if gather else _WARPS)))
    fewest, most = (1, 8) if gather else (-(-_COLUMNS // split), 4)
    parts = max(fewest, min(most, 16 // split))
    warps = split * parts
    parts2 = _parts_of_fc2(warps, -(-g.intermediate_size // 128)) if gather else 1
    # Tiles in a task of FC1. On an H100 gpt-oss-120b (I 2944) takes 589 us at 64 tokens with 8 and 600 with 4. Qwen3-30B-A3B
    # (I 768) takes 92.7 at 16 tokens with 8 and 88.5 with 4: a multiprocessor gets too few of the longer tasks.
    tasks = [1]
    if gather and split * 2 >= blocks:
        tasks = [max(1, most // parts) for most in ((8, 4) if g.gated and g.intermediate_size >= 2048 else (4,))]
    # Qwen3-30B-A3B on an H100 takes 35.6 us with two warps that add and 37.5 with three at 4 tokens, 14.2 and 14.1 at one.
    adders, buffers = (2, 2) if tokens > 2 else (3, 6)
    entries = 8 if tokens == 1 else 16
    narrow = tokens == 1 and bits == 4 and g.stored_hidden < 16 * _TASKS  # FC2 has few tiles of 16 rows, so tiles have 8
    units = -(-g.intermediate_size // (256 if narrow else 128)) if tokens == 1 else 0  # of a route in FC2
    # Halves per stage of FC1 and of FC2, stages of FC1 in flight, halves in a warp's ring.
    choices = [(2, 2, 2, 4), (1, 1, 4, 4), (1, 1, 3, 3), (1, 1, 2, 2)]
    tall = tokens * g.top_k * g.intermediate_size >= (16 if g.gated else 32) * _TASKS  # FC1 has enough tiles of 32 rows
    if tokens == 1 and bits == 8:  # Qwen3-30B-A3B takes 18.0 us on an H100; 18.4 with two such stages, 18.5 with one of 32 rows
        choices = [(1, 1, 1, 2)]
    elif tokens == 1:  # one stage is in flight: each request waits for less
        choices = [(2, 1, 1, 4), (2, 1, 1, 2)] if tall else [(1, 1, 2, 4), (1, 1, 2, 2)]
    elif bits == 8:
        del choices[0]
    elif tokens * g.stored_hidden < 32 * _TASKS:  # Nemotron-3-Super at 2 tokens takes 63.4 us on an H100, 66.1 without
        choices[:1] = [(2, 1, 1, 4)] if tall else []
    for chosen, times in product(choices, tasks):
        ring = warps * chosen[-1] * bytes_of_half(g, form)
        sums = buffers * warps * min(tokens, _COLUMNS) * 64
        tiles = entries * (16 + 16 * max(parts * times, parts2))
        shared = _shared_bytes(g, tokens, ring + sums + 8 * (2 * buffers + 1 + 2 * entries), tiles, units)
        if shared <= _SHARED_MEMORY and (ring <= _RING or chosen in ((2, 2, 2, 4), choices[-1])):
            break
    else:
        return None
    slices, scoring = _slices(tokens, bits), g.scoring or Scoring()
    sizes = sizes_of_layer(g, form) | {"MAX_TOKENS": tokens, "WARPS": warps, "PARTS1": parts, "PARTS2": parts2, "NARROW": narrow}
    sizes |= {"TILES_A_TASK": times, "SCALED_X": False}
    sizes |= zip(("HALVES1", "HALVES2", "STAGES1", "RING_HALVES"), chosen, strict=True)
    sizes |= {"BUFFERS": buffers, "ADDERS": adders, "ENTRIES": entries, "SHARED_BYTES": shared}
    sizes |= {"MOST_BLOCKS": MOST_BLOCKS, "SPIN_SECONDS": SPIN_SECONDS}
    sizes |= {"SLICES2": slices, "SUBNORMALS": subnormals or not slices}
    sizes |= {"FROM_LOGITS": g.scoring is not None, "ALL_EXPERTS": g.num_experts * g.ranks if g.scoring else 1}
    sizes |= {"SCORING": _SCORING.index(scoring.kind), "RENORMALIZE": scoring.renormalize, "ROUTER_BIAS": scoring.bias}
    sizes |= {"ROUTING_FACTOR": float(scoring.factor), "HIGHER_FIRST": scoring.higher_first}
    return Variant(f"layer, {tokens} tokens", _SOURCE, tokens, tuple(sizes.items()))


def sizes_of_layer(g: Geometry, form: Format) -> dict[str, float]:
    """Return the constants of ``sizes.cuh`` that follow from the layer."""
    return {
        "HIDDEN": g.hidden_size, "STORED_HIDDEN": g.stored_hidden, "INTERMEDIATE": g.intermediate_size, "EXPERTS": g.num_experts,
        "TOP_K": g.top_k, "FLOAT16": g.dtype is torch.float16, "CODE_BITS": form.code_bits, "GROUP": form.group_size,
        "TILED_SCALES": g.layout.scales != ROWS, "GATE_ORDER": ORDERS.index(g.layout.fc1),
        "ACTIVATION": ACTIVATIONS.index(g.activation), "GATED": g.gated, "BIAS": _BIASES.index(g.bias),
    }  # fmt: skip


def bytes_of_half(g: Geometry, form: Format) -> int:
    """Return the bytes of a half of a stage, 16 rows x 128 columns: codes, and scales with room for uneven rows."""
    scales = 128 // form.group_size  # of a row
    uneven = any(size // form.group_size % scales for size in (g.stored_hidden, g.intermediate_size))
    return 256 * form.code_bits + 16 * (scales + (4 if uneven and g.layout.scales == ROWS else 0))


def _shared_bytes(g: Geometry, tokens: int, fixed: int, entries: int, units: int) -> int:
    """Return a block's bytes of shared memory, see ``records.cuh``. ``fixed``: bytes of stages, sums and barriers."""
    routes, logits = tokens * g.top_k, g.scoring is not None
    before = -(-(fixed + 8 + 2 * MOST_BLOCKS) // 16) * 16 + entries
    if tokens > _COLUMNS:
        return before + 2 * routes + 4 * min(routes, g.num_experts + routes // 8) + 4 * tokens + 8 * routes * logits
    words = 1 + -(-routes // 32) + logits  # of a route: its slot, its share of the masks, its weight
    return before + 16 * routes * (1 + units) + 4 * routes * words + 4 * -(-g.num_experts // 32) + 64


def _parts_of_fc2(warps: int, blocks: int) -> int:
    """Return the number of rows of warps in a task of FC2.

    It is the smallest number whose warps share ``blocks`` of 128 columns nearly evenly, at least three each. So a sum over warps
    follows three products.
    """
    splits = [split for split in range(1, warps + 1) if warps % split == 0 and -(-blocks // split) >= 3] or [1]
    waste = {split: -(-blocks // split) * split / blocks for split in splits}
    return warps // max(split for split in splits if waste[split] <= max(1.15, min(waste.values())))


def load(needed: tuple[Compilation, ...], target: str, remedy: str) -> list[bytes]:
    """Return the cubins, from the cache or compiled in parallel.

    Raise PlanError if a cubin is not cached and ``TRTLLM_B12X_FREEZE`` forbids compiling (``remedy``: command that fills the
    cache). Raise CompileError if NVRTC is missing or does not know the card.
    """

    def cubin(variant: Compilation) -> bytes:
        content = variant.cached(target)
        if content is None and settings.FREEZE():
            raise PlanError(f"{variant.file(target)} is not there and is not compiled: {settings.FREEZE.name}=1 ({remedy})")
        return fill(variant, target) if content is None else content

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(cubin, needed))


def fill(variant: Compilation, target: str) -> bytes:
    """Compile a variant, and cache the cubin if the cache is writable."""
    content, _ = variant.compile(target)
    file = variant.file(target)
    with contextlib.suppress(OSError):  # an unwritable cache only costs a compile at each start
        disk.make(file.parent)
        disk.replace(file, content)
    return content
