"""Define all environment variables. Names start with ``TRTLLM_``: TensorRT-LLM forwards only those to its MPI sessions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

_PREFIX = "TRTLLM_B12X"
_Value = TypeVar("_Value", str, bool)
_WORDS = {"false": "0", "off": "0", "no": "0", "true": "1", "on": "1", "yes": "1"}
"""Accepted spellings of 0 and 1. ``trtllm_b12x.pth`` knows the first three."""


@dataclass(frozen=True)
class Switch(Generic[_Value]):
    """Environment variable with its allowed values, their meaning and the default."""

    name: str
    values: dict[str, _Value]
    default: str
    meaning: str

    def __call__(self) -> _Value:
        """Return the current value. An unknown value counts as unset; ``complaints`` reports it."""
        return self.values.get(self.read(self.text), self.values[self.default])

    @property
    def text(self) -> str:
        return os.environ.get(self.name, "")

    def read(self, text: str) -> str:
        """Return the key of ``values`` that ``text`` means, else ``text``. Ignore case and accept other words for 0 and 1."""
        word = text.strip()
        meanings = (word.lower(), _WORDS.get(word.lower()))
        return next((value for value in self.values if value.lower() in meanings), word)

    def knows(self, text: str) -> bool:
        return self.read(text) in self.values

    @property
    def expected(self) -> str:
        """Return the expected values as a phrase, for error messages."""
        *others, last = self.values
        return f"{', '.join(others)} or {last}" if others else last

    @property
    def used(self) -> str:
        """Return the value that replaces an invalid one, for error messages."""
        return self.default

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


class Order(Switch[str]):
    """Variable that lists some of ``values``, separated by commas, in order of preference."""

    def listed(self) -> tuple[str, ...]:
        """Return the listed values in their order, without repetitions. Return all values if none is listed."""
        words = map(self.read, self.text.split(","))
        return tuple(dict.fromkeys(word for word in words if word in self.values)) or tuple(self.values)

    def only(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """List only ``names`` inside the ``with`` block."""
        return self.set(",".join(names))

    def knows(self, text: str) -> bool:
        return all(not word.strip() or super(Order, self).knows(word) for word in text.split(","))

    @property
    def expected(self) -> str:
        return f"one or more of {', '.join(self.values)}"

    @property
    def used(self) -> str:
        return ",".join(self.listed())


class Crossover(Switch[str]):
    """Variable that holds ``auto``, a token count, or the path of an existing file."""

    def __call__(self) -> str:
        word = self.read(self.text)
        return word if word and self.knows(word) else self.default

    def knows(self, text: str) -> bool:
        word = self.read(text)
        return word in self.values or self.first(word) is not None or self.is_file(word)

    @staticmethod
    def first(word: str) -> int | None:
        """Return ``word`` as a token count between 1 and ``LARGEST_CROSSOVER``, or None if it is not one."""
        return int(word) if word.isascii() and word.isdigit() and 0 < int(word) <= LARGEST_CROSSOVER else None

    @staticmethod
    def is_file(word: str) -> bool:
        return (os.sep in word or word.endswith(".json")) and os.path.isfile(word)

    @property
    def expected(self) -> str:
        return f"auto, a token count such as 64 (at most {LARGEST_CROSSOVER}), or a file that is there"


FAMILIES = ("b12x", "triton", "grouped")
"""Names of the kernel families, in order of preference."""
LARGEST_CROSSOVER = 8192
"""Largest crossover, in tokens. Kernels are planned for up to this many."""
_ON_OFF = {"0": False, "1": True}

ENABLED = Switch(_PREFIX, _ON_OFF, "1", "0 turns everything off")
CROSSOVER = Crossover(
    f"{_PREFIX}_CROSSOVER",
    {"auto": "auto"},
    "auto",
    "from how many tokens on CUTLASS serves: as the card measures it, a fixed count, or what a file says (tune --json)",
)
FREEZE = Switch(
    f"{_PREFIX}_FREEZE",
    _ON_OFF,
    "0",
    "1 compiles nothing in a server: kernels that are not in the caches (trtllm-b12x warmup) do not serve, and say so",
)
KERNELS = Order(
    f"{_PREFIX}_KERNELS",
    {name: name for name in FAMILIES},
    ",".join(FAMILIES),
    "kernel families to consider, in this order",
)
LOG = Switch(
    f"{_PREFIX}_LOG",
    {level: level for level in ("DEBUG", "INFO", "WARNING", "ERROR")},
    "INFO",
    "level of the logger trtllm_b12x",
)

SWITCHES: tuple[Switch[str] | Switch[bool], ...] = (ENABLED, CROSSOVER, FREEZE, KERNELS, LOG)


def complaints() -> list[str]:
    """Return one message per ``TRTLLM_B12X*`` variable with an unknown name or value. ``doctor`` then exits with status 2."""
    known = {switch.name: switch for switch in SWITCHES}
    messages = []
    for name, value in sorted(os.environ.items()):
        if name != _PREFIX and not name.startswith(f"{_PREFIX}_"):
            continue
        switch = known.get(name)
        if switch is None:
            messages.append(f"{name} is no setting of trtllm_b12x; there are {', '.join(known)}")
        elif value.strip() and not switch.knows(value):
            messages.append(f"{name} must be {switch.expected}; got {value}, and {switch.used} is used")
    return messages


def table() -> str:
    """Return a Markdown table that documents every variable."""
    more = {CROSSOVER.name: ("64", "FILE")}
    choices = {s.name: ", ".join(f"`{value}`" for value in (*s.values, *more.get(s.name, ()))) for s in SWITCHES}
    rows = [f"| `{s.name}` | {choices[s.name]} | `{s.default}` | {s.meaning} |" for s in SWITCHES]
    return "\n".join(["| variable | values | default | meaning |", "|---|---|---|---|", *rows])
