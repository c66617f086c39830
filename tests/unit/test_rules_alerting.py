"""``for`` and ``keep_firing_for`` as the simulation applies them."""

from __future__ import annotations

import pytest

from tests.prometheus.alerting import Firing, firings, seconds

MINUTES = [60.0 * minute for minute in range(20)]


def at(*minutes: int) -> list[float]:
    return [60.0 * minute for minute in minutes]


def found(active: list[float], for_minutes: int = 0, keep_minutes: int = 0) -> list[tuple[float, float]]:
    result = firings(active, MINUTES, for_seconds=for_minutes * 60, keep_firing_seconds=keep_minutes * 60)
    return [(one.start / 60, one.end / 60) for one in result]


def test_without_for_an_alert_fires_at_once_and_ends_with_its_condition() -> None:
    assert found(at(3, 4, 5)) == [(3, 5)]


def test_a_condition_shorter_than_for_never_fires() -> None:
    assert found(at(3, 4), for_minutes=2) == []
    assert found(at(3, 4, 5), for_minutes=2) == [(5, 5)]


def test_a_gap_begins_the_waiting_anew() -> None:
    assert found(at(3, 4, 6, 7), for_minutes=2) == []


def test_keep_firing_bridges_a_gap() -> None:
    assert found(at(3, 4, 7, 8), keep_minutes=3) == [(3, 11)]
    assert found(at(3, 4, 7, 8), keep_minutes=1) == [(3, 5), (7, 9)]


def test_a_pending_alert_is_not_kept() -> None:
    assert found(at(3), for_minutes=2, keep_minutes=5) == []


def test_an_alert_that_still_fires_ends_with_the_evaluations() -> None:
    assert found(at(*range(15, 20)), for_minutes=1, keep_minutes=5) == [(16, 19)]


def test_nothing_active_is_nothing() -> None:
    assert found([]) == []


@pytest.mark.parametrize(
    ("text", "expected"), [("5m", 300), ("1h30m", 5400), ("2d", 172800), ("500ms", 0.5), (None, 0)]
)
def test_durations(text: str | None, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "5", "m", "5 m", "5y2"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        seconds(text)


def test_hours() -> None:
    assert Firing(0, 5400).hours == 1.5
