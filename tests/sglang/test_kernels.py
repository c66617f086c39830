"""Kernel captures with the real SGLang: without a GPU the profiler sees operators, by the same path."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eagle_exporter import catalogue, control
from eagle_exporter.cli import main
from eagle_exporter.demo import answers
from eagle_exporter.demo.sglang_server import SGLangServer
from eagle_exporter.kernels import files
from eagle_exporter.kernels.files import Request
from eagle_exporter.registry.reader import RankSnapshot
from tests.service.exporter import wait_for
from tests.sglang import processes
from tests.sglang.measured import (
    ROOT,
    TOGETHER,
    Configuration,
    Difference,
    expect,
    one_rank,
    send_together,
    settled,
    start,
)

CONFIGURATION = Configuration(overlap=True)
LONG = 12
"""Cycles that take long enough for something to happen meanwhile."""
SGLANGS_PROFILER = {"activities": ["CPU"], "with_stack": False}
REQUESTS = TOGETHER[:3]
"""Short ones: without a GPU the profiler sees some thousand operators a cycle."""
TOKENS = [answers.expected_tokens(prompt, count) for prompt, count in REQUESTS]
RANK = "tp0-pp0-dp0"


@dataclass
class Served:
    """A server with faults at hand."""

    server: SGLangServer
    registry: Path
    fault: Path
    sent: int = 0

    @property
    def directory(self) -> Path:
        """The server's directory in the registry."""
        return self.registry / "tested"

    def settled(self) -> RankSnapshot:
        """Return the rank once the scheduler is idle."""
        return settled(self.registry)

    @contextmanager
    def traffic(self) -> Iterator[None]:
        """Serve requests all the while; every answer must be right."""
        stop = threading.Event()
        wrong: list[Any] = []

        def send() -> None:
            try:
                while not stop.is_set():
                    replies = send_together(self.server, REQUESTS)
                    self.sent += 1
                    if [reply["output_ids"] for reply in replies] != TOKENS:
                        wrong.append(replies)
            except Exception as error:
                wrong.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        assert wrong == []

    def captures(self, outcome: str) -> float:
        """Return the count of captures with this outcome."""
        return one_rank(self.registry).value("eagle_kernel_captures_total", outcome) or 0.0

    def running(self, request: Request) -> None:
        """Wait until the profiler runs for a request."""
        raw = files.raw_path(self.directory, request.rank, request.id)
        wait_for(raw.exists, seconds=60, what="the start of the profiler")

    def result_of(self, request: Request) -> dict[str, Any]:
        """Wait for what became of a request."""
        path = files.result_path(self.directory, request.rank, request.id)
        wait_for(path.exists, seconds=60)
        return files.read_json(path)

    def ask(self, cycles: int = 5, seconds: float = 60.0) -> Request:
        """Ask for a capture as anybody who owns the server can."""
        request = Request(files.new_id(), RANK, cycles, seconds)
        control.change(self.directory, lambda _: [request.encode()], drop=("profile", "withdraw"))
        return request


