"""Kernels compiled in several processes, into Triton's cache, before its JIT asks for them.

Threads would not do: Triton holds the interpreter's lock for all of a compile but ptxas.  A process compiles what the JIT itself
would, for a card that is named instead of asked, so what it leaves in the cache is what the JIT looks for.  It imports Triton and
the kernels, no torch and nothing of the GPU.

What is in the cache is told by an empty file for each kernel, beside Triton's own folders.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trtllm_b12x.core import log, settings
from trtllm_b12x.environment import child
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.kernels import PlanError, first_line, late

from . import worker
from .variant import Variant

_FEWEST = 3
"""Kernels for which a process is worth its start."""
_MOST_PROCESSES = 16
"""150 MB each."""
_TIMEOUT_S = 600

Report = Callable[[dict[str, Any]], None]
"""Is told what ``worker.py`` says of each kernel."""


def fill_cache(
    variants: Sequence[Variant],
    capability: int,
    workers: int | None = None,
    report: Report | None = None,
    ahead: bool = False,
) -> int:
    """Compile what the cache does not hold.

    What goes wrong here is left to the JIT, which compiles what it does not find, unless it is ``ahead``.

    Args:
        capability: of the card, major * 10 + minor.
        workers: processes; None: one for each core that this one may use.
        ahead: on a machine that need not have the card: also a few kernels, those that are there already, and Triton's own
            modules in C.

    Returns:
        How many processes have compiled.
    """
    wanted = list(variants) if ahead else missing(variants, capability)
    workers = min(workers or len(os.sched_getaffinity(0)), _MOST_PROCESSES, len(wanted))
    if not ahead and (workers < 2 or len(wanted) < _FEWEST):
        return 0
    with suppress(*(() if ahead else (Exception,))):
        names = digests(wanted, capability)
        # The products take three times as long: the last to be done are short.
        order = sorted(range(len(wanted)), key=lambda i: (wanted[i].name == "route_kernel", wanted[i].name, i))
        jobs = [_job(wanted[i], names[i]) for i in order]
        done: list[str] = []

        def note(said: dict[str, Any]) -> None:
            if not said["error"]:
                done.append(said["digest"])
            if report is not None:
                report(said)

        with ExitStack() as stack:
            stand_in = stack.enter_context(_libcuda()) if ahead else None
            _run(jobs, workers, capability, note, stand_in)
        _keep(done)
        return workers
    return 0


def compiled(variants: Sequence[Variant], capability: int, remedy: str) -> tuple[dict[tuple[Any, ...], Any], int]:
    """Every kernel by its key, loaded on torch's current device, and how many processes have compiled.

    Args:
        remedy: what fills the cache beforehand.

    Raises:
        PlanError: some are not in the cache, and there is nothing to compile them with, or it is not to be done.
    """
    if absent := toolchain.lacking(capability):
        raise PlanError("; ".join(map(str, absent)))
    with without_tools(capability), ExitStack() as stack:
        if lacking := missing(variants, capability):
            why = "; ".join(map(str, toolchain.tools_lacking(capability)))
            why = f"{settings.FREEZE.name}=1" if settings.FREEZE() else why
            if why:
                count = f"{len(lacking)} of {len(variants)} kernels are not in Triton's cache"
                raise PlanError(f"{count}, and none is compiled: {why} ({remedy})")
            stack.enter_context(_turn(variants, capability))
        processes = fill_cache(variants, capability)
        with late.expected() as made, _said_of_libcuda():
            found = {variant.key: variant.warm_up() for variant in variants}
            for kernel in found.values():
                kernel.run  # noqa: B018 (loads it)
        if made and settings.FREEZE():
            raise PlanError(f"{made[0]} had to be compiled, though Triton's cache was said to hold it ({remedy})")
        with suppress(OSError):
            if lacking:
                _keep(digests(variants, capability))
    return found, processes


@contextmanager
def _said_of_libcuda() -> Iterator[None]:
    """Triton's own module is cached for one place of libcuda; at another it is compiled, which says no more than it lacks gcc."""
    try:
        yield
    except RuntimeError as error:
        if "C compiler" not in str(error):
            raise
        advice = "set TRITON_LIBCUDA_PATH to the folder of libcuda.so.1, for trtllm-b12x warmup and for the server alike"
        raise PlanError(f"Triton has no C compiler and no module of its own for this place of libcuda.so.1: {advice}") from error


def missing(variants: Sequence[Variant], capability: int) -> list[Variant]:
    """Those that nobody has said to be in the cache."""
    folder = toolchain.own_folder()
    found = zip(variants, digests(variants, capability), strict=True)
    return [variant for variant, digest in found if not (folder / digest).exists()]


def _keep(digests: Sequence[str]) -> None:
    folder = toolchain.own_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for digest in digests:
        (folder / digest).touch()


