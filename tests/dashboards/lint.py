"""The 17 rules of Grafana's dashboard-linter, stricter where it is lenient, and the rules of our own.

A rule takes a dashboard (and the exceptions) and returns its complaints.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from deploy.prometheus import build as rules
from eagle_exporter import catalogue
from eagle_exporter.catalogue import BY_NAME, Kind
from grafana import client
from tests.dashboards import promql_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Document = dict[str, Any]
Exceptions = set[tuple[str, str, str, int]]

DATASOURCE = "${datasource}"
UNITS = {"short", "percentunit", "s", "cps", "hertz", "watt", "celsius", "bool_yes_no", "none"}
"""Of the linter's long list those that are used; a unit that is not here is a decision to be made."""

COUNTER_FUNCTIONS = {"rate", "increase"}
OVER_THE_TIME_RANGE = {"increase", "last_over_time"}
"""What may be asked over ``$__range`` (the linter allows everything but rate and irate)."""
TARGET_LABELS = {"job", "instance", "node"}
FOREIGN: dict[str, set[str] | frozenset[str]] = {
    "up": TARGET_LABELS,
    "ALERTS": {"alertname", "alertstate", "severity", "server", "instance"},
    **dict.fromkeys(
        ("DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_UTIL"),
        frozenset({"Hostname", "UUID"}),
    ),
}
"""Metrics of others, with the labels that are used of them."""

RECORDED = {
    rule.record: {"server", "config_id"} for rule in rules.Rules().recordings() if rule.record.startswith("server:")
}
MADE_LABELS = {"steps", "cycle", "UUID"}
"""Labels that label_replace makes."""


def exceptions(path: Path) -> Exceptions:
    """Read the linter's configuration; every entry names one target, and every rule has a reason."""
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))["exclusions"]
    assert all(rule["reason"] and rule["entries"] for rule in loaded.values())
    return {
        (rule, entry["dashboard"], entry["panel"], int(entry["targetIdx"]))
        for rule, content in loaded.items()
        for entry in content["entries"]
    }


def expressions(document: Document) -> list[tuple[str, int, str]]:
    """Return (panel, target index, expression) of every target."""
    return [
        (panel["title"], index, target["expr"])
        for panel in client.panels(document)
        for index, target in enumerate(panel["targets"])
    ]


def base_name(metric: str) -> str:
    """Return the family of a sample name."""
    for suffix in ("_bucket", "_sum", "_count"):
        base = metric.removesuffix(suffix)
        if base in BY_NAME and BY_NAME[base].kind is Kind.HISTOGRAM:
            return base
    return metric


# --- the linter's rules -------------------------------------------------------------------------------------


def _query_variables(document: Document) -> list[Document]:
    return [one for one in document["templating"]["list"] if one["type"] == "query"]


def template_datasource(document: Document, _: Exceptions) -> list[str]:
    found = [one for one in document["templating"]["list"] if one["type"] == "datasource"]
    good = [
        one for one in found if (one["name"], one["label"], one["query"]) == ("datasource", "Data source", "prometheus")
    ]
    return [] if len(found) == len(good) == 1 else [f"data source variables: {found}"]


def _template(document: Document, name: str, label: str) -> list[str]:
    found = [one for one in _query_variables(document) if one["name"] == name]
    if len(found) != 1:
        return [f"{len(found)} variables {name}"]
    one = found[0]
    wanted = {"label": label, "multi": True, "allValue": ".+"}
    wrong = [f"{name}: {key} is {one.get(key)!r}" for key, value in wanted.items() if one.get(key) != value]
    return wrong + ([] if one["datasource"]["uid"] == DATASOURCE else [f"{name}: data source {one['datasource']}"])


def template_job(document: Document, _: Exceptions) -> list[str]:
    return _template(document, "job", "Job")


def template_instance(document: Document, _: Exceptions) -> list[str]:
    return _template(document, "instance", "Instance")


