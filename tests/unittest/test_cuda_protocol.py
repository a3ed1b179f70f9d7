"""The waits of ``layer.cu`` between warps and blocks, as a model whose steps are taken in random order.

A launch ends in every order, also if blocks start late or one after the other, and no warp reads an entry that was written again.
Two rules make it so (``Protocol``). Without one of them the model hangs where the kernel did.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

FC1, FC2, END, SUM = 0, 1, 2, 3
LATE_STEPS = 2000
Step = Iterator[Callable[[], bool] | None]
"""Yields what a warp waits for, or None where another warp may run."""


class LostEntryError(Exception):
    """An entry was written again before a warp had read it."""


@dataclass(frozen=True)
class Protocol:
    waits_for_readers: bool = True
    """An entry is written again once all warps have read it. Of products the warps that add tell, of sums each warp."""
    idle_warps_move_on: bool = True
    """A warp that has nothing to multiply in a task moves its place for weights past it."""


@dataclass(frozen=True)
class Launch:
    gathers: bool
    blocks: int
    resident: int
    """Blocks that run at once. Another starts when one has ended."""
    fc1_tasks: int
    fc2_tasks: int
    routes: tuple[int, ...] = (1,)
    """Of each token; units of a task of FC2 go round the warps."""
    late: int = 0
    """Blocks of the first ``resident`` that begin after ``LATE_STEPS`` steps, or when the others can only wait."""
    protocol: Protocol = Protocol()
    entries: int = 16
    buffers: int = 2
    adders: int = 2
    warps: int = 3
    stages: int = 2

    @property
    def tasks(self) -> int:
        return self.fc1_tasks + self.fc2_tasks + (len(self.routes) if self.gathers else 0)

    def kind(self, task: int) -> int:
        return FC1 if task < self.fc1_tasks else FC2 if task < self.fc1_tasks + self.fc2_tasks else SUM

    def units(self, task: int, warp: int) -> int:
        if self.gathers or self.kind(task) == FC1:
            return 1
        count = self.routes[task % len(self.routes)]
        return max(0, -(-(count - warp) // self.warps))


@dataclass
class Memory:
    """Global memory: tickets taken, tasks whose sums are written."""

    ticket: int = 0
    fc1_done: int = 0
    fc2_done: int = 0


@dataclass
class Block:
    launch: Launch
    memory: Memory
    entries: list[tuple[int, int, int]] = field(default_factory=list)
    """Number of the task in the block plus 1, kind, and task."""

    def __post_init__(self) -> None:
        launch = self.launch
        self.entries = [(0, 0, 0)] * launch.entries
        self.progress, self.first_sum = 0, 1 << 30
        self.added, self.summed = [0] * launch.adders, [0] * launch.warps
        self.full, self.empty = [0] * launch.buffers, [0] * launch.buffers

    def processes(self) -> list[Step]:
        launch = self.launch
        warps = [self.multiplies(warp) for warp in range(launch.warps)]
        return [self.takes_tickets(), *warps, *(self.adds(adder) for adder in range(launch.adders))]

    def read(self, number: int) -> tuple[int, int]:
        """Read the fields of an entry whose number was seen before."""
        seen, kind, task = self.entries[number % self.launch.entries]
        if seen != number + 1:
            raise LostEntryError
        return kind, task

    def published(self, number: int) -> bool:
        return self.entries[number % self.launch.entries][0] == number + 1

    def is_free(self, number: int) -> bool:
        """Return whether all warps have read what the entry of this task holds."""
        before = number - self.launch.entries
        return min(self.added) > before and self.first_sum + min(self.summed) > before

    def has_begun(self, number: int) -> bool:
        """Return whether the first warp has begun so many tasks."""
        return self.progress >= number

    def is_empty(self, buffer: int, turn: int) -> bool:
        return self.empty[buffer] >= turn

    def is_full(self, buffer: int, turn: int) -> bool:
        return self.full[buffer] == self.launch.warps * (turn + 1)

    def takes_tickets(self) -> Step:
        launch, memory, number, task = self.launch, self.memory, 0, 0
        ahead = max(1, min(launch.stages, launch.fc1_tasks // launch.blocks))
        last = launch.tasks if launch.gathers else launch.fc1_tasks
        quota = 1 if launch.gathers else -(-(launch.tasks - launch.fc1_tasks) // launch.blocks)
        taken = [memory.ticket]
        memory.ticket += 1
        while True:
            for ticket in taken:
                first = ticket < launch.blocks
                for task in (
                    (ticket + n * launch.blocks for n in range(ahead)) if first else ((ahead - 1) * launch.blocks + ticket,)
                ):
                    quota -= task >= last
                    if task < launch.tasks:
                        yield from self.publish(number, launch.kind(task), task)
                        number += 1
            if quota <= 0:
                break
            lead = 2 if task >= launch.fc1_tasks else launch.stages + 2
            yield partial(self.has_begun, number - lead)
            batch = 4 if task + 6 * launch.blocks < launch.fc1_tasks and not launch.gathers else 1
            taken = list(range(memory.ticket, memory.ticket + batch))
            memory.ticket += batch
            yield None
        yield from self.publish(number, END, 0)

    def publish(self, number: int, kind: int, task: int) -> Step:
        if self.launch.protocol.waits_for_readers:
            yield partial(self.is_free, number)
        if kind == SUM:
            self.first_sum = min(self.first_sum, number)
        self.entries[number % self.launch.entries] = number + 1, kind, task

    def multiplies(self, warp: int) -> Step:
        launch, memory = self.launch, self.memory
        asked, unit, stages, ended = 0, 0, 0, False  # next entry to ask for, unit of it, stages that are on their way

        def ask() -> bool:
            nonlocal asked, unit, stages, ended
            if not self.published(asked):
                return False
            kind, task = self.read(asked)
            if kind & 2:
                ended = True
                return False
            units = launch.units(task, warp)
            stages += units > 0
            unit += 1
            if unit >= units:
                asked, unit = asked + 1, 0
            return True

        def fill() -> None:
            while not ended and stages < launch.stages and ask():
                pass

        def ready(number: int) -> bool:
            while not self.published(number) and stages == 0 and not ended and ask():
                pass
            return self.published(number)

        def has_stage() -> bool:
            return stages > 0 or ask()

        number = item = 0
        yield lambda: self.published(0)
        fill()
        while True:
            yield partial(ready, number)
            kind, task = self.read(number)
            if kind == END:
                return
            if warp == 0:
                self.progress = number + 1
            if launch.protocol.idle_warps_move_on and kind != SUM and not launch.units(task, warp):
                asked = max(asked, number + 1)
            if kind == SUM:
                ended = True
                yield lambda: memory.fc2_done >= launch.fc2_tasks
                self.summed[warp] += 1
            for _ in range(0 if kind == SUM else launch.units(task, warp)):
                yield has_stage
                if kind == FC2:
                    yield lambda: memory.fc1_done >= launch.fc1_tasks
                stages -= 1
                yield None
                fill()
            if kind != SUM:
                buffer, turn = item % launch.buffers, item // launch.buffers
                yield partial(self.is_empty, buffer, turn)
                self.full[buffer] += 1
                item += 1
            number += 1
            yield None

    def adds(self, adder: int) -> Step:
        launch, number = self.launch, 0
        while True:
            self.added[adder] = number
            yield partial(self.published, number)
            kind, _ = self.read(number)
            if kind & 2:
                self.added[adder] = 1 << 30
                return
            if number % launch.adders == adder:
                buffer, turn = number % launch.buffers, number // launch.buffers
                yield partial(self.is_full, buffer, turn)
                self.memory.fc1_done += kind == FC1
                self.empty[buffer] += 1
                yield None
                self.memory.fc2_done += kind == FC2
            number += 1


@dataclass
class Process:
    steps: Step
    block: int
    weight: float
    """Share of the steps that it gets. Some warps are a hundred times slower than others."""
    begins: int
    waits_for: Callable[[], bool] | None = None


def ends(launch: Launch, seed: int) -> bool:
    """Run the launch. Return False if nothing can go on, or if an entry is lost."""
    drawn, memory = random.Random(seed), Memory()
    running: list[Process] = []
    left: list[int] = []

    def start(begins: int = 0) -> None:
        steps = Block(launch, memory).processes()
        running.extend(Process(each, len(left), drawn.choice((1, 1, 1, 0.2, 0.01)), begins) for each in steps)
        left.append(len(steps))

    for number in range(launch.resident):
        start(LATE_STEPS if number < launch.late else 0)
    time = 0
    while running:
        time += 1
        ready = [p for p in running if p.begins <= time and (p.waits_for is None or p.waits_for())]
        if not ready:
            if time >= LATE_STEPS:
                return False
            time = LATE_STEPS
            continue
        process = drawn.choices(ready, [p.weight for p in ready])[0]
        try:
            process.waits_for = next(process.steps)
        except LostEntryError:
            return False
        except StopIteration:
            running.remove(process)
            left[process.block] -= 1
            if not left[process.block] and len(left) < launch.blocks:
                start()
    return True


IDLE = Launch(False, 5, 5, 24, 128 * 8, (2, 1, 1, 1, 2, 2, 3, 2), warps=6)
HELD = Launch(True, 24, 3, 60, 20, (1,) * 64)
LATE = Launch(False, 32, 32, 400, 64, (4,) * 8, late=4, entries=16, stages=4)
NO_IDLE, NO_READERS = Protocol(idle_warps_move_on=False), Protocol(waits_for_readers=False)


@pytest.mark.parametrize(
    "launch",
    [IDLE, HELD, LATE, *(replace(each, resident=1, late=0) for each in (IDLE, HELD, LATE)), replace(LATE, late=31)],
    ids=["idle warps", "held", "late blocks", "idle warps, one by one", "held, one by one", "one by one", "all but one late"],
)
def test_every_launch_ends(launch: Launch) -> None:
    assert all(ends(launch, seed) for seed in range(6))


@pytest.mark.parametrize(
    ("launch", "protocol"),
    [(IDLE, NO_IDLE), (HELD, NO_READERS), (LATE, NO_READERS)],
    ids=["idle warps", "held", "late blocks"],
)
def test_without_a_rule_launches_hang(launch: Launch, protocol: Protocol) -> None:
    assert not all(ends(replace(launch, protocol=protocol), seed) for seed in range(12))
