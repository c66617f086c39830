"""Kernel captures: a few cycles under torch's profiler, on demand.

Nothing of this exists in a cycle without a capture. When one is asked for, its methods stand in for those of the
session until it is over: the profiler starts and stops between cycles, and the hooks mark their boundaries with the
wall clock, which is the profiler's. The scheduler only writes the raw trace; a process of its own reads it and leaves a
result, of which the scheduler adds some sums to its registry file. So that file keeps its one writer, and nobody waits
for the reading.

A capture stalls the whole tensor-parallel group of its rank. Every rank of the server reads the request from the same
control file, and leaves the cycles from then until two after the capture's stop out of its times.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_exporter import control, settings
from eagle_exporter.hooks.session import POLL_NS
from eagle_exporter.kernels import files
from eagle_exporter.kernels.files import Request
from eagle_exporter.timing import cycle as kinds
from eagle_exporter.timing.clocks import Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eagle_exporter.hooks.session import Session
    from eagle_exporter.timing.clocks import Clock
    from eagle_exporter.timing.cycle import CycleRecord

logger = logging.getLogger("eagle_exporter")

LEAD = 2
LEAD_SECONDS = 2 * POLL_NS * 1e-9
"""Batches, and seconds, between the request and the profiler's start: by then every rank of the group has read it."""
SETTLE = 2
"""Batches after the stop that are not timed either."""
RUN_SECONDS = 30.0
"""The profiler never runs longer."""
IDLE_SECONDS = 1.0
"""Nor longer than this without a batch."""
BATCHES_PER_CYCLE, BATCHES_MORE = 4, 20
"""Nor for more batches than so many per wanted cycle and so many more: prefills fill the trace too."""
ROOM = 0.8
"""Of the events that are possible, when it is said how many cycles would fit: prefills between them differ."""
ANALYSIS_SECONDS = 330.0
SCHEDULED_CYCLES, SCHEDULED_SECONDS = 10, 60.0
MARKS = 256

_ENDS = {"failed": "failed", "busy": "gave way", "refused": "was refused", "withdrawn": "was withdrawn"}

SHADOWED = ("begin_cycle", "end_cycle", "_abandon", "note_kv_allocation", "note_replay")
"""Methods of the session that a capture stands in for."""


