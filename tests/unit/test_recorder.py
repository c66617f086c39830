from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_exporter import catalogue
from eagle_exporter.registry.layout import context_length_index
from eagle_exporter.registry.reader import RegistryReader
from eagle_exporter.timing.cycle import Acceptance, CycleRecord, PhaseTimes
from eagle_exporter.timing.recorder import RankRecorder
from tests.ranks import make_plan
from tests.unit.doubles import histogram, make_recorder, same_everywhere, value


def times(cycle: float = 0.006, gap: float | None = None) -> PhaseTimes:
    each = cycle / len(catalogue.PHASES)
    return PhaseTimes(cycle=cycle, phases=[each] * 6, host=[each] * 6, gap=gap)


@pytest.fixture
def recorder(tmp_path: Path) -> RankRecorder:
    return make_recorder(tmp_path)


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200_000)), min_size=1, max_size=20)


@given(st.lists(ROWS, max_size=8))
def test_every_acceptance_counter_is_what_its_definition_says(
    tmp_path_factory: pytest.TempPathFactory, cycles: list[list[tuple[int, int]]]
) -> None:
    recorder = make_recorder(tmp_path_factory.mktemp("rank"))
    for rows in cycles:
        acceptance = Acceptance([count for count, _ in rows], [context for _, context in rows])
        recorder.add_cycle(CycleRecord(len(rows), 3, 4), acceptance, None)
    rows = [row for cycle in cycles for row in cycle]
    accepted = [count for count, _ in rows]
    assert value(recorder, "eagle_cycles_total") == len(cycles)
    assert value(recorder, "eagle_drafts_total") == len(rows)
    assert value(recorder, "eagle_draft_tokens_total") == 3 * len(rows)
    assert value(recorder, "eagle_accepted_tokens_total") == sum(accepted)
    assert value(recorder, "eagle_verified_tokens_total") == sum(accepted) + len(rows)
    for position in range(3):
        offered = value(recorder, "eagle_offered_tokens_per_pos_total", str(position))
        assert offered == len(rows)
        assert value(recorder, "eagle_accepted_tokens_per_pos_total", str(position)) == sum(
            count > position for count in accepted
        )
    assert histogram(recorder, "eagle_accept_length_tokens") == (len(rows), sum(accepted) + len(rows))
    start = recorder.layout.slot("eagle_accept_length_tokens")
    assert start is not None
    assert list(recorder.values[start : start + 4]) == [accepted.count(count) for count in range(4)]
    for label_index, label in enumerate(catalogue.CONTEXT_LENGTHS):
        mine = [count for count, context in rows if context_length_index(context) == label_index]
        assert value(recorder, "eagle_context_drafts_total", label) == len(mine)
        assert value(recorder, "eagle_context_accepted_tokens_total", label) == sum(mine)
    batches = [(size, "3") for size in catalogue.BATCH_SIZES]
    for name, total in (
        ("eagle_batch_cycles_total", len(cycles)),
        ("eagle_batch_drafts_total", len(rows)),
        ("eagle_batch_accepted_tokens_total", sum(accepted)),
        ("eagle_batch_context_tokens_total", sum(context for _, context in rows)),
    ):
        assert sum(value(recorder, name, *batch) for batch in batches) == total


def test_an_excluded_cycle_changes_its_own_counter_and_nothing_else(recorder: RankRecorder) -> None:
    for reason in catalogue.EXCLUDED_REASONS:
        before = list(recorder.values)
        recorder.add_cycle(CycleRecord(4, 3, 4), Acceptance(excluded=reason), times())
        slot = recorder.layout.slot("eagle_cycles_excluded_total", reason)
        assert slot is not None
        assert recorder.values[slot] == 1
        before[slot] = 1
        assert same_everywhere(recorder, before)


def test_a_rank_that_does_not_record_acceptance_still_records_times(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, make_plan(tp_rank=3, recording=False))
    recorder.add_cycle(CycleRecord(2, 3, 4), Acceptance((1, 2), (9, 9)), times(gap=0.001))
    assert recorder.layout.slot("eagle_drafts_total") is None
    assert recorder.layout.slot("eagle_cycle_duration_seconds") is None
    assert value(recorder, "eagle_batch_phase_seconds_total", "2", "3", "target_verify") == pytest.approx(0.001)
    assert value(recorder, "eagle_batch_gap_seconds_total", "2", "3") == 0.001


