"""The grouped NVFP4 kernels on a GPU, native where the card has block-scaled products, as products of bfloat16 elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts
from tests.nvfp4_layer import INPUT_SCALE, Layer, distance, random_call, random_layer
from trtllm_b12x.core import process, settings
from trtllm_b12x.dispatch import crossover, timing
from trtllm_b12x.dispatch.policy import HOST, MeasuredPolicy
from trtllm_b12x.engines.trtllm.embedded.ops import fp4_quantize
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.reference import QuantizedReferenceKernel
from trtllm_b12x.kernels.triton.grouped_nvfp4 import GroupedNVFP4Kernel
from trtllm_b12x.tools.verify import reference
from trtllm_b12x.tools.verify.reference import Arithmetic
from trtllm_b12x.tools.verify.reference_formats import move_off_ties

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU of capability 8.9 or newer"
)
BOUND = 0.005
CUDA = torch.device("cuda", 0)
GEOMETRY = Geometry(16, 4, 512, 256, "Swiglu")
"""Of most tests: it is compiled once."""
TOKENS = (1, 33, 64, 128, 300, 1024, 4096)
"""Each row of the table, and few tokens in the first."""


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    yield
    process.forget()


def planned(layer: Layer, first: int = 0) -> tuple[GroupedNVFP4Kernel, QuantizedReferenceKernel]:
    found = GroupedNVFP4Kernel(), QuantizedReferenceKernel()
    for kernel in found:
        kernel.plan(layer.geometry, timing.LARGEST, CUDA)
        kernel.bind(layer.kernel_weights(), first)
        kernel.self_test()
    return found


def drawn(geometry: Geometry, tokens: int, experts: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Off rounding ties."""
    x, ids, router_weights = random_call(geometry, tokens, experts, "cuda", seed=tokens)
    return move_off_ties(x, INPUT_SCALE[0]), ids, router_weights


def test_the_products_are_the_cards_own() -> None:
    kernel = GroupedNVFP4Kernel()
    kernel.describe(GEOMETRY, 64, CUDA)
    major, minor = torch.cuda.get_device_capability()
    assert kernel._native == (major == 12 and not toolchain.upcast(10 * major + minor))


@pytest.mark.parametrize("geometry", [GEOMETRY, Geometry(8, 3, 2816, 704, "Geglu"), Geometry(16, 4, 192, 64, "Relu2")], ids=str)
def test_numbers(geometry: Geometry) -> None:
    layer = random_layer(geometry, "cuda", ratio=True)
    kernel, yardstick = planned(layer)
    for tokens in TOKENS:
        call = drawn(geometry, tokens)
        wanted = yardstick.run(MoECall(*call, out=torch.zeros(call[0].shape, device=CUDA)))
        assert distance(kernel.run(MoECall(*call)), wanted) < BOUND, tokens


def test_a_rank_of_several() -> None:
    """Ids outside, -1, tokens without a route."""
    layer = random_layer(Geometry(16, 4, 512, 256, "Swiglu", ranks=3), "cuda", ratio=True)
    for first in (0, 32):
        kernel, yardstick = planned(layer, first)
        for tokens in (9, 400):
            x, ids, router_weights = drawn(layer.geometry, tokens, experts=48)
            ids[0], ids[1, 0] = -1, 2**31 - 1
            wanted = yardstick.run(MoECall(x, ids, router_weights, out=torch.zeros(x.shape, device=CUDA)))
            out = torch.full_like(x, torch.nan)
            kernel.run(MoECall(x, ids.long(), router_weights, out=out))
            assert not out[~wanted.any(1)].any()
            assert distance(out, wanted) < BOUND


def test_reruns_graphs_quantized_input_and_neighbors() -> None:
    """The same bits again, in a graph, of input that arrives quantized, and beside a token that is not a number."""
    layer = random_layer(GEOMETRY, "cuda")
    kernel, _ = planned(layer)
    for tokens in (64, 900):
        x, ids, router_weights = drawn(GEOMETRY, tokens)
        first = kernel.run(MoECall(x, ids, router_weights))
        assert torch.equal(kernel.run(MoECall(x, ids, router_weights)), first)
        for swizzled in (True, False):
            factor = torch.tensor(1 / INPUT_SCALE[0], device=CUDA)
            codes, block_scales = fp4_quantize(x, factor, is_sf_swizzled_layout=swizzled)
            assert torch.equal(kernel.run(MoECall(codes, ids, router_weights, x_sf=block_scales, swizzled=swizzled)), first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = kernel.run(MoECall(x, ids, router_weights))
        for _ in range(3):
            kept.fill_(torch.nan)
            graph.replay()
            assert torch.equal(kept, first)
        x[-1], x[-2] = torch.nan, torch.inf
        found = kernel.run(MoECall(x, ids, router_weights))
        assert torch.equal(found[:-2], first[:-2])
        assert found[-1].isnan().all()
        assert found[-2].isfinite().all()  # what is too large saturates


def built(tensors: dict[str, torch.Tensor]) -> Any:
    with torch.device("cuda"):
        return layers.load(layers.create(16, 512, 256, top_k=4), tensors)


def test_a_layer_against_the_strict_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "grouped")
    tensors = random_experts(16, 512, 256, up_to_gate=0.7)
    with crossover.unmeasured():
        module = built(tensors)
        schedule = module.backend.schedule
        assert [type(schedule.at(tokens)) for tokens in (63, 64, 8192)] == [type(None), GroupedNVFP4Kernel, GroupedNVFP4Kernel]
        for tokens in (64, 300, 4096):
            x, logits = layers.inputs(module, tokens, tensors)
            call = reference.MoECall(x, *module.routing_method.apply(logits))
            ((wanted,),) = reference.outputs(tensors, 16, True, [call], [Arithmetic.KERNEL])
            assert distance(module(x.cuda(), logits.cuda()).cpu(), wanted) < BOUND, tokens
    assert not built(tensors).backend.schedule.kernels  # without a measurement


def test_the_card_chooses(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Against the embedded host's operator, which is slow."""
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "triton,grouped")
    monkeypatch.setenv(settings.CROSSOVER.name, "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "PathTimer", functools.partial(timing.PathTimer, budget_s=4.0))
    tensors = random_experts(16, 512, 256)
    module = built(tensors)
    assert module.backend.schedule.at(1024) is None
    x, logits = layers.inputs(module, 1024, tensors)
    module(x.cuda(), logits.cuda())
    policy = module.backend.schedule.policy
    assert isinstance(policy, MeasuredPolicy)
    rows = policy.timings.rows
    print(policy.summary(), rows)
    assert {"triton", "grouped", HOST} == set(rows[128])  # 32 rows of each expert are triton's most
    assert {"grouped", HOST} == set(rows[256])
    assert 1024 in rows
    assert type(module.backend.schedule.at(1024)) is GroupedNVFP4Kernel
    assert layers.errors(module, x, logits, module(x.cuda(), logits.cuda()).cpu(), tensors)[1] < BOUND