class Captures:
    """What a rank does about captures. Its methods raise nothing.

    Attributes:
        current: The capture that runs, here or on another rank of the server; None most of the time.
    """

    def __init__(
        self,
        session: Session,
        server: Path,
        rank: str,
        labels: Mapping[str, str],
        *,
        every: float | None = None,
        classes: Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve the captures of one rank.

        Args:
            session: The running hooks.
            server: The server's directory in the registry.
            rank: Name of the rank's file without its suffix.
            labels: Values of `catalogue.COMMON_LABELS`.
            every: Seconds between captures that this rank asks for itself, None for none.
            classes: File with further patterns of kernel names.
            now: Monotonic seconds.
        """
        self.session = session
        self.server = server
        self.rank = rank
        self.labels = dict(labels)
        self.now = now
        self.current: Profile | Watch | None = None
        self._every = every
        self._classes = classes
        self._due = now() + every if every is not None else None
        self._readings: list[_Reading] = []
        self._logged: set[str] = set()

    # --- commands ----------------------------------------------------------------------------------------
    def obey(self, commands: Sequence[str]) -> None:
        """Look for requests among new commands."""
        for command in commands:
            try:
                word = command.split()[0]
                if word == "profile":
                    self._ask(command)
                elif word == "withdraw" and self.current is not None:
                    self.current.withdraw(command)
            except Exception:
                self.failed("the request could not be served")

    def _ask(self, command: str) -> None:
        try:
            request = Request.decode(command)
        except ValueError as error:
            if f"rank={self.rank}" in command.split():
                self._count("refused")
                self.log(f"a request for a kernel capture is refused: {error}")
            return
        if request.rank != self.rank:
            if self.current is None or self.current.settling:
                Watch(self, request).begin()
            return
        self._recorder.show_captures()
        state = self.session.budget.state
        if state != "on":
            self.answer(request, "refused", f"the hooks of this server are not measuring ({state})")
        elif self.current is not None and not self.current.settling:
            self.answer(request, "busy", "another capture of this server is not finished")
        else:
            Profile(self, request).begin()

    # --- now and then ------------------------------------------------------------------------------------
    def poll(self, *, traffic: bool) -> None:
        """Take a result that is there, and ask for a scheduled capture that is due."""
        for reading in self._readings[:]:
            try:
                self._look_at(reading)
            except Exception:
                self._readings = [one for one in self._readings if one is not reading]
                self.failed("the result of a capture could not be taken")
        if self._due is not None and traffic and self.now() >= self._due:
            assert self._every is not None
            self._due = self.now() + self._every
            try:
                self._schedule()
            except Exception:
                self.failed("a scheduled capture could not be asked for")

    def _schedule(self) -> None:
        if self.current is not None or self.session.budget.state != "on":
            return
        request = Request(files.new_id(), self.rank, SCHEDULED_CYCLES, SCHEDULED_SECONDS)
        # By the control file, like anybody's request, so that the other ranks see it too.
        control.change(self.server, lambda _: [request.encode()], wait=False, drop=("profile", "withdraw"))

    def read(self, request: Request) -> None:
        """Start the process that reads the raw files of a capture."""
        environment = settings.child_environment()
        environment.pop(files.CLASS_FILE, None)  # what was made of it counts
        if self._classes is not None:
            environment[files.CLASS_FILE] = str(self._classes)
        command = [sys.executable, "-m", "eagle_exporter.kernels", str(self.server), request.rank, request.id]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        self._readings.append(_Reading(request, process, self.now() + ANALYSIS_SECONDS))

    def _look_at(self, reading: _Reading) -> None:
        code = reading.process.poll()
        if code is None:
            if self.now() > reading.until:
                reading.process.kill()
            return
        self._readings.remove(reading)
        request = reading.request
        try:
            result = files.read_json(files.result_path(self.server, request.rank, request.id))
        except (OSError, ValueError):
            shutil.rmtree(files.raw_path(self.server, request.rank, request.id), ignore_errors=True)
            self.answer(request, "failed", f"the process that reads the trace ended with code {code}")
            return
        if result.get("outcome") != "completed":
            self._count("failed")
            self.log(f"a kernel capture failed: {result.get('reason')}")
            return
        self._recorder.add_kernels(int(result["cycles"]), result["phases"], float(result["ended"]))
        self._count("completed")

    # --- how a capture ended -----------------------------------------------------------------------------
    def answer(self, request: Request, outcome: str, reason: str) -> None:
        """Count a capture that has no result, and say why in its result file."""
        self._count(outcome)
        self.log(f"a kernel capture {_ENDS[outcome]}: {reason}")
        value = {
            "format": 1,
            "id": request.id,
            "rank": request.rank,
            "labels": self.labels,
            "cycles_asked": request.cycles,
            "ended": time.time(),
            "outcome": outcome,
            "reason": reason,
        }
        try:
            files.make_directory(self.server)
            files.write_json(files.result_path(self.server, request.rank, request.id), value)
            files.tidy(self.server, self.rank)
        except OSError as error:
            self.log(f"the answer to a request for a kernel capture cannot be written: {error}")

    def failed(self, what: str) -> None:
        """Count a capture that ended in an exception of ours, and log it. Raises nothing."""
        self.trouble(what)
        with contextlib.suppress(Exception):
            self._count("failed")

    def trouble(self, what: str) -> None:
        """Log an exception of ours, once. Raises nothing."""
        with contextlib.suppress(Exception):
            if what not in self._logged:
                self._logged.add(what)
                logger.warning("eagle-exporter: %s; SGLang is not affected", what, exc_info=True)

    def log(self, what: str) -> None:
        """Log a sentence, once."""
        if what not in self._logged:
            self._logged.add(what)
            logger.warning("eagle-exporter: %s", what)

    def _count(self, outcome: str) -> None:
        recorder = self._recorder
        recorder.show_captures()
        recorder.add_capture(outcome)
        recorder.commit()

    @property
    def _recorder(self) -> Any:
        recorder = self.session.recorder
        assert recorder is not None
        return recorder


class _Reading:
    """A process that reads raw files."""

    def __init__(self, request: Request, process: subprocess.Popen[bytes], until: float) -> None:
        self.request = request
        self.process = process
        self.until = until


class _Disturbance:
    """A capture as a rank sees it: from its request until its batches are undisturbed again, nothing is timed."""

    def __init__(self, captures: Captures, request: Request) -> None:
        self.captures = captures
        self.session = captures.session
        self.request = request
        self.until = captures.now() + request.seconds
        self._settle: int | None = None
        self._originals: dict[str, Any] = {}
        self._own: dict[str, Any] = {}

    @property
    def settling(self) -> bool:
        """Whether the capture has stopped, and only its disturbance is waited for."""
        return self._settle is not None

    def begin(self) -> None:
        """From now on stand in for methods of the session."""
        if self.captures.current is not None:
            self.captures.current.over()
        timer = self.session.timer
        assert timer is not None
        self.captures.current = self  # type: ignore[assignment]
        timer.profiled = True
        held = self.session.__dict__
        self._own = {name: held[name] for name in SHADOWED if name in held}
        self._originals = {name: getattr(self.session, name) for name in SHADOWED}
        for name in SHADOWED:
            setattr(self.session, name, getattr(self, name))

    def over(self) -> None:
        """The next batch is undisturbed."""
        for name in SHADOWED:
            self.session.__dict__.pop(name, None)
        self.session.__dict__.update(self._own)
        self.captures.current = None
        timer = self.session.timer
        assert timer is not None
        timer.profiled = False
        # The gap to the cycle before is no reading.
        timer.interrupt()

    # --- in place of the session's methods ---------------------------------------------------------------
    def begin_cycle(self, *args: Any) -> CycleRecord | None:
        """A batch begins: the session's method, preceded by ours."""
        self.turn()
        record: CycleRecord | None = self._originals["begin_cycle"](*args)
        return record

    def end_cycle(self, record: CycleRecord, *args: Any) -> None:
        """A batch is launched."""
        self._originals["end_cycle"](record, *args)

    def _abandon(self, record: CycleRecord) -> None:
        self._originals["_abandon"](record)

    def note_kv_allocation(self, nanoseconds: int) -> None:
        """Host time of an allocation, which the profiler has prolonged."""

    def note_replay(self, runner: Any) -> None:
        """A draft graph was replayed for a cycle that is not timed."""

    # --- steps -------------------------------------------------------------------------------------------
    def turn(self) -> None:
        """Between two batches. Raises nothing."""
        try:
            if self._settle is None:
                self.step()
            elif self._settle > 0:
                self._settle -= 1
            else:
                self.over()
        except Exception:
            self.give_up()

    def step(self) -> None:
        """Do what is to be done before the next batch."""
        raise NotImplementedError

    def give_up(self) -> None:
        """After an exception of ours. Raises nothing."""
        self.captures.trouble("the end of a kernel capture on another rank could not be seen")
        self.over()

    def settle(self) -> None:
        """The capture has stopped; the batch that begins now and the next one are still disturbed."""
        self._settle = SETTLE - 1


class Watch(_Disturbance):
    """Another rank of the server is captured."""

    def __init__(self, captures: Captures, request: Request) -> None:
        """Wait for the end of `request`."""
        super().__init__(captures, request)
        # The profiler may still run when the time to wait for cycles is over.
        self.until += RUN_SECONDS

    def step(self) -> None:
        """Look whether the capture has stopped, or never came to be."""
        server, request = self.captures.server, self.request
        if (
            files.has_stopped(server, request.id)
            or files.result_path(server, request.rank, request.id).exists()
            or self.captures.now() > self.until
        ):
            self.settle()

    def idle(self) -> None:
        """No batch runs; there is nothing to do."""

    def withdraw(self, command: str) -> None:
        """The request may have been taken back; if it is running, the rank that is captured says when it stops."""


class Profile(_Disturbance):
    """This rank is captured."""

    def __init__(self, captures: Captures, request: Request) -> None:
        """Capture what `request` asks for."""
        super().__init__(captures, request)
        self.profiler: Any = None
        self.cuda = False
        self._lead = LEAD
        self._ready = captures.now() + LEAD_SECONDS
        self._clock: MarkClock | None = None
        self._open: CycleRecord | None = None
        self._cycles: list[dict[str, list[int]]] = []
        self._rows: list[int] = []
        self._batches = 0
        self._started = 0.0
        self._stop_by = 0.0
        self._last_batch = 0.0
        self._requested = time.time()
        self._stalls: dict[str, float] = {}
        self._yield: _Yield | None = None

    # --- in place of the session's methods ---------------------------------------------------------------
    def begin_cycle(self, *args: Any) -> CycleRecord | None:
        """A batch begins; a decode cycle under the profiler gets a clock of its own."""
        record = super().begin_cycle(*args)
        if record is not None and self.profiler is not None and not record.prefill:
            try:
                self._open_cycle(record)
            except Exception:
                self._close_cycle(record, valid=False)
                self.captures.trouble("a captured cycle could not be opened")
        return record

    def end_cycle(self, record: CycleRecord, *args: Any) -> None:
        """A batch is launched."""
        try:
            super().end_cycle(record, *args)
        finally:
            self._close_cycle(record, valid=True)

    def _abandon(self, record: CycleRecord) -> None:
        self._close_cycle(record, valid=False)
        super()._abandon(record)

    def _open_cycle(self, record: CycleRecord) -> None:
        timer = self.session.timer
        assert timer is not None
        self._clock = MarkClock(timer.clock)
        self._open = record
        slot = MarkSlot()
        record.slot = slot
        record.kinds = [kinds.OTHER]
        timer.clock = self._clock
        timer.current = record
        self._clock.mark(slot, time.perf_counter_ns())

    def _close_cycle(self, record: CycleRecord, *, valid: bool) -> None:
        """Give the timer its clock back, and keep the boundaries of the cycle. Raises nothing."""
        if self._open is not record:
            return
        self._open = None
        timer, clock = self.session.timer, self._clock
        assert timer is not None
        assert clock is not None
        timer.clock = clock.inner
        slot, record.slot = record.slot, None
        if not isinstance(slot, MarkSlot) or not valid or not record.valid or slot.count != len(record.kinds) + 1:
            return
        self._cycles.append({"marks": slot.host, "phases": [kinds.phase_of(kind) for kind in record.kinds]})
        self._rows.append(record.rows)

    # --- steps -------------------------------------------------------------------------------------------
    def step(self) -> None:
        """Start, go on, or stop."""
        now = self.captures.now()
        state = self.session.budget.state
        self._last_batch = now
        if state != "on":
            self._cancel("withdrawn", f"the hooks of this server stopped measuring ({state})")
        elif self.profiler is not None:
            self._batches += 1
            most = BATCHES_PER_CYCLE * self.request.cycles + BATCHES_MORE
            if len(self._cycles) >= self.request.cycles or now > self._stop_by or self._batches > most:
                self._stop()
        elif now > self.until:
            self._cancel("withdrawn", self._no_traffic())
        elif profiler_is_running():
            # Looked at in every batch before the start: see `start_profiler` for why none may have ended just now.
            self._cancel("busy", "SGLang's own profiler, or another user of torch's, is running")
        elif self._lead > 0 or now < self._ready:
            self._lead -= 1
        else:
            self._start()

    def idle(self) -> None:
        """No batch runs. Raises nothing."""
        try:
            now = self.captures.now()
            if self._settle is not None:
                return
            if self.profiler is None:
                if now > self.until:
                    self._cancel("withdrawn", self._no_traffic())
            elif now > self._stop_by or now - self._last_batch > IDLE_SECONDS:
                self._stop()
        except Exception:
            self.give_up()

    def withdraw(self, command: str) -> None:
        """The request is taken back, if the command names it."""
        if f"id={self.request.id}" in command.split() and self._settle is None:
            self._cancel("withdrawn", "the request was taken back")

    def give_up(self) -> None:
        """After an exception of ours: no profiler is left running, and the next capture is possible. Raises nothing."""
        error = sys.exc_info()[1]
        self.captures.trouble("a kernel capture failed")
        try:
            self._end_profiler()
            self._discard()
            self.captures.answer(self.request, "failed", f"{type(error).__name__}: {error}")
            self._tell_stopped()
            self.settle()
        except Exception:
            self.captures.trouble("a kernel capture that failed could not be ended in order")
            self.over()

    def interrupted(self) -> None:
        """Somebody else wants torch's profiler: it is theirs. Raises nothing."""
        try:
            self._cancel("busy", "another user of torch's profiler started it")
        except Exception:
            self.give_up()

    def _no_traffic(self) -> str:
        return f"no decode cycle ran within {self.request.seconds:g} s"

    def _cancel(self, outcome: str, reason: str) -> None:
        self._end_profiler()
        self._discard()
        self.captures.answer(self.request, outcome, reason)
        self._tell_stopped()
        self.settle()

    def _start(self) -> None:
        server, request = self.captures.server, self.request
        files.make_directory(server)
        files.tidy(server, request.rank)
        begin = time.perf_counter()
        try:
            profiler, self.cuda = make_profiler()
        except Exception as error:
            self._not_started(error)
            return
        bounds = self._bounds
        if request.cycles > bounds.cycles:
            # Without a GPU: requests for more than any device allows are not decoded.
            self._cancel(
                "refused",
                f"{request.cycles} cycles were asked for, and without a GPU, where operators take the place of "
                f"kernels, a capture has at most {bounds.cycles}",
            )
            return
        needed = 2 * request.cycles * bounds.raw_bytes_per_cycle
        space = os.statvfs(server)
        if space.f_bavail * space.f_frsize < needed:
            self._cancel(
                "failed", f"{server} has less than the {needed // 1_000_000} MB that {request.cycles} cycles need"
            )
            return
        files.raw_path(server, request.rank, request.id).mkdir(mode=0o700)
        self.profiler = profiler
        try:
            start_profiler(profiler, cuda=self.cuda)
            self._yield = _Yield(self)
        except Exception as error:
            self._not_started(error)
            return
        self._stalls["start"] = time.perf_counter() - begin
        self._started = time.time()
        self._stop_by = self.captures.now() + RUN_SECONDS

    @property
    def _bounds(self) -> files.Bounds:
        return files.ON_GPU if self.cuda else files.ON_CPU

    def _not_started(self, error: Exception) -> None:
        logger.debug("eagle-exporter: the profiler did not start", exc_info=True)
        self._cancel("failed", f"the profiler did not start: {type(error).__name__}: {error}")

    def _stop(self) -> None:
        server, request = self.captures.server, self.request
        raw = files.raw_path(server, request.rank, request.id)
        self._put_yield_back()
        begin = time.perf_counter()
        profiler = self.profiler
        try:
            profiler.stop()
            self._stalls["stop"] = time.perf_counter() - begin
            begin = time.perf_counter()
            events = count_events(profiler)
            if self._cycles and events <= self._bounds.events:
                profiler.export_chrome_trace(str(raw / files.RAW_TRACE))
            self._stalls["export"] = time.perf_counter() - begin
        except Exception as error:
            logger.debug("eagle-exporter: the profiler did not stop", exc_info=True)
            self._cancel("failed", f"the profiler failed: {type(error).__name__}: {error}")
            return
        # What it holds is freed now, while nothing is timed.
        self.profiler = profiler = None
        if not self._cycles:
            self._cancel("failed", "no decode cycle ended while the profiler ran")
            return
        most = self._bounds.events
        if events > most:
            possible = int(ROOM * most * len(self._cycles) / events)
            advice = f"ask for at most {possible} cycles" if possible else "one cycle alone is too much"
            self._cancel(
                "failed", f"the profiler saw {events} events in {len(self._cycles)} cycles, more than {most}: {advice}"
            )
            return
        facts = {
            "id": request.id,
            "rank": request.rank,
            "labels": self.captures.labels,
            "device": "cuda" if self.cuda else "cpu",
            "thread": threading.get_native_id(),
            "cycles_asked": request.cycles,
            "requested": self._requested,
            "started": self._started,
            "ended": time.time(),
            "stall_seconds": self._stalls,
            "rows": {"min": min(self._rows), "max": max(self._rows)},
            "cycles": self._cycles,
        }
        (raw / files.RAW_CYCLES).write_bytes(json.dumps(facts, separators=(",", ":")).encode())
        self._tell_stopped()
        self.captures.read(request)
        self.settle()

    # --- ends --------------------------------------------------------------------------------------------
    def _tell_stopped(self) -> None:
        try:
            files.make_directory(self.captures.server)
            files.note_stopped(self.captures.server, self.request.id)
        except OSError as error:  # the other ranks stop waiting after a while
            self.captures.log(f"the end of a kernel capture cannot be told to the other ranks: {error}")

    def _put_yield_back(self) -> None:
        if self._yield is not None:
            self._yield.undo()
            self._yield = None

    def _end_profiler(self) -> None:
        """Leave no profiler of ours running. Raises nothing."""
        if self._open is not None:
            self._close_cycle(self._open, valid=False)
        self._put_yield_back()
        profiler, self.profiler = self.profiler, None
        if profiler is not None and profiler_is_running():
            try:
                profiler.stop()
            except Exception:
                logger.debug("eagle-exporter: the profiler did not stop", exc_info=True)
                disable_profiler()

    def _discard(self) -> None:
        shutil.rmtree(files.raw_path(self.captures.server, self.request.rank, self.request.id), ignore_errors=True)


# --- torch ---------------------------------------------------------------------------------------------------
def profiler_is_running() -> bool:
    """Return whether torch's profiler runs in this process, whoever started it."""
    import torch

    return bool(torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled())


def make_profiler() -> tuple[Any, bool]:
    """Return a profiler that is not started, and whether it sees kernels: without a GPU it sees operators."""
    import torch

    cuda = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity
    if cuda:
        _let_go_of_cupti(str(getattr(torch.version, "cuda", None) or ""))
    return torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]), cuda


