"""Every count equals what the models' construction dictates and what SGLang itself returns.

The real SGLang, its real scheduler process, both event loops, chain and tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eagle_exporter import catalogue
from eagle_exporter.demo import answers
from eagle_exporter.registry.reader import RankSnapshot
from tests.sglang.measured import (
    ALONE,
    TOGETHER,
    Configuration,
    Difference,
    Expected,
    Request,
    accept_histogram,
    expect,
    send_alone,
    send_together,
    settled,
    start,
)
from tests.sglang.runs import IN_DEPTH


@dataclass
class Run:
    """One set of requests, served.

    Attributes:
        requests: What was sent.
        served: SGLang's answers.
        counted: What the exporter counted meanwhile.
        expected: What it must have counted.
    """

    requests: list[Request]
    served: list[dict[str, Any]]
    counted: Difference
    expected: Expected


@dataclass
class Measured:
    """A server after its requests."""

    configuration: Configuration
    first: RankSnapshot
    alone: Run
    together: Run
    log: str


@pytest.fixture(scope="module", params=[run.configuration for run in IN_DEPTH], ids=str)
def measured(
    request: pytest.FixtureRequest, models: Path, sglang_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Measured]:
    configuration: Configuration = request.param
    directory = tmp_path_factory.mktemp(str(configuration))
    root = directory / "registry"
    with start(models, sglang_python, configuration, directory) as server:
        first = settled(root)
        served_alone = send_alone(server)
        middle = settled(root)
        served_together = send_together(server)
        last = settled(root)
        yield Measured(
            configuration,
            first,
            Run(ALONE, served_alone, Difference(first, middle), expect(ALONE, configuration)),
            Run(TOGETHER, served_together, Difference(middle, last), expect(TOGETHER, configuration)),
            server.log(),
        )


@pytest.fixture(params=["alone", "together"])
def run(request: pytest.FixtureRequest, measured: Measured) -> Run:
    chosen: Run = getattr(measured, request.param)
    return chosen


def test_nothing_is_counted_before_the_first_request(measured: Measured) -> None:
    families = {family.name: family for family in measured.first.families}
    for metric in catalogue.METRICS:
        family = families.get(metric.name)
        if family is None or metric.kind is not catalogue.Kind.COUNTER:
            continue
        if metric.name == "eagle_hook_host_seconds_total":
            continue
        assert {series.value for series in family.series} == {0.0}, metric.name


def test_every_hook_is_up_and_none_failed(measured: Measured, run: Run) -> None:
    rank = run.counted.after
    down = [hook for hook in catalogue.HOOKS if rank.value("eagle_hook_up", hook) != 1]
    assert down == []
    assert run.counted.total("eagle_hook_errors_total") == 0
    assert run.counted.by_label("eagle_cycles_dropped_total") == dict.fromkeys(catalogue.DROPPED_REASONS, 0)
    assert rank.value("eagle_timing_enabled", "on") == 1


def test_the_served_tokens_are_the_models(run: Run) -> None:
    for (prompt, count), answer in zip(run.requests, run.served, strict=True):
        assert answer["output_ids"] == answers.expected_tokens(prompt, count)


def test_drafts_are_those_of_the_construction_and_of_sglang(run: Run) -> None:
    assert run.counted("eagle_drafts_total") == run.expected.drafts
    assert run.expected.drafts == sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in run.served)


def test_offered_and_accepted_tokens_are_those_of_the_construction(run: Run) -> None:
    counted, expected = run.counted, run.expected
    assert counted("eagle_draft_tokens_total") == expected.draft_tokens
    assert counted("eagle_accepted_tokens_total") == expected.accepted
    assert counted("eagle_verified_tokens_total") == expected.accepted + expected.drafts


def test_accepted_tokens_are_those_that_sglang_reports(run: Run) -> None:
    histogram = accept_histogram(run.served, len(run.expected.accept_lengths))
    assert run.counted.buckets("eagle_accept_length_tokens") == [*histogram, 0]
    assert run.counted("eagle_accepted_tokens_total") == sum(
        accepted * count for accepted, count in enumerate(histogram)
    )


def test_every_accept_length_bucket_is_that_of_the_construction(run: Run) -> None:
    assert run.counted.buckets("eagle_accept_length_tokens") == [*run.expected.accept_lengths, 0]
    assert run.counted("eagle_accept_length_tokens") == run.expected.accepted + run.expected.drafts


def test_every_position_is_that_of_the_construction(measured: Measured, run: Run) -> None:
    positions = [str(position) for position in range(measured.configuration.num_steps)]
    accepted = [run.counted("eagle_accepted_tokens_per_pos_total", position) for position in positions]
    assert accepted == run.expected.accepted_per_position
    assert sum(accepted) == run.counted("eagle_accepted_tokens_total")
    for position in positions:
        assert run.counted("eagle_offered_tokens_per_pos_total", position) == run.expected.drafts


def test_output_tokens_are_those_that_were_returned(run: Run) -> None:
    returned = sum(len(answer["output_ids"]) for answer in run.served)
    assert run.counted("eagle_output_tokens_total") == returned == run.expected.output
    assert returned == sum(answer["meta_info"]["completion_tokens"] for answer in run.served)


def test_context_lengths_are_those_of_the_requests(run: Run) -> None:
    assert run.counted.by_label("eagle_context_drafts_total") == run.expected.context_drafts
    assert run.counted.by_label("eagle_context_accepted_tokens_total") == run.expected.context_accepted
    assert run.counted.total("eagle_batch_context_tokens_total") == run.expected.context_tokens


def test_batch_counters_sum_to_the_totals(run: Run) -> None:
    counted = run.counted
    assert counted.total("eagle_batch_drafts_total") == run.expected.drafts
    assert counted.total("eagle_batch_accepted_tokens_total") == run.expected.accepted
    assert counted.total("eagle_batch_cycles_total") == counted("eagle_cycles_total")
    assert counted.total("eagle_batch_timed_cycles_total") == counted("eagle_cycles_total")


def test_requests_one_at_a_time_have_one_draft_a_cycle(measured: Measured) -> None:
    counted = measured.alone.counted
    assert counted("eagle_cycles_total") == measured.alone.expected.drafts
    assert counted("eagle_batch_cycles_total", "1", "3") == measured.alone.expected.drafts


def test_requests_at_once_share_cycles(measured: Measured) -> None:
    """Otherwise the rows that end at different times would not be tested at all."""
    counted, expected = measured.together.counted, measured.together.expected
    assert counted("eagle_cycles_total") < expected.drafts / 2
    assert counted.total("eagle_batch_cycles_total", lambda labels: labels[0] != "1") > 0


def test_the_overlap_loop_verifies_one_row_too_many_of_each_request(measured: Measured, run: Run) -> None:
    """A request's end is known one iteration later. Those rows are no drafts, and a cycle of nothing else no cycle."""
    wasted = run.counted("eagle_wasted_rows_total")
    excluded = run.counted.by_label("eagle_cycles_excluded_total")
    if measured.configuration.overlap:
        assert wasted == run.expected.requests
        assert excluded.pop("no_live_row") >= 1
    else:
        assert wasted == 0
    assert set(excluded.values()) == {0}


