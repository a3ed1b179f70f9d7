"""Votes of ranks, each in a thread of its own over a real key-value store; with layers, in processes: test_distributed.py."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trtllm_b12x import process, votes
from trtllm_b12x.host import ranks
from trtllm_b12x.votes import _Table

Answers = dict[str, str | None]
Job = Callable[[_Table, Answers], None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks that were never heard of are given up soon; those that were, never in a test."""
    monkeypatch.setattr(votes, "PRESENCE_S", 0.3)
    yield
    process.forget()


class ShakyStore:
    """One operation of seven fails, before or after it took effect."""

    def __init__(self, store: Any, seed: int) -> None:
        self._store, self._draw = store, random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        def operation(*arguments: Any) -> Any:
            when = self._draw.random()
            if when < 0.07:
                raise RuntimeError("Connection reset by peer")
            result = getattr(self._store, name)(*arguments)
            if when > 0.93:
                raise RuntimeError("Connection reset by peer")
            return result

        return operation


def hold(
    jobs: dict[int, Job], absent: tuple[int, ...] = (), late: dict[int, float] | None = None, shaky: int | None = None
) -> dict[int, Answers]:
    """What each rank comes to; ``absent`` ones belong to the group, and are never there; ``shaky`` is the seed of faults."""
    store = torch.distributed.HashStore()
    group = tuple(sorted([*jobs, *absent]))
    answers: dict[int, Answers] = {rank: {} for rank in jobs}

    def run(rank: int) -> None:
        time.sleep((late or {}).get(rank, 0.0))
        line = ranks.StoreLine(store, rank, list(group))
        if shaky is not None:
            line._store = ShakyStore(line._store, shaky + rank)  # type: ignore[assignment]
        table = _Table(line, rank, group)
        jobs[rank](table, answers[rank])
        table.settle(final=True)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a rank waits for ever"
    return answers


def votes_on(*layers: str, **errors: str) -> Job:
    """Layers in this order; ``errors`` says what stands against some of them."""

    def job(table: _Table, answers: Answers) -> None:
        for layer in layers:
            count = sum(key.startswith(layer) for key in answers)
            table.cast(layer, errors.get(layer), lambda answer, key=f"{layer}{count or ''}": answers.update({key: answer}))  # type: ignore[misc]

    return job


def test_all_or_none() -> None:
    heard = hold({0: votes_on("a", "b"), 1: votes_on("a", "b", b="no memory"), 2: votes_on("a", "b")})
    assert heard == {
        0: {"a": None, "b": "rank 1: no memory"},
        1: {"a": None, "b": "no memory"},
        2: {"a": None, "b": "rank 1: no memory"},
    }


def test_the_leader_says_no() -> None:
    heard = hold({4: votes_on("a", a="no memory"), 5: votes_on("a")})
    assert heard == {4: {"a": "no memory"}, 5: {"a": "rank 4: no memory"}}


def test_layers_in_another_order_are_not_mistaken_for_each_other() -> None:
    orders = ("abc", "cab", "bca")
    heard = hold({rank: votes_on(*orders[rank], **({"b": "no memory"} if rank == 1 else {})) for rank in range(3)})
    for rank, answers in heard.items():
        assert answers == {"a": None, "b": "no memory" if rank == 1 else "rank 1: no memory", "c": None}


def test_the_second_layer_of_the_same_sizes_has_its_own_answer() -> None:
    def second_fails(table: _Table, answers: Answers) -> None:
        table.cast("a", None, lambda answer: answers.update(a=answer))
        table.cast("a", "no memory", lambda answer: answers.update(a1=answer))

    assert hold({0: votes_on("a", "a"), 1: second_fails})[0] == {"a": None, "a1": "rank 1: no memory"}


