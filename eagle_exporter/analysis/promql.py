"""The figures of the analysis as PromQL: what recording rules, alerts and dashboards are built from.

Every function returns one expression. Metric names come from the catalogue, so a renamed metric cannot be
missed.

Arguments that most functions share:

* ``selector``: label matchers without braces, for example ``server=~"$server"``; may be empty. Matchers on
  the common labels and on target labels (``job``, ``node``) hold everywhere; ``batch_size`` may be used where
  the result is by batch size, but not in predictions for other
  step counts; never put ``num_steps`` into it where a baseline is involved (its series have
  ``num_steps="0"``).
* ``window``: the range of ``rate``, for example ``5m`` or ``$__rate_interval``.
* ``by``: labels of the result. Ratios are sum over sum, so every level is exact for the traffic it pools;
  figures that are compared over time belong at `BATCH_LEVEL`, since cost moves with batch size and step
  count.

Rules that hold for every expression:

* Numerator and denominator come from the same ranks, the recording ranks: acceptance exists nowhere else, and
  the times of several tensor-parallel ranks describe the same cycle. With replicas (``dp_rank``) there is one
  recording rank per replica, and they are pooled.
* Results are grouped by ``server``, never by ``instance``: one server may span several nodes.
* A denominator of 0 gives no series instead of NaN: without traffic there is nothing to show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_exporter import catalogue
from eagle_exporter.catalogue import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SERVER_LEVEL = ("server",)
BATCH_LEVEL = ("server", "batch_size", "num_steps")
"""The level at which costs can be compared: equal server, batch size and step count."""

BASELINE_LEVEL = ("server", "batch_size")
RANK_LEVEL = catalogue.COMMON_LABELS

NO_SPECULATION = "0"
"""The ``num_steps`` value of plain decode and of zero-step tiers."""


def _name(metric: str) -> str:
    """Return a metric's name, checked against the catalogue.

    Raises:
        KeyError: The catalogue has no such metric.

    """
    return BY_NAME[metric].name


CYCLES = _name("eagle_batch_cycles_total")
TIMED_CYCLES = _name("eagle_batch_timed_cycles_total")
PHASE_SECONDS = _name("eagle_batch_phase_seconds_total")
GAP_SECONDS = _name("eagle_batch_gap_seconds_total")
DRAFTS = _name("eagle_batch_drafts_total")
ACCEPTED = _name("eagle_batch_accepted_tokens_total")
CONTEXT_TOKENS = _name("eagle_batch_context_tokens_total")
OFFERED_AT = _name("eagle_offered_tokens_per_pos_total")
ACCEPTED_AT = _name("eagle_accepted_tokens_per_pos_total")
OUTPUT_TOKENS = _name("eagle_output_tokens_total")
HOST_BOUND = _name("eagle_host_bound_cycles_total")
CONFIGURED_BASELINE = _name("eagle_baseline_decode_seconds")
NUM_STEPS = _name("eagle_spec_num_steps")
SPEC_CONFIG = _name("eagle_spec_config_info")


def matchers(*parts: str) -> str:
    """Join matchers into ``{...}``; empty parts are left out, and without any the result is empty."""
    text = _join(*parts)
    return f"{{{text}}}" if text else ""


def _join(*parts: str) -> str:
    stripped = (part.strip().strip(",") for part in parts)
    return ",".join(part for part in stripped if part)


def _labels(names: Sequence[str]) -> str:
    return ", ".join(names)


def _sum_rate(name: str, selector: str, window: str, by: Sequence[str], *more: str) -> str:
    """Sum of rates over the recording ranks."""
    rates = f"rate({name}{matchers(selector, *more)}[{window}])"
    if not BY_NAME[name].acceptance:
        # The same rank exports an acceptance counter: that makes it the recording rank.
        rates += f" and on ({_labels(catalogue.COMMON_LABELS)}) {DRAFTS}{matchers(selector)}"
    return f"sum by ({_labels(by)}) ({rates})"


def ratio(numerator: str, denominator: str) -> str:
    """Return numerator / denominator, without a series where the denominator is 0."""
    return f"({numerator}) / (({denominator}) > 0)"


# --- what a cycle costs -------------------------------------------------------------------------------------


def cycle_seconds(selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL) -> str:
    """Mean seconds of a cycle (C): the sum of its phases over the timed cycles.

    Under ``num_steps="0"`` the draft_extend of a zero-step tier is in it; `measured_baseline_seconds` leaves
    it out.
    """
    return ratio(_sum_rate(PHASE_SECONDS, selector, window, by), _sum_rate(TIMED_CYCLES, selector, window, by))


def phase_seconds(
    selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL, phase: str | None = None
) -> str:
    """Mean seconds of each phase per cycle; with `phase` only that one, else ``phase`` is a label.

    Raises:
        ValueError: The catalogue has no such phase.

    """
    timed = _sum_rate(TIMED_CYCLES, selector, window, by)
    if phase is not None:
        return ratio(_sum_rate(PHASE_SECONDS, selector, window, by, _phase(phase)), timed)
    seconds = _sum_rate(PHASE_SECONDS, selector, window, (*by, "phase"))
    return f"({seconds}) / on ({_labels(by)}) group_left () (({timed}) > 0)"


def phase_share(
    selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL, phase: str | None = None
) -> str:
    """Share of each phase in the cycle, 0 to 1; with `phase` only that one, else ``phase`` is a label.

    Raises:
        ValueError: The catalogue has no such phase.

    """
    cycle = _sum_rate(PHASE_SECONDS, selector, window, by)
    if phase is not None:
        return ratio(_sum_rate(PHASE_SECONDS, selector, window, by, _phase(phase)), cycle)
    seconds = _sum_rate(PHASE_SECONDS, selector, window, (*by, "phase"))
    return f"({seconds}) / on ({_labels(by)}) group_left () (({cycle}) > 0)"


def verify_share(selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL) -> str:
    """Share of target verify in the cycle, 0 to 1. It saturates near 1; judge drift on `verify_odds`."""
    return phase_share(selector, window, by, "target_verify")


def verify_seconds(selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL) -> str:
    """Mean seconds of target verify per cycle."""
    return phase_seconds(selector, window, by, "target_verify")


def verify_odds(selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL) -> str:
    """Verify / (cycle - verify): proportional to the cost of verify where the share no longer moves."""
    verify = _sum_rate(PHASE_SECONDS, selector, window, by, _phase("target_verify"))
    rest = _sum_rate(PHASE_SECONDS, selector, window, by, 'phase!="target_verify"')
    return ratio(verify, rest)


def gap_seconds(selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL) -> str:
    """Mean seconds between consecutive cycles."""
    return ratio(_sum_rate(GAP_SECONDS, selector, window, by), _sum_rate(TIMED_CYCLES, selector, window, by))


def cost_per_cycle(selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL) -> str:
    """Mean seconds of a cycle and the gap before it (C + gap): what the tokens of a cycle cost.

    Where the gap is not measured (no scheduler hook) there is no result: see `cycle_seconds`.
    """
    seconds = f"{_sum_rate(PHASE_SECONDS, selector, window, by)} + {_sum_rate(GAP_SECONDS, selector, window, by)}"
    return ratio(seconds, _sum_rate(TIMED_CYCLES, selector, window, by))


def host_bound_share(selector: str = "", window: str = "5m", by: Sequence[str] = SERVER_LEVEL) -> str:
    """Share of timed cycles that found the device waiting for the host, 0 to 1, over all batch sizes.

    `by` must not hold ``batch_size`` or ``num_steps``: the numerator has neither.
    """
    bound = _sum_rate(HOST_BOUND, selector, window, by)
    return ratio(bound, _sum_rate(TIMED_CYCLES, selector, window, by))


# --- what a cycle yields ------------------------------------------------------------------------------------


def cycles_per_second(selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL) -> str:
    """Decode cycles per second of wall time, timed or not; with replicas their sum."""
    return _sum_rate(CYCLES, selector, window, by)


def tokens_per_cycle(selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL) -> str:
    """Tokens per request and cycle (L = 1 + accepted / drafts), the bonus token included."""
    accepted = _sum_rate(ACCEPTED, selector, window, by)
    return f"1 + {ratio(accepted, _sum_rate(DRAFTS, selector, window, by))}"


def requests_per_cycle(selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL) -> str:
    """Mean live requests in a cycle of one replica: where inside the bucket the traffic lies."""
    return ratio(_sum_rate(DRAFTS, selector, window, by), _sum_rate(CYCLES, selector, window, by))


def context_tokens(selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL) -> str:
    """Mean context length of a request in a cycle, tokens."""
    return ratio(_sum_rate(CONTEXT_TOKENS, selector, window, by), _sum_rate(DRAFTS, selector, window, by))


def request_tokens_per_second(selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL) -> str:
    """Tokens per second that one request sees while it decodes: L / (C + gap)."""
    return f"({tokens_per_cycle(selector, window, by)}) / ({cost_per_cycle(selector, window, by)})"


def decode_tokens_per_second(selector: str = "", window: str = "5m", by: Sequence[str] = BATCH_LEVEL) -> str:
    """Tokens per second of one replica while it decodes: requests per cycle · L / (C + gap).

    This is the figure that a change of the step count moves; idle time and prefill are not in it.
    `output_tokens_per_second` is the throughput by the wall clock.
    """
    tokens = f"{_sum_rate(DRAFTS, selector, window, by)} + {_sum_rate(ACCEPTED, selector, window, by)}"
    per_cycle = ratio(tokens, _sum_rate(CYCLES, selector, window, by))
    return f"({per_cycle}) / ({cost_per_cycle(selector, window, by)})"


def output_tokens_per_second(selector: str = "", window: str = "5m", by: Sequence[str] = SERVER_LEVEL) -> str:
    """Tokens appended to requests per second of wall time, over all replicas.

    `by` must not hold ``batch_size`` or ``num_steps``: the counter has neither.
    """
    return _sum_rate(OUTPUT_TOKENS, selector, window, by)


# --- against no speculation ---------------------------------------------------------------------------------


def measured_baseline_seconds(selector: str = "", window: str = "5m") -> str:
    """Measured seconds of one decode step without speculation (T_1 + gap_1), by server and batch size.

    From plain decode or a zero-step tier (``num_steps="0"``); draft_extend is left out, since a zero-step
    tier may still run it and plain decode has none.
    """
    none = f'num_steps="{NO_SPECULATION}"'
    seconds = _sum_rate(PHASE_SECONDS, selector, window, BASELINE_LEVEL, none, 'phase!="draft_extend"')
    gap = _sum_rate(GAP_SECONDS, selector, window, BASELINE_LEVEL, none)
    return ratio(f"{seconds} + {gap}", _sum_rate(TIMED_CYCLES, selector, window, BASELINE_LEVEL, none))


def one_token_verify_seconds(selector: str = "", window: str = "5m") -> str:
    """Seconds of verify of one token, by server and batch size: the lower end of the line to what runs now.

    A configured baseline is known as a whole step only and is taken whole; of a measured one it is
    target_verify.
    """
    none = _join(selector, f'num_steps="{NO_SPECULATION}"')
    measured = verify_seconds(none, window, BASELINE_LEVEL)
    return f"{configured_baseline_seconds(selector)} or {measured}"


def configured_baseline_seconds(selector: str = "") -> str:
    """Seconds of one decode step without speculation as configured (wall time, its gap included)."""
    return f"max by ({_labels(BASELINE_LEVEL)}) ({CONFIGURED_BASELINE}{matchers(selector)})"


def baseline_seconds(selector: str = "", window: str = "5m") -> str:
    """The configured baseline, else the measured one, by server and batch size."""
    return f"{configured_baseline_seconds(selector)} or {measured_baseline_seconds(selector, window)}"


def speedup(selector: str = "", window: str = "5m", baseline: str | None = None) -> str:
    """Speed-up over no speculation at `BATCH_LEVEL`: L · (T_1 + gap_1) / (C + gap).

    Args:
        selector: See the module.
        window: See the module.
        baseline: An expression with the labels of `BASELINE_LEVEL`, for example a recorded series;
            `baseline_seconds` when None.

    """
    rate = request_tokens_per_second(_speculating(selector), window)
    return f"({rate}) * {_on_baseline()} ({baseline or baseline_seconds(selector, window)})"


def breakeven_tokens_per_cycle(selector: str = "", window: str = "5m", baseline: str | None = None) -> str:
    """Tokens per cycle at which speculation breaks even, at `BATCH_LEVEL`: L* = (C + gap) / (T_1 + gap_1)."""
    cost = cost_per_cycle(_speculating(selector), window)
    return f"({cost}) / {_on_baseline()} (({baseline or baseline_seconds(selector, window)}) > 0)"


# --- other step counts (chains, one step count in force) ----------------------------------------------------


def acceptance_at(selector: str = "", window: str = "5m", by: Sequence[str] = SERVER_LEVEL) -> str:
    """Acceptance (0 to 1) by the label ``position`` (unconditional; a lower bound for trees)."""
    level = (*by, "position")
    return ratio(_sum_rate(ACCEPTED_AT, selector, window, level), _sum_rate(OFFERED_AT, selector, window, level))


def tokens_per_cycle_at(
    num_steps: int, selector: str = "", window: str = "5m", by: Sequence[str] = SERVER_LEVEL
) -> str:
    """Tokens per cycle with `num_steps` steps, for chains: L(k) = 1 + p_0 + ... + p_(k-1).

    Positions carry no batch size, so this is pooled over batch sizes.
    There is no result where one of the positions was never offered (PromQL does not extrapolate) and for
    trees (topk above 1). `by` must hold ``server``.

    Raises:
        ValueError: `num_steps` is below 1.

    """
    _check_steps(num_steps)
    positions = 'position=~"' + "|".join(str(i) for i in range(num_steps)) + '"'
    rates = acceptance_at(_join(selector, positions), window, by)
    total = f"sum by ({_labels(by)}) ({rates})"
    complete = f"(count by ({_labels(by)}) ({rates}) == {num_steps})"
    return f"((1 + {total}) and {complete}) {_chains_only(selector)}"


def cost_per_cycle_at(
    num_steps: int,
    selector: str = "",
    window: str = "5m",
    *,
    verify: str = "linear",
    one_token_verify: str | None = None,
) -> str:
    """Cost of a cycle (C(k) + gap) with fewer steps than run now, at `BATCH_LEVEL`, seconds.

    Verify over k+1 tokens is not known; three assumptions bracket it: ``linear`` between the baseline at one
    token and what runs now (the estimate), ``constant`` as now (the most it can cost), ``flat`` at the
    baseline (the least, and with it a re-extend in proportion to its tokens). The draft costs (k-1) of the
    running K-1 forwards; the rest is taken as it is. The result carries the running ``num_steps`` as its
    label, and exists only for chains (topk 1) of more than `num_steps` steps.

    Raises:
        ValueError: `num_steps` is below 1, or `verify` is none of the three.

    """
    _check_steps(num_steps)
    running = _running_steps(selector)
    chosen = _speculating(selector)
    cost = cost_per_cycle(chosen, window)
    draft = phase_seconds(chosen, window, BATCH_LEVEL, "draft_steps")
    now = verify_seconds(chosen, window)
    base = one_token_verify or one_token_verify_seconds(selector, window)
    steps = "on (server, num_steps) group_left ()"
    fewer = f"(({draft}) * {steps} (1 - {num_steps - 1} / ({running} - 1)))"
    step = f"(({now}) - {_on_baseline()} ({base}))"
    extend = phase_seconds(chosen, window, BATCH_LEVEL, "draft_extend")
    shorter = f"(({extend}) * {steps} (1 - {num_steps + 1} / ({running} + 1)))"
    saved = {
        "constant": "",
        "linear": f" - ({step} * {steps} (1 - {num_steps} / {running}))",
        "flat": f" - {step} - {shorter}",
    }
    if verify not in saved:
        raise ValueError(f"verify must be one of {', '.join(saved)}, not {verify!r}")
    known = f"(({cost}) - {fewer}{saved[verify]}) and on (server, num_steps) ({running} > {num_steps})"
    return f"({known}) {_chains_only(selector)}"


def decode_tokens_per_second_at(
    num_steps: int,
    selector: str = "",
    window: str = "5m",
    *,
    verify: str = "linear",
    one_token_verify: str | None = None,
) -> str:
    """Tokens per second of one replica with fewer steps, at `BATCH_LEVEL`.

    For chains with one step count in force (not adaptive).

    Acceptance by position is pooled over batch sizes; it is scaled so that at the running step count it gives
    the tokens per cycle of each batch size.

    Raises:
        ValueError: `num_steps` is below 1, or `verify` is unknown (see `cost_per_cycle_at`).

    """
    chosen = _speculating(selector)
    on_server = "on (server) group_left ()"
    gain = f"(({tokens_per_cycle(chosen, window)}) - 1)"
    fewer = f"(({tokens_per_cycle_at(num_steps, selector, window)}) - 1)"
    # A sum over no acceptance at all is 0 / 0: fewer steps then yield nothing either, and the series is
    # dropped.
    total = f"((sum by (server) ({acceptance_at(selector, window)})) > 0)"
    tokens = f"(1 + {gain} * {on_server} ({fewer} / {total}))"
    cost = cost_per_cycle_at(num_steps, selector, window, verify=verify, one_token_verify=one_token_verify)
    return f"({requests_per_cycle(chosen, window)}) * {tokens} / ({cost})"


# --- joins --------------------------------------------------------------------------------------------------


def with_config_id(expression: str, selector: str = "") -> str:
    """Add the label ``config_id`` to an expression that has ``server``: a new configuration is a new series.

    One configuration per server: while ranks of a server differ (in the middle of a restart) one of them is
    taken.
    """
    config = f"max by (server, config_id) ({SPEC_CONFIG}{matchers(selector)})"
    return f"({expression}) * on (server) group_left (config_id) (topk by (server) (1, {config}))"


def _phase(phase: str) -> str:
    if phase not in catalogue.PHASES:
        raise ValueError(f"no such phase: {phase!r}; the catalogue has {', '.join(catalogue.PHASES)}")
    return f'phase="{phase}"'


def _speculating(selector: str) -> str:
    return _join(selector, f'num_steps!="{NO_SPECULATION}"')


def _on_baseline() -> str:
    return f"on ({_labels(BASELINE_LEVEL)}) group_left ()"


def _running_steps(selector: str) -> str:
    """The step count in force as a value, labelled server and num_steps, so that it meets its own cells."""
    now = f"max by (server) ({NUM_STEPS}{matchers(selector)})"
    return f'(count_values by (server) ("num_steps", {now}) * on (server) group_left () ({now}))'


def _chains_only(selector: str) -> str:
    # In a tree a position is a depth, and fewer steps change its breadth too: better no result than a wrong
    # one.
    chain = matchers(selector, 'topk="1"')
    return f"and on (server) {SPEC_CONFIG}{chain}"


def _check_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, not {num_steps}")


BATCH_EXPRESSIONS: dict[str, Callable[[str, str], str]] = {
    "cycle_seconds": cycle_seconds,
    "verify_seconds": verify_seconds,
    "verify_share": verify_share,
    "verify_odds": verify_odds,
    "gap_seconds": gap_seconds,
    "cost_per_cycle": cost_per_cycle,
    "tokens_per_cycle": tokens_per_cycle,
    "requests_per_cycle": requests_per_cycle,
    "context_tokens": context_tokens,
    "request_tokens_per_second": request_tokens_per_second,
    "decode_tokens_per_second": decode_tokens_per_second,
    "speedup": speedup,
    "breakeven_tokens_per_cycle": breakeven_tokens_per_cycle,
}
"""Every figure at `BATCH_LEVEL` that takes (selector, window): what recording rules loop over."""
