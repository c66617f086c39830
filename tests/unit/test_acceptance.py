from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_exporter.hooks.acceptance import RowsBefore, correct_drafts


@dataclass
class Request:
    """What the hooks read of SGLang's ``Req``."""

    rid: str = "request"
    origin_input_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    output_ids: list[int] = field(default_factory=list)
    finished_reason: object = None
    is_retracted: bool = False
    finished_len: int | None = None


def result(*correct: int) -> Any:
    return SimpleNamespace(num_correct_drafts_per_req_cpu=list(correct))


def test_every_live_row_is_a_draft() -> None:
    requests = [Request(), Request(output_ids=[9, 9]), Request(origin_input_ids=[1] * 10)]
    acceptance = RowsBefore(requests).acceptance(result(0, 3, 1))
    assert list(acceptance.correct_drafts) == [0, 3, 1]
    assert list(acceptance.context_tokens) == [3, 5, 10]
    assert acceptance.wasted_rows == 0
    assert acceptance.excluded is None


@pytest.mark.parametrize("gone", [{"finished_reason": "length"}, {"is_retracted": True}])
def test_the_row_of_a_finished_or_retracted_request_is_no_draft(gone: dict[str, Any]) -> None:
    requests = [Request(), Request(**gone), Request()]
    acceptance = RowsBefore(requests).acceptance(result(1, 3, 2))
    assert list(acceptance.correct_drafts) == [1, 2]
    assert acceptance.wasted_rows == 1
    assert acceptance.excluded is None


def test_a_request_that_finishes_with_this_result_is_still_a_draft() -> None:
    """Rows are judged before SGLang updates their requests."""
    request = Request()
    rows = RowsBefore([request])
    request.output_ids += [7, 8]
    request.finished_reason = "length"
    assert list(rows.acceptance(result(1)).correct_drafts) == [1]
    assert list(rows.acceptance(result(1)).context_tokens) == [3]


def test_a_cycle_without_a_live_row_is_excluded_and_its_rows_are_wasted() -> None:
    acceptance = RowsBefore([Request(finished_reason="stop")] * 2).acceptance(result(1, 2))
    assert acceptance.excluded == "no_live_row"
    assert acceptance.wasted_rows == 2
    assert list(acceptance.correct_drafts) == []


def test_a_cycle_without_any_row_is_excluded() -> None:
    assert RowsBefore([]).acceptance(result()).excluded == "no_live_row"


def test_a_cycle_of_health_checks_only_is_excluded_and_nothing_is_wasted() -> None:
    acceptance = RowsBefore([Request(rid="HEALTH_CHECK_1")]).acceptance(result(1))
    assert acceptance.excluded == "health_check"
    assert acceptance.wasted_rows == 0


def test_a_health_check_among_requests_is_no_draft_and_not_wasted() -> None:
    acceptance = RowsBefore([Request(rid="HEALTH_CHECK_1"), Request()]).acceptance(result(3, 1))
    assert list(acceptance.correct_drafts) == [1]
    assert acceptance.wasted_rows == 0
    assert acceptance.excluded is None


@pytest.mark.parametrize(
    ("before", "after", "finished_len", "appended"),
    [
        ([], [5], None, 1),  # the first token, from prefill
        ([5], [5, 6, 7, 8], None, 3),
        ([5], [5, 6, 7, 8], 3, 2),  # a stop condition in the middle of what was accepted
        ([5], [5, 6, 7, 8], 4, 3),
        ([5], [5, 6, 7, 8], 9, 3),
        ([5, 6], [5, 6], None, 0),  # a chunk of a prefill
        ([5, 6, 7], [5, 6, 7], 2, 0),
        ([5, 6, 7], [], None, 0),
    ],
)
def test_appended_tokens_are_those_after_stop_conditions(
    before: list[int], after: list[int], finished_len: int | None, appended: int
) -> None:
    request = Request(output_ids=list(before))
    rows = RowsBefore([request])
    request.output_ids[:] = after
    request.finished_len = finished_len
    assert rows.appended_tokens() == appended


def test_tokens_of_rows_that_were_not_live_are_not_output() -> None:
    finished, health = Request(finished_reason="length"), Request(rid="HEALTH_CHECK_3")
    rows = RowsBefore([finished, health])
    finished.output_ids.append(1)
    health.output_ids.append(1)
    assert rows.appended_tokens() == 0


@pytest.mark.parametrize(
    "name", ["num_correct_drafts_per_req_cpu", "num_accepted_drafts_per_req_cpu", "accept_length_per_req_cpu"]
)
def test_the_field_of_every_version_is_found(name: str) -> None:
    assert list(correct_drafts(SimpleNamespace(**{name: [2, 0]}))) == [2, 0]


def test_the_newest_field_wins_and_empty_ones_are_passed_over() -> None:
    both = SimpleNamespace(num_correct_drafts_per_req_cpu=None, accept_length_per_req_cpu=[1])
    assert list(correct_drafts(both)) == [1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (SimpleNamespace(), "has none of"),
        (result(1), "1 accept lengths for 2 rows"),
        (result(1, 2, 3), "3 accept lengths for 2 rows"),
        (result(1, -1), "negative"),
    ],
)
def test_a_result_that_cannot_be_right_is_an_error_and_not_a_count(bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowsBefore([Request(), Request()]).acceptance(bad)
