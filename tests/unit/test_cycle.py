from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_exporter import catalogue
from eagle_exporter.timing import cycle as kinds
from eagle_exporter.timing.budget import Budget
from eagle_exporter.timing.cycle import (
    MAX_PENDING,
    PARTS_EVERY,
    Acceptance,
    CycleRecord,
    CycleTimer,
    phase_of,
    split,
)
from eagle_exporter.timing.recorder import RankRecorder
from tests.ranks import make_plan
from tests.unit.doubles import HandClock, Observed, histogram, make_recorder, value

ACCEPTED = Acceptance(correct_drafts=(2,), context_tokens=(100,))
NO_LIVE_ROW = Acceptance(wasted_rows=1, excluded="no_live_row")


class Bench:
    """A timer over a hand-moved clock and a real file."""

    def __init__(
        self,
        directory: Path,
        *,
        slots: int = 8,
        marks: int = 40,
        every: int = 1,
        tells_host_bound: bool = True,
        **plan: Any,
    ) -> None:
        self.clock = HandClock(slots, marks, tells_host_bound=tells_host_bound)
        self.recorder: RankRecorder = make_recorder(directory, make_plan(**plan))
        self.budget = Budget(every, now=lambda: self.clock.now)
        self.timer = CycleTimer(self.clock, self.recorder, self.budget)

    def launch(self, seconds: float = 0.010, *, rows: int = 1, num_steps: int = 3) -> CycleRecord:
        """One cycle, all of it the target's forward."""
        record = self.timer.open(rows, num_steps, num_steps + 1)
        self.timer.relabel(kinds.TARGET_VERIFY)
        self.clock.advance(seconds)
        self.timer.close(record)
        return record

    def cycle(self, seconds: float = 0.010, acceptance: Acceptance = ACCEPTED, **facts: int) -> None:
        """One cycle and its result, as the normal loop runs them."""
        self.timer.complete(self.launch(seconds, **facts), acceptance)

    def prefill(self, seconds: float = 0.020) -> None:
        record = self.timer.open_prefill()
        self.clock.advance(seconds)
        self.timer.close(record)
        self.timer.complete(record, Acceptance())

    def value(self, name: str, *labels: str) -> float:
        return value(self.recorder, name, *labels)

    def gaps(self) -> Observed:
        return histogram(self.recorder, "eagle_cycle_gap_seconds")

    def cycles(self) -> Observed:
        return histogram(self.recorder, "eagle_cycle_duration_seconds")

    def phase(self, name: str) -> float:
        return float(histogram(self.recorder, "eagle_phase_duration_seconds", name)[1])

    def dropped(self) -> dict[str, int]:
        return {
            reason: int(count)
            for reason in catalogue.DROPPED_REASONS
            if (count := self.value("eagle_cycles_dropped_total", reason))
        }


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# --- phases --------------------------------------------------------------------------------------------
def test_every_interval_belongs_to_the_phase_its_mark_opened(bench: Bench) -> None:
    timer, clock = bench.timer, bench.clock
    record = timer.open(1, 3, 4)
    clock.advance(0.001)
    for kind, seconds in (
        (kinds.KV_CACHE, 0.002),
        (kinds.OTHER, 0.004),
        (kinds.DRAFT_STEPS, 0.008),
        (kinds.VERIFY_OVERHEAD, 0.016),
        (kinds.TARGET_VERIFY, 0.032),
        (kinds.VERIFY_OVERHEAD, 0.064),
        (kinds.DRAFT_EXTEND, 0.128),
    ):
        timer.mark(kind)
        clock.advance(seconds)
    timer.close(record)
    timer.complete(record, ACCEPTED)
    measured = {phase: bench.phase(phase) for phase in catalogue.PHASES}
    assert measured == pytest.approx(
        {
            "draft_steps": 0.008,
            "target_verify": 0.032,
            "draft_extend": 0.128,
            "verify_overhead": 0.080,
            "kv_cache": 0.002,
            "other": 0.005,
        }
    )
    assert bench.cycles() == (1, pytest.approx(sum(measured.values()), rel=1e-12))


