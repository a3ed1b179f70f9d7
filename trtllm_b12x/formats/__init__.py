# SPDX-License-Identifier: Apache-2.0
"""List the number formats of expert weights, one row each. ``trtllm_b12x.decision.families`` lists their kernels."""

from __future__ import annotations

from dataclasses import dataclass

TILES, ROWS = "128x4", "rows"
"""Order of block scales: interleaved tiles of 128 rows by 4 blocks, or rows of blocks."""
UP_GATE, GATE_UP, BY_TURNS = "up, gate", "gate, up", "gate and up by turns"
"""Order of FC1's rows if the layer has a gate. ``BY_TURNS`` is gate/up interleaved."""


@dataclass(frozen=True)
class WeightLayout:
    """Layout in which an engine stores a layer's matrices. Kernels read them in place."""

    scales: str = TILES
    fc1: str = UP_GATE
    hidden_multiple: int = 1
    """FC1's columns and FC2's rows are padded to a multiple of this."""

    def stored_hidden(self, hidden_size: int) -> int:
        return -(-hidden_size // self.hidden_multiple) * self.hidden_multiple


DEFAULT_LAYOUT = WeightLayout()


@dataclass(frozen=True)
class Format:
    name: str
    recipe: str
    """nvidia-modelopt's configuration that exports this format."""
    code_bits: int
    group_size: int
    """Elements that share a block scale of one byte."""
    activations: tuple[str, ...] = ("Swiglu", "Relu2")
    """Activations of usual checkpoints, which ``doctor`` checks."""
    hosts_path: bool = True
    """True if TensorRT-LLM itself serves the format on SM12x. If False, our kernels serve every call."""
    layout: WeightLayout = DEFAULT_LAYOUT
    """Layout in which TensorRT-LLM stores the weights for CUTLASS."""
    algorithm: str = ""
    """TensorRT-LLM's ``QuantAlgo`` member on SM12x. If empty, ``name`` is used."""

    @property
    def quant_algo(self) -> str:
        return self.algorithm or self.name


FORMATS: tuple[Format, ...] = (
    Format("NVFP4", "NVFP4_DEFAULT_CFG", code_bits=4, group_size=16),
    Format("W4A16_NVFP4", "W4A16_NVFP4_CFG", code_bits=4, group_size=16, layout=WeightLayout(scales=ROWS)),
    Format(
        "MXFP4",
        "MXFP4_DEFAULT_CFG",
        code_bits=4,
        group_size=32,
        activations=("SwigluBias",),
        layout=WeightLayout(hidden_multiple=128),
        algorithm="W4A8_MXFP4_MXFP8",
    ),
    Format("MXFP8", "MXFP8_DEFAULT_CFG", code_bits=8, group_size=32, activations=("Swiglu", "Geglu"), hosts_path=False),
)


def names() -> tuple[str, ...]:
    return tuple(row.name for row in FORMATS)


def find(name: str | None) -> Format | None:
    """Return the format of this name or ``QuantAlgo``, or None for an unquantized layer and for other algorithms."""
    return next((row for row in FORMATS if name in (row.name, row.algorithm) and name), None)


def group_size(name: str) -> int | None:
    """Return how many weights share a block scale, or None for an unknown algorithm."""
    row = find(name)
    return None if row is None else row.group_size


def stored_bytes(name: str, elements: int) -> int:
    """Return the size in bytes of ``elements`` weights with their block scales. Weights of an unknown format have 16 bits."""
    row = find(name)
    return 2 * elements if row is None else elements * row.code_bits // 8 + elements // row.group_size
