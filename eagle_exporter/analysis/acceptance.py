"""Tokens per cycle for other step counts, for chains (topk 1).

L(k) = 1 + p_0 + ... + p_(k-1), where p_i is the unconditional acceptance at position i. This is exact for
every k up to the number of positions that were offered: a chain with fewer steps offers the same tokens, only
fewer. Source: the expected number of accepted tokens as a sum of tail probabilities; with p_i = a^(i+1) it is
the formula of Leviathan et al., arXiv 2211.17192, (1 - a^(k+1)) / (1 - a). The single-rate form is used only
where nothing is known by position, since acceptance falls with depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eagle_exporter.analysis.observations import Position

_BISECTIONS = 200
_NEGLIGIBLE = 1e-12  # far below one accepted token in all that a counter can hold


@dataclass(frozen=True)
class Estimate:
    """A number and the band it lies in: ``low <= value <= high``."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class AcceptanceCurve:
    """Acceptance by position.

    Attributes:
        rates: p_0, p_1, ..., 0 to 1 each: positions that were offered.
        by_position: False when the rates were not measured by position but follow from the mean under the
            assumption of one constant conditional acceptance.

    """

    rates: tuple[float, ...]
    by_position: bool = True

    def tokens_per_cycle(self, num_steps: int) -> Estimate | None:
        """Return L(k) for `num_steps` steps, 1 or more; None when no position was ever offered.

        Beyond the offered positions this is an extrapolation: geometric with the last conditional acceptance,
        within L(n) <= L(k) <= L(n) + (k - n) p_(n-1), n being the number of offered positions. The bounds
        hold since in a chain a token counts only after those before it.
        """
        known = len(self.rates)
        if known == 0:
            return None
        inside = 1.0 + sum(self.rates[:num_steps])
        beyond = num_steps - known
        if beyond <= 0:
            return Estimate(inside, inside, inside)
        last = self.rates[-1]
        # With one known position its rate is the only conditional acceptance there is.
        before = self.rates[-2] if known > 1 else 1.0
        conditional = min(1.0, last / before) if before > 0 else 0.0
        more = sum(last * conditional**i for i in range(1, beyond + 1))
        return Estimate(inside + more, inside, inside + beyond * last)


def acceptance_curve(
    positions: Sequence[Position], accepted_per_draft: float | None, num_steps: int
) -> AcceptanceCurve:
    """Return the acceptance by position for one batch size.

    Positions are counted over all batch sizes. They give the shape; its height is set so that at the running
    step count the curve gives the tokens per cycle of this very batch size.

    Args:
        positions: By position from 0, over all batch sizes. The first one that was never offered ends the
            curve.
        accepted_per_draft: Mean accepted tokens per draft at this batch size and `num_steps`; None when not
            known.
        num_steps: Step count under which that mean was seen.

    """
    rates: list[float] = []
    for position in positions:
        rate = position.rate
        if rate is None:
            break
        # In a chain acceptance cannot rise with depth; counters read a moment apart can pretend that it does.
        rates.append(min(rate, rates[-1]) if rates else rate)
    if accepted_per_draft is None or num_steps < 1:
        return AcceptanceCurve(tuple(rates))
    if len(rates) >= num_steps:
        scaled = scale_to_mean(rates, accepted_per_draft, num_steps)
        if scaled is not None:
            return AcceptanceCurve(tuple(scaled))
    return AcceptanceCurve(tuple(geometric_rates(accepted_per_draft, num_steps)), by_position=False)


def scale_to_mean(rates: Sequence[float], accepted_per_draft: float, num_steps: int) -> list[float] | None:
    """Scale rates by one factor, cut at 1, so that the first `num_steps` of them sum to `accepted_per_draft`.

    Returns:
        The scaled rates, as many as given; None when no factor does it (every rate is 0, or too few are above
        0).

    """
    first = rates[:num_steps]
    positive = sum(rate > _NEGLIGIBLE for rate in first)
    if accepted_per_draft <= 0:
        return [0.0] * len(rates)
    if accepted_per_draft > positive:
        return None
    factor = accepted_per_draft / sum(first)
    if factor * max(first) > 1.0:
        low, high = factor, 1.0 / min(rate for rate in first if rate > _NEGLIGIBLE)
        for _ in range(_BISECTIONS):
            factor = (low + high) / 2.0
            if sum(min(1.0, factor * rate) for rate in first) < accepted_per_draft:
                low = factor
            else:
                high = factor
    return [min(1.0, factor * rate) for rate in rates]


def geometric_rates(accepted_per_draft: float, num_steps: int) -> list[float]:
    """Return p_i = a^(i+1) for the one conditional acceptance a that gives the mean.

    That is, p_0 + ... + p_(k-1) = `accepted_per_draft` with k = `num_steps`. The mean is cut to what so many
    steps can give: 0 to `num_steps`.
    """
    wanted = min(max(accepted_per_draft, 0.0), float(num_steps))
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        if sum(middle ** (i + 1) for i in range(num_steps)) < wanted:
            low = middle
        else:
            high = middle
    return [high ** (i + 1) for i in range(num_steps)]


def conditional_acceptance(tokens_per_cycle: float, num_steps: int) -> float | None:
    """Return the constant acceptance per step that gives `tokens_per_cycle` with `num_steps` steps.

    Source: Leviathan et al., arXiv 2211.17192, inverted. None when it cannot be had (L above k + 1, or no
    steps).
    """
    if num_steps < 1 or not 1.0 <= tokens_per_cycle <= num_steps + 1:
        return None
    return geometric_rates(tokens_per_cycle - 1.0, num_steps)[0]
