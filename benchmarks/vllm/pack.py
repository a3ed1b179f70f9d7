"""Pack vLLM for a Hopper machine without a network: ``python -m benchmarks.vllm.pack VLLM_WHEEL FILE.zip [WHEEL ...]``.

The file holds vLLM's Python code, its two extensions that layers call, and the other wheels. Of the extensions' machine code only
that for SM90 stays, and PTX where there is none: the rest is zeroed, so that it packs to nothing and every offset stays.
"""

from __future__ import annotations

import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

EXTENSIONS = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so")
_ANY_NAME = "def __getattr__(name):\n    return type(name, (), {})\n"
STAND_INS = {
    "vllm/vllm_flash_attn/__init__.py": "def __getattr__(name):\n    return None\n",
    **dict.fromkeys((f"xgrammar/{name}.py" for name in ("__init__", "structural_tag", "openai_tool_call_schema")), _ANY_NAME),
    **dict.fromkeys((f"llguidance/{name}.py" for name in ("__init__", "hf", "torch")), _ANY_NAME),
}
"""Modules that no layer calls, and that are large: attention, and grammars for structured output."""
_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""Header of a fat binary: magic number, version, size of the header (CUDA 13 ``fatbinary``)."""
_PTX, _CUBIN, _SM = 1, 2, 90


def entries(code: bytes) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield (kind, architecture, first byte, end) of the entries of each fat binary, without their headers."""
    place = code.find(_MAGIC)
    while place >= 0:
        end = place + 16 + int(struct.unpack_from("<Q", code, place + 8)[0])
        found, entry = [], place + 16
        while entry < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", code, entry)
            found.append((kind, int(struct.unpack_from("<I", code, entry + 28)[0]), entry + header, entry + header + size))
            entry += header + size
        yield found
        place = code.find(_MAGIC, end)


def pruned(code: bytes) -> bytes:
    """Zero the machine code that SM90 does not run: what is not of SM90, and PTX beside it."""
    kept = bytearray(code)
    for binary in entries(code):
        native = any(kind == _CUBIN and sm == _SM for kind, sm, _, _ in binary)
        newest = max((sm for kind, sm, _, _ in binary if kind == _PTX and sm <= _SM), default=0)
        for kind, sm, first, end in binary:
            if (kind, sm) != ((_CUBIN, _SM) if native else (_PTX, newest)):
                kept[first:end] = bytes(end - first)
    return bytes(kept)


def _needed(name: str) -> bool:
    """Return True for vLLM's code and metadata, without copies of other packages, attention, and tables of tile sizes."""
    return ".dist-info/" in name or (
        name.endswith(".py")
        and not name.startswith(("vllm/third_party/deep_gemm", "vllm/third_party/flash", "vllm/vllm_flash_attn/"))
    )


def pack(vllm: Path, target: Path, others: list[Path]) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as archive:
        with zipfile.ZipFile(vllm) as wheel:
            for name in wheel.namelist():
                if name in EXTENSIONS:
                    archive.writestr(name, pruned(wheel.read(name)))
                elif name not in STAND_INS and _needed(name):
                    archive.writestr(name, wheel.read(name))
        for path in others:
            with zipfile.ZipFile(path) as wheel:
                for name in wheel.namelist():
                    archive.writestr(name, wheel.read(name))
        for name, text in STAND_INS.items():
            archive.writestr(name, text)
    print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
