"""What Grafana does between a dashboard and Prometheus: variables, intervals, queries, transformations.

Only as much as these dashboards use. Tests run every query through it, and `grafana.preview` draws from it.
"""

from __future__ import annotations

import argparse
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Document = dict[str, Any]
Labels = dict[str, str]

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::\w+)?\}|([A-Za-z_]\w*))")
"""Not ``$1``, which belongs to PromQL's label_replace."""


class QueryError(Exception):
    """Prometheus refused a query."""


@dataclass
class Series:
    """One series of an answer: labels and (time, value) pairs; an instant answer has one pair."""

    labels: Labels
    points: list[tuple[float, float]]

    @property
    def value(self) -> float:
        """The last value."""
        return self.points[-1][1]


def load(path: Path) -> Document:
    """Read a dashboard."""
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    return document


def panels(document: Document) -> Iterator[Document]:
    """Yield every panel that is not a row, those in collapsed rows too."""
    for panel in document["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels") or ()
        else:
            yield panel


def variables(document: Document) -> dict[str, Document]:
    """Return the variables of a dashboard by name."""
    return {variable["name"]: variable for variable in document["templating"]["list"]}


@dataclass
class Session:
    """A Grafana that shows one dashboard over one time range.

    Attributes:
        url: Address of Prometheus.
        start: Unix seconds.
        end: Unix seconds.
        step: Seconds between points.
        rate_interval: Value of ``$__rate_interval`` in seconds.
        chosen: Variable -> chosen values; All where there are none.
        range: Value of ``$__range`` in seconds; from `start` to `end` when None, as in Grafana.

    """

    url: str
    start: float
    end: float
    step: float
    rate_interval: float
    chosen: Mapping[str, list[str]] = field(default_factory=dict)
    range: float | None = None

    def interpolate(self, document: Document, expression: str) -> str:
        """Replace the variables in a query as Grafana does for Prometheus."""
        known = variables(document)

        def replace(match: re.Match[str]) -> str:
            name = match.group(1) or match.group(2)
            if name == "__rate_interval":
                return f"{round(self.rate_interval * 1000)}ms"
            if name == "__range":
                return f"{round(self.end - self.start if self.range is None else self.range)}s"
            if name not in known:
                raise KeyError(f"unknown variable ${name}")
            values = self.chosen.get(name)
            if not values:
                return str(known[name].get("allValue") or ".*")
            escaped = [re.sub(r"([.*+?^${}()|\[\]\\])", r"\\\\\1", value) for value in values]
            return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"

        return _VARIABLE.sub(replace, expression)

    def run(self, document: Document, target: Document) -> list[Series]:
        """Run one target of a panel."""
        expression = self.interpolate(document, target["expr"])
        return self.instant(expression) if target.get("instant") else self.over_range(expression)

    def instant(self, expression: str) -> list[Series]:
        """Evaluate at the end of the time range."""
        result = self._ask("query", query=expression, time=self.end)
        if result["resultType"] == "scalar":
            return [Series({}, [_pair(result["result"])])]
        return [Series(one["metric"], [_pair(one["value"])]) for one in result["result"]]

    def over_range(self, expression: str) -> list[Series]:
        """Evaluate over the time range."""
        result = self._ask("query_range", query=expression, start=self.start, end=self.end, step=self.step)
        return [Series(one["metric"], [_pair(pair) for pair in one["values"]]) for one in result["result"]]

    def label_values(self, document: Document, name: str) -> list[str]:
        """Return the options of a query variable."""
        query = variables(document)[name]["query"]["query"]
        match = re.fullmatch(r"label_values\((.+),\s*(\w+)\)", query)
        if match is None:
            raise ValueError(f"not a label_values query: {query}")
        selector = self.interpolate(document, match.group(1))
        found = self._ask(f"label/{match.group(2)}/values", **{"match[]": selector})
        return [str(value) for value in found]

    def _ask(self, path: str, **parameters: str | float) -> Any:
        data = urllib.parse.urlencode({name: str(value) for name, value in parameters.items()}).encode()
        address = f"{self.url}/api/v1/{path}"
        request: urllib.request.Request | str = urllib.request.Request(address, data)  # noqa: S310 - an address given by the developer
        if path.startswith("label/"):
            request = f"{address}?{data.decode()}"
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise QueryError(f"{error.read().decode()}: {parameters}") from error