def test_a_shared_boundary_is_one_mark_that_changes_its_phase(bench: Bench) -> None:
    timer, clock = bench.timer, bench.clock
    record = timer.open(1, 3, 4)
    timer.relabel(kinds.KV_CACHE)
    clock.advance(0.003)
    timer.mark(kinds.OTHER)
    timer.relabel(kinds.DRAFT_STEPS)
    clock.advance(0.005)
    timer.close(record)
    assert record.slot is not None
    assert record.slot.count == 3
    timer.complete(record, ACCEPTED)
    assert bench.phase("kv_cache") == pytest.approx(0.003)
    assert bench.phase("draft_steps") == pytest.approx(0.005)
    assert bench.phase("other") == 0.0


ALL_KINDS = st.integers(0, kinds.FIRST_DRAFT_STEP + 5)


@given(st.lists(st.tuples(ALL_KINDS, st.floats(0, 10)), min_size=1, max_size=40))
def test_phases_sum_to_the_cycle_for_any_sequence_of_marks(intervals: list[tuple[int, float]]) -> None:
    offsets = [0.0]
    for _, seconds in intervals:
        offsets.append(offsets[-1] + seconds)
    moments = [round(offset * 1e9) for offset in offsets]
    found = split(offsets, [kind for kind, _ in intervals], moments)
    assert found is not None
    assert found.total == offsets[-1]
    assert math.fsum(found.phases) == pytest.approx(offsets[-1], rel=1e-12, abs=1e-12)
    assert sum(found.host) == moments[-1]
    assert all(seconds >= 0 for seconds in (*found.phases, *found.parts, *found.steps))
    assert sum(found.parts) <= found.phases[kinds.VERIFY_OVERHEAD] + 1e-12
    assert sum(found.steps) <= found.phases[kinds.DRAFT_STEPS] + 1e-12


def test_every_kind_of_interval_has_a_phase() -> None:
    assert [phase_of(kind) for kind in range(6)] == list(range(6))
    assert {phase_of(kind) for kind in (kinds.TREE_BUILD, kinds.PREPARE, kinds.SAMPLE_ACCEPT)} == {
        kinds.VERIFY_OVERHEAD
    }
    assert phase_of(kinds.FIRST_DRAFT_STEP) == phase_of(kinds.FIRST_DRAFT_STEP + 9) == kinds.DRAFT_STEPS


def test_draft_forwards_are_counted_step_by_step(bench: Bench) -> None:
    timer, clock = bench.timer, bench.clock
    record = timer.open(1, 3, 4)
    timer.relabel(kinds.FIRST_DRAFT_STEP)
    clock.advance(0.002)
    timer.mark(kinds.FIRST_DRAFT_STEP + 1)
    clock.advance(0.003)
    timer.mark(kinds.DRAFT_STEPS)
    clock.advance(0.001)
    timer.close(record)
    timer.complete(record, ACCEPTED)
    assert bench.value("eagle_draft_step_seconds_total", "1") == pytest.approx(0.002)
    assert bench.value("eagle_draft_step_seconds_total", "2") == pytest.approx(0.003)
    assert bench.value("eagle_draft_steps_total", "1") == bench.value("eagle_draft_steps_total", "2") == 1
    assert bench.phase("draft_steps") == pytest.approx(0.006)


def test_steps_inside_one_graph_share_its_time_evenly(bench: Bench) -> None:
    bench.timer.graph_mean = True
    record = bench.timer.open(1, 3, 4)
    bench.timer.relabel(kinds.DRAFT_STEPS)
    bench.clock.advance(0.008)
    bench.timer.close(record)
    bench.timer.complete(record, ACCEPTED)
    assert bench.value("eagle_draft_step_seconds_total", "1") == pytest.approx(0.004)
    assert bench.value("eagle_draft_step_seconds_total", "2") == pytest.approx(0.004)


