"""What ranks tell each other at load, over a real key-value store; over real MPI workers: integration/test_hosts.py."""

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
    monkeypatch.setattr(ranks, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(ranks, "_rounds", 0)
    return store


def mapping(rank: int, *group: int) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, world_size=4, tp_group=list(group))


def test_alone_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: 1 / 0)
    assert ranks.exchange(mapping(2, 2), "text") == {2: "text"}


def test_ranks_of_a_stage_hear_each_other_and_no_other_stage(store: torch.distributed.HashStore) -> None:
    store.set("trtllm_b12x/1/3", "no memory")
    store.set("trtllm_b12x/1/0", "of another stage")
    assert ranks.exchange(mapping(2, 2, 3), "") == {2: "", 3: "no memory"}
    assert store.get("trtllm_b12x/1/2") == b""


def test_who_does_not_answer_is_not_waited_for(store: torch.distributed.HashStore, caplog: pytest.LogCaptureFixture) -> None:
    store.set("trtllm_b12x/1/0", "early")
    assert ranks.exchange(mapping(1, 0, 1, 2, 3), "late") == {1: "late", 0: "early"}
    assert "rank 1: no answer from ranks [2, 3]" in caplog.text
    store.set("trtllm_b12x/2/3", "in the next round")
    assert ranks.exchange(mapping(1, 1, 3), "") == {1: "", 3: "in the next round"}
