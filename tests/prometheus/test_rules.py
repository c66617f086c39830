"""The rules: that Prometheus loads them, that their stories hold, and that the stories can fail."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from deploy.prometheus import build
from deploy.prometheus.tests import stories
from eagle_exporter import catalogue
from tests.prometheus import servers
from tests.prometheus.servers import promtool
from tests.tools import ROOT

DEPLOY = ROOT / "deploy"

RULES = build.Rules()
ALERTS = RULES.all_alerts()
EXPRESSIONS = {rule.record: rule.expr for rule in RULES.recordings()} | {a.alert: a.expr for a in ALERTS}
TARGET_LABELS = {"job", "instance"}
OF_PROMETHEUS = {"up", "scrape_duration_seconds"}
RUNBOOKS = DEPLOY / "runbooks"


def selectors(expression: str) -> Iterator[Any]:
    """Yield every selector of an expression."""
    found: list[Any] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    yield from found


def labels_of(name: str) -> set[str]:
    """Labels that a series of this name can have."""
    if name in OF_PROMETHEUS:
        return TARGET_LABELS
    return set(catalogue.BY_NAME[name].all_labels) | TARGET_LABELS


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "directory"), [(build, "rules"), (stories, "tests")])
def test_committed_files_are_what_the_generator_writes(module: Any, directory: str) -> None:
    written = {path.name: path.read_text() for path in (DEPLOY / "prometheus" / directory).glob("*.yaml")}

    assert written == module.files()


def test_prometheus_finds_no_error_in_the_rules() -> None:
    output = promtool("check", "rules", *sorted((DEPLOY / "prometheus" / "rules").glob("*.yaml")))

    assert f"{len(ALERTS)} rules found" in output
    assert f"{len(RULES.recordings())} rules found" in output


def test_prometheus_loads_and_evaluates_every_rule(tmp_path: Path) -> None:
    configuration = f"rule_files: [{DEPLOY / 'prometheus' / 'rules'}/*.yaml]\nglobal: {{evaluation_interval: 1s}}\n"
    with servers.prometheus(tmp_path / "data", configuration) as prometheus:
        loaded = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    assert {rule["name"] for rule in loaded} == set(EXPRESSIONS)
    assert {rule.get("lastError", "") for rule in loaded} == {""}
    kept = {rule["name"] for rule in loaded if rule.get("keepFiringFor")}
    assert kept == {alert.alert for alert in ALERTS if alert.keep_firing_for}


@pytest.fixture(scope="module")
def story_results() -> dict[str, str]:
    """What promtool says of each file; two at a time."""
    names = sorted(stories.files())
    with ThreadPoolExecutor(2) as pool:
        run = partial(servers.run_promtool, "test", "rules", cwd=DEPLOY / "prometheus" / "tests")
        return dict(zip(names, pool.map(run, names), strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", sorted(stories.files()))
def test_stories(file: str, story_results: dict[str, str]) -> None:
    assert "SUCCESS" in story_results[file], story_results[file]


# --- expressions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_name_and_label_exists(name: str) -> None:
    recorded = {rule.record for rule in RULES.recordings()}
    found = list(selectors(EXPRESSIONS[name]))

    assert found
    for selector in found:
        if selector.name in recorded:
            assert not selector.matchers.matchers, "recorded series are taken whole"
            continue
        assert {matcher.name for matcher in selector.matchers.matchers} <= labels_of(selector.name)


def test_a_metric_that_the_catalogue_lacks_is_noticed() -> None:
    (selector,) = selectors("rate(eagle_no_such_metric_total[5m])")

    with pytest.raises(KeyError):
        labels_of(selector.name)


@pytest.mark.parametrize("rule", RULES.recordings(), ids=lambda rule: rule.record)
def test_recording_rules_are_named_by_level_metric_and_operations(rule: build.Recording) -> None:
    assert re.fullmatch(r"(server|server_batch|rank|replica|replica_batch):eagle_[a-z_]+:[a-z0-9_]+", rule.record)


def test_no_two_rules_have_one_name() -> None:
    assert len(EXPRESSIONS) == len(RULES.recordings()) + len(ALERTS)


@pytest.mark.parametrize("rule", RULES.recordings(), ids=lambda rule: rule.record)
def test_a_rule_is_one_level_above_what_it_reads(rule: build.Recording) -> None:
    levels = {other.record: other.level for other in RULES.recordings()}

    assert rule.level == 1 + max(levels.get(selector.name, 0) for selector in selectors(rule.expr))


def shape(node: Any) -> Any:
    """An expression as nested tuples, without parentheses: what is computed, however it is written."""
    if isinstance(node, promql_parser.ParenExpr):
        return shape(node.expr)
    if isinstance(node, promql_parser.BinaryExpr):
        matching = None
        if node.modifier is not None:
            labels = node.modifier.matching
            matching = (
                str(node.modifier.card),
                node.modifier.return_bool,
                labels and (str(labels.type), tuple(labels.labels)),
                tuple(node.modifier.group_labels or ()),
            )
        return (str(node.op), matching, shape(node.lhs), shape(node.rhs))
    if isinstance(node, promql_parser.AggregateExpr):
        modifier = node.modifier and (str(node.modifier.type), tuple(node.modifier.labels))
        return (str(node.op), modifier, node.param and shape(node.param), shape(node.expr))
    if isinstance(node, promql_parser.Call):
        return (node.func.name, *(shape(argument) for argument in node.args))
    return node.prettify()


def test_shape_sees_grouping_and_matching() -> None:
    texts = [
        "a - b - c",
        "a - (b - c)",
        "a - on (x) b - c",
        "a - on (y) b - c",
        "sum by (x) (a)",
        "sum (a)",
        "a > b",
        "a > bool b",
    ]

    assert len({shape(promql_parser.parse(text)) for text in texts}) == len(texts)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_line_breaks_change_nothing(name: str) -> None:
    broken = "\n".join(build.lay_out(EXPRESSIONS[name], 60))

    assert shape(promql_parser.parse(broken)) == shape(promql_parser.parse(EXPRESSIONS[name]))


# --- alerts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.alert)
class TestEveryAlert:
    def test_is_ours_and_says_how_bad_it_is(self, alert: build.Alert) -> None:
        assert alert.alert.startswith("Eagle")
        assert alert.severity in ("info", "warning", "critical")
        assert alert.summary.endswith(".")
        assert "{{" not in alert.summary

    def test_names_the_server_and_a_value(self, alert: build.Alert) -> None:
        assert "$labels.server" in alert.description or "$labels.instance" in alert.description
        assert "$value" in alert.description or alert.name in ("RankGone", "ExporterDown")

    def test_has_a_runbook_with_its_sections(self, alert: build.Alert) -> None:
        page = RUNBOOKS / f"{alert.alert}.md"
        text = page.read_text()

        assert alert.annotations["runbook_url"].endswith(f"/deploy/runbooks/{page.name}")
        headings = re.findall(r"^#+ .*$", text, re.MULTILINE)
        assert headings == [f"# {alert.alert}", "## What it means", "## What to look at", "## What to try"]

    def test_fires_in_a_story_and_is_checked_in_quiet_ones(self, alert: build.Alert) -> None:
        files = stories.files()
        firing = f"alertname: {alert.alert}\n        exp_alerts:"

        assert any(firing in text for text in files.values())
        assert files["quiet.test.yaml"].count(f"alertname: {alert.alert}}}") >= 50


def test_there_is_no_runbook_without_an_alert() -> None:
    pages = {page.stem for page in RUNBOOKS.glob("*.md")} - {"README"}

    assert pages == {alert.alert for alert in ALERTS}
    listed = set(re.findall(r"\]\((\w+)\.md\)", (RUNBOOKS / "README.md").read_text()))
    assert listed == pages


def test_runbooks_name_panels_that_exist() -> None:
    text = "\n".join(path.read_text() for path in (DEPLOY.parent / "grafana" / "dashboards").glob("*.json"))
    titles = set(re.findall(r'"title": "([^"]+)"', text))
    named = {
        title
        for page in RUNBOOKS.glob("*.md")
        for line in page.read_text().splitlines()
        if re.match(r"\d\. \*EAGLE", line)
        for title in re.findall(r"\*\*([^*]+)\*\*", line)
    }

    assert named
    # The hardware row is named after what was found there.
    assert named - titles <= {"Hardware"}


# --- the stories can fail -----------------------------------------------------------------------------------


def story(name: str) -> stories.Story:
    """The quiet story whose name begins so."""
    (found,) = [one for one in stories.quiet_stories() if one.name.startswith(name)]
    return found


def alerts_against(changed: stories.Story, tmp_path: Path, settings: build.Settings = build.SHIPPED) -> set[str]:
    """Return the alerts that make a story fail, with other settings."""
    for name, text in build.files(settings).items():
        (tmp_path / name).write_text(text)
    rules = build.Rules(settings)
    file = tmp_path / "story.test.yaml"
    file.write_text(stories.render("A story.", [changed], rules, build.files(settings)))
    done = servers.run_promtool("test", "rules", file)
    return set(re.findall(r"alertname: (Eagle\w+)", done)) if "FAILED" in done else set()


def with_states(one: stories.Story, **changes: Any) -> stories.Story:
    """The same story with something set in all its states."""
    return dataclasses.replace(one, states=tuple(dataclasses.replace(s, **changes) for s in one.states), fires={})


VERIFY = {"EagleVerifyShareDrift", "EagleVerifySlow"}


def test_without_the_comparison_of_context_and_batch_traffic_would_alert(tmp_path: Path) -> None:
    anything = dataclasses.replace(build.SHIPPED, comparable=100.0)

    assert alerts_against(story("sequences grow"), tmp_path, anything) == VERIFY
    assert alerts_against(story("the batch doubles"), tmp_path, anything) == VERIFY


def test_without_a_minimum_of_history_the_first_hours_would_alert(tmp_path: Path) -> None:
    hasty = dataclasses.replace(build.SHIPPED, baseline_samples=20, baseline_offset="5m")

    assert alerts_against(story("the first hours"), tmp_path, hasty) >= VERIFY


def test_the_same_deploy_under_one_config_id_would_alert(tmp_path: Path) -> None:
    one_id = with_states(story("a deploy"), config_id="aaaa0001")

    assert alerts_against(one_id, tmp_path) >= {*VERIFY, "EagleAcceptanceDrift"}


def test_the_same_step_counts_under_one_label_would_alert(tmp_path: Path) -> None:
    adaptive = story("adaptive")
    mixed = dataclasses.replace(
        adaptive,
        states=tuple(
            dataclasses.replace(s, cells=tuple(dataclasses.replace(c, num_steps="3") for c in s.cells))
            for s in adaptive.states
        ),
    )

    assert alerts_against(mixed, tmp_path) >= {"EagleAcceptanceDrift"}


def test_an_impatient_alert_would_not_survive_a_restart(tmp_path: Path) -> None:
    impatient = dataclasses.replace(build.SHIPPED, exporter_down_for="0s")

    assert alerts_against(story("the server restarts"), tmp_path, impatient) == {"EagleExporterDown"}


def test_traffic_that_stops_while_requests_run_would_alert(tmp_path: Path) -> None:
    stuck = with_states(story("traffic stops"), running=6.0)

    assert alerts_against(stuck, tmp_path) == {"EagleNoCyclesWithRunningRequests"}


def test_captured_cycles_that_counted_as_ordinary_ones_would_alert(tmp_path: Path) -> None:
    captured = story("kernels are captured")
    slow = tuple(dataclasses.replace(cell, verify=3 * cell.verify) for cell in stories.State(1).cells)
    counted = dataclasses.replace(
        captured,
        states=tuple(
            dataclasses.replace(s, captured=0.0, cells=slow) if s.captured == 300.0 else s for s in captured.states
        ),
    )

    assert alerts_against(counted, tmp_path) >= VERIFY


@pytest.mark.parametrize(("clock", "hook_family"), [("cuda_event", ""), ("", "v2")])
def test_a_rank_with_as_much_host_time_that_waits_for_nobody_would_alert(
    tmp_path: Path, clock: str, hook_family: str
) -> None:
    waits = with_states(story("the host of a rank waits"), clock=clock, hook_family=hook_family)

    assert alerts_against(waits, tmp_path) == {"EagleRankSkew"}
