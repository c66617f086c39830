"""The figures as queries: built from the catalogue, paired by rank, never 0 / 0."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from eagle_exporter import catalogue
from eagle_exporter.analysis import promql

if TYPE_CHECKING:
    from collections.abc import Callable

SELECTOR = 'server=~"$server",job="eagle"'
WINDOW = "7m"

RATIOS: dict[str, Callable[[str, str], str]] = {
    **promql.BATCH_EXPRESSIONS,
    "phase_seconds": promql.phase_seconds,
    "phase_share": promql.phase_share,
    "host_bound_share": promql.host_bound_share,
    "measured_baseline_seconds": promql.measured_baseline_seconds,
    "one_token_verify_seconds": promql.one_token_verify_seconds,
    "acceptance_at": promql.acceptance_at,
    "tokens_per_cycle_at": lambda selector, window: promql.tokens_per_cycle_at(2, selector, window),
    **{
        f"decode_tokens_per_second_at_{verify}": lambda selector, window, verify=verify: (  # type: ignore[misc]
            promql.decode_tokens_per_second_at(2, selector, window, verify=verify)
        )
        for verify in ("linear", "constant", "flat")
    },
}
EVERY: dict[str, Callable[[str, str], str]] = {
    **RATIOS,
    "cycles_per_second": promql.cycles_per_second,
    "output_tokens_per_second": promql.output_tokens_per_second,
    "baseline_seconds": promql.baseline_seconds,
    "with_config_id": lambda selector, window: promql.with_config_id(promql.verify_share(selector, window), selector),
}

_SELECTED = re.compile(r"(eagle_\w+)(\{[^}]*\})?(\[\w+\])?")


def selected(expression: str) -> list[tuple[str, str, str]]:
    """Return (metric, matchers, range) of every selector."""
    return [(match[1], match[2] or "", match[3] or "") for match in _SELECTED.finditer(expression)]


@pytest.mark.parametrize("name", sorted(EVERY))
class TestEvery:
    def test_names_only_metrics_and_labels_of_the_catalogue(self, name: str) -> None:
        known_targets = {"job"}
        found = selected(EVERY[name](SELECTOR, WINDOW))
        assert found
        for metric, matchers, _ in found:
            labels = set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', matchers))
            assert labels <= set(catalogue.BY_NAME[metric].all_labels) | known_targets

    def test_applies_the_selector_and_the_window_everywhere(self, name: str) -> None:
        for metric, matchers, window in selected(EVERY[name](SELECTOR, WINDOW)):
            assert 'server=~"$server"' in matchers
            assert 'job="eagle"' in matchers
            counter = catalogue.BY_NAME[metric].kind is catalogue.Kind.COUNTER
            assert window in (("[7m]", "") if metric == promql.DRAFTS else ("[7m]",) if counter else ("",))

    def test_needs_no_selector(self, name: str) -> None:
        expression = EVERY[name]("", WINDOW)
        assert "{}" not in expression
        assert "{," not in expression
        assert ",}" not in expression

    def test_closes_what_it_opens(self, name: str) -> None:
        depth = 0
        for character in EVERY[name](SELECTOR, WINDOW):
            depth += {"(": 1, ")": -1}.get(character, 0)
            assert depth >= 0
        assert depth == 0

    def test_every_join_names_its_many_side(self, name: str) -> None:
        # A one-to-one match on some labels drops the others, and the next join then finds nothing.
        expression = EVERY[name](SELECTOR, WINDOW)
        assert not re.search(r"[*/+-] on \([^)]*\) (?!group_left)", expression)

    def test_groups_by_server_and_never_by_instance(self, name: str) -> None:
        expression = EVERY[name](SELECTOR, WINDOW)
        assert "instance" not in expression
        for labels in re.findall(r"(?:sum|max|count) by \(([^)]*)\)", expression):
            assert "server" in labels.split(", ")


@pytest.mark.parametrize("name", sorted(RATIOS))
def test_a_ratio_has_no_series_instead_of_nan_where_nothing_was_counted(name: str) -> None:
    assert re.search(r"/ (on \([^)]*\) group_left \(\) )?\(", RATIOS[name](SELECTOR, WINDOW))
    assert "> 0)" in RATIOS[name](SELECTOR, WINDOW)


@pytest.mark.parametrize("name", sorted(promql.BATCH_EXPRESSIONS))
def test_times_and_cycles_are_taken_from_the_ranks_that_count_acceptance(name: str) -> None:
    expression = promql.BATCH_EXPRESSIONS[name]("", WINDOW)
    rank = ", ".join(catalogue.COMMON_LABELS)
    for match in re.finditer(r"rate\((eagle_\w+)(?:\{[^}]*\})?\[7m\]\)", expression):
        follows = expression[match.end() :].startswith(f" and on ({rank}) {promql.DRAFTS}")
        assert follows == (not catalogue.BY_NAME[match[1]].acceptance)


def test_the_baseline_is_plain_decode_without_the_extend() -> None:
    expression = promql.measured_baseline_seconds(SELECTOR, WINDOW)
    assert 'num_steps="0",phase!="draft_extend"' in expression
    assert promql.configured_baseline_seconds(SELECTOR) in promql.baseline_seconds(SELECTOR, WINDOW)


def test_a_recorded_baseline_takes_the_place_of_the_built_one() -> None:
    for build in (promql.speedup, promql.breakeven_tokens_per_cycle):
        expression = build(SELECTOR, WINDOW, "server_batch:eagle_baseline:seconds")
        assert "server_batch:eagle_baseline:seconds" in expression
        assert promql.CONFIGURED_BASELINE not in expression


def test_predictions_are_for_chains_only() -> None:
    for expression in (
        promql.tokens_per_cycle_at(2, SELECTOR, WINDOW),
        promql.cost_per_cycle_at(2, SELECTOR, WINDOW),
    ):
        assert expression.endswith('and on (server) eagle_spec_config_info{server=~"$server",job="eagle",topk="1"}')


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no such phase"):
        promql.phase_seconds(phase="verify")
    with pytest.raises(ValueError, match="at least 1"):
        promql.tokens_per_cycle_at(0)
    with pytest.raises(ValueError, match="must be one of"):
        promql.cost_per_cycle_at(2, verify="quadratic")