def test_the_loop_is_the_one_that_was_asked_for(measured: Measured) -> None:
    family = measured.first.family("eagle_spec_config_info")
    assert family is not None
    values = dict(zip(family.labels, family.series[0].labels, strict=True))
    configuration = measured.configuration
    assert values["overlap"] == ("true" if configuration.overlap else "false")
    assert values["topk"] == str(configuration.topk)
    assert values["num_steps"] == str(configuration.num_steps)
    assert values["num_draft_tokens"] == str(configuration.num_draft_tokens)
    assert values["algorithm"] == "EAGLE3"
    assert values["sglang_version"]


# --- times -----------------------------------------------------------------------------------------------
def test_phases_sum_to_the_cycle(run: Run) -> None:
    """Over all cycles, and in two ways: the histograms, and the counters by batch size."""
    counted = run.counted
    cycle = counted("eagle_cycle_duration_seconds")
    by_phase = {phase: counted("eagle_phase_duration_seconds", phase) for phase in catalogue.PHASES}
    by_batch = {
        phase: sum(
            counted("eagle_batch_phase_seconds_total", *labels)
            for labels in counted.labels("eagle_batch_phase_seconds_total")
            if labels[2] == phase
        )
        for phase in catalogue.PHASES
    }
    assert cycle > 0
    assert sum(by_phase.values()) == pytest.approx(cycle, rel=1e-9)
    assert by_batch == pytest.approx(by_phase, rel=1e-9)
    assert sum(by_batch.values()) == pytest.approx(cycle, rel=1e-9)