def start_profiler(profiler: Any, *, cuda: bool) -> None:
    """Start a profiler that `make_profiler` has made.

    Without a GPU it sees operators only, not the ranges that SGLang names: one that is open while this profiler stops
    and another starts would be written to in freed memory (torch/csrc/autograd/profiler_kineto.cpp, onFunctionExit),
    and operators are never open where hooks run.
    """
    import torch

    if cuda:
        profiler.start()
        return
    module: Any = torch.autograd.profiler
    enable = module._enable_profiler
    operators = {torch._C._profiler.RecordScope.FUNCTION}
    module._enable_profiler = lambda config, activities: enable(config, activities, operators)
    try:
        profiler.start()
    finally:
        module._enable_profiler = enable


def count_events(profiler: Any) -> int:
    """Return how many events a stopped profiler holds, 0 where it does not tell."""
    results = getattr(getattr(profiler, "profiler", None), "kineto_results", None)
    events = getattr(results, "events", None)
    return len(events()) if events is not None else 0


def _let_go_of_cupti(cuda: str) -> None:
    """Have Kineto detach CUPTI after each capture, unless the user has decided; it reads the variable each time.

    CUPTI that stays attached costs a host-bound server 12 to 18 % for the rest of its life. With CUDA before 12.6 torch
    knows of crashes in CUDA graphs after a detach (``torch/profiler/profiler.py``, `_KinetoProfile.start_trace`).
    """
    try:
        version = tuple(int(part) for part in cuda.split(".")[:2])
    except ValueError:
        return
    if version >= (12, 6):
        os.environ.setdefault("TEARDOWN_CUPTI", "1")