def template_label_promql(document: Document, _: Exceptions) -> list[str]:
    wrong = []
    for one in _query_variables(document):
        text = one["query"]["query"]
        match = re.fullmatch(r"label_values\(([A-Za-z_:][\w:]*)(\{.*\})?, (\w+)\)", text)
        if match is None:
            wrong.append(f"{one['name']}: {text}")
    return wrong


def template_on_time_change_reload(document: Document, _: Exceptions) -> list[str]:
    return [one["name"] for one in _query_variables(document) if one.get("refresh") != 2]


def panel_datasource(document: Document, _: Exceptions) -> list[str]:
    return [
        panel["title"]
        for panel in client.panels(document)
        if any((one.get("datasource") or {}).get("uid") != DATASOURCE for one in (panel, *panel.get("targets", ())))
    ]


def panel_title_description(document: Document, _: Exceptions) -> list[str]:
    return [
        str(panel.get("title") or panel["id"])
        for panel in client.panels(document)
        if not panel.get("title") or not panel.get("description")
    ]


def panel_units(document: Document, _: Exceptions) -> list[str]:
    wrong = []
    for panel in client.panels(document):
        config = panel["fieldConfig"]
        units = [config["defaults"].get("unit")]
        units += [p["value"] for one in config["overrides"] for p in one["properties"] if p["id"] == "unit"]
        wrong += [f"{panel['title']}: unit {unit!r}" for unit in units if unit not in UNITS]
    return wrong


def panel_no_targets(document: Document, _: Exceptions) -> list[str]:
    return [panel["title"] for panel in client.panels(document) if not panel.get("targets")]


def target_logql(document: Document, _: Exceptions) -> list[str]:
    return [title for title, _index, expression in expressions(document) if "|=" in expression or "|~" in expression]


def target_logql_auto(document: Document, _: Exceptions) -> list[str]:
    return [title for title, _index, expression in expressions(document) if "$__auto" in expression]


def target_promql(document: Document, _: Exceptions) -> list[str]:
    """Readable at all; `test_queries` gives every expression to Prometheus."""
    wrong = []
    for title, index, expression in expressions(document):
        balanced = expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")
        if not balanced or not promql_text.selectors(expression) or promql_text.bare_names(expression):
            wrong.append(f"{title} {index}: {promql_text.bare_names(expression)}")
    return wrong


def target_rate_interval(document: Document, _: Exceptions) -> list[str]:
    return [
        f"{title} {index}: [{selector.range}]"
        for title, index, expression in expressions(document)
        for selector in promql_text.selectors(expression)
        if selector.range not in (None, "$__rate_interval")
        and not (selector.range == "$__range" and selector.function in OVER_THE_TIME_RANGE)
    ]


def _matcher(document: Document, excluded: Exceptions, rule: str, label: str) -> list[str]:
    return [
        f"{title} {index}: {selector.metric} without {label}"
        for title, index, expression in expressions(document)
        for selector in promql_text.selectors(expression)
        if selector.matchers.get(label) != ("=~", f"${label}")
        and (rule, document["title"], title, index) not in excluded
    ]


def target_job(document: Document, excluded: Exceptions) -> list[str]:
    return _matcher(document, excluded, "target-job-rule", "job")


def target_instance(document: Document, excluded: Exceptions) -> list[str]:
    return _matcher(document, excluded, "target-instance-rule", "instance")


def target_counter_agg(document: Document, excluded: Exceptions) -> list[str]:
    return [
        f"{title} {index}: {selector.metric}"
        for title, index, expression in expressions(document)
        for selector in promql_text.selectors(expression)
        if re.search(r"(_total|_bucket|_sum|_count)$", selector.metric)
        and (selector.range is None or selector.function not in COUNTER_FUNCTIONS)
        and ("target-counter-agg-rule", document["title"], title, index) not in excluded
    ]


def uneditable_dashboard(document: Document, _: Exceptions) -> list[str]:
    return [] if document["editable"] is False else ["editable"]