@pytest.mark.parametrize("bad", [math.nan, -0.001, math.inf, 1e9])
def test_an_impossible_step_from_a_graph_is_dropped_and_the_cycle_kept(bench: Bench, bad: float) -> None:
    record = bench.launch()
    record.step_seconds = [0.001, bad]
    bench.timer.complete(record, ACCEPTED)
    assert bench.dropped() == {"draft_step": 1}
    assert bench.value("eagle_draft_step_seconds_total", "1") == 0
    assert bench.cycles()[0] == 1


def test_parts_of_the_overhead_are_measured_in_one_cycle_of_sixteen(bench: Bench) -> None:
    for _ in range(2 * PARTS_EVERY + 1):
        record = bench.timer.open(1, 3, 4)
        if record.parts:
            bench.timer.relabel(kinds.TREE_BUILD)
        bench.clock.advance(0.001)
        bench.timer.close(record)
        bench.timer.complete(record, ACCEPTED)
    assert bench.value("eagle_verify_overhead_sampled_cycles_total") == 3
    assert bench.value("eagle_verify_overhead_part_seconds_total", "tree_build") == pytest.approx(0.003)


def test_host_time_has_the_same_boundaries(bench: Bench) -> None:
    bench.cycle(0.010)
    assert bench.value("eagle_phase_host_seconds_total", "target_verify") == pytest.approx(0.010)
    assert bench.value("eagle_phase_host_seconds_total", "other") == 0


def test_a_cycle_with_more_boundaries_than_a_slot_holds_has_no_times(tmp_path: Path) -> None:
    bench = Bench(tmp_path, marks=4)
    record = bench.timer.open(1, 3, 4)
    for _ in range(6):
        bench.clock.advance(0.001)
        bench.timer.mark(kinds.TARGET_VERIFY)
    bench.timer.close(record)
    bench.timer.complete(record, ACCEPTED)
    assert bench.cycles()[0] == 0
    assert sum(bench.dropped().values()) == 1
    assert bench.value("eagle_cycles_total") == 1
    bench.cycle()
    assert bench.cycles()[0] == 1


# --- impossible readings -------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -0.5, 1e12])
def test_an_impossible_duration_is_dropped_and_the_acceptance_counts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    record = bench.launch()
    monkeypatch.setattr(bench.clock, "offsets", lambda _slot: [0.0, bad])
    bench.timer.complete(record, ACCEPTED)
    assert bench.dropped() == {"invalid_duration": 1}
    assert bench.cycles() == (0, 0.0)
    assert bench.value("eagle_accepted_tokens_total") == 2
    assert bench.value("eagle_batch_timed_cycles_total", "1", "3") == 0
    assert bench.value("eagle_batch_cycles_total", "1", "3") == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5])
def test_an_impossible_gap_is_dropped_and_the_cycle_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    bench.cycle()
    monkeypatch.setattr(bench.clock, "between", lambda _earlier, _later: bad)
    bench.cycle()
    assert bench.dropped() == {"invalid_duration": 1}
    assert bench.gaps() == (0, 0.0)
    assert bench.cycles()[0] == 2


