# SPDX-License-Identifier: Apache-2.0
"""Time vLLM's Marlin beside our kernels while vLLM chooses. Loading packs Marlin's weights, so one of the two serves every call.

Marlin reads random bytes: the memory of the rehearsal's weights, in Marlin's shapes. Nothing is packed. All calls read one layer,
so both sides read weights that fit the L2 cache from it.
"""

from __future__ import annotations

import importlib
import logging
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.core import log
from trtllm_b12x.core.errors import first_line
from trtllm_b12x.dispatch import crossover, store, timing
from trtllm_b12x.dispatch.policy import GAIN, HOST, Timings
from trtllm_b12x.dispatch.timing import Runner, TimedPath
from trtllm_b12x.formats.catalog import WEIGHTS
from trtllm_b12x.formats.geometry import Geometry
from trtllm_b12x.kernels import MoECall

from . import facts
from .weights import ALIGNED, Tensors

COUNTS = (1, 8, 64, 256, 1024)
"""Token counts to time, up to the engine's largest batch. The geometric mean of their times decides, with equal weights.

A server's batches are not known beforehand. So a ratio of times has equal weight at each count, however long the call, and three
of the five counts are decode batches.
"""
BUDGET_S, LONGEST_S = 1.0, 1.5
"""Target and maximum seconds for all counts. A count that would take longer is skipped, except the first."""
OURS = "ours"


@dataclass(frozen=True)
class Packing:
    """Scales and padded sizes of a format's weights after vLLM 0.28 or 0.33 has packed them for Marlin."""

    config: str
    """Function of ``fused_moe/config.py`` that takes the packed scales."""
    scales: torch.dtype
    hidden: int
    """The hidden size is padded to a multiple of this."""
    size: tuple[int, int]
    """The intermediate size is padded to a multiple of the first if the hidden size is a multiple of 128, else of the second."""
    block_shape: tuple[int, int] | None = None


PACKINGS = {
    # mxfp4_round_up_hidden_size_and_intermediate_size (oracle/mxfp4.py)
    "MXFP4": Packing("mxfp4_w4a16_moe_quant_config", torch.float8_e8m0fnu, 256, (128, 128)),
    # marlin_moe_padded_intermediate (quantization/utils/marlin_utils.py)
    "MXFP8": Packing("fp8_w8a16_moe_quant_config", torch.float8_e8m0fnu, 1, (64, 64), (1, 32)),
    # prepare_nvfp4_moe_layer_for_marlin (quantization/utils/marlin_utils_fp4.py)
    "W4A16_NVFP4": Packing("nvfp4_w4a16_moe_quant_config", torch.float8_e4m3fn, 1, (64, 128)),
}


class Key(store.Key):
    """Conditions under which both times are valid. ``doctor`` lists only crossover tables, not files of this name."""

    title = "comparison with Marlin"

    @property
    def file(self) -> str:
        return super().file.replace("crossover", "marlin")


def refusal(experts: Any, tensors: Tensors, config: Any) -> str:
    """Return both times if Marlin is faster; empty if Marlin is not faster, cannot be timed, or a setting selects our kernels.

    Times are stored, so that the next start does not measure.

    Args:
        experts: our rehearsed experts, bound to ``tensors``.
    """
    rival = experts.rival
    possible = rival is not None and rival.__name__ == "MarlinExperts" and timing.possible(tensors.w1.device)
    if not possible or crossover.default_policy().asked:
        return ""
    try:
        return verdict(_timings(experts, tensors, config))
    except torch.OutOfMemoryError:
        raise  # memory may be free for the next layer
    except Exception as error:
        log.once(f"Marlin is not timed beside {experts.geometry}: {first_line(error)}", logging.INFO)
        return ""


def verdict(timings: Timings) -> str:
    """Return both mean times if ``GAIN`` times ours exceeds Marlin's; else empty."""
    ours, theirs = (statistics.geometric_mean(row[name] for row in timings.rows.values()) for name in (OURS, HOST))
    if GAIN * ours <= theirs:
        return ""
    counts = ", ".join(map(str, timings.counts))
    return f"measured {theirs:,.1f} us, ours {ours:,.1f} us (geometric mean over {counts} tokens)"


