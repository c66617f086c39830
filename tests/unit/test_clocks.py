from __future__ import annotations

import ctypes
import sys
import types
from time import perf_counter_ns
from typing import Any

import pytest

from eagle_exporter.timing import clocks, cuda_driver
from eagle_exporter.timing.clocks import Clock, CudaEventClock, DriverEventClock, HostClock, SyncClock
from eagle_exporter.timing.cuda_driver import CudaDriver


class Device:
    """A stand-in for ``torch.cuda``: a stream that executes as far as the test lets it.

    Attributes:
        calls: What was called, in order.
        time: Milliseconds at which the next recorded event happens.
        executed: Events recorded up to here are complete.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.time = 0.0
        self.executed = 1e9
        self.broken = False
        self.stream = types.SimpleNamespace(cuda_stream=77)
        self.events: list[Event] = []

    def current_stream(self) -> Any:
        self.calls.append("current_stream")
        if self.broken:
            raise RuntimeError("no stream")
        return self.stream

    def Event(self, *, enable_timing: bool) -> Event:  # noqa: N802 - torch's name
        assert enable_timing
        self.calls.append("Event")
        event = Event(self)
        self.events.append(event)
        event.cuda_event = len(self.events)
        return event

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def is_available(self) -> bool:
        return True


class Event:
    """A stand-in for ``torch.cuda.Event``; it has no ``synchronize``, so waiting for it would fail."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.time = -1.0
        self.cuda_event = 0

    def record(self, stream: Any = None) -> None:
        assert stream in (self.device.stream, None)
        self.device.calls.append("record")
        self.time = self.device.time

    def query(self) -> bool:
        self.device.calls.append("query")
        return self.time <= self.device.executed

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query()
        return other.time - self.time