def test_every_cycle_was_timed_in_every_phase(run: Run) -> None:
    cycles = run.counted("eagle_cycles_total")
    assert sum(run.counted.buckets("eagle_cycle_duration_seconds")) == cycles
    for phase in catalogue.PHASES:
        assert sum(run.counted.buckets("eagle_phase_duration_seconds", phase)) == cycles


def test_every_phase_takes_time_and_verify_most_of_it(run: Run) -> None:
    seconds = {phase: run.counted("eagle_phase_duration_seconds", phase) for phase in catalogue.PHASES}
    assert min(seconds.values()) > 0
    # The target has eight layers, the draft one, and it runs over more tokens.
    assert max(seconds, key=lambda phase: seconds[phase]) == "target_verify"
    # What nobody claims is small, or a hook sits in the wrong place.
    assert seconds["other"] < 0.2 * sum(seconds.values())


def test_each_draft_step_is_timed_within_the_draft(run: Run) -> None:
    cycles = run.counted("eagle_cycles_total")
    steps = run.counted.by_label("eagle_draft_step_seconds_total")
    assert set(steps) == {"1", "2"}
    assert run.counted.by_label("eagle_draft_steps_total") == {"1": cycles, "2": cycles}
    assert min(steps.values()) > 0
    assert sum(steps.values()) <= run.counted("eagle_phase_duration_seconds", "draft_steps") + 1e-9


def test_parts_of_the_overhead_lie_within_it(measured: Measured) -> None:
    parts = measured.alone.counted.by_label("eagle_verify_overhead_part_seconds_total")
    assert min(parts.values()) > 0
    sampled = measured.alone.counted("eagle_verify_overhead_sampled_cycles_total")
    cycles = measured.alone.counted("eagle_cycles_total")
    assert 1 <= sampled <= cycles / 16 + 1
    assert sum(parts.values()) < measured.alone.counted("eagle_phase_duration_seconds", "verify_overhead")


def test_gaps_lie_between_cycles_only(measured: Measured) -> None:
    """Each request alone begins after a prefill, so there is one gap less than cycles."""
    counted, expected = measured.alone.counted, measured.alone.expected
    decoding = sum(count > 1 for _, count in measured.alone.requests)
    gaps = sum(counted.buckets("eagle_cycle_gap_seconds"))
    assert gaps == expected.drafts - decoding
    assert counted("eagle_cycle_gap_seconds") == pytest.approx(counted.total("eagle_batch_gap_seconds_total"), rel=1e-9)


def test_prefills_are_timed_apart(measured: Measured) -> None:
    """Five requests alone; one of them needs a second chunk."""
    counted = measured.alone.counted
    for phase in catalogue.PREFILL_PHASES:
        observed = sum(counted.buckets("eagle_prefill_phase_duration_seconds", phase))
        assert observed == len(measured.alone.requests) + 1
        assert counted("eagle_prefill_phase_duration_seconds", phase) > 0


def test_host_time_equals_device_time_under_the_host_clock(run: Run) -> None:
    for phase in catalogue.PHASES:
        assert run.counted("eagle_phase_host_seconds_total", phase) == pytest.approx(
            run.counted("eagle_phase_duration_seconds", phase), rel=1e-6
        )
    assert run.counted.after.family("eagle_host_bound_cycles_total") is None


def test_allocation_and_hooks_have_their_own_host_time(run: Run) -> None:
    assert run.counted("eagle_kv_allocation_host_seconds_total") > 0
    spent = run.counted("eagle_hook_host_seconds_total")
    assert 0 < spent < run.counted("eagle_cycle_duration_seconds")


def test_the_server_says_which_rank_it_measures(measured: Measured) -> None:
    assert "eagle-exporter: measuring tested tp0 pp0 dp0 with the host clock, hooks of family v2 all up" in measured.log
    assert measured.first.labels["server"] == "tested"
    assert measured.first.labels["engine_type"] == "unified"
    assert measured.first.value("eagle_kv_pool_tokens") == 32768
    assert (measured.first.value("eagle_draft_memory_bytes") or 0) > 10_000
