# SPDX-License-Identifier: Apache-2.0
"""From a kernel's Python to a shared object that runs it on ``sm_90a``: compile, translate, assemble, link, remember."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .translate import Entry, translate

_HERE = Path(__file__).parent
FUNCTION = "kernel"
"""Name that every built object exports."""


class BuildError(RuntimeError):
    """A tool refused; the message holds its words."""


@dataclass(frozen=True)
class Options:
    """How kernels are built."""

    sm: int = 120
    """120 or 121: the card they are compiled for."""
    stagger: bool = False
    """Let every warp sleep at random behind each barrier: what hangs on timing shows."""

    @property
    def target(self) -> str:
        return f"sm_{self.sm}a"


class Builder:
    """Builds kernels into a folder that may travel between machines, one object and one JSON per kernel."""

    def __init__(self, cache: Path, dump: Path, options: Options) -> None:
        self.cache, self.dump, self.options = cache, dump, options
        cache.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, compile_kernel: Callable[[], Any]) -> Path:
        """The object of the kernel that FlashInfer calls ``name``, from the cache or built now."""
        path = self.cache / f"{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{_fingerprint(self.options)}.so"
        if not path.exists():
            self._build(name, compile_kernel, path)
        return path

    def _build(self, name: str, compile_kernel: Callable[[], Any], path: Path) -> None:
        """Write the object, and beside it what building it showed."""
        for old in self.dump.glob("*"):
            old.unlink()
        compiled = compile_kernel()
        ptx = "\n".join(source.read_text() for source in self.dump.glob("*.ptx"))
        target = self.options.target
        if f".target {target}" not in ptx:
            raise BuildError(f"compiling {name} left no PTX for {target} in {self.dump}: the CuTe DSL was in use before the bed")
        translation = translate(ptx, device_functions(), stagger=self.options.stagger)
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            cubin, words = assemble(translation.ptx, folder)
            compiled.export_to_c(str(folder / "host.o"), function_name=FUNCTION)
            _link(folder, cubin, translation.entries, path)
        built = {
            "name": name,
            "target": target,
            "counts": translation.counts,
            "registers": [int(n) for n in re.findall(r"Used (\d+) registers", words)],
            "spilled_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", words)),
        }
        path.with_suffix(".json").write_text(json.dumps(built, indent=1))


MUTATION = "SM12X_ON_HOPPER_MUTATION"
"""Environment variable: ``what => other`` breaks a replaced instruction, to show that it is noticed."""


def instructions() -> str:
    return mutated((_HERE / "instructions.cu").read_text(encoding="utf-8"))


def mutated(text: str) -> str:
    """Return the source or PTX with the change that ``MUTATION`` asks for."""
    what, _, other = os.environ.get(MUTATION, "").partition(" => ")
    return text.replace(what, other) if what else text


@functools.cache
def device_functions() -> str:
    """``instructions.cu`` in PTX for ``sm_90a``, by NVRTC: no CUDA toolkit is needed.

    Raises:
        BuildError: NVRTC's words.
    """
    from cuda.bindings import nvrtc

    def checked(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise BuildError(f"NVRTC: {result[0]}")
        return result[1] if len(result) > 1 else None

    program = checked(nvrtc.nvrtcCreateProgram(instructions().encode(), b"instructions.cu", 0, [], []))
    # Relocatable: functions that nothing in this module calls are kept.
    options = [b"--gpu-architecture=compute_90a", b"--relocatable-device-code=true"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status[0]):
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise BuildError(log.decode())
    ptx = b" " * checked(nvrtc.nvrtcGetPTXSize(program))
    checked(nvrtc.nvrtcGetPTX(program, ptx))
    return ptx.rstrip(b"\0").decode()


def assemble(ptx: str, folder: Path) -> tuple[Path, str]:
    """PTX to a cubin for ``sm_90a``, and what ``ptxas -v`` said.

    -O2: at -O3 a dynamic kernel came out with 32 registers and 12 kB of spills (ptxas 13.0).
    """
    source, cubin = folder / "translated.ptx", folder / "translated.cubin"
    source.write_text(ptx)
    return cubin, _run([str(ptxas()), "-arch=sm_90a", "-O2", "-v", str(source), "-o", str(cubin)])


@functools.cache
def ptxas() -> Path:
    """The toolkit's if it is on the path, or Triton's own, which FlashInfer's b12x module needs anyway.

    Raises:
        BuildError: there is neither.
    """
    import triton

    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    found = shutil.which("ptxas") or (own if own.exists() else None)
    if found is None:
        raise BuildError("no ptxas: install triton, or put the CUDA toolkit on the path")
    return Path(found)


def _link(folder: Path, cubin: Path, entries: tuple[Entry, ...], path: Path) -> None:
    lines = []
    for number, entry in enumerate(entries):
        kinds = [0 if size != 128 else 2 if index in entry.fp4_maps else 1 for index, size in enumerate(entry.parameters)]
        lines.append(f"static const int kinds{number}[] = {{{', '.join(map(str, kinds))}}};")
    table = ", ".join(f'{{"{entry.name}", {len(entry.parameters)}, kinds{i}}}' for i, entry in enumerate(entries))
    lines += [f"static const struct entry entries[] = {{{table}}};", f"#define ENTRY_COUNT {len(entries)}"]
    header = folder / "entries.h"
    header.write_text("\n".join(lines) + "\n")
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    command = [os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", "-mcmodel=large", "-Wl,-Bsymbolic", "-o", str(partial)]
    command += [str(folder / "host.o"), str(_HERE / "loader.c"), f'-DCUBIN="{cubin}"', f'-DENTRIES="{header}"', "-ldl"]
    _run(command)
    partial.replace(path)


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}\n{result.stdout[-2000:]}{result.stderr[-4000:]}")
    return result.stdout + result.stderr


@functools.cache
def _fingerprint(options: Options) -> str:
    """Everything besides FlashInfer's own key that a built object depends on."""
    digest = hashlib.sha256(repr(options).encode())
    for name in ("instructions.cu", "loader.c", "translate.py", "build.py"):
        digest.update((_HERE / name).read_bytes())
    for name in ("flashinfer-python", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13"):
        digest.update(importlib.metadata.version(name).encode())
    return digest.hexdigest()[:10]
