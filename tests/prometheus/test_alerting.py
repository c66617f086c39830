"""``for`` and ``keep_firing_for`` as the simulation applies them, and the configuration of Alertmanager."""

from __future__ import annotations

import json
import random
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from deploy.prometheus import build
from tests.prometheus import alerting, servers
from tests.tools import ROOT, find_tool

DEPLOY = ROOT / "deploy"

MINUTES = 90
ALERTMANAGER = DEPLOY / "alertmanager" / "alertmanager.yaml"


@pytest.mark.parametrize("seed", range(6))
def test_firings_are_those_of_prometheus(seed: int, tmp_path: Path) -> None:
    """Every minute of a random condition, with random patience, as promtool sees it."""
    choose = random.Random(seed)
    wait, keep = choose.choice([0, 1, 3]), choose.choice([0, 2, 5])
    active: list[bool] = []
    while len(active) < MINUTES:
        active += [choose.random() < 0.5] * choose.choice([1, 2, 4, 7])
    del active[MINUTES:]
    found = alerting.firings(
        [60.0 * minute for minute, on in enumerate(active) if on],
        [60.0 * minute for minute in range(MINUTES)],
        for_seconds=60.0 * wait,
        keep_firing_seconds=60.0 * keep,
    )
    fires = {minute for one in found for minute in range(int(one.start / 60), int(one.end / 60) + 1)}
    assert fires

    patience = (f"for: {wait}m, " if wait else "") + (f"keep_firing_for: {keep}m, " if keep else "")
    (tmp_path / "rules.yaml").write_text(f"groups: [{{name: g, rules: [{{alert: A, {patience}expr: x == 1}}]}}]\n")
    checks = "\n".join(
        f"      - {{eval_time: {minute}m, alertname: A"
        + (", exp_alerts: [{exp_labels: {}}]}" if minute in fires else "}")
        for minute in range(MINUTES)
    )
    (tmp_path / "test.yaml").write_text(
        "rule_files: [rules.yaml]\nevaluation_interval: 1m\ntests:\n"
        f"  - interval: 1m\n    input_series: [{{series: x, values: '{' '.join(str(int(on)) for on in active)}'}}]\n"
        f"    alert_rule_test:\n{checks}\n"
    )
    assert "SUCCESS" in servers.promtool("test", "rules", "test.yaml", cwd=tmp_path)


def amtool(*arguments: str) -> str:
    done = subprocess.run([find_tool("amtool"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_is_valid() -> None:
    assert "SUCCESS" in amtool("check-config", str(ALERTMANAGER))


@pytest.mark.parametrize("alert", build.Rules().all_alerts(), ids=lambda alert: alert.alert)
def test_alerts_are_routed_by_severity(alert: build.Alert) -> None:
    receiver = amtool(
        *("config", "routes", "test", f"--config.file={ALERTMANAGER}"),
        *(f"alertname={alert.alert}", f"severity={alert.severity}", "server=a"),
    )

    assert receiver.strip() == {"critical": "on-call", "warning": "team", "info": "log"}[alert.severity]


def test_inhibitions(tmp_path: Path) -> None:
    """What a running Alertmanager makes of alerts that fire together."""
    alerts = [
        {"alertname": "EagleExporterDown", "server": "a", "instance": "a:10077"},
        {"alertname": "EagleExporterDown", "instance": "new:10077"},
        {"alertname": "EagleVerifySlow", "server": "a", "config_id": "1"},
        {"alertname": "EagleRankGone", "server": "a"},
        {"alertname": "EagleScrapeSlow", "instance": "b:10077"},
        {"alertname": "EagleVerifySlow", "server": "b", "config_id": "1"},
        {"alertname": "EagleVerifyShareDrift", "server": "b", "config_id": "1"},
        {"alertname": "EagleVerifyShareDrift", "server": "b", "config_id": "2"},
        {"alertname": "EagleRankGone", "server": "c"},
        {"alertname": "EagleNoCyclesWithRunningRequests", "server": "c"},
        {"alertname": "EagleAcceptanceCollapsed", "server": "d"},
        {"alertname": "EagleAcceptanceDrift", "server": "d", "config_id": "1"},
        {"alertname": "OfAnotherExporter", "server": "a"},
    ]
    with servers.alertmanager(tmp_path, ALERTMANAGER.read_text()) as url:
        request = urllib.request.Request(f"{url}/api/v2/alerts", json.dumps([{"labels": a} for a in alerts]).encode())
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request, timeout=10).close()
        inhibited: set[tuple[str, ...]] = set()
        deadline = time.monotonic() + 20
        # Inhibition is worked out when an alert is about to be notified, after the group's wait.
        while len(inhibited) < 5 and time.monotonic() < deadline:
            time.sleep(0.2)
            with urllib.request.urlopen(f"{url}/api/v2/alerts", timeout=10) as answer:
                inhibited = {
                    tuple(sorted(alert["labels"].values()))
                    for alert in json.load(answer)
                    if alert["status"]["inhibitedBy"]
                }

    assert inhibited == {
        tuple(sorted(labels.values())) for labels in (alerts[2], alerts[3], alerts[6], alerts[9], alerts[11])
    }
