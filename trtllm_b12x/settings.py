"""Every environment switch, in one table.  All names start with ``TRTLLM_``: the host's MPI sessions forward only those."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Generic, TypeVar

_PREFIX = "TRTLLM_B12X"
_Value = TypeVar("_Value", str, bool)


@dataclass(frozen=True)
class Switch(Generic[_Value]):
    """One variable: what it may say, and what each saying means."""

    name: str
    values: dict[str, _Value]
    default: str
    meaning: str

    def __call__(self) -> _Value:
        """The value now; what is not among ``values`` counts as unset (:func:`complaints` names it)."""
        return self.values.get(os.environ.get(self.name, "").strip(), self.values[self.default])


_ON_OFF = {"0": False, "1": True}

ENABLED = Switch(
    _PREFIX,
    {"0": "0", "1": "1", "force": "force"},
    "1",
    "0 turns everything off; force accepts a CuTe DSL payload below CUDA 13 once a compile has proved it (doctor --compile)",
)
ALLOW_BAKED_SCALES = Switch(
    f"{_PREFIX}_ALLOW_BAKED_SCALES",
    _ON_OFF,
    "0",
    "1 admits FlashInfer 0.6.9 to 0.6.16, whose kernels decode subnormal block scales wrongly; the self-test judges them",
)
DETERMINISTIC = Switch(
    f"{_PREFIX}_DETERMINISTIC",
    _ON_OFF,
    "0",
    "1 takes kernels only whose reruns agree to the bit (static, direct micro), from FlashInfer 0.7.0 on",
)
GATHER_BF16 = Switch(
    f"{_PREFIX}_GATHER_BF16",
    _ON_OFF,
    "0",
    "1 lets attention-DP ranks gather bf16 tokens instead of NVFP4, four times the bytes, so that b12x can serve them",
)
KEEP_BACKEND = Switch(
    f"{_PREFIX}_KEEP_BACKEND",
    _ON_OFF,
    "0",
    "1 leaves every backend but CUTLASS alone, also TRTLLM and CUTEDSL where they have no NVFP4 kernel for SM12x",
)
LOG = Switch(
    f"{_PREFIX}_LOG",
    {level: level for level in ("DEBUG", "INFO", "WARNING", "ERROR")},
    "INFO",
    "level of the logger trtllm_b12x",
)

SWITCHES: tuple[Switch[str] | Switch[bool], ...] = (ENABLED, ALLOW_BAKED_SCALES, DETERMINISTIC, GATHER_BF16, KEEP_BACKEND, LOG)


def complaints() -> list[str]:
    """Variables of ours with an unknown name or value: for a warning, never an error."""
    known = {switch.name: switch for switch in SWITCHES}
    found = []
    for name, value in sorted(os.environ.items()):
        if name == _PREFIX or name.startswith(f"{_PREFIX}_"):
            switch = known.get(name)
            if switch is None:
                found.append(f"{name} is no setting of trtllm_b12x; there are {', '.join(known)}")
            elif value.strip() not in switch.values:
                choices = ", ".join(switch.values)
                found.append(f"{name}={value} is none of {choices}; {switch.default} is used")
    return found


def table() -> str:
    """The documentation of every switch, as Markdown."""
    rows = [f"| `{s.name}` | {', '.join(f'`{v}`' for v in s.values)} | `{s.default}` | {s.meaning} |" for s in SWITCHES]
    return "\n".join(["| variable | values | default | meaning |", "|---|---|---|---|", *rows])