def _timings(experts: Any, tensors: Tensors, config: Any) -> Timings:
    """Return stored times, or measure. The measurement first decides which of our kernels serves how many tokens."""
    from vllm import envs
    from vllm.config import get_current_vllm_config_or_none

    geometry, dispatch, device = experts.geometry, experts.dispatch, tensors.w1.device
    engine = get_current_vllm_config_or_none()
    limit = COUNTS[-1] if engine is None else engine.scheduler_config.max_num_batched_tokens
    counts = [tokens for tokens in COUNTS if tokens <= limit]
    like = crossover.key_of(geometry, device, dispatch.schedule, "", tuned=True)
    dtype = getattr(envs, "VLLM_MARLIN_INPUT_DTYPE", None) or "16 bits"
    paths = {"kernels": [*dispatch.kernels], "host": f"vLLM {facts.version()}, Marlin, {dtype}"}
    key = Key(like.card, like.geometry, paths, like.conditions, counts[-1])
    if (stored := store.load(key)) is None:
        found = _measured(experts, tensors, config, counts)
        stored = store.load(key)  # from another rank: the first rank to finish decides for all starts
        if stored is None:
            store.keep(key, found)
            return found
    return Timings({tokens: row for tokens, row in stored.rows.items() if tokens <= limit})


def _measured(experts: Any, tensors: Tensors, config: Any, counts: list[int]) -> Timings:
    geometry, dispatch, device = experts.geometry, experts.dispatch, tensors.w1.device
    call = MoECall(torch.ones(1, geometry.hidden_size, dtype=geometry.dtype, device=device), *experts.sample_routes(1, 0, False))
    dispatch.decided = False
    experts.call(call, tensors.w1, tensors.w2, None, False)  # measures as a layer does in vLLM's profile run
    schedule = dispatch.schedule
    captured = all(kernel.features.graph_safe for kernel in schedule.kernels)
    with _temporary_workspaces(device):
        both = {
            OURS: TimedPath([lambda call: schedule.at(len(call.ids)).run(call)], captured=captured),
            HOST: TimedPath([runner(experts.rival, tensors, geometry, config, counts[-1])]),
        }
        for tokens in counts:  # most wheels have Marlin as PTX, which the driver compiles at the first call: 30 s on an H200
            both[HOST].runs[0](MoECall(call.x, *experts.sample_routes(tokens, 0, False)))
        options: Any = {"budget_s": BUDGET_S, "longest_s": LONGEST_S, "behind": (math.inf, math.inf)}
        return timing.PathTimer(both, geometry, experts.sample_routes, device, **options)(counts)


@contextmanager
def _temporary_workspaces(device: torch.device) -> Iterator[None]:
    """Free Marlin's per-stream locks at the end of the block.

    ``get_marlin_workspace`` of vLLM 0.33 allocates these zeroed locks once. In this block that happens in a capture and in
    the pool of weights, which sleep level 2 discards. vLLM allocates its own locks at its first call.
    """
    workspace: Any = importlib.import_module("vllm.v1.worker.workspace")
    before = workspace._manager
    workspace._manager = workspace.WorkspaceManager(device)
    try:
        yield
    finally:
        workspace._manager = before


