"""The advice: its sentences and numbers, and that nothing that is not known is made up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_exporter import catalogue
from eagle_exporter.analysis.baseline import (
    Baseline,
    BaselineError,
    BaselineStep,
    baseline_step,
    differences,
    from_json,
    measured_baseline,
    to_json,
)
from eagle_exporter.analysis.kernels import Captured
from eagle_exporter.analysis.observations import Cell, Position, Server
from eagle_exporter.analysis.report import Advice, advise, to_text
from eagle_exporter.analysis.report import to_json as advice_json

property_test = settings(deadline=None)  # a busy machine is no failure

PHASES = {
    "draft_steps": 0.00087,
    "target_verify": 0.0287,
    "draft_extend": 0.00029,
    "verify_overhead": 0.0003,
    "kv_cache": 0.0001,
    "other": 0.0001,
}
RATES = (0.54, 0.29, 0.16, 0.085, 0.046)


def make_cell(batch_size: str = "1", num_steps: int | None = 5, *, scale: float = 1.0, cycles: float = 5000.0) -> Cell:
    speculating = num_steps != 0
    return Cell(
        batch_size=batch_size,
        num_steps=num_steps,
        cycles=cycles,
        timed_cycles=cycles,
        phase_seconds={phase: seconds * cycles * scale for phase, seconds in PHASES.items()},
        gap_seconds=0.0002 * cycles,
        drafts=cycles,
        accepted=cycles * sum(RATES[: num_steps or 0]) if speculating else 0.0,
        context_tokens=cycles * 2300,
    )


def make_server(*cells: Cell, **changes: object) -> Server:
    server = Server(
        name="node-a:30000",
        model_name="Kimi-K2.5",
        cells=cells or (make_cell(),),
        positions=tuple(Position(5000, 5000 * rate) for rate in RATES),
        ranks=8,
        recording_ranks=1,
        config={"topk": "1", "algorithm": "EAGLE3", "config_id": "1a2b3c4d"},
        config_ids=("1a2b3c4d",),
        facts={"gpu": "RTX PRO 6000", "nccl_proto": "LL", "tp_size": "8"},
        num_steps=(5,),
        num_draft_tokens=(6,),
        kv_pool_tokens=900_000,
        draft_memory_bytes=5.2e9 / 8,
        configured_baseline={"1": 0.0111},
        clock="cuda_event",
        host_bound_share=0.01,
    )
    return replace(server, **changes)  # type: ignore[arg-type]


def sentences(advice: Advice) -> str:
    document = advice_json(advice)
    parts = [*document["sentences"], *document["notes"]]
    for batch in document["batches"]:
        parts += [*batch["sentences"], *batch["notes"]]
    return "\n".join(parts)


def check_output(advice: Advice) -> None:
    """Every output is valid: JSON without NaN, text within 80 columns."""
    json.dumps(advice_json(advice), allow_nan=False)
    text = to_text(advice)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("nan", "None", "inf"):
        assert word not in text.replace("information", "").split()


class TestWhatItSays:
    def test_the_phases_with_time_and_share_the_gap_and_the_verdict(self) -> None:
        text = to_text(advise(make_server()))
        assert "target_verify       28.70 ms   94.5%" in text
        assert "gap, outside it      0.20 ms" in text
        assert "Speculation does not pay off: 0.77 times the speed" in text
        assert "1% of cycles host-bound" in text

    def test_a_json_object_has_the_same_numbers(self) -> None:
        document = advice_json(advise(make_server()))
        (batch,) = document["batches"]
        assert batch["phases"]["target_verify"]["seconds"] == pytest.approx(0.0287)
        assert sum(phase["share"] for phase in batch["phases"].values()) == pytest.approx(1.0)
        assert batch["speedup"] == pytest.approx(0.0111 * (1 + sum(RATES)) / (sum(PHASES.values()) + 0.0002))
        assert batch["baseline"]["source"] == "configured"
        assert batch["best"]["num_steps"] < 5

    def test_what_speculation_costs_outside_the_cycle(self) -> None:
        saved = Baseline({"1": BaselineStep(0.0111)}, kv_pool_tokens=1_000_000)
        advice = advise(make_server(), saved)
        assert advice.kv_pool_change == pytest.approx(-0.1)
        assert "0.61 GiB on each rank" in sentences(advice)
        assert "900,000 tokens, 1,000,000 without speculation (-10.0%)" in sentences(advice)

    def test_the_batch_size_above_which_to_switch_it_off(self) -> None:
        server = make_server(
            make_cell("1"),
            make_cell("5-8"),
            make_cell("17-32"),
            configured_baseline={"1": 0.020, "5-8": 0.016, "17-32": 0.009},
        )
        advice = advise(server)
        assert advice.limit is not None
        assert (advice.limit.pays_up_to, advice.limit.stops_at) == ("5-8", "17-32")
        assert "Switch speculation off above batch size 5-8" in sentences(advice)
        assert "counted over all batch sizes" in sentences(advice)

    def test_about_even_is_not_called_a_gain(self) -> None:
        server = make_server(configured_baseline={"1": (sum(PHASES.values()) + 0.0002) / (1 + sum(RATES))})
        assert "about breaks even: 1.00 times" in sentences(advise(server))

    def test_a_break_even_that_no_acceptance_reaches_is_said(self) -> None:
        text = sentences(advise(make_server(configured_baseline={"1": 0.003})))
        assert "more than 5 steps can give" in text

    def test_an_extrapolation_that_promises_more_is_marked(self) -> None:
        cells = replace(make_cell(num_steps=2), accepted=5000 * 1.8)
        server = make_server(
            cells,
            positions=(Position(5000, 4750), Position(5000, 4250)),
            configured_baseline={"1": 0.0285},
        )
        assert "extrapolated, 3 steps give" in sentences(advise(server))


def captured(allreduce: str = "allreduce_nccl") -> Captured:
    """Ten cycles in which 61 % of verify is all-reduce."""
    return Captured(
        cycles=10,
        ranks=("tp0 pp0",),
        kernel_seconds={("target_verify", allreduce): 0.183, ("target_verify", "gemm"): 0.102},
        busy_seconds={"target_verify": 0.285},
        phase_seconds={"target_verify": 0.300},
        age=7200.0,
    )


class TestInsideVerify:
    def test_what_verify_consists_of_and_what_follows(self) -> None:
        advice = advise(make_server(captured=((captured(),),), facts={}))
        text = to_text(advice)
        assert "Inside verify: 10 captured cycles of tp0 pp0, the last 2 h ago; 30.00 ms" in text
        assert "allreduce_nccl      18.30 ms   61.0%  ##################" in text
        assert "idle                 1.50 ms    5.0%" in text
        assert "61% of verify is all-reduce by NCCL's own kernels" in " ".join(text.split())
        assert "try NCCL_PROTO=LL" in text
        check_output(advice)

    def test_the_settings_that_are_in_force_are_respected(self) -> None:
        advice = advise(make_server(captured=((captured(),),)))
        assert "NCCL_PROTO=LL is set already" in advice.inside[0]

    def test_all_reduce_of_other_kernels_suggests_no_setting(self) -> None:
        advice = advise(make_server(captured=((captured("allreduce_custom"),),), facts={}))
        assert "change nothing about those" in advice.inside[0]
        assert "try NCCL" not in to_text(advice)

    def test_idle_time_is_judged_by_the_shortest_ordinary_verify(self) -> None:
        half = replace(
            captured("gemm"), kernel_seconds={("target_verify", "gemm"): 0.15}, busy_seconds={"target_verify": 0.15}
        )
        assert "an ordinary verify takes 28.70 ms or more" in advise(make_server(captured=((half,),))).inside[0]
        cells = (make_cell("1", scale=0.55), make_cell("9-16"))
        assert advise(make_server(*cells, captured=((half,),))).inside == ()

    def test_json_has_the_same_numbers(self) -> None:
        advice = advise(make_server(captured=((captured(),), (captured(),))))
        document = advice_json(advice)["captured"]
        assert (document["cycles"], document["age_seconds"]) == (20, 7200.0)
        verify = document["phases"]["target_verify"]
        assert verify["seconds"] == pytest.approx(sum(verify["kernel_classes"].values()) + verify["idle_seconds"])
        assert document["sentences"] == list(advice.inside)

    def test_without_a_capture_one_is_recommended_where_verify_is_what_counts(self) -> None:
        assert "'eagle-exporter profile' captures some" in sentences(advise(make_server(captured=())))
        assert advice_json(advise(make_server(captured=())))["captured"] is None
        cheap = replace(make_cell(), phase_seconds={**make_cell().phase_seconds, "target_verify": 1.0})
        for server in (
            make_server(captured=((captured(),),)),
            make_server(),  # an exporter that knows no captures
            make_server(cheap, captured=()),
            replace(make_server(captured=()), cells=()),
        ):
            assert "eagle-exporter profile" not in sentences(advise(server))

    def test_operators_of_a_cpu_are_shown_and_no_advice_about_a_gpu_is_given(self) -> None:
        advice = advise(make_server(captured=((captured(),),), clock="host"))
        assert "Inside verify: operators on the CPU, 10 captured" in to_text(advice)
        assert "allreduce_nccl      18.30 ms" in to_text(advice)
        assert advice.inside == ()
        check_output(advice)

    def test_a_capture_that_saw_no_verify_shows_nothing(self) -> None:
        advice = advise(make_server(captured=((replace(captured(), phase_seconds={}),),)))
        assert "Inside verify" not in to_text(advice)
        check_output(advice)


class TestWhatItDoesNotKnow:
    def test_no_traffic(self) -> None:
        advice = advise(replace(make_server(), cells=(), positions=()))
        assert not advice.has_traffic
        assert "no decode cycle ran" in sentences(advice)
        check_output(advice)

    def test_no_rank_that_records(self) -> None:
        advice = advise(replace(make_server(), cells=(), positions=(), recording_ranks=0, hooks_down=("accept",)))
        assert "no rank counts acceptance" in sentences(advice)
        assert "accept" in sentences(advice)

    def test_no_baseline_names_no_best_step_count_and_says_how_to_get_one(self) -> None:
        advice = advise(make_server(configured_baseline={}))
        assert advice.batches[0].answer is not None
        assert advice.batches[0].answer.best is None
        text = sentences(advice)
        assert "No best step count is named" in text
        assert "--save-baseline FILE" in text
        assert "there is no baseline at this batch size" in text
        check_output(advice)

    def test_a_replay_is_told_how_it_gets_a_baseline_and_not_to_run_sglang(self) -> None:
        advice = advise(make_server(configured_baseline={}, model_name="replay:llama-3-8b-shape"))
        text = sentences(advice)
        assert "start it again with EAGLE_EXPORTER_BASELINE_DECODE_SECONDS" in text
        assert "run SGLang once" not in text
        check_output(advice)

    @pytest.mark.parametrize("model", ["Kimi-K2.5", "replay:llama-3-8b-shape"])
    def test_what_a_missing_baseline_leaves_open_is_said_once_for_all_batch_sizes_at_the_end(self, model: str) -> None:
        cells = [make_cell(size) for size in ("1", "2", "3-4", "5-8")]
        advice = advise(make_server(*cells, configured_baseline={}, model_name=model))
        text = " ".join(to_text(advice).split())
        assert text.count("No best step count is named") == 1
        assert text.count("EAGLE_EXPORTER_BASELINE_DECODE_SECONDS") == 1
        assert "No best step count is named at batch size 1, 2, 3-4 and 5-8:" in advice.notes[-1]
        assert text.rindex("Keep in mind") < text.index("No best step count is named")

    def test_only_the_batch_sizes_without_a_baseline_are_named(self) -> None:
        advice = advise(make_server(make_cell("1"), make_cell("2"), configured_baseline={"1": 0.0111}))
        assert "No best step count is named at batch size 2:" in advice.notes[-1]

    def test_the_legend_of_x_is_there_only_where_an_x_follows(self) -> None:
        with_baseline, without = advise(make_server()), advise(make_server(configured_baseline={}))
        legend = "(x: times the speed without speculation)"
        assert legend in to_text(with_baseline)
        assert legend not in to_text(without)
        assert "What would change it:" in to_text(without)

    def test_it_is_said_what_the_example_of_a_faster_verify_comes_from(self) -> None:
        text = " ".join(to_text(advise(make_server(make_cell("1"), make_cell("2")))).split())
        assert "verify 27% faster:" in text
        assert text.count("'verify 27% faster' is an example of what tuning can do: settings of NCCL saved") == 1

    def test_the_best_step_count_says_among_which_where_extrapolations_show_more(self) -> None:
        high = make_server(make_cell(num_steps=3), positions=tuple(Position(5000, 4500) for _ in range(3)))
        high = replace(high, cells=(replace(high.cells[0], accepted=5000 * (0.9 + 0.81 + 0.729)),))
        advice = advise(high)
        answer = advice.batches[0].answer
        assert answer is not None
        assert answer.best is not None
        rates = {item.num_steps: item.tokens_per_second for item in answer.predictions}
        best, beyond = rates[answer.best.num_steps], rates[5]
        assert best is not None
        assert beyond is not None
        assert beyond.value > best.value, "the table shows more for 5 steps than for the best"
        assert " of up to 3 steps: 3 steps" in advice.batches[0].steps[0]
        assert "of up to" not in sentences(advise(make_server())), "here nothing beyond shows more"

    def test_a_replay_is_not_told_to_capture_kernels(self) -> None:
        text = sentences(advise(make_server(captured=(), model_name="replay:llama-3-8b-shape")))
        assert "eagle-exporter profile" not in text
        assert "a replay has no kernels to capture" in text

    def test_a_gap_of_few_long_pauses_is_told_from_a_wait_in_each_cycle(self) -> None:
        cell = replace(make_cell("2"), gap_seconds=0.00066 * 5000)
        rare = sentences(advise(make_server(cell, host_bound_share=0.004)))
        assert "mean gap of 0.66 ms is made of few long pauses" in rare
        assert "in at most 0.4% of these cycles" in rare
        # Where the few may be all cycles of this batch size, where each cycle waits, or where nothing is known.
        few = replace(make_cell("2", cycles=50.0), gap_seconds=0.00066 * 50)
        for server in (
            make_server(make_cell(), few, host_bound_share=0.01),
            make_server(cell, host_bound_share=0.9),
            make_server(cell, host_bound_share=None),
        ):
            assert "few long pauses" not in sentences(advise(server))

    def test_trees(self) -> None:
        advice = advise(make_server(config={"topk": "4"}))
        text = sentences(advice)
        assert "with topk 4 the draft is a tree" in text
        assert "does not pay off: 0.77 times" in text

    def test_topk_not_known(self) -> None:
        assert "topk is not known" in sentences(advise(make_server(config={})))

    def test_a_missing_phase_names_it_and_the_hook(self) -> None:
        cell = make_cell()
        phases = {phase: seconds for phase, seconds in cell.phase_seconds.items() if phase != "other"}
        advice = advise(make_server(replace(cell, phase_seconds=phases), hooks_down=("kv_compact",)))
        text = sentences(advice)
        assert "The cycle cannot be added up: other is not exported (hooks down: kv_compact)" in text
        assert "the time of a cycle is not known" in text
        check_output(advice)

    def test_no_cycle_was_timed(self) -> None:
        advice = advise(make_server(replace(make_cell(), timed_cycles=0.0)))
        assert "No cycle was timed" in sentences(advice)
        check_output(advice)

    def test_one_single_cycle(self) -> None:
        advice = advise(make_server(make_cell(cycles=1.0)))
        assert "Only 1 timed cycle:" in sentences(advice)
        assert "Within error: no speculation, 1 step, 2 steps, 3 steps, 4 steps and 5 steps" in sentences(advice)
        check_output(advice)

    def test_the_gap_is_not_measured(self) -> None:
        advice = advise(make_server(replace(make_cell(), gap_seconds=None)))
        assert "The gap between cycles is not measured" in sentences(advice)
        check_output(advice)

    def test_a_position_that_was_never_offered(self) -> None:
        advice = advise(make_server(positions=(Position(5000, 2700), Position(0, 0))))
        assert "a position was never offered" in sentences(advice)
        check_output(advice)

    @pytest.mark.parametrize("rate", [0.0, 1.0])
    def test_acceptance_of_zero_and_of_one(self, rate: float) -> None:
        cell = replace(make_cell(), accepted=5000 * 5 * rate)
        advice = advise(make_server(cell, positions=tuple(Position(5000, 5000 * rate) for _ in range(5))))
        document = advice_json(advice)
        assert document["batches"][0]["tokens_per_cycle"] == 1 + 5 * rate
        check_output(advice)

    def test_adaptive_tiers_are_measured_not_predicted(self) -> None:
        server = make_server(
            make_cell(num_steps=0, scale=0.4), make_cell(num_steps=2, scale=0.7), make_cell(num_steps=5)
        )
        advice = advise(replace(server, configured_baseline={}))
        (batch,) = advice_json(advice)["batches"]
        assert "Adaptive: several step counts ran" in sentences(advice)
        assert batch["baseline"]["source"] == "measured"
        assert [item["num_steps"] for item in batch["predictions"] if item["observed"]] == [0, 2, 5]
        check_output(advice)

    def test_the_step_count_with_most_cycles_is_the_one_reported(self) -> None:
        for most, cycles in ((2, (900.0, 300.0)), (5, (300.0, 900.0))):
            server = make_server(make_cell(num_steps=2, cycles=cycles[0]), make_cell(num_steps=5, cycles=cycles[1]))
            assert advise(server).batches[0].cell.num_steps == most

    def test_a_run_without_speculation_is_only_a_baseline(self) -> None:
        advice = advise(make_server(make_cell(num_steps=0), configured_baseline={}))
        assert "Without speculation: 30.27 ms a decode step." in sentences(advice)
        check_output(advice)

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"clock": "sync"}, "The sync clock is on"),
            ({"clock": "host"}, "wall time of the host clock"),
            ({"host_bound_share": 0.6}, "waited for the host in 60% of the cycles"),
            (
                {"host_bound_share": 1.0, "config": {"topk": "1", "overlap": "false"}},
                "overlap scheduler is off",
            ),
            ({"config_ids": ("a", "b")}, "2 configurations are in the figures (a, b)"),
            ({"ended_ranks": 8}, "8 of 8 ranks have ended"),
            ({"disagreements": ("Ranks do not agree: x.",)}, "Ranks do not agree: x."),
        ],
    )
    def test_what_must_be_kept_in_mind(self, changes: dict[str, object], sentence: str) -> None:
        assert sentence in sentences(advise(make_server(**changes)))
        assert sentence not in sentences(advise(make_server()))


# What increase() gives is a fraction where it extrapolates.
counts = st.floats(1e-3, 1e6) | st.just(0.0)


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    exported = draw(st.sets(st.sampled_from(catalogue.PHASES)) | st.just(set(catalogue.PHASES)))
    return Cell(
        batch_size=draw(st.sampled_from(catalogue.BATCH_SIZES)),
        num_steps=draw(st.none() | st.integers(0, 10)),
        cycles=draw(st.floats(1e-3, 1e6)),
        timed_cycles=draw(counts),
        phase_seconds={phase: draw(st.just(0.0) | st.floats(1e-6, 1e4)) for phase in sorted(exported)},
        gap_seconds=draw(st.none() | st.floats(0, 1e4)),
        drafts=draw(counts),
        accepted=draw(counts),
        context_tokens=draw(counts),
    )


class TestAnyInput:
    @property_test
    @given(
        st.lists(cells(), max_size=4, unique_by=lambda cell: (cell.batch_size, cell.num_steps)),
        st.lists(st.builds(Position, counts, counts), max_size=6),
        st.sampled_from([{}, {"topk": "1"}, {"topk": "4"}, {"topk": "1", "overlap": "false"}]),
        st.dictionaries(st.sampled_from(catalogue.BATCH_SIZES), st.floats(1e-4, 10), max_size=4),
        st.none() | st.floats(0, 1),
    )
    def test_is_answered_without_an_exception_and_without_nan(
        self,
        drawn: list[Cell],
        positions: list[Position],
        config: dict[str, str],
        baseline: dict[str, float],
        host_bound: float | None,
    ) -> None:
        advice = advise(
            replace(
                make_server(),
                cells=tuple(drawn),
                positions=tuple(positions),
                config=config,
                configured_baseline=baseline,
                host_bound_share=host_bound,
            )
        )
        json.dumps(advice_json(advice), allow_nan=False)
        assert "nan" not in to_text(advice)
        for batch in advice.batches:
            assert batch.verdict
            for item in () if batch.answer is None else batch.answer.predictions:
                for estimate in (item.tokens_per_cycle, item.cost, item.tokens_per_second, item.speedup):
                    if estimate is not None:
                        assert estimate.low <= estimate.value * (1 + 1e-9)
                        assert estimate.value <= estimate.high * (1 + 1e-9)


class TestBaseline:
    def test_a_saved_one_goes_before_a_configured_one_and_that_before_a_measured_one(self) -> None:
        server = make_server(make_cell(num_steps=0, scale=0.4), make_cell())
        saved = Baseline({"1": BaselineStep(0.015, source="file")})
        assert baseline_step("1", server, saved) == BaselineStep(0.015, source="file")
        configured = baseline_step("1", server)
        assert configured is not None
        assert configured.source == "configured"
        measured = baseline_step("1", replace(server, configured_baseline={}))
        assert measured is not None
        assert measured.seconds == pytest.approx(0.4 * (sum(PHASES.values()) - PHASES["draft_extend"]) + 0.0002)
        assert measured.verify_seconds == pytest.approx(0.4 * PHASES["target_verify"])
        assert baseline_step("2", server, saved) is None

    def test_survives_being_saved_and_read(self) -> None:
        server = make_server(make_cell(num_steps=0), draft_memory_bytes=None)
        measured = measured_baseline(server)
        assert measured is not None
        assert measured.kv_pool_tokens == 900_000
        read = from_json(json.loads(json.dumps(to_json(measured, saved=1.7e9))))
        assert read.steps["1"].seconds == measured.steps["1"].seconds
        assert read.steps["1"].source == "file"
        assert (read.facts, read.model_name, read.kv_pool_tokens) == (measured.facts, "Kimi-K2.5", 900_000)
        assert differences(read, server) == ()

    def test_the_kv_pool_of_a_zero_step_tier_is_not_one_without_speculation(self) -> None:
        measured = measured_baseline(make_server(make_cell(num_steps=0), make_cell()))
        assert measured is not None
        assert measured.kv_pool_tokens is None

    def test_a_baseline_of_another_setup_is_named_fact_by_fact(self) -> None:
        saved = Baseline({"1": BaselineStep(0.0111)}, model_name="other", facts={"nccl_proto": "Simple", "gpu": "H200"})
        text = sentences(advise(make_server(), saved))
        assert "on model other, this is Kimi-K2.5" in text
        assert "with nccl_proto Simple, this server has LL" in text
        assert "with gpu H200, this server has RTX PRO 6000" in text

    def test_a_configured_baseline_that_the_measurement_contradicts_is_named(self) -> None:
        server = make_server(make_cell(num_steps=0, scale=0.4), make_cell(), configured_baseline={"1": 0.02})
        assert "the configured baseline is 20.00 ms and the measured one 12.23 ms" in sentences(advise(server))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format": "x"}, "not a baseline"),
            ({"version": 99}, "version 99"),
            ({"steps": {}}, "no decode step"),
            ({"steps": {"7": {"seconds": 1}}}, "batch size '7'"),
            ({"steps": {"1": {"seconds": -1}}}, "no positive number"),
            ({"steps": {"1": {"seconds": "fast"}}}, "no positive number"),
            ({"facts": {"gpu": 1}}, "facts"),
        ],
    )
    def test_a_file_that_is_none_is_refused_with_the_reason(self, change: dict[str, object], message: str) -> None:
        document = to_json(Baseline({"1": BaselineStep(0.01)}), saved=0.0) | change
        with pytest.raises(BaselineError, match=message):
            from_json(document)

    @pytest.mark.parametrize("document", [None, [], "text", 3, {}])
    def test_any_other_json_is_refused(self, document: object) -> None:
        with pytest.raises(BaselineError, match="not a baseline"):
            from_json(document)
