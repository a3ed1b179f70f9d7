"""W4A16_NVFP4 and MXFP4 in every layout in Triton's interpreter, against the layer in float32.

``test_kernels_device.py`` has a GPU's numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests import forks
from tests.nvfp4_layer import distance, random_call, random_layer
from trtllm_b12x.formats import BY_TURNS, GATE_UP, ROWS, TILES, WeightLayout
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.catalog import KERNELS
from trtllm_b12x.kernels.triton.decode import Tile, Tiles

CPU = torch.device("cpu")
TRTLLM_W4A16, TRTLLM_MXFP4 = WeightLayout(scales=ROWS), WeightLayout(hidden_multiple=128)
VLLM, VLLM_GPT_OSS = WeightLayout(ROWS, GATE_UP), WeightLayout(ROWS, BY_TURNS)
BLOCKS = Tiles(16, Tile(32, 128, 2, 2), Tile(64, 128, 4, 2))


def geometry(form: str, layout: WeightLayout, *sizes: int, **options: Any) -> Geometry:
    experts, top_k, hidden, size = sizes
    arguments: dict[str, Any] = {"activation": "Swiglu", "format": form, "layout": layout, **options}
    return Geometry(experts, top_k, hidden, size, **arguments)


CASES: dict[str, tuple[Geometry, int, Any]] = {
    "W4A16 in rows": (geometry("W4A16_NVFP4", TRTLLM_W4A16, 4, 2, 128, 192), 3, None),
    "W4A16 in rows, off every tile": (geometry("W4A16_NVFP4", TRTLLM_W4A16, 3, 2, 192, 80), 3, None),
    "W4A16 in rows, blocks of 16": (geometry("W4A16_NVFP4", TRTLLM_W4A16, 4, 2, 256, 128), 40, BLOCKS),
    "W4A16 in rows, squared": (geometry("W4A16_NVFP4", TRTLLM_W4A16, 4, 2, 128, 128, activation="Relu2"), 3, None),
    "W4A16 in rows, float16": (geometry("W4A16_NVFP4", TRTLLM_W4A16, 4, 2, 128, 64, dtype=torch.float16), 3, None),
    "W4A16, gate first": (geometry("W4A16_NVFP4", VLLM, 4, 2, 128, 64), 3, None),
    "NVFP4, gate first, tiles": (geometry("NVFP4", WeightLayout(TILES, GATE_UP), 4, 2, 128, 64), 3, None),
    "MXFP4 padded": (geometry("MXFP4", TRTLLM_MXFP4, 4, 2, 160, 128), 3, None),
    "MXFP4 padded, bias and limits": (
        geometry("MXFP4", TRTLLM_MXFP4, 4, 2, 160, 256, activation="SwigluBias", bias=torch.bfloat16), 3, None,
    ),
    "MXFP4 padded, blocks of 16": (geometry("MXFP4", TRTLLM_MXFP4, 4, 2, 96, 128, bias=torch.bfloat16), 40, BLOCKS),
    "MXFP4 by turns": (
        geometry("MXFP4", VLLM_GPT_OSS, 4, 2, 160, 96, activation="SwigluBias", bias=torch.bfloat16), 3, None,
    ),
    "MXFP4 by turns, blocks of 16": (geometry("MXFP4", VLLM_GPT_OSS, 4, 2, 128, 96, activation="SwigluBias"), 40, BLOCKS),
    "MXFP4, a rank of two": (geometry("MXFP4", TRTLLM_MXFP4, 5, 3, 160, 128, ranks=2), 9, None),
}  # fmt: skip
GROUPED = {
    "in rows": (geometry("W4A16_NVFP4", TRTLLM_W4A16, 4, 2, 128, 192), 70),
    "gate first": (geometry("W4A16_NVFP4", VLLM, 4, 2, 192, 64, activation="Geglu"), 70),
    "not gated": (geometry("W4A16_NVFP4", TRTLLM_W4A16, 4, 2, 64, 64, activation="Relu2"), 20),
    "a rank of two": (geometry("W4A16_NVFP4", TRTLLM_W4A16, 5, 3, 128, 64, ranks=2), 20),
    "float16": (geometry("W4A16_NVFP4", TRTLLM_W4A16, 4, 2, 128, 64, dtype=torch.float16), 20),
    "rows that are no words": (geometry("W4A16_NVFP4", VLLM, 3, 2, 192, 80, bias=torch.bfloat16), 20),
    "MXFP4 by turns": (geometry("MXFP4", VLLM_GPT_OSS, 4, 2, 160, 96, activation="SwigluBias", bias=torch.bfloat16), 70),
    "MXFP4 padded": (geometry("MXFP4", TRTLLM_MXFP4, 4, 2, 160, 128, activation="SwigluBias", bias=torch.bfloat16), 20),
}


def planned(family: str, layer: Any, tokens: int, first: int = 0, tiles: Tiles | None = None) -> Any:
    kernel: Any = KERNELS[family, layer.geometry.format][0]()
    kernel.plan(layer.geometry, tokens, CPU)
    if tiles:
        kernel.tiles = lambda tokens: tiles
    kernel.bind(layer.kernel_weights(), first)
    return kernel


def compared(family: str, sizes: Geometry, tokens: int, tiles: Tiles | None = None) -> dict[str, float]:
    layer = random_layer(sizes, ratio=True)
    first = 5 if sizes.expert_parallel else 0
    x, ids, router_weights = random_call(sizes, tokens, sizes.num_experts * sizes.ranks, dtype=sizes.dtype)
    call = MoECall(x, ids, router_weights)
    expected = layer.expected(x, ids, router_weights, first)
    kinds: Any = KERNELS[family, sizes.format]
    yardstick = kinds[1]()
    yardstick.plan(sizes, tokens, CPU)
    yardstick.bind(layer.kernel_weights(), first)
    found = planned(family, layer, tokens, first, tiles).run(call)
    return {"kernel": distance(found, expected), "torch": distance(yardstick.run(call), expected)}


def of_extreme_scales() -> dict[str, bool]:
    """E8M0 of 0, of 2**9 and beyond it beside others, and NaN (255) in one row of FC2."""
    layer = random_layer(geometry("MXFP4", TRTLLM_MXFP4, 3, 1, 128, 128))
    layer.s1[0, ::2], layer.s2[0, ::3, 1] = 0, 0
    layer.w2[2, 7], layer.s2[2, 7], layer.s2[2, 9, 1] = 0x11, 136, 137  # 0.5 each
    layer.s2[1, 5, 0] = 255
    x, ids, router_weights = random_call(layer.geometry, 3)
    ids[:, 0] = torch.tensor([0, 1, 2])
    found = planned("triton", layer, 3).run(MoECall(x, ids, router_weights))
    expected = layer.expected(x, ids, router_weights)
    finite, large = expected.isfinite(), float(expected[2, 7])
    finite[2, 7] = finite[2, 9] = False
    return {
        "finite": distance(found[finite], expected[finite]) < 0.004,
        "NaN": found.isnan().nonzero().tolist() == [[1, 5], [2, 9]],
        "large": abs(float(found[2, 7]) - large) < 0.01 * abs(large),
    }


FEW = ("W4A16 in rows, off every tile", "NVFP4, gate first, tiles", "MXFP4 padded, bias and limits", "MXFP4 by turns")
FEW_GROUPED = ("in rows", "MXFP4 by turns")
"""Cases that ``make test`` runs."""


def few() -> dict[str, Any]:
    found = {f"grouped {name}": compared("grouped", *GROUPED[name]) for name in FEW_GROUPED}
    return {name: compared("triton", *CASES[name]) for name in FEW} | found


def others() -> dict[str, Any]:
    found: dict[str, Any] = {name: compared("triton", *case) for name, case in CASES.items() if name not in FEW}
    found |= {f"grouped {name}": compared("grouped", *case) for name, case in GROUPED.items() if name not in FEW_GROUPED}
    return {**found, "extremes": of_extreme_scales()}


@pytest.mark.embedded
def test_against_the_layer_in_float32() -> None:
    found = forks.in_the_interpreter(f"{__name__}:few")
    assert len(found) == len(FEW) + len(FEW_GROUPED)
    assert all(max(errors.values()) < 0.004 for errors in found.values()), found


@pytest.mark.all
@pytest.mark.embedded
def test_the_other_cases() -> None:
    found = forks.in_the_interpreter(f"{__name__}:others")
    extremes = found.pop("extremes")
    assert all(extremes.values()), extremes
    assert len(found) == len(CASES) + len(GROUPED) - len(FEW) - len(FEW_GROUPED)
    assert all(max(errors.values()) < 0.004 for errors in found.values()), found


@pytest.mark.embedded
def test_another_layout_than_the_planned_one_is_refused() -> None:
    sizes = CASES["W4A16, gate first"][0]
    kinds: Any = KERNELS["triton", sizes.format]
    kernel = kinds[1]()
    kernel.plan(sizes, 1, CPU)
    with pytest.raises(ValueError, match="laid out as"):
        kernel.bind(random_layer(dataclasses.replace(sizes, layout=TRTLLM_W4A16)).kernel_weights())