def legend(target: Document, labels: Labels) -> str:
    """Return the name of a series by the target's legend format."""
    text = target.get("legendFormat") or "__auto"
    if text == "__auto":
        shown = {name: value for name, value in labels.items() if name != "__name__"}
        return ", ".join(shown.values()) or "value"
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match.group(1), ""), text)


Table = list[dict[str, Any]]


def table(panel: Document, results: Mapping[str, list[Series]]) -> Table:
    """Return the rows of a panel in table format after its transformations; columns are in display order."""
    several = len(panel["targets"]) > 1
    frames: list[Table] = []
    for ref_id, result in results.items():
        value = f"Value #{ref_id}" if several else "Value"
        frames.append([{**series.labels, value: series.value} for series in result])
    for transformation in panel.get("transformations") or ():
        frames = _transform(frames, transformation["id"], transformation["options"])
    return [row for frame in frames for row in frame]


def _transform(frames: list[Table], name: str, options: Document) -> list[Table]:
    if name == "merge":
        return [_merge(frames)]
    if name == "joinByField":
        joined: dict[Any, dict[str, Any]] = {}
        for frame in frames:
            for row in frame:
                joined.setdefault(row[options["byField"]], {}).update(row)
        return [list(joined.values())]
    if name == "filterFieldsByName":
        keep = set(options["include"]["names"])
        return [[{key: value for key, value in row.items() if key in keep} for row in frame] for frame in frames]
    if name == "organize":
        order, names = options["indexByName"], options["renameByName"]
        return [
            [
                {names.get(key, key): row[key] for key in sorted(row, key=lambda key: order.get(key, len(order)))}
                for row in frame
            ]
            for frame in frames
        ]
    if name == "groupingToMatrix":
        column, row_name, value = options["columnField"], options["rowField"], options["valueField"]
        matrix: dict[str, dict[str, Any]] = {}
        for frame in frames:
            for row in frame:
                line = matrix.setdefault(row[row_name], {f"{row_name}\\{column}": row[row_name]})
                line[row[column]] = row[value]
        return [list(matrix.values())]
    raise ValueError(f"no such transformation here: {name}")


def _merge(frames: list[Table]) -> Table:
    """Join rows that agree in every label they share, as Grafana's merge does; values fill up."""
    rows: Table = []
    for frame in frames:
        for row in frame:
            labels = {key for key in row if not key.startswith("Value")}
            for known in rows:
                shared = [key for key in labels if key in known]
                free = not any(key in known for key in row if key.startswith("Value"))
                if free and shared and all(known[key] == row[key] for key in shared):
                    known.update(row)
                    break
            else:
                rows.append(dict(row))
    return rows


def _pair(pair: list[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


def seconds(text: str) -> float:
    """Return the seconds of ``90s``, ``15m``, ``2h``, ``1d``, or of a plain number.

    Raises:
        ValueError: It is none of these.

    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise ValueError(f"not a duration: {text}")
    return float(match.group(1)) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match.group(2)]


def add_session_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a `Session` is made of."""
    address, scrape = "http://127.0.0.1:9090", "of the exporter (default: %(default)s)"
    parser.add_argument("--prometheus", default=address, help="its address (default: %(default)s)")
    parser.add_argument("--from", dest="range", default="1h", type=seconds, help="how far back (default: %(default)s)")
    parser.add_argument("--end", type=float, default=None, help="Unix seconds (default: now)")
    parser.add_argument("--scrape-interval", default="15s", type=seconds, help=scrape)
    parser.add_argument(
        "--var", action="append", default=[], metavar="NAME=VALUE", help="choose a value; may be repeated"
    )


def session_of(chosen: argparse.Namespace, now: float) -> Session:
    """Return the session that the arguments of `add_session_arguments` ask for."""
    end = chosen.end if chosen.end is not None else now
    step = max(chosen.range / 240, chosen.scrape_interval)
    selected: dict[str, list[str]] = {}
    for pair in chosen.var:
        name, _, value = pair.partition("=")
        selected.setdefault(name, []).append(value)
    # As Grafana does it: at least four scrapes, and no scrape between two points is left out.
    window = max(4 * chosen.scrape_interval, step + chosen.scrape_interval)
    return Session(chosen.prometheus, end - chosen.range, end, step, window, selected)
