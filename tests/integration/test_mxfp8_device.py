"""The MXFP8 kernels on a GPU, native where the card has block-scaled products, by upcast elsewhere: numbers, graphs, ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import layers, mxfp8
from trtllm_b12x.core import process
from trtllm_b12x.decision import RejectReason
from trtllm_b12x.dispatch.policy import GAIN, HOST, MeasuredPolicy
from trtllm_b12x.formats.mxfp8 import MXFP8Weights
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.reference import ReferenceKernel
from trtllm_b12x.kernels.triton.decode_mxfp8 import TritonMXFP8Kernel
from trtllm_b12x.kernels.triton.grouped import TABLE, GroupedKernel
from trtllm_b12x.tools.verify import reference as strict_reference
from trtllm_b12x.tools.verify.reference import Arithmetic

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU of capability 8.9 or newer"
)
BOUND = 0.005
CUDA = torch.device("cuda", 0)
KERNELS = (TritonMXFP8Kernel, GroupedKernel)
Kind = type[TritonMXFP8Kernel] | type[GroupedKernel]


@pytest.fixture(autouse=True)
def families(every_family: None) -> Iterator[None]:
    yield
    process.forget()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def planned(kind: Kind, geometry: Geometry, weights: MXFP8Weights, first: int = 0) -> TritonMXFP8Kernel | GroupedKernel:
    kernel = kind()
    kernel.plan(geometry, 5000 if kind is GroupedKernel else 128, CUDA)
    kernel.bind(weights, first)
    kernel.self_test()
    return kernel


def reference(kind: Kind, geometry: Geometry, weights: MXFP8Weights, first: int = 0) -> ReferenceKernel:
    found = kind.reference()
    found.plan(geometry, 5000, CUDA)
    found.bind(weights, first)
    return found


def expected(yardstick: ReferenceKernel, call: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return yardstick.run(MoECall(*call, out=torch.zeros(call[0].shape, device=CUDA)))


@pytest.mark.parametrize("activation", ["Swiglu", "SwigluBias", "Geglu", "Relu2", "Silu", "Gelu"])
@pytest.mark.parametrize("kind", KERNELS)
def test_numbers(kind: Kind, activation: str) -> None:
    geometry = Geometry(16, 4, 512, 256, activation)
    weights = mxfp8.random_weights(geometry, CUDA)
    kernel, yardstick = planned(kind, geometry, weights), reference(kind, geometry, weights)
    for tokens in (1, 2, 7, 16, 33, 63, 128, *((640, 1024, 4096) if kind is GroupedKernel else ())):
        call = mxfp8.random_call(geometry, tokens, device=CUDA, seed=tokens)
        assert distance(kernel.run(MoECall(*call)), expected(yardstick, call)) < BOUND, tokens


@pytest.mark.parametrize(("hidden", "size"), [(128, 32), (2816, 704), (2048, 192), (384, 1408)])
@pytest.mark.parametrize("kind", KERNELS)
def test_sizes_off_every_tile(kind: Kind, hidden: int, size: int) -> None:
    geometry = Geometry(8, 3, hidden, size, "Swiglu")
    weights = mxfp8.random_weights(geometry, CUDA)
    kernel, yardstick = planned(kind, geometry, weights), reference(kind, geometry, weights)
    for tokens in (1, 5, 63, *((200, 700) if kind is GroupedKernel else ())):
        call = mxfp8.random_call(geometry, tokens, device=CUDA)
        assert distance(kernel.run(MoECall(*call)), expected(yardstick, call)) < BOUND, tokens


@pytest.mark.parametrize("kind", KERNELS)
def test_a_rank_of_several(kind: Kind) -> None:
    """Shares of ranks sum to the whole's, ids outside and -1 are unrouted."""
    geometry = Geometry(8, 4, 512, 256, "Swiglu", ranks=3)
    weights = mxfp8.random_weights(geometry, CUDA)
    for first in (0, 16):
        kernel, yardstick = planned(kind, geometry, weights, first), reference(kind, geometry, weights, first)
        for tokens in (1, 9, 63):
            x, ids, router_weights = mxfp8.random_call(geometry, tokens, experts=24, device=CUDA)
            ids[0, 0] = -1
            wanted = expected(yardstick, (x, ids, router_weights))
            found = kernel.run(MoECall(x, ids.long(), router_weights.bfloat16().float()))
            usable = wanted.any(1)
            assert not found[~usable].any()
            if usable.any():
                assert distance(found[usable], expected(yardstick, (x, ids, router_weights.bfloat16().float()))[usable]) < BOUND