class Library:
    """A stand-in for ``libcuda`` on the same events; `status` is what it returns where all is well."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.status = 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802 - the driver's name
        assert stream.value == 77
        self.device.calls.append("record")
        self.device.events[event.value - 1].time = self.device.time
        return self.status

    def cuEventElapsedTime_v2(self, where: Any, start: Any, end: Any) -> int:  # noqa: N802 - the driver's name
        self.device.calls.append("elapsed")
        earlier, later = (self.device.events[event.value - 1] for event in (start, end))
        if not (earlier.query() and later.query()):
            return cuda_driver.NOT_READY
        where._obj.value = later.time - earlier.time
        return self.status


@pytest.fixture
def device() -> Device:
    return Device()


def through_driver(device: Device, slots: int, marks: int) -> tuple[DriverEventClock, Library]:
    library = Library(device)
    return DriverEventClock(CudaDriver(library), slots, marks, cuda=device), library


def make(kind: str, device: Device, monkeypatch: pytest.MonkeyPatch, slots: int = 3, marks: int = 5) -> Clock:
    torch = types.ModuleType("torch")
    torch.cuda = device  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    if kind == "cuda_event":
        return CudaEventClock(slots, marks, cuda=device)
    if kind == "driver":
        return through_driver(device, slots, marks)[0]
    return HostClock(slots, marks) if kind == "host" else SyncClock(slots, marks)


@pytest.mark.parametrize("kind", ["cuda_event", "driver", "host", "sync"])
class TestEveryClock:
    """Properties of all clocks."""

    def test_its_name_is_the_label_value(self, kind: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        assert make(kind, device, monkeypatch).name == {"driver": "cuda_event"}.get(kind, kind)

    def test_the_pool_is_bounded_and_refills(self, kind: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = make(kind, device, monkeypatch)
        taken = [clock.acquire() for _ in range(4)]
        assert [slot is None for slot in taken] == [False, False, False, True]
        first = taken[0]
        assert first is not None
        clock.mark(first, perf_counter_ns())
        clock.release(first)
        again = clock.acquire()
        assert again is first
        assert again.count == 0
        assert list(again.host) == []

    def test_marks_beyond_the_slot_are_ignored(
        self, kind: str, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = make(kind, device, monkeypatch)
        slot = clock.acquire()
        assert slot is not None
        for _ in range(9):
            clock.mark(slot, perf_counter_ns())
        assert slot.count == clock.marks == 5
        assert len(clock.offsets(slot)) == len(slot.host) == 5

    def test_offsets_begin_at_zero_and_do_not_fall(
        self, kind: str, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = make(kind, device, monkeypatch)
        slot = clock.acquire()
        assert slot is not None
        for i in range(4):
            device.time = float(i)
            clock.mark(slot, perf_counter_ns())
        offsets = list(clock.offsets(slot))
        assert offsets[0] == 0.0
        assert offsets == sorted(offsets)
        assert clock.done(slot)
        assert all(clock.reached(slot, i) for i in range(4))


def test_host_time_is_in_seconds() -> None:
    clock = HostClock()
    earlier, later = clock.acquire(), clock.acquire()
    assert earlier is not None
    assert later is not None
    clock.mark(earlier, 1_000_000_000)
    clock.mark(earlier, 1_002_000_000)
    clock.mark(later, 1_005_000_000)
    clock.mark(later, 1_009_000_000)
    assert clock.offsets(earlier) == pytest.approx([0.0, 0.002])
    assert clock.between(earlier, later) == pytest.approx(0.003)
    assert not clock.tells_host_bound


@pytest.mark.parametrize("kind", ["cuda_event", "driver"])
def test_event_times_are_in_seconds(kind: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = make(kind, device, monkeypatch, 2, 4)
    earlier, later = clock.acquire(), clock.acquire()
    assert earlier is not None
    assert later is not None
    for slot, moments in ((earlier, (10.0, 12.0)), (later, (15.0, 19.0))):
        for device.time in moments:
            clock.mark(slot, perf_counter_ns())
    assert clock.offsets(earlier) == pytest.approx([0.0, 0.002])
    assert clock.between(earlier, later) == pytest.approx(0.003)
    assert clock.tells_host_bound


def test_a_cycle_on_cuda_never_waits_and_makes_no_event(device: Device) -> None:
    """In a running server: one stream look-up per cycle, one record per mark, one query, no synchronisation."""
    clock = CudaEventClock(2, 8, cuda=device)
    assert device.calls == ["Event"] * 16
    device.calls.clear()
    slot = clock.acquire()
    assert slot is not None
    for _ in range(5):
        clock.mark(slot, perf_counter_ns())
    clock.done(slot)
    assert device.calls == ["current_stream", *["record"] * 5, "query"]


def test_a_cycle_through_the_driver_never_waits_and_makes_no_event(device: Device) -> None:
    clock, _ = through_driver(device, 2, 8)
    device.calls.clear()
    slot = clock.acquire()
    assert slot is not None
    for _ in range(5):
        clock.mark(slot, perf_counter_ns())
    assert device.calls == ["current_stream", *["record"] * 5]
    clock.done(slot)
    clock.offsets(slot)
    assert device.calls.count("elapsed") == 5, "one asks whether it is done"
    assert not {"Event", "synchronize"} & set(device.calls)


def test_what_the_driver_refuses_is_an_error_and_no_reading(device: Device) -> None:
    clock, library = through_driver(device, 2, 8)
    slot, other = clock.acquire(), clock.acquire()
    assert slot is not None
    assert other is not None
    for one in (slot, slot, other):
        clock.mark(one, perf_counter_ns())
    library.status = 400
    with pytest.raises(RuntimeError, match="400"):
        clock.mark(slot, perf_counter_ns())
    assert slot.count == 2
    for read in (lambda: clock.done(slot), lambda: clock.offsets(slot), lambda: clock.between(slot, other)):
        with pytest.raises(RuntimeError, match="400"):
            read()


def test_times_of_events_that_have_not_happened_are_an_error(device: Device) -> None:
    clock, _ = through_driver(device, 2, 8)
    slot, other = clock.acquire(), clock.acquire()
    assert slot is not None
    assert other is not None
    for device.time in (1.0, 2.0):
        clock.mark(slot, perf_counter_ns())
    clock.mark(other, perf_counter_ns())
    device.executed = 1.0
    with pytest.raises(RuntimeError, match="600"):
        clock.offsets(slot)
    with pytest.raises(RuntimeError, match="600"):
        clock.between(slot, other)


def test_another_stream_is_noticed(device: Device) -> None:
    clock, _ = through_driver(device, 2, 8)
    first = clock.acquire()
    device.stream = types.SimpleNamespace(cuda_stream=78)
    second = clock.acquire()
    assert first is not None
    assert second is not None
    assert (first.stream.value, second.stream.value) == (77, 78)


@pytest.mark.parametrize("lacking", ["cuEventRecord", "cuEventElapsedTime_v2"])
def test_a_driver_that_lacks_a_function_is_not_used(
    lacking: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("host", device, monkeypatch)
    monkeypatch.setitem(sys.modules, "torch.version", types.ModuleType("torch.version"))
    sys.modules["torch"].version = types.SimpleNamespace(hip=None)  # type: ignore[attr-defined]
    library = Library(device)
    monkeypatch.setattr(ctypes, "PyDLL", lambda _: library)
    assert cuda_driver.load() is not None
    assert type(clocks.event_clock()) is DriverEventClock
    monkeypatch.delattr(Library, lacking)
    assert cuda_driver.load() is None
    assert type(clocks.event_clock()) is CudaEventClock


def test_a_driver_that_cannot_be_called_is_not_used(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make("host", device, monkeypatch)
    sys.modules["torch"].version = types.SimpleNamespace(hip=None)  # type: ignore[attr-defined]
    library = Library(device)
    library.status = 1
    monkeypatch.setattr(ctypes, "PyDLL", lambda _: library)
    assert type(clocks.event_clock()) is CudaEventClock
    assert "driver cannot be called" in caplog.text


def test_rocm_has_no_cuda_driver(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    make("host", device, monkeypatch)
    sys.modules["torch"].version = types.SimpleNamespace(hip="6.2")  # type: ignore[attr-defined]
    assert cuda_driver.load() is None


@pytest.mark.parametrize("kind", ["cuda_event", "driver"])
def test_events_that_have_not_happened_are_not_done(kind: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = make(kind, device, monkeypatch, 2, 8)
    slot = clock.acquire()
    assert slot is not None
    for device.time in (1.0, 2.0, 3.0):
        clock.mark(slot, perf_counter_ns())
    device.executed = 2.0
    assert not clock.done(slot)
    assert [clock.reached(slot, i) for i in range(3)] == [True, True, False]
    device.executed = 3.0
    assert clock.done(slot)


@pytest.mark.parametrize("kind", ["cuda_event", "driver"])
def test_an_error_of_the_stream_look_up_loses_no_slot(
    kind: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = make(kind, device, monkeypatch, 1, 4)
    device.broken = True
    for _ in range(3):
        with pytest.raises(RuntimeError):
            clock.acquire()
    device.broken = False
    assert clock.acquire() is not None


def test_the_synchronising_clock_waits_at_every_mark_and_no_other_does(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, expected in (("sync", 3), ("host", 0), ("cuda_event", 0)):
        clock = make(kind, device, monkeypatch)
        device.calls.clear()
        slot = clock.acquire()
        assert slot is not None
        for _ in range(3):
            clock.mark(slot, perf_counter_ns())
        assert device.calls.count("synchronize") == expected


def test_the_synchronising_clock_works_without_a_gpu(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_available", lambda: False)
    clock: Any = make("sync", device, monkeypatch)
    slot = clock.acquire()
    clock.mark(slot, perf_counter_ns())
    assert "synchronize" not in device.calls


def test_the_synchronising_clock_notes_the_moment_after_its_wait(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "perf_counter_ns", lambda: 2_000)
    for kind, expected in (("sync", 2_000), ("host", 1_000), ("cuda_event", 1_000)):
        clock = make(kind, device, monkeypatch)
        slot = clock.acquire()
        assert slot is not None
        clock.mark(slot, 1_000)
        assert slot.host == [expected]