def test_a_step_back_within_the_clock_resolution_lets_no_counter_fall(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A falling counter would be taken for a restart, and `increase()` would invent its whole value."""
    record = bench.timer.open(1, 3, 4)
    bench.timer.mark(kinds.KV_CACHE)
    bench.timer.mark(kinds.TARGET_VERIFY)
    bench.timer.close(record)
    monkeypatch.setattr(bench.clock, "offsets", lambda _slot: [0.0, 0.0010000, 0.0009995, 0.002])
    bench.timer.complete(record, ACCEPTED)
    seconds = [bench.value("eagle_batch_phase_seconds_total", "1", "3", phase) for phase in catalogue.PHASES]
    assert min(seconds) >= 0.0
    assert sum(seconds) == pytest.approx(bench.cycles()[1], rel=1e-12)
    assert bench.dropped() == {}


# --- gaps ----------------------------------------------------------------------------------------------
def test_the_gap_is_the_time_between_consecutive_cycles(bench: Bench) -> None:
    bench.cycle()
    bench.clock.advance(0.0007)
    bench.cycle()
    assert bench.gaps() == (1, pytest.approx(0.0007))
    assert bench.value("eagle_batch_gap_seconds_total", "1", "3") == pytest.approx(0.0007)
    assert bench.cycles() == (2, pytest.approx(0.020))


def test_an_empty_iteration_ends_the_run_of_consecutive_cycles(bench: Bench) -> None:
    bench.cycle()
    bench.timer.interrupt()
    bench.clock.advance(5.0)
    bench.cycle()
    assert bench.gaps()[0] == 0
    bench.clock.advance(0.001)
    bench.cycle()
    assert bench.gaps() == (1, pytest.approx(0.001))


def test_a_prefill_between_two_cycles_is_no_gap(bench: Bench) -> None:
    bench.cycle()
    bench.prefill()
    bench.cycle()
    assert bench.gaps()[0] == 0


def test_a_cycle_without_a_live_row_between_two_cycles_leaves_no_gap(bench: Bench) -> None:
    bench.cycle()
    bench.cycle(acceptance=NO_LIVE_ROW)
    bench.cycle()
    assert bench.gaps()[0] == 0
    assert bench.value("eagle_cycles_excluded_total", "no_live_row") == 1
    assert bench.value("eagle_wasted_rows_total") == 1


def test_a_cycle_without_a_live_row_is_in_no_other_series(bench: Bench) -> None:
    bench.cycle(acceptance=NO_LIVE_ROW)
    assert bench.cycles()[0] == 0
    assert bench.value("eagle_cycles_total") == 0
    assert bench.value("eagle_batch_cycles_total", "1", "3") == 0
    assert math.isnan(bench.value("eagle_last_cycle_timestamp_seconds"))


def test_an_aborted_cycle_leaves_no_trace_and_no_gap(bench: Bench) -> None:
    bench.cycle()
    record = bench.timer.open(1, 3, 4)
    bench.clock.advance(0.01)
    bench.timer.discard(record)
    assert bench.timer.current is None
    bench.cycle()
    assert bench.value("eagle_cycles_total") == 2
    assert bench.gaps()[0] == 0
    assert bench.dropped() == {}


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_with_sampling_the_gap_ends_at_the_cycle_right_before(tmp_path: Path, every: int) -> None:
    """Every cycle takes 10 ms and every gap 1 ms, so a gap measured from an earlier cycle would show."""
    bench = Bench(tmp_path, every=every)
    for _ in range(3 * every + 1):
        bench.cycle(0.010)
        bench.clock.advance(0.001)
    assert bench.cycles() == (4, pytest.approx(0.040))
    assert bench.value("eagle_cycles_total") == 3 * every + 1
    assert bench.value("eagle_batch_timed_cycles_total", "1", "3") == 4
    assert bench.gaps() == (3, pytest.approx(0.003))
    assert bench.clock.free >= bench.clock.slots - 1


def test_the_overlap_loop_has_the_same_gaps(bench: Bench) -> None:
    """The next cycle is launched before the result of the last one is looked at."""
    previous = bench.launch()
    for _ in range(5):
        bench.clock.advance(0.002)
        record = bench.launch()
        bench.timer.complete(previous, ACCEPTED)
        previous = record
    bench.timer.complete(previous, ACCEPTED)
    assert bench.gaps() == (5, pytest.approx(0.010))
    assert bench.cycles()[0] == 6


# --- host-bound ----------------------------------------------------------------------------------------
def test_a_cycle_is_host_bound_when_the_device_had_nothing_left_to_do(bench: Bench) -> None:
    first = bench.launch()
    bench.clock.executed = bench.clock.now - 0.001  # the device is behind
    second = bench.launch()
    bench.clock.executed = bench.clock.now  # and now it waits
    third = bench.launch()
    bench.clock.executed = math.inf
    for record in (first, second, third):
        bench.timer.complete(record, ACCEPTED)
    assert (first.host_bound, second.host_bound, third.host_bound) == (None, False, True)
    assert bench.value("eagle_host_bound_cycles_total") == 1


@pytest.mark.parametrize(("ran_dry", "host_bound"), [(False, False), (True, True)])
def test_a_cycle_is_host_bound_when_the_device_runs_dry_before_the_verify(
    bench: Bench, ran_dry: bool, host_bound: bool
) -> None:
    """Something before the verify waited for the device, so the device waits for the verify's launch."""
    first = bench.launch()
    bench.clock.executed = bench.clock.now - 0.001
    second = bench.timer.open(1, 3, 4)
    bench.clock.advance(0.002)
    bench.timer.mark(kinds.DRAFT_STEPS)
    bench.clock.advance(0.003)
    if ran_dry:
        bench.clock.executed = bench.clock.now
    bench.timer.launch_verify()
    bench.clock.advance(0.010)
    bench.timer.close(second)
    bench.clock.executed = math.inf
    for record in (first, second):
        bench.timer.complete(record, ACCEPTED)
    assert second.host_bound is host_bound
    assert bench.value("eagle_host_bound_cycles_total") == host_bound
    assert bench.phase("target_verify") == pytest.approx(0.010 + 0.010)


def test_the_gap_after_a_failed_cycle_is_not_known(bench: Bench) -> None:
    record = bench.launch()
    bench.timer.fail(record)
    bench.timer.complete(record, ACCEPTED)
    bench.clock.advance(0.5)
    bench.cycle()
    assert bench.gaps()[0] == 0
    assert bench.cycles()[0] == 1


def test_a_cycle_after_an_idle_moment_is_not_host_bound(bench: Bench) -> None:
    """The device was through because there was nothing to do."""
    bench.cycle()
    bench.timer.interrupt()
    bench.cycle()
    assert bench.value("eagle_host_bound_cycles_total") == 0


def test_a_clock_that_cannot_tell_never_counts_host_bound_cycles(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tells_host_bound=False)
    bench.cycle()
    bench.cycle()
    assert bench.value("eagle_host_bound_cycles_total") == 0


def test_the_untimed_predecessor_of_a_sampled_cycle_tells_whether_it_is_host_bound(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every=3)
    for _ in range(7):
        bench.cycle()
    assert bench.value("eagle_batch_timed_cycles_total", "1", "3") == 3
    assert bench.value("eagle_host_bound_cycles_total") == 2


# --- results that come late, or never ---------------------------------------------------------------------
def test_a_result_whose_device_time_is_not_there_waits_without_being_waited_for(bench: Bench) -> None:
    bench.clock.executed = bench.clock.now
    record = bench.launch()
    bench.timer.complete(record, ACCEPTED)
    assert bench.value("eagle_cycles_total") == 0
    bench.clock.executed = math.inf
    bench.timer.drain()
    assert bench.value("eagle_cycles_total") == 1
    assert bench.cycles()[0] == 1


def test_a_cycle_that_is_late_for_too_long_loses_its_times_and_keeps_its_acceptance(bench: Bench) -> None:
    bench.clock.executed = bench.clock.now
    for _ in range(4):
        bench.cycle()
    assert bench.dropped() == {"not_complete": 1}
    assert bench.value("eagle_cycles_total") == 1
    bench.clock.executed = math.inf
    bench.timer.drain()
    assert bench.value("eagle_cycles_total") == 4
    assert bench.cycles()[0] == 3


def test_a_cycle_whose_result_never_comes_is_counted_when_a_later_one_comes(bench: Bench) -> None:
    bench.launch()
    bench.cycle()
    assert bench.dropped() == {"unmatched": 1}
    assert bench.value("eagle_cycles_total") == 1
    assert bench.clock.free == bench.clock.slots - 1


def test_results_that_never_come_at_all_take_no_memory_for_ever(bench: Bench) -> None:
    """For example when the hook that sees the results could not be attached."""
    for _ in range(5 * MAX_PENDING):
        bench.launch()
    assert bench.dropped()["unmatched"] == 4 * MAX_PENDING
    bench.timer.complete(bench.launch(), ACCEPTED)
    assert bench.value("eagle_cycles_total") == 1
    # All but the one that the next gap needs.
    assert bench.clock.free >= bench.clock.slots - 1


def test_a_result_that_comes_after_its_cycle_was_given_up_disturbs_nobody(bench: Bench) -> None:
    first = bench.launch()
    second = bench.launch()
    third = bench.launch()
    bench.timer.complete(second, ACCEPTED)
    bench.timer.complete(first, ACCEPTED)
    bench.timer.complete(third, ACCEPTED)
    assert bench.dropped() == {"unmatched": 1}
    assert bench.value("eagle_cycles_total") == 2


def test_an_exhausted_pool_is_counted_and_recovers(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slots=2)
    records = [bench.launch() for _ in range(5)]
    assert bench.dropped() == {"pool_exhausted": 3}
    for record in records:
        bench.timer.complete(record, ACCEPTED)
    assert bench.value("eagle_cycles_total") == 5
    assert bench.value("eagle_batch_timed_cycles_total", "1", "3") == 2
    bench.cycle()
    assert bench.value("eagle_batch_timed_cycles_total", "1", "3") == 3
    assert bench.dropped() == {"pool_exhausted": 3}


def test_a_hook_error_costs_the_times_of_one_cycle_only(bench: Bench) -> None:
    record = bench.timer.open(1, 3, 4)
    bench.timer.fail()
    bench.timer.mark(kinds.TARGET_VERIFY)
    bench.timer.close(record)
    bench.timer.complete(record, ACCEPTED)
    assert bench.dropped() == {"hook_error": 1}
    assert bench.value("eagle_cycles_total") == 1
    assert bench.cycles()[0] == 0
    bench.cycle()
    assert bench.cycles()[0] == 1


# --- prefill, tiers, no speculation ----------------------------------------------------------------------
def test_a_prefill_is_in_its_own_metric_only(bench: Bench) -> None:
    record = bench.timer.open_prefill()
    bench.clock.advance(0.020)
    bench.timer.mark(kinds.DRAFT_EXTEND)
    bench.clock.advance(0.003)
    bench.timer.close(record)
    bench.timer.complete(record, Acceptance())
    name = "eagle_prefill_phase_duration_seconds"
    assert histogram(bench.recorder, name, "target_prefill") == (1, pytest.approx(0.020))
    assert histogram(bench.recorder, name, "draft_extend") == (1, pytest.approx(0.003))
    assert bench.cycles()[0] == 0
    assert bench.value("eagle_cycles_total") == 0


def test_a_health_check_prefill_is_in_no_series(bench: Bench) -> None:
    record = bench.timer.open_prefill()
    bench.clock.advance(0.02)
    bench.timer.close(record)
    bench.timer.complete(record, Acceptance(excluded="health_check"))
    assert histogram(bench.recorder, "eagle_prefill_phase_duration_seconds", "target_prefill") == (0, 0.0)
    assert bench.clock.free == bench.clock.slots


def test_the_step_count_can_change_from_cycle_to_cycle(tmp_path: Path) -> None:
    """Adaptive steps: the verify input says what was in force, after the cycle was opened."""
    bench = Bench(tmp_path, tiers=(1, 3))
    for num_steps in (3, 1, 1):
        record = bench.timer.open(2, 3, 4)
        record.num_steps, record.num_draft_tokens = num_steps, num_steps + 1
        bench.clock.advance(0.01)
        bench.timer.close(record)
        bench.timer.complete(record, Acceptance((num_steps, 0), (10, 10)))
    assert bench.value("eagle_batch_cycles_total", "2", "3") == 1
    assert bench.value("eagle_batch_cycles_total", "2", "1") == 2
    assert bench.value("eagle_offered_tokens_per_pos_total", "0") == 6
    assert bench.value("eagle_offered_tokens_per_pos_total", "1") == 2
    assert bench.value("eagle_draft_tokens_total") == 2 * 3 + 4 * 1
    assert bench.value("eagle_spec_num_steps") == 1
    assert bench.value("eagle_spec_num_draft_tokens") == 2


def test_a_zero_step_cycle_is_in_the_batch_counters_and_in_no_histogram(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tiers=(0, 3))
    bench.cycle(num_steps=0, acceptance=Acceptance((0,), (10,)))
    assert bench.cycles()[0] == 0
    assert bench.value("eagle_cycles_total") == 1
    assert bench.value("eagle_batch_timed_cycles_total", "1", "0") == 1
    assert bench.value("eagle_batch_phase_seconds_total", "1", "0", "target_verify") == pytest.approx(0.010)


# --- off, and the pool -----------------------------------------------------------------------------------
def test_while_timing_is_off_nothing_is_marked_and_acceptance_goes_on(bench: Bench) -> None:
    bench.cycle()
    bench.budget.set_state("fuse_cost")
    taken = bench.clock.free
    record = bench.launch()
    assert record.slot is None
    assert bench.clock.free == taken
    bench.timer.complete(record, ACCEPTED)
    assert bench.value("eagle_cycles_total") == 2
    assert bench.cycles()[0] == 1
    bench.budget.set_state("on")
    bench.clock.advance(7.0)
    bench.cycle()
    # The cycle before was not timed, its end is not known: no gap of seven seconds.
    assert bench.gaps()[0] == 0


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each look at the time cost a nanosecond, and nothing else."""
    monkeypatch.setattr(kinds, "perf_counter_ns", itertools.count().__next__)


@pytest.mark.usefixtures("steps")
def test_host_time_is_told_apart_by_what_it_was_spent_on(bench: Bench) -> None:
    timer = bench.timer

    def spent() -> tuple[int, int, int]:
        taken = timer.host_ns, timer.timed_ns, timer.prefill_ns
        timer.host_ns = timer.timed_ns = timer.prefill_ns = 0
        return taken

    record = timer.open(1, 3, 4)
    assert spent() == (1, 2, 0), "its own event is looked at too"
    timer.mark(kinds.TARGET_VERIFY)
    assert spent() == (0, 1, 0)
    timer.close(record)
    assert spent() == (0, 1, 0)
    timer.complete(record, ACCEPTED)
    assert spent() == (0, 1, 0)

    bench.budget.set_state("fuse_cost")
    record = timer.open(1, 3, 4)
    timer.close(record)
    timer.complete(record, ACCEPTED)
    assert spent() == (1, 0, 0), "it is not timed"

    bench.budget.set_state("on")
    timer.timed_ns = 40  # of a timed cycle before it
    record = timer.open_prefill()
    timer.mark(kinds.DRAFT_EXTEND)
    timer.close(record)
    timer.complete(record, Acceptance())
    assert spent() == (0, 40, 2 + 1 + 1 + 1)


EVENTS = st.lists(
    st.sampled_from(
        [
            "open",
            "mark",
            "relabel",
            "close",
            "complete",
            "complete_excluded",
            "complete_out_of_order",
            "prefill",
            "fail",
            "discard",
            "interrupt",
            "behind",
            "caught_up",
            "drain",
            "off",
            "on",
        ]
    ),
    max_size=80,
)


@given(EVENTS, st.integers(1, 4), st.integers(1, 6))
def test_no_sequence_of_events_loses_a_slot_or_invents_a_cycle(
    tmp_path_factory: pytest.TempPathFactory, events: list[str], every: int, slots: int
) -> None:
    bench = Bench(tmp_path_factory.mktemp("rank"), every=every, slots=slots)
    timer, clock = bench.timer, bench.clock
    running: CycleRecord | None = None
    launched: list[CycleRecord] = []
    finished_decodes = 0
    for event in events:
        clock.advance(0.001)
        if event in ("open", "prefill") and running is None:
            running = timer.open(1, 3, 4) if event == "open" else timer.open_prefill()
        elif event == "mark":
            timer.mark(kinds.TARGET_VERIFY)
        elif event == "relabel":
            timer.relabel(kinds.KV_CACHE)
        elif event == "close" and running is not None:
            timer.close(running)
            launched.append(running)
            running = None
        elif event == "discard" and running is not None:
            timer.discard(running)
            running = None
        elif event == "fail":
            timer.fail()
        elif event.startswith("complete") and launched:
            record = launched.pop(-1 if event == "complete_out_of_order" else 0)
            excluded = event == "complete_excluded"
            finished_decodes += not record.prefill and not excluded
            timer.complete(record, NO_LIVE_ROW if excluded else ACCEPTED)
        elif event == "interrupt":
            timer.interrupt()
        elif event == "behind":
            clock.executed = clock.now
        elif event == "caught_up":
            clock.executed = math.inf
            timer.drain()
        elif event == "drain":
            timer.drain()
        elif event in ("off", "on"):
            bench.budget.set_state(event)
    if running is not None:
        timer.discard(running)
    clock.executed = math.inf
    for record in launched:
        finished_decodes += not record.prefill
        timer.complete(record, ACCEPTED)
    # One more prefill ends the run: then nothing waits for the gap to a next cycle.
    bench.budget.set_state("on")
    bench.prefill()
    assert clock.free == clock.slots
    counted = int(bench.value("eagle_cycles_total"))
    assert counted <= finished_decodes
    assert finished_decodes - counted <= bench.dropped().get("unmatched", 0)
    assert bench.cycles()[0] <= counted
    assert bench.gaps()[0] <= bench.cycles()[0]
    phases = sum(bench.phase(phase) for phase in catalogue.PHASES)
    assert phases == pytest.approx(bench.cycles()[1], rel=1e-9, abs=1e-12)


def test_a_cycle_waits_for_the_device_only_once_its_result_is_there(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    seen = [bench.timer.waiting]
    record = bench.launch()
    seen.append(bench.timer.waiting)  # a result that has not come may never come
    bench.clock.executed = bench.clock.now - 1
    bench.timer.complete(record, ACCEPTED)
    seen.append(bench.timer.waiting)
    bench.clock.executed = math.inf
    bench.timer.drain()
    seen.append(bench.timer.waiting)
    assert seen == [False, False, True, False]


def test_a_cycle_about_which_the_device_cannot_be_asked_holds_nothing_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = bench.launch(), bench.launch()
    done, bad = bench.clock.done, first.slot

    def fails(slot: Any) -> bool:
        if slot is bad:
            raise RuntimeError("CUDA error 999")
        return done(slot)

    monkeypatch.setattr(bench.clock, "done", fails)
    bench.timer.take(first, ACCEPTED)
    bench.timer.take(second, ACCEPTED)
    with pytest.raises(RuntimeError, match="999"):
        bench.timer.drain()
    assert not bench.timer.waiting
    assert bench.value("eagle_cycles_total") == 2
    assert bench.value("eagle_cycles_dropped_total", "hook_error") == 1
    assert histogram(bench.recorder, "eagle_cycle_duration_seconds")[0] == 1
    bench.timer.drain()


def test_a_cycle_after_a_failed_one_is_not_said_to_be_host_bound(bench: Bench) -> None:
    """The failed one may lack the mark of its end, and its last mark tells nothing."""
    bench.cycle()
    failed = bench.launch()
    bench.timer.fail(failed)
    record = bench.timer.open(1, 3, 4)
    assert record.host_bound is None