def runner(rival: Any, tensors: Tensors, geometry: Geometry, config: Any, largest: int) -> Runner:
    """Return a function that runs Marlin on the memory of ``tensors``, for calls of up to ``largest`` tokens.

    The input already has the columns that vLLM pads it to, so padding is not timed.
    """
    fused = importlib.import_module(f"{facts.FUSED_MOE}.config")
    packed, device, packing = view(tensors, geometry), tensors.w1.device, PACKINGS[geometry.format]
    hidden, size = packed_sizes(geometry)
    values = {"alpha": config.swiglu_alpha, "beta": config.swiglu_beta, "clamp_limit": config.swiglu_limit}
    arguments: dict[str, Any] = {f"gemm1_{name}": value for name, value in values.items() if value is not None}
    arguments |= {"w1_scale": packed.scales[0], "w2_scale": packed.scales[1]}
    if packing.block_shape is not None:
        arguments["block_shape"] = [*packing.block_shape]
    if packed.biases is not None:
        arguments |= {"w1_bias": packed.biases[0], "w2_bias": packed.biases[1]}
    if packed.alphas is not None:
        arguments |= {"g1_alphas": packed.alphas[0], "g2_alphas": packed.alphas[1]}
    theirs = rival(config, getattr(fused, packing.config)(**arguments))
    local, total = geometry.num_experts, geometry.num_experts * geometry.ranks
    places = torch.arange(total, dtype=torch.int32, device=device)
    expert_map = None if total == local else places.masked_fill_(places >= local, -1)
    sizes = largest, size, hidden, geometry.top_k, total, local
    shapes = theirs.workspace_shapes(*sizes, None, config.activation)
    first, second, out = (torch.empty(shape, dtype=geometry.dtype, device=device) for shape in shapes)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(largest, hidden, dtype=geometry.dtype, device=device, generator=generator)

    def run(call: MoECall) -> torch.Tensor:
        result, inputs = out[: len(call.ids)], x[: len(call.ids)]
        routes = call.router_weights, call.ids, config.activation, total, expert_map
        theirs.apply(result, inputs, packed.w1, packed.w2, *routes, None, None, first, second, None, False)
        return result

    return run


def packed_sizes(geometry: Geometry) -> tuple[int, int]:
    """Return the hidden and the intermediate size that vLLM pads to for Marlin."""
    hidden, packing = geometry.hidden_size, PACKINGS[geometry.format]
    tile = packing.size[hidden % 128 > 0]
    return -(-hidden // packing.hidden) * packing.hidden, -(-geometry.intermediate_size // tile) * tile


def view(tensors: Tensors, geometry: Geometry) -> Tensors:
    """View the memory of a drawn layer in the shapes that Marlin reads. Codes have b bits, groups g codes; H and I are padded.

    ``(E, H / 16, r*I * b/2)`` and ``(E, I / 16, H * b/2)`` int32; scales ``(E, H / g, r*I)`` and ``(E, I / g, H)``. See
    ``gptq_marlin_repack`` and ``marlin_permute_scales`` of vLLM. Biases are new zeros of padded sizes.
    """
    kind, experts, (hidden, size) = WEIGHTS[geometry.format], geometry.num_experts, packed_sizes(geometry)
    rows, half = (2 if geometry.gated else 1) * size, 4 * kind.code_dtype.itemsize // kind.packed
    codes = _views(tensors.w1, torch.int32, (experts, hidden // 16, rows * half), (experts, size // 16, hidden * half))
    blocks = (experts, hidden // kind.group_size, rows), (experts, size // kind.group_size, hidden)
    packed = Tensors(*codes, _views(tensors.scales[0], PACKINGS[geometry.format].scales, *blocks))
    if tensors.alphas is not None:
        # In nvfp4_marlin_process_scales and nvfp4_marlin_process_global_scale a scale has five exponent bits and three mantissa
        # bits, and small scales give zero products. The highest bit makes all scales large; our kernels read it as the sign.
        for scales in packed.scales:
            scales.view(torch.uint8).bitwise_or_(0x80)
        power = 2.0 ** (119 if geometry.dtype is torch.bfloat16 else 7)
        packed.alphas = tensors.alphas[0] * power, tensors.alphas[1] * power
    if tensors.biases is not None:
        b1, b2 = (tensors.biases[0].new_zeros(experts, width) for width in (rows, hidden))
        packed.biases = b1, b2
    return packed


def _views(
    owner: torch.Tensor, dtype: torch.dtype, first: tuple[int, ...], second: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """View the start and the end of an allocation. Padded sizes make the two overlap, so that no further bytes are needed."""
    memory = torch.empty(0, dtype=torch.uint8, device=owner.device).set_(owner.untyped_storage())
    sizes = [dtype.itemsize * math.prod(shape) for shape in (first, second)]
    if max(sizes) > memory.nbytes:
        raise ValueError(f"Marlin pads a layer of {memory.nbytes} bytes to a matrix of {max(sizes)}")
    start = (memory.nbytes - sizes[1]) // ALIGNED * ALIGNED
    last = memory[start : start + sizes[1]]
    return memory[: sizes[0]].view(dtype).view(first), last.view(dtype).view(second)
