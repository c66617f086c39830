from __future__ import annotations

import itertools
import re

import pytest

from eagle_exporter import catalogue
from eagle_exporter.catalogue import METRICS, Kind, Metric, Source
from eagle_exporter.registry.layout import Layout
from tests.ranks import make_plan


def test_no_name_is_given_twice() -> None:
    assert len(catalogue.BY_NAME) == len(METRICS)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
class TestEveryMetric:
    """Conventions that promtool checks, and the design's."""

    def test_its_name_fits_its_type(self, metric: Metric) -> None:
        assert re.fullmatch(r"eagle(_[a-z0-9]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.name.endswith("_info") == (metric.kind is Kind.INFO)
        assert not re.search(r"_(count|sum|bucket|created|milliseconds|ms)$", metric.name)

    def test_its_help_is_a_sentence(self, metric: Metric) -> None:
        assert metric.help[0].isupper() or metric.help[0].isdigit()
        assert metric.help.endswith(".")
        assert "\n" not in metric.help

    def test_its_labels_are_names_and_not_repeated(self, metric: Metric) -> None:
        assert len(set(metric.all_labels)) == len(metric.all_labels)
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in metric.all_labels)
        assert not set(metric.labels) & {"le", "quantile", "job", "instance", "node"}

    def test_it_has_the_labels_of_its_rank_where_it_has_one(self, metric: Metric) -> None:
        if metric.source is Source.RANK:
            assert metric.all_labels[: len(catalogue.COMMON_LABELS)] == catalogue.COMMON_LABELS

    def test_its_hooks_exist(self, metric: Metric) -> None:
        assert set(metric.hooks) <= set(catalogue.HOOKS)

    def test_seconds_counters_say_what_to_divide_them_by(self, metric: Metric) -> None:
        if metric.name.endswith("_seconds_total"):
            divisor = re.search(r"Divide by (eagle_\w+)", metric.help)
            assert divisor is not None
            assert catalogue.BY_NAME[divisor[1]].kind is Kind.COUNTER

    def test_names_in_its_help_exist(self, metric: Metric) -> None:
        for name in re.findall(r"eagle_[a-z0-9_]+", metric.help):
            assert name in catalogue.BY_NAME, name


def test_every_metric_of_a_rank_is_laid_out_somewhere() -> None:
    names = {family.metric.name for family in Layout(make_plan()).families}
    assert names == {metric.name for metric in METRICS if metric.source is Source.RANK}


def test_a_hook_of_a_phase_or_metric_is_one_of_the_hooks() -> None:
    assert set(catalogue.PHASE_HOOKS) == set(catalogue.PHASES)
    for hooks in catalogue.PHASE_HOOKS.values():
        assert set(hooks) <= set(catalogue.HOOKS)


def test_bucket_bounds_increase_and_have_short_decimal_text() -> None:
    bounds = catalogue.DURATION_BUCKETS
    assert list(bounds) == sorted(set(bounds))
    assert all(len(repr(bound)) <= 8 for bound in bounds)
    fine = [bound for bound in bounds if 5e-5 <= bound <= 0.5]
    assert all(high / low < 1.3 for low, high in itertools.pairwise(fine))
    assert sum(1e-4 <= bound < 1e-3 for bound in bounds) == 10


def test_there_is_one_label_more_than_bounds() -> None:
    assert len(catalogue.BATCH_SIZES) == len(catalogue.BATCH_SIZE_BOUNDS) + 1
    assert len(catalogue.CONTEXT_LENGTHS) == len(catalogue.CONTEXT_LENGTH_BOUNDS) + 1


def test_the_version_is_two_numbers() -> None:
    assert re.fullmatch(r"\d+\.\d+", catalogue.CATALOGUE_VERSION)
