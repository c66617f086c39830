"""Draft steps inside a CUDA graph: read when they are the cycle's own, dropped and counted otherwise."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_exporter.hooks.draft_graph import READ_EVERY, DraftGraphEvents
from eagle_exporter.hooks.session import Session
from eagle_exporter.timing.cycle import CycleRecord


class Event:
    """An event inside a graph: `at` is set by each replay."""

    def __init__(self, *, enable_timing: bool, external: bool) -> None:
        assert enable_timing
        assert external, "an event that is not external is only a dependency inside the graph"
        self.recorded = 0
        self.at = 0.0

    def record(self, stream: Branch | None = None) -> None:
        self.recorded += 1
        if stream is not None:
            stream.did.append("record")

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


class Branch:
    """A stand-in for ``torch.cuda.Stream`` that notes what it did."""

    def __init__(self, name: str = "branch") -> None:
        self.name = name
        self.did: list[str] = []

    def wait_stream(self, other: Branch) -> None:
        self.did.append(f"wait for {other.name}")


class Cuda:
    """A stand-in for ``torch.cuda``."""

    Event = Event
    Stream = Branch

    def __init__(self) -> None:
        self.capturing = True
        self.main = Branch("main")

    def current_stream(self) -> Branch:
        return self.main

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


class Clock:
    """Says whether a mark has happened."""

    def __init__(self) -> None:
        self.happened = True

    def reached(self, slot: Any, mark: int) -> bool:
        del slot, mark
        return self.happened


class Timer:
    """What `collect` needs of a timer."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.recorder = self
        self.dropped: list[str] = []

    def drop(self, reason: str) -> None:
        self.dropped.append(reason)


def captured(num_steps: int = 3, batch_size: int = 4) -> DraftGraphEvents:
    """Return events of one captured graph."""
    events = DraftGraphEvents(Cuda())
    events.begin_capture(num_steps, batch_size)
    for _ in range(num_steps - 1):
        events.end_step()
    events.end_capture()
    return events


def replay(events: DraftGraphEvents, times: list[float], batch_size: int = 4) -> CycleRecord:
    """Replay the graph until a replay is one that is read; return its cycle."""
    for _ in range(READ_EVERY):
        record = CycleRecord(batch_size, 3, 4)
        record.slot = object()  # type: ignore[assignment]
        record.draft_end = 2
        events.replayed(record, 3, batch_size)
    for event, at in zip(events.graphs[(3, batch_size)], times, strict=True):
        event.at = at
    return record


def test_a_captured_draft_has_an_event_at_its_start_and_after_each_forward() -> None:
    events = captured(num_steps=5)
    assert [event.recorded for event in events.graphs[(5, 4)]] == [1] * 5


def test_a_warm_up_outside_a_capture_records_nothing() -> None:
    cuda = Cuda()
    cuda.capturing = False
    events = DraftGraphEvents(cuda)
    events.begin_capture(3, 1)
    events.end_step()
    assert events.graphs == {}
    assert not events.capturing


def test_one_step_needs_no_forward_and_no_event() -> None:
    events = DraftGraphEvents(Cuda())
    events.begin_capture(1, 1)
    assert events.graphs == {}


def test_events_hang_on_a_branch_that_is_joined_at_the_end() -> None:
    """An event between two kernels of one chain holds the second one up."""
    cuda = Cuda()
    events = DraftGraphEvents(cuda)
    cuda.capturing = False
    events.begin_capture(3, 4)  # a warm-up
    cuda.capturing = True
    events.begin_capture(3, 4)
    events.end_step()
    events.end_step()
    assert cuda.main.did == []
    events.end_capture()
    assert events._branch.did == ["wait for main", "record"] * 3
    assert cuda.main.did == ["wait for branch"]
    events.end_capture()
    assert cuda.main.did == ["wait for branch"], "joined once"


def test_a_branch_is_joined_when_the_events_are_given_up_in_the_middle() -> None:
    """A capture with a loose end would fail in SGLang."""
    cuda = Cuda()
    events = DraftGraphEvents(cuda)
    cuda.capturing = False
    events.begin_capture(3, 4)
    cuda.capturing = True
    events.begin_capture(3, 4)
    events.give_up()
    events.end_step()
    events.end_capture()
    assert cuda.main.did == ["wait for branch"]
    assert events.graphs == {}


