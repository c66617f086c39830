"""What a cycle would cost with another number of steps, at one batch size.

C(k) = verify(k+1 tokens) + (k-1) t_draft + draft_extend + verify_overhead + kv_cache + other, and the gap
(design, section 7). SGLang runs k-1 draft forwards for k steps: the first draft token comes from the
preceding extend.

Verify is what matters and what is not known between the points that were measured. Those points are one token
(the decode step without speculation) and k+1 tokens of every step count that ran. Between two of them:

* the estimate is the straight line (`Shape.LINEAR`);
* the band is what any cost that does not fall with more tokens can be: at least the lower point, at most the
  upper one. A cost that rises steeply first and flattens (experts of a mixture being touched one by one, an
  all-reduce in its latency range) lies above the line, one that stays flat and then rises (memory-bound, then
  compute-bound) lies below it, so neither side may be cut off at the line.

Beyond the largest step count that ran, the line is continued, and the band is at least 10 % wide: a linear
extrapolation of cost promises too much for many steps on public tables. Its upper side is a cost per verified
token that does not rise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from eagle_exporter.analysis.acceptance import Estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eagle_exporter.analysis.baseline import BaselineStep
    from eagle_exporter.analysis.observations import Cell

EXTRAPOLATION_ERROR = 0.10
"""Least relative half-width of the band beyond the largest step count that ran."""


class Shape(Enum):
    """How verify may rise between two measured points, as the exponent of the way from one to the other."""

    CONCAVE = 0.5
    LINEAR = 1.0
    CONVEX = 2.0


@dataclass(frozen=True)
class Point:
    """Seconds of verify with `num_steps` steps; `low` is the least it can be."""

    num_steps: int
    seconds: float
    low: float


@dataclass(frozen=True)
class CostModel:
    """Costs at one batch size.

    Attributes:
        cells: Observed cells with speculation and a known cost, by step count.
        points: Known verify times by step count, 0 being one token; each at least as large as the one before.
        has_baseline: ``points`` begins with a decode step without speculation.

    """

    cells: tuple[Cell, ...]
    points: tuple[Point, ...]
    has_baseline: bool

    @property
    def observed(self) -> tuple[int, ...]:
        """Step counts that ran, ascending."""
        return tuple(steps for cell in self.cells if (steps := cell.num_steps) is not None)

    def cost(self, num_steps: int, shape: Shape = Shape.LINEAR) -> Estimate | None:
        """Return C(k) + gap in seconds for k = `num_steps` >= 1.

        A step count that ran is its own measurement, without a band. None when nothing is known on one side
        of it: fewer steps than ran need a baseline, and more need two points to draw a line through.
        """
        if not self.cells:
            return None
        running = next((cell for cell in self.cells if cell.num_steps == num_steps), None)
        if running is not None:
            cost = running.cost
            return None if cost is None else Estimate(cost, cost, cost)
        if num_steps > self.observed[-1]:
            return self._beyond(num_steps)
        return self._between(num_steps, shape)

    def constant_verify(self, num_steps: int) -> float | None:
        """Return C(k) + gap in seconds if verify cost the same as at the next larger step count that ran.

        For fewer steps than ran this is the most that they can cost. None beyond them.
        """
        above = next((cell for cell in self.cells if (cell.num_steps or 0) >= num_steps), None)
        if above is None:
            return None
        verify = above.phase("target_verify")
        rest = _rest(above, num_steps)
        return None if verify is None or rest is None else verify + rest.value

    def _between(self, num_steps: int, shape: Shape) -> Estimate | None:
        above = next(point for point in self.points if point.num_steps > num_steps)
        below = next((point for point in reversed(self.points) if point.num_steps < num_steps), None)
        cell = next(cell for cell in self.cells if cell.num_steps == above.num_steps)
        rest = _rest(cell, num_steps)
        if below is None or rest is None:
            return None
        way = (num_steps - below.num_steps) / (above.num_steps - below.num_steps)
        verify = below.seconds + (above.seconds - below.seconds) * way**shape.value
        return Estimate(verify + rest.value, min(below.low, verify) + rest.low, above.seconds + rest.high)

    def _beyond(self, num_steps: int) -> Estimate | None:
        if len(self.points) < 2:
            return None
        before, last = self.points[-2:]
        rest = _rest(self.cells[-1], num_steps)
        if rest is None:
            return None
        slope = (last.seconds - before.seconds) / (last.num_steps - before.num_steps)
        verify = last.seconds + slope * (num_steps - last.num_steps)
        per_token = last.seconds * (num_steps + 1) / (last.num_steps + 1)
        value = verify + rest.value
        return Estimate(
            value,
            min(last.seconds + rest.low, value * (1.0 - EXTRAPOLATION_ERROR)),
            max(per_token + rest.high, value * (1.0 + EXTRAPOLATION_ERROR)),
        )


def cost_model(cells: Sequence[Cell], baseline: BaselineStep | None) -> CostModel:
    """Return the costs of one batch size.

    Args:
        cells: Cells of one batch size.
        baseline: The decode step without speculation; None when there is none.

    """
    usable = sorted(
        (cell for cell in cells if cell.num_steps and cell.cost is not None),
        key=lambda cell: cell.num_steps or 0,
    )
    points: list[Point] = []
    if baseline is not None and usable:
        points.append(_first_point(baseline, usable[0]))
    for cell in usable:
        seconds = cell.phase("target_verify") or 0.0
        points.append(Point(cell.num_steps or 0, seconds, seconds))
    # A measurement that falls with more tokens is noise or other traffic: what more tokens cost, fewer cannot
    # exceed.
    for i in range(len(points) - 2, -1, -1):
        ceiling = points[i + 1].seconds
        if points[i].seconds > ceiling:
            points[i] = Point(points[i].num_steps, ceiling, min(points[i].low, ceiling))
    return CostModel(tuple(usable), tuple(points), baseline is not None)


def _first_point(baseline: BaselineStep, cell: Cell) -> Point:
    """Return verify of one token: the target forward of a plain step, else the whole step (T_1)."""
    if baseline.verify_seconds is not None:
        return Point(0, baseline.verify_seconds, baseline.verify_seconds)
    # The whole step also holds what C(k) adds to verify by itself, so the forward may be that much shorter.
    extra = sum(cell.phase(name) or 0.0 for name in ("verify_overhead", "kv_cache", ("other"))) + (cell.gap or 0.0)
    return Point(0, baseline.seconds, max(0.0, baseline.seconds - extra))


def _rest(cell: Cell, num_steps: int) -> Estimate | None:
    """Return everything but verify for `num_steps` steps, in seconds, from a cell with another step count."""
    running = cell.num_steps or 0
    draft, extend = cell.phase("draft_steps"), cell.phase("draft_extend")
    fixed = [cell.phase(name) for name in ("verify_overhead", "kv_cache", "other")]
    if draft is None or extend is None or any(seconds is None for seconds in fixed):
        return None
    # One step runs no draft forward, so its run does not say what one costs; a re-extend is a forward of the
    # same model over more tokens.
    step = draft / (running - 1) if running > 1 else extend
    steady = sum(seconds or 0.0 for seconds in fixed) + (cell.gap or 0.0) + (num_steps - 1) * step
    # The re-extend runs over the verified tokens: its cost lies between constant and proportional to them.
    scaled = extend * (num_steps + 1) / (running + 1)
    return Estimate(steady + extend, steady + min(extend, scaled), steady + max(extend, scaled))
