"""How processes that share layers reach each other: short messages, in order, for which nobody has to be waiting.

No collective call is made, which could wait for ever for a rank on which nothing of ours runs.
"""

from __future__ import annotations

import atexit
import importlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

Message = tuple[str, ...]

_TAG = 12120
"""Of our messages between MPI ranks."""


class Line(Protocol):
    """Between the ranks of one group."""

    def send(self, rank: int, *words: str) -> None:
        """To another rank of the group; returns at once."""

    def receive(self) -> Iterator[tuple[int, Message]]:
        """What has arrived since the last call: sender and words, each sender's in the order they were sent."""


def group_of(mapping: Any) -> list[int]:
    """Ranks that share the layers of ``mapping``'s pipeline stage, in order; experts and their halves are spread over these."""
    return sorted(int(rank) for rank in getattr(mapping, "tp_group", None) or range(int(mapping.world_size)))


def connect(mapping: Any) -> Line | None:
    """The line to the other ranks of :func:`group_of`; None where nothing connects this process to so many.

    torch.distributed's store where that is initialized (Ray, and hosts that have both), else MPI.
    """
    import torch

    mine, group = int(mapping.rank), group_of(mapping)
    enough = int(mapping.world_size)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() >= enough:
        from torch.distributed.distributed_c10d import _get_default_store

        return StoreLine(_get_default_store(), mine, group)
    if "mpi4py.MPI" in sys.modules and "tensorrt_llm" in sys.modules:
        comm = importlib.import_module("tensorrt_llm._utils").mpi_comm()
        if comm.Get_size() >= enough:
            return MpiLine(comm, mine, group)
    return None


class StoreLine:
    """Over the key-value store behind torch.distributed: each rank numbers its messages to each other."""

    def __init__(self, store: Any, mine: int, group: list[int]) -> None:
        import torch

        self._store = torch.distributed.PrefixStore(f"trtllm_b12x/{'-'.join(map(str, group))}", store)
        self._mine = mine
        self._sent, self._received = (dict.fromkeys((rank for rank in group if rank != mine), 0) for _ in range(2))

    def send(self, rank: int, *words: str) -> None:
        self._store.set(f"{self._mine}/{rank}/{self._sent[rank]}", json.dumps(words))
        self._sent[rank] += 1

    def receive(self) -> Iterator[tuple[int, Message]]:
        for rank in self._received:
            while self._store.check([key := f"{rank}/{self._mine}/{self._received[rank]}"]):
                words = json.loads(self._store.get(key))  # may fail, and is then asked for again
                self._received[rank] += 1
                yield rank, tuple(words)


class MpiLine:
    """Point to point.  Lines of several groups share the communicator, hence what arrives."""

    _sending: ClassVar[list[Any]] = []  # a request that is dropped before it is done takes its message with it
    _arrived: ClassVar[dict[tuple[int, ...], list[tuple[int, Message]]]] = defaultdict(list)

    def __init__(self, comm: Any, mine: int, group: list[int]) -> None:
        self._comm, self._mine, self._group = comm, mine, tuple(group)
        atexit.register(self._finish)

    def send(self, rank: int, *words: str) -> None:
        data = json.dumps([self._group, words]).encode()
        self._sending.append(self._comm.Isend(data, dest=rank, tag=_TAG))

    def receive(self) -> Iterator[tuple[int, Message]]:
        self._poll()
        yield from self._arrived.pop(self._group, [])

    def _poll(self) -> None:
        from mpi4py import MPI

        self._sending[:] = [request for request in self._sending if not request.Test()]
        status = MPI.Status()
        while (message := self._comm.Improbe(tag=_TAG, status=status)) is not None:
            buffer = bytearray(status.Get_count(MPI.BYTE))
            message.Recv(buffer)
            group, words = json.loads(buffer)
            self._arrived[tuple(group)].append((status.Get_source(), tuple(words)))

    def _finish(self) -> None:
        """Take what nobody asked for any more: MPI may end the whole job over a message that is left (MPICH 5, spawned ranks)."""
        from mpi4py import MPI

        for _ in range(20):
            if MPI.Is_finalized():
                return
            self._poll()
            time.sleep(0.001)
