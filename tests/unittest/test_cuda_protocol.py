"""The waits of ``layer.cu`` between warps and blocks, as state machines whose steps are taken in every order.

Small launches are explored in all orders, launches of real sizes in orders drawn at random. Every order must end, with each
task computed once. No warp may wait for an mbarrier two phases behind: a parity would let it read an entry that was written
again. A protocol without one of its rules must fail, and so must that of commit 274a226, which hung on GPUs in three ways.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

RULES = {
    "counter": "Tickets come from a counter. Else a block has those of its own number.",
    "phases": "A ticket is for one phase. Else it is for all.",
    "virtual blocks": "A ticket is for a virtual block's tasks. Else it is for one task, or a block's first one for several.",
    "empty": "An entry is written again when every reader has arrived at its mbarrier.",
    "adders arrive": "Warps that add are such readers.",
    "adders stay": "Warps that add read the entries of sums, too.",
    "late arrival": "A warp that multiplies arrives when it has asked for all weights of the task, not when it begins it.",
    "idle": "A warp without units in a task moves its place for weights past the task.",
    "asks on": "A warp that cannot ask for another stage goes on and computes.",
    "leave": "A block that has work takes no further ticket of a phase while others are left.",
    "launch ahead": "A block takes its first ticket when the launch ahead has ended.",
    "other buffer": "A launch makes the other buffer of h ready, not its own.",
}
FC1, FC2, SUM = range(3)
NEVER = 1 << 30
BLOCKED, MOVED, ALONE = range(3)
"""Results of a step. ALONE: it commutes with every step that another warp can take before it; no other order is explored."""
Words = list[int]
# Words of a warp: where it is, and the number in the block of the task that it is at; then of each role its own.
AT, NUMBER = range(2)
START, AHEAD, TAKE, PUBLISH, POLL, LAST, STAY, READ, OPEN, WAIT, HAND_OVER, ADD, RELEASE, GONE = range(14)
PHASE, VIRTUAL, TASK, TASKS_END = range(2, 6)
KIND, ASKED, UNIT, UNDERWAY, LEFT = range(2, 7)
RUNNING, STARTED, BEGUN, BLOCKS_ENDED = 0, 0, 1, 2  # of the device: blocks that run; the others of each launch
TICKET, DONE, EPOCH, H, SHARES, CLEARED = 0, 1, 2, 3, 5, 7  # of a workspace; the last three of each buffer of h
PROGRESS, ENDED, BUFFER, ENTRIES = range(4)  # of a block: tasks begun, readers that ended; then tasks and arrivals at mbarriers


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
    without: frozenset[str] = frozenset()  # rules that it breaks


def has_passed(arrivals: int, count: int, phase: int) -> bool:
    """Return whether an mbarrier has completed a phase."""
    current = arrivals // count
    if not phase <= current <= phase + 1:
        raise LostEntryError
    return current > phase


class Role:
    """A warp of a block. ``here`` and ``ahead``: where the device has the words of its launch and of the launch ahead."""

    begin: tuple[int, ...] = (READ, 0, 0, 0, 0, 0, 0)

    def __init__(self, reading: int, launch: Launch, here: int, ahead: int, resident: int, block: int, warp: int = 0) -> None:
        assert launch.without <= RULES.keys()
        self.launch, self.here, self.ahead, self.resident, self.block, self.warp = launch, here, ahead, resident, block, warp
        self.without, self.gathers = launch.without, len(launch.tasks) > SUM
        self.readers = launch.warps + launch.adders * ("adders arrive" not in launch.without)
        self.ends = [sum(launch.tasks[: phase + 1]) for phase in range(len(launch.tasks))]
        self.full, self.empty = (ENTRIES + n * launch.entries for n in (1, 2))
        self.sums_full, self.sums_empty = (ENTRIES + 3 * launch.entries + n * launch.buffers for n in (0, 1))
        self.alone, self.reading = (MOVED, MOVED) if launch.without else (ALONE, reading)

    def kind(self, task: int) -> int:
        return sum(task >= end for end in self.ends)  # behind the last phase is the end

    def is_published(self, block: Words, number: int) -> bool:
        use, entry = divmod(number, self.launch.entries)
        return has_passed(block[self.full + entry], 1, use)


class TakesTickets(Role):
    begin = (START, 0, -1, 0, 0, 0)

    def step(self, device: Words, work: Words, computed: Words, block: Words, own: Words) -> int:
        here, ahead, blocks, at = self.here, self.ahead, self.launch.blocks, own[AT]
        if at == START:
            if device[RUNNING] >= self.resident or (ahead and device[ahead + BEGUN] < blocks):  # programmatic dependent launch
                return BLOCKED
            device[here + STARTED], device[RUNNING], own[AT] = device[here + STARTED] + 1, device[RUNNING] + 1, AHEAD
        elif at == AHEAD:
            if ahead and "launch ahead" not in self.without and device[ahead + BLOCKS_ENDED] < blocks:
                return BLOCKED
            device[here + BEGUN], block[BUFFER], own[AT] = device[here + BEGUN] + 1, work[EPOCH] % 2, TAKE
            return self.alone
        elif at == TAKE:
            self.take(work, own)
        elif at == PUBLISH:
            use, entry = divmod(own[NUMBER], self.launch.entries)
            if own[TASK] < own[TASKS_END]:
                if use and "empty" not in self.without and not has_passed(block[self.empty + entry], self.readers, use - 1):
                    return BLOCKED
                block[ENTRIES + entry] = own[TASK]
                block[self.full + entry], own[NUMBER] = block[self.full + entry] + 1, own[NUMBER] + 1
            own[TASK] += blocks
            own[AT] = PUBLISH if own[TASK] < own[TASKS_END] else POLL if own[PHASE] < len(self.ends) else LAST
        elif at == POLL:
            lead = 0 if "virtual blocks" not in self.without else self.launch.stages + 2 if own[PHASE] == FC1 else 2
            left = lead or ("leave" not in self.without and work[TICKET] < (own[PHASE] + 1) * blocks)
            if left and block[PROGRESS] + lead < own[NUMBER]:
                return BLOCKED
            own[AT] = TAKE
            return ALONE
        elif at == LAST:
            other = block[BUFFER] ^ ("other buffer" not in self.without)
            work[DONE] += 1
            work[CLEARED + other] += 1
            if work[DONE] == blocks:
                work[TICKET], work[DONE], work[EPOCH] = 0, 0, work[EPOCH] + 1
            if work[CLEARED + other] == blocks:
                work[CLEARED + other] = work[H + other] = work[SHARES + other] = 0
            own[AT] = STAY
            return self.alone
        else:
            if block[ENDED] < self.launch.warps + self.launch.adders:
                return BLOCKED
            device[RUNNING], device[here + BLOCKS_ENDED], own[AT] = device[RUNNING] - 1, device[here + BLOCKS_ENDED] + 1, GONE
            return ALONE
        return MOVED

    def take(self, work: Words, own: Words) -> None:
        blocks, ends, ticket = self.launch.blocks, [*self.ends, self.ends[-1] + 1], work[TICKET]
        if "counter" in self.without or ("phases" in self.without and 0 <= own[PHASE] < len(ends) - 2):
            phase, virtual = own[PHASE] + 1, self.block if "counter" in self.without else own[VIRTUAL]
        else:
            phase, virtual = divmod(ticket, blocks)
            phase = len(ends) - 1 if phase and "phases" in self.without else min(phase, len(ends) - 1)
            work[TICKET] += 1
        task = [0, *ends][phase] + (virtual if phase < len(ends) - 1 else 0)
        own[AT], own[PHASE], own[VIRTUAL], own[TASK], own[TASKS_END] = PUBLISH, phase, virtual, task, ends[phase]
        if "virtual blocks" in self.without:
            first = max(1, min(self.launch.stages, ends[FC1] // blocks))
            task = min(ticket if ticket < blocks else ticket + (first - 1) * blocks, ends[-2])
            own[PHASE], own[TASK], own[TASKS_END] = self.kind(task), task, first * blocks if ticket < blocks else task + 1


class Multiplies(Role):
    def units(self, task: int) -> int:
        routes = self.launch.routes[task % len(self.launch.routes)]
        return 1 if self.gathers or task < self.ends[FC1] else -(-max(0, routes - self.warp) // self.launch.warps)

    def ask(self, block: Words, own: Words) -> bool:
        """Ask for a stage if its task is published, or pass a task without units."""
        if own[ASKED] == NEVER or not self.is_published(block, own[ASKED]):
            return False
        task = block[ENTRIES + own[ASKED] % self.launch.entries]
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
        entry = number % self.launch.entries
        if at == READ:
            if not self.is_published(block, number):
                return BLOCKED
            task = block[ENTRIES + entry]
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
            block[self.empty + entry] += "late arrival" in self.without
            return self.reading if filled else MOVED
        if at == OPEN:
            if "asks on" in self.without and not self.fill(block, own):
                return BLOCKED
            while own[UNDERWAY] == 0:
                if not self.ask(block, own):
                    return BLOCKED
            own[UNDERWAY], own[LEFT] = own[UNDERWAY] - 1, own[LEFT] - 1
            own[AT] = WAIT if own[KIND] == FC2 else OPEN if own[LEFT] else HAND_OVER
            return self.reading if self.fill(block, own) else MOVED
        if at == WAIT:
            if work[(H if own[KIND] == FC2 else SHARES) + block[BUFFER]] < self.launch.tasks[own[KIND] - 1]:
                return BLOCKED
            if own[KIND] == FC2:
                own[AT] = OPEN if own[LEFT] else HAND_OVER
                return ALONE
            computed[own[LEFT]] += 1
        else:
            use, buffer = divmod(number, self.launch.buffers)
            if use and not has_passed(block[self.sums_empty + buffer], 1, use - 1):
                return BLOCKED
            block[self.sums_full + buffer] += 1
        block[self.empty + entry] += "late arrival" not in self.without
        own[NUMBER], own[AT] = number + 1, READ
        return ALONE


class Adds(Role):
    def step(self, device: Words, work: Words, computed: Words, block: Words, own: Words) -> int:
        number, launch = own[NUMBER], self.launch
        if own[AT] == READ:
            if not self.is_published(block, number):
                return BLOCKED
            own[TASK] = block[ENTRIES + number % launch.entries]
            kind = own[KIND] = self.kind(own[TASK])
            if kind == len(self.ends) or (kind == SUM and "adders stay" in self.without):
                block[ENDED], own[AT] = block[ENDED] + 1, GONE
                return ALONE
            block[self.empty + number % launch.entries] += "adders arrive" not in self.without
            mine = kind < SUM and number % launch.adders == self.warp
            own[AT], own[NUMBER] = (ADD, number) if mine else (READ, number + 1)
            return self.reading
        if own[AT] == ADD:
            use, buffer = divmod(number, launch.buffers)
            if not has_passed(block[self.sums_full + buffer], launch.warps, use):
                return BLOCKED
            computed[own[TASK]] += 1
            block[self.sums_empty + buffer] += 1
            own[AT] = RELEASE  # warps that multiply may go on before h or shares are there
        else:
            work[(H if own[KIND] == FC1 else SHARES) + block[BUFFER]] += 1
            own[AT], own[NUMBER] = READ, number + 1
        return ALONE


class Device:
    """Launches in streams. Those of a stream share a workspace and follow each other.

    ``reading``: result of a reader's look at an entry. ALONE if the step that writes the entry again waits for the reader.
    """

    def __init__(self, resident: int, *streams: Sequence[Launch], reading: int = ALONE) -> None:
        self.parts = [[0] * (1 + 3 * sum(map(len, streams)))]
        self.warps: list[tuple[TakesTickets | Multiplies | Adds, tuple[int, ...]]] = []  # each with the parts that it sees
        self.takers: list[int] = []
        self.launches: list[tuple[Launch, int, int, int]] = []
        for stream in streams:
            work = self.add([0] * 9)
            for n, launch in enumerate(stream):
                here, computed = 1 + 3 * len(self.launches), self.add([0] * sum(launch.tasks))
                self.launches.append((launch, work, computed, len(stream)))
                for number in range(launch.blocks):
                    self.takers.append(len(self.warps))
                    block = self.add([0] * (ENTRIES + 3 * launch.entries + 2 * launch.buffers))
                    place = reading, launch, here, here - 3 if n else 0, resident, number
                    roles: list[TakesTickets | Multiplies | Adds] = [TakesTickets(*place)]
                    roles += [Multiplies(*place, warp) for warp in range(launch.warps)]
                    roles += [Adds(*place, adder) for adder in range(launch.adders)]
                    self.warps += [(role, (0, work, computed, block, self.add(list(role.begin)))) for role in roles]

    def add(self, words: Words) -> int:
        self.parts.append(words)
        return len(self.parts) - 1

    def check(self, state: Sequence[Sequence[int]]) -> None:
        """Check that all launches ended, with each task computed once, and left the workspace as the next launch needs it."""
        assert all(state[sees[-1]][AT] == GONE for _, sees in self.warps)
        for launch, work, computed, epoch in self.launches:
            assert list(state[computed]) == [1] * sum(launch.tasks[:SUM]) + [launch.warps] * sum(launch.tasks[SUM:])
            assert [state[work][n] for n in (TICKET, DONE, EPOCH, H + epoch % 2, SHARES + epoch % 2)] == [0, 0, epoch, 0, 0]


def explore(device: Device) -> int:
    """Take the steps in all orders, and return the number of states."""
    begin = tuple(map(tuple, device.parts))
    seen, left = {begin}, [begin]
    while left:
        state = left.pop()
        behind: list[tuple[tuple[int, ...], ...]] = []
        for role, sees in device.warps:
            words = [list(state[part]) for part in sees]
            waits = words[-1][AT] == START and words[0][role.here + STARTED] != role.block  # blocks that are alike
            result = BLOCKED if waits or words[-1][AT] == GONE else role.step(*words)
            if result != BLOCKED:
                after = list(state)
                for part, changed in zip(sees, words, strict=True):
                    after[part] = tuple(changed)
                behind = [tuple(after)] if result == ALONE else [*behind, tuple(after)]
            if result == ALONE:
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
    for taker in device.takers[len(device.takers) - late :]:
        pace[taker] = 0.02
    running, quiet = list(device.takers), 0
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


TWO, ONE_EACH = Launch(2, (2, 2), (3, 0), adders=2), Launch(2, (1, 1), warps=1)
ONE_BY_ONE = Launch(2, (4, 4), (3, 0, 1), entries=3, adders=2)
CALL = Launch(132, (180, 264), (4, 0, 8, 1, 8, 2, 3, 8), entries=32, warps=16, adders=3, buffers=6, stages=3)
GATHERS = Launch(132, (180, 180, 64), entries=16, warps=16, adders=2, stages=3)
FEW, FEW_GATHER = replace(CALL, blocks=20, tasks=(66, 99)), replace(GATHERS, blocks=20, tasks=(66, 66, 64))
TASKS = frozenset(["virtual blocks"])  # 274a226, less what it broke; sizes: idle warps, few blocks at a time, a small ring
IDLE = Launch(5, (24, 1024), (2, 1, 1, 1, 2, 2, 3, 2), entries=16, warps=6, adders=2, without=TASKS)
HELD = Launch(24, (60, 20, 64), entries=16, warps=3, adders=2, without=TASKS)
LATE = Launch(32, (400, 64), (4,), entries=8, warps=3, adders=2, stages=4, without=TASKS)


@pytest.mark.parametrize(
    ("states", "reading", "resident", "streams"),
    [
        (130_000, ALONE, 2, [[TWO]]),
        (110_000, ALONE, 2, [[replace(TWO, tasks=(2, 1), routes=(1, 0), entries=3, adders=1)]]),
        (30_000, ALONE, 2, [[Launch(2, (1, 1, 1))]]),
        (100, ALONE, 1, [[replace(TWO, entries=1, stages=3)]]),  # asks for more stages than the ring has entries
        (100_000, ALONE, 4, [[ONE_EACH, ONE_EACH]]),
        (30_000, ALONE, 2, [[ONE_EACH], [replace(ONE_EACH, blocks=1)]]),
        (70_000, MOVED, 2, [[Launch(2, (1, 1), (1, 0))]]),
        (25_000, MOVED, 1, [[ONE_BY_ONE]]),
        (35_000, MOVED, 1, [[replace(ONE_BY_ONE, tasks=(4, 4, 3))]]),
    ],
)
def test_every_order_ends(states: int, reading: int, resident: int, streams: list[list[Launch]]) -> None:
    assert explore(Device(resident, *streams, reading=reading)) >= states


@pytest.mark.parametrize(
    ("resident", "late", "streams"),
    [
        (132, 0, [[CALL]]),
        (132, 31, [[GATHERS]]),
        (20, 19, [[FEW]]),
        (1, 0, [[FEW]]),
        (1, 0, [[FEW_GATHER]]),
        (40, 0, [[FEW, FEW_GATHER]]),
        (5, 0, [[FEW_GATHER], [FEW]]),
        (30, 0, [[FEW, FEW], [FEW_GATHER]]),
        *((resident, late, [[each]]) for each in (IDLE, HELD, LATE) for resident, late in ((1, 0), (each.blocks, 4))),
    ],
)
def test_launches_of_real_sizes_end(resident: int, late: int, streams: list[list[Launch]]) -> None:
    run(Device(resident, *streams), 0, late)


@pytest.mark.parametrize(
    ("rule", "resident", "launches", "error"),
    [
        ("counter", 1, [Launch(2, (2, 2))], AssertionError),
        ("phases", 1, [Launch(2, (2, 2))], AssertionError),
        ("empty", 1, [Launch(2, (3, 2))], LostEntryError),
        ("adders arrive", 1, [Launch(2, (2, 2))], LostEntryError),
        ("adders stay", 1, [Launch(2, (1, 1, 3))], AssertionError),
        ("late arrival", 1, [Launch(2, (1, 2), (4,), stages=1)], LostEntryError),
        ("idle", 1, [Launch(2, (1, 4), (1, 1, 1, 2))], LostEntryError),
        ("asks on", 2, [Launch(2, (3, 3), stages=3)], AssertionError),  # the ring is too small
        ("asks on", 1, [Launch(2, (2, 2), stages=3, entries=8)], AssertionError),  # tickets are left for the other block
        ("launch ahead", 4, [ONE_EACH, ONE_EACH], AssertionError),
        ("other buffer", 2, [ONE_EACH], AssertionError),
    ],
)
def test_without_a_rule_an_order_fails(rule: str, resident: int, launches: list[Launch], error: type[Exception]) -> None:
    with pytest.raises(error):
        explore(Device(resident, [replace(each, without=frozenset([rule])) for each in launches]))


def test_a_block_that_has_work_leaves_tickets() -> None:
    for without, tickets in ([], 1), (["leave"], 4):
        device = Device(1, [Launch(2, (4, 4), entries=8, without=frozenset(without))])
        words = [device.parts[part] for part in device.warps[0][1]]
        while words[1][TICKET] < 4 and device.warps[0][0].step(*words) != BLOCKED:
            pass
        assert words[1][TICKET] == tickets


@pytest.mark.parametrize(
    ("launch", "resident", "broken"), [(IDLE, 15, ["idle"]), (HELD, 6, ["empty", "adders stay"]), (LATE, 28, ["empty"])]
)
def test_274a226_loses_entries(launch: Launch, resident: int, broken: list[str]) -> None:
    with pytest.raises(LostEntryError):
        run(Device(resident, *[[replace(launch, without=TASKS.union(broken))]] * 3), 0)
