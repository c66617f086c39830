"""Other step counts compared: tokens per second, speed-up, the best one, and what would have to change.

Tokens per second of one replica with k steps = requests · L(k) / (C(k) + gap); speed-up over no speculation =
L(k) (T_1 + gap_1) / (C(k) + gap); break-even L* = (C + gap) / (T_1 + gap_1) (design, section 7; the speed-up
is that of Leviathan et al., arXiv 2211.17192, with measured times in place of a cost ratio).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle_exporter.analysis.acceptance import (
    AcceptanceCurve,
    Estimate,
    acceptance_curve,
    conditional_acceptance,
)
from eagle_exporter.analysis.baseline import Baseline, BaselineStep, baseline_step
from eagle_exporter.analysis.cost import CostModel, Shape, cost_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eagle_exporter.analysis.observations import Cell, Position, Server

STEPS_BEYOND = 2
"""How many step counts beyond the largest one that ran are shown, as extrapolations."""

TIE = 0.05
"""Predictions closer than this fraction are not told apart: two runs of one setting differ by as much."""

_WORTH_A_LINE = 0.002
"""Fraction of the cost below which a saving is not listed."""

FEW_CYCLES = 200
"""Below so many timed cycles the mean accept length alone is uncertain by more than `TIE`.

With a spread of two thirds of the mean, 1 / sqrt(200) of it is 5 %.
"""

VERIFY_FASTER = 0.27
"""The fraction of verify that NCCL settings saved in the background story: an order of what tuning can do."""


@dataclass(frozen=True)
class Prediction:
    """What `num_steps` steps give, or would give.

    Attributes:
        num_steps: 0 is no speculation.
        observed: It ran, so everything is measured.
        extrapolated: It is beyond every step count that ran.
        tokens_per_cycle: L(k), the bonus token included; None when acceptance is not known.
        cost: Seconds of a cycle and its gap; None when it cannot be known.
        tokens_per_second: Of one replica while it decodes; None when one of the two above is.
        speedup: Over no speculation; None without a baseline.

    """

    num_steps: int
    observed: bool
    extrapolated: bool
    tokens_per_cycle: Estimate | None
    cost: Estimate | None
    tokens_per_second: Estimate | None
    speedup: Estimate | None


@dataclass(frozen=True)
class Best:
    """The step count with the most tokens per second among those that can be known.

    Attributes:
        num_steps: By the estimates; 0 is no speculation.
        confidence: ``certain`` (its worst case beats every other's best case by more than `TIE`), ``likely``
            (best whether verify rises concavely, linearly or convexly with tokens, and no other within
            `TIE`), else ``open``; always ``open`` below `FEW_CYCLES`.
        within_error: Every step count that may be best, `num_steps` included, ascending.

    """

    num_steps: int
    confidence: str
    within_error: tuple[int, ...]


@dataclass(frozen=True)
class Sensitivity:
    """One thing changed, the rest as it is.

    Attributes:
        change: ``verify_faster``, ``draft_free``, ``no_gap`` or ``one_step_less``.
        tokens_per_second: With the change; a band where it is a prediction.
        relative: Change of tokens per second as a fraction: 0.1 is 10 % more.
        speedup: Over no speculation with the change; None without a baseline.

    """

    change: str
    tokens_per_second: Estimate
    relative: float
    speedup: Estimate | None


@dataclass(frozen=True)
class WhatIf:
    """Everything that can be said about other step counts at one batch size.

    Attributes:
        running: The cell that was taken as running: the one with most cycles.
        baseline: The decode step without speculation.
        predictions: By step count, from 0 (when there is a baseline); empty when steps cannot be predicted.
        best: None when it cannot be named.
        speedup: Of the running cell.
        breakeven: Tokens per cycle at which the running cell breaks even.
        breakeven_acceptance: The same as a constant acceptance per step; None when no acceptance reaches it,
            or for trees.
        breakeven_verify: Seconds of verify at which it breaks even; None when even a verify of 0 does not.
        sensitivities: What a change of the running cell would give.
        by_position: False when acceptance by position had to be assumed from its mean.

    """

    running: Cell
    baseline: BaselineStep | None
    predictions: tuple[Prediction, ...] = ()
    best: Best | None = None
    speedup: float | None = None
    breakeven: float | None = None
    breakeven_acceptance: float | None = None
    breakeven_verify: float | None = None
    sensitivities: tuple[Sensitivity, ...] = ()
    by_position: bool = True


def what_if(
    cells: Sequence[Cell],
    positions: Sequence[Position],
    baseline: BaselineStep | None,
    *,
    topk: int | None,
) -> WhatIf | None:
    """Compare step counts at one batch size.

    Args:
        cells: Cells of one batch size.
        positions: Acceptance by position, over all batch sizes.
        baseline: The decode step without speculation at this batch size.
        topk: Branches per draft step. Other step counts are predicted for chains (1) only: in a tree a
            position is a depth, and num_draft_tokens cuts its breadth.

    Returns:
        None when no cell ran with speculation.

    """
    speculating = [cell for cell in cells if cell.num_steps != 0]
    if not speculating:
        return None
    running = max(speculating, key=lambda cell: cell.cycles)
    tokens, cost = running.tokens_per_cycle, running.cost
    speedup = breakeven = None
    if baseline is not None and cost:
        breakeven = cost / baseline.seconds
        speedup = None if tokens is None else tokens / breakeven
    predictions: tuple[Prediction, ...] = ()
    best = None
    by_position = True
    if topk == 1 and running.num_steps:
        model = cost_model(speculating, baseline)
        curves = _curves(speculating, positions)
        by_position = curves[running.num_steps].by_position
        predictions = _predictions(model, curves, running, baseline)
        best = _best(running, model, predictions)
    return WhatIf(
        running=running,
        baseline=baseline,
        predictions=predictions,
        best=best,
        speedup=speedup,
        breakeven=breakeven,
        breakeven_acceptance=(
            conditional_acceptance(breakeven, running.num_steps)
            if breakeven is not None and running.num_steps and topk == 1
            else None
        ),
        breakeven_verify=_breakeven_verify(running, baseline),
        sensitivities=_sensitivities(running, baseline, predictions),
        by_position=by_position,
    )


def _curves(cells: Sequence[Cell], positions: Sequence[Position]) -> dict[int, AcceptanceCurve]:
    return {
        cell.num_steps: acceptance_curve(
            positions, cell.accepted / cell.drafts if cell.drafts > 0 else None, cell.num_steps
        )
        for cell in cells
        if cell.num_steps
    }


def _predictions(
    model: CostModel, curves: Mapping[int, AcceptanceCurve], running: Cell, baseline: BaselineStep | None
) -> tuple[Prediction, ...]:
    requests = running.requests_per_cycle
    largest = max(curves)
    predictions: list[Prediction] = []
    if baseline is not None and requests is not None:
        seconds = baseline.seconds
        rate = requests / seconds
        predictions.append(
            Prediction(0, True, False, _exact(1.0), _exact(seconds), _exact(rate), _exact(1.0)),
        )
    for steps in range(1, largest + STEPS_BEYOND + 1):
        # Each tier's own acceptance counts for it and for fewer steps down to the next tier.
        curve = curves[min((k for k in curves if k >= steps), default=largest)]
        tokens = curve.tokens_per_cycle(steps)
        cost = model.cost(steps)
        predictions.append(
            Prediction(
                num_steps=steps,
                observed=steps in model.observed,
                extrapolated=steps > largest,
                tokens_per_cycle=tokens,
                cost=cost,
                tokens_per_second=_rate(requests, tokens, cost),
                speedup=None if baseline is None else _rate(baseline.seconds, tokens, cost),
            )
        )
    return tuple(predictions)


def _best(running: Cell, model: CostModel, predictions: Sequence[Prediction]) -> Best | None:
    """Return the best step count of those that ran or lie below one that ran."""
    known = {
        prediction.num_steps: prediction
        for prediction in predictions
        if prediction.tokens_per_second is not None and not prediction.extrapolated
    }
    # Without a baseline only the step counts that ran are known; one of them alone is no choice.
    if len(known) < 2:
        return None
    rates = {steps: rate for steps, item in known.items() if (rate := item.tokens_per_second) is not None}
    estimates = {steps: rate.value for steps, rate in rates.items()}
    best = max(estimates, key=lambda steps: estimates[steps])
    if running.timed_cycles < FEW_CYCLES:
        return Best(best, "open", tuple(sorted(known)))
    others = [steps for steps in rates if steps != best]
    if all(rates[best].low > rates[steps].high * (1.0 + TIE) for steps in others):
        return Best(best, "certain", (best,))
    winners = {best}
    for shape in Shape:
        shaped: dict[int, float] = {}
        for steps, item in known.items():
            cost = item.cost if steps == 0 else model.cost(steps, shape)
            if cost is not None and item.cost is not None and cost.value > 0:
                shaped[steps] = estimates[steps] * item.cost.value / cost.value
        top = max(shaped.values())
        winners |= {steps for steps, rate in shaped.items() if rate >= top * (1.0 - TIE)}
    confidence = "likely" if winners == {best} else "open"
    return Best(best, confidence, tuple(sorted(winners)))


def _sensitivities(
    running: Cell, baseline: BaselineStep | None, predictions: Sequence[Prediction]
) -> tuple[Sensitivity, ...]:
    cost, rate, tokens = running.cost, running.tokens_per_second, running.tokens_per_cycle
    if not cost or not rate or tokens is None:
        return ()
    saved = {
        "verify_faster": VERIFY_FASTER * (running.phase("target_verify") or 0.0),
        "draft_free": (running.phase("draft_steps") or 0.0) + (running.phase("draft_extend") or 0.0),
        "no_gap": running.gap or 0.0,
    }
    result: list[Sensitivity] = []
    for change, seconds in saved.items():
        if not _WORTH_A_LINE * cost < seconds < cost:
            continue
        factor = cost / (cost - seconds)
        speedup = None if baseline is None else _exact(tokens * baseline.seconds / (cost - seconds))
        result.append(Sensitivity(change, _exact(rate * factor), factor - 1.0, speedup))
    less = (running.num_steps or 0) - 1
    for prediction in predictions:
        predicted = prediction.tokens_per_second
        if prediction.num_steps == less and less > 0 and predicted is not None:
            result.append(Sensitivity("one_step_less", predicted, predicted.value / rate - 1.0, prediction.speedup))
    return tuple(result)


def _breakeven_verify(running: Cell, baseline: BaselineStep | None) -> float | None:
    tokens, cost, verify = running.tokens_per_cycle, running.cost, running.phase("target_verify")
    if baseline is None or tokens is None or cost is None or verify is None:
        return None
    allowed = tokens * baseline.seconds - (cost - verify)
    return allowed if allowed > 0 else None


def _exact(value: float) -> Estimate:
    return Estimate(value, value, value)


def _rate(factor: float | None, tokens: Estimate | None, cost: Estimate | None) -> Estimate | None:
    """Return factor · tokens / cost with its band."""
    if factor is None or tokens is None or cost is None or cost.low <= 0:
        return None
    return Estimate(
        factor * tokens.value / cost.value, factor * tokens.low / cost.high, factor * tokens.high / cost.low
    )


@dataclass(frozen=True)
class SwitchOff:
    """Where speculation stops paying off.

    Attributes:
        pays_up_to: Largest batch size with a speed-up of at least 1 below the first one without; None when it
            does not pay off at any.
        stops_at: First batch size, in order, from which it does not pay off any more; None when it pays off
            at the largest one that was seen.
        mixed: It pays off again at a larger batch size than one where it does not: the traffic differs in
            more than batch size.

    """

    pays_up_to: str | None
    stops_at: str | None
    mixed: bool


def switch_off(speedups: Sequence[tuple[str, float]]) -> SwitchOff | None:
    """Return the batch size above which to switch speculation off; None when no speed-up is known.

    Args:
        speedups: (batch size, speed-up) of those that are known, ascending by batch size.

    """
    if not speedups:
        return None
    pays = [speedup >= 1.0 for _, speedup in speedups]
    last = max((i for i, pay in enumerate(pays) if pay), default=-1)
    stops = speedups[last + 1][0] if last + 1 < len(speedups) else None
    return SwitchOff(speedups[last][0] if last >= 0 else None, stops, not all(pays[: last + 1]))


@dataclass(frozen=True)
class Comparison:
    """A prediction beside the run that tested it.

    Attributes:
        batch_size: Value of the label.
        num_steps: Of the run.
        predicted: Tokens per second of one replica, with its band; None when nothing was predicted.
        measured: Tokens per second of the run.
        error: predicted / measured - 1; None when nothing was predicted.
        in_band: The measured value lies in the band; None when nothing was predicted.

    """

    batch_size: str
    num_steps: int
    predicted: Estimate | None
    measured: float
    error: float | None
    in_band: bool | None


def compare_with_runs(
    predicted_from: Server, runs: Sequence[Server], saved: Baseline | None = None
) -> tuple[Comparison, ...]:
    """Compare what one run predicts for other step counts with runs of those step counts.

    Args:
        predicted_from: The run that predicts, for example with 5 steps.
        runs: The runs that test it, each with its own step count. Runs without speculation are left out: they
            are the baseline.
        saved: The baseline; the configured or measured one of `predicted_from` when None.

    Returns:
        One comparison per batch size and step count that a run has and the predicting run did not have.

    """
    result: list[Comparison] = []
    for batch_size in predicted_from.batch_sizes():
        answer = what_if(
            predicted_from.at(batch_size),
            predicted_from.positions,
            baseline_step(batch_size, predicted_from, saved),
            topk=predicted_from.topk,
        )
        predictions = {} if answer is None else {item.num_steps: item for item in answer.predictions}
        for cell in (cell for run in runs for cell in run.at(batch_size)):
            measured, steps = cell.tokens_per_second, cell.num_steps
            if not steps or measured is None:
                continue
            prediction = predictions.get(steps)
            if prediction is not None and prediction.observed:
                continue
            predicted = None if prediction is None else prediction.tokens_per_second
            result.append(
                Comparison(
                    batch_size=batch_size,
                    num_steps=steps,
                    predicted=predicted,
                    measured=measured,
                    error=None if predicted is None else predicted.value / measured - 1.0,
                    in_band=None if predicted is None else predicted.low <= measured <= predicted.high,
                )
            )
    return tuple(result)