@pytest.fixture(scope="module")
def served(models: Path, sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server of this module; the last test kills it."""
    directory = tmp_path_factory.mktemp("kernels")
    fault = directory / "fault"
    fault.write_text("")
    with start(
        models,
        sglang_python,
        CONFIGURATION,
        directory,
        environment={"EAGLE_KERNEL_FAULTS": str(fault), "SGLANG_TORCH_PROFILER_DIR": str(directory / "sglang")},
        plugin_path=[ROOT / "tests" / "sglang" / "kernel_plugin"],
    ) as server:
        yield Served(server, directory / "registry", fault)


def profile(served: Served, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    """Run ``eagle-exporter profile``; return its exit code and what it printed."""
    capsys.readouterr()
    code = main(["profile", "--dir", str(served.registry), *more])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_capture_accounts_for_all_that_the_profiler_saw_and_changes_nothing_else(
    served: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    send_together(served.server, REQUESTS)
    before = served.settled()
    served.sent = 0
    with served.traffic():
        code, out, err = profile(served, capsys, "--cycles", "6", "--json", "--out", str(tmp_path / "trace.json.gz"))
    assert code == 0, err
    result = json.loads(out)

    def completed(rank: RankSnapshot) -> float:
        return rank.value("eagle_kernel_captures_total", "completed") or 0.0

    # The scheduler takes the sums of the result into its registry file after whoever asked can read it.
    wait_for(lambda: completed(served.settled()) > completed(before), 60, "the sums in the registry")
    after = served.settled()
    assert result["cycles"] == 6
    assert result["problems"] == []

    # Nothing is lost or counted twice: to the nanosecond what the profiler itself adds up.
    totals = json.loads(served.fault.with_name("fault.totals").read_text())
    phases = result["phases"]
    in_phases = sum(part["kernel_seconds"] for part in phases.values())
    assert result["total_seconds"] == pytest.approx(totals["seconds"], abs=1e-6)
    assert result["total_kernels"] == totals["count"]
    assert in_phases + result["outside_seconds"] == pytest.approx(result["total_seconds"], abs=1e-6)
    assert sum(part["kernels"] for part in phases.values()) + result["outside_kernels"] == result["total_kernels"]
    for part in phases.values():
        assert sum(part["classes"].values()) == pytest.approx(part["kernel_seconds"], abs=1e-6)
        assert part["busy_seconds"] <= part["seconds"] + 1e-9
    assert 0 < phases["target_verify"]["classes"]["gemm"] < totals["seconds"]
    assert phases["draft_steps"]["kernels"] > 0
    assert phases["draft_extend"]["kernels"] > 0

    # The registry has just that.
    counted = Difference(before, after)
    for name in ("eagle_kernel_seconds_total", "eagle_kernel_busy_seconds_total", "eagle_kernel_phase_seconds_total"):
        for labels in counted.labels(name):
            part = phases[labels[0]]
            field = {"eagle_kernel_busy_seconds_total": "busy_seconds", "eagle_kernel_phase_seconds_total": "seconds"}
            wanted = part[field[name]] if name in field else part["classes"].get(labels[1], 0.0)
            assert counted(name, *labels) == pytest.approx(wanted, abs=1e-9), (name, labels)
    assert counted("eagle_kernel_profiled_cycles_total") == 6
    assert counted("eagle_kernel_captures_total", "completed") == 1
    assert before.value("eagle_kernel_last_capture_timestamp_seconds") is None
    assert after.value("eagle_kernel_last_capture_timestamp_seconds") == result["ended"]

    # The captured cycles are left out of the times, and all of them count.
    cycles, left_out = counted("eagle_cycles_total"), counted("eagle_cycles_excluded_total", "profiled")
    assert 6 <= left_out < cycles
    assert counted.total("eagle_batch_timed_cycles_total") == cycles - left_out
    assert counted.total("eagle_cycles_dropped_total") == 0
    assert counted.total("eagle_hook_errors_total") == 0
    assert after.value("eagle_timing_enabled", "on") == 1
    expected = expect(REQUESTS, CONFIGURATION)
    assert counted("eagle_drafts_total") == served.sent * expected.drafts
    assert counted("eagle_accepted_tokens_total") == served.sent * expected.accepted
    assert counted("eagle_output_tokens_total") == served.sent * expected.output
    assert sum(counted.buckets("eagle_cycle_duration_seconds")) == counted.total("eagle_batch_timed_cycles_total")

    # The trace opens in Perfetto: phases and classes are in it.
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "eagle_phase"}
    assert {"draft_steps", "target_verify", "draft_extend"} <= names <= set(catalogue.PHASES)
    classes = {event["args"]["kernel_class"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"}
    assert "gemm" in classes <= set(catalogue.KERNEL_CLASSES)
    assert not list(files.directory_of(served.directory).glob(".*")), "raw files are gone"


def test_a_second_request_is_refused_while_one_runs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    with served.traffic():
        first = served.ask(cycles=LONG)
        served.running(first)
        code, _, err = profile(served, capsys)
        assert code == 4
        assert "not finished" in err
        second = served.ask()
        assert served.result_of(second)["outcome"] == "busy"
        assert served.result_of(first)["outcome"] == "completed"


def test_a_failing_profiler_costs_the_capture_only_and_the_next_one_works(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = served.captures("failed")
    with served.traffic():
        for step in ("start", "export", "stop"):
            served.fault.write_text(step)
            code, _, err = profile(served, capsys, "--cycles", "3")
            assert code == 2
            assert f"planted in {step}" in err
        served.fault.write_text("")
        code, out, err = profile(served, capsys, "--cycles", "3")
    assert code == 0, err
    assert "tested tp0-pp0-dp0: 3 cycles, batch size" in out
    for word in ("target_verify", "gemm", "aten::", "Outside the cycles", "ms/cycle"):
        assert word in out
    assert served.captures("failed") == failed + 3
    log = served.server.log()
    assert [log.count(f"planted in {step}") for step in ("start", "export", "stop")] == [1, 1, 1], "logged once"
    assert one_rank(served.registry).value("eagle_timing_enabled", "on") == 1


def test_sglangs_own_profiler_goes_first(served: Served) -> None:
    # It runs already: there is no capture.
    served.server.request("/start_profile", SGLANGS_PROFILER)
    request = served.ask()
    served.server.generate([REQUESTS[0][0]], 24)
    assert served.result_of(request)["outcome"] == "busy"
    served.server.request("/stop_profile", {})
    # It starts while a capture runs: the capture ends.
    with served.traffic():
        request = served.ask(cycles=files.ON_CPU.cycles)
        served.running(request)
        served.server.request("/start_profile", SGLANGS_PROFILER)
        assert served.result_of(request)["outcome"] == "busy"
        served.server.request("/stop_profile", {})
        assert served.result_of(served.ask())["outcome"] == "completed"


def test_without_traffic_the_request_is_taken_back(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.settled()
    code, _, err = profile(served, capsys, "--timeout", "1")
    assert code == 3
    assert "no decode cycle ran within 1 s" in err
    send_together(served.server, REQUESTS)
    assert not list(files.directory_of(served.directory).glob(".raw-*")), "no capture came of it later"


def test_a_kill_in_the_middle_leaves_nothing_that_disturbs_a_reader(served: Served) -> None:
    try:
        with served.traffic():
            request = served.ask(cycles=files.ON_CPU.cycles)
            served.running(request)
            for pid in processes.of_server(served.registry)["scheduler"]:
                processes.kill(pid)
    except AssertionError:
        pass  # the answers that were on their way
    wait_for(lambda: not one_rank(served.registry).alive, seconds=60)
    raw = files.raw_path(served.directory, request.rank, request.id)
    assert raw.exists()
    # The next start of the server takes it away, or a capture after a while.
    files.tidy(served.directory, RANK, now=time.time() + files.RAW_SECONDS + 1)
    assert not raw.exists()
