"""From a profiler's trace and the hooks' boundaries to seconds by phase and kernel class.

A kernel belongs to the phase in which it was launched: CUPTI gives the launching call and the kernel one correlation
number, and kernels inside a CUDA graph carry that of the graph's launch. Names could not tell phases apart, since draft
and verify use the same kernels. Without a GPU an operator belongs to the phase in which it began, with the time that
its children do not take.

All times are whole nanoseconds of Unix time, so sums are exact: over phases, and over what lies outside every cycle,
they are the profiler's own totals.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from eagle_exporter import catalogue
from eagle_exporter.kernels.classes import Classifier

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of Kineto's trace that run on the GPU."""
LAUNCHES = ("cuda_runtime", "cuda_driver")
OPERATORS = "cpu_op"

TOP = 40
UNCLASSIFIED_SHOWN = 20
_NAME = 300
_STRADDLING_SHARE = 0.02


class TraceError(ValueError):
    """The trace cannot be used; the message says why."""


@dataclass
class Work:
    """A kernel, a copy, or an operator.

    Attributes:
        name: Its name. start: When it began. end: When it ended. launch: When the call that launched it began; for an
        operator its own begin; None when the trace has no such call. own: Time that counts: the duration, for an
        operator without that of its children. lane: Stream or thread. event: The trace's event.
    """

    name: str
    start: int
    end: int
    launch: int | None
    own: int
    lane: Any
    event: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Cycle:
    """The boundaries of one captured cycle on the scheduler thread.

    Attributes:
        marks: Nanoseconds of Unix time, never falling.
        phases: Index into `catalogue.PHASES` of the interval that each mark but the last opens.
    """

    marks: tuple[int, ...]
    phases: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.marks) < 2 or len(self.phases) != len(self.marks) - 1:
            raise TraceError("a cycle needs one boundary more than intervals")
        if any(later < earlier for earlier, later in zip(self.marks, self.marks[1:], strict=False)):
            raise TraceError("the boundaries of a cycle fall")
        if not all(0 <= phase < len(catalogue.PHASES) for phase in self.phases):
            raise TraceError("a boundary opens no phase")


@dataclass
class PhaseKernels:
    """What a phase is made of, summed over the captured cycles, in nanoseconds.

    Attributes:
        duration: Its own duration.
        busy: Time in which at least one kernel ran.
        kernels: Number of kernels.
        classes: Time by class.
    """

    duration: int = 0
    busy: int = 0
    kernels: int = 0
    classes: Counter[str] = field(default_factory=Counter)


