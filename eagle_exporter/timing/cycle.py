"""Decode cycles: boundaries become exclusive phases.

A cycle is a chain of boundaries (marks). The interval that a mark opens belongs to exactly one phase, so phases are
disjoint and sum to the cycle by construction. Hooks say "from here on it is this phase"; where SGLang enqueues
nothing between the end of one phase and the start of the next, both share one mark (events are not free).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from eagle_exporter import catalogue

if TYPE_CHECKING:
    from eagle_exporter.timing.budget import Budget
    from eagle_exporter.timing.clocks import Clock, Slot
    from eagle_exporter.timing.recorder import RankRecorder

DRAFT_STEPS, TARGET_VERIFY, DRAFT_EXTEND, VERIFY_OVERHEAD, KV_CACHE, OTHER = range(len(catalogue.PHASES))
TREE_BUILD, PREPARE, SAMPLE_ACCEPT = range(6, 9)
FIRST_DRAFT_STEP = 9
"""Interval kinds above the phases: parts of the verify overhead, then one per draft forward (step 1 first)."""

MAX_PENDING = 128
"""Cycles whose results are awaited or wait to be recorded; one more means that the oldest will never get its result."""

PARTS_EVERY = 16
"""Every how many timed cycles the parts of the verify overhead are measured too: they cost four events more."""


_NONE: list[int] = []
"""The marks of a cycle that is not timed; nobody adds to it."""
_LONGEST = 3600.0
"""Seconds; a longer cycle or gap is no reading."""
_RESOLUTION = 1e-6
"""Seconds by which CUDA's resolution can put a boundary before the one that it follows."""


def phase_of(kind: int) -> int:
    """Return the phase that an interval kind belongs to."""
    if kind < TREE_BUILD:
        return kind
    return VERIFY_OVERHEAD if kind < FIRST_DRAFT_STEP else DRAFT_STEPS


@dataclass
class Acceptance:
    """What SGLang says of a cycle once its result is on the host.

    Attributes:
        correct_drafts: Accepted draft tokens (without the bonus) of each live row.
        context_tokens: Prompt and output tokens of each live row before this cycle.
        wasted_rows: Rows whose request had finished or was retracted.
        excluded: A reason of `catalogue.EXCLUDED_REASONS` when the whole cycle stays out of every series, else None.
    """

    correct_drafts: Sequence[int] = ()
    context_tokens: Sequence[int] = ()
    wasted_rows: int = 0
    excluded: str | None = None


class CycleRecord:
    """One decode cycle or prefill batch, from its launch to the arrival of its result.

    Attributes:
        rows: Requests launched on this rank.
        num_steps: Draft steps in force, read from the verify input.
        num_draft_tokens: Tokens verified per request.
        kinds: Interval kind that each mark opens.
        timed: Times are taken.
        previous: Of a timed cycle the one before; None when an idle, prefill or empty iteration came between.
        draft_end: Number of the mark at which the draft steps end, 0 when there is none.
        step_seconds: Seconds of each draft forward from inside a CUDA graph, None when not read.
        host_bound: The device had finished the previous cycle before this one began; None when not known.
        profiled: A kernel capture on some rank of the server disturbs it: not timed.
        beside_prefill: Another rank prefills (DP attention); this one may take the prefill path with it.
        before: What the hooks keep of the batch as it was launched.
        given_up: Its result is not waited for any more.
    """

    # Most stay as they are, so they are the class's: a record is made in every cycle, between SGLang's launches.
    prefill = False
    profiled = False
    timed = False
    valid = True
    parts = False
    draft_end = 0
    host_bound: bool | None = None
    beside_prefill = False
    given_up = False
    before: Any = None
    slot: Slot | None = None
    previous: CycleRecord | None = None
    kinds: list[int] = _NONE
    acceptance: Acceptance | None = None
    step_seconds: Sequence[float] | None = None

    def __init__(self, rows: int, num_steps: int, num_draft_tokens: int, *, prefill: bool = False) -> None:
        self.rows = rows
        self.num_steps = num_steps
        self.num_draft_tokens = num_draft_tokens
        if prefill:
            self.prefill = True


@dataclass
class PhaseTimes:
    """Times of one timed cycle, all in seconds.

    Attributes:
        cycle: From the first to the last boundary.
        phases: One per `catalogue.PHASES`; float64 differences of offsets from the cycle's start.
        host: The same on the scheduler thread.
        parts: One per `catalogue.VERIFY_OVERHEAD_PARTS`, None in cycles where they were not measured.
        steps: One per draft forward; empty when not known.
        gap: From the end of the preceding cycle, None when there is none to speak of.
    """

    cycle: float
    phases: list[float]
    host: list[float]
    parts: list[float] | None = None
    steps: Sequence[float] = field(default_factory=list)
    gap: float | None = None


