# SPDX-License-Identifier: Apache-2.0
"""Our kernels on a GPU, each family in each format: numbers, sizes, ranks, graphs, reruns, layers.

``grouped`` multiplies natively where the card has block-scaled products, in bfloat16 elsewhere.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import layers, mxfp4, mxfp8
from tests.checkpoints import random_experts
from tests.nvfp4_layer import INPUT_SCALE, distance, random_call, random_layer, worst_token
from trtllm_b12x import formats
from trtllm_b12x.dispatch import crossover, timing
from trtllm_b12x.dispatch.policy import HOST, MeasuredPolicy, fastest
from trtllm_b12x.engines.trtllm.embedded.ops import fp4_quantize
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.formats import BY_TURNS, GATE_UP, ROWS, WeightLayout
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.catalog import KERNELS
from trtllm_b12x.kernels.layer_tensors import ACTIVATIONS
from trtllm_b12x.kernels.triton.grouped import GroupedNVFP4Kernel
from trtllm_b12x.tools.verify import reference
from trtllm_b12x.tools.verify.reference import Arithmetic
from trtllm_b12x.tools.verify.reference_formats import move_off_ties

pytestmark = [
    pytest.mark.usefixtures("every_family"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU of capability 8.9 or newer",
    ),
]
CUDA = torch.device("cuda", 0)
KINDS: dict[tuple[str, str], Any] = {kind: kernel for kind, (kernel, _) in KERNELS.items() if kind[0] != "b12x"}
BOUNDS = {"cuda": 0.004, "triton": 0.004, "gemm": 0.004, "grouped": 0.005}
TOKEN_BOUNDS = {"gemm": 0.006, "grouped": 0.006, "grouped NVFP4": 0.02}
"""For the worst token of a call, of which gemm's have 8,192. One that lacks 8 of 512 columns is off by 0.125. A large h may round
differently; in FP4 a code of h."""
TOKENS = {
    "cuda": (1, 2, 3, 5, 7, 8, 9, 16, 33, 64),
    "triton": (1, 2, 7, 8, 16, 33, 63, 128, 256),
    "gemm": (1, 8, 33, 64, 128, 300, 1024, 4096, 8192),
    "grouped": (1, 33, 64, 128, 300, 1024, 4096),
}
SIZES = {
    ("cuda", "NVFP4"): [(160, 64), (2880, 2880), (512, 192), (544, 2688), (7168, 256)],
    ("cuda", "W4A16_NVFP4"): [(256, 128), (2816, 384), (2048, 512)],
    ("cuda", "MXFP4"): [(160, 128), (2880, 768), (4096, 256)],
    ("cuda", "MXFP8"): [(128, 64), (2816, 704), (2048, 192), (384, 1408)],
    ("gemm", "MXFP8"): [(256, 64), (2816, 704), (2048, 192), (384, 1408)],
    ("triton", "NVFP4"): [(144, 80), (2880, 720), (512, 192), (272, 2688), (7168, 256)],
    ("grouped", "NVFP4"): [(2816, 704), (192, 64)],
    ("triton", "W4A16_NVFP4"): [(192, 80), (2816, 352), (2048, 512)],
    ("triton", "MXFP4"): [(160, 128), (2880, 768), (4096, 256)],
    ("triton", "MXFP8"): [(128, 32), (2816, 704), (2048, 192), (384, 1408)],
    ("grouped", "MXFP8"): [(128, 32), (2816, 704), (2048, 192), (384, 1408)],
}
SIZES |= {("gemm", form): SIZES["cuda", form] for form in ("NVFP4", "W4A16_NVFP4", "MXFP4")}
Kind = tuple[str, str]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def counts(kind: Kind, *tokens: int) -> list[int]:
    """Return those that the family serves."""
    return [count for count in tokens if count <= TOKENS[kind[0]][-1]]


every_kind = pytest.mark.parametrize("kind", KINDS, ids=" ".join)


def geometry_of(kind: Kind, experts: int, top_k: int, hidden: int, size: int, **options: Any) -> Geometry:
    """The sizes in the kind's format, laid out as TensorRT-LLM has it."""
    form = formats.find(kind[1])
    assert form is not None
    return Geometry(experts, top_k, hidden, size, format=form.name, layout=form.layout, **options)


