"""Stand-ins and helpers of the unit tests: a clock moved by hand, a recorder whose values can be read, another user."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagle_exporter.registry.layout import Layout, RankPlan
from eagle_exporter.registry.writer import RankWriter
from eagle_exporter.timing.clocks import Slot
from eagle_exporter.timing.recorder import RankRecorder
from tests.ranks import make_plan
from tests.users import NOBODY

Observed = tuple[int, Any]
"""Number and sum of a histogram's observations; the sum is a float that may be compared with `pytest.approx`."""


class HandClock:
    """A clock whose device runs behind the host as far as the test says.

    Attributes:
        now: Moment, in seconds, that the next mark gets.
        executed: Everything marked up to this moment has happened on the device.
        taken: Slots that are out of the pool.
    """

    name = "hand"

    def __init__(self, slots: int = 8, marks: int = 40, *, tells_host_bound: bool = True) -> None:
        self.marks = marks
        self.tells_host_bound = tells_host_bound
        self.now = 1000.0
        self.executed = math.inf
        self.slots = slots
        self.taken: list[Slot] = []

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    @property
    def free(self) -> int:
        """Slots in the pool."""
        return self.slots - len(self.taken)

    def acquire(self) -> Slot | None:
        """Return a slot while there are any."""
        if not self.free:
            return None
        slot = Slot([])
        self.taken.append(slot)
        return slot

    def mark(self, slot: Slot, now: int) -> None:
        """Note the present moment."""
        assert any(slot is taken for taken in self.taken), "marked a slot that was given back"
        if slot.count < self.marks:
            slot.events.append(self.now)
            slot.host.append(round(self.now * 1e9))
            slot.count += 1

    def done(self, slot: Slot) -> bool:
        """Return whether the device got as far as the last mark."""
        assert any(slot is taken for taken in self.taken), "asked about a slot that was given back"
        return bool(slot.events[-1] <= self.executed)

    def reached(self, slot: Slot, mark: int) -> bool:
        """Return whether the device got as far as a mark."""
        return bool(slot.events[mark] <= self.executed)

    def offsets(self, slot: Slot) -> Sequence[float]:
        """Return seconds since the first mark."""
        assert self.done(slot), "read before the device was through"
        return [moment - slot.events[0] for moment in slot.events]

    def between(self, earlier: Slot, later: Slot) -> float:
        """Return seconds from the end of one slot to the start of another."""
        assert self.done(earlier)
        assert self.done(later)
        return float(later.events[0] - earlier.events[-1])

    def release(self, slot: Slot) -> None:
        """Take a slot back; giving back twice is an error."""
        self.taken = [taken for taken in self.taken if taken is not slot] if self._has(slot) else self._twice()

    def _has(self, slot: Slot) -> bool:
        return any(taken is slot for taken in self.taken)

    def _twice(self) -> list[Slot]:
        raise AssertionError("a slot was given back twice")


def make_recorder(directory: Path, plan: RankPlan | None = None) -> RankRecorder:
    """Return a recorder over a new file."""
    return RankRecorder(RankWriter(directory / "tp0-pp0-dp0.bin", Layout(plan or make_plan())))


def value(recorder: RankRecorder, name: str, *labels: str) -> float:
    """Return the value of a scalar series, NaN when the rank does not have it."""
    slot = recorder.layout.slot(name, *labels)
    return math.nan if slot is None else recorder.values[slot]


def histogram(recorder: RankRecorder, name: str, *labels: str) -> Observed:
    """Return the number of observations of a histogram and their sum."""
    slot = recorder.layout.slot(name, *labels)
    assert slot is not None, f"no {name}{labels}"
    family = next(family for family in recorder.layout.families if family.metric.name == name)
    counts = recorder.values[slot : slot + len(family.bounds) + 1]
    return int(sum(counts)), recorder.values[slot + len(family.bounds) + 1]


def same_everywhere(recorder: RankRecorder, before: Sequence[float]) -> bool:
    """Return whether no published value differs from `before`, a copy of the values; NaN equals NaN."""
    now = recorder.values[: recorder.layout.slots]
    return all(old == new or (math.isnan(old) and math.isnan(new)) for old, new in zip(before, now, strict=False))


def open_descriptors() -> set[str]:
    """Return what this process has open: number and target of each descriptor.

    A leak is one that was not there before. That there are fewer than before is none: the garbage collector closes
    what earlier tests left.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:  # the listing's own
            continue
    return found


def as_nobody(function: Callable[[], str]) -> str:
    """Return what `function` returns in a forked process of a user without rights.

    Root may read and write anything, so permissions can only be tested as somebody else. Where this process is not root
    it is that somebody, and the test takes its own permissions away.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(write_end, function().encode())
            status = 0
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer
