"""Kernel captures in an outline of SGLang, with a profiler that sees what the outline does."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_exporter import catalogue, control
from eagle_exporter.hooks import capture
from eagle_exporter.hooks.capture import LEAD, SETTLE, Captures
from eagle_exporter.hooks.session import FLUSH_RESULTS, POLL_NS, Session
from eagle_exporter.kernels import files
from eagle_exporter.kernels.files import Request
from tests.ranks import make_plan
from tests.unit.doubles import make_recorder, value
from tests.unit.kernel_traces import kernel, launch
from tests.unit.test_session import Rig, batch

RANK = "tp0-pp0-dp0"


DELIVERED_LEAD_SECONDS = capture.LEAD_SECONDS


class Planted(RuntimeError):
    """A fault."""


class Profiler:
    """What the capture needs of torch's profiler: every function of the outline is a kernel of a microsecond."""

    running: Profiler | None = None
    failing = ""
    stranger = False

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.profiler = SimpleNamespace(kineto_results=None)

    def start(self) -> None:
        self.fail("start")
        Profiler.running = self

    def stop(self) -> None:
        self.fail("stop")
        Profiler.running = None

    def export_chrome_trace(self, path: str) -> None:
        self.fail("export")
        Path(path).write_text(json.dumps({"baseTimeNanoseconds": 0, "traceEvents": self.events}))

    def fail(self, step: str) -> None:
        if Profiler.failing == step:
            raise Planted(f"planted in {step}")

    def saw(self, name: str) -> None:
        now = time.time_ns()
        number = len(self.events)
        self.events += [launch(number, now, duration=1), kernel(number, now + 10, 1_000, name)]


class CapturedRig(Rig):
    """A rig that can be captured."""

    def __init__(self, directory: Path, rank: str = RANK, *, every: float | None = None) -> None:
        super().__init__(directory)
        self.captures = Captures(
            self.session, directory, rank, make_plan().labels, every=every, now=lambda: self.clock.now
        )
        self.session.captures = self.captures
        work = self.engine.work

        def seen(name: str) -> str:
            if Profiler.running is not None:
                Profiler.running.saw(name)
            return work(name)

        self.engine.work = seen  # type: ignore[method-assign]

    def ask(self, cycles: int = 3, seconds: float = 60.0, rank: str = RANK) -> Request:
        request = Request(files.new_id(), rank, cycles, seconds)
        control.change(self.directory, lambda _: [request.encode()], drop=("profile", "withdraw"))
        self.look()
        return request

    def look(self) -> None:
        """The next cycle looks at the control file."""
        self.session._poll_at_ns = 0

    def cycles(self, count: int) -> None:
        for _ in range(count):
            self.engine.cycle(batch())

    def result(self, request: Request) -> dict[str, Any]:
        return files.read_json(files.result_path(self.directory, request.rank, request.id))

    def finished(self, request: Request) -> dict[str, Any]:
        """Wait for the process that reads the trace, and let the hooks take its result."""
        for _ in range(600):
            self.flush()
            if files.result_path(self.directory, request.rank, request.id).exists() and not self.captures._readings:
                return self.result(request)
            time.sleep(0.05)
        raise TimeoutError("no result")

    def outcomes(self) -> dict[str, float]:
        found = {name: self.value("eagle_kernel_captures_total", name) for name in catalogue.CAPTURE_OUTCOMES}
        return {name: count for name, count in found.items() if count}

    def timed(self) -> float:
        return self.histogram("eagle_cycle_duration_seconds")[0]

    def untouched(self) -> bool:
        """Whether nothing of a capture is left in the session."""
        timer = self.session.timer
        assert timer is not None
        own = set(capture.SHADOWED) & set(self.session.__dict__)
        return not own and self.captures.current is None and timer.clock is self.clock and not timer.profiled


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the profiler above in place of torch's."""
    Profiler.running, Profiler.failing, Profiler.stranger = None, "", False
    monkeypatch.setattr(capture, "LEAD_SECONDS", 0.0)
    monkeypatch.setattr(capture, "make_profiler", lambda: (Profiler(), True))
    monkeypatch.setattr(capture, "start_profiler", lambda profiler, cuda: profiler.start())
    monkeypatch.setattr(capture, "profiler_is_running", lambda: Profiler.running is not None or Profiler.stranger)
    monkeypatch.setattr(capture, "disable_profiler", lambda: setattr(Profiler, "running", None))
    monkeypatch.setattr(capture, "_Yield", lambda _capture: SimpleNamespace(undo=lambda: None))
    yield
    assert Profiler.running is None, "a profiler was left running"