@dataclass
class Analysis:
    """What a capture says, in nanoseconds.

    Attributes:
        device: ``cuda`` or ``cpu``.
        cycles: Number of cycles.
        phases: One per `catalogue.PHASES`.
        total: Time of all kernels of the trace.
        total_kernels: Their number.
        outside: Time of kernels that no captured cycle launched: prefills, copies between cycles.
        outside_kernels: Their number.
        unlaunched: Those of them without a launch in the trace: launched before it began.
        names: ``(phase, name)`` -> time and number.
        unclassified: Name -> time and number, of kernels in cycles that no pattern knows.
        problems: What makes the numbers doubtful, in sentences.
        boundaries: Per cycle, its marks on the device's time line.
    """

    device: str
    cycles: int
    phases: list[PhaseKernels]
    total: int = 0
    total_kernels: int = 0
    outside: int = 0
    outside_kernels: int = 0
    unlaunched: int = 0
    names: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    unclassified: dict[str, list[int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    boundaries: list[list[int]] = field(default_factory=list)


def analyse(
    trace: Mapping[str, Any], cycles: Sequence[Cycle], classifier: Classifier, *, cuda: bool, thread: int | None = None
) -> Analysis:
    """Attribute every kernel of a trace.

    Args:
        trace: Kineto's Chrome trace.
        cycles: The captured cycles in their order, disjoint.
        classifier: Names to classes.
        cuda: Look at kernels; otherwise at operators.
        thread: System's number of the scheduler thread, to check that trace and hooks have one clock.

    Raises:
        TraceError: It is no such trace, has no kernels, or there is no cycle.
    """
    if not cycles:
        raise TraceError("no cycle was captured")
    if any(later.marks[0] < earlier.marks[-1] for earlier, later in pairwise(cycles)):
        raise TraceError("cycles overlap")
    events = _events(trace)
    base = _base(trace)
    work = _kernels(events, base) if cuda else _operators(events, base)
    if not work:
        if cuda:
            raise TraceError(
                "the trace has no kernel: CUPTI is missing, or another tool (Nsight Systems, DCGM profiling) holds it"
            )
        raise TraceError("the trace has no operator")
    result = Analysis(
        device="cuda" if cuda else "cpu", cycles=len(cycles), phases=[PhaseKernels() for _ in catalogue.PHASES]
    )
    _attribute(work, cycles, classifier, result)
    _measure(work, cycles, result, cuda=cuda)
    if cuda and thread is not None:
        _check_clock(events, base, cycles, thread, result)
    return result


# --- reading -------------------------------------------------------------------------------------------------
def _events(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise TraceError("the trace has no traceEvents")
    return [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]


def _base(trace: Mapping[str, Any]) -> int:
    base = trace.get("baseTimeNanoseconds", 0)
    if not isinstance(base, int):
        raise TraceError("baseTimeNanoseconds is no whole number")
    return base


def _span(event: Mapping[str, Any], base: int) -> tuple[int, int]:
    """Return begin and end; the trace has microseconds with three decimals."""
    try:
        start = base + round(float(event["ts"]) * 1000)
        return start, start + round(float(event["dur"]) * 1000)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"an event has no time: {event.get('name')}") from error


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _kernels(events: Iterable[dict[str, Any]], base: int) -> list[Work]:
    launches: dict[Any, int] = {}
    found: list[dict[str, Any]] = []
    for event in events:
        category = event.get("cat")
        if category in LAUNCHES:
            correlation = _arguments(event).get("correlation")
            if correlation is not None:
                start, _ = _span(event, base)
                # A runtime call and the driver call inside it can share a number: the outer one began first.
                launches[correlation] = min(start, launches.get(correlation, start))
        elif category in KERNELS:
            found.append(event)
    work = []
    for event in found:
        start, end = _span(event, base)
        arguments = _arguments(event)
        launch = launches.get(arguments.get("correlation"))
        work.append(Work(str(event.get("name")), start, end, launch, end - start, arguments.get("stream"), event))
    return work


def _operators(events: Iterable[dict[str, Any]], base: int) -> list[Work]:
    work = []
    for event in events:
        if event.get("cat") == OPERATORS:
            start, end = _span(event, base)
            work.append(Work(str(event.get("name")), start, end, start, end - start, event.get("tid"), event))
    # Operators of a thread are nested; an outer one comes first.
    work.sort(key=lambda one: (str(one.lane), one.start, -one.end))
    open_: list[Work] = []
    for one in work:
        while open_ and (open_[-1].lane != one.lane or open_[-1].end <= one.start):
            open_.pop()
        if open_:
            open_[-1].own -= one.end - one.start
        open_.append(one)
    return work


# --- attribution ---------------------------------------------------------------------------------------------
def _place_of(moment: int, cycles: Sequence[Cycle], begins: Sequence[int]) -> tuple[int, int] | None:
    """Return the number of the cycle and the phase at a moment, None between cycles."""
    index = bisect_right(begins, moment) - 1
    if index < 0 or moment >= cycles[index].marks[-1]:
        return None
    cycle = cycles[index]
    return index, cycle.phases[bisect_right(cycle.marks, moment) - 1]


def _attribute(work: Iterable[Work], cycles: Sequence[Cycle], classifier: Classifier, result: Analysis) -> None:
    begins = [cycle.marks[0] for cycle in cycles]
    names: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0])
    launching: set[int] = set()
    unclassified: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for one in work:
        result.total += one.own
        result.total_kernels += 1
        place = None if one.launch is None else _place_of(one.launch, cycles, begins)
        if place is None:
            result.outside += one.own
            result.outside_kernels += 1
            result.unlaunched += one.launch is None
            continue
        cycle, phase = place
        launching.add(cycle)
        kernel_class = classifier.match(one.name)
        if kernel_class is None:
            _count(unclassified[one.name], one.own)
            kernel_class = catalogue.UNCLASSIFIED
        part = result.phases[phase]
        part.kernels += 1
        part.classes[kernel_class] += one.own
        _count(names[phase, one.name], one.own)
    result.names, result.unclassified = dict(names), dict(unclassified)
    if len(launching) < len(cycles):
        result.problems.append(
            f"{len(cycles) - len(launching)} of {len(cycles)} cycles launched nothing: the clocks of profiler and "
            "hooks disagree, or events were lost"
        )


