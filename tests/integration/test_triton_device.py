# SPDX-License-Identifier: Apache-2.0
"""Decode on a GPU: instructions, streams, a soak. Numbers of all kernels: test_kernels_device.py."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from tests.nvfp4_layer import Layer, distance, random_call, random_layer
from tests.unittest import test_triton_forms as forms
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.triton import operands
from trtllm_b12x.kernels.triton.decode import TritonKernel

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU of capability 8.0 or newer"
)
CUDA = torch.device("cuda", 0)


def planned(layer: Layer) -> TritonKernel:
    kernel = TritonKernel()
    kernel.plan(layer.geometry, 256, CUDA)
    kernel.bind(layer.kernel_weights())
    return kernel


@pytest.fixture(scope="module")
def swiglu() -> Layer:
    return random_layer(Geometry(16, 4, 512, 384, "Swiglu"), "cuda", ratio=True)


@triton.jit
def decoded(  # type: ignore[no-untyped-def]
    words, scales, out, dtype: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, ptx: tl.constexpr
):
    row = tl.arange(0, rows)[:, None]
    word, block = tl.arange(0, columns // 8)[None, :], tl.arange(0, columns // 16)[None, :]
    given = tl.load(words + row * (columns // 8) + word), tl.load(scales + row * (columns // 16) + block)
    decoded = operands.decoded(given[0], given[1], rows, columns, 8, 16, dtype, ptx)
    for j in tl.static_range(8):
        tl.store(out + j * (rows * columns // 8) + row * (columns // 8) + word, decoded[j])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_instructions_and_arithmetic_are_the_same_numbers(dtype: torch.dtype) -> None:
    """What the interpreter runs, compiled, against the inline PTX: weights, since no layer multiplies by the former on a GPU.

    Nor should it: Triton 3.6 makes wrong sums of them in products of 8 and 16 routes, and right ones of 32.
    """
    words = torch.randint(-(2**31), 2**31 - 1, (32, 32), dtype=torch.int32, device="cuda")
    scales = torch.arange(512, device="cuda").to(torch.uint8).view(32, 16)
    major, minor = torch.cuda.get_device_capability()
    kinds = (0, 80, 10 * major + minor)
    found = torch.zeros(len(kinds), 8, 32, 32, dtype=dtype, device="cuda")
    for ptx, out in zip(kinds, found, strict=True):
        kind = tl.bfloat16 if dtype is torch.bfloat16 else tl.float16
        decoded[(1,)](words, scales, out, kind, 32, 256, ptx)
    not_a_number = (scales & 0x7F == 0x7F).repeat_interleave(2, 1).expand(8, -1, -1)
    assert found.nan_to_num().any()
    for other in found:
        assert torch.equal(other.isnan(), not_a_number)
        assert torch.equal(other.nan_to_num(), found[0].nan_to_num())  # but for the sign of a zero


def test_streams_and_graphs_at_a_time(swiglu: Layer) -> None:
    kernel = planned(swiglu)
    calls = [random_call(swiglu.geometry, tokens, device="cuda", seed=tokens) for tokens in (1, 16, 63, 200)]
    expected = [kernel.run(MoECall(*call)) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[] for _ in calls]
    for _ in range(30):
        for place, (stream, call) in enumerate(zip(streams, calls, strict=True)):
            with torch.cuda.stream(stream):
                results[place].append(kernel.run(MoECall(*call)))
    torch.cuda.synchronize()
    for found, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(result, wanted) for result in found)


def test_a_soak_of_random_counts(swiglu: Layer) -> None:
    """10,000 calls; every hundredth is compared with float32, every one with the first of its count and seed."""
    kernel, drawn = planned(swiglu), random.Random(0)
    keys = product((1, 2, 7, 8, 16, 33, 63, 128, 256), range(3))
    calls = {(tokens, seed): random_call(swiglu.geometry, tokens, device="cuda", seed=seed) for tokens, seed in keys}
    first = {key: kernel.run(MoECall(*call)) for key, call in calls.items()}
    for key, call in calls.items():
        assert distance(first[key], swiglu.expected(*call)) < 0.004
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        key = drawn.choice(list(calls))
        wrong += (kernel.run(MoECall(*calls[key])) != first[key]).sum()
    assert int(wrong) == 0


# ---- layers --------------------------------------------------------------------------------------------------------------


def test_a_layer_s_other_forms(triton_alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    """SwiGLU's constants, scaled input, and tokens that ranks gather quantized, on both sides of the crossover."""
    for tokens in (1, 40, 63, 64):
        errors = {}
        for names in (("limit",), ("alpha", "beta", "limit")):
            _, error, calls = forms.with_constants(names, tokens, "cuda")
            errors[", ".join(names)] = error, calls
        errors["scaled"] = forms.on_scaled_input(tokens, "cuda")
        errors["gathered"] = forms.as_ranks_gather(tokens, device="cuda")
        for name, (error, calls) in errors.items():
            assert (calls > 0) is (tokens < 64), (name, tokens)
            assert error < (0.006 if calls else forms.HOSTS_BOUND), (name, tokens)
        with capsys.disabled():
            print(f"\n{tokens} tokens: {errors}")
