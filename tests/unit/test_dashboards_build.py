"""The dashboards as files: up to date, linted, and true to the catalogue."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard

from deploy.prometheus import build as rules
from eagle_exporter import catalogue
from grafana import build, client, panels
from tests.dashboards import lint, promql_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Document = dict[str, Any]

NAMES = list(build.DASHBOARDS)
EXCEPTIONS = lint.exceptions(build.OUTPUT / ".lint")
PROVISIONING = build.HERE / "provisioning"


@cache
def _text(name: str) -> str:
    return (build.OUTPUT / name).read_text(encoding="utf-8")


def load(name: str) -> Document:
    document: Document = json.loads(_text(name))
    return document


@pytest.fixture(params=NAMES)
def document(request: pytest.FixtureRequest) -> Document:
    return load(request.param)


def test_committed_files_are_what_the_code_builds(tmp_path: Path) -> None:
    assert build.main(["--check"]) == 0
    assert build.main(["--output", str(tmp_path)]) == 0
    assert build.main(["--check", "--output", str(tmp_path)]) == 0
    changed = tmp_path / NAMES[0]
    changed.write_text(changed.read_text().replace("0.99", "0.98", 1))
    assert build.main(["--check", "--output", str(tmp_path)]) == 1
    changed.unlink()
    assert build.main(["--check", "--output", str(tmp_path)]) == 1


def test_a_left_over_file_is_noticed(tmp_path: Path) -> None:
    build.main(["--output", str(tmp_path)])
    (tmp_path / "old.json").write_text("{}")
    assert build.main(["--check", "--output", str(tmp_path)]) == 1


@pytest.mark.parametrize("rule", lint.LINTER)
def test_linter_rule_holds(document: Document, rule: str) -> None:
    assert lint.LINTER[rule](document, EXCEPTIONS) == []


def _first(document: Document, kind: str) -> Document:
    return next(panel for panel in client.panels(document) if panel["type"] == kind)


def _variable(document: Document, name: str) -> Document:
    return client.variables(document)[name]


def _edit_expr(change: Callable[[str], str]) -> Callable[[Document], None]:
    def edit(document: Document) -> None:
        target = _first(document, "timeseries")["targets"][0]
        target["expr"] = change(target["expr"])

    return edit


def _edit(path: Callable[[Document], Document], **values: object) -> Callable[[Document], None]:
    return lambda document: path(document).update(values)


BREAKS: dict[str, Callable[[Document], None]] = {
    "template-datasource-rule": _edit(lambda d: _variable(d, "datasource"), name="ds"),
    "template-job-rule": _edit(lambda d: _variable(d, "job"), multi=False),
    "template-instance-rule": _edit(lambda d: _variable(d, "instance"), allValue=".*"),
    "template-label-promql-rule": _edit(lambda d: _variable(d, "job"), query={"query": "label_value(up, job)"}),
    "template-on-time-change-reload-rule": _edit(lambda d: _variable(d, "server"), refresh=1),
    "panel-datasource-rule": _edit(lambda d: _first(d, "stat")["targets"][0], datasource={"uid": "P123"}),
    "panel-title-description-rule": _edit(lambda d: _first(d, "stat"), description=""),
    "panel-units-rule": _edit(lambda d: _first(d, "stat")["fieldConfig"]["defaults"], unit="parsec"),
    "panel-no-targets-rule": _edit(lambda d: _first(d, "stat"), targets=[]),
    "target-logql-rule": _edit_expr(lambda e: '{job="a"} |= "b"'),
    "target-logql-auto-rule": _edit_expr(lambda e: e.replace("$__rate_interval", "$__auto")),
    "target-promql-rule": _edit_expr(lambda e: e + ")"),
    "target-rate-interval-rule": _edit_expr(lambda e: e.replace("[$__rate_interval]", "[5m]", 1)),
    "target-job-rule": _edit_expr(lambda e: e.replace('job=~"$job",', "", 1)),
    "target-instance-rule": _edit_expr(lambda e: e.replace('instance=~"$instance"', 'instance="$instance"', 1)),
    "target-counter-agg-rule": _edit_expr(lambda e: e.replace("rate(", "(", 1).replace("[$__rate_interval]", "", 1)),
    "uneditable-dashboard": lambda document: document.update(editable=True),
}


@pytest.mark.parametrize("rule", lint.LINTER)
def test_linter_rule_catches(document: Document, rule: str) -> None:
    BREAKS[rule](document)
    assert lint.LINTER[rule](document, EXCEPTIONS)


def test_every_exception_is_needed() -> None:
    documents = {document["title"]: document for document in map(load, NAMES)}
    for entry in EXCEPTIONS:
        rule, title, panel, _ = entry
        complaints = lint.LINTER[rule](documents[title], EXCEPTIONS - {entry})
        assert complaints, entry
        assert all(complaint.startswith(panel) for complaint in complaints)


def test_names_and_values_are_in_the_catalogue(document: Document) -> None:
    assert lint.unknown_names(document) == []
    assert lint.wrong_values(document) == []


def _metrics(document: Document) -> set[str]:
    return {
        selector.metric
        for _, expression in lint.all_expressions(document)
        for selector in promql_text.selectors(expression)
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_renamed_metric_or_label_is_noticed(name: str) -> None:
    text = json.dumps(load(name))
    metrics = _metrics(json.loads(text))
    assert len(metrics) > 10
    for metric in metrics:
        renamed = re.sub(rf"\b{re.escape(metric)}(?=\{{|[,)])", f"{metric}_x", text)
        assert lint.unknown_names(json.loads(renamed)), metric
    for label in ("server", "model_name", "dp_rank"):
        renamed = re.sub(rf"\b{label}=~", f"{label}s=~", text)
        assert lint.unknown_names(json.loads(renamed)), label
    for label in ("server",):
        assert lint.unknown_names(json.loads(text.replace(f"by ({label})", f"by ({label}s)"))), label


def test_a_phase_that_the_catalogue_lacks_is_noticed() -> None:
    text = json.dumps(load("eagle-cycle.json")).replace('phase=\\"kv_cache\\"', 'phase=\\"kv\\"')
    assert lint.wrong_values(json.loads(text))


def test_the_build_fails_for_a_metric_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(catalogue.BY_NAME, "eagle_wasted_rows_total")
    with pytest.raises(KeyError, match="eagle_wasted_rows_total"):
        build.acceptance_dashboard()


def test_schema(document: Document) -> None:
    """What Grafana's own models read and write again is the same: no unknown, misplaced or lost field."""
    register_default_plugins()
    original = copy.deepcopy(document)
    again = json.loads(json.dumps(dashboard.Dashboard.from_json(document), cls=JSONEncoder))
    again["id"] = None
    for one in original["annotations"]["list"]:
        # The Prometheus data source reads these; the models do not know them.
        for field in ("titleFormat", "textFormat", "step"):
            del one[field]
    assert again == original