def weights_of(geometry: Geometry) -> Any:
    if geometry.format == "MXFP8":
        return mxfp8.random_weights(geometry, CUDA)
    return random_layer(geometry, "cuda", ratio=True).kernel_weights()


def planned(kind: Kind, geometry: Geometry, first: int = 0) -> tuple[Any, Any]:
    """Plan a kernel and its reference in torch on the same weights.

    Machine code of an SM12x card does not load on Hopper. So with ``SM12X_ON_HOPPER`` a kernel that runs there is translated.
    """
    kernel = KINDS[kind]()
    pair = kernel, kernel.reference()
    weights = weights_of(geometry)
    for each in pair:
        each.plan(geometry, max(TOKENS[kind[0]]), CUDA)
        each.bind(weights, first)
    kernel.self_test()
    assert kernel.card.capability == int(os.environ.get("SM12X_ON_HOPPER", kernel.card.capability))
    return pair


def drawn(kind: Kind, geometry: Geometry, tokens: int, experts: int | None = None) -> Tensors:
    """Draw x, ids and router weights; x off rounding ties if it is quantized to FP4."""
    x, ids, router_weights = random_call(geometry, tokens, experts, "cuda", seed=tokens)
    return (move_off_ties(x, INPUT_SCALE[0]) if kind == ("grouped", "NVFP4") else x), ids, router_weights


