# SPDX-License-Identifier: Apache-2.0
"""Define all environment variables. Names start with ``TRTLLM_``: TensorRT-LLM forwards only those to its MPI sessions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

_PREFIX = "TRTLLM_B12X"
_Value = TypeVar("_Value")
FAMILIES = ("cuda", "b12x", "triton", "gemm", "grouped")
"""Names of the kernel families, in order of preference."""
LARGEST_CROSSOVER = 8192
"""Largest crossover, in tokens. Kernels are planned for up to this many tokens."""
_ON_OFF = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
"""``trtllm_b12x.bootstrap`` repeats the words for 0."""


@dataclass(frozen=True)
class Switch(Generic[_Value]):
    name: str
    parse: Callable[[str], _Value]
    """Function that parses a text. For an invalid text it raises ValueError, whose message states the expected values."""
    default: str
    values: tuple[str, ...]
    """Values in the documentation's table."""
    meaning: str

    def __call__(self) -> _Value:
        """Return the current value. An invalid value counts as unset, and ``complaints`` reports it."""
        try:
            return self.parse(os.environ.get(self.name, "").strip() or self.default)
        except ValueError:
            return self.parse(self.default)

    @contextmanager
    def set(self, text: str) -> Iterator[None]:
        """Set the variable to ``text`` inside the ``with`` block."""
        before = os.environ.get(self.name)
        os.environ[self.name] = text
        try:
            yield
        finally:
            if before is None:
                del os.environ[self.name]
            else:
                os.environ[self.name] = before


def _on_off(text: str) -> bool:
    if text.lower() not in _ON_OFF:
        raise ValueError("0 or 1")
    return _ON_OFF[text.lower()]


def _families(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(word.strip().lower() for word in text.split(",") if word.strip()))
    if not names or not set(names) <= set(FAMILIES):
        raise ValueError(f"one or more of {', '.join(FAMILIES)}")
    return names


def _crossover(text: str) -> int | Path | None:
    if text.lower() == "auto":
        return None
    if text.isascii() and text.isdigit() and 0 < int(text) <= LARGEST_CROSSOVER:
        return int(text)
    if (os.sep in text or text.endswith(".json")) and os.path.isfile(text):
        return Path(text)
    raise ValueError(f"auto, a token count such as 64 (at most {LARGEST_CROSSOVER}), or an existing file")


def _level(text: str) -> str:
    if text.upper() not in LEVELS:
        raise ValueError(f"{', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
    return text.upper()


LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

ENABLED = Switch(_PREFIX, _on_off, "1", ("0", "1"), "0 turns everything off")
CROSSOVER = Switch(
    f"{_PREFIX}_CROSSOVER",
    _crossover,
    "auto",
    ("auto", "64", "FILE"),
    "from how many tokens on CUTLASS serves: as the card measures it, a fixed count, or what a file says (tune --out)",
)
FREEZE = Switch(
    f"{_PREFIX}_FREEZE",
    _on_off,
    "0",
    ("0", "1"),
    "1 compiles nothing in a server: kernels that are not in the caches (trtllm-b12x warmup) do not serve, and say so",
)
HOPPER = Switch(
    f"{_PREFIX}_HOPPER",
    _on_off,
    "0",
    ("0", "1"),
    "1 lets Hopper (SM90) count as SM120 in vLLM and SGLang, to measure what this package does there; it is not meant to serve",
)
KERNELS = Switch(f"{_PREFIX}_KERNELS", _families, ",".join(FAMILIES), FAMILIES, "kernel families to consider, in this order")
W4A4_PREFILL = Switch(
    f"{_PREFIX}_W4A4_PREFILL",
    _on_off,
    "0",
    ("0", "1"),
    "1 serves W4A16_NVFP4 experts as NVFP4: CUTLASS prefills them with activations in FP4, which changes numbers; it needs "
    "input scales in the checkpoint",
)
LOG = Switch(
    f"{_PREFIX}_LOG",
    _level,
    "INFO",
    LEVELS,
    "level of the logger trtllm_b12x; in vLLM and SGLang it is a child of theirs, by default of their level",
)

SWITCHES = (ENABLED, CROSSOVER, FREEZE, HOPPER, KERNELS, W4A4_PREFILL, LOG)


def counted(sm: int | None) -> int | None:
    """Return the SM that the rules use in vLLM and SGLang: 120 for SM90 if ``TRTLLM_B12X_HOPPER`` is 1, else ``sm``."""
    return 120 if sm == 90 and HOPPER() else sm


def complaints() -> list[str]:
    """Return one message per unknown ``TRTLLM_B12X*`` name or value. If there are messages, ``doctor`` exits with status 2."""
    known = {switch.name: switch for switch in SWITCHES}
    messages = []
    for name, value in sorted(os.environ.items()):
        if name != _PREFIX and not name.startswith(f"{_PREFIX}_"):
            continue
        if name not in known:
            messages.append(f"{name} is not a setting of trtllm_b12x; there are {', '.join(known)}")
            continue
        try:
            known[name].parse(value.strip() or known[name].default)
        except ValueError as expected:
            messages.append(f"{name} must be {expected}; got {value}, and {known[name].default} is used")
    return messages