@contextmanager
def _turn(variants: Sequence[Variant], capability: int) -> Iterator[None]:
    """Ranks of a node that lack the same kernels go one after the other: the others then find what the first has compiled.

    The lock is the operating system's, gone with the process that has it; who has waited for ten minutes goes on without.
    """
    from filelock import FileLock

    with ExitStack() as stack:
        try:
            folder = toolchain.own_folder()
            folder.mkdir(parents=True, exist_ok=True)
            name = hashlib.sha256("".join(sorted(digests(variants, capability))).encode()).hexdigest()[:32]
            stack.enter_context(FileLock(folder / f"{name}.lock", timeout=_TIMEOUT_S))
        except Exception as error:
            log.once(f"Triton's kernels are compiled without waiting for other processes: {first_line(error)}")
        yield


# ---- names ---------------------------------------------------------------------------------------------------------------


def _job(variant: Variant, digest: str) -> dict[str, Any]:
    types = [str(kind) if isinstance(kind, torch.dtype) else kind for kind in variant.types]
    return {**asdict(variant), "types": types, "digest": digest}


def digests(variants: Sequence[Variant], capability: int) -> list[str]:
    """By everything that makes a key of Triton's cache."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    common = [toolchain.version(), _compiler(capability), sorted(get_cache_invalidating_env_vars().items())]
    found = []
    for variant in variants:
        job = _job(variant, "")
        job["types"] = [kind if isinstance(kind, str) else "int" for kind in job["types"]]  # no example makes another kernel
        said = json.dumps([*common, variant.function.cache_key, job], sort_keys=True)
        found.append(hashlib.sha256(said.encode()).hexdigest()[:32])
    return found


def _compiler(capability: int) -> str:
    """As it stands in Triton's keys (``CUDABackend.hash``)."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    return str(make_backend(GPUTarget("cuda", capability, 32)).hash())


# ---- without the tools ---------------------------------------------------------------------------------------------------


def seal(capability: int) -> None:
    """Say of the cache that it holds what a server asks for, and what ptxas has made it: its version is part of every key."""
    version, _, _ = _compiler(capability).rpartition("-")  # and the architecture
    file = toolchain.seal(capability)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"ptxas": version}), encoding="utf-8")


@contextmanager
def without_tools(capability: int) -> Iterator[None]:
    """Where there is no ptxas to be asked for its version, the one of the cache's seal."""
    from triton import knobs

    version = toolchain.sealed(capability)
    if version is None or not toolchain.lacks_ptxas(capability):
        yield
        return
    with knobs.nvidia.scope():
        knobs.nvidia.mock_ptx_version = version
        yield


@contextmanager
def _libcuda() -> Iterator[str]:
    """A folder with a libcuda to link with, whose functions do nothing: a machine that builds images has none."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        sources = Path(triton.__file__).parent / "backends" / "nvidia"
        text = "".join((sources / name).read_text(encoding="utf-8") for name in ("driver.c", "driver.py"))
        names = sorted(set(re.findall(r"\bcu[A-Z]\w+", text)))
        source, library = Path(folder) / "libcuda.c", Path(folder) / "libcuda.so.1"
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in names), encoding="utf-8")
        compiler = os.environ.get("CC") or shutil.which("gcc") or "clang"
        command = [*compiler.split(), "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        (Path(folder) / "libcuda.so").symlink_to(library)  # what Triton 3.5 links with
        yield folder


def _driver_folders() -> list[str]:
    """Where processes on the card may find libcuda: as they are told, or as ldconfig says on the usual systems."""
    told = os.environ.get("TRITON_LIBCUDA_PATH")
    triplet = f"{platform.machine()}-linux-gnu"
    return [told] if told else [f"/lib/{triplet}", f"/usr/lib/{triplet}", "/lib64", "/usr/lib64"]


# ---- processes -----------------------------------------------------------------------------------------------------------


def _run(jobs: list[dict[str, Any]], workers: int, capability: int, report: Report, stand_in: str | None) -> None:
    import triton

    # Triton from where this process has it, whatever a subprocess would find.
    site = str(Path(triton.__file__).parents[1])
    env = {**child.variables(), "TRITON_CACHE_DIR": str(toolchain.cache_folder())}
    command = [sys.executable, str(Path(worker.__file__)), site, str(capability)]
    if stand_in is not None:
        command.append(stand_in)
        env["LIBRARY_PATH"] = os.pathsep.join(filter(None, (stand_in, os.environ.get("LIBRARY_PATH"))))
    request = {"jobs": jobs, "drivers": [] if stand_in is None else _driver_folders(), "processes": workers}
    timeout = _TIMEOUT_S if stand_in is None else None
    run_processes([(command, json.dumps(request))], env, report, timeout)


def run_processes(
    commands: Sequence[tuple[list[str], str]], env: dict[str, str], report: Report, timeout: float | None = None
) -> None:
    """Each with its standard input; ``report`` gets the JSON lines of all of them, one at a time."""
    lock, started = threading.Lock(), []

    def listen(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                with lock, suppress(ValueError):
                    report(json.loads(line))

    try:
        for command, said in commands:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=env,
                cwd="/",
                text=True,
                errors="replace",
                start_new_session=True,  # to be ended with the processes that it forks
            )
            listener = threading.Thread(target=listen, args=(process,), daemon=True)
            listener.start()
            started.append((process, listener))
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.write(said)
                process.stdin.close()
        for process, listener in started:
            process.wait(timeout)
            listener.join(timeout)
    finally:
        for process, _ in started:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
