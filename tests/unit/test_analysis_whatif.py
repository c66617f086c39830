"""Step counts compared: the story the exporter comes from, properties, and edge cases."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_exporter import catalogue
from eagle_exporter.analysis.acceptance import (
    AcceptanceCurve,
    acceptance_curve,
    conditional_acceptance,
    geometric_rates,
    scale_to_mean,
)
from eagle_exporter.analysis.baseline import BaselineStep
from eagle_exporter.analysis.cost import cost_model
from eagle_exporter.analysis.observations import Cell, Position, Server
from eagle_exporter.analysis.whatif import WhatIf, compare_with_runs, switch_off, what_if

property_test = settings(deadline=None)  # a busy machine is no failure

CYCLES = 10_000.0

STORY_PHASES = {
    "draft_steps": 0.00087,
    "target_verify": 0.0287,
    "draft_extend": 0.00029,
    "verify_overhead": 0.0,
    "kv_cache": 0.0,
    "other": 0.0,
}
STORY_STEPS = 5
STORY_ACCEPTANCE = 0.54
STORY_BASELINE = BaselineStep(0.0111, source="configured")


def make_cell(
    phases: dict[str, float],
    num_steps: int,
    accepted_per_draft: float,
    *,
    batch_size: str = "1",
    cycles: float = CYCLES,
    requests: float = 1.0,
    gap: float | None = 0.0,
) -> Cell:
    return Cell(
        batch_size=batch_size,
        num_steps=num_steps,
        cycles=cycles,
        timed_cycles=cycles,
        phase_seconds={phase: seconds * cycles for phase, seconds in phases.items()},
        gap_seconds=None if gap is None else gap * cycles,
        drafts=cycles * requests,
        accepted=cycles * requests * accepted_per_draft,
    )


def make_positions(rates: list[float], drafts: float = CYCLES) -> list[Position]:
    return [Position(drafts, drafts * rate) for rate in rates]


def geometric(acceptance: float, num_steps: int) -> list[float]:
    return [acceptance ** (i + 1) for i in range(num_steps)]


def story() -> tuple[Cell, WhatIf]:
    rates = geometric(STORY_ACCEPTANCE, STORY_STEPS)
    cell = make_cell(STORY_PHASES, STORY_STEPS, sum(rates))
    answer = what_if([cell], make_positions(rates), STORY_BASELINE, topk=1)
    assert answer is not None
    return cell, answer


class TestStory:
    def test_verify_is_96_percent_of_the_cycle(self) -> None:
        cell, _ = story()
        assert cell.share("target_verify") == pytest.approx(0.96, abs=0.005)
        assert cell.share("draft_steps") == pytest.approx(0.029, abs=0.0005)
        assert cell.share("draft_extend") == pytest.approx(0.0097, abs=0.0005)

    def test_five_steps_are_below_the_baseline(self) -> None:
        cell, answer = story()
        assert cell.tokens_per_cycle == pytest.approx(2.1, abs=0.05)
        assert cell.tokens_per_second == pytest.approx(71, abs=0.5)
        assert answer.speedup == pytest.approx(71 / 90, abs=0.01)
        assert answer.predictions[0].tokens_per_second is not None
        assert answer.predictions[0].tokens_per_second.value == pytest.approx(90, abs=0.5)

    def test_a_constant_verify_predicts_two_steps_backwards_and_the_line_does_not(self) -> None:
        cell, answer = story()
        two = answer.predictions[2]
        assert two.num_steps == 2
        assert two.tokens_per_cycle is not None
        assert two.tokens_per_second is not None
        constant = cost_model([cell], STORY_BASELINE).constant_verify(2)
        assert constant is not None
        assert two.tokens_per_cycle.value / constant == pytest.approx(63, abs=0.5)
        assert two.tokens_per_second.low == pytest.approx(63, abs=0.5)
        assert two.tokens_per_second.value == pytest.approx(98, abs=0.5)

    def test_the_best_step_count_is_smaller_and_declared_open_between_few(self) -> None:
        _, answer = story()
        assert answer.best is not None
        assert answer.best.num_steps < STORY_STEPS
        assert answer.best.confidence == "open"
        assert 2 in answer.best.within_error
        assert max(answer.best.within_error) < STORY_STEPS

    def test_the_draft_model_is_irrelevant_and_verify_is_everything(self) -> None:
        _, answer = story()
        changes = {item.change: item for item in answer.sensitivities}
        assert changes["draft_free"].relative < 0.05
        assert changes["verify_faster"].relative > 0.3
        assert changes["draft_free"].speedup is not None
        assert changes["draft_free"].speedup.value < 1.0
        assert changes["verify_faster"].speedup is not None
        assert changes["verify_faster"].speedup.value > 1.0

    def test_break_even_in_tokens_in_acceptance_and_in_verify_is_the_same_point(self) -> None:
        cell, answer = story()
        assert answer.breakeven == pytest.approx(0.02986 / 0.0111)
        acceptance = answer.breakeven_acceptance
        assert acceptance is not None
        assert 1 + sum(geometric(acceptance, STORY_STEPS)) == pytest.approx(answer.breakeven)
        assert answer.breakeven_verify is not None
        faster = make_cell(
            {**STORY_PHASES, "target_verify": answer.breakeven_verify},
            STORY_STEPS,
            cell.accepted / cell.drafts,
        )
        again = what_if([faster], [], STORY_BASELINE, topk=1)
        assert again is not None
        assert again.speedup == pytest.approx(1.0)

    def test_more_steps_are_marked_as_extrapolation_with_a_band_of_ten_percent_at_least(self) -> None:
        _, answer = story()
        beyond = [item for item in answer.predictions if item.num_steps > STORY_STEPS]
        assert beyond
        for item in beyond:
            assert item.extrapolated
            assert not item.observed
            assert item.cost is not None
            assert item.cost.low <= 0.9 * item.cost.value
            assert item.cost.high >= 1.1 * item.cost.value
        assert all(not item.extrapolated for item in answer.predictions if item.num_steps <= STORY_STEPS)

    def test_an_extrapolation_is_never_named_best(self) -> None:
        rates = geometric(0.95, 2)
        phases = {**STORY_PHASES, "target_verify": 0.0112}
        answer = what_if([make_cell(phases, 2, sum(rates))], make_positions(rates), STORY_BASELINE, topk=1)
        assert answer is not None
        assert answer.best is not None
        fastest = max(
            answer.predictions, key=lambda item: item.tokens_per_second.value if item.tokens_per_second else 0
        )
        assert fastest.extrapolated
        assert answer.best.num_steps <= 2


rate_lists = st.lists(st.floats(0, 1), min_size=1, max_size=8).map(lambda rates: sorted(rates, reverse=True))


class TestTokensPerCycle:
    @property_test
    @given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=8), st.integers(1, 12))
    def test_is_monotone_and_between_one_and_k_plus_one(self, counts: list[tuple[int, int]], most: int) -> None:
        curve = acceptance_curve([Position(offered, accepted) for offered, accepted in counts], None, most)
        previous = 1.0
        for steps in range(1, most + 1):
            tokens = curve.tokens_per_cycle(steps)
            if tokens is None:
                assert not curve.rates
                return
            assert previous - 1e-9 <= tokens.value <= steps + 1 + 1e-9
            assert 1.0 <= tokens.low <= tokens.value + 1e-9
            assert tokens.value <= tokens.high + 1e-9 <= steps + 1 + 1e-6
            previous = tokens.value

    @property_test
    @given(st.integers(1, 8).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k), min_size=1))))
    def test_equals_the_mean_of_the_histogram_at_the_running_step_count(self, drawn: tuple[int, list[int]]) -> None:
        steps, accepted = drawn
        positions = [Position(len(accepted), sum(n > i for n in accepted)) for i in range(steps)]
        mean = sum(accepted) / len(accepted)
        tokens = acceptance_curve(positions, mean, steps).tokens_per_cycle(steps)
        assert tokens is not None
        assert tokens.value == pytest.approx(1 + mean)
        assert tokens.low == tokens.high == tokens.value

    @property_test
    @given(rate_lists, st.floats(0, 1))
    def test_is_fitted_to_the_batch_size_it_is_asked_for(self, rates: list[float], part: float) -> None:
        mean = part * len(rates)
        curve = acceptance_curve(make_positions(rates), mean, len(rates))
        tokens = curve.tokens_per_cycle(len(rates))
        assert tokens is not None
        assert tokens.value == pytest.approx(1 + mean, abs=1e-6)
        assert all(0 <= rate <= 1 for rate in curve.rates)

    @property_test
    @given(rate_lists, st.lists(st.floats(0, 1), min_size=1, max_size=5))
    def test_bounds_beyond_the_offered_positions_hold_for_every_continuation(
        self, rates: list[float], conditionals: list[float]
    ) -> None:
        truth = list(rates)
        for conditional in conditionals:
            truth.append(truth[-1] * conditional)
        tokens = AcceptanceCurve(tuple(rates)).tokens_per_cycle(len(truth))
        assert tokens is not None
        assert tokens.low - 1e-9 <= 1 + sum(truth) <= tokens.high + 1e-9

    @property_test
    @given(st.floats(0.01, 0.99), st.integers(2, 6), st.integers(1, 4))
    def test_a_geometric_acceptance_is_extrapolated_exactly(self, a: float, known: int, more: int) -> None:
        tokens = AcceptanceCurve(tuple(geometric(a, known))).tokens_per_cycle(known + more)
        assert tokens is not None
        # Leviathan et al.: (1 - a^(k+1)) / (1 - a)
        assert tokens.value == pytest.approx((1 - a ** (known + more + 1)) / (1 - a))

    @property_test
    @given(st.floats(0, 1), st.integers(1, 10))
    def test_a_mean_and_its_constant_acceptance_belong_together(self, a: float, steps: int) -> None:
        mean = sum(geometric(a, steps))
        assert sum(geometric_rates(mean, steps)) == pytest.approx(mean, abs=1e-9)
        assert conditional_acceptance(1 + mean, steps) == pytest.approx(a, abs=1e-6)

    @pytest.mark.parametrize("tokens", [0.5, 7.1])
    def test_no_acceptance_gives_an_impossible_number_of_tokens(self, tokens: float) -> None:
        assert conditional_acceptance(tokens, 6) is None or tokens <= 7
        assert conditional_acceptance(tokens, 0) is None

    def test_one_known_position_is_continued_with_its_own_rate(self) -> None:
        tokens = AcceptanceCurve((0.5,)).tokens_per_cycle(2)
        assert tokens is not None
        assert (tokens.low, tokens.value, tokens.high) == (1.5, 1.75, 2.0)

    @pytest.mark.parametrize(("rate", "value"), [(0.0, 1.0), (1.0, 6.0)])
    def test_acceptance_of_zero_and_of_one(self, rate: float, value: float) -> None:
        curve = acceptance_curve(make_positions([rate] * 3), 3 * rate, 3)
        tokens = curve.tokens_per_cycle(5)
        assert tokens is not None
        assert tokens.value == pytest.approx(value)
        assert curve.by_position

    def test_a_position_that_was_never_offered_ends_the_curve_and_is_not_taken_for_rejected(self) -> None:
        positions = [*make_positions([0.8, 0.6]), Position(0, 0)]
        assert len(acceptance_curve(positions, 1.4, 2).rates) == 2
        by_mean = acceptance_curve(positions, 1.6, 3)
        assert not by_mean.by_position
        assert sum(by_mean.rates) == pytest.approx(1.6)

    def test_acceptance_does_not_rise_with_depth_when_counters_were_read_a_moment_apart(self) -> None:
        curve = acceptance_curve([Position(1000, 500), Position(990, 520)], None, 2)
        assert curve.rates == (0.5, 0.5)

    def test_no_factor_gives_a_mean_that_positions_rule_out(self) -> None:
        assert scale_to_mean([0.5, 0.0], 1.5, 2) is None
        assert scale_to_mean([0.0, 0.0], 0.5, 2) is None


@st.composite
def cost_curves(draw: st.DrawFn, most: int) -> list[float]:
    """Seconds of verify for 1 to most+1 tokens: concave, convex and stepped, but never falling."""
    base = draw(st.floats(0.001, 0.05))
    kind = draw(st.sampled_from(("power", "steps")))
    if kind == "power":
        height, exponent = draw(st.floats(0, 5)), draw(st.floats(0.1, 5))
        return [base * (1 + height * (n / most) ** exponent) for n in range(most + 1)]
    rises = draw(st.lists(st.floats(0, 2), min_size=most, max_size=most))
    curve = [base]
    for rise in rises:
        curve.append(curve[-1] + base * rise)
    return curve


@st.composite
def synthetic_servers(draw: st.DrawFn) -> tuple[list[float], dict[str, float], float, tuple[int, ...], int]:
    most = draw(st.integers(2, 8))
    curve = draw(cost_curves(most))
    tiers = tuple(sorted({most, *draw(st.lists(st.integers(1, most), max_size=2))}))
    parts = {
        name: draw(st.floats(0, 0.005))
        for name in ("step", "extend_fixed", "extend_token", "verify_overhead", "kv_cache", "other", "gap")
    }
    return curve, parts, draw(st.floats(0, 1)), tiers, most


def true_phases(curve: list[float], parts: dict[str, float], steps: int) -> dict[str, float]:
    return {
        "draft_steps": (steps - 1) * parts["step"],
        "target_verify": curve[steps],
        "draft_extend": parts["extend_fixed"] + parts["extend_token"] * (steps + 1),
        "verify_overhead": parts["verify_overhead"],
        "kv_cache": parts["kv_cache"],
        "other": parts["other"],
    }


class TestCost:
    @pytest.mark.parametrize("measured", [True, False], ids=["measured", "configured"])
    @property_test
    @given(drawn=synthetic_servers())
    def test_bands_contain_the_truth_whatever_the_cost_curve(
        self, drawn: tuple[list[float], dict[str, float], float, tuple[int, ...], int], measured: bool
    ) -> None:
        curve, parts, acceptance, tiers, most = drawn
        rates = geometric(acceptance, most)
        cells = [
            make_cell(true_phases(curve, parts, k), k, sum(rates[:k]), gap=parts["gap"], cycles=CYCLES) for k in tiers
        ]
        fixed = parts["verify_overhead"] + parts["kv_cache"] + parts["other"] + parts["gap"]
        baseline = BaselineStep(curve[0] + fixed, curve[0] if measured else None)
        answer = what_if(cells, make_positions(rates), baseline, topk=1)
        assert answer is not None
        for item in answer.predictions:
            if item.num_steps == 0 or item.extrapolated:
                continue
            truth = sum(true_phases(curve, parts, item.num_steps).values()) + parts["gap"]
            tokens = 1 + sum(rates[: item.num_steps])
            assert item.cost is not None
            assert item.tokens_per_second is not None
            assert item.cost.low * (1 - 1e-9) <= truth <= item.cost.high * (1 + 1e-9)
            assert item.tokens_per_second.low * (1 - 1e-6) <= tokens / truth <= item.tokens_per_second.high * (1 + 1e-6)
            assert item.cost.low <= item.cost.value <= item.cost.high

    @property_test
    @given(
        st.floats(0.001, 0.05),
        st.floats(0, 1),
        st.floats(0.3, 1),
        st.integers(2, 6),
    )
    def test_bands_beyond_what_ran_contain_costs_that_rise_no_faster_than_in_proportion(
        self, base: float, height: float, exponent: float, most: int
    ) -> None:
        verify = [base * (1 + height * n**exponent) for n in range(most + 3)]
        parts = dict.fromkeys(("step", "extend_fixed", "extend_token", "verify_overhead", "kv_cache", "other"), 0.0004)
        model = cost_model([make_cell(true_phases(verify, parts, most), most, 1.0)], BaselineStep(verify[0], verify[0]))
        for steps in (most + 1, most + 2):
            estimate = model.cost(steps)
            assert estimate is not None
            truth = sum(true_phases(verify, parts, steps).values())
            assert estimate.low <= truth * (1 + 1e-9)
            assert truth <= estimate.high * (1 + 1e-9)

    def test_a_linear_cost_is_predicted_exactly(self) -> None:
        curve = [0.010 + 0.002 * n for n in range(7)]
        parts = dict.fromkeys(("step", "extend_fixed", "verify_overhead", "kv_cache", "other"), 0.0003)
        parts["extend_token"] = 0.0
        model = cost_model([make_cell(true_phases(curve, parts, 6), 6, 1.0)], BaselineStep(curve[0], curve[0]))
        for steps in range(1, 7):
            estimate = model.cost(steps)
            assert estimate is not None
            assert estimate.value == pytest.approx(sum(true_phases(curve, parts, steps).values()))

    def test_a_step_count_that_ran_is_its_own_measurement(self) -> None:
        cells = [make_cell(STORY_PHASES, 5, 1.1), make_cell({**STORY_PHASES, "target_verify": 0.015}, 2, 0.8)]
        model = cost_model(cells, STORY_BASELINE)
        two, three = model.cost(2), model.cost(3)
        assert two is not None
        assert three is not None
        assert two.low == two.high == pytest.approx(0.015 + 0.00087 + 0.00029)
        # Between two that ran, the smaller one bounds it from below, not the baseline.
        assert three.low > 0.015

    def test_without_a_baseline_fewer_steps_have_no_cost(self) -> None:
        model = cost_model([make_cell(STORY_PHASES, 5, 1.1)], None)
        assert model.cost(2) is None
        assert model.cost(7) is None
        assert model.cost(5) is not None

    def test_a_baseline_slower_than_verify_does_not_make_fewer_tokens_dearer(self) -> None:
        model = cost_model([make_cell(STORY_PHASES, 5, 1.1)], BaselineStep(0.050))
        costs = [estimate.value for steps in range(1, 6) if (estimate := model.cost(steps)) is not None]
        assert costs == sorted(costs)

    def test_one_step_runs_no_draft_forward_so_the_extend_stands_for_one(self) -> None:
        phases = {**STORY_PHASES, "draft_steps": 0.0}
        model = cost_model([make_cell(phases, 1, 0.5)], STORY_BASELINE)
        two = model.cost(2)
        assert two is not None
        assert two.value == pytest.approx(0.0287 + (0.0287 - 0.0111) + 0.00029 + 0.00029)


class TestBest:
    def test_is_certain_when_its_worst_case_beats_every_best_case(self) -> None:
        rates = geometric(0.01, 3)
        answer = what_if(
            [make_cell({**STORY_PHASES, "draft_extend": 0.005}, 3, sum(rates))],
            make_positions(rates),
            STORY_BASELINE,
            topk=1,
        )
        assert answer is not None
        assert answer.best is not None
        assert (answer.best.num_steps, answer.best.confidence) == (0, "certain")

    def test_is_likely_when_every_shape_of_cost_agrees(self) -> None:
        rates = geometric(0.9, 4)
        phases = {**STORY_PHASES, "target_verify": 0.0125}
        answer = what_if([make_cell(phases, 4, sum(rates))], make_positions(rates), STORY_BASELINE, topk=1)
        assert answer is not None
        assert answer.best is not None
        assert answer.best.num_steps == 4
        assert answer.best.confidence in ("likely", "certain")
        assert answer.best.within_error == (4,)

    def test_is_not_named_without_a_baseline(self) -> None:
        rates = geometric(0.5, 3)
        answer = what_if([make_cell(STORY_PHASES, 3, sum(rates))], make_positions(rates), None, topk=1)
        assert answer is not None
        assert answer.best is None
        assert answer.speedup is None
        tokens = [item.tokens_per_cycle.value for item in answer.predictions if item.tokens_per_cycle is not None]
        assert tokens[:3] == pytest.approx([1.5, 1.75, 1.875])
        assert [item.num_steps for item in answer.predictions if item.tokens_per_second is not None] == [3]

    def test_two_measured_step_counts_within_the_spread_of_runs_are_not_told_apart(self) -> None:
        rates = geometric(0.6, 2)
        cells = [
            make_cell({**STORY_PHASES, "target_verify": 0.02}, 2, sum(rates)),
            make_cell({**STORY_PHASES, "target_verify": 0.0165}, 1, rates[0]),
        ]
        answer = what_if(cells, make_positions(rates), None, topk=1)
        assert answer is not None
        assert answer.best is not None
        assert answer.best.confidence == "open"
        assert answer.best.within_error == (1, 2)

    @pytest.mark.parametrize("topk", [2, 8, None])
    def test_trees_are_not_predicted_and_the_rest_holds(self, topk: int | None) -> None:
        cell = make_cell(STORY_PHASES, 5, 1.1)
        answer = what_if([cell], make_positions(geometric(0.5, 5)), STORY_BASELINE, topk=topk)
        assert answer is not None
        assert answer.predictions == ()
        assert answer.best is None
        assert answer.breakeven_acceptance is None
        assert answer.speedup == pytest.approx(2.1 / answer.breakeven if answer.breakeven else math.nan)
        assert {item.change for item in answer.sensitivities} == {"verify_faster", "draft_free"}

    @property_test
    @given(st.floats(0, 5), st.floats(0.001, 0.1), st.floats(0, 0.01))
    def test_speculation_pays_off_exactly_above_break_even(self, accepted: float, step: float, gap: float) -> None:
        cell = make_cell(STORY_PHASES, 5, accepted, gap=gap)
        answer = what_if([cell], [], BaselineStep(step), topk=1)
        assert answer is not None
        assert answer.speedup is not None
        assert answer.breakeven is not None
        assert answer.speedup * answer.breakeven == pytest.approx(1 + accepted)

    def test_one_step_less_is_told_with_its_band(self) -> None:
        _, answer = story()
        less = next(item for item in answer.sensitivities if item.change == "one_step_less")
        four = next(item for item in answer.predictions if item.num_steps == 4)
        assert less.tokens_per_second == four.tokens_per_second
        assert less.tokens_per_second.low < less.tokens_per_second.value < less.tokens_per_second.high

    def test_replicas_and_batches_multiply_tokens_but_not_the_choice(self) -> None:
        rates = geometric(0.54, 5)
        one, eight = (
            what_if(
                [make_cell(STORY_PHASES, 5, sum(rates), requests=requests)],
                make_positions(rates),
                STORY_BASELINE,
                topk=1,
            )
            for requests in (1.0, 8.0)
        )
        assert one is not None
        assert eight is not None
        assert one.best == eight.best
        for single, many in zip(one.predictions, eight.predictions, strict=True):
            assert single.tokens_per_second is not None
            assert many.tokens_per_second is not None
            assert many.tokens_per_second.value == pytest.approx(8 * single.tokens_per_second.value)


class TestSwitchOff:
    def test_is_above_the_last_batch_size_that_pays_off(self) -> None:
        answer = switch_off([("1", 1.9), ("2", 1.4), ("3-4", 1.0), ("5-8", 0.8)])
        assert answer is not None
        assert (answer.pays_up_to, answer.stops_at, answer.mixed) == ("3-4", "5-8", False)

    def test_never_and_always(self) -> None:
        never, always = switch_off([("1", 0.9)]), switch_off([("1", 1.9), ("2", 1.1)])
        assert never is not None
        assert always is not None
        assert (never.pays_up_to, never.stops_at) == (None, "1")
        assert (always.pays_up_to, always.stops_at) == ("2", None)
        assert switch_off([]) is None

    def test_a_batch_size_out_of_order_is_named_as_such(self) -> None:
        answer = switch_off([("1", 0.9), ("2", 1.4), ("3-4", 0.7)])
        assert answer is not None
        assert answer.mixed


class TestComparison:
    def test_predictions_are_set_beside_the_runs_that_test_them(self) -> None:
        rates = geometric(0.6, 5)
        curve = [0.0105 + 0.0035 * n for n in range(6)]
        parts = dict.fromkeys(("step", "extend_fixed", "verify_overhead", "kv_cache", "other"), 0.0002)
        parts["extend_token"] = 0.0

        def run(steps: int) -> Server:
            cell = make_cell(true_phases(curve, parts, steps), steps, sum(rates[:steps]))
            return Server("s", cells=(cell,), positions=tuple(make_positions(rates[:steps])), config={"topk": "1"})

        five = dataclasses.replace(run(5), configured_baseline={"1": curve[0]})
        comparisons = compare_with_runs(five, [run(steps) for steps in (1, 2, 3, 5)])
        assert [item.num_steps for item in comparisons] == [1, 2, 3]
        for item in comparisons:
            assert item.error == pytest.approx(0.0, abs=1e-6)
            assert item.in_band

    def test_without_a_baseline_there_is_a_measurement_and_no_prediction(self) -> None:
        cell = make_cell(STORY_PHASES, 5, 1.1)
        five = Server("s", cells=(cell,), positions=tuple(make_positions([0.5] * 5)), config={"topk": "1"})
        two = Server("s", cells=(make_cell(STORY_PHASES, 2, 0.8),), config={"topk": "1"})
        (comparison,) = compare_with_runs(five, [two])
        assert comparison.predicted is None
        assert comparison.error is None
        assert comparison.measured > 0


class TestEdges:
    def test_no_speculation_has_no_what_if(self) -> None:
        assert what_if([make_cell({"target_verify": 0.01, "other": 0.001}, 0, 0.0)], [], None, topk=1) is None

    def test_cycles_without_times_leave_tokens_only(self) -> None:
        cell = dataclasses.replace(make_cell(STORY_PHASES, 3, 1.0), timed_cycles=0.0)
        answer = what_if([cell], make_positions([0.5, 0.3, 0.2]), STORY_BASELINE, topk=1)
        assert answer is not None
        assert answer.speedup is None
        assert answer.best is None
        assert answer.predictions[1].tokens_per_cycle is not None

    def test_a_step_count_unknown_at_attach_is_not_predicted_from(self) -> None:
        cell = dataclasses.replace(make_cell(STORY_PHASES, 3, 1.0), num_steps=None)
        answer = what_if([cell], make_positions([0.5]), STORY_BASELINE, topk=1)
        assert answer is not None
        assert answer.predictions == ()
        assert answer.speedup is not None

    @pytest.mark.parametrize("phase", catalogue.PHASES)
    def test_with_a_phase_missing_there_is_no_cost_and_nothing_derived_from_it(self, phase: str) -> None:
        phases = {name: seconds for name, seconds in STORY_PHASES.items() if name != phase}
        cell = make_cell(phases, 3, 1.0)
        assert cell.cost is None
        assert cell.share("target_verify") is None
        answer = what_if([cell], make_positions([0.5, 0.3, 0.2]), STORY_BASELINE, topk=1)
        assert answer is not None
        assert answer.speedup is None
        assert answer.best is None