@dataclass
class Intervals:
    """What lies between the marks of one cycle.

    Attributes:
        total: Seconds from the first mark to the last.
        phases: Seconds, one per `catalogue.PHASES`; they sum to `total`.
        host: The same on the scheduler thread, nanoseconds.
        parts: Seconds, one per `catalogue.VERIFY_OVERHEAD_PARTS`.
        steps: Seconds, one per draft forward that had marks of its own.
    """

    total: float
    phases: list[float]
    host: list[int]
    parts: list[float]
    steps: list[float]


def split(offsets: Sequence[float], kinds: Sequence[int], moments: Sequence[int]) -> Intervals | None:
    """Return the times between marks by phase, by part of the verify overhead, and by draft step.

    A step back within the clock's resolution (half a microsecond) is levelled: a negative phase would let a counter
    fall, and Prometheus takes a falling counter for a restart.

    Args:
        offsets: Seconds from the first mark to each mark.
        kinds: Kind of the interval that each mark opens; the last mark opens none.
        moments: Host time of each mark, nanoseconds.

    Returns:
        None when an offset is not finite or falls by more than the resolution.
    """
    phases, host = [0.0] * len(catalogue.PHASES), [0] * len(catalogue.PHASES)
    parts = [0.0] * len(catalogue.VERIFY_OVERHEAD_PARTS)
    steps: list[float] = []
    start, moment = offsets[0], moments[0]
    # One pass, since this runs for each timed cycle.
    for i in range(1, len(offsets)):
        end, kind = offsets[i], kinds[i - 1]
        if not start <= end < _LONGEST:
            if not start - _RESOLUTION <= end < _LONGEST:
                return None
            end = start
        if kind >= TREE_BUILD:
            if kind < FIRST_DRAFT_STEP:
                parts[kind - TREE_BUILD] += end - start
                kind = VERIFY_OVERHEAD
            else:
                steps += [0.0] * (kind - FIRST_DRAFT_STEP + 1 - len(steps))
                steps[kind - FIRST_DRAFT_STEP] += end - start
                kind = DRAFT_STEPS
        phases[kind] += end - start
        then = moments[i]
        host[kind] += then - moment
        start, moment = end, then
    return Intervals(start - offsets[0], phases, host, parts, steps)


