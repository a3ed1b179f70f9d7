"""Ranks that share a layer serve it with the same kernels, all of them, or with the host's: each votes, the lowest decides.

A vote is about one layer (its sizes as the model has them, its place, and how often it was asked about), and says what stands
against it on this rank, if anything.  Whoever votes no goes on at once; whoever votes yes waits for the decision.  A rank on
which the package refuses everything says so once (:func:`decline`); one that was never heard of counts as a no after
:data:`PRESENCE_S`, and is not waited for again.

Two ranks never come to different answers, whoever is late: only the lowest rank says yes, once every other has; and nobody
promises it a yes before it was heard of.  Ranks that meet layers in different orders do not wait for each other: such a vote
stays open until more of them are cast.  What the line does not take is said again, in order; one that takes nothing for
:data:`PRESENCE_S` is a no.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from . import host, locks, process
from .bootstrap import first_line
from .decision import Deployment, Problem
from .host import ranks
from .log import logger

PRESENCE_S = 30.0
"""Ranks build their layers at about the same time, and say that they are there; votes come when weights are loaded."""
TIMEOUT_S = 900.0
"""Of a rank that is there: it may still be loading or compiling."""
_LONGEST = 500
"""Characters of a reason: what MPI sends at once, whether or not somebody receives."""

Settled = Callable[[str | None], None]
"""Told what keeps the layer off the kernels, on this rank or another (``rank 1: ...``); None if nothing does."""


@dataclass
class Load:
    """Layers that were built before any of them was voted on; whatever is built later is another model's.  They hold it."""

    failed: dict[Hashable, str] = field(default_factory=dict)
    """Families and geometries that this rank or another could not plan, and why: no further layer of theirs is tried."""


_lock = locks.new()
_load: Load | None = None
"""The one that layers join which are built now; None once a layer of it was voted on."""
_tables: dict[tuple[int, ...], _Table] = {}
_complained = False


def load() -> Load:
    """Of a layer that is built now."""
    global _load
    with _lock:
        _load = _load or Load()
        return _load


def announce(mapping: Any) -> None:
    """This rank will vote on layers of ``mapping``: said when the first is built."""
    with _lock:
        try:
            _table(mapping)
        except Exception as error:
            _unreachable(error)


def decline(mapping: Any, reason: str) -> None:
    """Nothing will be served on this rank, for ``reason``; the others need not wait."""
    with _lock:
        try:
            table = _table(mapping)
            if table is not None:
                table.decline(reason)
        except Exception as error:
            _unreachable(error)


def stand_aside(model_config: Any, refused: str) -> None:
    """A layer was built as the host builds it.  :func:`decline` where no layer of this process can fare better.

    Args:
        model_config: the host's, for its ``mapping``.
        refused: why promotion is off here, if it is; else what this rank's environment refuses by itself counts.
    """
    from . import eligibility

    try:
        verdict = eligibility.resolve((Problem(), Deployment()))
        reason = refused or ("" if verdict.served else str(verdict))
        if reason:
            decline(model_config.mapping, reason)
    except Exception as error:  # the layer is the host's, and so is what happens to it
        logger.debug("other ranks were not told that this one serves nothing: %s", error)


def cast(mapping: Any, about: str, error: str | None, settled: Settled) -> None:
    """Vote on one layer.  ``settled`` is called with the answer: before this returns, but for ranks in different orders.

    Args:
        mapping: the layer's; ranks of one pipeline stage vote together.  None, or a single rank: nobody is asked.
        about: what every rank says of this layer alike, sizes and place.
        error: what stands against it here, one line.
        settled: see :data:`Settled`.
    """
    global _load
    with _lock:
        _load = None
        try:
            table = _table(mapping)
        except Exception as exception:
            settled(error or _unreachable(exception))
            return
        if table is None:
            settled(error)
            return
        try:
            table.cast(about, error, settled)
        except Exception as exception:
            table.close(_unreachable(exception))


def share(mapping: Any, about: str, text: str, wait_s: float) -> list[str] | None:
    """What every rank has to say of something that they all have, in the order of ranks; None if not all have said it yet.

    Each rank comes to the same list.  To be asked again with the same words until it is there.

    Args:
        about: the same on every rank.
        text: this rank's, of any length.
        wait_s: for others that are about to say theirs.
    """
    with _lock:
        try:
            table = _table(mapping)
            return [text] if table is None else table.share(about, text, wait_s)
        except Exception as error:
            _unreachable(error)
            return None