@pytest.mark.parametrize("kind", KERNELS)
def test_reruns_graphs_and_neighbors(kind: Kind) -> None:
    """The same bits again, in a graph, and beside a token that is not a number."""
    geometry = Geometry(32, 4, 512, 256, "Swiglu")
    kernel = planned(kind, geometry, mxfp8.random_weights(geometry, CUDA))
    for tokens in (3, 63, *((900,) if kind is GroupedKernel else ())):
        x, ids, router_weights = mxfp8.random_call(geometry, tokens, device=CUDA)
        first = kernel.run(MoECall(x, ids, router_weights))
        assert torch.equal(kernel.run(MoECall(x, ids, router_weights)), first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = kernel.run(MoECall(x, ids, router_weights))
        for _ in range(3):
            kept.fill_(torch.nan)
            graph.replay()
            assert torch.equal(kept, first)
        x[-1] = torch.nan
        found = kernel.run(MoECall(x, ids, router_weights))
        assert torch.equal(found[:-1], first[:-1])
        assert found[-1].isnan().all()


@pytest.mark.parametrize("kind", KERNELS)
def test_every_scale(kind: Kind) -> None:
    """E8M0 from 2**-127 on; 255 is NaN."""
    geometry = Geometry(2, 1, 128, 128, "Relu2")
    weights = mxfp8.random_weights(geometry, CUDA)
    x, _, router_weights = mxfp8.random_call(geometry, 4, device=CUDA)
    ids = torch.tensor([[0], [1], [0], [1]], dtype=torch.int32, device=CUDA)
    kernel = planned(kind, geometry, weights)
    # What Triton multiplies as bfloat16 takes 2**-127 for zero.
    for byte in (*((0,) if kind is TritonMXFP8Kernel else ()), 1, 30, 100, 140, 255):
        weights.fc1_weight_sf[..., 1].fill_(127)
        weights.fc2_weight_sf[..., 1].fill_(byte)
        found = kernel.run(MoECall(x, ids, router_weights))[1::2].float()
        wanted = expected(reference(kind, geometry, weights), (x, ids, router_weights))[1::2]
        if byte == 255:
            assert found.isnan().all()
        else:
            assert torch.allclose(found, wanted, rtol=0.02, atol=float(wanted.abs().max()) * 0.01 + 1e-38), byte


def built(tensors: dict[str, torch.Tensor], size: int, gated: bool = True, **arguments: Any) -> Any:
    config = layers.host.QuantConfig(quant_algo=layers.host.QuantAlgo.MXFP8, group_size=32)
    with torch.device("cuda"):
        module = layers.create(16, 512, size, top_k=4, gated=gated, quant_config=config, **arguments)
    return layers.load(module, tensors)


@pytest.mark.parametrize("gated", [True, False], ids=["Swiglu", "Relu2"])
def test_a_layer_at_every_count(gated: bool) -> None:
    tensors = mxfp8.random_experts(16, 512, 192, gated)
    module = built(tensors, 192, gated)
    assert [type(kernel) for kernel in module.backend.schedule.kernels] == list(KERNELS)
    for tokens in (1, 2, 8, 63, 64, 300, 4096):
        x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        logits = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens + 1))  # no two alike
        call = strict_reference.MoECall(x, *module.routing_method.apply(logits))
        arithmetic = Arithmetic.UNQUANTIZED if tokens < 64 else Arithmetic.KERNEL
        ((wanted,),) = strict_reference.outputs(tensors, 16, gated, [call], [arithmetic], quant_algo="MXFP8")
        assert distance(module(x.cuda(), logits.cuda()).cpu(), wanted) < BOUND, tokens


def test_the_card_decides_between_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measured on this card, in graphs; what is chosen is the quicker one, but for the three percent of :data:`GAIN`."""
    monkeypatch.setenv("TRTLLM_B12X_CROSSOVER", "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    process.forget()
    tensors = mxfp8.random_experts(16, 512, 192)
    module = built(tensors, 192)
    x, logits = torch.randn(8, 512, device=CUDA).bfloat16(), torch.rand(8, 16, device=CUDA)
    before = module(x, logits)
    policy = module.backend.schedule.policy
    assert isinstance(policy, MeasuredPolicy)
    print(f"\n{module.backend.schedule.summary}: {policy.timings.rows}")
    for tokens, times in policy.timings.rows.items():
        quick = "triton" in times and times["triton"] <= GAIN * times[HOST]
        assert (module.backend.schedule.at(tokens) is module.backend.schedule.families["triton"]) == quick
    assert distance(module(x, logits), before) < 0.1
    assert list(tmp_path.rglob("crossover-*.json"))


def test_a_refit_while_a_graph_holds_the_layer() -> None:
    first, second = mxfp8.random_experts(16, 512, 192), mxfp8.random_experts(16, 512, 192, seed=7)
    module, other = built(first, 192), built(second, 192)
    x = torch.randn(8, 512, device="cuda").bfloat16()
    ids = torch.rand(8, 16, device="cuda").topk(4, dim=1).indices.int()
    router_weights = torch.rand(8, 4, device="cuda")
    wanted = layers.run_moe(other.backend, x, ids, router_weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = layers.run_moe(module.backend, x, ids, router_weights)
    graph.replay()
    assert not torch.equal(kept, wanted)
    layers.load(module, second)
    graph.replay()
    assert torch.equal(kept, wanted)


def test_a_wrong_kernel_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TritonMXFP8Kernel.run

    def wrong(self: TritonMXFP8Kernel, *given: Any, **named: Any) -> torch.Tensor:
        result = run(self, *given, **named)
        result[:, 0] *= 3
        return result

    monkeypatch.setattr(TritonMXFP8Kernel, "run", wrong)
    module = built(mxfp8.random_experts(16, 512, 160), 160)
    assert [type(kernel) for kernel in module.backend.schedule.kernels] == [GroupedKernel]
    refused = dict(module.backend.verdict.verdicts)["triton"].rejections
    assert [rejection.reason for rejection in refused] == [RejectReason.KERNEL_PLAN_FAILED]


def test_tables_cover_every_count() -> None:
    assert TABLE[-1].most == float("inf")
    assert [row.most for row in TABLE] == sorted(row.most for row in TABLE)