LINTER: dict[str, Callable[[Document, Exceptions], list[str]]] = {
    "template-datasource-rule": template_datasource,
    "template-job-rule": template_job,
    "template-instance-rule": template_instance,
    "template-label-promql-rule": template_label_promql,
    "template-on-time-change-reload-rule": template_on_time_change_reload,
    "panel-datasource-rule": panel_datasource,
    "panel-title-description-rule": panel_title_description,
    "panel-units-rule": panel_units,
    "panel-no-targets-rule": panel_no_targets,
    "target-logql-rule": target_logql,
    "target-logql-auto-rule": target_logql_auto,
    "target-promql-rule": target_promql,
    "target-rate-interval-rule": target_rate_interval,
    "target-job-rule": target_job,
    "target-instance-rule": target_instance,
    "target-counter-agg-rule": target_counter_agg,
    "uneditable-dashboard": uneditable_dashboard,
}


# --- our own ------------------------------------------------------------------------------------------------


def all_expressions(document: Document) -> list[tuple[str, str]]:
    """Return (where, expression) of targets, annotations and variables."""
    found = [(f"{title} {index}", expression) for title, index, expression in expressions(document)]
    found += [(one["name"], one["expr"]) for one in document["annotations"]["list"]]
    for one in _query_variables(document):
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", one["query"]["query"])
        assert match is not None
        selector = match.group(1) if "{" in match.group(1) else f'{match.group(1)}{{{match.group(2)}=~".*"}}'
        found.append((f"${one['name']}", f"max by ({match.group(2)}) ({selector})"))
    return found


def unknown_names(document: Document) -> list[str]:
    """Return metrics and labels that neither the catalogue, nor the recording rules, nor `FOREIGN` have."""
    wrong = []
    every_label = {label for metric in catalogue.METRICS for label in metric.all_labels}
    every_label |= TARGET_LABELS | MADE_LABELS | {"le"} | {label for labels in FOREIGN.values() for label in labels}
    for where, expression in all_expressions(document):
        for selector in promql_text.selectors(expression):
            metric = base_name(selector.metric)
            if metric in BY_NAME:
                known = {*BY_NAME[metric].all_labels, *TARGET_LABELS}
                if selector.metric.endswith("_bucket"):
                    known.add("le")
            elif selector.metric in FOREIGN:
                known = set(FOREIGN[selector.metric])
            elif selector.metric in RECORDED:
                known = RECORDED[selector.metric]
            else:
                wrong.append(f"{where}: metric {selector.metric}")
                continue
            wrong += [f"{where}: {selector.metric} has no label {label}" for label in set(selector.matchers) - known]
        wrong += [f"{where}: label {label}" for label in promql_text.grouping_labels(expression) - every_label]
        wrong += [f"{where}: word {word}" for word in promql_text.bare_names(expression)]
    return wrong


def wrong_values(document: Document) -> list[str]:
    """Return label values in matchers that the catalogue does not have."""
    wrong = []
    for where, expression in all_expressions(document):
        for selector in promql_text.selectors(expression):
            for label, (operator, value) in selector.matchers.items():
                known = catalogue.LABEL_VALUES.get(label)
                if base_name(selector.metric) == "eagle_prefill_phase_duration_seconds":
                    known = catalogue.PREFILL_PHASES
                if known and operator in ("=", "!=") and value not in known:
                    wrong.append(f'{where}: {label}="{value}"')
    return wrong


def unused_variables(document: Document) -> list[str]:
    """Return variables that no panel uses: choosing one would silently do nothing."""
    text = " ".join(expression for _, _, expression in expressions(document)) + DATASOURCE
    return [name for name in client.variables(document) if f"${name}" not in text and f"${{{name}" not in text]


def overlapping_panels(document: Document) -> list[str]:
    """Return panels that lie on each other or reach over the edge."""
    wrong = []
    groups = [list(document["panels"])]
    groups += [panel["panels"] for panel in document["panels"] if panel.get("panels")]
    for group in groups:
        taken: dict[tuple[int, int], str] = {}
        for panel in group:
            place = panel["gridPos"]
            if place["x"] + place["w"] > 24:
                wrong.append(f"{panel['title']} reaches over the edge")
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    if (x, y) in taken:
                        wrong.append(f"{panel['title']} lies on {taken[x, y]}")
                    taken[x, y] = panel["title"]
    return sorted(set(wrong))