def test_layers_that_one_rank_has_alone_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model of rank 1, met before what both share.  The rank that has it waits for the others, in vain."""
    monkeypatch.setattr(votes, "TIMEOUT_S", 0.5)
    heard = hold({0: votes_on("a"), 1: votes_on("draft", "a")})
    assert heard[0] == {"a": None}
    assert heard[1] == {"draft": "rank 0 does not answer", "a": None}


@pytest.mark.parametrize("decliner", [0, 1, 2])
def test_a_rank_that_serves_nothing_is_not_waited_for(decliner: int) -> None:
    def declines(table: _Table, answers: Answers) -> None:
        table.decline("DSL_PAYLOAD: CUDA 12.9")
        table.decline("said once")
        votes_on("b")(table, answers)  # a layer that was promoted before the refusal

    start = time.monotonic()
    jobs = {rank: votes_on("a", "b") for rank in range(3)}
    heard = hold({**jobs, decliner: declines})
    assert time.monotonic() - start < 5
    for rank, answers in heard.items():
        mine = rank == decliner
        assert answers["b"] == f"{'' if mine else f'rank {decliner}: '}DSL_PAYLOAD: CUDA 12.9"
        assert mine or answers["a"] == f"rank {decliner}: DSL_PAYLOAD: CUDA 12.9"


@pytest.mark.parametrize("absent", [0, 1, 3])
def test_a_rank_that_is_not_there_is_named_once_and_waited_for_once(absent: int, caplog: pytest.LogCaptureFixture) -> None:
    start = time.monotonic()
    present = [rank for rank in range(4) if rank != absent]
    heard = hold({rank: votes_on(*(f"layer {i}" for i in range(20))) for rank in present}, absent=(absent,))
    assert time.monotonic() - start < 5
    said = [answer or "" for answers in heard.values() for answer in answers.values()]
    assert len(said) == 60
    assert all(answer.endswith(f"rank {absent} does not answer") for answer in said)
    for rank in present:
        assert caplog.text.count(f"rank {rank}: no answer from ranks [{absent}]") == int(rank == present[0] or absent == 0)


def test_a_rank_that_was_there_and_died_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(votes, "TIMEOUT_S", 0.5)
    heard = hold({0: votes_on("a", "b", "c"), 1: votes_on("a", "b", "c"), 2: votes_on("a")})
    assert heard[0] == {"a": None, "b": "rank 2 does not answer", "c": "rank 2 does not answer"}
    assert heard[1]["a"] is None
    assert all((heard[1][layer] or "").endswith("rank 2 does not answer") for layer in "bc")
    assert caplog.text.count("no answer from ranks [2]") == 1


def test_a_long_reason_arrives_cut() -> None:
    heard = hold({0: votes_on("a"), 1: votes_on("a", a="x" * 16384)})
    assert heard[0] == {"a": f"rank 1: {'x' * 500}"}


@pytest.mark.parametrize("seed", range(18))
def test_nobody_ever_comes_to_another_answer(seed: int) -> None:
    """Any order, any reasons, ranks that are off, absent, or as late as others' patience; a line that fails now and then."""
    draw = random.Random(seed)
    layers = [f"layer {i}" for i in range(6)]
    everybody = range(draw.choice([2, 3, 4]))
    absent = tuple(rank for rank in everybody if draw.random() < 0.1)[:1]
    present = [rank for rank in everybody if rank not in absent]
    declining = {rank for rank in present if draw.random() < 0.15}
    against = {rank: {layer for layer in layers if draw.random() < 0.1} for rank in present}
    late = {rank: draw.choice([0.0, 0.0, 0.29, 0.3, 0.31]) for rank in present}

    def job(rank: int, order: list[str]) -> Job:
        def run(table: _Table, answers: Answers) -> None:
            pause = random.Random(seed + rank)
            for position, layer in enumerate(order):
                if rank in declining and position == 3:
                    table.decline("refused")
                time.sleep(pause.random() / 200)
                error = "failed" if layer in against[rank] else None
                table.cast(layer, error, lambda answer, layer=layer: answers.update({layer: answer}))  # type: ignore[misc]

        return run

    shaky = seed if seed % 2 else None
    heard = hold({rank: job(rank, draw.sample(layers, len(layers))) for rank in present}, absent, late, shaky)
    for layer in layers:
        served = {heard[rank][layer] is None for rank in present}
        assert len(served) == 1, (layer, heard)
        assert served == {False} or not (absent or any(layer in against[rank] for rank in present))


def test_a_line_that_fails_now_and_then_costs_nothing() -> None:
    layers = [f"layer {i}" for i in range(20)]
    heard = hold({rank: votes_on(*layers) for rank in range(3)}, shaky=7)
    assert heard == {rank: dict.fromkeys(layers) for rank in range(3)}


def test_a_line_that_comes_back_tells_what_was_given_up() -> None:
    """Rank 1 waited in vain for a line that took nothing; rank 0 has not decided yet, and hears of it."""
    over = threading.Event()

    class Gap:
        def __init__(self, store: Any) -> None:
            self._store, self.open = store, False

        def __getattr__(self, name: str) -> Any:
            if self.open:
                raise RuntimeError("Connection reset by peer")
            return getattr(self._store, name)

    def first(table: _Table, answers: Answers) -> None:
        over.wait(10)
        votes_on("a", "b")(table, answers)

    def second(table: _Table, answers: Answers) -> None:
        gap = table._line._store = Gap(table._line._store)  # type: ignore[attr-defined]
        while 0 not in table._here:
            table._exchange()
        gap.open = True
        with pytest.raises(RuntimeError):
            votes_on("a")(table, answers)
        table.close("reset")
        gap.open = False
        over.set()
        votes_on("b")(table, answers)

    assert hold({0: first, 1: second}) == {0: {"a": "rank 1: reset", "b": None}, 1: {"a": "reset", "b": None}}


