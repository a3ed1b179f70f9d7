"""Compile a family's real kernels for a card that need not be here, and look at what came out.

``python -m trtllm_b12x.kernels.prove sm_120a b12x`` prints one JSON line: a
:class:`trtllm_b12x.environment.prove.Proof`.  FlashInfer has to be answered for a GPU that is not there.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trtllm_b12x.environment import child
from trtllm_b12x.environment.prove import Proof

from . import Geometry
from .jit.cards import Card, models

_LAYER = Geometry(16, 4, 512, 256, "Swiglu")


def _compile_b12x(card: Card, directory: Path) -> list[str]:
    """FlashInfer's micro kernel."""
    target = f"sm_{card.capability}a"
    os.environ.update(
        CUTE_DSL_ARCH=target,
        CUTE_DSL_KEEP_PTX="1",
        CUTE_DSL_DUMP_DIR=str(directory),
        FLASHINFER_CUTE_DSL_DISABLE_CACHE="1",
        CUTE_DSL_DISABLE_FILE_CACHING="1",
    )
    captured = directory / "output"
    # The assembler writes to the process's own streams, past Python's.
    with captured.open("wb") as stream:
        saved = os.dup(1), os.dup(2)
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        try:
            _micro_kernel(card)
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}\n{captured.read_text(errors='replace')}") from error
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
    return [path.read_text(errors="replace") for path in directory.glob("*.ptx")]


def _micro_kernel(card: Card) -> Any:
    """FlashInfer's own compile function, 0.6.18 to 0.7.2: the layer's sizes, 2 tokens."""
    child.answer_for_the_gpu(torch, card.multiprocessors, *divmod(card.capability, 10))
    from flashinfer.fused_moe.cute_dsl.blackwell_sm12x import moe_dispatch

    for name in ("get_num_sm", "get_max_active_clusters"):
        setattr(moe_dispatch, name, lambda *arguments: card.multiprocessors)
    experts, top_k = _LAYER.num_experts, _LAYER.top_k
    sizes = {"k": _LAYER.hidden_size, "n": _LAYER.intermediate_size, "num_topk": top_k, "max_rows": 2 * top_k}
    return moe_dispatch._get_micro_kernel(experts, experts, m=2, **sizes)


def _compile_triton(card: Card, directory: Path) -> list[str]:
    """What a layer's call of two tokens launches, and one of 63."""
    from .triton import TritonKernel

    kernel = TritonKernel(card)
    kernel.describe(_LAYER, 63, torch.device("cuda"))
    steps = (kernel.build.step(tokens) for tokens in (2, 63))
    variants = (variant for step in steps for variant in kernel.build.variants(step, step.inline))
    return [variant.assemble(card.capability).asm["ptx"] for variant in variants]


def _compile_grouped(card: Card, directory: Path) -> list[str]:
    from .grouped import GroupedKernel

    kernel = GroupedKernel()
    kernel.describe(_LAYER, 4096, torch.device("cuda"))
    return [variant.assemble(card.capability).asm["ptx"] for variant in kernel.variants()]


_COMPILE: dict[str, tuple[Callable[[Card, Path], list[str]], str]] = {
    "b12x": (_compile_b12x, "kind::mxf4nvf4"),
    "triton": (_compile_triton, "mma.sync"),
    "grouped": (_compile_grouped, "kind::mxf8f6f4.block_scale"),
}
"""By family: to PTX, and the instruction that its products are."""


def _telling_line(text: str) -> str:
    """The assembler's first complaint if there is one, else the exception's first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search("ptxas.*(fatal|error)", line)]
    return (telling or lines)[0][:300]


def main() -> None:
    target, family = sys.argv[1:]
    compile_, instruction = _COMPILE[family]
    started, found = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TRITON_CACHE_DIR"] = directory
        try:
            found = sum(ptx.count(instruction) for ptx in compile_(models(target)[0], Path(directory)))
            error = "" if found else f"the PTX holds no {instruction} instruction"
        except Exception as exception:
            own = str(exception) if family == "b12x" else f"{type(exception).__name__}: {exception}"
            error = _telling_line(own)
        print(json.dumps(asdict(Proof(target, not error, error, found, round(time.monotonic() - started, 1)))))


if __name__ == "__main__":
    main()