@pytest.mark.parametrize("hook", catalogue.HOOKS)
def test_any_hook_can_be_missing_and_the_rest_is_recorded(tmp_path: Path, hook: str) -> None:
    recorder = make_recorder(tmp_path, make_plan(hooks_down=(hook,)))
    recorder.add_cycle(CycleRecord(2, 3, 4), Acceptance((1, 2), (9, 9)), times(gap=0.001))
    recorder.add_prefill(times())
    recorder.add_output_tokens(5)
    recorder.set_running_requests(2)
    recorder.add_kv_allocation(0.1)
    recorder.commit()
    for metric in catalogue.METRICS:
        present = any(family.metric is metric for family in recorder.layout.families)
        if hook in metric.hooks:
            assert not present, f"{metric.name} is shown although {hook} is down"
    for phase, hooks in catalogue.PHASE_HOOKS.items():
        slot = recorder.layout.slot("eagle_batch_phase_seconds_total", "2", "3", phase)
        if hook in hooks:
            assert slot is None, f"{phase} would hold other work too"


def test_what_a_rank_does_not_have_is_never_published(tmp_path: Path) -> None:
    """Missing series share one spare slot; it must stay outside the file."""
    directory = tmp_path / "server"
    directory.mkdir()
    recorder = make_recorder(directory, make_plan(recording=False))
    recorder.add_output_tokens(12345)
    recorder.commit()
    (rank,) = RegistryReader(tmp_path).read().ranks
    values = [series.value for family in rank.families for series in family.series]
    assert 12345 not in values


def test_a_step_count_not_known_at_attach_appears_under_other_on_first_use(recorder: RankRecorder) -> None:
    assert math.isnan(value(recorder, "eagle_batch_cycles_total", "1", "other"))
    recorder.add_cycle(CycleRecord(1, 9, 10), Acceptance((9,), (5,)), times())
    assert value(recorder, "eagle_batch_cycles_total", "1", "other") == 1
    assert value(recorder, "eagle_batch_phase_seconds_total", "1", "other", "other") == pytest.approx(0.001)
    assert math.isnan(value(recorder, "eagle_batch_cycles_total", "2", "other"))
    # Beyond the largest known tier there is no position and no bucket but +Inf.
    assert histogram(recorder, "eagle_accept_length_tokens") == (1, 10)
    assert value(recorder, "eagle_accepted_tokens_per_pos_total", "2") == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -0.01, 1e9])
def test_an_impossible_prefill_time_is_counted_and_not_observed(recorder: RankRecorder, bad: float) -> None:
    recorder.add_prefill(PhaseTimes(cycle=0.1, phases=[0.0, bad, 0.0, 0.0, 0.0, 0.0], host=[0.0] * 6))
    assert value(recorder, "eagle_cycles_dropped_total", "invalid_duration") == 1
    assert histogram(recorder, "eagle_prefill_phase_duration_seconds", "target_prefill") == (0, 0.0)


def test_a_gauge_that_is_not_finite_is_absent(recorder: RankRecorder) -> None:
    recorder.set_gauge("eagle_kv_pool_tokens", 5.0)
    assert value(recorder, "eagle_kv_pool_tokens") == 5.0
    recorder.set_gauge("eagle_kv_pool_tokens", math.inf)
    assert math.isnan(value(recorder, "eagle_kv_pool_tokens"))


def test_the_timing_state_is_a_set_of_which_one_is_one(recorder: RankRecorder) -> None:
    for state in catalogue.TIMING_STATES:
        recorder.set_state(state)
        shown = {name: value(recorder, "eagle_timing_enabled", name) for name in catalogue.TIMING_STATES}
        assert shown == {name: float(name == state) for name in catalogue.TIMING_STATES}


def test_the_start_shows_every_hook_and_the_start_time(recorder: RankRecorder) -> None:
    recorder.start({hook: hook != "sample" for hook in catalogue.HOOKS}, "on")
    assert value(recorder, "eagle_hook_up", "sample") == 0
    assert value(recorder, "eagle_hook_up", "cycle") == 1
    assert value(recorder, "eagle_rank_start_timestamp_seconds") > 1.7e9


def test_an_observation_lies_in_the_bucket_whose_bound_it_does_not_exceed(recorder: RankRecorder) -> None:
    start = recorder.layout.slot("eagle_cycle_duration_seconds")
    assert start is not None
    bounds = catalogue.DURATION_BUCKETS
    for i, bound in enumerate(bounds):
        recorder.add_cycle(CycleRecord(1, 3, 4), Acceptance((0,), (1,)), times(bound))
        assert recorder.values[start + i] == 1
    recorder.add_cycle(CycleRecord(1, 3, 4), Acceptance((0,), (1,)), times(11.0))
    assert recorder.values[start + len(bounds)] == 1


def test_running_requests_say_when_they_changed(recorder: RankRecorder) -> None:
    assert recorder.set_running_requests(0)
    assert not recorder.set_running_requests(0)
    assert recorder.set_running_requests(3)
    assert value(recorder, "eagle_running_requests") == 3
