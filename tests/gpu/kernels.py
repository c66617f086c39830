"""The part ``kernels``: captures of a real engine, what they add up to, and what they cost.

Every step adds to the report and writes it, so a run that is cut keeps what it has. In this order:

    never    tok/s of an engine that was never captured, at each batch size
    sums     one capture whose class sums are held against the profiler's own totals (``key_averages``), and against a
             count of the events in the kept trace
    classes  what each phase consists of, the share of verify without a class, and those kernels by name, at each batch
             size
    failure  a profiler that fails to start costs the capture only
    cost     tok/s, cycle and hook time before, during and after a capture, in rounds; the last rounds after several
             captures, beside the engine that was never captured, show whether anything stays
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eagle_exporter.cli import profile
from eagle_exporter.kernels import files
from tests.gpu import figures

if TYPE_CHECKING:
    from typing_extensions import Self

CYCLES = 10
TOLERANCE = 1e-9
"""Relative: the profiler's totals are microseconds in floating point."""
NEVER = 5
"""Requests to an engine that was never captured."""
_REQUEST_SECONDS = 0.3
_ANSWER_SECONDS = 90.0


class Server(Protocol):
    """What the steps need of `driver.Engine`."""

    name: str
    start_seconds: float

    def command(self, **command: Any) -> dict[str, Any]: ...

    def request(self, batch: int, tokens: int) -> dict[str, Any]: ...

    def snapshots(self) -> list[Any]: ...


