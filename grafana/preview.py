"""Draws a dashboard from a real Prometheus into a PNG, laid out as Grafana would: for developers and README.

It is a preview, not a screenshot of Grafana: panels are drawn by matplotlib from the same JSON and the same
answers of Prometheus, and only as far as these dashboards go.

    python grafana/preview.py grafana/dashboards/eagle-cycle.json --prometheus http://127.0.0.1:9090 \
        --from 1h --var server=node-a:30000 --output cycle.png
"""

from __future__ import annotations

import argparse
import datetime
import math
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:  # run from a checkout, installed or not
    sys.path.insert(0, str(HERE.parent))

import matplotlib as mpl  # noqa: E402

mpl.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import LinearSegmentedColormap, PowerNorm  # noqa: E402
from matplotlib.patches import FancyBboxPatch, Rectangle  # noqa: E402

from grafana import client  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from grafana.client import Document, Series

PAGE, PANEL, BORDER, GRID = "#111217", "#181B1F", "#2A2D33", "#2A2D33"
TEXT, DIM = "#CCCCDC", "#8E8E99"
Place = tuple[float, float, float, float]
"""Left, top, width and height in pixels."""

PALETTE = (
    "#7EB26D",
    "#EAB839",
    "#6ED0E0",
    "#EF843C",
    "#E24D42",
    "#1F78C1",
    "#BA43A9",
    "#705DA0",
    "#508642",
    "#CCA300",
)
COLUMN, ROW, MARGIN, HEADER = 70, 38, 8, 64
"""Pixels: width of a grid column, height of a grid row, space between panels, and the head of the page."""

NOTE = "preview drawn by grafana/preview.py, not a Grafana screenshot"
_CALCS = {"lastNotNull": "Last", "mean": "Mean", "max": "Max", "min": "Min"}
_SCALES: dict[str, Sequence[tuple[float, float, str]]] = {
    "s": ((3600, 3600, " h"), (60, 60, " min"), (1, 1, " s"), (1e-3, 1e-3, " ms"), (0, 1e-6, " µs")),
    "short": ((1e9, 1e9, " B"), (1e6, 1e6, " M"), (1e4, 1e3, " K"), (0, 1, "")),
    "cps": ((1e3, 1e3, "K c/s"), (0, 1, " c/s")),
    "hertz": ((1e9, 1e9, " GHz"), (1e6, 1e6, " MHz"), (0, 1, " Hz")),
    "watt": ((1e3, 1e3, " kW"), (0, 1, " W")),
    "celsius": ((0, 1, " °C"),),
    "percentunit": ((0, 0.01, "%"),),
}


def format_value(value: float, unit: str, decimals: float | None = None) -> str:
    """Return a number with its unit, scaled as Grafana does."""
    if not math.isfinite(value):
        return "No traffic"
    if unit == "bool_yes_no":
        return "Yes" if value else "No"
    size = abs(value)
    if size == 0:
        return "0%" if unit == "percentunit" else "0"
    scales = _SCALES.get(unit, _SCALES["short"])
    _, divisor, suffix = next(scale for scale in scales if size >= scale[0])
    scaled = value / divisor
    if decimals is None:
        digits = max(0, 2 - math.floor(math.log10(abs(scaled)))) if abs(scaled) < 1000 else 0
        text = f"{scaled:.{digits}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = f"{scaled:.{int(decimals)}f}"
    return text + suffix


