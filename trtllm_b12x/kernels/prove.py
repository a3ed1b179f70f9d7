"""Compile a family's real kernels for a card that need not be here, and look at what came out.

``python -m trtllm_b12x.kernels.prove sm_120a b12x`` prints one JSON line.  It is a process of its own because the CuTe DSL may
kill it, and because FlashInfer has to be answered for a GPU that is not there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtllm_b12x.environment import child

from . import Geometry

TARGETS = {"sm_120a": 188, "sm_121a": 48}
"""Target to the SM count of its largest card (RTX PRO 6000, GB10)."""
TIMEOUT_S = 300


@dataclass(frozen=True)
class Proof:
    """What the compile showed."""

    target: str
    compiled: bool
    error: str = ""
    """First telling line: the assembler's words, or the exception's."""
    products: int = 0
    """Tensor core instructions in the PTX: b12x's are ``kind::mxf4nvf4``."""
    seconds: float = 0.0


def prove(target: str, family: str = "b12x") -> Proof:
    """Run :func:`main` in a subprocess; a crash or a hang is an answer too.  Nothing of the working directory is imported."""
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; from trtllm_b12x.kernels.prove import main; main()"
    env = {**os.environ, "TRTLLM_B12X": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    try:
        result = subprocess.run(
            [sys.executable, "-c", code, target, family],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Proof(target, False, f"no result within {TIMEOUT_S} s")
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if lines:
        return Proof(**json.loads(lines[-1]))
    words = [line for line in result.stderr.splitlines() if line.strip()]
    return Proof(target, False, words[-1] if words else f"the process died with status {result.returncode}")


def _compile_b12x(target: str, directory: Path) -> Proof:
    """FlashInfer's micro kernel."""
    os.environ.update(
        CUTE_DSL_ARCH=target,
        CUTE_DSL_KEEP_PTX="1",
        CUTE_DSL_DUMP_DIR=str(directory),
        FLASHINFER_CUTE_DSL_DISABLE_CACHE="1",
        CUTE_DSL_DISABLE_FILE_CACHING="1",
    )
    started = time.monotonic()
    captured = directory / "output"
    error = ""
    # The assembler writes to the process's own streams, past Python's.
    with captured.open("wb") as stream:
        saved = os.dup(1), os.dup(2)
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        try:
            _micro_kernel(target)
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
    ptx = "\n".join(path.read_text(errors="replace") for path in directory.glob("*.ptx"))
    found = len(re.findall(r"kind::mxf4nvf4\b", ptx))
    if error:
        error = _telling_line(error + "\n" + captured.read_text(errors="replace"))
    elif not found:
        error = "the PTX holds no kind::mxf4nvf4 instruction"
    return Proof(target, not error, error, found, round(time.monotonic() - started, 1))


def _micro_kernel(target: str) -> Any:
    """FlashInfer's own compile function, 0.6.18 to 0.7.2: 16 experts, top 4, 512 x 256, 2 tokens, SwiGLU."""
    import torch

    child.answer_for_the_gpu(torch, TARGETS[target], int(target[3:5]), int(target[5]))
    from flashinfer.fused_moe.cute_dsl.blackwell_sm12x import moe_dispatch

    count = TARGETS[target]
    for name in ("get_num_sm", "get_max_active_clusters"):
        setattr(moe_dispatch, name, lambda *arguments: count)
    return moe_dispatch._get_micro_kernel(16, 16, m=2, k=512, n=256, num_topk=4, max_rows=8)


def _compile_triton(target: str, directory: Path) -> Proof:
    """What a layer's call of two tokens launches, and one of 63."""
    os.environ["TRITON_CACHE_DIR"] = str(directory)
    started = time.monotonic()
    try:
        from trtllm_b12x.kernels.jit.cards import Card

        from .triton.compiler import compile_for

        card = Card(TARGETS[target], 100 << 10, int(target[3:6]))
        made = [kernel for tokens in (2, 63) for kernel in compile_for(card, Geometry(16, 4, 512, 256, "Swiglu"), tokens)]
        found = sum(kernel.ptx.count("mma.sync") for kernel in made)
        error = "" if found else "the PTX holds no mma.sync instruction"
    except Exception as exception:
        found, error = 0, _telling_line(f"{type(exception).__name__}: {exception}")
    return Proof(target, not error, error, found, round(time.monotonic() - started, 1))


def _compile_grouped(target: str, directory: Path) -> Proof:
    """One of each kernel of a small layer, of both formats; products are block-scaled, or the family is refused."""
    os.environ["TRITON_CACHE_DIR"] = str(directory)
    started = time.monotonic()
    try:
        import torch

        from trtllm_b12x.kernels.jit.cards import Card

        from .grouped import GroupedKernel
        from .grouped.nvfp4 import GroupedNVFP4Kernel

        found, error, capability = 0, "", int(target[3:6])
        for kind, name in ((GroupedKernel, "kind::mxf8f6f4.block_scale"), (GroupedNVFP4Kernel, "kind::mxf4nvf4.block_scale")):
            kernel = kind(Card(TARGETS[target], 100 << 10, capability))
            kernel.describe(Geometry(16, 4, 512, 256, "Swiglu"), 4096, torch.device("cuda"))
            made = {variant.name: variant for variant in kernel.variants()}
            count = sum(variant.assemble(capability).asm["ptx"].count(name) for variant in made.values())
            found += count
            error = error if count else f"the PTX holds no {name} instruction"
    except Exception as exception:
        found, error = 0, _telling_line(f"{type(exception).__name__}: {exception}")
    return Proof(target, not error, error, found, round(time.monotonic() - started, 1))


_COMPILE = {"b12x": _compile_b12x, "triton": _compile_triton, "grouped": _compile_grouped}
"""By family."""


def _telling_line(text: str) -> str:
    """The assembler's first complaint if there is one, else the exception's first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search("ptxas.*(fatal|error)", line)]
    return (telling or lines)[0][:300]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asdict(_COMPILE[sys.argv[2]](sys.argv[1], Path(directory)))))


if __name__ == "__main__":
    main()
