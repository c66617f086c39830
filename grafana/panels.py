"""The visual language of the dashboards: colours, units, and one function per kind of panel.

A phase has the same colour in every panel of every dashboard. A panel that needs traffic says ``No traffic``
where there is none, and every panel asks a question in its description.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import (
    barchart,
    bargauge,
    common,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as dashboard_builders
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

NO_TRAFFIC = "No traffic"

PHASE_COLOURS = {
    "target_verify": "#5794F2",
    "draft_steps": "#FF9830",
    "draft_extend": "#FADE2A",
    "verify_overhead": "#B877D9",
    "kv_cache": "#73BF69",
    "other": "#9FA7B3",
}
"""In the order they are stacked: the large and steady one at the bottom, so that the others can be read."""

KERNEL_COLOURS = {
    "allreduce_nccl": "#F2495C",
    "allreduce_custom": "#FF9830",
    "collective": "#FFCB7D",
    "attention": "#B877D9",
    "gemm": "#5794F2",
    "moe": "#37C6B4",
    "norm": "#73BF69",
    "sampling": "#FADE2A",
    "kv": "#8AB8FF",
    "memcpy": "#C8F2C2",
    "other": "#9FA7B3",
}
"""Communication is warm, computing cold."""

IDLE = "idle"
IDLE_COLOUR = "#3D4149"
GAP_COLOUR = "#FF7383"
GOOD, WARNING, BAD, NEUTRAL = "#73BF69", "#FF9830", "#F2495C", "#8AB8FF"
ACCEPT_COLOUR = "#37C6B4"

DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS = 24

Override = tuple[str, Mapping[str, Any]]
"""A field name (a regular expression when it begins and ends with a slash) and the properties it gets."""


@dataclass(frozen=True)
class Query:
    """One target of a panel.

    Attributes:
        expr: PromQL.
        legend: Grafana's legend format.
        instant: Evaluate once, at the end of the time range, instead of over the range.
        table: Deliver one row per series, with the labels as columns.

    """

    expr: str
    legend: str = ""
    instant: bool = False
    table: bool = False


@dataclass
class Placed:
    """A panel and the size it takes on the grid of 24 columns."""

    panel: Any
    width: int
    height: int


def timeseries_panel(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    width: int,
    height: int = 8,
    stacked: bool = False,
    fill: int = 8,
    minimum: float | None = None,
    maximum: float | None = None,
    soft_maximum: float | None = None,
    decimals: float | None = None,
    lines: Sequence[tuple[float | None, str]] = (),
    overrides: Sequence[Override] = (),
    axis_label: str = "",
    no_value: str = NO_TRAFFIC,
    legend_values: Sequence[str] = ("lastNotNull",),
    bars: bool = False,
) -> Placed:
    """Lines over time; `stacked` makes areas on top of each other, `lines` draws thresholds.

    `bars` are for what happens now and then: a line would show a moment that nothing was measured at.
    """
    builder = timeseries.Panel()
    builder.line_width(0 if stacked else 2)
    builder.fill_opacity(85 if stacked else fill)
    builder.show_points(common_models.VisibilityMode.NEVER)
    if bars:
        builder.draw_style(common_models.GraphDrawStyle.BARS)
    # A scrape that failed must not look like a server that stopped; longer holes stay holes.
    builder.span_nulls(120_000.0)
    builder.tooltip(
        common.VizTooltipOptions()
        .mode(common_models.TooltipDisplayMode.MULTI)
        .sort(common_models.SortOrder.NONE if stacked else common_models.SortOrder.DESCENDING)
    )
    builder.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.TABLE)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(list(legend_values))
    )
    if stacked:
        builder.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if axis_label:
        builder.axis_label(axis_label)
    if soft_maximum is not None:
        builder.axis_soft_max(soft_maximum)
    if lines:
        steps = [dashboard.Threshold(value=value, color=colour) for value, colour in lines]
        builder.thresholds(dashboard_builders.ThresholdsConfig().mode(_ABSOLUTE).steps(steps))
        builder.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        )
    builder.color_scheme(dashboard_builders.FieldColor().mode(dashboard.FieldColorModeId.PALETTE_CLASSIC))
    _limits(builder, minimum, maximum, decimals)
    return _finish(builder, _Common(title, description, queries, unit, width, height, no_value, overrides))


def stat_panel(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    width: int = 3,
    height: int = 4,
    decimals: float | None = None,
    thresholds: Sequence[tuple[float | None, str]] = ((None, NEUTRAL),),
    background: bool = False,
    mappings: Sequence[Any] = (),
    name_and_value: bool = False,
    no_value: str = NO_TRAFFIC,
) -> Placed:
    """One large number, of now: over a range it would go on showing the last value before traffic ended."""
    builder = stat.Panel()
    builder.graph_mode(common_models.BigValueGraphMode.NONE)
    builder.color_mode(
        common_models.BigValueColorMode.BACKGROUND_SOLID if background else common_models.BigValueColorMode.VALUE
    )
    builder.text_mode(
        common_models.BigValueTextMode.VALUE_AND_NAME if name_and_value else common_models.BigValueTextMode.VALUE
    )
    builder.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
    builder.color_scheme(dashboard_builders.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
    steps = [dashboard.Threshold(value=value, color=colour) for value, colour in thresholds]
    builder.thresholds(dashboard_builders.ThresholdsConfig().mode(_ABSOLUTE).steps(steps))
    _limits(builder, None, None, decimals)
    return _finish(builder, _Common(title, description, queries, unit, width, height, no_value, (), mappings))


def bar_gauge_panel(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    width: int,
    height: int = 8,
    minimum: float | None = 0,
    maximum: float | None = None,
    decimals: float | None = None,
    colour: str = NEUTRAL,
    overrides: Sequence[Override] = (),
    no_value: str = NO_TRAFFIC,
) -> Placed:
    """Horizontal bars in the order of the queries: what has an order of its own is not sorted by name."""
    builder = bargauge.Panel()
    builder.display_mode(common_models.BarGaugeDisplayMode.BASIC)
    builder.orientation(common_models.VizOrientation.HORIZONTAL)
    builder.value_mode(common_models.BarGaugeValueMode.TEXT)
    builder.name_placement(common_models.BarGaugeNamePlacement.LEFT)
    builder.show_unfilled(True)
    builder.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
    builder.color_scheme(dashboard_builders.FieldColor().mode(dashboard.FieldColorModeId.FIXED).fixed_color(colour))
    _limits(builder, minimum, maximum, decimals)
    return _finish(builder, _Common(title, description, queries, unit, width, height, no_value, overrides))


def bar_chart_panel(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    width: int,
    height: int,
    x_field: str,
    transformations: Sequence[Any],
    stacked: bool = False,
    decimals: float | None = None,
    maximum: float | None = None,
    overrides: Sequence[Override] = (),
    no_value: str = NO_TRAFFIC,
) -> Placed:
    """Horizontal bars made from a table; `stacked` puts the columns of a row behind each other."""
    builder = barchart.Panel()
    builder.orientation(common_models.VizOrientation.HORIZONTAL)
    builder.x_field(x_field)
    mode = common_models.StackingMode
    builder.stacking(mode.NORMAL if stacked else mode.NONE)
    builder.show_value(common_models.VisibilityMode.AUTO)
    builder.bar_width(0.95)
    builder.group_width(0.75)
    builder.fill_opacity(90)
    builder.line_width(0)
    builder.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.TABLE if stacked else common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull"] if stacked else [])
    )
    builder.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    builder.color_scheme(dashboard_builders.FieldColor().mode(dashboard.FieldColorModeId.PALETTE_CLASSIC))
    builder.transformations(list(transformations))
    _limits(builder, 0, maximum, decimals)
    return _finish(builder, _Common(title, description, queries, unit, width, height, no_value, overrides))


def heatmap_panel(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    width: int,
    height: int = 8,
    scheme: str = "Blues",
    no_value: str = NO_TRAFFIC,
) -> Placed:
    """Buckets of a histogram over time."""
    builder = heatmap.Panel()
    builder.calculate(False)
    builder.color(
        heatmap.HeatmapColorOptions()
        .mode(heatmap_models.HeatmapColorMode.SCHEME)
        .scheme(scheme)
        .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
        .fill(NEUTRAL)
    )
    builder.y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(common_models.AxisPlacement.LEFT).reverse(False))
    builder.rows_frame(heatmap.RowsHeatmapOptions().layout(common_models.HeatmapCellLayout.AUTO))
    builder.cell_values(heatmap.CellValues().unit("short"))
    builder.filter_values(heatmap.FilterValueRange().le(1e-9))
    builder.cell_gap(1)
    builder.show_color_scale(True)
    builder.hide_from(common.HideSeriesConfig().legend(False).tooltip(False).viz(False))
    return _finish(builder, _Common(title, description, queries, unit, width, height, no_value))


def table_panel(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    columns: Mapping[str, str],
    width: int = COLUMNS,
    height: int = 8,
    unit: str = "short",
    sort_by: Sequence[tuple[str, bool]] = (),
    overrides: Sequence[Override] = (),
    no_value: str = NO_TRAFFIC,
) -> Placed:
    """Rows of series, one column per label and query.

    Args:
        title: See `timeseries_panel`.
        description: See `timeseries_panel`.
        queries: Instant queries in table format; the value of query A is the field ``Value #A``.
        columns: Field name -> heading, in order; every other field is hidden.
        width: Grid columns.
        height: Grid rows.
        unit: Unit of fields without an override.
        sort_by: (heading, descending) of the columns the table is sorted by at first.
        overrides: By heading.
        no_value: Shown when there is no row.

    """
    builder = table.Panel()
    builder.show_header(True)
    builder.cell_height(common_models.TableCellHeight.SM)
    builder.align(common_models.FieldTextAlignment.AUTO).inspect(False)
    builder.sort_by(
        [common.TableSortByFieldState().display_name(name).desc(descending) for name, descending in sort_by]
    )
    names = list(columns)
    if len(queries) > 1:
        builder.with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
    # organize shows every field that it does not know: the filter keeps labels of a new version out.
    builder.with_transformation(
        dashboard.DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": names}})
    )
    builder.with_transformation(
        dashboard.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {},
                "indexByName": {name: index for index, name in enumerate(names)},
                "renameByName": dict(columns),
            },
        )
    )
    return _finish(builder, _Common(title, description, queries, unit, width, height, no_value, overrides))


def phase_overrides() -> list[Override]:
    """Return the colour of every phase."""
    return [(phase, {"color": fixed(colour)}) for phase, colour in PHASE_COLOURS.items()]


def kernel_overrides() -> list[Override]:
    """Return the colour of every kernel class, and of the time in which no kernel runs."""
    colours = {**KERNEL_COLOURS, IDLE: IDLE_COLOUR}
    return [(name, {"color": fixed(colour)}) for name, colour in colours.items()]


def fixed(colour: str) -> dict[str, str]:
    """Return the colour property of one fixed colour."""
    return {"mode": "fixed", "fixedColor": colour}


def thresholds(*steps: tuple[float | None, str]) -> dict[str, Any]:
    """Return the thresholds property for an override."""
    return {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in steps]}


def coloured_cell(*steps: tuple[float | None, str], text: bool = False) -> dict[str, Any]:
    """Return override properties that colour a table cell by thresholds."""
    return {
        "custom.cellOptions": {"type": "color-text"} if text else {"type": "color-background", "mode": "basic"},
        "thresholds": thresholds(*steps),
        "color": {"mode": "thresholds"},
    }


def value_text(value: float, text: str, colour: str | None = None) -> Any:
    """Return a mapping that shows `text` for one value."""
    result = dashboard.ValueMappingResult(text=text, color=colour)
    return dashboard.ValueMap(options={f"{value:g}": result})


def no_traffic_mapping() -> Any:
    """Return the mapping of NaN and null; the queries avoid them, other versions of Prometheus may not."""
    return dashboard.SpecialValueMap(
        options=dashboard.DashboardSpecialValueMapOptions(
            match=dashboard.SpecialValueMatch.NULL_AND_NAN,
            result=dashboard.ValueMappingResult(text=NO_TRAFFIC),
        )
    )


_ABSOLUTE = dashboard.ThresholdsMode.ABSOLUTE


def _limits(builder: Any, minimum: float | None, maximum: float | None, decimals: float | None) -> None:
    if minimum is not None:
        builder.min(minimum)
    if maximum is not None:
        builder.max(maximum)
    if decimals is not None:
        builder.decimals(decimals)


@dataclass(frozen=True)
class _Common:
    """What every panel has."""

    title: str
    description: str
    queries: Sequence[Query]
    unit: str
    width: int
    height: int
    no_value: str
    overrides: Sequence[Override] = ()
    mappings: Sequence[Any] = ()


def _finish(builder: Any, common_part: _Common) -> Placed:
    part = common_part
    builder.title(part.title).description(part.description).datasource(DATASOURCE)
    builder.unit(part.unit).no_value(part.no_value)
    builder.mappings([no_traffic_mapping(), *part.mappings])
    is_heatmap = isinstance(builder, heatmap.Panel)
    for index, query in enumerate(part.queries):
        target = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + index)).datasource(DATASOURCE)
        target.legend_format(query.legend or "__auto")
        target.editor_mode(prometheus_models.QueryEditorMode.CODE)
        if query.instant:
            target.instant()
        else:
            target.range()
        formats = prometheus_models.PromQueryFormat
        target.format(formats.HEATMAP if is_heatmap else formats.TABLE if query.table else formats.TIME_SERIES)
        builder.with_target(target)
    for name, properties in part.overrides:
        values = [dashboard.DynamicConfigValue(id_val=key, value=value) for key, value in properties.items()]
        if name.startswith("/") and name.endswith("/"):
            builder.override_by_regexp(name, values)
        else:
            builder.override_by_name(name, values)
    return Placed(builder.build(), part.width, part.height)
