"""From counter samples to what happened at a server."""

from __future__ import annotations

import math

import pytest

from eagle_exporter import catalogue
from eagle_exporter.analysis.observations import (
    Samples,
    SeriesKey,
    Server,
    batch_size_bucket,
    difference,
    needed_metrics,
    observe,
    series_key,
)

PHASES = {
    "draft_steps": 0.001,
    "target_verify": 0.020,
    "draft_extend": 0.0005,
    "verify_overhead": 0.0003,
    "kv_cache": 0.0001,
    "other": 0.0001,
}


def rank_labels(server: str = "node-a:30000", tp: int = 0, dp: str = "") -> dict[str, str]:
    values = (server, "kimi", "unified", str(tp), "0", dp)
    return dict(zip(catalogue.COMMON_LABELS, values, strict=True))


def rank_samples(
    labels: dict[str, str],
    *,
    cycles: float = 1000.0,
    recording: bool = True,
    slower: float = 1.0,
    cell: tuple[str, str] = ("1", "3"),
    accepted: float = 1500.0,
) -> dict[SeriesKey, float]:
    own = {**labels, "batch_size": cell[0], "num_steps": cell[1]}
    samples = {
        series_key("eagle_batch_cycles_total", own): cycles,
        series_key("eagle_batch_timed_cycles_total", own): cycles,
        series_key("eagle_batch_gap_seconds_total", own): 0.0002 * cycles,
        series_key("eagle_rank_up", labels): 1.0,
    }
    for phase, seconds in PHASES.items():
        samples[series_key("eagle_batch_phase_seconds_total", {**own, "phase": phase})] = seconds * cycles * slower
    if recording:
        samples |= {
            series_key("eagle_drafts_total", labels): cycles,
            series_key("eagle_batch_drafts_total", own): cycles,
            series_key("eagle_batch_accepted_tokens_total", own): accepted,
            series_key("eagle_batch_context_tokens_total", own): 2000 * cycles,
        }
        for position, count in enumerate((0.8 * cycles, 0.5 * cycles, 0.2 * cycles)):
            at = {**labels, "position": str(position)}
            samples[series_key("eagle_offered_tokens_per_pos_total", at)] = cycles
            samples[series_key("eagle_accepted_tokens_per_pos_total", at)] = count
    return samples


def only(samples: Samples) -> Server:
    (server,) = observe(samples)
    return server


class TestRanks:
    @pytest.mark.parametrize(("state", "expected"), [("on", ("sample",)), ("off", ()), ("fuse_errors", ())])
    def test_hooks_count_as_down_only_while_the_rank_measures(self, state: str, expected: tuple[str, ...]) -> None:
        labels = rank_labels()
        samples = rank_samples(labels) | {
            series_key("eagle_hook_up", {**labels, "hook": "sample"}): 0.0,
            series_key("eagle_timing_enabled", {**labels, "reason": state}): 1.0,
        }
        assert only(samples).hooks_down == expected

    def test_times_of_tensor_parallel_ranks_are_not_added(self) -> None:
        samples: dict[SeriesKey, float] = {}
        for tp in range(8):
            samples |= rank_samples(rank_labels(tp=tp), recording=tp == 0)
        server = only(samples)
        assert (server.ranks, server.recording_ranks) == (8, 1)
        (cell,) = server.cells
        assert cell.cycles == 1000
        assert cell.cycle == pytest.approx(sum(PHASES.values()))
        assert cell.cost == pytest.approx(sum(PHASES.values()) + 0.0002)
        assert cell.tokens_per_cycle == pytest.approx(2.5)
        assert cell.mean_context == pytest.approx(2000)

    def test_replicas_are_pooled_with_numerator_and_denominator_of_the_same_ranks(self) -> None:
        samples = {
            **rank_samples(rank_labels(tp=0, dp="0"), cycles=1000, accepted=2000),
            **rank_samples(rank_labels(tp=1, dp="1"), cycles=3000, accepted=3000),
            **rank_samples(rank_labels(tp=2, dp="0"), cycles=9999, recording=False, slower=5),
        }
        (cell,) = only(samples).cells
        assert cell.cycles == 4000
        assert cell.tokens_per_cycle == pytest.approx(1 + 5000 / 4000)
        assert cell.cycle == pytest.approx(sum(PHASES.values()))
        assert cell.requests_per_cycle == pytest.approx(1.0)

    def test_servers_are_told_apart_by_the_label_server(self) -> None:
        samples = {**rank_samples(rank_labels("a")), **rank_samples(rank_labels("b"), cycles=7)}
        assert [server.name for server in observe(samples)] == ["a", "b"]
        assert observe(samples)[1].cells[0].cycles == 7

    def test_ranks_that_disagree_are_named_with_their_times(self) -> None:
        samples = {
            **rank_samples(rank_labels(tp=0)),
            **rank_samples(rank_labels(tp=5), recording=False, slower=1.3),
        }
        (sentence,) = only(samples).disagreements
        assert "tp5" in sentence
        assert "tp0" in sentence
        assert "28.80 ms" in sentence

    def test_ranks_within_the_spread_of_runs_are_not_named(self) -> None:
        samples = {
            **rank_samples(rank_labels(tp=0)),
            **rank_samples(rank_labels(tp=1), recording=False, slower=1.04),
        }
        assert only(samples).disagreements == ()

    def test_replicas_of_different_configurations_are_named(self) -> None:
        samples: dict[SeriesKey, float] = {}
        for dp, topk in (("0", "1"), ("1", "4")):
            labels = rank_labels(dp=dp)
            samples |= rank_samples(labels)
            samples[series_key("eagle_spec_config_info", {**labels, "config_id": f"c{topk}", "topk": topk})] = 1.0
        server = only(samples)
        assert any("topk (1, 4)" in sentence for sentence in server.disagreements)
        assert server.config_ids == ("c1", "c4")

    def test_a_rank_that_ended_is_counted(self) -> None:
        labels = rank_labels()
        samples = rank_samples(labels) | {series_key("eagle_rank_up", labels): 0.0}
        assert only(samples).ended_ranks == 1