class Style:
    """What the field configuration of a panel says about one field."""

    def __init__(self, panel: Document, name: str) -> None:
        """Collect the defaults and every override that matches `name`."""
        config = panel["fieldConfig"]
        defaults = config["defaults"]
        self.values: dict[str, Any] = {key: value for key, value in defaults.items() if key != "custom"}
        self.values |= {f"custom.{key}": value for key, value in (defaults.get("custom") or {}).items()}
        for override in config["overrides"]:
            matcher = override["matcher"]
            pattern = str(matcher["options"])
            regular = matcher["id"] == "byRegexp" and re.fullmatch(pattern.strip("/"), name)
            if pattern == name or regular:
                self.values |= {entry["id"]: entry["value"] for entry in override["properties"]}

    def get(self, key: str, default: Any = None) -> Any:
        """Return a property."""
        return self.values.get(key, default)

    def text(self, value: float | str) -> str:
        """Return a value as it is shown."""
        for mapping in self.get("mappings") or ():
            if mapping["type"] == "value" and not isinstance(value, str):
                shown = mapping["options"].get(f"{value:g}")
                if shown and shown.get("text"):
                    return str(shown["text"])
        if isinstance(value, str):
            return value
        return format_value(value, self.get("unit", "short"), self.get("decimals"))

    def threshold_colour(self, value: float) -> str:
        """Return the colour of the threshold that a value has reached."""
        for mapping in self.get("mappings") or ():
            if mapping["type"] == "value":
                shown = mapping["options"].get(f"{value:g}")
                if shown and shown.get("color"):
                    return str(shown["color"])
        colour = TEXT
        for step in (self.get("thresholds") or {}).get("steps") or ():
            if step["value"] is None or value >= step["value"]:
                colour = step["color"]
        return colour

    def colour(self, index: int) -> str:
        """Return the colour of series number `index`."""
        fixed = (self.get("color") or {}).get("fixedColor")
        return str(fixed or PALETTE[index % len(PALETTE)])


class Page:
    """One figure in pixels, its origin at the upper left."""

    def __init__(self, width: int, height: int) -> None:
        """Make an empty page."""
        self.width, self.height = width, height
        self.figure: Figure = plt.figure(figsize=(width / 100, height / 100), dpi=100, facecolor=PAGE)

    def text(self, x: float, y: float, text: str, *, size: float = 12, colour: str = TEXT, **more: Any) -> None:
        """Write text; `size` in pixels."""
        more = {"va": "center", "zorder": 4, **more}
        self.figure.text(x / self.width, 1 - y / self.height, text, fontsize=size * 0.72, color=colour, **more)

    def box(self, place: Place, colour: str, *, panel: bool = False) -> None:
        """Draw a rectangle; a panel lies below everything, has a border and round corners."""
        x, y, w, h = place
        corner = (x / self.width, 1 - (y + h) / self.height)
        size = w / self.width, h / self.height
        patch: Any
        if panel:
            style = f"round,pad=0,rounding_size={3 / self.width}"
            patch = FancyBboxPatch(corner, *size, boxstyle=style, mutation_aspect=self.width / self.height)
        else:
            patch = Rectangle(corner, *size)
        patch.set(facecolor=colour, edgecolor=BORDER if panel else colour, linewidth=0.8 if panel else 0)
        patch.set(transform=self.figure.transFigure, zorder=0 if panel else 3)
        self.figure.add_artist(patch)

    def axes(self, place: Place) -> Axes:
        """Return axes in Grafana's colours."""
        x, y, w, h = place
        axes: Axes = self.figure.add_axes((x / self.width, 1 - (y + h) / self.height, w / self.width, h / self.height))
        axes.set_facecolor(PANEL)
        axes.set_zorder(1)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(colors=DIM, labelsize=8, length=0, pad=4)
        return axes


def _fit(text: str, pixels: float, size: float) -> str:
    """Shorten a text to a width; DejaVu Sans takes about 0.6 of its size per character."""
    room = max(1, int(pixels / (size * 0.5)))
    return text if len(text) <= room else text[: max(1, room - 1)] + "…"