# ---- the module's own door -------------------------------------------------------------------------------------------------


def alone(rank: int = 2) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, world_size=4, tp_group=[rank])


def test_alone_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: 1 / 0)
    heard: list[str | None] = []
    votes.announce(alone())
    votes.decline(alone(), "refused")
    votes.cast(alone(), "a", None, heard.append)
    votes.cast(None, "a", "failed", heard.append)
    assert heard == [None, "failed"]


def test_a_line_that_breaks_is_a_no_and_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Line:
        def __init__(self, good: int) -> None:
            self.good = good

        def send(self, rank: int, *words: str) -> None:
            self.good -= 1
            if self.good < 0:
                raise RuntimeError("Connection reset by peer\nwith a trace")

        def receive(self) -> list[tuple[int, tuple[str, ...]]]:
            return []

    mapping = SimpleNamespace(rank=0, world_size=2, tp_group=[0, 1])
    heard: list[str | None] = []
    for good in (0, 1):
        monkeypatch.setattr(ranks, "connect", lambda mapping, good=good: Line(good))
        votes.announce(mapping)
        votes.cast(mapping, "a", None, heard.append)
        votes.cast(mapping, "b", "failed", heard.append)
    reason = "other ranks cannot be asked: RuntimeError: Connection reset by peer"
    assert heard == [reason, "failed"] * 2
    assert caplog.text.count(reason) == 1


def test_a_load_is_what_was_built_before_a_vote() -> None:
    first = votes.load()
    assert votes.load() is first
    votes.cast(None, "a", "failed", lambda answer: None)
    second = votes.load()
    assert second is not first
    assert votes.load() is second


# ---- what ranks share ----------------------------------------------------------------------------------------------------


def shares(text: str, wait_s: float = 5.0, about: str = "a") -> Job:
    def job(table: _Table, answers: Answers) -> None:
        found = table.share(about, text, wait_s)
        answers[about] = None if found is None else ",".join(found)

    return job


def test_every_rank_comes_to_the_same_list() -> None:
    heard = hold({0: shares("x"), 1: shares(""), 3: shares("z")}, late={1: 0.2})
    assert heard == {rank: {"a": "x,,z"} for rank in (0, 1, 3)}


def test_it_is_heard_beside_votes_and_through_a_shaky_line() -> None:
    def job(rank: int) -> Job:
        def both(table: _Table, answers: Answers) -> None:
            votes_on("first")(table, answers)
            shares(f"times of {rank}")(table, answers)
            votes_on("last")(table, answers)

        return both

    for seed in (1, 2):
        heard = hold({rank: job(rank) for rank in range(3)}, shaky=seed)
        assert all(
            answers == {"first": None, "last": None, "a": "times of 0,times of 1,times of 2"} for answers in heard.values()
        )


def test_what_is_longer_than_a_message_arrives_as_a_whole() -> None:
    texts = {rank: "".join(f"{rank}{place:05}" for place in range(200 * rank)) for rank in range(3)}
    for seed in (1, 2, 3):
        heard = hold({rank: shares(text) for rank, text in texts.items()}, shaky=seed)
        assert all(answers == {"a": ",".join(texts.values())} for answers in heard.values())


def test_nobody_waits_long_and_it_is_there_when_it_is_asked_for_again() -> None:
    def impatient(table: _Table, answers: Answers) -> None:
        start = time.monotonic()
        assert table.share("a", "x", 0.1) is None
        assert time.monotonic() - start < 1
        while (found := table.share("a", "not said twice", 0.0)) is None:
            time.sleep(0.01)
        answers["a"] = ",".join(found)

    heard = hold({0: impatient, 1: shares("y")}, late={1: 0.5})
    assert heard == {0: {"a": "x,y"}, 1: {"a": "x,y"}}


def test_a_rank_alone_has_its_own_and_a_line_that_fails_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert votes.share(None, "a", "x", 5.0) == ["x"]
    assert votes.share(SimpleNamespace(rank=0, world_size=1, tp_group=[0]), "a", "x", 5.0) == ["x"]

    def fails(mapping: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(ranks, "connect", fails)
    assert votes.share(SimpleNamespace(rank=0, world_size=2, tp_group=[0, 1]), "a", "x", 5.0) is None