def expected(yardstick: Any, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> torch.Tensor:
    """Return float32, which the reference gives where ``out`` is."""
    result: torch.Tensor = yardstick.run(MoECall(x, ids, router_weights, out=torch.zeros(x.shape, device=CUDA)))
    return result


def bounds_of(kind: Kind) -> tuple[float, float]:
    """Return the bounds of a call's error and of its worst token's."""
    bound = BOUNDS[kind[0]]
    return bound, TOKEN_BOUNDS.get(" ".join(kind), TOKEN_BOUNDS.get(kind[0], bound))


def assert_close(found: torch.Tensor, wanted: torch.Tensor, kind: Kind) -> None:
    for error, bound in zip((distance, worst_token), bounds_of(kind), strict=True):
        assert error(found, wanted) < bound, (error.__name__, len(found))


def assert_right(kind: Kind, geometry: Geometry, tokens: Sequence[int]) -> None:
    kernel, yardstick = planned(kind, geometry)
    for count in tokens:
        call = drawn(kind, geometry, count)
        assert_close(kernel.run(MoECall(*call)), expected(yardstick, *call), kind)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@every_kind
def test_numbers(kind: Kind, activation: str) -> None:
    geometry = geometry_of(kind, 16, 4, 512, 256, activation=activation)
    assert_right(kind, geometry, TOKENS[kind[0]])


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("family", ["cuda", "triton", "gemm"])
def test_float16(family: str, large: bool) -> None:
    layer = random_layer(Geometry(8, 2, 512, 256, "Swiglu", torch.float16), "cuda")
    if large:  # products of gate and up beyond what float16 holds
        layer.scale_1 *= 1024
        layer.scale_2 *= 2.0**-20
    kernel = KINDS[family, "NVFP4"]()
    kernel.plan(layer.geometry, TOKENS[family][-1], CUDA)
    kernel.bind(layer.kernel_weights())
    for tokens in TOKENS[family]:
        call = random_call(layer.geometry, tokens, device="cuda", dtype=torch.float16)
        result = kernel.run(MoECall(*call))
        assert result.dtype is torch.float16
        assert_close(result, layer.expected(*call), (family, "NVFP4"))


@pytest.mark.parametrize(("kind", "sizes"), [(kind, size) for kind, sizes in SIZES.items() for size in sizes], ids=str)
def test_sizes_off_every_tile(kind: Kind, sizes: tuple[int, int]) -> None:
    geometry = geometry_of(kind, 8, 3, *sizes, activation="Swiglu")
    assert_right(kind, geometry, counts(kind, 1, 5, 8, 63, *((200, 700) if kind[0] in ("gemm", "grouped") else ())))


ODD_ROWS = {
    "MXFP4": [(320, 448, BY_TURNS), (2880, 704, GATE_UP)],
    "MXFP8": [(384, 448, GATE_UP)],
    "W4A16_NVFP4": [(320, 192, GATE_UP)],
}
"""Hidden size, intermediate size, order of FC1's rows."""


@pytest.mark.parametrize(("kind", "sizes"), [(kind, sizes) for kind in KINDS for sizes in ODD_ROWS.get(kind[1], ())], ids=str)
def test_rows_of_scales_that_fill_no_words(kind: Kind, sizes: tuple[int, int, str]) -> None:
    """As vLLM has gpt-oss, whose rows have 90 scales, and gemma-4, whose rows have 22."""
    hidden, size, fc1 = sizes
    activation = "SwigluBias" if fc1 == BY_TURNS else "Swiglu"
    geometry = Geometry(8, 3, hidden, size, activation, format=kind[1], layout=WeightLayout(ROWS, fc1))
    assert_right(kind, geometry, TOKENS[kind[0]])


@pytest.mark.parametrize(
    ("ids_type", "scales_type"), [(torch.int16, torch.float32), (torch.int32, torch.bfloat16), (torch.int64, torch.float16)]
)
@every_kind
def test_a_rank_of_several(kind: Kind, ids_type: torch.dtype, scales_type: torch.dtype) -> None:
    """Ids outside, -1, and tokens without a route."""
    geometry = geometry_of(kind, 8, 4, 512, 256, activation="Swiglu", ranks=4)
    for first in (0, 24):
        kernel, yardstick = planned(kind, geometry, first)
        for tokens in counts(kind, 1, 7, 9, 63, *((400,) if kind[0] == "grouped" else ())):
            x, ids, router_weights = drawn(kind, geometry, tokens, experts=32)
            ids, router_weights = ids.to(ids_type), router_weights.to(scales_type)
            ids[0, 0] = -1
            ids[-1] = 31
            wanted = expected(yardstick, x, ids, router_weights)
            out = torch.full_like(x, torch.nan)
            kernel.run(MoECall(x, ids, router_weights, out=out))
            assert not out[~wanted.any(1)].any()
            assert not wanted.any() or distance(out, wanted) < BOUNDS[kind[0]]


@every_kind
def test_reruns_graphs_quantized_input_and_neighbors(kind: Kind) -> None:
    """The same bits again, in a graph, of input that arrives quantized, and beside a token that is not a number."""
    geometry = geometry_of(kind, 32, 4, 512, 256, activation="Swiglu")
    kernel, _ = planned(kind, geometry)
    for tokens in counts(kind, 3, 63, *((900,) if kind[0] == "grouped" else (256,))):
        x, ids, router_weights = drawn(kind, geometry, tokens)
        first = kernel.run(MoECall(x, ids, router_weights))
        for _ in range(20):
            assert torch.equal(kernel.run(MoECall(x, ids, router_weights)), first)
        assert torch.equal(kernel.run(MoECall(x, ids.long(), router_weights)), first)
        if kind == ("grouped", "NVFP4"):
            for swizzled in (True, False):
                factor = torch.tensor(1 / INPUT_SCALE[0], device=CUDA)
                codes, block_scales = fp4_quantize(x, factor, is_sf_swizzled_layout=swizzled)
                quantized = MoECall(codes, ids, router_weights, x_sf=block_scales, swizzled=swizzled)
                assert torch.equal(kernel.run(quantized), first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = kernel.run(MoECall(x, ids, router_weights))
        for _ in range(3):
            kept.fill_(torch.nan)
            graph.replay()
            assert torch.equal(kept, first)
        x[-1] = torch.nan
        graph.replay()
        for after in (kernel.run(MoECall(x, ids, router_weights)), kept):
            assert torch.equal(after[:-1], first[:-1])
            assert after[-1].isnan().all()


@pytest.mark.parametrize("order", [formats.GATE_UP, formats.BY_TURNS])
@pytest.mark.parametrize("form", ["W4A16_NVFP4", "MXFP4", "MXFP8"])
@pytest.mark.parametrize("family", ["cuda", "triton", "gemm"])
def test_rows_as_vllm_has_them(family: str, form: str, order: str) -> None:
    """Gate before up or by turns, scales in rows, gpt-oss's bias and constants; a code's neighbors are another half's."""
    layout = formats.WeightLayout(formats.ROWS, order)
    activation, bias = ("SwigluBias", torch.bfloat16) if form == "MXFP4" else ("Swiglu", None)
    geometry = Geometry(8, 3, 512, 384, activation, format=form, bias=bias, layout=layout)
    assert_right((family, form), geometry, counts((family, form), 1, 8, 64))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[1] == "MXFP8"], ids=" ".join)