def disable_profiler() -> None:
    """Disable a profiler that could not be stopped, so that the next one can start. Raises nothing."""
    try:
        import torch

        if torch._C._autograd._profiler_enabled():
            torch._C._autograd._disable_profiler()
        torch.autograd.profiler._set_is_profiler_enabled(False)
    except Exception:
        logger.debug("eagle-exporter: the profiler stays enabled", exc_info=True)


class _Yield:
    """While a capture runs: whoever starts torch's profiler in this process gets it, and the capture ends.

    Torch itself would let both run, and give each the other's events.
    """

    def __init__(self, capture: Profile) -> None:
        import torch

        self._owner: Any = torch.profiler.profile
        self._original = self._owner.start
        original = self._original

        def start(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            if profiler is not capture.profiler:
                capture.interrupted()
            return original(profiler, *args, **kwargs)

        self._start = start
        self._owner.start = start

    def undo(self) -> None:
        # Somebody may have wrapped it since; then ours stays inside theirs, and does nothing without a capture.
        if self._owner.__dict__.get("start") is self._start:
            self._owner.start = self._original


# --- boundaries ----------------------------------------------------------------------------------------------
class MarkSlot(Slot):
    """The boundaries of a captured cycle, nanoseconds of Unix time: what Kineto counts in."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__([])


class MarkClock:
    """Stands in for the timer's clock while a captured cycle is launched; slots of other cycles are the clock's."""

    def __init__(self, inner: Clock) -> None:
        self.inner = inner
        self.name = inner.name
        self.marks = MARKS
        self.tells_host_bound = inner.tells_host_bound

    def acquire(self) -> Slot | None:
        """Return a slot of the clock behind."""
        return self.inner.acquire()

    def mark(self, slot: Slot, now: int) -> None:
        """Note the present moment by the profiler's clock."""
        if not isinstance(slot, MarkSlot):
            self.inner.mark(slot, now)
        elif slot.count < MARKS:
            slot.host.append(time.time_ns())
            slot.count += 1

    def done(self, slot: Slot) -> bool:
        """Return whether the device is through, as far as anybody waits for it."""
        return isinstance(slot, MarkSlot) or self.inner.done(slot)

    def reached(self, slot: Slot, mark: int) -> bool:
        """Likewise, for one mark."""
        return isinstance(slot, MarkSlot) or self.inner.reached(slot, mark)

    def offsets(self, slot: Slot) -> Sequence[float]:
        """Return the offsets of the clock behind."""
        return self.inner.offsets(slot)

    def between(self, earlier: Slot, later: Slot) -> float:
        """Return the gap of the clock behind."""
        return self.inner.between(earlier, later)

    def release(self, slot: Slot) -> None:
        """Give a slot back to the clock behind."""
        if not isinstance(slot, MarkSlot):
            self.inner.release(slot)
