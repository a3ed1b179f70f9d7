"""Machine code of a kernel, by the tools that Triton carries."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import triton

_TOOLS = Path(os.environ.get("SASS_TOOLS") or Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*);")


def instructions(cubin: Path) -> tuple[list[str], dict[str, int]]:
    """Instructions ``opcode operands`` in order, and where each label is."""
    text = subprocess.run([_TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    found: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if match := _LABEL.match(line):
            labels[match[1]] = len(found)
        elif match := _INSTRUCTION.match(line):
            found.append(match[1] + match[2])
    return found, labels


def product_loop(cubin: Path) -> Counter[str]:
    """Opcodes of the longest loop with tensor core instructions."""
    found, labels = instructions(cubin)
    longest: list[str] = []
    for place, instruction in enumerate(found):
        match = re.search(r"BRA.*\((\.L_x_\d+)\)", instruction)
        if match and labels.get(match[1], place + 1) <= place:
            body = found[labels[match[1]] : place + 1]
            if len(body) > len(longest) and any("MMA" in line for line in body):
                longest = body
    return Counter(line.split()[0] for line in longest)


def resources(cubin: Path) -> dict[str, int]:
    """``REG``, ``STACK``, ``LOCAL`` and so on."""
    text = subprocess.run([_TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}