class CycleTimer:
    """Opens, marks and closes cycles, and hands them to the recorder in the order of their launch.

    Attributes:
        current: The timed cycle that is being launched; None most of the time, and then hooks do nothing.
        host_ns: Time spent in the timer in every cycle, nanoseconds; whoever accounts for it sets it back to 0.
        timed_ns: Time that only timed cycles take, nanoseconds, likewise.
        prefill_ns: Time that timing prefills takes, nanoseconds, likewise.
        graph_mean: Draft steps run inside one CUDA graph: a step is the mean over the draft forwards.
        profiled: A kernel capture runs: what begins now is counted, and not timed.
        last_opened: The decode cycle launched last, timed or not.
    """

    def __init__(self, clock: Clock, recorder: RankRecorder, budget: Budget) -> None:
        """Time with `clock`, record into `recorder`, as often as `budget` allows."""
        self.clock = clock
        self.recorder = recorder
        self.budget = budget
        self.current: CycleRecord | None = None
        self.host_ns = self.timed_ns = self.prefill_ns = 0
        self._timed_ns_before = 0
        self.graph_mean = False
        self.profiled = False
        self._pending: deque[CycleRecord] = deque()
        self.last_opened: CycleRecord | None = None
        self._consecutive = False
        self._timed_cycles = 0
        self._held: CycleRecord | None = None

    @property
    def waiting(self) -> bool:
        """Whether a cycle whose result is there waits for the device."""
        return bool(self._pending) and self._pending[0].acceptance is not None

    # --- launch ------------------------------------------------------------------------------------------
    def open(self, rows: int, num_steps: int, num_draft_tokens: int) -> CycleRecord:
        """Begin a decode cycle on the current stream.

        Args:
            rows: Requests in the batch on this rank.
            num_steps: Draft steps, until the verify input says otherwise.
            num_draft_tokens: Tokens verified per request, likewise.
        """
        begin = perf_counter_ns()
        record = CycleRecord(rows, num_steps, num_draft_tokens)
        previous = self.last_opened if self._consecutive else None
        self._consecutive = True
        self.last_opened = record
        pending = self._pending
        if len(pending) >= MAX_PENDING:
            self._lose_oldest()
        pending.append(record)
        opened = perf_counter_ns()
        self.host_ns += opened - begin
        budget = self.budget
        if self.profiled:
            record.profiled = True
        elif budget.countdown > 1:
            budget.countdown -= 1  # without a call: most cycles come this way
        elif budget.time_this_cycle():
            clock = self.clock
            if previous is not None and previous.slot is not None and clock.tells_host_bound:
                # Asked before anything of this cycle is enqueued: if the device is through, it waits for us. A
                # predecessor that failed may lack the mark of its end.
                record.host_bound = clock.done(previous.slot) if previous.valid else None
            self._start(record, OTHER)
            if record.timed:
                record.previous = previous
                record.parts = self._timed_cycles % PARTS_EVERY == 0
                self._timed_cycles += 1
            self.timed_ns += perf_counter_ns() - opened
        return record

    def open_prefill(self) -> CycleRecord:
        """Begin a prefill batch on the current stream: first the target's part."""
        begin = perf_counter_ns()
        record = CycleRecord(0, 0, 0, prefill=True)
        self.interrupt()
        if len(self._pending) >= MAX_PENDING:
            self._lose_oldest()
        self._pending.append(record)
        if self.budget.timing and not self.profiled:
            self._start(record, TARGET_VERIFY)
        self._timed_ns_before = self.timed_ns  # what its marks add is moved when it ends
        self.prefill_ns += perf_counter_ns() - begin
        return record

    def _lose_oldest(self) -> None:
        lost = self._pending.popleft()
        lost.given_up = True
        lost.previous = None
        self.recorder.drop("unmatched")
        self._release(lost)

    def _start(self, record: CycleRecord, kind: int) -> None:
        slot = self._marked_slot()
        if slot is None:
            self.recorder.drop("pool_exhausted")
            return
        record.slot = slot
        record.timed = True
        record.kinds = [kind]
        self.current = record

    def _marked_slot(self) -> Slot | None:
        slot = self.clock.acquire()
        if slot is not None:
            try:
                self.clock.mark(slot, perf_counter_ns())
            except BaseException:  # a slot without a mark can never be done
                self.clock.release(slot)
                raise
        return slot

    def mark(self, kind: int) -> None:
        """From here on the time of the current cycle belongs to `kind`. Does nothing without a timed cycle."""
        record = self.current
        if record is None:
            return
        slot = record.slot
        if slot is None:
            return
        # One reading for both: where the interval begins on the host, and where the cost of marking it begins.
        now = perf_counter_ns()
        clock = self.clock
        if slot.count >= clock.marks - 1:
            # More boundaries than a slot holds: its times would be cut short, so there are none.
            self.fail(record)
            return
        record.kinds.append(kind)
        clock.mark(slot, now)
        self.timed_ns += perf_counter_ns() - now

    def launch_verify(self) -> None:
        """The target model's forward is about to be launched.

        If the device has already passed the last mark it has run dry: it waits for the host in the middle of the cycle,
        as it does when something before the verify synchronises.
        """
        record = self.current
        if record is not None and record.slot is not None:
            if record.host_bound is False:
                begin = perf_counter_ns()
                record.host_bound = self.clock.done(record.slot)
                self.timed_ns += perf_counter_ns() - begin
            self.mark(TARGET_VERIFY)

    def launch_target(self) -> None:
        """The target model's forward over a prompt is about to be launched.

        The first interval of a prefill is the target's already; where something came between (an idle draft, which a
        prefilling rank runs for the others' sake under DP attention from 0.5.21 on), it begins here.
        """
        record = self.current
        if record is not None and record.prefill and record.kinds[-1] != TARGET_VERIFY:
            self.mark(TARGET_VERIFY)

    def relabel(self, kind: int) -> None:
        """Let the interval that is open now belong to `kind`: a boundary shared with the preceding phase."""
        record = self.current
        if record is not None:
            record.kinds[-1] = kind

    def close(self, record: CycleRecord) -> None:
        """End the launch of a cycle; its times are read later, when the device is through."""
        slot = record.slot
        if slot is None and (record.prefill or not self.budget.next_is_timed()):
            self.current = None
            return
        begin = perf_counter_ns()
        if slot is not None:
            self.clock.mark(slot, begin)
        else:
            # The gap before the next cycle, and whether it is host-bound, need the end of this one.
            record.slot = self._marked_slot()
        self.current = None
        self.timed_ns += perf_counter_ns() - begin
        if record.prefill:
            self.prefill_ns += self.timed_ns - self._timed_ns_before
            self.timed_ns = self._timed_ns_before

    def fail(self, record: CycleRecord | None = None) -> None:
        """Give up the times of a cycle in which a hook failed; what it accepted still counts."""
        record = record or self.current
        if record is not None:
            record.valid = False
        self.current = None

    def discard(self, record: CycleRecord) -> None:
        """Forget a cycle whose launch raised in SGLang: it will bring no result."""
        self.current = None
        record.given_up = True
        if record in self._pending:
            self._pending.remove(record)
            self._release(record)
        if self.last_opened is record:
            self.last_opened = None
        self.interrupt()

    def give_up(self) -> None:
        """Forget the cycles whose results have not come: they will pass unseen."""
        for record in self._pending:
            record.before = None  # it holds SGLang's requests
        while self._pending:
            self._lose_oldest()

    def interrupt(self) -> None:
        """The scheduler did something else: the next cycle does not follow the last one."""
        self._consecutive = False

    # --- results -----------------------------------------------------------------------------------------
    def complete(self, record: CycleRecord, acceptance: Acceptance) -> None:
        """Take the acceptance of a cycle; record it and all before it whose times are there."""
        self.take(record, acceptance)
        self.drain()

    def take(self, record: CycleRecord, acceptance: Acceptance) -> None:
        """Take the acceptance of a cycle; `drain` records it."""
        if not record.given_up:  # else it was dropped and counted then
            record.acceptance = acceptance

    def drain(self) -> None:
        """Record every finished cycle at the head of the queue. Never waits.

        Raises:
            Exception: Times could not be read; the cycle is recorded without them, and so are those behind it.
        """
        pending = self._pending
        finished: list[tuple[CycleRecord, Acceptance, PhaseTimes | None]] = []
        error: Exception | None = None
        try:
            while pending:
                record = pending[0]
                acceptance = record.acceptance
                if acceptance is None:
                    if not any(later.acceptance is not None for later in pending):
                        break
                    # Results come in the order of launches, so this one will not come any more.
                    self._lose_oldest()
                    continue
                slot = record.slot
                try:
                    complete = slot is None or self.clock.done(slot)
                except Exception as caught:  # this one's times are lost, and it must not hold up the others for ever
                    error, complete = caught, True
                    record.valid = False
                if not complete:
                    if len(pending) < 4:
                        break
                    # Do not hold up the others.
                    if record.timed:
                        self.recorder.drop("not_complete")
                    record.timed = False
                    self._release(record)
                pending.popleft()
                times = None
                if record.timed and acceptance.excluded is None:
                    begin = perf_counter_ns()
                    try:
                        times = self._times(record)
                    except Exception as caught:
                        error = caught
                    spent = perf_counter_ns() - begin
                    if record.prefill:
                        self.prefill_ns += spent
                    else:
                        self.timed_ns += spent
                if slot is not None or self._held is not None:  # most cycles have nothing to let go
                    try:
                        self._let_go(record, acceptance)
                    except Exception as caught:
                        error = caught
                if not record.prefill:
                    finished.append((record, acceptance, times))
                    if times is not None:
                        self.budget.cycle_took(times.cycle + (times.gap or 0.0))
                elif times is not None:
                    self.recorder.add_prefill(times)
        finally:
            if finished:
                self.recorder.add_cycles(finished)
        if error is not None:
            raise error

    def _let_go(self, record: CycleRecord, acceptance: Acceptance) -> None:
        record.previous = None
        # The end of a cycle is where the gap to the next one begins, so its slot is kept until the next is finished.
        held, self._held = self._held, None
        try:
            if held is not None:
                self._release(held)
        finally:
            if record.prefill or acceptance.excluded is not None:
                self._release(record)
            elif record.slot is not None:
                self._held = record

    def _times(self, record: CycleRecord) -> PhaseTimes | None:
        slot = record.slot
        if slot is None or not record.valid:
            if record.slot is not None:
                self.recorder.drop("hook_error")
            return None
        offsets = self.clock.offsets(slot)
        if len(offsets) < 2:
            self.recorder.drop("invalid_duration")
            return None
        found = split(offsets, record.kinds, slot.host)
        if found is None:
            self.recorder.drop("invalid_duration")
            return None
        steps: Sequence[float] = found.steps
        if not steps and self.graph_mean and record.num_steps > 1:
            steps = [found.phases[DRAFT_STEPS] / (record.num_steps - 1)] * (record.num_steps - 1)
        if record.step_seconds is not None:
            steps = list(record.step_seconds)
            if not all(0.0 <= seconds < _LONGEST for seconds in steps):
                self.recorder.drop("draft_step")
                steps = []
        gap = None
        previous = record.previous
        # A predecessor that failed may lack the mark of its end.
        if previous is not None and previous.slot is not None and previous.valid:
            gap = self.clock.between(previous.slot, slot)
            if not 0.0 <= gap < _LONGEST:
                self.recorder.drop("invalid_duration")
                gap = None
        return PhaseTimes(
            cycle=found.total,
            phases=found.phases,
            host=[nanoseconds * 1e-9 for nanoseconds in found.host],
            parts=found.parts if record.parts else None,
            steps=steps,
            gap=gap,
        )

    def _release(self, record: CycleRecord) -> None:
        if record.slot is not None:
            self.clock.release(record.slot)
            record.slot = None
