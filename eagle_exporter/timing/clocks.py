"""Clocks: what the time of a boundary is.

A clock keeps a fixed pool of slots, one per cycle in flight. A slot takes one mark per boundary and is read once all
its marks have happened on the device. No clock but `SyncClock` ever waits for the device.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

from eagle_exporter.timing import cuda_driver
from eagle_exporter.timing.cuda_driver import CudaDriver, handle_of

logger = logging.getLogger("eagle_exporter")

NANOSECOND = 1e-9
MILLISECOND = 1e-3


class Slot:
    """The marks of one cycle.

    Attributes:
        count: Marks made so far.
        events: The clock's own objects, one per possible mark.
        stream: The device stream of the cycle, None on the host.
        host: Host time of each mark, ``perf_counter_ns``.
    """

    __slots__ = ("count", "events", "host", "stream")

    def __init__(self, events: list[Any]) -> None:
        self.count = 0
        self.events = events
        self.stream: Any = None
        self.host: list[int] = []


class Clock(Protocol):
    """What the cycle timer needs of a clock."""

    name: str
    """Value of the ``clock`` label of ``eagle_timing_info``."""

    marks: int
    """Marks that a slot holds."""

    tells_host_bound: bool
    """True when `done` distinguishes a device that is behind the host from one that waits for it."""

    def acquire(self) -> Slot | None:
        """Return an empty slot for a cycle that begins on the current stream, None when all are in flight."""
        ...

    def mark(self, slot: Slot, now: int) -> None:
        """Note the present moment as the next boundary of `slot`; ignored when the slot is full.

        Args:
            slot: Of a cycle that is being launched.
            now: ``perf_counter_ns``, which whoever marks has just read: it is the host time of the boundary.
        """
        ...

    def done(self, slot: Slot) -> bool:
        """Return whether the last mark of `slot` has happened on the device. Never waits."""
        ...

    def reached(self, slot: Slot, mark: int) -> bool:
        """Return whether mark number `mark` of `slot` has happened on the device. Never waits."""
        ...

    def offsets(self, slot: Slot) -> Sequence[float]:
        """Return seconds from the first mark to each mark; only when `done`."""
        ...

    def between(self, earlier: Slot, later: Slot) -> float:
        """Return seconds from the last mark of `earlier` to the first of `later`; only when both are `done`."""
        ...

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        ...


class _PooledClock:
    """Slots are made once and used again."""

    def __init__(self, slots: int, marks: int, events: list[list[Any]]) -> None:
        self.marks = marks
        self._free = [Slot(events[i]) for i in range(slots)]

    def _take(self) -> Slot | None:
        if not self._free:
            return None
        slot = self._free.pop()
        slot.count = 0
        slot.host.clear()
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        self._free.append(slot)


class HostClock(_PooledClock):
    """Wall time of the scheduler thread: right where the work runs on the CPU, and only there.

    On a GPU, launches are asynchronous and the time lands on whichever phase happens to wait.
    """

    name = "host"
    tells_host_bound = False

    def __init__(self, slots: int = 80, marks: int = 64) -> None:
        """Make a pool of `slots` cycles of up to `marks` boundaries each."""
        super().__init__(slots, marks, [[] for _ in range(slots)])

    def acquire(self) -> Slot | None:
        """Return an empty slot, None when all are in flight."""
        return self._take()

    def mark(self, slot: Slot, now: int) -> None:
        """Note the present moment."""
        if slot.count < self.marks:
            slot.host.append(now)
            slot.count += 1

    def done(self, slot: Slot) -> bool:  # noqa: ARG002
        """Return True: on the host a mark has happened when it is made."""
        return True

    def reached(self, slot: Slot, mark: int) -> bool:  # noqa: ARG002
        """Return True, as `done` does."""
        return True

    def offsets(self, slot: Slot) -> Sequence[float]:
        """Return seconds from the first mark to each mark."""
        first = slot.host[0]
        return [(moment - first) * NANOSECOND for moment in slot.host]

    def between(self, earlier: Slot, later: Slot) -> float:
        """Return seconds from the last mark of `earlier` to the first of `later`."""
        return (later.host[0] - earlier.host[-1]) * NANOSECOND


class SyncClock(HostClock):
    """Wall time with a device synchronisation at each boundary: for diagnosis only.

    It empties the device queue at every boundary, which costs 30 to 45 % of throughput and lengthens short phases by
    their launch time.
    """

    name = "sync"

    def __init__(self, slots: int = 80, marks: int = 64) -> None:
        """Make a pool of `slots` cycles of up to `marks` boundaries each."""
        super().__init__(slots, marks)
        import torch

        self._synchronize = torch.cuda.synchronize if torch.cuda.is_available() else None

    def mark(self, slot: Slot, now: int) -> None:
        """Wait until the device is idle, then note the present moment."""
        if self._synchronize is not None:
            self._synchronize()
            now = perf_counter_ns()
        super().mark(slot, now)


class CudaEventClock(_PooledClock):
    """Timing events on the stream that is current when the cycle begins, read once they are complete.

    Events are made once, recorded with an explicit stream (looking it up costs twice the record itself), and never
    waited for; after the clock is made nothing is allocated.
    """

    name = "cuda_event"
    tells_host_bound = True

    def __init__(self, slots: int = 80, marks: int = 40, *, cuda: Any = None) -> None:
        """Make a pool of `slots` cycles of up to `marks` boundaries each.

        Args:
            slots: Results are recorded 64 at a time, the overlap scheduler keeps two cycles in flight, and the one
                before is kept for the gap.
            marks: Boundaries of one cycle.
            cuda: A stand-in for ``torch.cuda`` in tests.
        """
        if cuda is None:
            import torch

            cuda = torch.cuda
        super().__init__(
            slots, marks, [[_CudaEvent(cuda.Event(enable_timing=True)) for _ in range(marks)] for _ in range(slots)]
        )
        self._current_stream = _current_stream_lookup(cuda)

    def acquire(self) -> Slot | None:
        """Return an empty slot bound to the current stream, None when all are in flight."""
        if not self._free:
            return None
        stream = self._current_stream()  # before a slot is taken, which an error here would lose
        slot = self._take()
        if slot is not None:
            slot.stream = stream
        return slot

    def mark(self, slot: Slot, now: int) -> None:
        """Record the next event of the slot on its stream."""
        count = slot.count
        if count < self.marks:
            slot.host.append(now)
            slot.events[count].record(slot.stream)
            slot.count = count + 1

    def done(self, slot: Slot) -> bool:
        """Return whether the last event is complete."""
        return bool(slot.events[slot.count - 1].query())

    def reached(self, slot: Slot, mark: int) -> bool:
        """Return whether event number `mark` is complete."""
        return bool(slot.events[mark].query())

    def offsets(self, slot: Slot) -> Sequence[float]:
        """Return seconds from the first event to each event, as CUDA gives them (float32 milliseconds)."""
        events = slot.events
        elapsed = events[0].elapsed_time
        return [0.0, *[elapsed(events[i].event) * MILLISECOND for i in range(1, slot.count)]]

    def between(self, earlier: Slot, later: Slot) -> float:
        """Return seconds from the last event of `earlier` to the first of `later`."""
        return float(earlier.events[earlier.count - 1].elapsed_time(later.events[0].event)) * MILLISECOND


class DriverEventClock(CudaEventClock):
    """The same events, recorded and read by the CUDA driver itself: four times as fast while the GPU is busy."""

    def __init__(self, driver: CudaDriver, slots: int = 80, marks: int = 40, *, cuda: Any = None) -> None:
        """Make a pool of `slots` cycles of up to `marks` boundaries each.

        Args:
            driver: Functions of the driver.
            slots: See `CudaEventClock`.
            marks: Boundaries of one cycle.
            cuda: A stand-in for ``torch.cuda`` in tests.
        """
        if cuda is None:
            import torch

            cuda = torch.cuda
        super().__init__(slots, marks, cuda=cuda)
        self._driver = driver
        self._record = driver.record
        self._owners: list[Any] = []
        for slot in self._free:
            owners = [event.event for event in slot.events]
            for owner in owners:
                owner.record()  # torch makes the event at its first record
            self._owners += owners
            slot.events = [handle_of(owner) for owner in owners]
        self._stream_handle = _stream_handle_lookup(cuda)
        self._handle = -1
        self._stream = ctypes.c_void_p()

    def acquire(self) -> Slot | None:
        """Return an empty slot bound to the current stream, None when all are in flight."""
        if not self._free:
            return None
        handle = self._stream_handle()
        if handle != self._handle:
            self._stream = ctypes.c_void_p(handle)
            self._handle = handle
        slot = self._free.pop()
        slot.count = 0
        slot.host.clear()
        slot.stream = self._stream
        return slot

    def mark(self, slot: Slot, now: int) -> None:
        """Record the next event of the slot on its stream.

        Raises:
            RuntimeError: The driver refuses.
        """
        count = slot.count
        if count < self.marks:
            slot.host.append(now)
            status = self._record(slot.events[count], slot.stream)
            if status:
                raise RuntimeError(f"cuEventRecord: CUDA error {status}")
            slot.count = count + 1

    def done(self, slot: Slot) -> bool:
        """Return whether the last event is complete."""
        return self._driver.complete(slot.events[0], slot.events[slot.count - 1])

    def reached(self, slot: Slot, mark: int) -> bool:
        """Return whether event number `mark` is complete."""
        return self._driver.complete(slot.events[0], slot.events[mark])

    def offsets(self, slot: Slot) -> Sequence[float]:
        """Return seconds from the first event to each event, as CUDA gives them (float32 milliseconds).

        Raises:
            RuntimeError: An event is not complete, or the driver refuses.
        """
        driver, events = self._driver, slot.events
        elapsed, where, reading, first = driver.elapsed, driver.where, driver.milliseconds, events[0]
        offsets = [0.0]
        for i in range(1, slot.count):
            status = elapsed(where, first, events[i])
            if status:
                raise RuntimeError(f"cuEventElapsedTime_v2: CUDA error {status}")
            offsets.append(reading.value * MILLISECOND)
        return offsets

    def between(self, earlier: Slot, later: Slot) -> float:
        """Return seconds from the last event of `earlier` to the first of `later`."""
        return self._driver.between(earlier.events[earlier.count - 1], later.events[0]) * MILLISECOND


def event_clock() -> CudaEventClock:
    """Return the event clock of this machine: through the driver, or through torch where that cannot be."""
    driver = cuda_driver.load()
    if driver is not None:
        try:
            clock = DriverEventClock(driver)
            slot = clock.acquire()
            if slot is not None:  # what does not work here would not work later either
                clock.mark(slot, perf_counter_ns())
                clock.done(slot)
                clock.release(slot)
                return clock
        except Exception:
            logger.warning("eagle-exporter: the CUDA driver cannot be called; events go through torch", exc_info=True)
    return CudaEventClock()


class _CudaEvent:
    """A timing event with its C methods at hand.

    The methods of ``torch.cuda.Event`` are Python that calls ``super()``; bound once, the C methods beneath save half a
    microsecond at each of some twenty calls a cycle.
    """

    __slots__ = ("elapsed_time", "event", "query", "record")

    def __init__(self, event: Any) -> None:
        self.event = event
        native: Any = super(type(event), event) if len(type(event).__mro__) > 2 else event
        self.record: Callable[[Any], None] = native.record
        self.query: Callable[[], bool] = native.query
        self.elapsed_time: Callable[[Any], float] = native.elapsed_time


def _raw_stream_lookup(cuda: Any) -> Callable[[], int] | None:
    """Return a function that gives the current stream's handle, None where torch has none.

    It costs a tenth of a microsecond; ``torch.cuda.current_stream()`` makes a new object each time, 5 to 8 µs.
    """
    try:
        import torch

        if cuda is torch.cuda:
            return functools.partial(torch._C._cuda_getCurrentRawStream, torch.cuda.current_device())
    except (ImportError, AttributeError):
        pass
    return None


def _stream_handle_lookup(cuda: Any) -> Callable[[], int]:
    """Return a function that gives the current stream's handle."""
    raw_stream = _raw_stream_lookup(cuda)
    return raw_stream if raw_stream is not None else lambda: int(cuda.current_stream().cuda_stream)


def _current_stream_lookup(cuda: Any) -> Callable[[], Any]:
    """Return a function that gives the current stream.

    torch takes its streams from fixed pools, so a handle seen before is the same stream.
    """
    raw_stream = _raw_stream_lookup(cuda)
    if raw_stream is None:
        return cuda.current_stream  # type: ignore[no-any-return]
    streams: dict[int, Any] = {}

    def current_stream() -> Any:
        handle = raw_stream()
        stream = streams.get(handle)
        if stream is None:
            stream = streams[handle] = cuda.current_stream()
        return stream

    return current_stream