class Captured:
    """A capture that is asked for before a request and taken during it."""

    def __init__(self, server: Server, root: Path, cycles: int = CYCLES) -> None:
        self._arguments = argparse.Namespace(
            dir=root, server=server.name, rank="0", cycles=cycles, timeout=60.0, out=None, json=True
        )
        self.result: dict[str, Any] = {}
        self.error = ""
        self.directory = root
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.result, self.directory = profile.capture(self._arguments)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def __enter__(self) -> Self:
        self._thread.start()
        # The request is in the control file before the traffic begins.
        time.sleep(_REQUEST_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(_ANSWER_SECONDS)
        if self._thread.is_alive():
            self.error = f"the capture has no result after {_ANSWER_SECONDS:g} s"

    def trace(self) -> list[dict[str, Any]]:
        """Return the events of the kept trace."""
        path = files.trace_path(self.directory, self.result["rank"], self.result["id"])
        events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        return events


def run(
    server: Server,
    root: Path,
    report: dict[str, Any],
    save: Callable[[], None],
    *,
    deadline: float,
    batches: Mapping[int, int],
    rounds: int,
) -> None:
    """Take every step that there is time for.

    Args:
        server: The engine, warm.
        root: Its registry.
        report: Gets the figures, under ``steps``.
        save: Writes it.
        deadline: ``time.time`` after which no round begins.
        batches: Batch size -> tokens per request.
        rounds: Rounds of the cost, with one capture each.
    """
    steps, step = _stepper(report, save)
    server.command(mode="on")
    for batch, tokens in batches.items():
        step(f"never_batch{batch}", partial(never, server, batch, tokens))
    step("sums", lambda: sums(server, root, batches))
    for batch, tokens in batches.items():
        step(f"classes_batch{batch}", partial(classes, server, root, batch, tokens))
    step("failure", lambda: failure(server, root, batches))
    for batch, tokens in batches.items():
        speeds = steps[f"never_batch{batch}"].get("tok_s") or []
        step(f"cost_batch{batch}", partial(cost, server, root, batch, tokens, rounds, deadline, speeds))


def host_bound(
    server: Server, root: Path, report: dict[str, Any], save: Callable[[], None], *, tokens: int, deadline: float
) -> None:
    """What captures cost an engine that is bound by the host: hook time and cycle time show it.

    Args:
        server: The engine, warm.
        root: Its registry.
        report: Gets the figures, under ``steps``.
        save: Writes all figures.
        tokens: Of each request.
        deadline: ``time.time`` after which no round begins.
    """
    steps, step = _stepper(report, save)
    server.command(mode="on")
    step("never", lambda: never(server, 1, tokens))
    step("cost", lambda: cost(server, root, 1, tokens, 4, deadline, steps["never"].get("tok_s") or []))


def _stepper(
    report: dict[str, Any], save: Callable[[], None]
) -> tuple[dict[str, Any], Callable[[str, Callable[[], Any]], None]]:
    """Return the steps of a report, and what takes one: it writes the report, and one that fails stops nothing."""
    steps = report.setdefault("steps", {})

    def step(name: str, function: Callable[[], Any]) -> None:
        begin = time.time()
        try:
            steps[name] = function()
        except Exception as error:
            steps[name] = {"error": f"{type(error).__name__}: {error}"}
        shown = json.dumps(steps[name], default=str)[:2000]
        print(f"[kernels] {name} in {time.time() - begin:.0f} s: {shown}", flush=True)
        save()

    return steps, step


def never(server: Server, batch: int, tokens: int) -> dict[str, Any]:
    """Speed before the first capture of the engine."""
    rows = [_measured(server.request(batch, tokens)) for _ in range(NEVER)]
    return {"tok_s": [row["tok_s"] for row in rows], "requests": rows}


def sums(server: Server, root: Path, batches: Mapping[int, int]) -> dict[str, Any]:
    """Class sums against the profiler's own totals.

    Raises:
        AssertionError: They differ; the report has both.
    """
    batch, tokens = next(iter(batches.items()))
    server.command(keep_profiler_totals=True)
    with Captured(server, root) as captured:
        server.request(batch, tokens)
    totals = server.command(take_profiler_totals=True)["profiler_totals"]
    if captured.error:
        raise RuntimeError(captured.error)
    result = captured.result
    phases = result["phases"]
    in_classes = sum(sum(part["classes"].values()) for part in phases.values())
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if result["device"] == "cuda" else ("cpu_op",)
    events = [event for event in captured.trace() if event.get("cat") in wanted]
    found = {
        "profiler_seconds": totals["seconds"],
        "classes_and_outside_seconds": in_classes + result["outside_seconds"],
        "total_seconds": result["total_seconds"],
        "kernels": result["total_kernels"],
        "profiler_kernels": totals["count"],
        "kernels_in_trace": len(events),
        "outside_kernels": result["outside_kernels"],
        "unlaunched_kernels": result["unlaunched_kernels"],
        "problems": result["problems"],
    }
    found["equal"] = (
        abs(found["classes_and_outside_seconds"] - totals["seconds"]) <= TOLERANCE * totals["seconds"] + 1e-7
        and found["kernels"] == found["kernels_in_trace"] == totals["count"]
        and all(part["busy_seconds"] <= part["seconds"] + 1e-9 for part in phases.values())
    )
    return found


def classes(server: Server, root: Path, batch: int, tokens: int) -> dict[str, Any]:
    """What each phase consists of; kernels without a class are listed."""
    with Captured(server, root) as captured:
        answer = server.request(batch, tokens)
    if captured.error:
        raise RuntimeError(captured.error)
    result = captured.result
    per_cycle = 1e3 / result["cycles"]
    verify = result["phases"]["target_verify"]
    unclassified = sum(one["seconds"] for one in result["unclassified"])
    return {
        "tokens_right": answer["tokens_right"],
        "rows": result["rows"],
        "stall_ms": {name: seconds * 1e3 for name, seconds in result["stall_seconds"].items()},
        "trace_bytes": result["trace_bytes"],
        "phases": {
            phase: {
                "ms": part["seconds"] * per_cycle,
                "busy_ms": part["busy_seconds"] * per_cycle,
                "kernels": part["kernels"] / result["cycles"],
                "classes_ms": {name: seconds * per_cycle for name, seconds in part["classes"].items()},
            }
            for phase, part in result["phases"].items()
        },
        "unclassified_share_of_verify": unclassified / verify["kernel_seconds"] if verify["kernel_seconds"] else None,
        "other_share_of_verify": verify["classes"].get("other", 0.0) / verify["kernel_seconds"],
        "unclassified": result["unclassified"],
        "top": result["top"][:20],
        "problems": result["problems"],
    }


def cost(
    server: Server,
    root: Path,
    batch: int,
    tokens: int,
    rounds: int,
    deadline: float,
    speeds: Sequence[float],
) -> dict[str, Any]:
    """Speed before, during and after a capture; each round is a request before, one with a capture, and two after.

    Args:
        server: The engine.
        root: Its registry.
        batch: Requests sent together.
        tokens: Of each.
        rounds: At most.
        deadline: No round begins after it.
        speeds: Tok/s before the first capture, none where they are not known.
    """
    rows: list[dict[str, Any]] = []
    for _ in range(rounds):
        if time.time() > deadline:
            break
        row = {"before": _measured(server.request(batch, tokens))}
        with Captured(server, root) as captured:
            row["during"] = _measured(server.request(batch, tokens))
        row["captured"] = {"stall_seconds": captured.result.get("stall_seconds"), "error": captured.error}
        row["after"] = _measured(server.request(batch, tokens))
        row["later"] = _measured(server.request(batch, tokens))
        rows.append(row)
    report: dict[str, Any] = {"never_captured_tok_s": list(speeds), "rounds": rows}
    for moment in ("before", "during", "after", "later"):
        ratios = [row[moment]["tok_s"] / statistics.median(speeds) for row in rows] if speeds else []
        report[f"{moment}_over_never"] = statistics.median(ratios) if ratios else None
    pairs = [row["after"]["tok_s"] / row["before"]["tok_s"] for row in rows]
    if pairs:
        low, high = figures.bootstrap(pairs)
        report["after_over_before"] = {"median": statistics.median(pairs), "ci95": [low, high], "pairs": len(pairs)}
    return report


def _measured(answer: dict[str, Any]) -> dict[str, Any]:
    means = figures.means(answer["gained"])
    return {
        "tok_s": answer["tok_s"],
        "tokens_right": answer["tokens_right"],
        "cycle_ms": means["cycle"] * 1e3 if means.get("timed") else None,
        "hook_us_per_cycle": means.get("hook_us_per_cycle"),
        "timed": means.get("timed"),
        "cycles": means.get("cycles"),
        "left_out": figures.gain(answer["gained"], "eagle_cycles_excluded_total", "profiled"),
    }


def failure(server: Server, root: Path, batches: Mapping[int, int]) -> dict[str, Any]:
    """A profiler that fails to start: the tokens stay right, and the next capture works."""
    batch, tokens = next(iter(batches.items()))
    server.command(fail_profiler=True)
    with Captured(server, root) as failing:
        answer = server.request(batch, tokens)
    server.command(fail_profiler=False)
    with Captured(server, root) as working:
        server.request(batch, tokens)
    return {"failed_as": failing.error, "tokens_right": answer["tokens_right"], "next_error": working.error}
