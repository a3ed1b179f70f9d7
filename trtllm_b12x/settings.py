"""Every environment switch, in one table.  All names start with ``TRTLLM_``: the host's MPI sessions forward only those."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Switch:
    """An on/off setting: ``1`` or ``0`` in the environment."""

    name: str
    default: bool
    meaning: str

    def __call__(self) -> bool:
        """The value now; anything but 0 and 1 is the default."""
        return {"1": True, "0": False}.get(os.environ.get(self.name, "").strip(), self.default)


GATHER_BF16 = Switch(
    "TRTLLM_B12X_GATHER_BF16",
    default=False,
    meaning="attention-DP ranks gather bf16 tokens instead of NVFP4, four times the bytes, so that b12x can serve them",
)

SWITCHES = (GATHER_BF16,)