def test_every_scale(kind: Kind) -> None:
    """E8M0 from 2**-127 to 2**127; 255 is NaN."""
    geometry = Geometry(2, 1, 128, 128, "Relu2", format="MXFP8")
    kernel, yardstick = planned(kind, geometry)
    weights = yardstick.weights
    x, _, router_weights = random_call(geometry, 4, device="cuda")
    ids = torch.tensor([[0], [1], [0], [1]], dtype=torch.int32, device=CUDA)
    kernel.bind(weights)
    smallest = {"cuda": 2.0**-89, "gemm": 2.0**-30}.get(kind[0], 1e-38)  # of results that are not zero: numbers.cuh
    # What Triton multiplies as bfloat16 takes 2**-127 for zero.
    small = (0,) if kind[0] != "grouped" or kernel._native else ()
    large = () if kind[0] == "gemm" else (254,)  # gemm's are NaN from 2**68 on
    for byte in (*small, 1, 30, 100, 140, *large, 255):
        weights.fc1_weight_sf[..., 1].fill_(100 if byte == 254 else 127)
        weights.fc2_weight_sf[..., 1].fill_(byte)
        if byte == 254:
            weights.fc2_weight.view(torch.uint8)[1] &= 0x87  # below 2**-6, so that no product overflows
        result = kernel.run(MoECall(x, ids, router_weights))[1::2].float()
        wanted = expected(yardstick, x, ids, router_weights)[1::2]
        if byte == 255:
            assert result.isnan().all()
        else:
            assert torch.allclose(result, wanted, rtol=0.02, atol=float(wanted.abs().max()) * 0.01 + smallest), byte


def test_the_products_are_the_cards_own() -> None:
    kernel = GroupedNVFP4Kernel()
    kernel.describe(Geometry(16, 4, 512, 256, "Swiglu"), 64, CUDA)
    major, minor = torch.cuda.get_device_capability()
    assert kernel._native == (major == 12 and not toolchain.upcast(10 * major + minor))


# ---- layers --------------------------------------------------------------------------------------------------------------


def built(form: str, gated: bool = True, size: int = 192, seed: int = 0) -> tuple[Any, dict[str, torch.Tensor]]:
    """Load a layer of 16 experts, top 4, 512 wide."""
    if form == "MXFP4":
        tensors = mxfp4.random_experts(16, 512, size, seed=seed)
    else:
        tensors = (mxfp8.random_experts if form == "MXFP8" else random_experts)(16, 512, size, gated, seed)
    row = formats.find(form)
    assert row is not None
    config = layers.host.QuantConfig(quant_algo=layers.host.QuantAlgo(row.quant_algo), group_size=row.group_size)
    with torch.device("cuda"):
        module = layers.create(16, 512, size, top_k=4, gated=gated, quant_config=config)
    return layers.load(module, tensors), tensors


FIRST = {"gemm": 9, "grouped": 64}
"""Fewest tokens of families that serve beyond decode."""


