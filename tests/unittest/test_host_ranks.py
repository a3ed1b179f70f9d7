"""How ranks reach each other, over a real key-value store; over real MPI workers and Ray actors: integration/test_hosts.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d

from trtllm_b12x.host import ranks


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> torch.distributed.HashStore:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    return store


def mapping(rank: int, *group: int, world_size: int = 4) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, world_size=world_size, tp_group=list(group))


def test_the_group_is_the_pipeline_stages() -> None:
    assert ranks.group_of(mapping(2, 3, 2)) == [2, 3]
    assert ranks.group_of(SimpleNamespace(rank=0, world_size=2)) == [0, 1]


def test_messages_arrive_once_in_order_and_in_their_group_alone(store: torch.distributed.HashStore) -> None:
    lines = {(rank, group): ranks.connect(mapping(rank, *group)) for group in ((0, 1), (2, 3), (0, 1, 2, 3)) for rank in group}
    for word in ("a", "b", "ü\n" * 20000):
        lines[1, (0, 1)].send(0, "vote", word)  # type: ignore[union-attr]
    heard = list(lines[0, (0, 1)].receive())  # type: ignore[union-attr]
    assert heard == [(1, ("vote", "a")), (1, ("vote", "b")), (1, ("vote", "ü\n" * 20000))]
    assert [list(line.receive()) for line in lines.values() if line is not None] == [[]] * 8


def test_simulated_ranks_are_not_connected(store: torch.distributed.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.connect(mapping(0, 0, 1, world_size=8)) is None  # a group of fewer processes than ranks
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    assert ranks.connect(mapping(0, 0, 1)) is None
