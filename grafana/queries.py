"""The queries of the dashboards: `eagle_exporter.analysis.promql` where it has the figure, the rest here.

Every metric name goes through `name`, which knows the catalogue, so a renamed metric fails the build.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from eagle_exporter import catalogue
from eagle_exporter.analysis import promql
from eagle_exporter.catalogue import BY_NAME, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW = "$__rate_interval"

TARGET = 'job=~"$job",instance=~"$instance",node=~"$node"'
"""Matchers on the labels of the scrape target, for what the exporter says of itself."""

SERVER = f'{TARGET},server=~"$server",model_name=~"$model_name",engine_type=~"$engine_type",dp_rank=~"$dp_rank"'
"""Matchers of figures about servers. The tensor-parallel rank is not among them: acceptance exists on the
recording rank only, and choosing another rank would empty every panel."""

RANK = f'{SERVER},tp_rank=~"$tp_rank"'
"""Matchers of figures about single ranks."""

SERVERS = ("server",)
CELL = promql.BATCH_LEVEL
RANKS = ("server", "node", "instance", "tp_rank", "pp_rank", "dp_rank")

STEP_CHOICES = (1, 2, 3, 4, 5, 7)
"""Fewer steps that the what-if looks at; ``eagle-exporter advise`` looks at all."""

_SUFFIXES = ("_bucket", "_sum", "_count")
_RECORDING_RANK = re.compile(r"(and on \([^)]*\) )(" + re.escape(promql.DRAFTS) + r"\{[^}]*\})(?!\[)")


def name(metric: str) -> str:
    """Return the name of a metric or of a histogram's series, checked against the catalogue.

    Raises:
        KeyError: The catalogue has no such metric.

    """
    for suffix in _SUFFIXES:
        base = metric.removesuffix(suffix)
        if base != metric and base in BY_NAME and BY_NAME[base].kind is Kind.HISTOGRAM:
            return metric
    return BY_NAME[metric].name


def rated(expression: str) -> str:
    """Ask for the recording rank by the rate of its counter instead of by the bare counter.

    It selects the same ranks, and no counter stands outside of ``rate`` (a dashboard-linter rule).
    """
    return _RECORDING_RANK.sub(rf"\1rate(\2[{WINDOW}])", expression)


def by(labels: Sequence[str]) -> str:
    """Return a ``sum by (...)`` prefix."""
    return f"sum by ({', '.join(labels)})"


def rate(metric: str, *matchers: str, selector: str = SERVER) -> str:
    """Return the rate of a counter."""
    return f"rate({name(metric)}{promql.matchers(selector, *matchers)}[{WINDOW}])"


def recorded(metric: str, labels: Sequence[str] = (), *matchers: str) -> str:
    """Sum of rates over the recording ranks: one per replica, so that nothing is counted once per GPU."""
    rates = rate(metric, *matchers)
    base = next((metric.removesuffix(s) for s in _SUFFIXES if metric.removesuffix(s) in BY_NAME), metric)
    if not BY_NAME[base].acceptance:
        common = ", ".join(catalogue.COMMON_LABELS)
        rates += f" and on ({common}) {rate(promql.DRAFTS)}"
    return f"{by(labels)} ({rates})"


def ranks(metric: str, *matchers: str) -> str:
    """Sum of rates of each single rank."""
    return f"{by(RANKS)} ({rate(metric, *matchers, selector=RANK)})"


def ratio(numerator: str, denominator: str) -> str:
    """Return numerator / denominator, without a series where the denominator is 0."""
    return promql.ratio(numerator, denominator)


def shared(figure: str, labels: Sequence[str] | None = None, **more: str) -> str:
    """Return a figure of `eagle_exporter.analysis.promql`, for the selected servers."""
    function = getattr(promql, figure)
    arguments = {} if labels is None else {"by": labels}
    return rated(function(SERVER, WINDOW, **arguments, **more))


# --- the cycle ----------------------------------------------------------------------------------------------


def quantile(q: float, histogram: str, labels: Sequence[str] = (), *matchers: str) -> str:
    """Return a quantile of a histogram of the selected servers."""
    shared_buckets = _common_buckets(rate(f"{histogram}_bucket", *matchers), labels)
    # Without traffic all buckets have the rate 0, and the quantile of nothing would be NaN.
    return (
        f"histogram_quantile({q:g}, {shared_buckets}) "
        f"and {_on(labels)} ({by(labels)} ({rate(f'{histogram}_count', *matchers)}) > 0)"
    )


def mean(histogram: str, labels: Sequence[str] = (), *matchers: str) -> str:
    """Return the exact mean of a histogram."""
    total = f"{by(labels)} ({rate(f'{histogram}_sum', *matchers)})"
    return ratio(total, f"{by(labels)} ({rate(f'{histogram}_count', *matchers)})")


def buckets(histogram: str, *matchers: str) -> str:
    """Return the buckets of a histogram for a heatmap."""
    series = f"{name(f'{histogram}_bucket')}{promql.matchers(SERVER, *matchers)}"
    return _common_buckets(f"increase({series}[{WINDOW}])", ())


def _common_buckets(rates: str, labels: Sequence[str]) -> str:
    """Sum cumulative buckets over the bounds that all series have.

    Servers differ in their bounds (EAGLE_EXPORTER_BUCKETS; of the accept length one per step). A bound that
    only some have would hold the counts of some, and the distribution would fall where it must rise.
    """
    count = f"count by ({', '.join((*labels, 'le'))}) ({rates})"
    most = f"max by ({', '.join(labels)}) ({count})"
    complete = f"{count} == {_on(labels)} group_left () {most}"
    return f"({by((*labels, 'le'))} ({rates}) and {_on((*labels, 'le'))} ({complete}))"


def host_seconds(labels: Sequence[str] = ("phase",)) -> str:
    """Mean scheduler-thread seconds by phase and timed cycle."""
    others = tuple(label for label in labels if label != "phase")
    timed = recorded(promql.TIMED_CYCLES, others)
    seconds = recorded("eagle_phase_host_seconds_total", labels)
    return f"({seconds}) / {_on(others)} group_left () (({timed}) > 0)"


def overlapping(expression: str) -> str:
    """Restrict to servers with the overlap scheduler: without it the GPU waits for the host by design."""
    return f"({expression}) and on (server) {name('eagle_spec_config_info')}{promql.matchers(SERVER, _OVERLAP)}"


def no_overlap(labels: Sequence[str] = SERVERS) -> str:
    """Return -1 for servers without the overlap scheduler; the panels show it as text."""
    config = f"{name('eagle_spec_config_info')}{promql.matchers(SERVER, _NO_OVERLAP)}"
    return f"-1 * max by ({', '.join(labels)}) ({config})"


_OVERLAP = 'overlap!="false"'
_NO_OVERLAP = 'overlap="false"'


def rank_figure(metric: str, *matchers: str) -> str:
    """Return a counter of seconds or cycles per timed cycle, of each rank."""
    return ratio(ranks(metric, *matchers), ranks(promql.TIMED_CYCLES))


def against_group(expression: str) -> str:
    """Return a per-rank figure over the median of the ranks of its server."""
    return f"({expression}) / on (server) group_left () ((quantile by (server) (0.5, {expression})) > 0)"


def info(metric: str, labels: Sequence[str]) -> str:
    """Return how many ranks share each combination of labels of an info metric."""
    return f"count by ({', '.join(labels)}) ({name(metric)}{promql.matchers(SERVER)})"


def gauge(metric: str, aggregation: str, labels: Sequence[str], *matchers: str, selector: str = SERVER) -> str:
    """Return an aggregated gauge."""
    return f"{aggregation} by ({', '.join(labels)}) ({name(metric)}{promql.matchers(selector, *matchers)})"


def running_requests(labels: Sequence[str] = ()) -> str:
    """Requests in the running batches: every rank of a replica shows the same, so one of them is taken."""
    replicas = gauge("eagle_running_requests", "max", ("server", "dp_rank"))
    return f"{by(labels)} ({replicas})"


def _on(labels: Sequence[str]) -> str:
    return f"on ({', '.join(labels)})"


# --- does it pay off ----------------------------------------------------------------------------------------


def overall_speedup(labels: Sequence[str] = ()) -> str:
    """Time that plain decode would have taken for the same tokens, over the time that was spent.

    A ratio of sums over all batch sizes whose baseline is known, not a mean of ratios.
    """
    spent = f"({shared('cost_per_cycle')}) * {_on(CELL)} ({shared('cycles_per_second')})"
    saved = f"({shared('speedup')}) * {_on(CELL)} ({spent})"
    known = f"({spent}) and {_on(CELL)} ({shared('speedup')})"
    return ratio(f"{by(labels)} ({saved})", f"{by(labels)} ({known})")


def steps_in_force() -> str:
    """The step count in force as a value, with itself as the label ``num_steps``."""
    now = gauge(promql.NUM_STEPS, "max", SERVERS)
    # group_left keeps the label that count_values made.
    return f'(count_values by (server) ("num_steps", {now}) * on (server) group_left () ({now}))'


def step_cost() -> str:
    """What the last step costs, seconds: one draft forward and one more token in verify (linear)."""
    k = steps_in_force()
    draft = shared("phase_seconds", phase="draft_steps")
    steps = "on (server, num_steps) group_left ()"
    forward = f"(({draft}) / {steps} (({k} - 1) > 0))"
    base = rated(promql.one_token_verify_seconds(SERVER, WINDOW))
    verify = shared("verify_seconds")
    # A configured baseline is a whole step and may exceed verify: a token then costs nothing, not less.
    slope = f"clamp_min(({verify}) - on (server, batch_size) group_left () ({base}), 0)"
    token = f"({slope} / {steps} ({k} > 0))"
    return f"{forward} + {token}"


def step_must_bring() -> str:
    """Tokens per cycle that a step must add to be worth its cost: its cost over the cost of a token."""
    return f"({step_cost()}) * {_on(CELL)} ({shared('request_tokens_per_second')})"


def last_step_brings() -> str:
    """Tokens per cycle that the last step adds: acceptance at the last position."""
    now = gauge(promql.NUM_STEPS, "max", SERVERS)
    last = f'count_values by (server) ("position", {now} - 1)'
    return f"({shared('acceptance_at')}) * on (server, position) ({last} > 0)"


def what_if(verify: str) -> str:
    """Tokens per second of one replica for each of `STEP_CHOICES` and for the running step count.

    Args:
        verify: How verify is taken to shrink with fewer tokens; see `promql.cost_per_cycle_at`.

    """
    parts = [
        f"label_replace({rated(promql.decode_tokens_per_second_at(k, SERVER, WINDOW, verify=verify))}, "
        f'"steps", "{k}", "", "")'
        for k in STEP_CHOICES
    ]
    running = f"({shared('decode_tokens_per_second')}) and on (server, num_steps) {steps_in_force()} > 0"
    parts.append(f'label_replace({running}, "steps", "$1", "num_steps", "(.+)")')
    return " or ".join(parts)


def busiest() -> str:
    """The cell with the most cycles of each server that speculates, among the chosen batch sizes."""
    speculating = f'{SERVER},batch_size=~"$batch_size",num_steps!="{promql.NO_SPECULATION}"'
    return f"topk by (server) (1, {rated(promql.cycles_per_second(speculating, WINDOW))} > 0)"


def best_steps() -> str:
    """The step count with the most tokens per second at the busiest batch size, as the label ``steps``.

    Only where fewer steps can be estimated at all: without a baseline, for trees, or with adaptive steps the running
    step count would be the best of one.
    """
    baseline = rated(promql.one_token_verify_seconds(SERVER, WINDOW))
    chain = promql.matchers(SERVER, 'topk="1"', 'adaptive!="true"')
    known = f"on (server, batch_size) ({baseline}) and on (server) {name('eagle_spec_config_info')}{chain}"
    return f"topk by (server) (1, ({what_if('linear')}) and {_on(CELL)} ({busiest()}) and {known})"


def last_step_worth() -> str:
    """What the last step brings over what it must bring, at the busiest batch size."""
    must = f"({step_must_bring()}) and {_on(CELL)} ({busiest()})"
    return f"({last_step_brings()}) / on (server) group_right () (({must}) > 0)"


# --- acceptance ---------------------------------------------------------------------------------------------


def tokens_per_draft(labels: Sequence[str] = (), *matchers: str) -> str:
    """Accept length: tokens per request and cycle, the bonus token included."""
    accepted = recorded("eagle_accepted_tokens_total", labels, *matchers)
    return f"1 + {ratio(accepted, recorded('eagle_drafts_total', labels, *matchers))}"


def acceptance_rate(labels: Sequence[str] = ()) -> str:
    """Share of the offered draft tokens that was accepted."""
    return ratio(recorded("eagle_accepted_tokens_total", labels), recorded("eagle_draft_tokens_total", labels))


def context_length(value: str) -> str:
    """Accept length in one context length bucket."""
    matcher = f'context_length="{value}"'
    accepted = recorded("eagle_context_accepted_tokens_total", (), matcher)
    return f"1 + {ratio(accepted, recorded('eagle_context_drafts_total', (), matcher))}"


def context_share(value: str) -> str:
    """Share of the drafts in one context length bucket."""
    part = recorded("eagle_context_drafts_total", (), f'context_length="{value}"')
    return ratio(part, recorded("eagle_context_drafts_total"))


def batch_tokens_per_draft(value: str) -> str:
    """Accept length in one batch size bucket."""
    matcher = f'batch_size="{value}"'
    accepted = recorded(promql.ACCEPTED, (), matcher)
    return f"1 + {ratio(accepted, recorded(promql.DRAFTS, (), matcher))}"


def live_rows_share() -> str:
    """Share of the verified rows whose request was still running."""
    drafts = recorded("eagle_drafts_total")
    return ratio(drafts, f"{drafts} + {recorded('eagle_wasted_rows_total')}")


def nodes_share(tokens: str) -> str:
    """Share of `tokens` in all verified nodes, finished rows included (each as many nodes as a live row)."""
    nodes = f"{recorded('eagle_draft_tokens_total')} + {recorded('eagle_drafts_total')}"
    return f"({ratio(tokens, nodes)}) * ({live_rows_share()})"


def rejected_share() -> str:
    """Share of verified nodes that were rejected draft tokens of live rows."""
    rejected = f"{recorded('eagle_draft_tokens_total')} - {recorded('eagle_accepted_tokens_total')}"
    return nodes_share(rejected)


def used_share() -> str:
    """Share of verified nodes that became tokens."""
    return nodes_share(f"{recorded('eagle_accepted_tokens_total')} + {recorded('eagle_drafts_total')}")


def finished_share() -> str:
    """Share of verified nodes in rows whose request had already finished."""
    return f"1 - ({live_rows_share()})"


# --- alerts and the fleet -----------------------------------------------------------------------------------

FIRING = 'ALERTS{alertname=~"Eagle.*",alertstate="firing",server=~"$server|"}'
"""Alerts about an exporter carry no server: the matcher lets them pass."""


def ranks_down(labels: Sequence[str] = ()) -> str:
    """How many ranks have ended; no series where no exporter knows any rank."""
    up = f"{name('eagle_rank_up')}{promql.matchers(SERVER)}"
    by_labels = f"by ({', '.join(labels)})"
    return f"count {by_labels} ({up} == 0) or 0 * count {by_labels} ({up})"


def alerts_by_server() -> str:
    """Firing alerts of every known server, 0 where none fires."""
    known = gauge("eagle_rank_up", "count", SERVERS)
    # An alert knows nothing of the model, the node and the like: its server must be among the chosen ones.
    return f"count by (server) ({FIRING}) and on (server) ({known}) or 0 * ({known})"


# --- kernels of captured cycles -----------------------------------------------------------------------------

TIME_RANGE = "$__range"
"""The whole time range of the dashboard."""

CAPTURED_CYCLES = name("eagle_kernel_profiled_cycles_total")
KERNEL_SECONDS = name("eagle_kernel_seconds_total")
KERNEL_BUSY_SECONDS = name("eagle_kernel_busy_seconds_total")
KERNEL_PHASE_SECONDS = name("eagle_kernel_phase_seconds_total")
VERIFY_PHASE = 'phase="target_verify"'
ALLREDUCE = 'kernel_class=~"allreduce_.+"'


def captured(metric: str, labels: Sequence[str] = (), *matchers: str, window: str = TIME_RANGE) -> str:
    """What captures of kernels added to a counter within a window, over the selected ranks.

    On most ranks the series appear with their first capture, which ``increase`` does not count: it needs a sample
    before. A series that was not there when the window began counts whole.
    """
    series = f"{name(metric)}{promql.matchers(RANK, *matchers)}"
    known = f"(increase({series}[{window}]) and {series} offset {window})"
    return f"{by(labels)} ({known} or last_over_time({series}[{window}]))"


def per_captured_cycle(metric: str, labels: Sequence[str] = (), *matchers: str, window: str = TIME_RANGE) -> str:
    """Seconds per captured cycle by `labels`; nothing for what took no time, and without a capture."""
    ranks_too = tuple(label for label in labels if label in RANKS)
    cycles = captured(CAPTURED_CYCLES, ranks_too, window=window)
    seconds = captured(metric, labels, *matchers, window=window)
    return f"(({seconds}) > 0) / {_on(ranks_too)} group_left () (({cycles}) > 0)"


def idle_per_captured_cycle(labels: Sequence[str] = (), *matchers: str) -> str:
    """Seconds per captured cycle in which a phase was going on and no kernel ran."""
    phase = per_captured_cycle(KERNEL_PHASE_SECONDS, labels, *matchers)
    busy = per_captured_cycle(KERNEL_BUSY_SECONDS, labels, *matchers)
    return f"clamp_min(({phase}) - ({busy}), 0)"


def kernel_classes_and_idle() -> str:
    """Seconds per captured cycle by phase and kernel class, and as one more class the time without a kernel."""
    classes = per_captured_cycle(KERNEL_SECONDS, ("phase", "kernel_class"))
    idle = f'label_replace({idle_per_captured_cycle(("phase",))}, "kernel_class", "idle", "", "")'
    return f"({classes}) or ({idle})"


def last_capture() -> str:
    """Seconds since the end of the newest capture, of ranks that were there in the time range; nothing without one."""
    series = f"{name('eagle_kernel_last_capture_timestamp_seconds')}{promql.matchers(RANK)}"
    return f"time() - max (last_over_time({series}[{TIME_RANGE}]))"


# --- hardware -----------------------------------------------------------------------------------------------


def dcgm(metric: str, aggregation: str = "max") -> str:
    """Return a metric of the DCGM exporter for the GPUs of the selected ranks.

    The rank is on the many side: two servers may share a GPU.
    """
    rank = f"max by (server, tp_rank, uuid) ({name('eagle_gpu_info')}{promql.matchers(RANK)})"
    joined = f'label_replace({rank}, "UUID", "$1", "uuid", "(.+)")'
    series = f'{aggregation} by (UUID) ({metric}{{Hostname=~"$hardware"}})'
    return f"{joined} * on (UUID) group_left () ({series})"
