"""What another rank has to know before the first request: that a kernel cannot be had there.

Ranks that share a layer answer each other by text, through whatever the host's processes have in common.  A rank that does not
answer in time counts as one that has nothing to say: no collective call is made that could wait for ever.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from trtllm_b12x.log import logger

TIMEOUT_S = 900.0
"""Other ranks may still be compiling."""
_TAG = 12120
"""Of our messages between MPI ranks."""
_rounds = 0


def exchange(mapping: Any, text: str) -> dict[int, str]:
    """``text`` of every rank that shares the layers of ``mapping``'s stage, by rank; of those that answered.

    Every such rank has to call it as often as the others.
    """
    global _rounds
    _rounds += 1
    mine = int(mapping.rank)
    group = [int(rank) for rank in getattr(mapping, "tp_group", None) or range(int(mapping.world_size))]
    others = [rank for rank in group if rank != mine]
    answers = {mine: text}
    if not others:
        return answers
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        answers.update(_by_store(mine, others, text))
    elif "mpi4py.MPI" in sys.modules and "tensorrt_llm" in sys.modules:
        answers.update(_by_messages(importlib.import_module("tensorrt_llm._utils").mpi_comm(), others, text))
    silent = [rank for rank in others if rank not in answers]
    if silent:
        logger.warning("rank %d: no answer from ranks %s about their kernels; each goes its own way", mine, silent)
    return answers


def _by_store(mine: int, others: list[int], text: str) -> dict[int, str]:
    """The key-value store behind torch.distributed; under Ray, and where a host's ranks have both."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    store.set(f"trtllm_b12x/{_rounds}/{mine}", text)
    until = time.monotonic() + TIMEOUT_S
    found = {}
    for rank in others:
        key = f"trtllm_b12x/{_rounds}/{rank}"
        try:
            store.wait([key], timedelta(seconds=max(0.001, until - time.monotonic())))
            found[rank] = store.get(key).decode()
        except RuntimeError:  # DistStoreError of newer torch is one
            continue
    return found


def _by_messages(comm: Any, others: list[int], text: str) -> dict[int, str]:
    """Point to point: nothing is left open but a small send to a rank that never looks."""
    for rank in others:
        comm.isend((_rounds, text), dest=rank, tag=_TAG)
    found: dict[int, str] = {}

    def look() -> bool:
        for rank in others:
            while rank not in found and comm.iprobe(source=rank, tag=_TAG):
                number, answer = comm.recv(source=rank, tag=_TAG)
                if number == _rounds:  # else of a round that timed out here
                    found[rank] = answer
        return len(found) == len(others)

    _wait(look)
    return found


def _wait(done: Callable[[], bool]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not done() and time.monotonic() < until:
        time.sleep(0.001)
