from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_exporter.hooks.acceptance import RowsBefore, correct_drafts
from eagle_exporter.timing.cycle import Acceptance


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


def accepted(rows: RowsBefore, given: Any) -> Acceptance:
    drafts = correct_drafts(given)
    assert drafts is not None
    return rows.acceptance(drafts)


def test_every_live_row_is_a_draft() -> None:
    requests = [Request(), Request(output_ids=[9, 9]), Request(origin_input_ids=[1] * 10)]
    acceptance = accepted(RowsBefore(requests), result(0, 3, 1))
    assert list(acceptance.correct_drafts) == [0, 3, 1]
    assert list(acceptance.context_tokens) == [3, 5, 10]
    assert acceptance.wasted_rows == 0
    assert acceptance.excluded is None


@pytest.mark.parametrize("gone", [{"finished_reason": "length"}, {"is_retracted": True}])
def test_the_row_of_a_finished_or_retracted_request_is_no_draft(gone: dict[str, Any]) -> None:
    requests = [Request(), Request(**gone), Request()]
    acceptance = accepted(RowsBefore(requests), result(1, 3, 2))
    assert list(acceptance.correct_drafts) == [1, 2]
    assert acceptance.wasted_rows == 1
    assert acceptance.excluded is None


def test_a_request_that_finishes_with_this_result_is_still_a_draft() -> None:
    """Rows are judged before SGLang updates their requests."""
    request = Request()
    rows = RowsBefore([request])
    request.output_ids += [7, 8]
    request.finished_reason = "length"
    assert list(accepted(rows, result(1)).correct_drafts) == [1]
    assert list(accepted(rows, result(1)).context_tokens) == [3]


def test_a_cycle_without_a_live_row_is_excluded_and_its_rows_are_wasted() -> None:
    acceptance = accepted(RowsBefore([Request(finished_reason="stop")] * 2), result(1, 2))
    assert acceptance.excluded == "no_live_row"
    assert acceptance.wasted_rows == 2
    assert list(acceptance.correct_drafts) == []


def test_a_cycle_without_any_row_is_excluded() -> None:
    assert accepted(RowsBefore([]), result()).excluded == "no_live_row"


def test_a_cycle_of_health_checks_only_is_excluded_and_nothing_is_wasted() -> None:
    acceptance = accepted(RowsBefore([Request(rid="HEALTH_CHECK_1")]), result(1))
    assert acceptance.excluded == "health_check"
    assert acceptance.wasted_rows == 0


def test_a_health_check_among_requests_is_no_draft_and_not_wasted() -> None:
    acceptance = accepted(RowsBefore([Request(rid="HEALTH_CHECK_1"), Request()]), result(3, 1))
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
    assert rows.after()[0] == appended


def test_tokens_of_rows_that_were_not_live_are_not_output() -> None:
    finished, health = Request(finished_reason="length"), Request(rid="HEALTH_CHECK_3")
    rows = RowsBefore([finished, health])
    finished.output_ids.append(1)
    health.output_ids.append(1)
    assert rows.after()[0] == 0


@pytest.mark.parametrize(
    "name", ["num_correct_drafts_per_req_cpu", "num_accepted_drafts_per_req_cpu", "accept_length_per_req_cpu"]
)
def test_the_field_of_every_version_is_found(name: str) -> None:
    assert correct_drafts(SimpleNamespace(**{name: [2, 0]})) == [2, 0]


def test_the_newest_field_wins_and_empty_ones_are_passed_over() -> None:
    both = SimpleNamespace(num_correct_drafts_per_req_cpu=None, accept_length_per_req_cpu=[1])
    assert correct_drafts(both) == [1]


class Lengths:
    """What the hooks do with a tensor of accept lengths; on the GPU reading it would wait."""

    def __init__(self, *lengths: int, is_cpu: bool = True) -> None:
        self.is_cpu = is_cpu
        self._lengths = list(lengths)

    def tolist(self) -> list[int]:
        assert self.is_cpu, "waited for the GPU"
        return self._lengths


def test_0_5_6_leaves_only_the_lengths_and_they_hold_the_bonus_token() -> None:
    assert correct_drafts(SimpleNamespace(num_accepted_tokens=2, accept_lens=Lengths(3, 1))) == [2, 0]