def captured_samples(labels: dict[str, str], cycles: float, gemm: float = 0.004) -> dict[SeriesKey, float]:
    """What a rank exports after a capture; per cycle 4 ms of GEMMs in a verify of 5 ms."""
    verify = {**labels, "phase": "target_verify"}
    return {
        series_key("eagle_kernel_profiled_cycles_total", labels): cycles,
        series_key("eagle_kernel_seconds_total", {**verify, "kernel_class": "gemm"}): gemm * cycles,
        series_key("eagle_kernel_seconds_total", {**verify, "kernel_class": "norm"}): 0.0005 * cycles,
        series_key("eagle_kernel_busy_seconds_total", verify): (gemm + 0.0005) * cycles,
        series_key("eagle_kernel_phase_seconds_total", verify): 0.005 * cycles,
    }


class TestCaptures:
    def test_ranks_are_kept_apart_by_group_in_the_order_of_their_numbers(self) -> None:
        samples: dict[SeriesKey, float] = {}
        for tp in (10, 2, 0):
            samples |= rank_samples(rank_labels(tp=tp), recording=tp == 0) | captured_samples(rank_labels(tp=tp), 10)
        samples |= rank_samples(rank_labels(dp="1")) | captured_samples(rank_labels(dp="1"), 20)
        captured = only(samples).captured
        assert captured is not None
        assert sorted(tuple(part.ranks for part in group) for group in captured) == [
            (("tp0 pp0",), ("tp2 pp0",), ("tp10 pp0",)),
            (("tp0 pp0 dp1",),),
        ]
        for group in captured:
            for part in group:
                assert part.kernels("target_verify", "gemm") == pytest.approx(0.004)
                assert part.idle("target_verify") == pytest.approx(0.0005)

    def test_a_rank_that_was_never_captured_has_no_part_in_it(self) -> None:
        samples = captured_samples(rank_labels(tp=0), 10) | captured_samples(rank_labels(tp=1), 0)
        captured = only(samples).captured
        assert captured is not None
        assert [part.ranks for group in captured for part in group] == [("tp0 pp0",)]

    def test_no_capture_and_a_rank_that_knows_of_none_are_different(self) -> None:
        assert only(captured_samples(rank_labels(), 0)).captured == ()
        assert only(rank_samples(rank_labels())).captured is None

    def test_only_what_was_captured_in_between_is_in_a_difference(self) -> None:
        before, after = captured_samples(rank_labels(), 10, 0.9), captured_samples(rank_labels(), 25)
        after = {key: before[key] + value for key, value in after.items()}
        captured = only(difference(before, after)).captured
        assert captured is not None
        assert captured[0][0].cycles == 25
        assert captured[0][0].kernels("target_verify", "gemm") == pytest.approx(0.004)

    def test_the_age_is_that_of_the_rank(self) -> None:
        samples = captured_samples(rank_labels(tp=0), 10) | captured_samples(rank_labels(tp=1), 10)
        (server,) = observe(samples, {series_key("", rank_labels(tp=1))[1]: 60.0})
        assert server.captured is not None
        assert [part.age for part in server.captured[0]] == [None, 60.0]


