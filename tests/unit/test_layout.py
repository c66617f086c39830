from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_exporter import catalogue
from eagle_exporter.catalogue import Kind
from eagle_exporter.registry.layout import (
    Layout,
    context_length_index,
    directory_name,
    file_name,
)
from tests.ranks import make_plan

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(NAMES)
def test_the_directory_of_a_server_is_one_plain_component_of_a_path(server: str) -> None:
    name = directory_name(server)
    assert re.fullmatch(r"[A-Za-z0-9._%-]+", name)
    assert name not in (".", "..")
    root = Path("/registry")
    assert (root / name).resolve().parent == root


@given(NAMES)
def test_two_servers_never_share_a_directory(server: str) -> None:
    decoded = unquote(directory_name(server), errors="strict")
    assert decoded == (server or "\x00")


@pytest.mark.parametrize(
    ("server", "name"),
    [
        ("node-a:30000", "node-a%3A30000"),
        ("../../etc", "..%2F..%2Fetc"),
        ("..", "%2E%2E"),
        ("", "%00"),
        ("Über", "%C3%9Cber"),
    ],
)
def test_directory_names(server: str, name: str) -> None:
    assert directory_name(server) == name


def test_file_names_tell_ranks_apart() -> None:
    assert file_name(0, 0, None) == "tp0-pp0-dp0.bin"
    assert file_name(7, 1, 3) == "tp7-pp1-dp3.bin"


@given(st.integers(1, 100_000))
def test_a_batch_size_lies_in_the_range_of_its_label(rows: int) -> None:
    label = catalogue.batch_size_label(rows)
    low, _, high = label.rstrip("+").partition("-")
    assert int(low) <= rows
    assert rows <= int(high or (10**9 if label.endswith("+") else low))


@given(st.integers(0, 10_000_000))
def test_a_context_length_lies_in_the_range_of_its_label(tokens: int) -> None:
    label = catalogue.CONTEXT_LENGTHS[context_length_index(tokens)]
    low, _, high = label.replace("k+", "k-").partition("-")
    assert 1024 * int(low.rstrip("k")) <= tokens
    assert not high or tokens < 1024 * int(high.rstrip("k"))


def test_no_two_series_share_a_slot() -> None:
    layout = Layout(make_plan())
    taken: dict[int, str] = {}
    for family in layout.families:
        for i, values in enumerate(family.series):
            start = layout.slot(family.metric.name, *values)
            assert start == family.start + i * family.width
            for slot in range(start, start + family.width):
                assert slot not in taken, f"{family.metric.name}{values} and {taken[slot]}"
                taken[slot] = f"{family.metric.name}{values}"
    assert sorted(taken) == list(range(layout.slots))
    assert len(layout.initial_values()) == layout.slots


def test_counters_begin_at_zero_and_gauges_absent() -> None:
    layout = Layout(make_plan())
    values = layout.initial_values()
    for family in layout.families:
        for i, labels in enumerate(family.series):
            first = values[family.start + i * family.width]
            if family.metric.kind is Kind.GAUGE:
                assert first != first, family.metric.name  # noqa: PLR0124 - NaN
            elif "other" in labels and "num_steps" in family.metric.labels and labels[1] == "other":
                assert first != first, f"{family.metric.name} {labels}"  # noqa: PLR0124
            else:
                assert first == (1.0 if family.metric.kind is Kind.INFO else 0.0), family.metric.name


@pytest.mark.parametrize(
    ("tiers", "labels"),
    [
        ((3,), ("3", "other")),
        ((3, 1), ("1", "3", "other")),
        ((0,), ("0", "other")),
        ((3, 3, 1), ("1", "3", "other")),
        ((7, 1, 2, 3, 4, 5), ("1", "2", "3", "7", "other")),
    ],
)
def test_at_most_four_tiers_have_a_label_and_the_configured_one_is_among_them(
    tiers: tuple[int, ...], labels: tuple[str, ...]
) -> None:
    assert make_plan(tiers=tiers).tier_labels == labels


def test_positions_and_steps_are_those_of_the_largest_tier() -> None:
    layout = Layout(make_plan(tiers=(2, 5)))
    by_name = {family.metric.name: family for family in layout.families}
    assert [values[0] for values in by_name["eagle_accepted_tokens_per_pos_total"].series] == list("01234")
    assert [values[0] for values in by_name["eagle_draft_step_seconds_total"].series] == list("1234")
    assert by_name["eagle_accept_length_tokens"].bounds == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


def test_without_speculation_there_are_no_positions_and_no_steps() -> None:
    layout = Layout(make_plan(tiers=(0,)))
    names = {family.metric.name for family in layout.families}
    assert not names & {"eagle_accepted_tokens_per_pos_total", "eagle_draft_step_seconds_total"}
    assert "eagle_batch_cycles_total" in names


def test_host_bound_cycles_exist_only_where_a_clock_can_tell() -> None:
    assert Layout(make_plan(clock="cuda_event")).slot("eagle_host_bound_cycles_total") is not None
    assert Layout(make_plan(clock="host")).slot("eagle_host_bound_cycles_total") is None
    assert Layout(make_plan(clock="sync")).slot("eagle_host_bound_cycles_total") is None


# One for eagle_rank_up, which the exporter adds.
RECORDING = Layout(make_plan(tiers=(3, 5))).series_count() + 1
OTHER_RANK = Layout(make_plan(tp_rank=1, recording=False, tiers=(3, 5))).series_count() + 1


def test_the_series_budget_of_a_recording_rank() -> None:
    assert RECORDING <= 1000, f"{RECORDING} series"


def test_the_series_budget_of_another_rank() -> None:
    assert OTHER_RANK <= 300, f"{OTHER_RANK} series"


def test_the_series_budget_of_a_node_of_eight() -> None:
    assert RECORDING + 7 * OTHER_RANK <= 3100, f"{RECORDING + 7 * OTHER_RANK} series"


def test_a_rank_that_is_not_the_leader_has_no_histogram_at_all() -> None:
    layout = Layout(make_plan(tp_rank=1, recording=False))
    assert not [family.metric.name for family in layout.families if family.metric.kind is Kind.HISTOGRAM]
    with_all = Layout(make_plan(tp_rank=1, recording=False, histograms=True))
    assert {family.metric.name for family in with_all.families if family.metric.kind is Kind.HISTOGRAM} == {
        metric.name for metric in catalogue.METRICS if metric.leader_histogram
    }


def test_the_header_describes_every_family() -> None:
    layout = Layout(make_plan())
    header = json.loads(layout.describe(hooks={"sample": "gone"}))
    assert header["hooks"] == {"sample": "gone"}
    assert [family["name"] for family in header["families"]] == [f.metric.name for f in layout.families]
    assert header["labels"]["server"] == "node-a:30000"