@pytest.mark.parametrize(
    ("form", "families", "gated"),
    [
        (*pair, gated)
        for pair in (("NVFP4", "cuda"), ("NVFP4", "triton"), ("NVFP4", "grouped"), ("MXFP8", "triton,grouped"))
        for gated in (True, False)
    ]
    + [("W4A16_NVFP4", "triton", True), ("W4A16_NVFP4", "gemm", True), ("MXFP4", "triton", True), ("MXFP4", "gemm", True)],
)
def test_a_layer_at_every_count(monkeypatch: pytest.MonkeyPatch, form: str, families: str, gated: bool) -> None:
    """Against the strict reference: decode takes activations as they are, all others quantize them."""
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", families)
    with crossover.unmeasured():
        module, tensors = built(form, gated, 256 if families == "grouped" else 192)
        assert [kernel.features.name for kernel in module.backend.schedule.kernels] == families.split(",")
        for tokens in (1, 2, 8, 40, 63, 64, 300, 4096):
            x, logits = layers.inputs(module, tokens, tensors) if form == "NVFP4" else _inputs(tokens)
            kernel = module.backend.schedule.at(tokens)
            served = tokens >= FIRST[families] if families in FIRST else tokens < 64
            assert (kernel is None) == (form != "MXFP8" and not served)
            call = reference.MoECall(x, *module.routing_method.apply(logits))
            quantizes = form == "NVFP4" if kernel is None else kernel.features.arithmetic == "KERNEL"
            arithmetic = Arithmetic.KERNEL if quantizes else Arithmetic.UNQUANTIZED
            algorithm = str(module.backend._shape.quant_algo)
            ((wanted,),) = reference.outputs(tensors, 16, gated, [call], [arithmetic], quant_algo=algorithm)
            bound = 0.05 if kernel is None else 0.005
            assert distance(module(x.cuda(), logits.cuda()).cpu(), wanted) < bound, tokens


def _inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw activations and logits of which no two are alike."""
    x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    return x, torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens + 1))


@pytest.mark.parametrize("form", ["NVFP4", "MXFP8"])
def test_the_card_chooses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str) -> None:
    """Measured on this card, in graphs; NVFP4 against the embedded host's operator, which is slow."""
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "triton,grouped")
    monkeypatch.setenv("TRTLLM_B12X_CROSSOVER", "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "PathTimer", functools.partial(timing.PathTimer, budget_s=4.0))
    module, _ = built(form)
    x, logits = (given.cuda() for given in _inputs(1024))
    before = module(x[:8], logits[:8])
    schedule = module.backend.schedule
    assert isinstance(schedule.policy, MeasuredPolicy)
    rows = schedule.policy.timings.rows
    print(f"\n{schedule.summary}: {rows}")
    assert distance(module(x[:8], logits[:8]), before.float()) < 0.1
    assert list(tmp_path.rglob("crossover-*.json"))
    if form == "MXFP8":
        for tokens, times in rows.items():
            name = fastest(times, gain=1.0)  # `grouped` stands in for the host
            assert schedule.at(tokens) is (schedule.forms[name] if name else schedule.families["grouped"])
    else:
        families = {tokens: {name.split()[0] for name in times} for tokens, times in rows.items()}
        assert families[128] == {"triton", "grouped", HOST}  # 32 rows of each expert are triton's most
        assert families[256] == {"grouped", HOST}
        assert type(schedule.at(1024)) is GroupedNVFP4Kernel


@pytest.mark.parametrize("form", ["NVFP4", "MXFP8"])
def test_a_refit_while_a_graph_holds_the_layer(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Other weights by the load hooks, then the first ones written by name without a hook, input scales too."""
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "triton,grouped")
    (module, _), (other, second) = built(form), built(form, seed=7)
    x, logits = (given.cuda() for given in _inputs(16))
    ids, router_weights = module.routing_method.apply(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = layers.run_moe(module.backend, x, ids, router_weights)
    graph.replay()
    original = {name: parameter.data.clone() for name, parameter in module.backend.named_parameters()}
    first, wanted = kept.clone(), layers.run_moe(other.backend, x, ids, router_weights)
    assert not torch.equal(first, wanted)
    layers.load(module, second)
    graph.replay()
    assert torch.equal(kept, wanted)
    for name, parameter in module.backend.named_parameters():
        parameter.data.copy_(original[name])
    graph.replay()
    assert torch.equal(kept, first)