class Preview:
    """Draws the panels of one dashboard."""

    def __init__(self, document: Document, session: client.Session, *, open_rows: bool = False) -> None:
        """Prepare to draw `document`; `open_rows` opens the collapsed rows."""
        self.document, self.session, self.open_rows = document, session, open_rows
        self.page = Page(1, 1)
        self.drawn: list[str] = []

    def draw(self, output: Path, *, colours: int = 256) -> None:
        """Draw everything and write the PNG."""
        places = self._places()
        rows = max(y + panel["gridPos"]["h"] for y, panel in places)
        self.page = Page(24 * COLUMN + MARGIN, HEADER + rows * ROW + MARGIN)
        self._head()
        annotations = self._annotations()
        for grid_y, panel in places:
            place = panel["gridPos"]
            x, y = place["x"] * COLUMN + MARGIN, HEADER + grid_y * ROW
            w, h = place["w"] * COLUMN - MARGIN, place["h"] * ROW - MARGIN
            if panel["type"] == "row":
                closed = panel["collapsed"] and not self.open_rows
                title = re.sub(r":? *\$\w+", "", panel["title"])
                count = f"  ({len(panel['panels'])} panels)" if closed else ""
                self.page.text(
                    x + 4, y + h / 2, f"{'▸' if closed else '▾'}  {title}{count}", size=15, fontweight="bold"
                )
                continue
            self._panel(panel, (x, y, w, h), annotations)
        self._save(output, colours)

    def _save(self, output: Path, colours: int) -> None:
        from io import BytesIO

        from PIL import Image

        buffer = BytesIO()
        self.page.figure.savefig(buffer, format="png", facecolor=PAGE)
        plt.close(self.page.figure)
        image = Image.open(buffer).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
        output.parent.mkdir(parents=True, exist_ok=True)
        image.save(output, optimize=True)

    def _places(self) -> list[tuple[int, Document]]:
        """Return grid rows and panels, what follows an opened row moved down."""
        found: list[tuple[int, Document]] = []
        shift = 0
        for panel in self.document["panels"]:
            y = panel["gridPos"]["y"] + shift
            found.append((y, panel))
            inner = panel.get("panels") or ()
            if inner and self.open_rows:
                first = min(one["gridPos"]["y"] for one in inner)
                found += [(y + 1 + one["gridPos"]["y"] - first, one) for one in inner]
                shift += max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in inner) - first
        return found

    def _head(self) -> None:
        page = self.page
        page.text(MARGIN + 4, 20, self.document["title"], size=20, fontweight="bold")
        clock = [
            datetime.datetime.fromtimestamp(t, datetime.timezone.utc) for t in (self.session.start, self.session.end)
        ]
        page.text(
            page.width - MARGIN,
            20,
            f"{clock[0]:%Y-%m-%d %H:%M} to {clock[1]:%H:%M} UTC",
            size=13,
            colour=TEXT,
            ha="right",
        )
        x = MARGIN + 4.0
        for name, variable in client.variables(self.document).items():
            if variable["type"] != "query" or name == "hardware":
                continue
            values = self.session.chosen.get(name) or ["All"]
            label, shown = variable["label"], " + ".join(values)
            page.text(x, 47, label, size=12, colour="#6E9FFF")
            x += len(label) * 7.2 + 8
            page.text(x, 47, shown, size=12)
            x += len(shown) * 7.2 + 22
        page.text(page.width - MARGIN, 47, NOTE, size=12, colour=DIM, ha="right", style="italic")

    def _annotations(self) -> list[tuple[str, float]]:
        found = []
        for annotation in self.document["annotations"]["list"]:
            if not annotation["enable"]:
                continue
            expression = self.session.interpolate(self.document, annotation["expr"])
            for series in self.session.over_range(expression):
                starts = [t for t, _ in series.points]
                # One line where it begins; Grafana shades the rest.
                begins = [t for i, t in enumerate(starts) if i == 0 or t - starts[i - 1] > 1.5 * self.session.step]
                found += [(annotation["iconColor"], t) for t in begins if t > self.session.start]
        return found

    def _panel(self, panel: Document, place: Place, annotations: list[tuple[str, float]]) -> None:
        x, y, w, h = place
        self.page.box(place, PANEL, panel=True)
        self.page.text(x + 10, y + 16, _fit(panel["title"], w - 20, 14), size=14)
        results = {target["refId"]: self.session.run(self.document, target) for target in panel["targets"]}
        inside = (x + 10, y + 30, w - 20, h - 38)
        self.drawn.append(panel["title"])
        if not any(results.values()):
            self._nothing(panel, inside)
            return
        kind = panel["type"]
        if kind == "timeseries":
            self._timeseries(panel, results, annotations, inside)
        else:
            draw = {
                "stat": self._stat,
                "bargauge": self._bar_gauge,
                "barchart": self._bar_chart,
                "heatmap": self._heatmap,
                "table": self._table,
            }[kind]
            draw(panel, results, inside)

    def _nothing(self, panel: Document, place: Place) -> None:
        x, y, w, h = place
        text = panel["fieldConfig"]["defaults"].get("noValue") or "No data"
        size = 14 if len(text) > 20 else 20
        room = max(8, int(w / (size * 0.55)))
        words, lines = text.split(), [""]
        for word in words:
            if len(lines[-1]) + len(word) + 1 > room:
                lines.append("")
            lines[-1] = f"{lines[-1]} {word}".strip()
        self.page.text(x + w / 2, y + h / 2, "\n".join(lines), size=size, colour=DIM, ha="center")

    def _named(self, panel: Document, results: Mapping[str, list[Series]]) -> list[tuple[str, Series]]:
        targets = {target["refId"]: target for target in panel["targets"]}
        return [
            (client.legend(targets[ref_id], one.labels), one)
            for ref_id, series in results.items()
            for one in sorted(series, key=lambda one: sorted(one.labels.items()))
        ]

    # --- panels ---------------------------------------------------------------------------------------------

    def _timeseries(
        self,
        panel: Document,
        results: Mapping[str, list[Series]],
        annotations: list[tuple[str, float]],
        place: Place,
    ) -> None:
        x, y, w, h = place
        named = self._named(panel, results)
        lines_room = min(len(named), max(2, int((h - 110) / 17)))
        legend_height = 17 * lines_room + 20
        axes = self.page.axes((x + 58, y + 4, w - 64, h - legend_height - 26))
        styles = [Style(panel, name) for name, _ in named]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        stacked = any((style.get("custom.stacking") or {}).get("mode") == "normal" for style in styles)
        below: dict[float, float] = {}
        by_name = dict(named)
        for index, ((_, series), style) in enumerate(zip(named, styles, strict=True)):
            colour = style.colour(index)
            times = [t for t, _ in series.points]
            values = [v for _, v in series.points]
            if stacked:
                bottom = [below.get(t, 0.0) for t in times]
                top = [low + v for low, v in zip(bottom, values, strict=True)]
                if style.get("custom.drawStyle") == "bars":
                    axes.bar(times, values, self.session.step, bottom=bottom, color=colour, alpha=0.9)
                else:
                    axes.fill_between(times, bottom, top, color=colour, alpha=0.9, linewidth=0.3)
                below |= dict(zip(times, top, strict=True))
                continue
            times, values = _with_holes(times, values, 2.5 * self.session.step)
            dash = (style.get("custom.lineStyle") or {}).get("fill") == "dash"
            steps = "steps-post" if style.get("custom.lineInterpolation") == "stepAfter" else "default"
            axes.plot(
                times,
                values,
                color=colour,
                linewidth=style.get("custom.lineWidth", 1) * 0.8,
                linestyle=(0, (5, 4)) if dash else "-",
                drawstyle=steps,
            )
            other = by_name.get(style.get("custom.fillBelowTo") or "")
            if other is not None:
                lower = dict(other.points)
                shared = [(t, v, lower[t]) for t, v in series.points if t in lower]
                axes.fill_between(
                    [t for t, _, _ in shared],
                    [v for _, v, _ in shared],
                    [low for _, _, low in shared],
                    color=colour,
                    alpha=style.get("custom.fillOpacity", 10) / 100,
                    linewidth=0,
                )
            elif style.get("custom.fillOpacity"):
                floor = min(v for v in values if not math.isnan(v)) if style.get("min") is None else style.get("min")
                axes.fill_between(
                    times,
                    values,
                    floor,
                    color=colour,
                    alpha=style.get("custom.fillOpacity") / 100,
                    linewidth=0,
                )
        self._scale(axes, styles[0], stacked=stacked)
        for colour, moment in annotations:
            axes.axvline(moment, color=colour, linewidth=1, linestyle=(0, (4, 3)))
            axes.plot([moment], [axes.get_ylim()[0]], marker="^", color=colour, markersize=5, clip_on=False)
        low, high = axes.get_ylim()
        ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
        axes.set_yticks(ticks, [format_value(tick, unit, None) for tick in ticks])
        axes.set_xlim(self.session.start, self.session.end)
        self._time_axis(axes)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        label = styles[0].get("custom.axisLabel")
        if label:
            axes.set_ylabel(label, color=DIM, fontsize=8)
        self._legend(panel, named, styles, lines_room, (x, y + h - legend_height + 6, w, legend_height))

    def _scale(self, axes: Axes, style: Style, *, stacked: bool) -> None:
        low, high = axes.get_ylim()
        for step in (style.get("thresholds") or {}).get("steps") or ():
            if style.get("custom.thresholdsStyle") and step["value"] is not None:
                low, high = (
                    min(low, step["value"] - 0.02 * abs(step["value"])),
                    max(high, step["value"] * 1.02),
                )
                axes.axhline(step["value"], color=step["color"], linewidth=1.2, linestyle=(0, (6, 4)))
        if style.get("custom.axisSoftMax") is not None:
            high = max(high, style.get("custom.axisSoftMax"))
        if style.get("min") is not None:
            low = style.get("min")
        if style.get("max") is None:
            high += 0.05 * (high - low)
        else:
            high = style.get("max") + (0 if stacked else 0.02 * (style.get("max") - low))
        if high <= low:
            high = low + 1
        axes.set_ylim(low, high)

    def _time_axis(self, axes: Axes) -> None:
        start, end = self.session.start, self.session.end
        step = next(
            (s for s in (5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200) if (end - start) / s <= 7),
            14400,
        )
        first = math.ceil(start / step) * step
        ticks = [first + i * step for i in range(int((end - first) / step) + 1)]
        shape = "%H:%M:%S" if step < 60 else "%H:%M"
        axes.set_xticks(ticks, [f"{datetime.datetime.fromtimestamp(t, datetime.timezone.utc):{shape}}" for t in ticks])

    def _legend(
        self,
        panel: Document,
        named: Sequence[tuple[str, Series]],
        styles: Sequence[Style],
        room: int,
        place: Place,
    ) -> None:
        x, y, w, _ = place
        calcs = panel["options"]["legend"]["calcs"]
        unit, decimals = (
            panel["fieldConfig"]["defaults"]["unit"],
            panel["fieldConfig"]["defaults"].get("decimals"),
        )
        self.page.text(x + 6, y, "Name", size=11, colour="#6E9FFF")
        for column, calc in enumerate(reversed(calcs)):
            self.page.text(x + w - 6 - column * 84, y, _CALCS[calc], size=11, colour="#6E9FFF", ha="right")
        for index, (name, series) in enumerate(named[:room]):
            line = y + 17 * (index + 1)
            more = len(named) - room + 1
            if index == room - 1 and more > 1:
                self.page.text(x + 22, line, f"and {more} more", size=12, colour=DIM)
                break
            self.page.box((x + 6, line - 2, 12, 4), styles[index].colour(index))
            self.page.text(x + 24, line, _fit(name, w - 40 - 84 * len(calcs), 12), size=12)
            numbers = [v for _, v in series.points]
            reduced = {
                "lastNotNull": numbers[-1],
                "mean": sum(numbers) / len(numbers),
                "max": max(numbers),
                "min": min(numbers),
            }
            for column, calc in enumerate(reversed(calcs)):
                shown = format_value(reduced[calc], unit, decimals)
                self.page.text(x + w - 6 - column * 84, line, shown, size=12, ha="right")

    def _stat(self, panel: Document, results: Mapping[str, list[Series]], place: Place) -> None:
        x, y, w, h = place
        named = self._named(panel, results)
        width = w / len(named)
        by_name = panel["options"]["textMode"] == "value_and_name"
        for index, (name, series) in enumerate(named):
            style = Style(panel, name)
            text = style.text(series.value)
            size = min(h * 0.5, width / max(3, len(text)) * 1.45, 46)
            middle = x + width * (index + 0.5)
            colour = style.threshold_colour(series.value)
            if by_name:
                self.page.text(
                    middle,
                    y + h * 0.34,
                    name,
                    size=min(34, width / len(name) * 1.5),
                    colour=colour,
                    ha="center",
                )
                self.page.text(middle, y + h * 0.74, text, size=18, colour=TEXT, ha="center")
            else:
                self.page.text(middle, y + h * 0.5, text, size=size, colour=colour, ha="center")

    def _bar_gauge(self, panel: Document, results: Mapping[str, list[Series]], place: Place) -> None:
        x, y, w, h = place
        named = self._named(panel, results)
        top = panel["fieldConfig"]["defaults"].get("max") or max(series.value for _, series in named) or 1
        name_width = min(w * 0.4, max(len(name) for name, _ in named) * 7.5 + 12)
        step = min(34, h / len(named))
        for index, (name, series) in enumerate(named):
            style = Style(panel, name)
            line = y + step * (index + 0.5)
            room = w - name_width - 74
            self.page.text(x + name_width - 8, line, _fit(name, name_width, 13), size=13, ha="right")
            self.page.box((x + name_width, line - step * 0.36, room, step * 0.72), "#22252B")
            length = max(0.0, min(1.0, series.value / top)) * room
            self.page.box((x + name_width, line - step * 0.36, max(1.0, length), step * 0.72), style.colour(index))
            self.page.text(x + w - 4, line, style.text(series.value), size=14, ha="right")

    def _bar_chart(self, panel: Document, results: Mapping[str, list[Series]], place: Place) -> None:
        x, y, w, h = place
        table = client.table(panel, results)
        key = panel["options"]["xField"]
        if panel["options"]["stacking"] == "normal":
            if len(table) > 1:
                self._stacked_bars(panel, table, key, place)
                return
            (shares,) = table
            self._stacked_bar(panel, {name: value for name, value in shares.items() if name != key}, place)
            return
        order = ["target_verify", "draft_steps", "draft_extend", "verify_overhead", "kv_cache", "other"]
        table.sort(key=lambda row: order.index(row[key]) if row[key] in order else 99)
        columns = [name for name in table[0] if name != key]
        top = max(float(row.get(column, 0)) for row in table for column in columns) or 1
        step = (h - 24) / len(table)
        bar = step * 0.38
        for index, row in enumerate(table):
            line = y + step * (index + 0.5)
            self.page.text(x + 112, line, row[key], size=13, ha="right")
            for number, column in enumerate(columns):
                value, style = float(row.get(column, 0)), Style(panel, column)
                top_edge = line - bar + number * bar
                length = value / top * (w - 200)
                self.page.box((x + 120, top_edge + 1, max(1.0, length), bar - 2), style.colour(number))
                self.page.text(x + 126 + length, top_edge + bar / 2, style.text(value), size=11)
        for number, column in enumerate(columns):
            self.page.box((x + 120 + number * 90, y + h - 12, 12, 4), Style(panel, column).colour(number))
            self.page.text(x + 138 + number * 90, y + h - 10, column, size=12)

    def _stacked_bar(self, panel: Document, shares: Mapping[str, float], place: Place) -> None:
        x, y, w, h = place
        total = sum(shares.values()) or 1
        at = x
        height = h * 0.34
        for index, (name, value) in enumerate(shares.items()):
            style = Style(panel, name)
            length = value / total * w
            self.page.box((at, y + 14, length, height), style.colour(index))
            if length > 60:
                self.page.text(
                    at + length / 2,
                    y + 14 + height / 2,
                    style.text(value),
                    size=min(34, length / 4.5),
                    ha="center",
                    colour="#111217",
                    fontweight="bold",
                )
            at += length
        legend_y = y + height + 44
        for index, (name, value) in enumerate(shares.items()):
            line = legend_y + index * 24
            style = Style(panel, name)
            self.page.box((x + 4, line - 6, 14, 12), style.colour(index))
            self.page.text(x + 28, line, name, size=14)
            self.page.text(x + w - 6, line, style.text(value), size=15, ha="right")

    def _stacked_bars(self, panel: Document, table: client.Table, key: str, place: Place) -> None:
        """Draw one bar per row to a common scale, and one legend."""
        x, y, w, h = place
        columns = list(dict.fromkeys(name for row in table for name in row if name != key))
        top = max(sum(float(row.get(name, 0)) for name in columns) for row in table) or 1
        name_width, legend_width = 120, 150
        step = h / len(table)
        for index, row in enumerate(table):
            line, at = y + step * (index + 0.5), x + name_width
            self.page.text(at - 8, line, row[key], size=13, ha="right")
            for number, name in enumerate(columns):
                length = float(row.get(name, 0)) / top * (w - name_width - legend_width - 70)
                self.page.box((at, line - step * 0.32, length, step * 0.64), Style(panel, name).colour(number))
                at += length
            total = sum(float(row.get(name, 0)) for name in columns)
            self.page.text(at + 6, line, Style(panel, columns[0]).text(total), size=12)
        for number, name in enumerate(columns):
            line = y + 14 + number * 22
            self.page.box((x + w - legend_width, line - 6, 14, 12), Style(panel, name).colour(number))
            self.page.text(x + w - legend_width + 22, line, name, size=13)

    def _heatmap(self, panel: Document, results: Mapping[str, list[Series]], place: Place) -> None:
        x, y, w, h = place
        rows = sorted(results["A"], key=lambda series: float(series.labels["le"].replace("+Inf", "inf")))
        times = sorted({t for series in rows for t, _ in series.points})
        cells, before = [], dict.fromkeys(times, 0.0)
        for series in rows:
            now = dict(series.points)
            cells.append([max(0.0, now.get(t, before[t]) - before[t]) for t in times])
            before |= now
        used = [index for index, line in enumerate(cells) if max(line) > 1e-9]
        if not used:
            self._nothing(panel, place)
            return
        axes = self.page.axes((x + 62, y + 4, w - 70, h - 26))
        scheme = panel["options"]["color"]["scheme"]
        end = {"Blues": "#8AB8FF", "Greens": "#37C6B4"}.get(scheme, "#FFB357")
        colours = LinearSegmentedColormap.from_list(
            "cells", [PANEL, "#274472" if scheme == "Blues" else "#1C4A44", end, "#FFFFFF"]
        )
        # Grafana shows all rows; here the empty ones below and above are cut.
        first, last = max(0, used[0] - 1), min(len(rows), used[-1] + 2)
        step = times[1] - times[0] if len(times) > 1 else self.session.step
        axes.pcolormesh(
            [t - step / 2 for t in times] + [times[-1] + step / 2],
            range(last - first + 1),
            cells[first:last],
            cmap=colours,
            norm=PowerNorm(0.5, vmin=0),
            edgecolors=PANEL,
            linewidth=0.2,
        )
        unit = panel["options"]["yAxis"].get("unit") or "short"
        shown = range(first, last, max(1, (last - first) // 8))
        names = [rows[i].labels["le"] for i in shown]
        axes.set_yticks(
            [i - first + 0.5 for i in shown],
            [name if name == "+Inf" else format_value(float(name), unit) for name in names],
        )
        axes.set_xlim(self.session.start, self.session.end)
        self._time_axis(axes)

    def _table(self, panel: Document, results: Mapping[str, list[Series]], place: Place) -> None:
        x, y, w, h = place
        table = client.table(panel, results)
        order = next(t["options"] for t in panel["transformations"] if t["id"] == "organize")
        names = sorted(order["indexByName"], key=order["indexByName"].__getitem__)
        columns = [order["renameByName"].get(name, name) for name in names]
        columns = [column for column in columns if any(column in row for row in table)]
        for sort in reversed(panel["options"].get("sortBy") or ()):
            name, descending = sort["displayName"], sort["desc"]
            worst = -math.inf if descending else math.inf
            if any(isinstance(row.get(name), str) for row in table):
                table.sort(key=lambda row, name=name: str(row.get(name, "")), reverse=descending)  # type: ignore[misc]
            else:
                table.sort(key=lambda row, name=name, worst=worst: row.get(name, worst), reverse=descending)  # type: ignore[misc]
        weights = [
            max(len(column), *(len(Style(panel, column).text(row.get(column, ""))) for row in table)) + 3
            for column in columns
        ]
        gauges = [(Style(panel, column).get("custom.cellOptions") or {}).get("type") == "gauge" for column in columns]
        weights = [weight * (3 if gauge else 1) for weight, gauge in zip(weights, gauges, strict=True)]
        widths = [weight / sum(weights) * w for weight in weights]
        line_height, size = 28, 13
        room = int((h - 26) / line_height)
        at = x
        for column, width in zip(columns, widths, strict=True):
            self.page.text(at + 4, y + 10, _fit(column, width, size), size=12, colour="#6E9FFF", fontweight="bold")
            at += width
        for index, row in enumerate(table[:room]):
            line = y + 24 + line_height * (index + 0.5)
            self.page.box((x, line - line_height / 2, w, 1), BORDER)
            at = x
            for column, width in zip(columns, widths, strict=True):
                cell = (at, line - line_height / 2, width, float(line_height))
                self._cell(panel, table, column, row.get(column), cell, size=size)
                at += width
        if len(table) > room:
            self.page.text(x + w, y + h - 2, f"{len(table) - room} more rows", size=11, colour=DIM, ha="right")

    def _cell(
        self,
        panel: Document,
        table: client.Table,
        column: str,
        value: Any,
        place: Place,
        *,
        size: float,
    ) -> None:
        if value is None:
            return
        x, line, width, height = place
        line += height / 2
        style = Style(panel, column)
        kind = (style.get("custom.cellOptions") or {}).get("type")
        text = _fit(style.text(value), width - 6, size)
        colour = TEXT
        if style.get("links"):
            colour = "#6E9FFF"
        elif kind == "gauge":
            top = max(float(row.get(column, 0)) for row in table) or 1
            room = width - 80
            self.page.box((x + 4, line - height * 0.3, room, height * 0.6), "#22252B")
            self.page.box((x + 4, line - height * 0.3, value / top * room, height * 0.6), style.colour(0))
            self.page.text(x + 10 + room, line, text, size=size)
            return
        elif kind in ("color-background", "color-text"):
            if isinstance(value, str):
                mapped = [m["options"].get(value) for m in style.get("mappings") or () if m["type"] == "value"]
                chosen = next((m["color"] for m in mapped if m and m.get("color")), TEXT)
            else:
                chosen = style.threshold_colour(value)
            if chosen != "transparent":
                if kind == "color-background":
                    self.page.box((x + 1, line - height / 2 + 1, width - 3, height - 2), chosen)
                    colour = "#111217"
                else:
                    colour = chosen
        self.page.text(x + 4, line, text, size=size, colour=colour)


def _with_holes(times: list[float], values: list[float], longest: float) -> tuple[list[float], list[float]]:
    """Put a NaN into holes, so that no line is drawn across them."""
    new_times, new_values = [], []
    for index, (moment, value) in enumerate(zip(times, values, strict=True)):
        if index and moment - times[index - 1] > longest:
            new_times.append(moment)
            new_values.append(math.nan)
        new_times.append(moment)
        new_values.append(value)
    return new_times, new_values


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw one dashboard.

    Returns:
        0; 1 when Prometheus cannot be asked.

    """
    parser = argparse.ArgumentParser(description="Draw a dashboard from a real Prometheus into a PNG.")
    parser.add_argument("dashboard", type=Path, help="a file of grafana/dashboards/")
    client.add_session_arguments(parser)
    parser.add_argument("--open", action="store_true", help="open the collapsed rows")
    parser.add_argument("--output", type=Path, required=True, help="the PNG")
    chosen = parser.parse_args(arguments)
    session = client.session_of(chosen, time.time())
    try:
        Preview(client.load(chosen.dashboard), session, open_rows=chosen.open).draw(chosen.output)
    except OSError as error:
        print(f"cannot ask Prometheus at {chosen.prometheus}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