def settle() -> None:
    """Wait for every vote that is still open, whatever order the ranks are in."""
    with _lock:
        for table in _tables.values():
            try:
                table.settle(final=True)
            except Exception as error:
                table.close(_unreachable(error))


@process.kept
def _forget() -> None:
    global _complained, _load
    with _lock:
        _tables.clear()
        _complained, _load = False, None


def _unreachable(error: Exception) -> str:
    """Why this rank says no where the line fails."""
    reason = f"other ranks cannot be asked: {first_line(error)}"
    _complain(reason)
    return reason


def _complain(text: str) -> None:
    global _complained
    if not _complained:
        _complained = True
        logger.warning(text)


def _table(mapping: Any) -> _Table | None:
    """Of the group of ``mapping``; None where this rank is alone, or nothing connects it to the others (simulated ranks)."""
    if mapping is None:
        return None
    group = tuple(ranks.group_of(mapping))
    if len(group) < 2:
        return None
    if group not in _tables:
        line = ranks.connect(mapping)
        if line is None:
            if host.installed():
                _complain(f"rank {mapping.rank}: neither torch.distributed nor MPI connects ranks {list(group)}: none is asked")
            return None
        _tables[group] = _Table(line, int(mapping.rank), group)
    return _tables[group]


class _Table:
    """What the ranks of one group have said."""

    def __init__(self, line: ranks.Line, mine: int, group: tuple[int, ...]) -> None:
        self._line, self._mine, self._leader = line, mine, group[0]
        self._others = [rank for rank in group if rank != mine]
        self._here: set[int] = set()
        self._gone: set[int] = set()
        self._declined: dict[int, str] = {}
        self._votes: dict[str, dict[int, str]] = defaultdict(dict)
        """By layer and rank; empty is a yes."""
        self._decisions: dict[str, str] = {}
        self._shares: dict[str, dict[int, str]] = defaultdict(dict)
        """What is said of a thing, by rank."""
        self._parts: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
        """Of what another rank is still saying: by number."""
        self._asked: Counter[str] = Counter()
        self._open: dict[str, Settled] = {}
        self._untold: list[str] = []
        """Yes votes that wait for the leader to be heard of."""
        self._unsent: deque[tuple[int, ranks.Message]] = deque()
        self._broken: float | None = None
        """Since when the line fails."""
        self._dead = False
        """For too long: it is not waited for until it works again."""
        self._say("here")
        self._exchange()

    def decline(self, reason: str) -> None:
        if self._mine not in self._declined:
            self._declined[self._mine] = reason
            self._say("declined", reason)
            self._exchange()

    def cast(self, about: str, error: str | None, settled: Settled) -> None:
        self._asked[about] += 1
        key = f"{about} #{self._asked[about]}"
        error = error or self._declined.get(self._mine)
        self._votes[key][self._mine] = error or ""
        self._broken = self._broken if self._dead else None  # what failed in between may be over
        if error is None:
            self._open[key] = settled
            self._untold.append(key)
        else:
            settled(error)
            self._say("vote", key, error)
            if self._leads:
                self._decide(key, f"rank {self._mine}: {error}")
        self.settle()

    def share(self, about: str, text: str, wait_s: float) -> list[str] | None:
        said, end = self._shares[about], time.monotonic() + wait_s
        if self._mine not in said:
            said[self._mine] = text
            parts = [text[start : start + _LONGEST] for start in range(0, len(text), _LONGEST)] or [""]
            for number, part in enumerate(parts):
                self._say("share", about, str(len(parts)), str(number), part)
        while True:
            self._exchange()
            if all(rank in said for rank in self._others) and not self._unsent:
                return [said[rank] for rank in sorted(said)]
            if time.monotonic() > end:
                return None
            time.sleep(0.002)

    def settle(self, *, final: bool = False) -> None:
        for key in list(self._open):
            answer = self._await(key, final)
            if answer is not None:
                self._open.pop(key)(answer or None)
        self._exchange()
        while self._unsent:  # the others wait for it, and this rank may have nothing more to ask
            time.sleep(0.01)
            self._exchange()

    def close(self, reason: str) -> None:
        """The line is dead: a no, but for what is decided already.  Should it come back, the others hear of it."""
        self._untold.clear()
        for key in list(self._open):
            answer = self._decisions.get(key)
            if answer is None:
                answer = self._votes[key][self._mine] = reason
                self._say("vote", key, reason)
                if self._leads:
                    self._decide(key, f"rank {self._mine}: {reason}")
            self._open.pop(key)(answer or None)

    @property
    def _leads(self) -> bool:
        return self._mine == self._leader

    def _say(self, *words: str) -> None:
        """With the next :meth:`_exchange`."""
        self._unsent.extend((rank, (*words[:-1], words[-1][:_LONGEST])) for rank in self._others if rank not in self._gone)

    def _exchange(self) -> None:
        """Send what is unsent and hear what has arrived.  What fails is tried again by the next call.

        Raises:
            Exception: the line's own, once it has failed for too long.
        """
        try:
            self._hear()
            while self._unsent:
                rank, words = self._unsent[0]
                self._line.send(rank, *words)
                self._unsent.popleft()
            self._broken, self._dead = None, False
        except Exception:
            self._broken = self._broken or time.monotonic()
            self._dead = self._dead or time.monotonic() - self._broken > PRESENCE_S
            if self._dead:
                raise

    def _hear(self) -> None:
        for rank, (kind, *words) in self._line.receive():
            self._here.add(rank)
            if kind == "declined":
                self._declined[rank] = words[0]
            elif kind == "vote":
                self._votes[words[0]][rank] = words[1]
            elif kind == "share":
                about, total, number, part = words
                parts = self._parts[about, rank]
                parts[number] = part
                if len(parts) == int(total):
                    self._shares[about][rank] = "".join(parts[str(place)] for place in range(len(parts)))
                    del self._parts[about, rank]
            elif kind == "decision":
                self._decisions[words[0]] = words[1]
        if self._leads or self._leader in self._here:
            for key in self._untold:
                self._say("vote", key, "")
            self._untold.clear()

    def _decide(self, key: str, answer: str) -> str:
        self._decisions[key] = answer
        self._say("decision", key, answer)
        return answer

    def _await(self, key: str, final: bool) -> str | None:
        """Empty for yes, or what stands against it; None if other layers have to be voted on first."""
        start, pause = time.monotonic(), 0.001
        while True:
            self._exchange()
            answers = {other: self._answer(other) for other in self._open}  # of all: others may wait for another one's
            answer = answers[key]
            if answer is None:
                answer = self._without_the_gone(key, time.monotonic() - start)
            if answer is not None or (not final and self._crossed(key)):
                return answer
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _answer(self, key: str) -> str | None:
        if key in self._decisions:
            return self._decisions[key]
        said = {**self._votes[key], **self._declined}
        if not self._leads:
            return f"rank {self._leader}: {self._declined[self._leader]}" if self._leader in self._declined else None
        refusing = [rank for rank in said if said[rank]]  # this rank too, if it declined after its vote
        if refusing:
            return self._decide(key, f"rank {refusing[0]}: {said[refusing[0]]}")
        return self._decide(key, "") if all(rank in said for rank in self._others) else None

    def _missing(self, key: str) -> list[int]:
        return [rank for rank in self._others if rank not in self._votes[key]]

    def _without_the_gone(self, key: str, waited: float) -> str | None:
        """A no, once a rank that this one depends on has not been heard of for too long."""
        asked = self._missing(key) if self._leads else [self._leader]
        patience = TIMEOUT_S if self._leads else 2 * TIMEOUT_S  # the leader may have begun to wait later, and gives up first
        gone = [rank for rank in asked if rank in self._gone or waited > (patience if rank in self._here else PRESENCE_S)]
        if not gone:
            return None
        new = [rank for rank in gone if rank not in self._gone]
        if new:
            logger.warning(
                "rank %d: no answer from ranks %s: layers that they share run on the host's kernels, on all ranks; "
                "is trtllm-b12x installed and on there?",
                self._mine,
                new,
            )
        answer = f"rank {gone[0]} does not answer"
        if self._leads:
            self._decide(key, answer)
        self._untold.clear()
        self.decline(answer)  # from now on
        self._gone.update(new)  # it was told so, should it come yet
        return answer

    def _crossed(self, key: str) -> bool:
        """A rank that has not voted on this layer has voted on another, which it met before and this rank has yet to meet."""
        missing = self._missing(key)
        return any(self._mine not in votes and rank in votes for votes in self._votes.values() for rank in missing)