def test_ids_and_uids(document: Document) -> None:
    ids = [panel["id"] for panel in document["panels"]]
    ids += [inner["id"] for panel in document["panels"] for inner in panel.get("panels") or ()]
    assert len(ids) == len(set(ids)) > 5
    assert document["id"] is None
    assert re.fullmatch(r"eagle-[a-z]+", document["uid"])
    uids = set(re.findall(r'"uid": "([^"]*)"', json.dumps(document))) - {document["uid"]}
    assert uids == {lint.DATASOURCE}
    assert len({load(name)["uid"] for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize("path", sorted(build.OUTPUT.glob("*.json")), ids=lambda path: path.name)
def test_no_merge_marker_and_nothing_for_one_installation(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"^(<{7}|={7}|>{7})", text, re.MULTILINE)
    for word in ("__inputs", "DS_PROMETHEUS", "localhost", "127.0.0.1"):
        assert word not in text


def test_layout(document: Document) -> None:
    assert lint.overlapping_panels(document) == []


def test_overlap_is_noticed(document: Document) -> None:
    first, second = [panel for panel in document["panels"] if panel["type"] != "row"][:2]
    second["gridPos"] = dict(first["gridPos"])
    assert lint.overlapping_panels(document)


def test_variables(document: Document) -> None:
    found = client.variables(document)
    wanted = ["datasource", "job", "instance", "node", "server", "model_name", "engine_type", "dp_rank"]
    assert list(found)[: len(wanted)] == wanted
    for name, variable in found.items():
        if name != "datasource":
            assert (variable["multi"], variable["includeAll"]) == (True, True)
            assert variable["allValue"] == (".+" if name in ("job", "instance") else ".*")
    assert lint.unused_variables(document) == []


def test_a_rank_can_be_chosen_where_ranks_are_shown() -> None:
    with_rank = {name for name in NAMES if "tp_rank" in client.variables(load(name))}
    assert with_rank == {"eagle-cycle.json", "eagle-fleet.json"}
    document = load("eagle-cycle.json")
    (kernels,) = [panel for panel in document["panels"] if panel["title"].startswith("Inside verify")]
    captured = {panel["title"] for panel in kernels["panels"]}
    # Acceptance exists on the recording rank only: another one must not empty the panels about servers. Captures are
    # of single ranks.
    for title, _, expression in lint.expressions(document):
        about_ranks = title in {"Ranks", "SM clock", "Power", "Temperature", "GPU busy", *captured}
        assert ("$tp_rank" in expression) == about_ranks, title


def test_links_and_annotations(document: Document) -> None:
    (link,) = document["links"]
    assert (link["type"], link["tags"], link["includeVars"], link["keepTime"]) == (
        "dashboards",
        ["eagle-exporter"],
        True,
        True,
    )
    assert "eagle-exporter" in document["tags"]
    annotations = {one["name"]: one for one in document["annotations"]["list"]}
    assert [one["enable"] for one in annotations.values()] == [True, True, False]
    assert "config_id" in annotations["Configuration changed"]["expr"]
    assert 'alertname=~"Eagle.*"' in annotations["Alert fires"]["expr"]


def test_alert_names_have_the_prefix_that_the_dashboards_ask_for() -> None:
    assert rules.Rules().all_alerts()
    assert all(alert.alert.startswith("Eagle") for alert in rules.Rules().all_alerts())


def test_every_panel_asks_a_question(document: Document) -> None:
    for panel in client.panels(document):
        assert re.match(r"[A-Z][^?]*\?", panel["description"]), panel["title"]
        assert 60 < len(panel["description"]) < 700, panel["title"]


def test_titles_are_unique(document: Document) -> None:
    titles = [panel["title"] for panel in client.panels(document)]
    duplicates = {title for title in titles if titles.count(title) > 1}
    assert duplicates == set()


def test_no_traffic_is_said(document: Document) -> None:
    for panel in client.panels(document):
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["noValue"], panel["title"]
        special = [mapping for mapping in defaults["mappings"] if mapping["type"] == "special"]
        assert special[0]["options"] == {"match": "null+nan", "result": {"text": "No traffic"}}


def test_denominators_are_guarded(document: Document) -> None:
    """A division by what may be 0 gives no series: every divisor has a ``> 0``."""
    for title, _, expression in lint.expressions(document):
        for match in re.finditer(r"\) / (?!100)", expression):
            rest = expression[match.end() :]
            assert "> 0" in rest or "1 + " in rest, f"{title}: {rest[:80]}"


def test_no_average_of_averages(document: Document) -> None:
    for title, _, expression in lint.expressions(document):
        assert not re.search(r"\bavg\b", expression), title


def test_a_phase_has_one_colour_everywhere() -> None:
    seen: dict[str, set[str]] = {}
    for name in NAMES:
        for panel in client.panels(load(name)):
            for override in panel["fieldConfig"]["overrides"]:
                if override["matcher"]["options"] in catalogue.PHASES:
                    for entry in override["properties"]:
                        if entry["id"] == "color":
                            seen.setdefault(override["matcher"]["options"], set()).add(entry["value"]["fixedColor"])
    assert seen == {phase: {colour} for phase, colour in panels.PHASE_COLOURS.items()}
    assert set(panels.PHASE_COLOURS) == set(catalogue.PHASES)
    assert len(set(panels.PHASE_COLOURS.values())) == len(catalogue.PHASES)


def test_shares_are_drawn_to_their_limit() -> None:
    for name in NAMES:
        for panel in client.panels(load(name)):
            title = panel["title"].lower()
            if panel["type"] == "timeseries" and ("share" in title or "acceptance by" in title):
                assert panel["fieldConfig"]["defaults"]["max"] == 1, title


def test_fleet_rows_open_the_cycle() -> None:
    table = next(
        panel
        for panel in client.panels(load("eagle-fleet.json"))
        if panel["title"] == "Servers" and panel["type"] == "table"
    )
    override = next(one for one in table["fieldConfig"]["overrides"] if one["matcher"]["options"] == "Server")
    (link,) = next(entry["value"] for entry in override["properties"] if entry["id"] == "links")
    target = load("eagle-cycle.json")
    assert link["url"].startswith(f"/d/{target['uid']}/")
    assert "var-server=" in link["url"]
    assert "server" in client.variables(target)


def test_hardware_is_out_of_the_way() -> None:
    """The row is closed (a closed row runs no query) and repeated over what the DCGM exporter knows."""
    document = load("eagle-cycle.json")
    row = next(panel for panel in document["panels"] if panel["title"].startswith("Hardware"))
    assert row["collapsed"] is True
    assert row["repeat"] == "hardware"
    assert len(row["panels"]) == 4
    assert "DCGM_" in client.variables(document)["hardware"]["query"]["query"]


def test_kernel_panels_are_out_of_the_way_and_say_how_a_capture_is_made() -> None:
    document = load("eagle-cycle.json")
    row = next(panel for panel in document["panels"] if panel["title"].startswith("Inside verify"))
    assert row["collapsed"] is True
    for panel in row["panels"]:
        assert "no capture" in panel["fieldConfig"]["defaults"]["noValue"].lower(), panel["title"]


def test_a_kernel_class_has_a_colour_of_its_own() -> None:
    assert set(panels.KERNEL_COLOURS) == set(catalogue.KERNEL_CLASSES)
    colours = {*panels.KERNEL_COLOURS.values(), panels.IDLE_COLOUR}
    assert len(colours) == len(catalogue.KERNEL_CLASSES) + 1
    assert panels.IDLE not in catalogue.KERNEL_CLASSES


def test_a_rate_over_the_whole_time_range_is_noticed(document: Document) -> None:
    _edit_expr(lambda expression: expression.replace("[$__rate_interval]", "[$__range]"))(document)
    assert lint.target_rate_interval(document, EXCEPTIONS)


def test_provisioning() -> None:
    datasource = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text())
    (source,) = datasource["datasources"]
    assert (datasource["apiVersion"], source["type"], source["jsonData"]["httpMethod"]) == (
        1,
        "prometheus",
        "POST",
    )
    provider = yaml.safe_load((PROVISIONING / "dashboards" / "eagle.yaml").read_text())
    (one,) = provider["providers"]
    assert (provider["apiVersion"], one["type"], one["allowUiUpdates"]) == (1, "file", False)
    assert one["options"]["path"].startswith("/")


def test_queries_are_short_enough_to_be_sent() -> None:
    """The data source is set to POST; Prometheus itself has no limit, proxies often have one of 1 MB."""
    for name in NAMES:
        for title, _, expression in lint.expressions(load(name)):
            assert len(expression) < 100_000, title
