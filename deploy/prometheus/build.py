"""Generates the recording rules and alerts in ``rules/``.

``python deploy/prometheus/build.py`` writes them, ``--check`` only tells whether they are up to date. Every
threshold and window is a field of `Settings`, and only there. Metric names come from the exporter's catalogue
through ``eagle_exporter.analysis.promql``, which dashboards use too.

How drift is judged. Verify costs more with more requests in the batch, more context and more draft tokens, and
none of that is a fault. So the figures are recorded by server, configuration, batch size and step count (a cell),
and each cell is compared with its own median of the last two days. A cell counts only while its mean context and
mean batch are close to what they were when the median was taken. The ratios of these cells, averaged with the
number of cycles as weight, are one figure per server: it stays when traffic moves from one batch size to another,
and an alert on it does not flap.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_exporter import catalogue
from eagle_exporter.analysis import promql

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).resolve().parent
RUNBOOK_URL = "https://github.com/eagle-exporter/eagle-exporter/blob/main/deploy/runbooks/{name}.md"


@dataclass(frozen=True)
class Settings:
    """Windows and thresholds; the defaults are what is shipped.

    Attributes:
        job: The ``job`` label of the exporter's scrape config.
        window: Range of every ``rate``. At least four scrape intervals.
        interval: Evaluation interval of all groups but the medians.
        baseline: Length of the window the median is taken over. Two days outlast a fault of a day; one day
            forgets it after about half of that.
        baseline_offset: The window ends this long ago, so that a fault is not part of its own baseline while
            it is new. It also hides the first hour after a start.
        baseline_interval: Evaluation interval of the medians, which are the expensive rules.
        baseline_memory: How long the last median holds when none is recorded (Prometheus restarts).
        baseline_samples: A cell has a baseline from this many recorded samples on: 3 hours of traffic at one
            sample a minute.
        smoothing: Drift is judged on the mean of this window.
        smoothing_samples: ... of which so many samples must exist.
        drift_for: ... and for so long.
        drift_keep_firing: A drift alert that fired stays for this long after its condition has gone, for
            traffic that pauses.
        slow_window: VerifyShareDriftSlow judges the mean of this window, which has less noise,
        slow_samples: ... of which so many samples must exist,
        slow_drift: ... so that a smaller factor is enough.
        slow_recent: The mean of this window must agree, or a repaired fault would be told for hours,
        slow_recent_drift: ... by this factor.
        slow_for: ... for so long.
        comparable: A cell takes part while its mean context and its mean requests per cycle are within this
            factor of their medians.
        traffic: Cycles per second below which nothing is judged (60 in five minutes).
        verify_drift: VerifyShareDrift fires when the odds verify / (cycle - verify) are this factor above or
            below their baseline. Not the share: at 96 % a verify 27 % slower moves it by less than one
            percentage point.
        verify_slow: VerifySlow fires when the seconds per verify are this factor above their baseline.
        acceptance_drift: AcceptanceDrift fires when accepted tokens per draft are this factor below or above
            their baseline.
        acceptance_collapsed: Tokens per cycle under which the draft model is of no use (1 is nothing
            accepted).
        collapsed_for: ... for so long.
        speedup: SpeculationNotPayingOff fires below this speed-up over no speculation; a little under 1, so
            that a server at break-even does not flap.
        speedup_for: ... for so long.
        decode_memory: How long a measured cost without speculation is remembered. It is measured only while
            the server decodes without speculation.
        host_skew: RankSkew: host time of a rank above that of the others in its tensor parallel group, as a
            share of the cycle. Only where the scheduler thread waits for nobody inside the cycle: with the host
            clock (on the CPU) and with V1 workers it waits for the other ranks there, and the rank with the most
            host time is the one that waits.
        gap_skew: ... the same for the gap between cycles.
        host_bound_skew: ... the same for the share of host-bound cycles.
        replica_skew: RankSkew: verify of a replica over that of the others, at equal batch and context.
        skew_for: ... for so long.
        host_bound: CycleHostBound: share of cycles in which the GPU waited for the host, with the overlap
            scheduler on. Without it that is so by design.
        host_bound_for: ... for so long.
        dropped: CyclesDropped: share of cycles whose time was lost.
        dropped_for: ... for so long.
        no_cycles: NoCyclesWithRunningRequests: no decode cycle in this window although requests were running
            all the time. Longer than the longest prefill.
        no_cycles_for: ... for so long.
        timing_off_for: TimingOff fires after this time; a switch off for a measurement is shorter.
        hooks_down_for: HooksDown fires after this time.
        rank_gone_for: RankGone fires after this time; a new start of the server removes the old files.
        exporter_down_for: ExporterDown fires after this time; a restart of the server is shorter, since the
            exporter is up before the model is loaded.
        exporter_memory: How long ago the exporter may have shown a server for ExporterDown to name it.
        scrape_seconds: ScrapeSlow: duration of a scrape (Prometheus gives up after 10 s by default).
        scrape_for: ... for so long.
        configuration: ConfigurationChanged: two configurations within this window, which must be longer than a
            start of the server takes.

    """

    job: str = "eagle-exporter"
    window: str = "5m"
    interval: str = "1m"
    baseline: str = "2d"
    baseline_offset: str = "1h"
    baseline_interval: str = "5m"
    baseline_memory: str = "15m"
    baseline_samples: int = 180
    smoothing: str = "30m"
    smoothing_samples: int = 15
    drift_for: str = "10m"
    drift_keep_firing: str = "1h"
    slow_window: str = "12h"
    slow_samples: int = 360
    slow_drift: float = 1.08
    slow_recent: str = "1h"
    slow_recent_drift: float = 1.04
    slow_for: str = "1h"
    comparable: float = 1.15
    traffic: float = 0.2
    verify_drift: float = 1.2
    verify_slow: float = 1.2
    acceptance_drift: float = 1.15
    acceptance_collapsed: float = 1.1
    collapsed_for: str = "10m"
    speedup: float = 0.98
    speedup_for: str = "30m"
    decode_memory: str = "1d"
    host_skew: float = 0.2
    gap_skew: float = 0.1
    host_bound_skew: float = 0.3
    replica_skew: float = 1.25
    skew_for: str = "15m"
    host_bound: float = 0.5
    host_bound_for: str = "30m"
    dropped: float = 0.05
    dropped_for: str = "15m"
    no_cycles: str = "5m"
    no_cycles_for: str = "2m"
    timing_off_for: str = "15m"
    hooks_down_for: str = "5m"
    rank_gone_for: str = "5m"
    exporter_down_for: str = "5m"
    exporter_memory: str = "1d"
    scrape_seconds: float = 2.0
    scrape_for: str = "10m"
    configuration: str = "1h"


SHIPPED = Settings()


@dataclass(frozen=True)
class Recording:
    """A recording rule; `level` says after how many others its inputs exist (1: raw series only)."""

    record: str
    expr: str
    level: int


@dataclass(frozen=True)
class Alert:
    """An alert. `name` comes without the prefix that all share."""

    name: str
    severity: str
    expr: str
    summary: str
    description: str
    for_: str | None = None
    keep_firing_for: str | None = None

    @property
    def alert(self) -> str:
        """The name as Prometheus shows it."""
        return f"Eagle{self.name}"

    @property
    def annotations(self) -> dict[str, str]:
        """Summary, description and runbook."""
        return {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": RUNBOOK_URL.format(name=self.alert),
        }


@dataclass(frozen=True)
class Group:
    """A rule group."""

    name: str
    interval: str
    rules: tuple[Recording | Alert, ...]


def _number(value: float) -> str:
    return f"{value:.4g}"


def _timed(selector: str, window: str, by: Sequence[str]) -> str:
    """Timed cycles per second of the recording ranks (those that export acceptance)."""
    rates = f"rate({promql.TIMED_CYCLES}{promql.matchers(selector)}[{window}])"
    recording = f"on ({', '.join(promql.RANK_LEVEL)}) {promql.DRAFTS}{promql.matchers(selector)}"
    return f"sum by ({', '.join(by)}) ({rates} and {recording})"


def _accepted_per_draft(selector: str, window: str) -> str:
    """Accepted draft tokens per draft, without the bonus token."""
    return f"({promql.tokens_per_cycle(selector, window)}) - 1"


def _query(expression: str, template: str) -> str:
    """A template that runs `expression` for the alert's server and prints `template` for the first result."""
    return (
        f"{{{{ with printf `{expression}` $labels.server | query }}}}{{{{ with . | first }}}}"
        f"{template}{{{{ end }}}}{{{{ end }}}}"
    )


