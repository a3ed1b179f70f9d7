# SPDX-License-Identifier: Apache-2.0
"""The waits of ``layer.cu`` between warps and blocks, as state machines whose steps are taken in every order.

Small launches are explored in all orders, launches of real sizes in orders drawn at random. Every order must end, with each
task computed once. No warp may wait for an mbarrier two phases behind: a parity would let it read an entry that was written
again. Without one of its rules the protocol must fail. So must that of commit 274a226, which hung on GPUs in three ways.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import pytest

RULES = {
    "taken": "A block takes virtual blocks that are left. Else it has that of its own number alone.",
    "order": "All tasks of FC1 are taken before one of FC2 is published. Else FC2's come first, or with FC1's of a share.",
    "own": "FC1 of the own virtual block is worked on in any case: its weights are asked for before it is known who took it.",
    "known": "The task behind those that are known ahead of their entries is the first in its entry, too: it is waited for.",
    "tickets": "Tickets are as described. Else as in 274a226: each is a task, and a block is a few ahead of its first warp.",
    "given back": "An entry is written again when every reader has given it back.",
    "adders arrive": "Warps that add are such readers.",
    "adders stay": "Warps that add read the entries of sums, too.",
    "late arrival": "A warp that multiplies gives an entry back at the end of the task, not when it begins it.",
    "idle": "A warp without units in a task moves its place for weights past the task.",
    "leave": "A block that has work takes nothing more. In a call that gathers it takes a few tickets.",
    "launch ahead": "A block takes its virtual block, or its first ticket, when the launch ahead has ended.",
    "other buffer": "A launch makes the other buffer of h ready, not its own.",
}
FC1, FC2, SUM = range(3)
NEVER = 1 << 30
BLOCKED, MOVED, ALONE = range(3)
"""Results of a step. ALONE: it commutes with every step that another warp can take before it, if no rule is broken."""
Words = list[int]
# Words of a warp: where it is, and the number in the block of the task that it is at; then of each role its own.
AT, NUMBER = range(2)
START, AHEAD, TAKE, PUBLISH, POLL, LAST, STAY, READ, OPEN, WAIT, HAND_OVER, ADD, RELEASE, GONE = range(14)
TASKS_END, TASK, HELD_AT = 2, 3, 4  # from there on, virtual blocks whose tasks of FC2 are not published
KIND, ASKED, UNIT, UNDERWAY, LEFT = range(2, 7)
RUNNING, STARTED, BEGUN, BLOCKS_ENDED = 0, 0, 1, 2  # of the device: blocks that run; the others of each launch
TICKET, DONE, EPOCH, H, SHARES = 0, 1, 2, 3, 5  # of a workspace; the first may be bits of what is taken; H: bits of FC1's tasks
TAKEN = TICKET
PROGRESS, ENDED, BUFFER, RUNS, ENTRIES = range(
    5
)  # of a block: tasks begun, readers that ended; then tasks and arrivals at mbarriers


class LostEntryError(Exception):
    """A warp waits for a phase of an mbarrier that is neither the current one nor the one before it."""


@dataclass(frozen=True)
class Launch:
    blocks: int
    tasks: tuple[int, ...]  # of FC1, FC2 and, in a call that gathers, sums
    routes: tuple[int, ...] = (1,)  # of each token; they go round the warps in a call that does not gather
    entries: int = 2
    warps: int = 2
    adders: int = 1
    buffers: int = 2  # a multiple of adders: then a buffer has one warp that adds (config.cuh)
    stages: int = 2
    lead: int = 3  # tasks that a block which gathers takes ahead; of FC1 it takes ``stages`` more
    without: frozenset[str] = frozenset()  # rules that it breaks


class Barriers(NamedTuple):
    """The mbarriers of a ring: where a block has them, how many, and how many arrivals complete a phase."""

    at: int
    ring: int
    arrivals: int = 1

    def passed(self, block: Words, number: int) -> bool:
        use, current = number // self.ring, block[self.at + number % self.ring] // self.arrivals
        if not use <= current <= use + 1:
            raise LostEntryError
        return current > use

    def arrive(self, block: Words, number: int, arrives: bool = True) -> None:
        block[self.at + number % self.ring] += arrives


class Role:
    """A warp of a block. ``here`` and ``ahead``: where the device has the words of its launch and of the launch ahead."""

    begin: tuple[int, ...] = (READ, 0, 0, 0, 0, 0, 0)

    def __init__(self, launch: Launch, here: int, ahead: int, resident: int, block: int, warp: int = 0) -> None:
        assert launch.without <= RULES.keys()
        self.launch, self.here, self.ahead, self.resident, self.block, self.warp = launch, here, ahead, resident, block, warp
        self.without, self.gathers = launch.without, len(launch.tasks) > SUM
        self.single = self.gathers or "tickets" in launch.without  # a ticket is a task
        self.beside = len(launch.routes) > 1 and not self.single  # a virtual block's tasks of FC2 follow one another
        at, ring, buffers = ENTRIES + launch.entries, launch.entries, launch.buffers
        readers = launch.warps + launch.adders * ("adders arrive" not in launch.without)
        self.ends = [sum(launch.tasks[: phase + 1]) for phase in range(len(launch.tasks))]
        self.kind = partial(bisect, self.ends)  # of a task: its phase; behind the last phase is the end
        self.published, self.given_back = Barriers(at, ring), Barriers(at + ring, ring, readers)
        self.full, self.empty = Barriers(at + 2 * ring, buffers, launch.warps), Barriers(at + 2 * ring + buffers, buffers)


class TakesTickets(Role):
    begin = (START, 0, 0, 0)

    def step(self, device: Words, work: Words, computed: Words, block: Words, own: Words) -> int:
        here, ahead, blocks, at = self.here, self.ahead, self.launch.blocks, own[AT]
        if at == START:
            if device[RUNNING] >= self.resident or (ahead and device[ahead + BEGUN] < blocks):  # programmatic dependent launch
                return BLOCKED
            device[here + STARTED], device[RUNNING], own[AT] = device[here + STARTED] + 1, device[RUNNING] + 1, AHEAD
        elif at == AHEAD:
            if ahead and "launch ahead" not in self.without and device[ahead + BLOCKS_ENDED] < blocks:
                return BLOCKED
            device[here + BEGUN], block[BUFFER], block[RUNS], own[AT] = device[here + BEGUN] + 1, work[EPOCH] % 2, 1, TAKE
            own[TASK] = self.block
            return ALONE
        elif at == TAKE and self.single:
            self.deal(own, work[TICKET])
            work[TICKET] += 1
        elif at == TAKE:
            before, work[TAKEN] = work[TAKEN], work[TAKEN] | 1 << own[TASK]
            if before == work[TAKEN] and (own[NUMBER] or "own" in self.without):
                own[AT] = POLL
            else:
                self.deal(own, own[TASK])
                own += [own[TASK]] * (before != work[TAKEN])
        elif at == PUBLISH:
            if own[TASK] < own[TASKS_END]:
                before = own[NUMBER] - self.launch.entries
                if before >= 0 and "given back" not in self.without and not self.given_back.passed(block, before):
                    return BLOCKED
                block[ENTRIES + own[NUMBER] % self.launch.entries] = own[TASK]
                self.published.arrive(block, own[NUMBER])
                own[NUMBER] += 1
            own[TASK] += 1 if self.kind(own[TASK]) == FC2 and self.beside else blocks
            if own[TASK] >= own[TASKS_END]:
                kind = self.kind(own[TASKS_END] - 1)
                own[AT] = LAST if kind == len(self.ends) else POLL
                if not self.single and kind == (FC1 if "order" in self.without else FC2):
                    self.deal(own, NEVER)
        elif at == POLL:
            left = [n for n in range(blocks) if not work[TAKEN] >> n & 1 and "taken" not in self.without]
            if not self.single and not left:
                self.deal(own, NEVER)
                return ALONE
            last = own[NUMBER] - 1 - self.single * (self.launch.lead + self.launch.stages * (own[TASKS_END] <= self.ends[FC1]))
            begun = "leave" in self.without or ("tickets" in self.without and block[PROGRESS] > last)
            if last >= 0 and not begun and ("tickets" in self.without or not self.given_back.passed(block, last)):
                return BLOCKED
            own[AT], own[TASK] = TAKE, 0 if self.single else left[0]
            return ALONE if self.single else MOVED
        elif at == LAST:
            other = block[BUFFER] ^ ("other buffer" not in self.without)
            work[DONE] += 1
            if work[DONE] == blocks:
                work[TICKET] = work[DONE] = work[H + other] = work[SHARES + other] = 0
                work[EPOCH] += 1
            own[AT] = STAY
            return ALONE
        else:
            if block[ENDED] < self.launch.warps + self.launch.adders:
                return BLOCKED
            device[RUNNING], device[here + BLOCKS_ENDED], own[AT] = device[RUNNING] - 1, device[here + BLOCKS_ENDED] + 1, GONE
            return ALONE
        return MOVED

    def deal(self, own: Words, ticket: int) -> None:
        """Choose the tasks that are published next: the ticket's, or FC2's of an earlier one if no ticket is left, or the end."""
        blocks, (fc1, fc2, *_), end = self.launch.blocks, self.ends, self.ends[-1]
        own[AT], own[TASK], own[TASKS_END] = PUBLISH, end, end + 1
        if self.single:
            first = max(1, min(self.launch.stages, fc1 // blocks))
            task = min(ticket if ticket < blocks else ticket + (first - 1) * blocks, end)
            task = (task + fc1) % fc2 if "order" in self.without and task < fc2 else task
            own[TASK], own[TASKS_END] = task, min(first * blocks, fc1) if ticket < blocks and task < fc1 else task + 1
        elif ticket < blocks:
            own[TASK], own[TASKS_END] = ticket, fc1
        elif len(own) > HELD_AT:
            place, (each, more) = blocks - 1 - own.pop(HELD_AT), divmod(fc2 - fc1, blocks)
            first = fc1 + place * each + min(place, more)
            own[TASK], own[TASKS_END] = (first, first + each + (place < more)) if self.beside else (fc1 + place, fc2)


class Multiplies(Role):
    def task(self, block: Words, number: int) -> int | None:
        """Return the block's task, None if it is not known: it is published, or one of FC1 of the own virtual block."""
        own = self.block + number * self.launch.blocks
        if not self.single and number < self.launch.entries - ("known" not in self.without) and own < self.ends[FC1]:
            return own if block[RUNS] else None
        return block[ENTRIES + number % self.launch.entries] if self.published.passed(block, number) else None

    def units(self, task: int) -> int:
        routes = self.launch.routes[max(0, task - self.ends[FC1]) * len(self.launch.routes) // self.launch.tasks[FC2]]
        return 1 if self.gathers or task < self.ends[FC1] else -(-max(0, routes - self.warp) // self.launch.warps)

    def ask(self, block: Words, own: Words) -> bool:
        """Ask for a stage if its task is published, or pass a task without units."""
        task = self.task(block, own[ASKED]) if own[ASKED] != NEVER else None
        if task is None:
            return False
        if self.kind(task) >= SUM:
            own[ASKED] = NEVER
            return False
        units = self.units(task)
        own[UNDERWAY], own[UNIT] = own[UNDERWAY] + (units > 0), own[UNIT] + 1
        if own[UNIT] >= units:
            own[ASKED], own[UNIT] = own[ASKED] + 1, 0
        return True

    def fill(self, block: Words, own: Words) -> bool:
        """Ask until nothing more is published, or to be asked for. Return whether no later entry makes a difference."""
        while own[UNDERWAY] < self.launch.stages and self.ask(block, own):
            pass
        return own[UNDERWAY] == self.launch.stages or own[ASKED] == NEVER

    def step(self, device: Words, work: Words, computed: Words, block: Words, own: Words) -> int:
        number, at = own[NUMBER], own[AT]
        if at == READ:
            task = self.task(block, number)
            if task is None:
                return BLOCKED
            kind = self.kind(task)
            if kind == len(self.ends):
                block[ENDED], own[AT] = block[ENDED] + 1, GONE
                return ALONE
            filled = number > 0 or self.fill(block, own)
            block[PROGRESS] = number + 1 if self.warp == 0 else block[PROGRESS]
            own[KIND], own[LEFT] = kind, self.units(task) if kind < SUM else task
            own[AT] = WAIT if kind == SUM else OPEN if own[LEFT] else HAND_OVER
            moves_on = own[LEFT] == 0 and own[ASKED] == number and "idle" not in self.without
            own[ASKED] = NEVER if kind == SUM else own[ASKED] + moves_on
            self.given_back.arrive(block, number, "late arrival" in self.without)
            return ALONE if filled else MOVED
        if at == OPEN:
            while own[UNDERWAY] == 0:
                if not self.ask(block, own):
                    return BLOCKED
            own[UNDERWAY], own[LEFT] = own[UNDERWAY] - 1, own[LEFT] - 1
            own[AT] = WAIT if own[KIND] == FC2 else OPEN if own[LEFT] else HAND_OVER
            return ALONE if self.fill(block, own) else MOVED
        if at == WAIT:
            there = work[(H if own[KIND] == FC2 else SHARES) + block[BUFFER]]
            if (there.bit_count() if own[KIND] == FC2 else there) < self.launch.tasks[own[KIND] - 1]:
                return BLOCKED
            if own[KIND] == FC2:
                own[AT] = OPEN if own[LEFT] else HAND_OVER
                return ALONE
            computed[own[LEFT]] += 1
        else:
            if number >= self.launch.buffers and not self.empty.passed(block, number - self.launch.buffers):
                return BLOCKED
            self.full.arrive(block, number)
        self.given_back.arrive(block, number, "late arrival" not in self.without)
        own[NUMBER], own[AT] = number + 1, READ
        return ALONE


class Adds(Role):
    def step(self, device: Words, work: Words, computed: Words, block: Words, own: Words) -> int:
        number, launch = own[NUMBER], self.launch
        if own[AT] == READ:
            if not self.published.passed(block, number):
                return BLOCKED
            own[TASK] = block[ENTRIES + number % launch.entries]
            kind = own[KIND] = self.kind(own[TASK])
            if kind == len(self.ends) or (kind == SUM and "adders stay" in self.without):
                block[ENDED], own[AT] = block[ENDED] + 1, GONE
                return ALONE
            self.given_back.arrive(block, number, "adders arrive" not in self.without)
            mine = kind < SUM and number % launch.adders == self.warp
            own[AT], own[NUMBER] = (ADD, number) if mine else (READ, number + 1)
            return ALONE
        if own[AT] == ADD:
            if not self.full.passed(block, number):
                return BLOCKED
            computed[own[TASK]] += 1
            self.empty.arrive(block, number)
            own[AT] = RELEASE  # warps that multiply may go on before h or shares are there
        else:
            if own[KIND] == FC1:
                work[H + block[BUFFER]] |= 1 << own[TASK]
            else:
                work[SHARES + block[BUFFER]] += 1
            own[AT], own[NUMBER] = READ, number + 1
        return ALONE


class Device:
    """Launches in streams. Those of a stream share a workspace and follow each other."""

    def __init__(self, resident: int, *streams: Sequence[Launch]) -> None:
        self.parts = [[0] * (1 + 3 * sum(map(len, streams)))]
        self.warps: list[tuple[TakesTickets | Multiplies | Adds, tuple[int, ...]]] = []  # each with the parts that it sees
        self.launches: list[tuple[Launch, int, int, int]] = []
        for stream in streams:
            work = self.add([0] * 7)
            for n, launch in enumerate(stream):
                here, computed = 1 + 3 * len(self.launches), self.add([0] * sum(launch.tasks))
                self.launches.append((launch, work, computed, len(stream)))
                for number in range(launch.blocks):
                    block = self.add([0] * (ENTRIES + 3 * launch.entries + 2 * launch.buffers))
                    place = launch, here, here - 3 if n else 0, resident, number
                    roles: list[TakesTickets | Multiplies | Adds] = [TakesTickets(*place)]
                    roles += [Multiplies(*place, warp) for warp in range(launch.warps)]
                    roles += [Adds(*place, adder) for adder in range(launch.adders)]
                    self.warps += [(role, (0, work, computed, block, self.add(list(role.begin)))) for role in roles]

    def add(self, words: Words) -> int:
        self.parts.append(words)
        return len(self.parts) - 1

    def check(self, state: Sequence[Sequence[int]]) -> None:
        """Check that all launches ended, with each task computed, and left the workspace as the next launch needs it.

        One of FC1 may be computed by two blocks in a call that does not gather: by one that was late, and by one that was not.
        """
        assert all(state[sees[-1]][AT] == GONE for _, sees in self.warps)
        for launch, work, computed, epoch in self.launches:
            times = [
                min(n, 1) if k < launch.tasks[FC1] and len(launch.tasks) == SUM else n for k, n in enumerate(state[computed])
            ]
            assert times == [1] * sum(launch.tasks[:SUM]) + [launch.warps] * sum(launch.tasks[SUM:])
            assert max(state[computed]) <= max(2, launch.warps)
            assert [state[work][n] for n in (TICKET, DONE, EPOCH, H + epoch % 2, SHARES + epoch % 2)] == [0, 0, epoch, 0, 0]


def explore(device: Device, every: bool) -> int:
    """Take the steps in every order, or in one of those that differ by steps ALONE. Return the number of states."""
    begin = tuple(map(tuple, device.parts))
    seen, left = {begin}, [begin]
    while left:
        state = left.pop()
        behind: list[tuple[tuple[int, ...], ...]] = []
        for role, sees in (warp for warp in device.warps if state[warp[1][-1]][AT] != GONE):
            words = [list(state[part]) for part in sees]
            waits = words[-1][AT] == START and words[0][role.here + STARTED] != role.block  # blocks that are alike
            if not waits and (result := role.step(*words)) != BLOCKED:
                after = list(state)
                for part, changed in zip(sees, words, strict=True):
                    after[part] = tuple(changed)
                behind.append(tuple(after))
                if result == ALONE and not every:
                    behind = behind[-1:]
                    break
        if not behind:
            device.check(state)
        left += (new := set(behind) - seen)
        seen |= new
    return len(seen)


def run(device: Device, seed: int, late: int = 0) -> None:
    """Take the steps in a random order. Some warps are up to 20 times slower, and the last ``late`` blocks begin late."""
    drawn, warps, parts = random.Random(seed), device.warps, device.parts
    pace = [drawn.choice((1, 1, 1, 0.2, 0.05)) for _ in warps]
    running, quiet = [i for i, (role, _) in enumerate(warps) if isinstance(role, TakesTickets)], 0
    for taker in running[len(running) - late :]:
        pace[taker] = 0.02
    while running and quiet < 1000:
        quiet += 1
        for i in drawn.sample(running, len(running)):
            role, words = warps[i][0], [parts[part] for part in warps[i][1]]
            starts = words[-1][AT] == START
            if drawn.random() < pace[i] and role.step(*words) != BLOCKED:
                quiet = 0
                running += range(i + 1, i + 1 + role.launch.warps + role.launch.adders) if starts else ()
        running = [i for i in running if parts[warps[i][1][-1]][AT] != GONE]
    device.check(parts)


ONE_EACH, ONE_EACH_GATHER = Launch(2, (2, 1), warps=1), Launch(2, (2, 2, 1), warps=1, stages=1, lead=0)
TWO, ONE_BY_ONE = Launch(2, (5, 4), (3, 0), adders=2), Launch(2, (4, 4), (3, 0, 1), entries=3, adders=2)
GATHER = Launch(2, (2, 2, 1), entries=3, stages=1, lead=1)
CALL = Launch(132, (180, 264), (4, 0, 8, 1, 8, 2, 3, 8), entries=32, warps=16, adders=3, buffers=6, stages=3)
GATHERS = Launch(132, (180, 180, 64), entries=16, warps=16, adders=2, stages=3)
FEW, FEW_GATHER = replace(CALL, blocks=20, tasks=(66, 99)), replace(GATHERS, blocks=20, tasks=(66, 66, 64))
TASKS = frozenset(["tickets"])  # 274a226, less what it broke; sizes: idle warps, few blocks at a time, a small ring
IDLE = Launch(5, (24, 1024), (2, 1, 1, 1, 2, 2, 3, 2), entries=16, warps=6, adders=2, lead=2, without=TASKS)
HELD = Launch(24, (60, 20, 64), entries=16, warps=3, adders=2, lead=2, without=TASKS)
LATE = Launch(32, (400, 64), (4,), entries=8, warps=3, adders=2, stages=4, lead=2, without=TASKS)
HUNG = [(IDLE, 15, ["idle"]), (HELD, 6, ["given back", "adders stay"]), (LATE, 28, ["given back"])]
SMALL = [
    (2_000, False, 2, [[replace(TWO, tasks=(0, 3), routes=(0,))]]),  # no local routes
    (40_000, False, 2, [[replace(TWO, tasks=(4, 3))]]),
    (25_000, False, 2, [[replace(TWO, blocks=3, tasks=(4, 2), warps=1)]]),
    pytest.param(300_000, False, 2, [[replace(TWO, blocks=3, tasks=(4, 2))]], marks=pytest.mark.all),
    (60_000, False, 2, [[GATHER]]),
    (25_000, False, 2, [[Launch(2, (5, 2, 1), entries=3, warps=1, adders=2, lead=0)]]),  # first tickets of several tasks
    (100_000, False, 3, [[replace(ONE_EACH_GATHER, blocks=3)]]),
    (30_000, False, 4, [[ONE_EACH, ONE_EACH]]),
    (100_000, False, 4, [[ONE_EACH_GATHER, ONE_EACH_GATHER]]),
    (80_000, False, 2, [[replace(ONE_EACH_GATHER, tasks=(2, 1, 1))], [ONE_EACH]]),
    (30_000, True, 2, [[ONE_EACH]]),
    (15_000, True, 2, [[replace(ONE_EACH_GATHER, tasks=(2, 1, 1))]]),
    (25_000, True, 1, [[ONE_BY_ONE]]),
    (35_000, True, 1, [[replace(ONE_BY_ONE, tasks=(4, 4, 3), stages=1, lead=1)]]),
]


@pytest.mark.parametrize(("states", "every", "resident", "streams"), SMALL)
def test_every_order_ends(states: int, every: bool, resident: int, streams: list[list[Launch]]) -> None:
    assert explore(Device(resident, *streams), every) >= states


REAL = [
    *((each.blocks, late, [[each]]) for each, late in ((CALL, 0), (GATHERS, 31), (FEW, 19), (IDLE, 4), (HELD, 4), (LATE, 4))),
    *((1, 0, [[each]]) for each in (FEW, FEW_GATHER)),
    (40, 0, [[FEW, FEW_GATHER]]),
    (30, 0, [[FEW, FEW], [FEW_GATHER]]),
]


@pytest.mark.parametrize(("resident", "late", "streams"), REAL)
def test_launches_of_real_sizes_end(resident: int, late: int, streams: list[list[Launch]]) -> None:
    run(Device(resident, *streams), 0, late)


BROKEN = [
    ("taken", 1, [Launch(2, (2, 2))], AssertionError),
    ("known", 2, [Launch(2, (4, 3))], LostEntryError),
    ("own", 1, [Launch(2, (2, 2))], AssertionError),
    ("order", 1, [Launch(2, (2, 2))], AssertionError),
    ("order", 1, [Launch(2, (2, 2, 1), entries=4, stages=1, lead=1)], AssertionError),
    ("given back", 1, [Launch(2, (3, 2))], LostEntryError),
    ("adders arrive", 1, [Launch(2, (2, 2))], LostEntryError),
    ("adders stay", 1, [Launch(2, (1, 1, 3))], AssertionError),
    ("late arrival", 1, [Launch(2, (1, 2), (4,), stages=1)], LostEntryError),
    ("idle", 1, [Launch(2, (1, 4), (1, 1, 1, 2))], LostEntryError),
    ("launch ahead", 4, [ONE_EACH, ONE_EACH], AssertionError),
    ("other buffer", 2, [ONE_EACH], AssertionError),
    ("", 1, [replace(GATHER, tasks=(4, 2, 1), entries=2)], LostEntryError),  # no more entries than tasks ahead
]


@pytest.mark.parametrize(("rule", "resident", "launches", "error"), BROKEN)
def test_without_a_rule_an_order_fails(rule: str, resident: int, launches: list[Launch], error: type[Exception]) -> None:
    with pytest.raises(error):
        explore(Device(resident, [replace(each, without=frozenset([rule] * bool(rule))) for each in launches]), True)


def test_a_block_that_has_work_leaves_tickets() -> None:
    for sums, without, tickets in ((), [], 1), ((), ["leave"], 8), ((4,), [], 3), ((4,), ["leave"], 25):
        device = Device(1, [Launch(8, (16, 16, *sums), entries=32, without=frozenset(without))])
        words = [device.parts[part] for part in device.warps[0][1]]
        taken = 0
        while taken <= tickets and device.warps[0][0].step(*words) != BLOCKED:
            taken = words[1][TICKET] if sums else words[1][TAKEN].bit_count()
        assert taken == tickets


@pytest.mark.parametrize(("launch", "resident", "broken"), HUNG)
def test_274a226_loses_entries(launch: Launch, resident: int, broken: list[str]) -> None:
    with pytest.raises(LostEntryError):
        run(Device(resident, *[[replace(launch, without=TASKS.union(broken))]] * 3), 0)