def test_a_graph_captured_again_replaces_its_events() -> None:
    events = captured()
    first = events.graphs[(3, 4)]
    events.begin_capture(3, 4)
    assert (3, 4) not in events.graphs, "while it is captured"
    events.end_step()
    events.end_capture()
    assert events.graphs[(3, 4)] is not first


def test_no_event_of_a_graph_is_ever_destroyed() -> None:
    """The graph writes into it at each launch, and nobody tells when SGLang launches it for the last time."""
    events = captured()
    alive = [weakref.ref(event) for event in events.graphs[(3, 4)]]
    events.begin_capture(3, 4)
    events.end_capture()
    events.give_up()
    del events
    gc.collect()
    assert all(reference() is not None for reference in alive)


def test_steps_of_a_complete_draft_are_seconds_between_its_events() -> None:
    events, timer = captured(), Timer()
    record = replay(events, [1.0, 1.25, 1.75])
    events.collect(timer, final=False)  # type: ignore[arg-type]
    assert record.step_seconds == pytest.approx([0.25e-3, 0.5e-3])
    assert timer.dropped == []


def test_a_draft_that_still_runs_is_read_later_but_not_after_the_next_launch() -> None:
    events, timer = captured(), Timer()
    record = replay(events, [1.0, 1.25, 1.75])
    timer.clock.happened = False
    events.collect(timer, final=False)  # type: ignore[arg-type]
    assert record.step_seconds is None
    assert timer.dropped == []
    events.collect(timer, final=True)  # type: ignore[arg-type]
    assert timer.dropped == ["draft_step"]
    timer.clock.happened = True
    events.collect(timer, final=False)  # type: ignore[arg-type]
    assert record.step_seconds is None, "by now the events hold the next cycle's times"


def test_each_reading_is_taken_once() -> None:
    events, timer = captured(), Timer()
    first = replay(events, [1.0, 1.25, 1.75])
    events.collect(timer, final=False)  # type: ignore[arg-type]
    first.step_seconds = None
    events.collect(timer, final=True)  # type: ignore[arg-type]
    assert first.step_seconds is None
    assert timer.dropped == []


def test_a_batch_size_without_events_is_never_read() -> None:
    events, timer = captured(batch_size=4), Timer()
    for _ in range(2 * READ_EVERY):
        events.replayed(CycleRecord(1, 3, 4), 3, 1)
    events.collect(timer, final=True)  # type: ignore[arg-type]
    assert timer.dropped == []


def test_a_cycle_given_up_meanwhile_is_dropped() -> None:
    events, timer = captured(), Timer()
    record = replay(events, [1.0, 1.25, 1.75])
    record.slot = None
    events.collect(timer, final=False)  # type: ignore[arg-type]
    assert timer.dropped == ["draft_step"]


def test_a_reading_that_fails_is_not_tried_again() -> None:
    """It would fail at each launch of a graph, for ever."""
    events, timer = captured(), Timer()
    replay(events, [1.0, 1.25, 1.75])

    def fails(slot: Any, mark: int) -> bool:
        raise RuntimeError("CUDA error 999")

    timer.clock.reached = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        events.collect(timer, final=False)  # type: ignore[arg-type]
    events.collect(timer, final=True)  # type: ignore[arg-type]


def test_a_draft_that_raises_while_it_is_captured_leaves_no_loose_end_and_no_event_to_come() -> None:
    cuda = Cuda()
    session = Session()
    session.graph_events = events = DraftGraphEvents(cuda)
    model_forward = session.wrapper("draft_step")(lambda: None)

    def draft(worker: Any, forward_batch: Any) -> None:
        model_forward()
        if cuda.capturing:
            raise RuntimeError("SGLang's own error")

    draft_forward = session.wrapper("draft")(draft)
    worker, forward_batch = SimpleNamespace(speculative_num_steps=3), SimpleNamespace(batch_size=4)
    cuda.capturing = False
    draft_forward(worker, forward_batch)
    cuda.capturing = True
    with pytest.raises(RuntimeError, match="SGLang's own error"):
        draft_forward(worker, forward_batch)
    assert cuda.main.did == ["wait for branch"]
    did = list(events._branch.did)
    model_forward()  # of whatever is captured next
    assert events._branch.did == did
    assert events.graphs == {}