class Rules:
    """All rules for one `Settings`."""

    SPECULATING = f'num_steps!="{promql.NO_SPECULATION}"'
    CELL = (*promql.BATCH_LEVEL, "config_id")
    CONFIGURATION = ("server", "config_id")

    def __init__(self, settings: Settings = SHIPPED) -> None:
        self.settings = settings
        window = settings.window
        rate, mean, ratio = f"rate{window}", f"mean_rate{window}", f"ratio_rate{window}"
        self.timed = f"server_batch:eagle_timed_cycles:{rate}"
        self.share = f"server_batch:eagle_verify_share:{ratio}"
        self.odds = f"server_batch:eagle_verify_odds:{ratio}"
        self.verify = f"server_batch:eagle_verify_seconds:{mean}"
        self.cycle = f"server_batch:eagle_cycle_seconds:{mean}"
        self.cost = f"server_batch:eagle_cost_per_cycle_seconds:{mean}"
        self.tokens = f"server_batch:eagle_tokens_per_cycle:{mean}"
        self.accepted = f"server_batch:eagle_accepted_tokens_per_draft:{mean}"
        self.throughput = f"server_batch:eagle_decode_tokens_per_second:{rate}"
        self.context = f"server_batch:eagle_context_tokens:{mean}"
        self.requests = f"server_batch:eagle_requests_per_cycle:{mean}"
        self.decode = f"server_batch:eagle_baseline_decode_seconds:{mean}"
        self.speedup = f"server_batch:eagle_speedup:{ratio}"
        self.comparable = f"server_batch:eagle_comparable_cycles:{rate}"
        self.server_cycles = f"server:eagle_cycles:{rate}"
        self.server_share = f"server:eagle_verify_share:{ratio}"
        self.server_cycle = f"server:eagle_cycle_seconds:{mean}"
        self.server_tokens = f"server:eagle_tokens_per_cycle:{mean}"
        self.server_output = f"server:eagle_output_tokens:{rate}"
        self.server_host_bound = f"server:eagle_host_bound_cycles:{ratio}"
        self.server_speedup = f"server:eagle_speedup:{ratio}"
        self.rank_cycle = f"rank:eagle_cycle_seconds:{mean}"
        self.rank_host = f"rank:eagle_host_seconds:{mean}"
        self.rank_gap = f"rank:eagle_gap_seconds:{mean}"
        self.rank_host_bound = f"rank:eagle_host_bound_cycles:{ratio}"
        self.host_excess = f"rank:eagle_host_seconds_over_others:{ratio}"
        self.gap_excess = f"rank:eagle_gap_seconds_over_others:{ratio}"
        self.host_bound_excess = f"rank:eagle_host_bound_cycles_over_others:{ratio}"
        self.replica_skew = f"replica:eagle_verify_seconds_to_others:{ratio}"
        self.replica_timed = f"replica_batch:eagle_timed_cycles:{rate}"
        self.replica_verify = f"replica_batch:eagle_verify_seconds:{mean}"
        self.replica_context = f"replica_batch:eagle_context_tokens:{mean}"
        self.replica_cell = f"replica_batch:eagle_verify_seconds_to_others:{ratio}"

    def median(self, record: str) -> str:
        """Name of the baseline of a recorded figure."""
        return f"{record.rpartition(':')[0]}:median{self.settings.baseline}"

    def against_median(self, record: str, level: str | None = None) -> str:
        """Name of a recorded figure as a ratio to its baseline."""
        first, metric, _ = record.split(":")
        return f"{level or first}:{metric}:ratio_to_median{self.settings.baseline}"

    # --- recording rules --------------------------------------------------------------------------------

    def batch(self) -> Group:
        """What a cycle costs and yields, by cell."""
        window = self.settings.window
        # Everything else takes its configuration from here, and exists only where there is traffic.
        timed = promql.with_config_id(f"{_timed('', window, promql.BATCH_LEVEL)} >= {_number(self.settings.traffic)}")
        recordings = [Recording(self.timed, timed, 1)]
        figures = {
            self.share: promql.verify_share,
            self.odds: promql.verify_odds,
            self.verify: promql.verify_seconds,
            self.cycle: promql.cycle_seconds,
            self.cost: promql.cost_per_cycle,
            self.tokens: promql.tokens_per_cycle,
            self.accepted: _accepted_per_draft,
            self.throughput: promql.decode_tokens_per_second,
            self.context: promql.context_tokens,
            self.requests: promql.requests_per_cycle,
        }
        cells = ", ".join(promql.BATCH_LEVEL)
        for record, figure in figures.items():
            expression = figure(self.SPECULATING, window)
            join = f"* on ({cells}) group_left (config_id) ({self.timed} >= bool 0)"
            recordings.append(Recording(record, f"({expression}) {join}", 2))
        recordings.append(Recording(self.decode, promql.baseline_seconds("", window), 1))
        on = f"on ({', '.join(promql.BASELINE_LEVEL)}) group_left ()"
        remembered = f"last_over_time({self.decode}[{self.settings.decode_memory}])"
        recordings.append(Recording(self.speedup, f"({self.tokens} / {self.cost}) * {on} {remembered}", 3))
        return Group("eagle-batch", self.settings.interval, tuple(recordings))

    def server(self) -> Group:
        """The same by server, for overviews and for alerts that need no equal conditions."""
        window, level = self.settings.window, promql.SERVER_LEVEL
        chosen = self.SPECULATING
        # Time that the tokens of every cell would have taken without speculation, over the time they took.
        yields = f"{self.timed} * {self.speedup} * {self.cost}"
        takes = f"({self.timed} * {self.cost}) and {self.speedup}"
        return Group(
            "eagle-server",
            self.settings.interval,
            (
                Recording(self.server_cycles, promql.cycles_per_second(chosen, window, level), 1),
                Recording(self.server_share, promql.verify_share(chosen, window, level), 1),
                Recording(self.server_cycle, promql.cycle_seconds(chosen, window, level), 1),
                Recording(self.server_tokens, promql.tokens_per_cycle(chosen, window, level), 1),
                Recording(self.server_output, promql.output_tokens_per_second("", window, level), 1),
                Recording(self.server_host_bound, promql.host_bound_share("", window, level), 1),
                Recording(
                    self.server_speedup,
                    promql.ratio(f"sum by (server) ({yields})", f"sum by (server) ({takes})"),
                    4,
                ),
            ),
        )

    def baseline(self) -> Group:
        """The median of each cell, once the cell has been seen long enough."""
        settings = self.settings
        recordings = []
        for record in (self.odds, self.verify, self.accepted, self.context, self.requests):
            past = f"{record}[{settings.baseline}] offset {settings.baseline_offset}"
            enough = f"count_over_time({past}) >= {settings.baseline_samples}"
            recordings.append(Recording(self.median(record), f"quantile_over_time(0.5, {past}) and ({enough})", 3))
        return Group("eagle-baseline", settings.baseline_interval, tuple(recordings))

    def drift(self) -> Group:
        """Each cell against its median, and the server as the weighted mean of its comparable cells."""
        low, high = _number(1 / self.settings.comparable), _number(self.settings.comparable)
        by = ", ".join(self.CONFIGURATION)

        def against(record: str) -> str:
            return f"{record} / {self._median_now(record)}"

        def near(record: str) -> str:
            return f"({against(record)} >= {low} <= {high})"

        recordings = [
            Recording(self.comparable, f"{self.timed} and {near(self.context)} and {near(self.requests)}", 4),
            Recording(self.against_median(self.odds), against(self.odds), 4),
            Recording(self.against_median(self.verify), against(self.verify), 4),
            # A median of 0, nothing was ever accepted, has no ratio; AcceptanceCollapsed tells of that.
            Recording(
                self.against_median(self.accepted),
                f"{self.accepted} / ({self._median_now(self.accepted)} > 0)",
                4,
            ),
        ]
        for record in (self.odds, self.verify, self.accepted):
            cell = self.against_median(record)
            weighted = f"sum by ({by}) ({cell} * {self.comparable})"
            weights = f"sum by ({by}) ({self.comparable} and {cell})"
            recordings.append(Recording(self.against_median(record, "server"), f"{weighted} / {weights}", 5))
        return Group("eagle-drift", self.settings.interval, tuple(recordings))

    def ranks(self) -> Group:
        """What tells ranks apart. The all-reduce equalises everything else."""
        window = self.settings.window
        replica = ("server", "dp_rank", "batch_size", "num_steps")
        level = promql.RANK_LEVEL
        by = ", ".join(level)

        def rate(name: str) -> str:
            return f"sum by ({by}) (rate({catalogue.BY_NAME[name].name}[{window}]))"

        def others(record: str, label: str) -> str:
            """Mean over the others that differ in `label` only; nothing where there are none."""
            rest = f"(sum without ({label}) ({record}) - ignoring ({label}) group_right () {record})"
            return f"({rest} / ignoring ({label}) group_left () (count without ({label}) ({record}) - 1 > 0))"

        def excess(record: str) -> str:
            return f"({record} - {others(record, 'tp_rank')})"

        low, high = _number(1 / self.settings.comparable), _number(self.settings.comparable)
        context = f"({self.replica_context} / {others(self.replica_context, 'dp_rank')} >= {low} <= {high})"
        cell = f"{self.replica_verify} / {others(self.replica_verify, 'dp_rank')} and {context}"
        pooled = "sum by (server, dp_rank)"
        timed = rate(promql.TIMED_CYCLES)
        waits = (
            f'unless on ({by}) {_metric("eagle_timing_info")}{{clock!="cuda_event"}} '
            f'unless on ({by}) {promql.SPEC_CONFIG}{{hook_family=~"(.+-)?v1"}}'
        )
        enough = f"({timed} >= {_number(self.settings.traffic)})"
        return Group(
            "eagle-ranks",
            self.settings.interval,
            (
                Recording(self.rank_cycle, f"{rate(promql.PHASE_SECONDS)} / {enough}", 1),
                Recording(self.rank_host, f"{rate('eagle_phase_host_seconds_total')} / {enough}", 1),
                Recording(self.rank_gap, f"{rate(promql.GAP_SECONDS)} / {enough}", 1),
                Recording(self.rank_host_bound, f"{rate(promql.HOST_BOUND)} / {enough}", 1),
                Recording(
                    self.replica_timed,
                    f"{_timed(self.SPECULATING, window, replica)} >= {_number(self.settings.traffic)}",
                    1,
                ),
                Recording(
                    self.replica_verify,
                    f"({promql.verify_seconds(self.SPECULATING, window, replica)}) and {self.replica_timed}",
                    2,
                ),
                Recording(
                    self.replica_context,
                    f"({promql.context_tokens(self.SPECULATING, window, replica)}) and {self.replica_timed}",
                    2,
                ),
                # Host time and gap count by what they are of the cycle: twice of nothing is nothing.
                Recording(self.host_excess, f"{excess(self.rank_host)} / {self.rank_cycle} {waits}", 2),
                Recording(self.gap_excess, f"{excess(self.rank_gap)} / {self.rank_cycle}", 2),
                Recording(self.host_bound_excess, excess(self.rank_host_bound), 2),
                Recording(self.replica_cell, cell, 3),
                Recording(
                    self.replica_skew,
                    f"{pooled} ({self.replica_cell} * {self.replica_timed})"
                    f" / {pooled} ({self.replica_timed} and {self.replica_cell})",
                    4,
                ),
            ),
        )

    def _median_now(self, record: str) -> str:
        return f"last_over_time({self.median(record)}[{self.settings.baseline_memory}])"

    # --- alerts -----------------------------------------------------------------------------------------

    def alerts(self) -> Group:
        """Every alert."""
        rules = (
            *self._drift_alerts(),
            *self._acceptance_alerts(),
            self._rank_skew(),
            *self._timing_alerts(),
            *self._liveness_alerts(),
        )
        return Group("eagle-alerts", self.settings.interval, rules)

    def _smoothed(self, record: str) -> str:
        return f"avg_over_time({record}[{self.settings.smoothing}])"

    def _settled(self, record: str) -> str:
        """Condition that the mean over the smoothing window stands on enough of it."""
        return f"count_over_time({record}[{self.settings.smoothing}]) >= {self.settings.smoothing_samples}"

    def _cells(self, record: str) -> str:
        """A template that lists the batch sizes behind a server's figure."""
        query = f"{self.against_median(record)}{{server=%q}} and {self.comparable}"
        return (
            f"{{{{ range printf `{query}` $labels.server | query | sortByLabel `batch_size` }}}}"
            " batch size {{ .Labels.batch_size }}, {{ .Labels.num_steps }} steps:"
            " {{ . | value | printf `%.2f` }};{{ end }}"
        )

    def _drift_alerts(self) -> tuple[Alert, ...]:
        settings = self.settings
        odds = self.against_median(self.odds, "server")
        verify = self.against_median(self.verify, "server")
        accepted = self.against_median(self.accepted, "server")
        times = "{{ $value | printf `%.2f` }} times"
        median = (
            f"the median of the {settings.baseline} before, at equal configuration, batch size and step count "
            "and similar context length"
        )
        share = _query(
            f"{self.server_share}{{server=%q}}", "Verify is now {{ . | value | humanizePercentage }} of the cycle. "
        )
        seconds = _query(
            f"{self.server_cycle}{{server=%q}}", "The mean cycle takes {{ . | value | humanizeDuration }}. "
        )
        tokens = _query(
            f"{self.server_tokens}{{server=%q}}", "Tokens per cycle are now {{ . | value | printf `%.2f` }}. "
        )

        def outside(record: str, factor: float) -> str:
            return f"({beyond(record, settings.smoothing, factor)}) and {self._settled(record)}"

        def beyond(record: str, window: str, factor: float) -> str:
            mean = f"avg_over_time({record}[{window}])"
            return f"{mean} > {_number(factor)} or {mean} < {_number(1 / factor)}"

        long = f"avg_over_time({odds}[{settings.slow_window}])"
        recent = f"avg_over_time({odds}[{settings.slow_recent}])"
        far, near = settings.slow_drift, settings.slow_recent_drift
        creeping = (
            f"({long} > {_number(far)} and {recent} > {_number(near)}"
            f" or {long} < {_number(1 / far)} and {recent} < {_number(1 / near)})"
            f" and count_over_time({odds}[{settings.slow_window}]) >= {settings.slow_samples}"
            f" unless ({beyond(odds, settings.smoothing, settings.verify_drift)})"
        )
        return (
            Alert(
                "VerifyShareDrift",
                "warning",
                outside(odds, settings.verify_drift),
                "The share of target verify in the cycle has drifted.",
                f"On {{{{ $labels.server }}}} the ratio of verify to the rest of the cycle is {times} {median}. "
                f"{share}By cell:{self._cells(self.odds)}",
                settings.drift_for,
                settings.drift_keep_firing,
            ),
            Alert(
                "VerifyShareDriftSlow",
                "info",
                creeping,
                "The share of target verify in the cycle has drifted a little, for hours.",
                f"On {{{{ $labels.server }}}} the ratio of verify to the rest of the cycle was {times} {median} "
                f"over the last {settings.slow_window}. {share}By cell:{self._cells(self.odds)}",
                settings.slow_for,
                settings.drift_keep_firing,
            ),
            Alert(
                "VerifySlow",
                "warning",
                f"{self._smoothed(verify)} > {_number(settings.verify_slow)} and {self._settled(verify)}",
                "Target verify takes longer than it used to.",
                f"On {{{{ $labels.server }}}} one verify takes {times} {median}. "
                f"{seconds}By cell:{self._cells(self.verify)}",
                settings.drift_for,
                settings.drift_keep_firing,
            ),
            Alert(
                "AcceptanceDrift",
                "warning",
                outside(accepted, settings.acceptance_drift),
                "Acceptance of draft tokens has drifted.",
                f"On {{{{ $labels.server }}}} a draft gets {times} the accepted tokens of {median}. "
                f"{tokens}By cell:{self._cells(self.accepted)}",
                settings.drift_for,
                settings.drift_keep_firing,
            ),
        )

    def _acceptance_alerts(self) -> tuple[Alert, ...]:
        settings = self.settings
        traffic = f"{self.server_cycles} >= {_number(settings.traffic)}"
        share = _query(
            f"{self.server_share}{{server=%q}}", " Verify is {{ . | value | humanizePercentage }} of the cycle."
        )
        return (
            Alert(
                "AcceptanceCollapsed",
                "warning",
                f"{self.server_tokens} < {_number(settings.acceptance_collapsed)} and ({traffic})",
                "Almost no draft token is accepted.",
                "On {{ $labels.server }} a cycle yields {{ $value | printf `%.2f` }} tokens per request; 1 means that "
                "nothing of the draft is accepted and the time for draft and verify is lost.",
                settings.collapsed_for,
            ),
            Alert(
                "SpeculationNotPayingOff",
                "warning",
                f"{self.server_speedup} < {_number(settings.speedup)} and ({traffic})",
                "Decoding would be faster without speculation.",
                "On {{ $labels.server }} speculation makes decoding {{ $value | printf `%.2f` }} times as fast as "
                f"plain decoding at the batch sizes whose cost without speculation is known.{share}",
                settings.speedup_for,
            ),
        )

    def _rank_skew(self) -> Alert:
        settings = self.settings

        def signal(record: str, limit: float, name: str) -> str:
            return f'label_replace({self._smoothed(record)} > {_number(limit)}, "signal", "{name}", "", "")'

        signals = (
            signal(self.host_excess, settings.host_skew, "host time"),
            signal(self.gap_excess, settings.gap_skew, "gap"),
            signal(self.host_bound_excess, settings.host_bound_skew, "host-bound cycles"),
            signal(self.replica_skew, settings.replica_skew, "verify"),
        )
        return Alert(
            "RankSkew",
            "warning",
            " or ".join(signals),
            "One rank is behind the others.",
            "On {{ $labels.server }} {{ with $labels.tp_rank }}tensor parallel rank {{ . }}"
            "{{ with $labels.dp_rank }} of replica {{ . }}{{ end }} exceeds the other ranks of its group in "
            "{{ $labels.signal }} by {{ $value | humanizePercentage }} of the cycle{{ else }}replica "
            "{{ $labels.dp_rank }} takes {{ $value | printf `%.2f` }} times as long for a verify as the others at "
            "equal batch size and similar context length{{ end }}.",
            settings.skew_for,
            settings.drift_keep_firing,
        )

    def _timing_alerts(self) -> tuple[Alert, ...]:
        settings = self.settings
        states = _metric("eagle_timing_enabled")
        # hooks_down is told by HooksDown, with the names of the hooks.
        stopped = "|".join(state for state in catalogue.TIMING_STATES if state not in ("on", "hooks_down"))
        dropped = _metric("eagle_cycles_dropped_total")
        cycles = _metric("eagle_cycles_total")
        rank = ", ".join(promql.RANK_LEVEL)
        overlap = f'max by (server) ({promql.SPEC_CONFIG}{{overlap="true"}})'
        lost = f'sum by (server) (rate({dropped}{{reason!="draft_step"}}[{settings.window}]))'
        all_cycles = f"(sum by (server) (rate({cycles}[{settings.window}])) >= {_number(settings.traffic)})"
        return (
            Alert(
                "TimingOff",
                "warning",
                f'count by (server, reason) ({states}{{reason=~"{stopped}"}} == 1)',
                "Phases of the cycle are no longer timed.",
                "On {{ $labels.server }} timing is stopped on {{ $value }} rank(s), state {{ $labels.reason }}: "
                "off is a command, fuse_cost is timing that cost more than 2 % of the cycle, fuse_errors is "
                "repeated errors in the hooks. Verify and drift are not watched meanwhile.",
                settings.timing_off_for,
            ),
            Alert(
                "HooksDown",
                "warning",
                # Where timing is switched off the hooks are down on purpose, and TimingOff tells.
                f"count by (server, hook) ({_metric('eagle_hook_up')} == 0"
                f' unless on ({rank}) ({states}{{reason=~"off|fuse_errors"}} == 1))',
                "A hook is not attached to SGLang.",
                "On {{ $labels.server }} the hook {{ $labels.hook }} is not attached on {{ $value }} rank(s); the "
                "metrics that need it are missing. The usual cause is a version of SGLang that this "
                "exporter does not know yet.",
                settings.hooks_down_for,
            ),
            Alert(
                "CycleHostBound",
                "warning",
                f"({self.server_host_bound} > {_number(settings.host_bound)}) and on (server) ({overlap})",
                "The GPU waits for the scheduler process.",
                "On {{ $labels.server }} the GPU had run out of work at the start of "
                "{{ $value | humanizePercentage }} of the cycles although the overlap scheduler is on. Phase times "
                "then contain launch latency and must not be read as GPU work.",
                settings.host_bound_for,
            ),
            Alert(
                "CyclesDropped",
                "warning",
                f"{lost} / {all_cycles} > {_number(settings.dropped)}",
                "Times of cycles are lost.",
                "On {{ $labels.server }} the times of {{ $value | humanizePercentage }} of the cycles could not be "
                "recorded. Counts of tokens are complete, the cycle breakdown may not be typical.",
                settings.dropped_for,
            ),
        )

    def _liveness_alerts(self) -> tuple[Alert, ...]:
        settings = self.settings
        rank_up = _metric("eagle_rank_up")
        cycles = _metric("eagle_cycles_total")
        running = _metric("eagle_running_requests")
        states = _metric("eagle_timing_enabled")
        job = f'job="{settings.job}"'
        rank = ", ".join(promql.RANK_LEVEL)
        not_counting = f'{states}{{reason=~"off|fuse_errors|hooks_down"}} == 1'
        # A prefill server of a disaggregated pair has running requests and never decodes.
        stuck = (
            f'(min_over_time({running}{{engine_type!="prefill"}}[{settings.no_cycles}]) > 0)'
            f" and on ({rank}) (increase({cycles}[{settings.no_cycles}]) == 0)"
            f" unless on ({rank}) ({not_counting})"
        )
        target = "instance, job"
        names = f"max by ({target}, server) (last_over_time({rank_up}{{{job}}}[{settings.exporter_memory}]))"
        down = f"up{{{job}}} == 0"
        seen = f"(max by (server, config_id) (last_over_time({promql.SPEC_CONFIG}[{settings.configuration}])))"
        listed = f"count by (config_id) (last_over_time({promql.SPEC_CONFIG}{{server=%q}}[{settings.configuration}]))"
        return (
            Alert(
                "RankGone",
                "critical",
                f"{rank_up} == 0",
                "A scheduler process of SGLang has ended.",
                "On {{ $labels.server }} the scheduler process of tp rank {{ $labels.tp_rank }}, pp rank "
                "{{ $labels.pp_rank }}{{ with $labels.dp_rank }}, dp rank {{ . }}{{ end }} is gone and no new one has "
                "taken its place.",
                settings.rank_gone_for,
            ),
            Alert(
                "NoCyclesWithRunningRequests",
                "critical",
                stuck,
                "Requests are running but nothing is decoded.",
                "On {{ $labels.server }} tp rank {{ $labels.tp_rank }}{{ with $labels.dp_rank }}, dp rank {{ . }}"
                "{{ end }} has had running requests, {{ $value }} at least, for "
                f"{settings.no_cycles} without a single decode cycle.",
                settings.no_cycles_for,
            ),
            Alert(
                "ExporterDown",
                "warning",
                f"({names} and on ({target}) ({down})) or (({down}) unless on ({target}) {names})",
                "The exporter cannot be scraped.",
                "Prometheus cannot scrape {{ $labels.instance }}{{ with $labels.server }}, which shows the server "
                "{{ . }}{{ end }}. No other alert about it can fire until it is back.",
                settings.exporter_down_for,
            ),
            Alert(
                "ScrapeSlow",
                "warning",
                f"scrape_duration_seconds{{{job}}} > {_number(settings.scrape_seconds)}",
                "Scrapes of the exporter are slow.",
                "A scrape of {{ $labels.instance }} takes {{ $value | humanizeDuration }}; at the scrape timeout its "
                "metrics go missing.",
                settings.scrape_for,
            ),
            Alert(
                "ConfigurationChanged",
                "info",
                f"count by (server) {seen} > 1",
                "The configuration of speculative decoding has changed.",
                "{{ $labels.server }} has run {{ $value }} configurations in the last "
                f"{settings.configuration}:{{{{ range printf `{listed}` $labels.server | query "
                "| sortByLabel `config_id` }} {{ .Labels.config_id }}{{ end }}. "
                "Baselines of a new configuration begin anew.",
            ),
        )

    def recording_groups(self) -> tuple[Group, ...]:
        """The groups of recording rules, in the order of evaluation."""
        return (self.batch(), self.server(), self.ranks(), self.baseline(), self.drift())

    def recordings(self) -> tuple[Recording, ...]:
        """Every recording rule."""
        return tuple(rule for group in self.recording_groups() for rule in group.rules if isinstance(rule, Recording))

    def all_alerts(self) -> tuple[Alert, ...]:
        """Every alert."""
        return tuple(rule for rule in self.alerts().rules if isinstance(rule, Alert))


