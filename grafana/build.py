"""Builds the dashboards in ``dashboards/`` with Grafana's foundation SDK.

``python grafana/build.py`` writes them; ``--check`` only tells whether they are up to date. Queries come from
`grafana.queries`, the look from `grafana.panels`; baselines and their limits are those of the alert rules.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:  # run from a checkout, installed or not
    sys.path.insert(0, str(HERE.parent))

from grafana_foundation_sdk.builders import dashboard as builders  # noqa: E402
from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: E402
from grafana_foundation_sdk.models import dashboard  # noqa: E402

from deploy.prometheus import build as rules  # noqa: E402
from eagle_exporter import catalogue  # noqa: E402
from eagle_exporter.analysis import kernels, promql  # noqa: E402
from grafana import queries as q  # noqa: E402
from grafana.panels import (  # noqa: E402
    ACCEPT_COLOUR,
    BAD,
    COLUMNS,
    DATASOURCE,
    GAP_COLOUR,
    GOOD,
    NEUTRAL,
    PHASE_COLOURS,
    WARNING,
    Placed,
    Query,
    bar_chart_panel,
    bar_gauge_panel,
    coloured_cell,
    fixed,
    heatmap_panel,
    kernel_overrides,
    phase_overrides,
    stat_panel,
    table_panel,
    timeseries_panel,
    value_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OUTPUT = HERE / "dashboards"
TAG = "eagle-exporter"
RULES = rules.Rules()

NO_BASELINE = "No baseline: set EAGLE_EXPORTER_BASELINE_DECODE_SECONDS, or let a step count of 0 run"
NO_EXPORTER = "No exporter in this data source"
NO_DCGM = "No DCGM exporter in this data source"
NO_OVERLAP = "no overlap"
NO_CAPTURE = "No capture in this time range. One is made by: eagle-exporter profile"

LEADING_BATCH = ("server", "batch_size", "num_steps")
CELL_LEGEND = "batch {{batch_size}}, {{num_steps}} steps · {{server}}"

Row = tuple[Any, list[Placed]]
"""The header as the SDK has it, and the panels below it."""


def row(title: str, panels: Sequence[Placed], *, collapsed: bool = False, repeat: str | None = None) -> Row:
    """Return a row of the dashboard; a collapsed one runs no query until it is opened."""
    return dashboard.RowPanel(title=title, collapsed=collapsed, repeat=repeat), list(panels)


def lay_out(rows: Sequence[Row]) -> list[Any]:
    """Give every panel its id and its place: left to right, the next line begins below the tallest."""
    result: list[Any] = []
    next_id = 1
    y = 0
    for header, placed in rows:
        header.id_val, next_id = next_id, next_id + 1
        header.grid_pos = dashboard.GridPos(x=0, y=y, w=COLUMNS, h=1)
        header.panels = []
        y += 1
        result.append(header)
        below_header = y
        x = tallest = 0
        for item in placed:
            if x + item.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            item.panel.id_val, next_id = next_id, next_id + 1
            item.panel.grid_pos = dashboard.GridPos(x=x, y=y, w=item.width, h=item.height)
            x, tallest = x + item.width, max(tallest, item.height)
            (header.panels if header.collapsed else result).append(item.panel)
        # What a collapsed row holds takes no room until it is opened.
        y = below_header if header.collapsed else y + tallest
    return result


# --- variables, links, annotations ------------------------------------------------------------------------


def _variable(
    name: str, label: str, source: str, description: str, *, all_value: str = ".*", label_name: str = ""
) -> Any:
    return (
        builders.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query({"query": f"label_values({source}, {label_name or name})", "refId": f"variable-{name}"})
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(all_value)
        .current(dashboard.VariableOption(text=["All"], value=["$__all"]))
    )


def variables(*, tensor_parallel_rank: bool = False, batch_size: bool = False, hardware: bool = False) -> list[Any]:
    """Return the variables; a dashboard without panels about single ranks has no choice of a rank.

    Everything below the instance matches empty labels too: a scrape config without a node label, a server
    without data parallelism.
    """
    build_info, rank_up = q.name("eagle_exporter_build_info"), q.name("eagle_rank_up")
    of_job = build_info + promql.matchers('job=~"$job"')
    of_target = build_info + promql.matchers('job=~"$job",instance=~"$instance"')
    servers = rank_up + promql.matchers(q.TARGET)
    ranks = rank_up + promql.matchers(q.TARGET, 'server=~"$server"')
    engine_types = "unified, or prefill and decode of a disaggregated server"
    result: list[Any] = [
        builders.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _variable("job", "Job", build_info, "Scrape job of the exporters", all_value=".+"),
        _variable("instance", "Instance", of_job, "Address of an exporter", all_value=".+"),
        _variable("node", "Node", of_target, "Machine, from the label that the scrape config sets"),
        _variable("server", "Server", servers, "SGLang server; it may span several nodes"),
        _variable("model_name", "Model", ranks, "Served model"),
        _variable("engine_type", "Engine type", ranks, engine_types),
        _variable("dp_rank", "Replica", ranks, "Data-parallel rank; empty without data parallelism"),
    ]
    if tensor_parallel_rank:
        text = "Tensor-parallel rank, for the panels about single ranks only"
        result.append(_variable("tp_rank", "TP rank", ranks, text))
    if batch_size:
        cells = q.name(promql.CYCLES) + promql.matchers(q.TARGET, 'server=~"$server"')
        text = "For the what-if, which looks at the busiest of the chosen batch sizes"
        result.append(_variable("batch_size", "Batch size", cells, text))
    if hardware:
        text = "Nodes whose GPUs the DCGM exporter shows; empty without it"
        result.append(_variable("hardware", "GPU node", "DCGM_FI_DEV_SM_CLOCK", text, label_name="Hostname"))
    return result


@dataclass(frozen=True)
class Annotation:
    """Something that is drawn over every graph.

    Attributes:
        name: Its switch at the top of the dashboard.
        expr: Exists while it holds.
        title: Title of a mark.
        text: Text of a mark.
        colour: Of the mark.
        enabled: Shown from the start.

    """

    name: str
    expr: str
    title: str
    text: str
    colour: str
    enabled: bool = True

    def build(self) -> Any:
        """Return it as the SDK has it."""
        builder = builders.AnnotationQuery().name(self.name).datasource(DATASOURCE).expr(self.expr)
        return builder.enable(self.enabled).hide(False).icon_color(self.colour).build()


def marks() -> list[Annotation]:
    """Return what is drawn over every graph: new configurations, alerts, and, on demand, step counts."""
    config = q.gauge("eagle_spec_config_info", "max", ("server", "config_id"))
    before = config.replace("})", "} offset 1m)")
    steps = q.name("eagle_spec_num_steps") + promql.matchers(q.SERVER)
    return [
        Annotation(
            "Configuration changed",
            # changes() of an info metric is always 0: a new configuration is a new series.
            f"({config}) unless on (server, config_id) ({before})",
            "Configuration {{config_id}}",
            "{{server}} runs with a configuration that it did not have a minute ago (or has just started)",
            NEUTRAL,
        ),
        Annotation("Alert fires", q.FIRING, "{{alertname}}", "{{server}}{{instance}}", BAD),
        Annotation(
            "Step count changed (adaptive)",
            f"changes({steps}[{q.WINDOW}]) > 0",
            "Step count changed",
            "{{server}}",
            "#CA95E5",
            enabled=False,
        ),
    ]


def _dashboard(
    uid: str,
    title: str,
    description: str,
    rows: Sequence[Row],
    *,
    own_variables: Sequence[str] = (),
) -> Any:
    link = builders.DashboardLink("EAGLE dashboards").type(dashboard.DashboardLinkType.DASHBOARDS).tags([TAG])
    link.as_dropdown(False).include_vars(True).keep_time(True).icon("external link")
    builder = (
        builders.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG, "sglang", "speculative-decoding"])
        .readonly()
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .timezone("browser")
        .refresh("30s")
        .link(link)
    )
    for variable in variables(**dict.fromkeys(own_variables, True)):
        builder.with_variable(variable)
    result = builder.build()
    result.annotations = dashboard.AnnotationContainer(list_val=[one.build() for one in marks()])
    result.panels = lay_out(rows)
    return result


# --- 1: the cycle -------------------------------------------------------------------------------------------

_RANK_COLUMNS = {
    "server": "Server",
    "node": "Node",
    "tp_rank": "TP",
    "pp_rank": "PP",
    "dp_rank": "Replica",
    "Value #A": "Up",
    "Value #B": "Cycle (device)",
    "Value #C": "Cycle (host)",
    "Value #D": "Host against group",
    "Value #E": "Gap",
    "Value #F": "Host-bound",
    "Value #G": "Last cycle",
}


def cycle_dashboard() -> Any:
    """Return the live breakdown of the cycle on one server."""
    return _dashboard(
        "eagle-cycle",
        "EAGLE cycle",
        "Where the time of a decode cycle goes, live, on one server (or pooled over the selected ones). "
        "Times are those of the recording ranks; phases are disjoint and add up to the cycle.",
        [
            row("Now", _cycle_now()),
            row("The cycle", _cycle_breakdown()),
            row("What it yields", _cycle_yield()),
            row("Ranks", [_rank_table()]),
            row("Configuration", _configuration()),
            row("Inside the phases", _inside_phases(), collapsed=True),
            row("Inside verify (kernel classes)", _kernels(), collapsed=True),
            row("Hardware: $hardware", _hardware(), collapsed=True, repeat="hardware"),
        ],
        own_variables=("tensor_parallel_rank", "hardware"),
    )


def _host_bound_stat(width: int) -> Placed:
    overlap = q.overlapping(q.shared("host_bound_share", q.SERVERS))
    return stat_panel(
        "Host-bound cycles",
        "Can the phase times be trusted as GPU time? Share of timed cycles that began when the GPU had "
        "already finished "
        "the one before: it waited for the host, and phase times then contain launch latency. Without the "
        "overlap "
        "scheduler it is so by design and not measured as a fault. The worst of the selected servers. "
        "Absent under the host clock. (eagle_host_bound_cycles_total)",
        [Query(f"max ({overlap}) or max ({q.no_overlap()})", instant=True)],
        unit="percentunit",
        width=width,
        decimals=0,
        thresholds=((None, GOOD), (0.2, WARNING), (rules.SHIPPED.host_bound, BAD)),
        mappings=[value_text(-1, NO_OVERLAP, NEUTRAL)],
        no_value="Not measured",
    )


def _alerts_stat(width: int) -> Placed:
    return stat_panel(
        "Alerts firing",
        "Is anything wrong that an alert knows of? Firing Eagle alerts of the selected servers; also 0 "
        "where the alert "
        "rules are not loaded into Prometheus. (ALERTS)",
        [Query(f"count ({q.FIRING}) or vector(0)", instant=True)],
        unit="short",
        width=width,
        decimals=0,
        thresholds=((None, GOOD), (1, BAD)),
    )


def _ranks_down_stat(width: int) -> Placed:
    return stat_panel(
        "Ranks down",
        "Is a scheduler process gone? Ranks whose process ended and was not replaced. (eagle_rank_up)",
        [Query(q.ranks_down(), instant=True)],
        unit="short",
        width=width,
        decimals=0,
        thresholds=((None, GOOD), (1, BAD)),
        no_value=NO_EXPORTER,
    )


def _accept_length_stat(width: int, height: int = 4) -> Placed:
    return stat_panel(
        "Accept length",
        "How many tokens does a request get out of one cycle? 1 + accepted / drafts, the bonus token "
        "included; "
        "1 means that the draft model is of no use. (eagle_accepted_tokens_total, eagle_drafts_total)",
        [Query(q.tokens_per_draft(), instant=True)],
        unit="short",
        width=width,
        height=height,
        decimals=2,
        thresholds=((None, BAD), (rules.SHIPPED.acceptance_collapsed, ACCEPT_COLOUR)),
    )


def _output_stat(width: int, height: int = 4) -> Placed:
    return stat_panel(
        "Output tok/s",
        "What do users get? Tokens appended to requests per second, all replicas together. (eagle_output_tokens_total)",
        [Query(q.shared("output_tokens_per_second", ()), instant=True)],
        unit="short",
        width=width,
        height=height,
        decimals=1,
    )


def _cycle_now() -> list[Placed]:
    return [
        stat_panel(
            "Verify share",
            "Is the target model's verify the whole cost, or does the draft matter? Verify over cycle, all "
            "batch sizes "
            "pooled. (eagle_batch_phase_seconds_total)",
            [Query(q.shared("verify_share", ()), instant=True)],
            unit="percentunit",
            decimals=1,
            thresholds=((None, PHASE_COLOURS["target_verify"]),),
        ),
        stat_panel(
            "Cycle",
            "How long does one decode cycle take on the device, on average? The gap to the next cycle is "
            "not in it. "
            "(eagle_batch_phase_seconds_total, eagle_batch_timed_cycles_total)",
            [Query(q.shared("cycle_seconds", ()), instant=True)],
            unit="s",
            decimals=2,
        ),
        _accept_length_stat(3),
        _output_stat(3),
        stat_panel(
            "Running requests",
            "How much is going on? Requests in the running batches, all replicas together, also when idle. "
            "(eagle_running_requests)",
            [Query(q.running_requests(), instant=True)],
            unit="short",
            decimals=0,
            no_value="No live rank",
        ),
        _host_bound_stat(3),
        _ranks_down_stat(3),
        _alerts_stat(3),
    ]


def _baseline_odds() -> str:
    """Odds of verify that the baseline expects: those of now over the drift that the rules record."""
    drift = f'{RULES.against_median(RULES.odds, "server")}{{server=~"$server"}}'
    weights = q.shared("cycles_per_second", q.SERVERS)
    by_server = f"max by (server) ({drift})"
    weighted = q.ratio(
        f"sum (({by_server}) * on (server) ({weights}))", f"sum (({weights}) and on (server) ({by_server}))"
    )
    return f"({q.shared('verify_odds', ())}) / ({weighted})"


def _share_of_odds(factor: float) -> str:
    odds = f"(({_baseline_odds()}) * {factor:.4g})"
    return f"{odds} / (1 + {odds})"


def _cycle_breakdown() -> list[Placed]:
    phases = list(PHASE_COLOURS)
    shares = q.shared("phase_share", ())
    limit = rules.SHIPPED.verify_drift
    return [
        timeseries_panel(
            "Cycle by phase",
            "Which phase costs what, and since when? Mean milliseconds of each phase per cycle, stacked: "
            "together they are "
            "the cycle. other is what no phase claimed. (eagle_batch_phase_seconds_total / "
            "eagle_batch_timed_cycles_total)",
            [Query(q.shared("phase_seconds", (), phase=phase), phase) for phase in phases],
            unit="s",
            width=15,
            height=12,
            stacked=True,
            minimum=0,
            overrides=phase_overrides(),
            legend_values=("lastNotNull", "mean", "max"),
        ),
        bar_chart_panel(
            "The cycle now",
            "What is the cycle made of at this moment? Share of each phase; together they are 100 %. "
            "Compare shares of servers with the same hook_family only. (eagle_batch_phase_seconds_total)",
            [Query(f'label_replace(sort_desc({shares}), "cycle", "cycle", "", "")', instant=True, table=True)],
            unit="percentunit",
            width=9,
            height=12,
            x_field="cycle\\phase",
            transformations=[
                dashboard.DataTransformerConfig(
                    id_val="groupingToMatrix",
                    options={"columnField": "phase", "rowField": "cycle", "valueField": "Value"},
                )
            ],
            stacked=True,
            decimals=1,
            maximum=1,
            overrides=phase_overrides(),
        ),
        timeseries_panel(
            "Verify share against its baseline",
            "Has verify become slower or faster than it used to be under the same conditions? The band is "
            "what the last "
            f"two days let expect at these batch sizes; EagleVerifyShareDrift judges its edges (odds "
            f"{limit:g} times up "
            "or down). The band needs the recording rules and three hours of traffic, and is exact for one "
            "server. "
            "(eagle_batch_phase_seconds_total)",
            [
                Query(q.shared("verify_share", ()), "verify share"),
                Query(_share_of_odds(limit), "band high"),
                Query(_share_of_odds(1 / limit), "band low"),
            ],
            unit="percentunit",
            width=8,
            fill=0,
            soft_maximum=1,
            maximum=1,
            overrides=[
                ("verify share", {"color": fixed(PHASE_COLOURS["target_verify"]), "custom.lineWidth": 3}),
                (
                    "band high",
                    {
                        "color": fixed("#8E8E8E"),
                        "custom.lineWidth": 1,
                        "custom.fillBelowTo": "band low",
                        "custom.fillOpacity": 20,
                    },
                ),
                ("band low", {"color": fixed("#8E8E8E"), "custom.lineWidth": 1}),
            ],
        ),
        timeseries_panel(
            "Cycle time",
            "Are all cycles alike, or are a few very slow? Quantiles of the cycle, good to about 10 %; the "
            "mean is exact. "
            "(eagle_cycle_duration_seconds)",
            [
                Query(q.quantile(0.99, "eagle_cycle_duration_seconds"), "p99"),
                Query(q.quantile(0.9, "eagle_cycle_duration_seconds"), "p90"),
                Query(q.quantile(0.5, "eagle_cycle_duration_seconds"), "p50"),
                Query(q.mean("eagle_cycle_duration_seconds"), "mean"),
            ],
            unit="s",
            width=8,
            fill=0,
            minimum=0,
            overrides=[
                ("p99", {"color": fixed(BAD)}),
                ("p90", {"color": fixed(WARNING)}),
                ("p50", {"color": fixed(GOOD)}),
                ("mean", {"color": fixed("#CCCCDC"), "custom.lineStyle": {"fill": "dash", "dash": [6, 6]}}),
            ],
        ),
        heatmap_panel(
            "Target verify",
            "Does verify have one speed or several (batch sizes, clocks, an interfering job)? How many "
            "cycles had which "
            "verify time. (eagle_phase_duration_seconds)",
            [
                Query(
                    q.buckets("eagle_phase_duration_seconds", 'phase="target_verify"', _HEATMAP_BOUNDS),
                    "{{le}}",
                )
            ],
            unit="s",
            width=8,
        ),
        bar_chart_panel(
            "Device and host time by phase",
            "Does the scheduler thread keep ahead of the GPU? Per phase, mean device time and mean time of "
            "the scheduler "
            "thread. Where host exceeds device, launching is what costs. (eagle_batch_phase_seconds_total, "
            "eagle_phase_host_seconds_total)",
            [
                Query(q.shared("phase_seconds", ()), instant=True, table=True),
                Query(q.host_seconds(), instant=True, table=True),
            ],
            unit="s",
            width=8,
            height=9,
            x_field="phase",
            transformations=[
                dashboard.DataTransformerConfig(id_val="joinByField", options={"byField": "phase", "mode": "outer"}),
                dashboard.DataTransformerConfig(
                    id_val="filterFieldsByName",
                    options={"include": {"names": ["phase", "Value #A", "Value #B"]}},
                ),
                dashboard.DataTransformerConfig(
                    id_val="organize",
                    options={
                        "excludeByName": {},
                        "indexByName": {"phase": 0, "Value #A": 1, "Value #B": 2},
                        "renameByName": {"Value #A": "device", "Value #B": "host"},
                    },
                ),
            ],
            overrides=[
                ("device", {"color": fixed(PHASE_COLOURS["target_verify"])}),
                ("host", {"color": fixed(GAP_COLOUR)}),
            ],
        ),
        timeseries_panel(
            "Gap between cycles",
            "How long is the GPU without a cycle between two of them? Outside the cycle, inside the cost "
            "of a token. "
            "(eagle_batch_gap_seconds_total, eagle_cycle_gap_seconds)",
            [
                Query(q.shared("gap_seconds", ()), "mean"),
                Query(q.quantile(0.99, "eagle_cycle_gap_seconds"), "p99"),
            ],
            unit="s",
            width=8,
            height=9,
            minimum=0,
            fill=0,
            overrides=[
                ("mean", {"color": fixed(GAP_COLOUR)}),
                ("p99", {"color": fixed(GAP_COLOUR), "custom.lineStyle": {"fill": "dash", "dash": [6, 6]}}),
            ],
        ),
        timeseries_panel(
            "Host-bound cycles over time",
            "Since when has the GPU been waiting for the host? Share of timed cycles, by server; servers "
            "without the "
            "overlap scheduler are left out, since there it is so by design. (eagle_host_bound_cycles_total)",
            [Query(q.overlapping(q.shared("host_bound_share", q.SERVERS)), "{{server}}")],
            unit="percentunit",
            width=8,
            height=9,
            minimum=0,
            maximum=1,
            lines=((None, "transparent"), (rules.SHIPPED.host_bound, BAD)),
            no_value="Not measured, or no overlap scheduler",
        ),
    ]


_HEATMAP_BOUNDS = r'le=~"0\\.00[1-9].*|0\\.0[1-9].*|0\\.[1-9].*|1(\\.0)?|\\+Inf"'
"""1 ms to 1 s: the rows below and above would be empty and make the others thin. Buckets are cumulative, so
what is faster appears in the lowest row and what is slower in the highest one."""


def _cycle_yield() -> list[Placed]:
    return [
        timeseries_panel(
            "Output",
            "What do users get? Tokens appended to requests per second, by server. (eagle_output_tokens_total)",
            [Query(q.shared("output_tokens_per_second", q.SERVERS), "{{server}}")],
            unit="short",
            width=8,
            axis_label="tok/s",
            minimum=0,
        ),
        timeseries_panel(
            "Accept length over time",
            "How many tokens does a request get out of one cycle? By server; 1 means that nothing is "
            "accepted. "
            "(eagle_accepted_tokens_total, eagle_drafts_total)",
            [Query(q.tokens_per_draft(q.SERVERS), "{{server}}")],
            unit="short",
            width=8,
            axis_label="tokens per cycle",
            decimals=2,
            minimum=1,
        ),
        timeseries_panel(
            "Batch size",
            "How many requests share a cycle? Mean live requests in a cycle, by server. "
            "(eagle_batch_drafts_total, eagle_batch_cycles_total)",
            [Query(q.shared("requests_per_cycle", q.SERVERS), "{{server}}")],
            unit="short",
            width=8,
            axis_label="requests per cycle",
            decimals=1,
            minimum=0,
        ),
    ]


def _rank_table() -> Placed:
    host = q.rank_figure("eagle_phase_host_seconds_total")
    last = q.gauge("eagle_last_cycle_timestamp_seconds", "max", q.RANKS, selector=q.RANK)
    queries = [
        q.gauge("eagle_rank_up", "max", q.RANKS, selector=q.RANK),
        q.rank_figure("eagle_batch_phase_seconds_total"),
        host,
        q.against_group(host),
        q.rank_figure("eagle_batch_gap_seconds_total"),
        q.rank_figure("eagle_host_bound_cycles_total"),
        f"time() - {last}",
    ]
    return table_panel(
        "Ranks",
        "Which rank holds the others up? Look at host time, gap and host-bound share. Device time is the "
        "same on all "
        "ranks of a tensor-parallel group even when one GPU is slow: the all-reduce makes all of them wait "
        "for it, so "
        "it shows in nobody's verify (see the hardware row). On the CPU, and with V1 workers, the host waits inside "
        "the cycle too: there the rank with the least host time is the slow one. A rank that ended keeps its line "
        "and says so. "
        "(eagle_rank_up, eagle_batch_phase_seconds_total, eagle_phase_host_seconds_total, "
        "eagle_batch_gap_seconds_total, eagle_host_bound_cycles_total, eagle_last_cycle_timestamp_seconds)",
        [Query(expr, instant=True, table=True) for expr in queries],
        columns=_RANK_COLUMNS,
        height=9,
        sort_by=[("Up", False), ("Host against group", True)],
        overrides=[
            (
                "Up",
                {
                    **coloured_cell((None, BAD), (1, GOOD)),
                    "mappings": [
                        {
                            "type": "value",
                            "options": {
                                "0": {"text": "ended", "color": BAD},
                                "1": {"text": "up", "color": GOOD},
                            },
                        }
                    ],
                },
            ),
            ("Cycle (device)", {"unit": "s", "decimals": 2}),
            ("Cycle (host)", {"unit": "s", "decimals": 2}),
            (
                "Host against group",
                {
                    "unit": "percentunit",
                    "decimals": 0,
                    **coloured_cell((None, "transparent"), (1.2, WARNING), (1.5, BAD)),
                },
            ),
            ("Gap", {"unit": "s", "decimals": 1}),
            ("Host-bound", {"unit": "percentunit", "decimals": 0}),
            ("Last cycle", {"unit": "s", "decimals": 0}),
        ],
        no_value=NO_EXPORTER,
    )


_CONFIG_COLUMNS = {
    "server": "Server",
    "config_id": "Config",
    "algorithm": "Algorithm",
    "num_steps": "Steps",
    "topk": "topk",
    "num_draft_tokens": "Draft tokens",
    "adaptive": "Adaptive",
    "overlap": "Overlap",
    "cuda_graph": "CUDA graphs",
    "attention_backend": "Attention",
    "draft_attention_backend": "Draft attention",
    "tp_size": "TP",
    "pp_size": "PP",
    "dp_size": "DP",
    "ep_size": "EP",
    "page_size": "Page size",
    "draft_model": "Draft model",
    "hook_family": "Hooks",
    "sglang_version": "SGLang",
    "torch_version": "torch",
    "Value": "Ranks",
}


def _configuration() -> list[Placed]:
    nccl = ("server", *catalogue.BY_NAME["eagle_nccl_config_info"].labels)
    allreduce = ("server", *catalogue.ALLREDUCE_LABELS)
    timing = ("server", *catalogue.BY_NAME["eagle_timing_info"].labels)
    return [
        table_panel(
            "Speculative decoding",
            "What is this server configured to do, and do all ranks agree? One line per configuration; two "
            "lines of one "
            "server are two configurations (in the middle of a restart, or a mistake). A new configuration "
            "is marked in "
            "every graph. (eagle_spec_config_info)",
            [
                Query(
                    q.info("eagle_spec_config_info", ("server", *catalogue.SPEC_CONFIG_LABELS)),
                    instant=True,
                    table=True,
                )
            ],
            columns=_CONFIG_COLUMNS,
            height=4,
            sort_by=[("Server", False)],
            no_value="No live rank",
        ),
        table_panel(
            "NCCL",
            "Which NCCL settings do the scheduler processes have? Empty means NCCL's own choice. "
            "(eagle_nccl_config_info)",
            [Query(q.info("eagle_nccl_config_info", nccl), instant=True, table=True)],
            columns={
                "server": "Server",
                "version": "NCCL",
                **catalogue.NCCL_VARIABLES,
                "Value": "Ranks",
            },
            width=24,
            height=4,
            no_value="No live rank",
        ),
        table_panel(
            "All-reduce",
            "Which all-reduce implementations was SGLang allowed to use? (eagle_allreduce_config_info)",
            [Query(q.info("eagle_allreduce_config_info", allreduce), instant=True, table=True)],
            columns={
                "server": "Server",
                "custom_all_reduce": "Custom",
                "nvls": "NVLS",
                "symmetric_memory": "Symmetric memory",
                "flashinfer_fusion": "FlashInfer fusion",
                "torch_symmetric_memory": "torch symmetric memory",
                "Value": "Ranks",
            },
            width=12,
            height=4,
            no_value="No live rank",
        ),
        table_panel(
            "Timing",
            "How are these times taken? cuda_event is the normal clock; sync costs 30 to 45 % of "
            "throughput and is for "
            "diagnosis only. (eagle_timing_info)",
            [Query(q.info("eagle_timing_info", timing), instant=True, table=True)],
            columns={
                "server": "Server",
                "clock": "Clock",
                "draft_step_source": "Draft step times from",
                "sample_every": "Timed: every n-th cycle",
                "Value": "Ranks",
            },
            width=12,
            height=4,
            no_value="No live rank",
        ),
    ]


def _inside_phases() -> list[Placed]:
    step_seconds = q.recorded("eagle_draft_step_seconds_total", ("step",))
    parts = q.recorded("eagle_verify_overhead_part_seconds_total", ("part",))
    sampled = q.recorded("eagle_verify_overhead_sampled_cycles_total")
    allocation = q.recorded("eagle_kv_allocation_host_seconds_total")
    prefill = "eagle_prefill_phase_duration_seconds"
    return [
        timeseries_panel(
            "Draft forwards",
            "Does a later draft step cost more than an earlier one? Mean seconds of each draft forward; "
            "the first draft "
            "token comes from the preceding extend. (eagle_draft_step_seconds_total / "
            "eagle_draft_steps_total)",
            [
                Query(
                    f"({step_seconds}) / (({q.recorded('eagle_draft_steps_total', ('step',))}) > 0)",
                    "step {{step}}",
                )
            ],
            unit="s",
            width=8,
            minimum=0,
            no_value="No traffic, or one step only",
        ),
        timeseries_panel(
            "Parts of the verify overhead",
            "What is in verify_overhead? Mean seconds of its parts in the cycles where they were sampled; "
            "without their "
            "remainder. (eagle_verify_overhead_part_seconds_total / "
            "eagle_verify_overhead_sampled_cycles_total)",
            [Query(f"({parts}) / on () group_left () (({sampled}) > 0)", "{{part}}")],
            unit="s",
            width=8,
            minimum=0,
        ),
        timeseries_panel(
            "Prefill",
            "What does a prefill batch cost, and how much of it is the draft model's? Mean seconds. "
            "(eagle_prefill_phase_duration_seconds)",
            [
                Query(q.mean(prefill, ("phase",)), "{{phase}}"),
                Query(
                    f"({allocation}) / (({q.recorded('eagle_cycles_total')}) > 0)",
                    "KV allocation on the host, per cycle",
                ),
            ],
            unit="s",
            width=8,
            minimum=0,
            overrides=[("target_prefill", {"color": fixed(NEUTRAL)}), *phase_overrides()],
        ),
    ]


_KERNEL_COLUMNS = {
    "phase": "Phase",
    "kernel_class": "Kernel class",
    "Value #A": "Per cycle",
    "Value #B": "Share of the phase",
}
_KERNEL_RANK_COLUMNS = {
    "server": "Server",
    "node": "Node",
    "tp_rank": "TP",
    "pp_rank": "PP",
    "dp_rank": "Replica",
    "Value #A": "All-reduce",
    "Value #B": "Against group",
    "Value #C": "Other kernels",
    "Value #D": "Idle",
    "Value #E": "Verify",
    "Value #F": "Captured cycles",
}


def _kernels() -> list[Placed]:
    return [*_kernels_now(), *_kernels_by_phase(), *_kernels_by_rank()]


def _kernels_now() -> list[Placed]:
    verify = q.per_captured_cycle(q.KERNEL_PHASE_SECONDS, (), q.VERIFY_PHASE)
    allreduce = q.per_captured_cycle(q.KERNEL_SECONDS, (), q.VERIFY_PHASE, q.ALLREDUCE)
    idle = q.idle_per_captured_cycle((), q.VERIFY_PHASE)
    return [
        stat_panel(
            "Last capture",
            "How old is what is shown below? Time since the end of the newest capture of kernels, which may lie before "
            "the time range of the dashboard: then nothing is shown below. "
            "(eagle_kernel_last_capture_timestamp_seconds)",
            [Query(q.last_capture(), instant=True)],
            unit="s",
            width=4,
            decimals=0,
            mappings=[value_text(0, "just now", NEUTRAL)],
            no_value=NO_CAPTURE,
        ),
        stat_panel(
            "Captured cycles",
            "How much do the figures below rest on? Cycles whose kernels were captured within the time range, of the "
            "rank with the most. (eagle_kernel_profiled_cycles_total)",
            [Query(f"max (({q.captured(q.CAPTURED_CYCLES, q.RANKS)}) > 0)", instant=True)],
            unit="short",
            width=4,
            decimals=0,
            no_value=NO_CAPTURE,
        ),
        stat_panel(
            "All-reduce in verify",
            "Is it communication that verify waits for? All-reduce kernels over the time of verify in captured cycles; "
            "they also hold the waiting for the slowest rank. NCCL's settings move the class allreduce_nccl only. "
            "(eagle_kernel_seconds_total, eagle_kernel_phase_seconds_total)",
            [Query(q.ratio(allreduce, verify), instant=True)],
            unit="percentunit",
            width=4,
            decimals=0,
            thresholds=((None, NEUTRAL), (kernels.ALLREDUCE_SHARE, WARNING)),
            no_value="No all-reduce, or no capture in this time range",
        ),
        stat_panel(
            "Idle in verify",
            "Does the GPU run out of work inside verify? Part of verify in captured cycles in which no kernel ran. "
            "Much of it is the profiler's own doing, which slows launches down: a server whose Host-bound cycles are "
            "near zero is not idle. (eagle_kernel_phase_seconds_total, eagle_kernel_busy_seconds_total)",
            [Query(q.ratio(idle, verify), instant=True)],
            unit="percentunit",
            width=4,
            decimals=0,
            no_value=NO_CAPTURE,
        ),
        stat_panel(
            "Captures",
            "Did the captures work? How many within the time range, by outcome, over the selected ranks. busy: another "
            "profiler was running; refused: the hooks are off. (eagle_kernel_captures_total)",
            [
                Query(
                    f"({q.captured('eagle_kernel_captures_total', ('outcome',))}) > 0",
                    "{{outcome}}",
                    instant=True,
                )
            ],
            unit="short",
            width=8,
            decimals=0,
            name_and_value=True,
            no_value=NO_CAPTURE,
        ),
    ]


def _kernels_by_phase() -> list[Placed]:
    classes = q.kernel_classes_and_idle()
    phases = q.per_captured_cycle(q.KERNEL_PHASE_SECONDS, ("phase",))
    over_time = q.per_captured_cycle(q.KERNEL_SECONDS, ("kernel_class",), q.VERIFY_PHASE, window=q.WINDOW)
    return [
        bar_chart_panel(
            "Phases by kernel class",
            "What is each phase made of? Mean time of each kernel class per captured cycle, and idle: the time in "
            "which no kernel ran. Kernels that run side by side both count. Captures within the time range of the "
            "dashboard. (eagle_kernel_seconds_total, eagle_kernel_busy_seconds_total, "
            "eagle_kernel_phase_seconds_total / eagle_kernel_profiled_cycles_total)",
            [Query(f"sort_desc({classes})", instant=True, table=True)],
            unit="s",
            width=14,
            height=10,
            x_field="phase\\kernel_class",
            transformations=[
                dashboard.DataTransformerConfig(
                    id_val="groupingToMatrix",
                    options={"columnField": "kernel_class", "rowField": "phase", "valueField": "Value"},
                )
            ],
            stacked=True,
            overrides=kernel_overrides(),
            no_value=NO_CAPTURE,
        ),
        table_panel(
            "Kernel classes",
            "Which class of kernels takes how much of its phase? Per captured cycle, the most expensive first; the "
            "share is of the phase's whole time, idle included. The names of the kernels are in /api/v1/kernels of the "
            "exporter. (eagle_kernel_seconds_total, eagle_kernel_phase_seconds_total)",
            [
                Query(classes, instant=True, table=True),
                Query(f"({classes}) / on (phase) group_left () (({phases}) > 0)", instant=True, table=True),
            ],
            columns=_KERNEL_COLUMNS,
            width=10,
            height=10,
            sort_by=[("Per cycle", True)],
            overrides=[
                ("Per cycle", {"unit": "s"}),
                ("Share of the phase", {"unit": "percentunit", "decimals": 1}),
            ],
            no_value=NO_CAPTURE,
        ),
        timeseries_panel(
            "Verify by kernel class, capture by capture",
            "Did the mixture change from one capture to the next? Mean time of each kernel class in verify per "
            "captured cycle; a bar is a capture. (eagle_kernel_seconds_total / eagle_kernel_profiled_cycles_total)",
            [Query(over_time, "{{kernel_class}}")],
            unit="s",
            width=10,
            height=9,
            stacked=True,
            bars=True,
            minimum=0,
            overrides=kernel_overrides(),
            no_value=NO_CAPTURE,
        ),
    ]


def _kernels_by_rank() -> list[Placed]:
    def seconds(metric: str, *matchers: str) -> str:
        return q.per_captured_cycle(metric, q.RANKS, q.VERIFY_PHASE, *matchers)

    allreduce = seconds(q.KERNEL_SECONDS, q.ALLREDUCE)
    queries = [
        allreduce,
        q.against_group(allreduce),
        seconds(q.KERNEL_SECONDS, q.ALLREDUCE.replace("=~", "!~")),
        q.idle_per_captured_cycle(q.RANKS, q.VERIFY_PHASE),
        seconds(q.KERNEL_PHASE_SECONDS),
        f"({q.captured(q.CAPTURED_CYCLES, q.RANKS)}) > 0",
    ]
    return [
        table_panel(
            "Verify by rank",
            "Which GPU do the others wait for? The one whose other kernels take longer, or with much less all-reduce: "
            "it comes last, and the others spend the difference inside the all-reduce. Per captured cycle, of ranks "
            "that were captured (eagle-exporter profile --rank); they are captured one after the other, so the load "
            "must have been the same. The profiler makes the captured rank late itself, so in all-reduce only a rank "
            "that is slower than that stands out. "
            "(eagle_kernel_seconds_total, eagle_kernel_busy_seconds_total, eagle_kernel_phase_seconds_total, "
            "eagle_kernel_profiled_cycles_total)",
            [Query(expr, instant=True, table=True) for expr in queries],
            columns=_KERNEL_RANK_COLUMNS,
            width=14,
            height=9,
            sort_by=[("All-reduce", False)],
            overrides=[
                ("All-reduce", {"unit": "s"}),
                (
                    "Against group",
                    {
                        "unit": "percentunit",
                        "decimals": 0,
                        **coloured_cell((None, BAD), (0.7, WARNING), (0.85, "transparent")),
                    },
                ),
                ("Other kernels", {"unit": "s"}),
                ("Idle", {"unit": "s"}),
                ("Verify", {"unit": "s"}),
                ("Captured cycles", {"decimals": 0}),
            ],
            no_value=NO_CAPTURE,
        ),
    ]


def _hardware() -> list[Placed]:
    where = "GPUs of the selected ranks, joined by GPU uuid through eagle_gpu_info."
    legend = "TP {{tp_rank}} · {{server}}"
    return [
        timeseries_panel(
            "SM clock",
            f"Is one GPU slower than the others? A low clock here is what nobody's verify time shows. "
            f"{where} "
            "(DCGM_FI_DEV_SM_CLOCK)",
            [Query(f"1e6 * {q.dcgm('DCGM_FI_DEV_SM_CLOCK')}", legend)],
            unit="hertz",
            width=6,
            height=10,
            fill=0,
            no_value=NO_DCGM,
        ),
        timeseries_panel(
            "Power",
            f"Is a GPU at its power limit? {where} (DCGM_FI_DEV_POWER_USAGE)",
            [Query(q.dcgm("DCGM_FI_DEV_POWER_USAGE"), legend)],
            unit="watt",
            width=6,
            height=10,
            fill=0,
            minimum=0,
            no_value=NO_DCGM,
        ),
        timeseries_panel(
            "Temperature",
            f"Is a GPU too hot to keep its clock? {where} (DCGM_FI_DEV_GPU_TEMP)",
            [Query(q.dcgm("DCGM_FI_DEV_GPU_TEMP"), legend)],
            unit="celsius",
            width=6,
            height=10,
            fill=0,
            no_value=NO_DCGM,
        ),
        timeseries_panel(
            "GPU busy",
            f"Is the GPU idle between cycles? {where} (DCGM_FI_DEV_GPU_UTIL)",
            [Query(f"{q.dcgm('DCGM_FI_DEV_GPU_UTIL')} / 100", legend)],
            unit="percentunit",
            width=6,
            height=10,
            fill=0,
            minimum=0,
            maximum=1,
            no_value=NO_DCGM,
        ),
    ]


# --- 2: does it pay off -------------------------------------------------------------------------------------


def payoff_dashboard() -> Any:
    """Return what speculation gains over decoding without it, and what other step counts would."""
    return _dashboard(
        "eagle-payoff",
        "EAGLE: is speculation paying off",
        "Speed-up over decoding without speculation, at equal batch size, and what fewer steps would give. "
        "It needs a baseline: EAGLE_EXPORTER_BASELINE_DECODE_SECONDS, or cycles with a step count of 0.",
        [
            row("Now", _payoff_now()),
            row("Against no speculation", _payoff_against()),
            row("Fewer steps", _fewer_steps()),
        ],
        own_variables=("batch_size",),
    )


def _payoff_now() -> list[Placed]:
    return [
        stat_panel(
            "Speed-up",
            "Is speculation worth it at all? Time that decoding without speculation would have taken for "
            "the same tokens, "
            "over the time that was spent; pooled over the batch sizes whose baseline is known. Below 1 "
            "speculation "
            "costs more than it brings. (eagle_batch_*, eagle_baseline_decode_seconds)",
            [Query(q.overall_speedup(), instant=True)],
            unit="short",
            width=6,
            height=5,
            decimals=2,
            thresholds=((None, BAD), (rules.SHIPPED.speedup, WARNING), (1.02, GOOD)),
            no_value=NO_BASELINE,
        ),
        _accept_length_stat(4, 5),
        _output_stat(4, 5),
        stat_panel(
            "Best step count, tok/s (estimate)",
            "Which number of draft steps would give the most tok/s now? The best of the running step count "
            "and fewer ones, "
            "at the busiest batch size of each server; the table below has the band around each estimate. "
            "Chains (topk 1) with one step count in "
            "force only. More steps than run now: eagle-exporter advise.",
            [Query(q.best_steps(), "{{steps}} steps", instant=True)],
            unit="short",
            width=5,
            height=5,
            decimals=0,
            thresholds=((None, GOOD),),
            name_and_value=True,
            no_value=NO_BASELINE,
        ),
        stat_panel(
            "Last step: brings over must bring",
            "Does the last draft step pay for itself? Tokens per cycle that it adds, over what it must add "
            "to be worth its "
            "draft forward and its token in verify. Below 100 %, one step less would be faster. The "
            "busiest batch size.",
            [Query(f"min ({q.last_step_worth()})", instant=True)],
            unit="percentunit",
            width=5,
            height=5,
            decimals=0,
            thresholds=((None, BAD), (1, GOOD)),
            no_value=NO_BASELINE,
        ),
    ]


_CELL_COLUMNS = {
    "server": "Server",
    "batch_size": "Batch size",
    "num_steps": "Steps",
    "Value #A": "Cycles/s",
    "Value #B": "Cycle + gap",
    "Value #C": "Without speculation",
    "Value #D": "Break-even length",
    "Value #E": "Accept length",
    "Value #F": "Speed-up",
    "Value #G": "tok/s while decoding",
}


def _payoff_against() -> list[Placed]:
    speculating = f'{q.SERVER},num_steps!="{promql.NO_SPECULATION}"'
    baseline = q.rated(promql.baseline_seconds(q.SERVER, q.WINDOW))
    cost = q.rated(promql.cost_per_cycle(speculating, q.WINDOW))
    figures = [
        q.rated(promql.cycles_per_second(speculating, q.WINDOW)) + " > 0",
        cost,
        # The baseline belongs to a batch size, not to a step count: each cell gets that of its batch size.
        f"0 * ({cost}) + on (server, batch_size) group_left () ({baseline})",
        q.shared("breakeven_tokens_per_cycle"),
        q.rated(promql.tokens_per_cycle(speculating, q.WINDOW)),
        q.shared("speedup"),
        q.rated(promql.decode_tokens_per_second(speculating, q.WINDOW)),
    ]
    return [
        timeseries_panel(
            "Speed-up by batch size",
            "At which batch size does speculation stop paying? Speed-up over no speculation at equal batch "
            "size and step "
            "count; below the line at 1 it costs more than it brings. (eagle_batch_*)",
            [Query(q.shared("speedup"), CELL_LEGEND)],
            unit="short",
            width=12,
            height=9,
            fill=0,
            decimals=2,
            lines=((None, "transparent"), (1, BAD)),
            soft_maximum=1.05,
            no_value=NO_BASELINE,
        ),
        timeseries_panel(
            "Accept length above break-even",
            "How much acceptance is there to lose? Tokens per cycle beyond the break-even length, at which "
            "speculation and "
            "no speculation are equally fast: (cycle + gap) / (decode step without speculation). Below 0 "
            "it does not pay.",
            [
                Query(
                    f"({q.rated(promql.tokens_per_cycle(speculating, q.WINDOW))}) - "
                    f"({q.shared('breakeven_tokens_per_cycle')})",
                    CELL_LEGEND,
                )
            ],
            unit="short",
            width=12,
            height=9,
            fill=0,
            decimals=2,
            axis_label="tokens per cycle",
            lines=((None, "transparent"), (0, BAD)),
            no_value=NO_BASELINE,
        ),
        table_panel(
            "By batch size and step count",
            "Where does it pay, and by how much? Costs compare only at equal batch size. Without "
            "speculation is the "
            "configured decode step, else the measured one (cycles with a step count of 0). (eagle_batch_*, "
            "eagle_baseline_decode_seconds)",
            [Query(expr, instant=True, table=True) for expr in figures],
            columns=_CELL_COLUMNS,
            height=8,
            sort_by=[("Cycles/s", True)],
            overrides=[
                ("Cycles/s", {"decimals": 1}),
                ("Cycle + gap", {"unit": "s", "decimals": 2}),
                ("Without speculation", {"unit": "s", "decimals": 2}),
                ("Break-even length", {"decimals": 2}),
                ("Accept length", {"decimals": 2}),
                (
                    "Speed-up",
                    {
                        "decimals": 2,
                        **coloured_cell((None, BAD), (rules.SHIPPED.speedup, WARNING), (1.02, GOOD)),
                    },
                ),
                ("tok/s while decoding", {"decimals": 1}),
            ],
        ),
    ]


def _fewer_steps() -> list[Placed]:
    bounds = {"linear": "tok/s (estimate)", "constant": "at least", "flat": "at most"}
    estimate = bounds["linear"]
    return [
        table_panel(
            "tok/s with fewer steps",
            "What would 2 steps give instead of 5? Tokens per second of one replica while it decodes, at "
            "the busiest of "
            "the chosen batch sizes, from "
            "the acceptance "
            "per position and the measured phases. Verify of fewer tokens is not known: the estimate draws "
            "a line from one "
            "token to what runs now, the bounds take it as constant (at least), and as that of one token "
            "with a shorter re-extend (at most). The "
            "running step count is measured. Sorted: the best first. Chains (topk 1) with one step count "
            "in force only; "
            "fewer steps need a baseline. (eagle_accepted_tokens_per_pos_total, eagle_batch_*)",
            [
                Query(
                    f"({q.what_if(verify)}) and on (server, batch_size, num_steps) ({q.busiest()})",
                    instant=True,
                    table=True,
                )
                for verify in bounds
            ],
            columns={
                "server": "Server",
                "batch_size": "Batch size",
                "num_steps": "Steps now",
                "steps": "Steps",
                **{f"Value #{chr(ord('A') + i)}": heading for i, heading in enumerate(bounds.values())},
            },
            width=14,
            height=10,
            sort_by=[("Server", False), (estimate, True)],
            overrides=[
                (
                    estimate,
                    {
                        "custom.cellOptions": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"},
                        "color": fixed(ACCEPT_COLOUR),
                        "min": 0,
                        "decimals": 1,
                    },
                ),
                ("at least", {"decimals": 1}),
                ("at most", {"decimals": 1}),
            ],
        ),
        bar_gauge_panel(
            "Tokens per cycle with k steps",
            "How much does each further step still add? Accept length with the first k steps only: 1 + "
            "acceptance at each "
            "of the first k positions, all batch sizes pooled. Chains only. "
            "(eagle_accepted_tokens_per_pos_total / "
            "eagle_offered_tokens_per_pos_total)",
            [
                Query(
                    q.rated(promql.tokens_per_cycle_at(k, q.SERVER, q.WINDOW)),
                    f"{k} · {{{{server}}}}",
                    instant=True,
                )
                for k in range(1, 9)
            ],
            unit="short",
            width=10,
            height=10,
            decimals=2,
            colour=ACCEPT_COLOUR,
            no_value="No traffic, or a tree (topk above 1)",
        ),
        timeseries_panel(
            "What one more step costs",
            "What does the last step cost per cycle? One draft forward, and one more token in verify on "
            "the line from the "
            "decode step without speculation to what runs now. (eagle_batch_phase_seconds_total, "
            "eagle_spec_num_steps)",
            [Query(q.step_cost(), CELL_LEGEND)],
            unit="s",
            width=12,
            height=8,
            fill=0,
            minimum=0,
            no_value=NO_BASELINE,
        ),
        timeseries_panel(
            "What the last step brings, and what it must bring",
            "Would one step less be faster? Tokens per cycle that the last step adds (solid), and what it "
            "must add to pay "
            "for itself at each batch size (dashed): its cost over the cost of a token. Solid below "
            "dashed: it does not pay. "
            "(eagle_accepted_tokens_per_pos_total, eagle_batch_*)",
            [
                Query(q.last_step_brings(), "brings · {{server}}"),
                Query(q.step_must_bring(), "must bring, batch {{batch_size}} · {{server}}"),
            ],
            unit="short",
            width=12,
            height=8,
            fill=0,
            decimals=3,
            minimum=0,
            axis_label="tokens per cycle",
            overrides=[
                ("/^brings.*/", {"color": fixed(ACCEPT_COLOUR), "custom.lineWidth": 3}),
                ("/^must bring.*/", {"custom.lineStyle": {"fill": "dash", "dash": [8, 6]}}),
            ],
        ),
    ]


# --- 3: acceptance ------------------------------------------------------------------------------------------


def acceptance_dashboard() -> Any:
    """Return how well the draft model predicts, and where it does not."""
    return _dashboard(
        "eagle-acceptance",
        "EAGLE: acceptance",
        "How many drafted tokens the target model accepts: over time, by position, context length, batch "
        "size and "
        "replica, and what is verified in vain.",
        [
            row("Now", _acceptance_now()),
            row("Over time", _acceptance_over_time()),
            row("Where it is lost", _acceptance_by()),
        ],
    )


def _acceptance_now() -> list[Placed]:
    return [
        _accept_length_stat(6),
        stat_panel(
            "Acceptance rate",
            "Which share of the drafted tokens is accepted? (eagle_accepted_tokens_total / eagle_draft_tokens_total)",
            [Query(q.acceptance_rate(), instant=True)],
            unit="percentunit",
            width=6,
            decimals=1,
            thresholds=((None, ACCEPT_COLOUR),),
        ),
        stat_panel(
            "Verified in vain",
            "How much of the verify work is thrown away? Rejected nodes and rows of finished requests, "
            "over all verified "
            "nodes. Some waste is the price of speculation; with trees it is most of the nodes. "
            "(eagle_draft_tokens_total, eagle_accepted_tokens_total, eagle_wasted_rows_total)",
            [Query(f"1 - ({q.used_share()})", instant=True)],
            unit="percentunit",
            width=6,
            decimals=1,
        ),
        _output_stat(6),
    ]


def _acceptance_over_time() -> list[Placed]:
    return [
        timeseries_panel(
            "Accept length by server",
            "Has acceptance collapsed, where and since when? Tokens per draft, the bonus token included; "
            "EagleAcceptanceCollapsed fires under the line. (eagle_accepted_tokens_total, "
            "eagle_drafts_total)",
            [Query(q.tokens_per_draft(q.SERVERS), "{{server}}")],
            unit="short",
            width=8,
            height=9,
            fill=0,
            decimals=2,
            minimum=1,
            axis_label="tokens per cycle",
            lines=((None, "transparent"), (rules.SHIPPED.acceptance_collapsed, BAD)),
        ),
        heatmap_panel(
            "Accept length distribution",
            "Is acceptance all or nothing? How many drafts gave how many tokens, the bonus token included. "
            "(eagle_accept_length_tokens)",
            [Query(q.buckets("eagle_accept_length_tokens"), "{{le}}")],
            unit="short",
            width=8,
            height=9,
            scheme="Greens",
        ),
        timeseries_panel(
            "Acceptance by position",
            "At which step does the draft go wrong? Share of drafts whose token at this position was "
            "accepted "
            "(unconditional, so it falls from step to step). For trees a lower bound. "
            "(eagle_accepted_tokens_per_pos_total / eagle_offered_tokens_per_pos_total)",
            [Query(q.shared("acceptance_at", ()), "position {{position}}")],
            unit="percentunit",
            width=8,
            height=9,
            fill=0,
            minimum=0,
            maximum=1,
        ),
        timeseries_panel(
            "By replica",
            "Does one replica accept less than the others? Accept length by data-parallel rank; replicas "
            "of one server serve "
            "the same traffic and should agree. Legend: server, then replica; a server without data "
            "parallelism is one line. (eagle_accepted_tokens_total)",
            [Query(q.tokens_per_draft(("server", "dp_rank")), "{{server}} {{dp_rank}}")],
            unit="short",
            width=8,
            fill=0,
            decimals=2,
            minimum=1,
            axis_label="tokens per cycle",
        ),
        timeseries_panel(
            "What verify works on",
            "How much of the verify work becomes tokens? Nodes that became tokens, rejected nodes, and "
            "rows of requests "
            "that had already finished; together 100 %. (eagle_draft_tokens_total, "
            "eagle_accepted_tokens_total, "
            "eagle_drafts_total, eagle_wasted_rows_total)",
            [
                Query(q.used_share(), "became tokens"),
                Query(q.rejected_share(), "rejected"),
                Query(q.finished_share(), "finished rows"),
            ],
            unit="percentunit",
            width=8,
            stacked=True,
            minimum=0,
            maximum=1,
            overrides=[
                ("became tokens", {"color": fixed(ACCEPT_COLOUR)}),
                ("rejected", {"color": fixed("#9FA7B3")}),
                ("finished rows", {"color": fixed(BAD)}),
            ],
        ),
        timeseries_panel(
            "Step count in force",
            "Does the adaptive controller change the number of steps? Draft steps by server; a flat line "
            "where it is fixed. "
            "(eagle_spec_num_steps)",
            [Query(q.gauge("eagle_spec_num_steps", "max", q.SERVERS), "{{server}}")],
            unit="short",
            width=8,
            fill=0,
            decimals=0,
            minimum=0,
            overrides=[("/.*/", {"custom.lineInterpolation": "stepAfter"})],
            no_value="No live rank",
        ),
    ]


def _acceptance_by() -> list[Placed]:
    return [
        bar_gauge_panel(
            "By context length",
            "Does the draft head fail on long contexts? Accept length by length of prompt and output so "
            "far; a head trained "
            "on 2k tokens falls to 1 beyond. (eagle_context_accepted_tokens_total / "
            "eagle_context_drafts_total)",
            [Query(q.context_length(value), value, instant=True) for value in catalogue.CONTEXT_LENGTHS],
            unit="short",
            width=8,
            height=10,
            decimals=2,
            colour=ACCEPT_COLOUR,
        ),
        bar_gauge_panel(
            "Traffic by context length",
            "How much traffic is behind each of those? Share of the drafts. (eagle_context_drafts_total)",
            [Query(q.context_share(value), value, instant=True) for value in catalogue.CONTEXT_LENGTHS],
            unit="percentunit",
            width=8,
            height=10,
            maximum=1,
            decimals=0,
        ),
        bar_gauge_panel(
            "By batch size",
            "Does acceptance depend on the load? Accept length by batch size; it should not, unless other "
            "requests come with "
            "other load. (eagle_batch_accepted_tokens_total / eagle_batch_drafts_total)",
            [Query(q.batch_tokens_per_draft(value), value, instant=True) for value in catalogue.BATCH_SIZES],
            unit="short",
            width=8,
            height=10,
            decimals=2,
            colour=ACCEPT_COLOUR,
        ),
    ]


# --- 4: the fleet -------------------------------------------------------------------------------------------

_FLEET_COLUMNS = {
    "server": "Server",
    "Value #A": "Alerts",
    "Value #B": "Ranks down",
    "Value #C": "Speed-up",
    "Value #D": "Verify share",
    "Value #E": "Accept length",
    "Value #F": "tok/s",
    "Value #G": "Cycle p99",
    "Value #H": "Running",
    "Value #I": "Last cycle",
    "model_name": "Model",
    "engine_type": "Engine",
    "config_id": "Config",
    "hook_family": "Hooks",
    "sglang_version": "SGLang",
}
CYCLE_LINK = (
    "/d/eagle-cycle/eagle-cycle?var-server=${__value.raw:percentencode}&${datasource:queryparam}&${__url_time_range}"
)


def fleet_dashboard() -> Any:
    """Return all servers at a glance, the worst first."""
    return _dashboard(
        "eagle-fleet",
        "EAGLE: fleet",
        "Every server, the worst first; the server's name opens its cycle.",
        [
            row("Now", _fleet_now()),
            row("Servers", _fleet_servers()),
            row("Exporters and hooks", _exporter_health()),
        ],
        own_variables=("tensor_parallel_rank",),
    )


def _fleet_now() -> list[Placed]:
    servers = q.gauge("eagle_rank_up", "max", q.SERVERS)
    target = promql.matchers(q.TARGET)
    return [
        stat_panel(
            "Servers up",
            "How many servers are measured? Those with at least one live rank. (eagle_rank_up)",
            [Query(f"count (({servers}) == 1)", instant=True)],
            unit="short",
            width=4,
            no_value=NO_EXPORTER,
        ),
        _ranks_down_stat(4),
        stat_panel(
            "Exporters down",
            "Is a node not watched at all? Scrape targets of the job that do not answer. (up)",
            [Query(f"count (up{target} == 0) or 0 * count (up{target})", instant=True)],
            unit="short",
            width=4,
            decimals=0,
            thresholds=((None, GOOD), (1, BAD)),
            no_value=NO_EXPORTER,
        ),
        _alerts_stat(4),
        _output_stat(4),
        stat_panel(
            "Running requests in the fleet",
            "How much is going on? Requests in the running batches of all servers. (eagle_running_requests)",
            [Query(q.running_requests(), instant=True)],
            unit="short",
            width=4,
            decimals=0,
            no_value="No live rank",
        ),
    ]


def _fleet_servers() -> list[Placed]:
    versions = ("server", "model_name", "engine_type", "config_id", "hook_family", "sglang_version")
    last = q.gauge("eagle_last_cycle_timestamp_seconds", "max", q.SERVERS)
    figures = [
        q.alerts_by_server(),
        q.ranks_down(q.SERVERS),
        q.overall_speedup(q.SERVERS),
        q.shared("verify_share", q.SERVERS),
        q.tokens_per_draft(q.SERVERS),
        q.shared("output_tokens_per_second", q.SERVERS),
        q.quantile(0.99, "eagle_cycle_duration_seconds", q.SERVERS),
        q.running_requests(q.SERVERS),
        f"time() - {last}",
        q.info("eagle_spec_config_info", versions),
    ]
    return [
        table_panel(
            "Servers",
            "Which server needs me first? Sorted by alerts, then by ranks that ended, then by the lowest "
            "speed-up; the name "
            "opens the server's cycle. Verify share compares only between servers with the same hooks. A "
            "server without "
            "traffic keeps its line. (eagle_rank_up, eagle_batch_*, eagle_accepted_tokens_total, "
            "eagle_output_tokens_total, "
            "eagle_cycle_duration_seconds, eagle_spec_config_info, ALERTS)",
            [Query(expr, instant=True, table=True) for expr in figures],
            columns=_FLEET_COLUMNS,
            height=10,
            sort_by=[("Alerts", True), ("Ranks down", True), ("Speed-up", False)],
            overrides=[
                ("Server", {"links": [{"title": "Cycle of this server", "url": CYCLE_LINK}]}),
                ("Alerts", {"decimals": 0, **coloured_cell((None, "transparent"), (1, BAD))}),
                ("Ranks down", {"decimals": 0, **coloured_cell((None, "transparent"), (1, BAD))}),
                (
                    "Speed-up",
                    {
                        "decimals": 2,
                        **coloured_cell((None, BAD), (rules.SHIPPED.speedup, WARNING), (1.02, GOOD), text=True),
                    },
                ),
                ("Verify share", {"unit": "percentunit", "decimals": 1}),
                (
                    "Accept length",
                    {
                        "decimals": 2,
                        **coloured_cell((None, BAD), (rules.SHIPPED.acceptance_collapsed, "#CCCCDC"), text=True),
                    },
                ),
                ("tok/s", {"decimals": 0}),
                ("Cycle p99", {"unit": "s", "decimals": 1}),
                ("Running", {"decimals": 0}),
                ("Last cycle", {"unit": "s", "decimals": 0}),
            ],
            no_value=NO_EXPORTER,
        ),
        table_panel(
            "Firing alerts",
            "What do the alerts say? Each firing Eagle alert; its runbook is linked in the alert itself. "
            "Empty also where "
            "the alert rules are not loaded. (ALERTS)",
            [Query(f"count by (severity, alertname, server, instance) ({q.FIRING})", instant=True, table=True)],
            columns={
                "severity": "Severity",
                "alertname": "Alert",
                "server": "Server",
                "instance": "Exporter",
                "Value": "How many",
            },
            height=6,
            sort_by=[("Severity", False), ("Alert", False)],
            overrides=[("Severity", _SEVERITY_COLOURS)],
            no_value="No alert fires",
        ),
        timeseries_panel(
            "Verify share by server",
            "Which server changed? Verify over cycle, all batch sizes pooled. (eagle_batch_phase_seconds_total)",
            [Query(q.shared("verify_share", q.SERVERS), "{{server}}")],
            unit="percentunit",
            width=8,
            fill=0,
            maximum=1,
        ),
        timeseries_panel(
            "Accept length by server",
            "Which server's draft model got worse? (eagle_accepted_tokens_total, eagle_drafts_total)",
            [Query(q.tokens_per_draft(q.SERVERS), "{{server}}")],
            unit="short",
            width=8,
            fill=0,
            decimals=2,
            minimum=1,
            axis_label="tokens per cycle",
        ),
        timeseries_panel(
            "Output by server",
            "Where is the traffic? Tokens appended to requests per second. (eagle_output_tokens_total)",
            [Query(q.shared("output_tokens_per_second", q.SERVERS), "{{server}}")],
            unit="short",
            width=8,
            stacked=True,
            minimum=0,
            axis_label="tok/s",
        ),
    ]


def _exporter_health() -> list[Placed]:
    target = promql.matchers(q.TARGET)
    rank = promql.matchers(q.RANK)
    hook_seconds = f"sum by (server) ({q.rate('eagle_hook_host_seconds_total', selector=q.RANK)})"
    cycles = f"sum by (server) ({q.rate('eagle_cycles_total', selector=q.RANK)})"
    states = q.name("eagle_timing_enabled")
    versions = "max by (instance, node, version, catalogue_version)"
    return [
        timeseries_panel(
            "Scrape duration",
            "Does a scrape take long? Time to read the registry; Prometheus gives up after its scrape "
            "timeout. "
            "(eagle_scrape_collector_duration_seconds)",
            [
                Query(
                    f"max by (instance) ({q.name('eagle_scrape_collector_duration_seconds')}{target})",
                    "{{instance}}",
                )
            ],
            unit="s",
            width=6,
            fill=0,
            minimum=0,
            no_value=NO_EXPORTER,
        ),
        timeseries_panel(
            "Cost of the hooks",
            "What does measuring cost SGLang? Scheduler-thread time inside the exporter's hooks, per cycle. "
            "(eagle_hook_host_seconds_total / eagle_cycles_total)",
            [Query(q.ratio(hook_seconds, cycles), "{{server}}")],
            unit="s",
            width=6,
            fill=0,
            minimum=0,
        ),
        timeseries_panel(
            "Cycles not recorded",
            "Is something lost? Cycles whose time was dropped, and cycles left out of every other series, "
            "per second. "
            "(eagle_cycles_dropped_total, eagle_cycles_excluded_total)",
            [
                Query(
                    f"sum by (reason) ({q.rate('eagle_cycles_dropped_total', selector=q.RANK)}) > 0",
                    "dropped: {{reason}}",
                ),
                Query(
                    f"sum by (reason) ({q.rate('eagle_cycles_excluded_total', selector=q.RANK)}) > 0",
                    "excluded: {{reason}}",
                ),
            ],
            unit="cps",
            width=6,
            fill=0,
            minimum=0,
            no_value="Nothing is lost or left out",
        ),
        timeseries_panel(
            "Errors of the hooks",
            "Does our own code fail inside SGLang? Exceptions per second, all caught. (eagle_hook_errors_total)",
            [Query(f"sum by (server) ({q.rate('eagle_hook_errors_total', selector=q.RANK)})", "{{server}}")],
            unit="cps",
            width=6,
            fill=0,
            minimum=0,
        ),
        table_panel(
            "Hooks that are down",
            "What is not measured, and on which ranks? Hooks that could not be attached; their series are "
            "missing, not 0. "
            "eagle-exporter doctor shows why. (eagle_hook_up)",
            [
                Query(
                    f"count by (server, hook) ({q.name('eagle_hook_up')}{rank} == 0)",
                    instant=True,
                    table=True,
                )
            ],
            columns={"server": "Server", "hook": "Hook", "Value": "Ranks"},
            width=8,
            height=7,
            no_value="All hooks are up",
        ),
        table_panel(
            "State of the timing",
            "Is a server timed at the moment? on is normal; fuse_cost and fuse_errors are the exporter's "
            "own safety switch. "
            "(eagle_timing_enabled)",
            [Query(f"count by (server, reason) ({states}{rank} == 1)", instant=True, table=True)],
            columns={"server": "Server", "reason": "State", "Value": "Ranks"},
            width=8,
            height=7,
            overrides=[("State", _STATE_COLOURS)],
            no_value="No live rank",
        ),
        table_panel(
            "Exporters",
            "Which versions run, and is a registry file unreadable? (eagle_exporter_build_info, "
            "eagle_registry_files_skipped, eagle_scrape_collector_success)",
            [
                Query(expr, instant=True, table=True)
                for expr in (
                    f"{versions} ({q.name('eagle_exporter_build_info')}{target})",
                    f"sum by (instance, node) ({q.name('eagle_registry_files_skipped')}{target})",
                    f"min by (instance, node) ({q.name('eagle_scrape_collector_success')}{target})",
                )
            ],
            columns={
                "instance": "Exporter",
                "node": "Node",
                "version": "Version",
                "catalogue_version": "Catalogue",
                "Value #B": "Files skipped",
                "Value #C": "Last read worked",
            },
            width=8,
            height=7,
            overrides=[
                ("Files skipped", {"decimals": 0, **coloured_cell((None, "transparent"), (1, WARNING))}),
                (
                    "Last read worked",
                    {"unit": "bool_yes_no", **coloured_cell((None, BAD), (1, "transparent"))},
                ),
            ],
            no_value=NO_EXPORTER,
        ),
    ]


_SEVERITY_COLOURS = {
    "custom.cellOptions": {"type": "color-text"},
    "mappings": [
        {
            "type": "value",
            "options": {
                "critical": {"color": BAD},
                "warning": {"color": WARNING},
                "info": {"color": NEUTRAL},
            },
        }
    ],
}
_STATE_COLOURS = {
    "custom.cellOptions": {"type": "color-text"},
    "mappings": [
        {
            "type": "value",
            "options": {
                "on": {"color": GOOD},
                "off": {"color": WARNING},
                "fuse_cost": {"color": BAD},
                "fuse_errors": {"color": BAD},
                "hooks_down": {"color": BAD},
            },
        }
    ],
}


DASHBOARDS: dict[str, Callable[[], Any]] = {
    "eagle-cycle.json": cycle_dashboard,
    "eagle-payoff.json": payoff_dashboard,
    "eagle-acceptance.json": acceptance_dashboard,
    "eagle-fleet.json": fleet_dashboard,
}
"""File name -> what builds it."""


def render(built: Any) -> str:
    """Return a dashboard as the text of its file."""
    document: dict[str, Any] = json.loads(json.dumps(built, cls=JSONEncoder))
    # An id is a row in one Grafana's database; with null both import and provisioning make their own.
    document["id"] = None
    for one, known in zip(document["annotations"]["list"], marks(), strict=True):
        # The Prometheus data source reads these; the SDK does not know them.
        one |= {"titleFormat": known.title, "textFormat": known.text, "step": "15s"}
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the dashboards, or with ``--check`` compare them.

    Returns:
        0; 1 when ``--check`` finds a difference.

    """
    parser = argparse.ArgumentParser(description="Build the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not up to date")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"directory (default: {OUTPUT})")
    chosen = parser.parse_args(arguments)
    stale = []
    for file_name, build in DASHBOARDS.items():
        path = chosen.output / file_name
        text = render(build())
        if chosen.check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(file_name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    extra = {path.name for path in chosen.output.glob("*.json")} - set(DASHBOARDS)
    for file_name in sorted({*stale, *(extra if chosen.check else ())}):
        print(f"not up to date: {chosen.output / file_name}; run python grafana/build.py", file=sys.stderr)
    return 1 if chosen.check and (stale or extra) else 0


if __name__ == "__main__":
    sys.exit(main())