class TestDifference:
    def test_counters_are_subtracted_and_gauges_are_kept(self) -> None:
        labels = rank_labels()
        pool = series_key("eagle_kv_pool_tokens", labels)
        before = rank_samples(labels, cycles=400, accepted=100) | {pool: 5.0}
        after = rank_samples(labels, cycles=1000, accepted=1300) | {pool: 7.0}
        server = only(difference(before, after))
        assert server.cells[0].cycles == 600
        assert server.cells[0].accepted == 1200
        assert server.kv_pool_tokens == 7.0

    def test_a_counter_that_fell_counts_from_zero(self) -> None:
        labels = rank_labels()
        result = difference(rank_samples(labels, cycles=900), rank_samples(labels, cycles=200))
        assert only(result).cells[0].cycles == 200

    def test_a_restarted_rank_counts_from_zero_even_where_it_passed_its_old_count(self) -> None:
        labels = rank_labels()
        start = series_key("eagle_rank_start_timestamp_seconds", labels)
        before = rank_samples(labels, cycles=900) | {start: 1.0}
        after = rank_samples(labels, cycles=1000) | {start: 2.0}
        assert only(difference(before, after)).cells[0].cycles == 1000

    def test_a_rank_that_is_gone_is_gone_and_a_new_one_counts_whole(self) -> None:
        result = difference(rank_samples(rank_labels("old")), rank_samples(rank_labels("new"), cycles=50))
        assert [server.name for server in observe(result)] == ["new"]
        assert observe(result)[0].cells[0].cycles == 50

    def test_a_configuration_that_was_replaced_stays_visible(self) -> None:
        labels = rank_labels()
        old = series_key("eagle_spec_config_info", {**labels, "config_id": "old", "topk": "4"})
        new = series_key("eagle_spec_config_info", {**labels, "config_id": "new", "topk": "1"})
        server = only(difference({old: 1.0}, rank_samples(labels) | {new: 1.0}))
        assert server.config_ids == ("new", "old")
        assert server.topk == 1


class TestCells:
    def test_a_zero_step_cycle_is_without_its_extend(self) -> None:
        (cell,) = only(rank_samples(rank_labels(), cell=("1", "0"))).cells
        assert cell.cycle == pytest.approx(sum(PHASES.values()) - PHASES["draft_extend"])

    def test_cells_are_ordered_by_batch_size_not_by_text(self) -> None:
        samples: dict[SeriesKey, float] = {}
        for batch_size in ("17-32", "2", "129+", "1", "9-16"):
            samples |= rank_samples(rank_labels(), cell=(batch_size, "3"))
        assert only(samples).batch_sizes() == ("1", "2", "9-16", "17-32", "129+")

    def test_a_cell_without_cycles_is_no_cell(self) -> None:
        samples = rank_samples(rank_labels()) | rank_samples(rank_labels(), cell=("2", "3"), cycles=0, accepted=0)
        assert only(samples).batch_sizes() == ("1",)

    def test_the_step_count_other_is_kept_without_a_number(self) -> None:
        (cell,) = only(rank_samples(rank_labels(), cell=("1", "other"))).cells
        assert cell.num_steps is None

    def test_positions_that_were_never_offered_have_no_rate(self) -> None:
        labels = rank_labels()
        samples = rank_samples(labels)
        samples[series_key("eagle_offered_tokens_per_pos_total", {**labels, "position": "3"})] = 0.0
        rates = [position.rate for position in only(samples).positions]
        assert rates[:3] == pytest.approx([0.8, 0.5, 0.2])
        assert rates[3] is None

    def test_host_bound_cycles_are_a_share_of_the_timed_ones_and_absent_where_not_exported(self) -> None:
        labels = rank_labels()
        samples = rank_samples(labels)
        assert only(samples).host_bound_share is None
        samples[series_key("eagle_host_bound_cycles_total", labels)] = 250.0
        assert only(samples).host_bound_share == pytest.approx(0.25)

    def test_unknown_metrics_series_without_a_server_and_nan_are_ignored(self) -> None:
        labels = rank_labels()
        samples = rank_samples(labels)
        expected = only(samples)
        samples[series_key("eagle_something_new_total", labels)] = 5.0
        samples[series_key("sglang:spec_accept_length", {"model_name": "kimi"})] = 2.0
        samples[series_key("eagle_kv_pool_tokens", labels)] = math.nan
        assert only(samples) == expected
        assert observe({}) == ()

    def test_labels_that_a_scrape_adds_do_not_matter(self) -> None:
        plain = rank_samples(rank_labels())
        target = {"instance": "10.0.0.7:10077", "job": "eagle"}
        scraped = {series_key(name, {**dict(labels), **target}): value for (name, labels), value in plain.items()}
        assert observe(scraped) == observe(plain)


class TestNames:
    def test_every_metric_that_is_read_is_in_the_catalogue(self) -> None:
        assert set(needed_metrics()) <= set(catalogue.BY_NAME)

    @pytest.mark.parametrize(
        ("text", "bucket"),
        [("1", "1"), ("3", "3-4"), ("8", "5-8"), ("128", "65-128"), ("129", "129+"), ("5-8", "5-8")],
    )
    def test_a_configured_batch_size_finds_its_bucket(self, text: str, bucket: str) -> None:
        assert batch_size_bucket(text) == bucket

    @pytest.mark.parametrize("text", ["", "0", "-1", "many", "1.5"])
    def test_what_is_no_batch_size_has_no_bucket(self, text: str) -> None:
        assert batch_size_bucket(text) is None

    def test_a_configured_baseline_is_found_under_the_bucket_of_its_batch_size(self) -> None:
        labels = rank_labels()
        samples = rank_samples(labels)
        samples[series_key("eagle_baseline_decode_seconds", {**labels, "batch_size": "8"})] = 0.0135
        assert only(samples).configured_baseline == {"5-8": 0.0135}