def _metric(name: str) -> str:
    return catalogue.BY_NAME[name].name


# --- writing ------------------------------------------------------------------------------------------------

_OPERATORS = re.compile(
    r" (?P<operator>and|or|unless|[-+*/]|[<>]=?|[=!]=)(?: bool)?"
    r"(?: (?:on|ignoring) \([^)]*\))?(?: group_(?:left|right) \([^)]*\))? "
)
_PRECEDENCE = {"or": 0, "and": 1, "unless": 1, "+": 3, "-": 3, "*": 4, "/": 4}
_COMPARISON = 2


def lay_out(expression: str, width: int = 100) -> list[str]:
    """Break an expression into lines: at its outermost operators, else inside its last parentheses."""
    expression = _unwrapped(expression)
    if len(expression) <= width:
        return [expression]
    operators = _outer_operators(expression)
    if operators:
        lines = [f"  {line}" for line in lay_out(expression[: operators[0].start()], width)]
        ends = [operator.start() for operator in operators[1:]] + [len(expression)]
        for operator, end in zip(operators, ends, strict=True):
            operand = lay_out(expression[operator.end() : end], width)
            if len(operand) == 1 and len(operator[0]) + len(operand[0]) <= width:
                lines.append(f"{operator[0].strip()} {operand[0]}")
            else:
                lines += [operator[0].strip(), *(f"  {line}" for line in operand)]
        return lines
    opened = expression.find("(")
    while opened >= 0:
        closed = _closing(expression, opened)
        # The last pair at this depth holds the argument; one before it is a list of labels.
        if expression.find("(", closed) < 0:
            inner = lay_out(expression[opened + 1 : closed], width)
            return [expression[: opened + 1], *(f"  {line}" for line in inner), expression[closed:]]
        opened = expression.find("(", closed)
    return [expression]


