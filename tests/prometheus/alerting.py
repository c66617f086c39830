"""What Prometheus makes of an alert's expression over time: ``for`` and ``keep_firing_for``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def seconds(duration: str | None) -> float:
    """Return a Prometheus duration in seconds; None is 0."""
    if duration is None:
        return 0.0
    parts = re.findall(r"(\d+)(ms|[smhdw])", duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise ValueError(f"not a duration: {duration!r}")
    return sum(int(number) * _UNITS[unit] for number, unit in parts)


@dataclass(frozen=True)
class Firing:
    """An alert that fired from its first firing evaluation to its last."""

    start: float
    end: float

    @property
    def hours(self) -> float:
        """How long it fired."""
        return (self.end - self.start) / 3600


def firings(
    active: Iterable[float],
    evaluations: Iterable[float],
    *,
    for_seconds: float = 0.0,
    keep_firing_seconds: float = 0.0,
) -> list[Firing]:
    """Return when an alert fires.

    Args:
        active: Times at which the expression had a result for this label set.
        evaluations: All times at which the rule was evaluated, ascending.
        for_seconds: The rule's ``for``.
        keep_firing_seconds: The rule's ``keep_firing_for``.

    """
    true_at = frozenset(active)
    found: list[Firing] = []
    pending_since: float | None = None
    start: float | None = None
    false_since: float | None = None
    last = 0.0
    for now in evaluations:
        if now in true_at:
            false_since = None
            if pending_since is None:
                pending_since = now
            if start is None and now - pending_since >= for_seconds:
                start = now
        elif start is None:
            pending_since = None
        else:
            if false_since is None:
                false_since = now
            if now - false_since >= keep_firing_seconds:
                found.append(Firing(start, last))
                pending_since = start = false_since = None
        last = now
    if start is not None:
        found.append(Firing(start, last))
    return found