@pytest.fixture
def rig(tmp_path: Path) -> CapturedRig:
    return CapturedRig(tmp_path)


# --- a capture -------------------------------------------------------------------------------------------
def test_every_rank_has_read_the_request_when_the_profiler_starts(
    rig: CapturedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others look at the control file before a batch, when `POLL_NS` have passed since they last did."""
    assert DELIVERED_LEAD_SECONDS > POLL_NS * 1e-9
    # Longer than `LEAD` batches of this outline take, so that it is the time that is waited for.
    lead = 20 * LEAD * sum(rig.engine.SECONDS.values())
    monkeypatch.setattr(capture, "LEAD_SECONDS", lead)
    rig.ask(cycles=2)
    asked = rig.clock.now
    rig.cycles(1)
    batches = 1
    while Profiler.running is None:
        rig.cycles(1)
        batches += 1
    assert batches > LEAD
    assert rig.clock.now - asked > lead
    rig.cycles(20)


def test_every_kernel_lands_in_the_phase_of_the_function_that_launched_it(rig: CapturedRig) -> None:
    request = rig.ask(cycles=3)
    rig.cycles(20)
    result = rig.finished(request)
    assert result["outcome"] == "completed", result
    assert result["cycles"] == 3
    assert {phase: part["kernels"] / 3 for phase, part in result["phases"].items()} == {
        "draft_steps": 3,  # two forwards, and their result
        "target_verify": 2,  # with the forward inside
        "draft_extend": 1,
        "verify_overhead": 4,  # the tree, its preparation, between, sampling
        "kv_cache": 1,
        "other": 1,
    }
    assert result["outside_kernels"] == 0
    assert rig.errors() == {}


def test_the_registry_gets_the_sums_of_the_result(rig: CapturedRig) -> None:
    request = rig.ask(cycles=2)
    rig.cycles(12)
    result = rig.finished(request)
    for phase, part in result["phases"].items():
        assert rig.value("eagle_kernel_phase_seconds_total", phase) == pytest.approx(part["seconds"])
        assert rig.value("eagle_kernel_busy_seconds_total", phase) == pytest.approx(part["busy_seconds"])
        for name in catalogue.KERNEL_CLASSES:
            assert rig.value("eagle_kernel_seconds_total", phase, name) == part["classes"].get(name, 0.0)
    assert rig.value("eagle_kernel_profiled_cycles_total") == 2
    assert rig.outcomes() == {"completed": 1}
    assert rig.value("eagle_kernel_last_capture_timestamp_seconds") == result["ended"]


def test_the_time_of_the_last_capture_is_absent_until_one_is_completed(rig: CapturedRig) -> None:
    def last() -> float:
        return rig.value("eagle_kernel_last_capture_timestamp_seconds")

    assert math.isnan(last())
    Profiler.failing = "start"
    rig.ask(cycles=2)
    rig.cycles(12)
    Profiler.failing = ""
    assert rig.outcomes() == {"failed": 1}
    assert math.isnan(last()), "a capture without kernels makes none of their series younger"
    begun = time.time()
    request = rig.ask(cycles=2)
    rig.cycles(12)
    rig.finished(request)
    assert begun <= last() <= time.time()


def test_disturbed_cycles_are_counted_and_not_timed(rig: CapturedRig) -> None:
    rig.cycles(5)
    rig.ask(cycles=3)
    rig.cycles(20)
    disturbed = LEAD + 1 + 3 + SETTLE
    # The one that sees the request, those before the start, the captured ones, and two after the stop.
    assert rig.value("eagle_cycles_excluded_total", "profiled") == disturbed
    assert rig.value("eagle_cycles_total") == rig.value("eagle_drafts_total") == 25
    assert rig.timed() == 25 - disturbed
    assert rig.histogram("eagle_cycle_gap_seconds")[0] == 25 - disturbed - 2, "nor the gap to the first one after"
    assert rig.value("eagle_cycles_dropped_total", "pool_exhausted") == 0
    assert rig.clock.free >= rig.clock.slots - 2
    assert rig.untouched()
    _wait_for_readers(rig)


def _wait_for_readers(rig: CapturedRig) -> None:
    for _ in range(600):
        rig.flush()
        if not rig.captures._readings:
            return
        time.sleep(0.05)
    raise TimeoutError("a process does not end")


def test_without_a_capture_nothing_stands_in_for_the_session(rig: CapturedRig) -> None:
    rig.cycles(3)
    assert rig.untouched()
    assert not set(capture.SHADOWED) & set(vars(rig.session))
    assert not files.directory_of(rig.directory).exists()


def test_prefills_between_are_not_timed_and_not_captured(rig: CapturedRig) -> None:
    request = rig.ask(cycles=2)
    rig.cycles(LEAD + 2)
    assert Profiler.running is not None
    rig.engine.cycle(batch(mode="extend"))
    rig.cycles(10)
    result = rig.finished(request)
    assert result["cycles"] == 2
    assert result["outside_kernels"] == 3
    assert rig.histogram("eagle_prefill_phase_duration_seconds", "target_prefill")[0] == 0


def test_an_error_of_sglang_in_a_captured_cycle_passes_and_the_capture_goes_on(rig: CapturedRig) -> None:
    request = rig.ask(cycles=2)
    rig.cycles(LEAD + 1)
    rig.engine.raising = "sample"
    with pytest.raises(RuntimeError, match="SGLang's own error"):
        rig.engine.cycle(batch())
    rig.engine.raising = ""
    timer = rig.session.timer
    assert timer is not None
    assert timer.clock is rig.clock
    rig.cycles(8)
    result = rig.finished(request)
    assert (result["outcome"], result["cycles"]) == ("completed", 2)
    assert result["outside_kernels"] > 0, "what ran in the cycle that failed"


# --- requests --------------------------------------------------------------------------------------------
def test_a_second_request_is_refused_while_one_runs(rig: CapturedRig) -> None:
    first = rig.ask(cycles=4)
    rig.cycles(LEAD + 2)
    second = rig.ask()
    rig.cycles(1)
    assert rig.result(second)["outcome"] == "busy"
    rig.cycles(10)
    assert rig.finished(first)["outcome"] == "completed"
    assert rig.outcomes() == {"busy": 1, "completed": 1}


def test_the_next_request_may_come_right_after_the_last_captured_cycle(rig: CapturedRig) -> None:
    first = rig.ask(cycles=1)
    rig.cycles(LEAD + 3)
    second = rig.ask(cycles=1)
    rig.cycles(12)
    assert rig.finished(first)["outcome"] == rig.finished(second)["outcome"] == "completed"
    assert rig.untouched()


@pytest.mark.parametrize("state", ["off", "fuse_cost", "fuse_errors", "hooks_down"])
def test_hooks_that_do_not_measure_refuse_and_say_why(rig: CapturedRig, state: str) -> None:
    rig.budget.set_state(state)
    request = rig.ask()
    rig.cycles(5)
    found = rig.result(request)
    assert found["outcome"] == "refused"
    assert state in found["reason"]
    assert rig.untouched()


def test_switching_off_ends_a_capture(rig: CapturedRig) -> None:
    request = rig.ask(cycles=10)
    rig.cycles(LEAD + 3)
    rig.tell("off")
    rig.cycles(6)
    assert rig.result(request)["outcome"] == "withdrawn"
    assert rig.untouched()


def test_a_request_can_be_taken_back(rig: CapturedRig) -> None:
    request = rig.ask(cycles=10)
    rig.cycles(LEAD + 3)
    assert Profiler.running is not None
    control.change(rig.directory, lambda _: [f"withdraw id={request.id}"], drop=("profile", "withdraw"))
    rig.look()
    rig.cycles(1)
    assert rig.result(request)["outcome"] == "withdrawn"
    assert not files.raw_path(rig.directory, RANK, request.id).exists()
    rig.cycles(SETTLE + 1)
    assert rig.untouched()


def test_a_request_for_another_capture_takes_nothing_back(rig: CapturedRig) -> None:
    request = rig.ask(cycles=2)
    rig.cycles(LEAD + 1)
    control.change(rig.directory, lambda _: ["withdraw id=00000000000000"], drop=("profile", "withdraw"))
    rig.look()
    rig.cycles(8)
    assert rig.finished(request)["outcome"] == "completed"


def idle(rig: CapturedRig) -> None:
    """Let the scheduler's loop turn without a batch, as often as it looks around."""
    rig.session._idle_poll = 0.0
    rig.engine.next_plan = SimpleNamespace(batch_to_run=None, running_batch=SimpleNamespace(reqs=[]))
    rig.engine.plan(rig.engine, None)


def test_without_traffic_the_request_expires(rig: CapturedRig) -> None:
    request = rig.ask(seconds=5)
    idle(rig)
    rig.clock.advance(5.1)
    idle(rig)
    found = rig.result(request)
    assert (found["outcome"], found["reason"]) == ("withdrawn", "no decode cycle ran within 5 s")
    rig.cycles(SETTLE + 2)
    assert rig.untouched()


def test_traffic_that_ends_gives_what_was_captured(rig: CapturedRig) -> None:
    request = rig.ask(cycles=40)
    rig.cycles(LEAD + 1 + 4)
    rig.clock.advance(capture.IDLE_SECONDS + 0.1)
    idle(rig)
    result = rig.finished(request)
    assert (result["outcome"], result["cycles"], result["cycles_asked"]) == ("completed", 4, 40)


def test_the_profiler_does_not_run_longer_than_its_bound(rig: CapturedRig) -> None:
    request = rig.ask(cycles=40)
    rig.cycles(LEAD + 1 + 2)
    rig.clock.advance(capture.RUN_SECONDS)
    rig.cycles(1)
    assert Profiler.running is None
    assert rig.finished(request)["cycles"] == 2


def test_prefills_alone_do_not_fill_the_trace_for_ever(rig: CapturedRig) -> None:
    request = rig.ask(cycles=1)
    for _ in range(LEAD + 2 + capture.BATCHES_PER_CYCLE + capture.BATCHES_MORE + 1):
        rig.engine.cycle(batch(mode="extend"))
    assert Profiler.running is None
    assert rig.result(request)["outcome"] == "failed"
    assert "no decode cycle" in rig.result(request)["reason"]


@pytest.mark.parametrize(
    "command",
    [
        f"profile id=00000000000001 rank={RANK} cycles=51",
        f"profile id=00000000000001 rank={RANK} cycles=0",
        f"profile id=00000000000001 rank={RANK} seconds=nan",
        f"profile id=../../../../x rank={RANK}",
        f"profile rank={RANK}",
        f"profile id=00000000000001 rank={RANK} cycles=many",
    ],
)
def test_a_request_that_is_none_is_refused_and_counted(rig: CapturedRig, command: str) -> None:
    control.change(rig.directory, lambda _: [command])
    rig.look()
    rig.cycles(3)
    assert rig.outcomes() == {"refused": 1}
    assert rig.untouched()
    assert rig.errors() == {}


# --- failures --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", ["start", "stop", "export"])
def test_a_failing_profiler_costs_the_capture_only(
    rig: CapturedRig, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    Profiler.failing = step
    with caplog.at_level(logging.WARNING, "eagle_exporter"):
        request = rig.ask(cycles=2)
        rig.cycles(10)
    found = rig.result(request)
    assert found["outcome"] == "failed"
    assert f"planted in {step}" in found["reason"]
    assert len([record for record in caplog.records if "planted" in record.getMessage()]) == 1
    assert rig.untouched()
    assert not list(files.directory_of(rig.directory).glob(".*")), "raw files are gone"
    Profiler.failing = ""
    again = rig.ask(cycles=2)
    rig.cycles(10)
    assert rig.finished(again)["outcome"] == "completed"
    assert rig.outcomes() == {"failed": 1, "completed": 1}
    assert rig.value("eagle_cycles_total") == 20


def test_a_profiler_that_runs_already_is_left_alone(rig: CapturedRig) -> None:
    Profiler.stranger = True
    request = rig.ask()
    rig.cycles(6)
    assert rig.result(request)["outcome"] == "busy"
    assert Profiler.stranger


def test_whoever_starts_the_profiler_gets_it(rig: CapturedRig) -> None:
    request = rig.ask(cycles=10)
    rig.cycles(LEAD + 2)
    current = rig.captures.current
    assert isinstance(current, capture.Profile)
    current.interrupted()
    assert Profiler.running is None
    assert rig.result(request)["outcome"] == "busy"
    rig.cycles(SETTLE + 1)
    assert rig.untouched()


def test_too_little_space_is_said_before_anything_starts(rig: CapturedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096))
    request = rig.ask(cycles=10)
    rig.cycles(6)
    assert rig.result(request)["outcome"] == "failed"
    assert "20 MB" in rig.result(request)["reason"]


def without_gpu(monkeypatch: pytest.MonkeyPatch, events_per_cycle: int) -> None:
    """Let the profiler see operators, so many in a cycle."""
    monkeypatch.setattr(capture, "make_profiler", lambda: (Profiler(), False))
    monkeypatch.setattr(
        capture,
        "count_events",
        lambda profiler: events_per_cycle * sum(event["name"] == "sample" for event in profiler.events),
    )

    def saw(profiler: Profiler, name: str) -> None:
        now = time.time_ns() // 1000
        profiler.events.append({"ph": "X", "cat": "cpu_op", "name": name, "ts": now, "dur": 1, "tid": 1})

    monkeypatch.setattr(Profiler, "saw", saw)


def test_too_many_events_are_not_written_out_and_the_answer_says_how_many_cycles_fit(
    rig: CapturedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "count_events", lambda _: 2 * files.ON_GPU.events)
    request = rig.ask(cycles=10)
    rig.cycles(18)
    assert rig.result(request)["outcome"] == "failed"
    assert rig.result(request)["reason"] == (
        "the profiler saw 200000 events in 10 cycles, more than 100000: ask for at most 4 cycles"
    )
    monkeypatch.setattr(capture, "count_events", lambda _: 2 * files.ON_GPU.events)
    alone = rig.ask(cycles=1)
    rig.cycles(8)
    assert "one cycle alone is too much" in rig.result(alone)["reason"]


@pytest.mark.parametrize("cycles", [10, files.ON_CPU.cycles])
def test_the_operators_of_the_demo_fit_without_a_gpu(
    rig: CapturedRig, monkeypatch: pytest.MonkeyPatch, cycles: int
) -> None:
    # 101,234 to 107,913 events in 10 cycles and 208,033 in 20 were seen, prefills between them included.
    without_gpu(monkeypatch, 10_800)
    request = rig.ask(cycles=cycles)
    rig.cycles(LEAD + SETTLE + 4 + cycles)
    result = rig.finished(request)
    assert (result["outcome"], result["cycles"]) == ("completed", cycles), result["reason"]


def test_more_cycles_than_fit_without_a_gpu_are_refused_before_anything_starts(
    rig: CapturedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpu(monkeypatch, 10_000)
    request = rig.ask(cycles=files.ON_CPU.cycles + 1)
    rig.cycles(6)
    found = rig.result(request)
    assert (found["outcome"], "at most 20" in found["reason"]) == ("refused", True)
    assert rig.untouched()


def test_a_directory_that_cannot_be_written_costs_the_capture_only(
    rig: CapturedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "make_directory", full)
    rig.ask(cycles=2)
    rig.cycles(10)
    assert rig.outcomes() == {"failed": 1}
    assert rig.untouched()
    assert rig.value("eagle_cycles_total") == 10


@pytest.mark.parametrize("method", ["step", "_open_cycle", "_stop"])
def test_an_error_of_ours_changes_nothing_in_sglang(
    rig: CapturedRig, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        raise Planted(method)

    monkeypatch.setattr(capture.Profile, method, fail)
    rig.ask(cycles=2)
    rig.cycles(20)
    if method == "_open_cycle":
        # No cycle is ever captured; the profiler still ends.
        rig.clock.advance(capture.RUN_SECONDS)
        rig.cycles(SETTLE + 2)
    assert rig.untouched()
    assert rig.outcomes() == {"failed": 1}
    assert rig.engine.calls.count("process") == int(rig.value("eagle_cycles_total"))
    assert rig.errors() == {}


def test_a_reader_that_dies_leaves_a_failed_capture(rig: CapturedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen

    def killed(*args: Any, **kwargs: Any) -> Any:
        process = real(*args, **kwargs)
        process.kill()
        return process

    monkeypatch.setattr(subprocess, "Popen", killed)
    request = rig.ask(cycles=1)
    rig.cycles(8)
    result = rig.finished(request)
    assert result["outcome"] == "failed"
    assert "ended with code -9" in result["reason"]
    assert not list(files.directory_of(rig.directory).glob(".raw*"))


def test_a_result_with_impossible_numbers_is_not_counted(rig: CapturedRig) -> None:
    request = rig.ask(cycles=1)
    rig.cycles(8)
    while rig.captures._readings[0].process.poll() is None:
        time.sleep(0.02)
    path = files.result_path(rig.directory, RANK, request.id)
    result = files.read_json(path)
    result["phases"]["target_verify"]["seconds"] = -1.0
    files.write_json(path, result)
    assert rig.outcomes() == {"failed": 1}
    assert rig.value("eagle_kernel_profiled_cycles_total") == 0
    assert math.isnan(rig.value("eagle_kernel_last_capture_timestamp_seconds"))


# --- the other ranks -------------------------------------------------------------------------------------
def test_every_rank_of_the_server_leaves_the_disturbed_cycles_out(tmp_path: Path) -> None:
    """Two ranks in step, one control file: from the request until two after the stop neither times anything."""
    rig = CapturedRig(tmp_path)
    (tmp_path / "other").mkdir()
    other = CapturedRig(tmp_path / "other", rank="tp1-pp0-dp0")
    # One server: the same control file and directory of captures.
    other.captures.server = tmp_path
    other.session.control = control.Control(tmp_path)
    request = rig.ask(cycles=3)
    stopped_at = None
    for number in range(20):
        rig.cycles(1)
        other.cycles(1)
        if stopped_at is None and files.has_stopped(tmp_path, request.id):
            stopped_at = number
    assert stopped_at is not None
    left_out = other.value("eagle_cycles_excluded_total", "profiled")
    assert left_out >= rig.value("eagle_cycles_excluded_total", "profiled") == LEAD + 1 + 3 + SETTLE
    assert other.timed() == 20 - left_out
    assert other.value("eagle_cycles_total") == 20
    assert other.untouched()
    assert other.outcomes() == {}, "it is the other's capture"
    assert rig.finished(request)["outcome"] == "completed"


def test_a_rank_does_not_wait_for_ever_for_the_end_of_anothers_capture(rig: CapturedRig) -> None:
    rig.ask(rank="tp7-pp0-dp0", seconds=10)
    rig.cycles(3)
    assert rig.timed() == 0
    rig.clock.advance(10 + capture.RUN_SECONDS + 1)
    rig.cycles(SETTLE + 2)
    assert rig.untouched()


def test_a_refusal_on_the_other_rank_ends_the_wait(rig: CapturedRig) -> None:
    request = rig.ask(rank="tp7-pp0-dp0")
    rig.cycles(2)
    files.make_directory(rig.directory)
    files.write_json(files.result_path(rig.directory, request.rank, request.id), {"outcome": "refused"})
    rig.cycles(SETTLE + 2)
    assert rig.untouched()


def test_series_of_captures_appear_on_another_rank_when_one_is_asked_of_it(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, make_plan(tp_rank=1, recording=False))
    slot = recorder.layout.slot("eagle_kernel_profiled_cycles_total")
    assert slot is not None
    assert recorder.values[slot] != recorder.values[slot], "absent"
    recorder.show_captures()
    assert value(recorder, "eagle_kernel_profiled_cycles_total") == 0
    assert value(recorder, "eagle_kernel_seconds_total", "target_verify", "gemm") == 0
    assert math.isnan(value(recorder, "eagle_kernel_last_capture_timestamp_seconds")), "none is completed"


# --- the schedule ----------------------------------------------------------------------------------------
def test_a_scheduled_capture_comes_by_the_control_file_and_only_with_traffic(tmp_path: Path) -> None:
    rig = CapturedRig(tmp_path, every=3600.0)
    rig.cycles(3)
    assert rig.outcomes() == {}
    rig.clock.advance(3600.0)
    rig.flush()
    assert "profile" not in (tmp_path / "control").read_text()
    rig.cycles(FLUSH_RESULTS + 4)
    rig.look()
    rig.cycles(FLUSH_RESULTS + 4)
    _wait_for_readers(rig)
    assert "profile id=" in (tmp_path / "control").read_text(), "so that every rank sees it"
    assert rig.outcomes() == {"completed": 1}
    rig.cycles(2 * FLUSH_RESULTS)
    assert rig.outcomes() == {"completed": 1}, "the next one is an hour away"


def test_a_scheduled_capture_takes_nothing_of_what_people_have_said(tmp_path: Path) -> None:
    rig = CapturedRig(tmp_path, every=600.0)
    rig.tell("off")
    rig.cycles(2)
    rig.clock.advance(601.0)
    rig.cycles(2)
    rig.captures.poll(traffic=True)
    assert "profile" not in (tmp_path / "control").read_text()
    assert rig.budget.state == "off"


def test_a_session_without_a_control_file_has_no_captures() -> None:
    assert Session().captures is None


# --- torch -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cuda", "before", "after"),
    [("13.0", None, "1"), ("12.6", None, "1"), ("12.4", None, None), ("", None, None), ("13.0", "0", "0")],
)
def test_cupti_is_detached_where_that_is_safe_and_the_user_has_not_decided(
    monkeypatch: pytest.MonkeyPatch, cuda: str, before: str | None, after: str | None
) -> None:
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    if before is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", before)
    capture._let_go_of_cupti(cuda)
    assert os.environ.get("TEARDOWN_CUPTI") == after
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
