"""List the number formats of expert weights, one row each. ``trtllm_b12x.decision.families`` says which kernels serve one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """Number format: codes and block scales."""

    name: str
    """The host's ``QuantAlgo`` member."""
    recipe: str
    """nvidia-modelopt's configuration that exports it."""
    code_bits: int
    group_size: int
    """Elements that share a block scale of one byte."""
    activations: tuple[str, ...] = ("Swiglu", "Relu2")
    """Activations of usual checkpoints, which ``doctor`` asks about."""
    hosts_path: bool = True
    """True if TensorRT-LLM serves the format on SM12x by itself. If not, our kernels serve every call."""


FORMATS: tuple[Format, ...] = (
    Format(
        "NVFP4",
        "NVFP4_DEFAULT_CFG",
        code_bits=4,
        group_size=16,
    ),
    Format(
        "MXFP8",
        "MXFP8_DEFAULT_CFG",
        code_bits=8,
        group_size=32,
        activations=("Swiglu", "Geglu"),
        hosts_path=False,
    ),
)


def names() -> tuple[str, ...]:
    return tuple(row.name for row in FORMATS)


def find(name: str) -> Format | None:
    """Return the format of this name, or None for an unquantized layer and for other algorithms."""
    return next((row for row in FORMATS if row.name == name), None)


def group_size(name: str) -> int | None:
    """Return how many weights share a block scale, or None for an unknown algorithm."""
    row = find(name)
    return None if row is None else row.group_size


def stored_bytes(name: str, elements: int) -> int:
    """Return the bytes of codes and block scales of so many weights; of 16-bit weights if the format is unknown."""
    row = find(name)
    return 2 * elements if row is None else elements * row.code_bits // 8 + elements // row.group_size