def _count(entry: list[int], nanoseconds: int) -> None:
    entry[0] += nanoseconds
    entry[1] += 1


def _measure(work: Sequence[Work], cycles: Sequence[Cycle], result: Analysis, *, cuda: bool) -> None:
    """Sum how long phases last, and how much of it the device is busy."""
    busy = _Busy(work)
    reached = _Reached(work, cycles) if cuda else None
    for cycle in cycles:
        boundaries = [reached.at(mark) for mark in cycle.marks] if reached is not None else list(cycle.marks)
        result.boundaries.append(boundaries)
        for phase, start, end in zip(cycle.phases, boundaries, boundaries[1:], strict=False):
            result.phases[phase].duration += end - start
            result.phases[phase].busy += busy.until(end) - busy.until(start)


class _Busy:
    """Time in which at least one kernel ran, whichever it was, up to any moment."""

    def __init__(self, work: Iterable[Work]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted((one.start, one.end) for one in work):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
        lengths = (end - start for start, end in zip(self._starts, self._ends, strict=True))
        self._before = [0, *accumulate(lengths)]

    def until(self, moment: int) -> int:
        index = bisect_right(self._starts, moment)
        if index == 0:
            return 0
        return self._before[index] - max(0, self._ends[index - 1] - moment)


class _Reached:
    """When the device passes a boundary: where an event recorded on the forward stream at that moment would lie.

    That is when everything launched there before is done, or at once when nothing is left to do.
    """

    def __init__(self, work: Sequence[Work], cycles: Sequence[Cycle]) -> None:
        begin, end = cycles[0].marks[0], cycles[-1].marks[-1]
        # One call that launches several kernels launches a graph. A graph with branches may show its kernels on streams
        # of its own, and the stream that it was launched on waits for all of them.
        by_launch = Counter(one.launch for one in work if one.launch is not None)
        by_stream: Counter[Any] = Counter()
        of_graphs: Counter[Any] = Counter()
        for one in work:
            if one.launch is not None and begin <= one.launch < end:
                (of_graphs if by_launch[one.launch] > 1 else by_stream)[one.lane] += one.own
        # Work of a cycle runs on one stream; copies of results run beside it.
        streams = (by_stream or of_graphs).most_common(1)
        stream = streams[0][0] if streams else None
        ours = sorted(
            (-1 if one.launch is None else one.launch, one.end)
            for one in work
            if one.lane == stream or (one.launch is not None and by_launch[one.launch] > 1)
        )
        self._launches = [launch for launch, _ in ours]
        self._ends = list(accumulate((end for _, end in ours), max))

    def at(self, mark: int) -> int:
        index = bisect_right(self._launches, mark - 1)
        return max(mark, self._ends[index - 1]) if index else mark


def _check_clock(
    events: Iterable[dict[str, Any]], base: int, cycles: Sequence[Cycle], thread: int, result: Analysis
) -> None:
    """The scheduler thread cannot cross a boundary inside a launch: where it seems to, the clocks disagree."""
    by_thread: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in LAUNCHES:
            by_thread[event.get("tid")].append(_span(event, base))
    # Where Kineto numbers threads in its own way, the one that launches most is the scheduler's.
    calls = sorted(by_thread.get(thread) or max(by_thread.values(), key=len, default=[]))
    starts = [start for start, _ in calls]
    marks = [mark for cycle in cycles for mark in cycle.marks]
    inside = 0
    for mark in marks:
        index = bisect_right(starts, mark - 1) - 1
        inside += index >= 0 and calls[index][1] > mark
    if inside > _STRADDLING_SHARE * len(marks):
        result.problems.append(
            f"{inside} of {len(marks)} boundaries lie inside a launch: the clocks of profiler and hooks disagree, and "
            "kernels near a boundary may be in the wrong phase"
        )


# --- the result ----------------------------------------------------------------------------------------------
def document(analysis: Analysis, classifier: Classifier) -> dict[str, Any]:
    """Return what goes into the result file: seconds and counts."""

    def ranked(entries: Iterable[tuple[Any, list[int]]]) -> list[tuple[Any, list[int]]]:
        return sorted(entries, key=lambda item: (-item[1][0], str(item[0])))

    return {
        "device": analysis.device,
        "cycles": analysis.cycles,
        "phases": {
            phase: {
                "seconds": part.duration / 1e9,
                "busy_seconds": part.busy / 1e9,
                "kernel_seconds": sum(part.classes.values()) / 1e9,
                "kernels": part.kernels,
                "classes": {name: part.classes[name] / 1e9 for name in catalogue.KERNEL_CLASSES if part.classes[name]},
            }
            for phase, part in zip(catalogue.PHASES, analysis.phases, strict=True)
        },
        "total_seconds": analysis.total / 1e9,
        "total_kernels": analysis.total_kernels,
        "outside_seconds": analysis.outside / 1e9,
        "outside_kernels": analysis.outside_kernels,
        "unlaunched_kernels": analysis.unlaunched,
        "top": [
            {
                "name": name[:_NAME],
                "phase": catalogue.PHASES[phase],
                "kernel_class": classifier(name),
                "seconds": seconds / 1e9,
                "count": count,
            }
            for (phase, name), (seconds, count) in ranked(analysis.names.items())[:TOP]
        ],
        "unclassified": [
            {"name": name[:_NAME], "seconds": seconds / 1e9, "count": count}
            for name, (seconds, count) in ranked(analysis.unclassified.items())[:UNCLASSIFIED_SHOWN]
        ],
        "problems": analysis.problems,
    }


def annotated(
    trace: Mapping[str, Any], cycles: Sequence[Cycle], analysis: Analysis, classifier: Classifier
) -> dict[str, Any]:
    """Return the trace with the class of each kernel, and the phases as tracks of their own, for Perfetto."""
    wanted = KERNELS if analysis.device == "cuda" else (OPERATORS,)
    events: list[Any] = []
    for event in trace["traceEvents"]:
        if isinstance(event, dict) and event.get("cat") in wanted:
            arguments = {**_arguments(event), "kernel_class": classifier(str(event.get("name")))}
            events.append({**event, "args": arguments})
        else:
            events.append(event)
    base = _base(trace)
    tracks: list[tuple[str, Sequence[Sequence[int]]]] = [("phases at launch", [cycle.marks for cycle in cycles])]
    if analysis.device == "cuda":
        tracks.append(("phases on the GPU", analysis.boundaries))
    for number, (title, rows) in enumerate(tracks, 1):
        identity = {"pid": "eagle-exporter", "tid": number}
        events.append({"ph": "M", "name": "thread_name", **identity, "args": {"name": title}})
        for cycle, marks in zip(cycles, rows, strict=True):
            for phase, start, end in zip(cycle.phases, marks, marks[1:], strict=False):
                events.append(
                    {
                        "ph": "X",
                        "cat": "eagle_phase",
                        "name": catalogue.PHASES[phase],
                        **identity,
                        "ts": (start - base) / 1000,
                        "dur": (end - start) / 1000,
                    }
                )
    return {**trace, "traceEvents": events}