def _unwrapped(expression: str) -> str:
    """Without parentheses around a whole operand that has no operator of its own."""
    while expression.startswith("(") and _closing(expression, 0) == len(expression) - 1:
        inner = expression[1:-1]
        if _outer_operators(inner):
            break
        expression = inner
    return expression


def _outer_operators(expression: str) -> list[re.Match[str]]:
    """The operators outside all parentheses that bind least."""
    found = [
        operator
        for operator in _OPERATORS.finditer(expression)
        if expression.count("(", 0, operator.start()) == expression.count(")", 0, operator.start())
    ]
    least = min((_precedence(operator) for operator in found), default=0)
    return [operator for operator in found if _precedence(operator) == least]


def _precedence(operator: re.Match[str]) -> int:
    return _PRECEDENCE.get(operator["operator"], _COMPARISON)


def _closing(text: str, opened: int) -> int:
    depth = 0
    for index in range(opened, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses: {text}")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def render(groups: Sequence[Group], *, header: str = "") -> str:
    """Return groups as a rule file."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()] + ["groups:"]
    for group in groups:
        lines += [f"  - name: {group.name}", f"    interval: {group.interval}", "    rules:"]
        for rule in group.rules:
            if isinstance(rule, Recording):
                lines.append(f"      - record: {rule.record}")
            else:
                lines.append(f"      - alert: {rule.alert}")
            lines.append("        expr: |2-")
            lines += [f"          {line}" for line in lay_out(rule.expr)]
            if isinstance(rule, Alert):
                if rule.for_:
                    lines.append(f"        for: {rule.for_}")
                if rule.keep_firing_for:
                    lines.append(f"        keep_firing_for: {rule.keep_firing_for}")
                lines += ["        labels:", f"          severity: {rule.severity}", "        annotations:"]
                lines += [f"          {name}: {_quoted(text)}" for name, text in rule.annotations.items()]
    return "\n".join(lines) + "\n"


_HEADER = """Generated by deploy/prometheus/build.py, where the thresholds are; do not edit.
For metric catalogue {version}. Prometheus 2.42 or newer (keep_firing_for)."""


def files(settings: Settings = SHIPPED) -> dict[str, str]:
    """Return the rule files by name."""
    rules = Rules(settings)
    header = _HEADER.format(version=catalogue.CATALOGUE_VERSION)
    return {
        "eagle-recording.rules.yaml": render(rules.recording_groups(), header=header),
        "eagle-alerts.rules.yaml": render([rules.alerts()], header=header),
    }


def main() -> int:
    """Write or check ``rules/``; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    parser.add_argument("--output", type=Path, default=HERE / "rules", help="default: %(default)s")
    for field in fields(Settings):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default, metavar="VALUE"
        )
    arguments = parser.parse_args()
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})
    stale = []
    for name, text in files(settings).items():
        path = arguments.output / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not arguments.check:
                arguments.output.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    if arguments.check and stale:
        print(f"out of date: {', '.join(stale)}; run python deploy/prometheus/build.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