def test_lengths_on_the_device_are_an_error_and_not_waited_for() -> None:
    with pytest.raises(ValueError, match="not on the host"):
        correct_drafts(SimpleNamespace(accept_lens=Lengths(3, is_cpu=False)))


def test_a_result_of_no_verify_has_none() -> None:
    assert correct_drafts(SimpleNamespace()) is None
    assert correct_drafts(SimpleNamespace(num_correct_drafts=0, num_correct_drafts_per_req_cpu=None)) is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (result(1), "1 accept lengths for 2 rows"),
        (result(1, 2, 3), "3 accept lengths for 2 rows"),
        (result(1, -1), "negative"),
    ],
)
def test_a_result_that_cannot_be_right_is_an_error_and_not_a_count(bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accepted(RowsBefore([Request(), Request()]), bad)


# --- V1: the requests count for themselves ------------------------------------------------------------------
def counting(name: str, tokens: int = 0, checks: int = 0, **facts: Any) -> Request:
    request = Request(**facts)
    setattr(request, name, tokens)
    request.spec_verify_ct = checks  # type: ignore[attr-defined]
    return request


def verify(request: Request, name: str, accepted_drafts: int, stop_after: int | None = None) -> None:
    """What ``EagleVerifyInput.verify`` does to a request: the count is taken before the cut, the tokens after it."""
    appended = accepted_drafts + 1 if stop_after is None else min(stop_after, accepted_drafts + 1)
    request.output_ids += [7] * appended
    if stop_after is not None:
        request.finished_reason = "stop"
    setattr(request, name, getattr(request, name) + accepted_drafts)
    request.spec_verify_ct += 1  # type: ignore[attr-defined]


NAMES = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accepted_tokens")


@pytest.mark.parametrize("name", NAMES)
def test_v1_tells_what_was_accepted_before_the_stop_token_cut_it(name: str) -> None:
    requests = [counting(name, tokens=10, checks=4), counting(name), counting(name, output_ids=[1, 2])]
    rows = RowsBefore(requests, counters=True)
    assert not rows.updated()
    verify(requests[0], name, 3)
    verify(requests[1], name, 3, stop_after=2)
    verify(requests[2], name, 0)
    assert rows.updated()
    drafts = rows.drafts_of_requests()
    assert drafts == [3, 3, 0]
    acceptance = rows.acceptance(drafts)
    assert list(acceptance.correct_drafts) == [3, 3, 0], "V2 has the same numbers for the same tokens"
    assert list(acceptance.context_tokens) == [3, 3, 5]
    assert rows.after()[0] == 4 + 2 + 1


@pytest.mark.parametrize("name", NAMES)
def test_v1_without_a_verify_has_none(name: str) -> None:
    request = counting(name, tokens=5, checks=2)
    rows = RowsBefore([request], counters=True)
    request.output_ids.append(1)
    assert rows.drafts_of_requests() is None


def test_a_row_that_v1_did_not_verify_once_is_an_error_and_not_a_count() -> None:
    requests = [counting(NAMES[0]), counting(NAMES[0])]
    rows = RowsBefore(requests, counters=True)
    verify(requests[0], NAMES[0], 1)
    with pytest.raises(ValueError, match="verified 0 times"):
        rows.drafts_of_requests()


def test_requests_that_count_nothing_are_an_error_and_not_a_count() -> None:
    request = Request()
    rows = RowsBefore([request], counters=True)
    request.output_ids.append(1)
    with pytest.raises(ValueError, match="has none of"):
        rows.drafts_of_requests()


def test_a_health_check_that_v1_verified_is_no_draft() -> None:
    requests = [counting(NAMES[2], rid="HEALTH_CHECK_7"), counting(NAMES[2])]
    rows = RowsBefore(requests, counters=True)
    verify(requests[0], NAMES[2], 2)
    verify(requests[1], NAMES[2], 1)
    drafts = rows.drafts_of_requests()
    assert drafts == [2, 1]
    assert list(rows.acceptance(drafts).correct_drafts) == [1]
    assert rows.after()[0] == 2
