from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.commands import venv_program
from tests.prometheus.servers import promtool
from tests.tools import ROOT

SCRAPE = sorted((ROOT / "deploy" / "prometheus").glob("scrape*.yml"))
CONFIGURATIONS = [*SCRAPE, ROOT / "deploy" / "compose" / "prometheus.yml"]


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return {job["job_name"]: job for job in yaml.safe_load(path.read_text())["scrape_configs"]}


def node_of(job: dict[str, Any]) -> Any:
    """Return what gives the targets of a job their ``node`` label."""
    rules = [rule for rule in job.get("relabel_configs", []) if rule.get("target_label") == "node"]
    return rules or [group["labels"]["node"] for group in job["static_configs"]]


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.name)
def test_promtool_accepts_it(path: Path, tmp_path: Path) -> None:
    """Debian's Prometheus is built without the Kubernetes discovery; that part is checked without it."""
    text = path.read_text()
    text = re.sub(r"kubernetes_sd_configs:\n +- role: pod\n", "static_configs: []\n", text)
    file = tmp_path / "prometheus.yml"
    file.write_text(text)
    shutil.copytree(ROOT / "deploy/prometheus/rules", tmp_path / "rules")
    (tmp_path / "targets").mkdir()
    for name in ("eagle-exporter-1", "sglang-1"):
        (tmp_path / "targets" / f"{name}.yml").write_text("- targets: [node-a:1]\n  labels: {cluster: berlin}\n")
    said = promtool("check", "config", file)
    assert "2 rule files found" in said
    assert "WARNING" not in said


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.name)
def test_both_jobs_have_the_same_node_label(path: Path) -> None:
    found = jobs(path)
    assert {"eagle-exporter", "sglang"} <= set(found)
    assert node_of(found["eagle-exporter"])
    assert node_of(found["eagle-exporter"]) == node_of(found["sglang"])


def test_what_is_sent_on_is_what_the_fleet_looks_at() -> None:
    path = ROOT / "deploy" / "prometheus" / "scrape-file-sd.yml"
    (remote,) = yaml.safe_load(path.read_text())["remote_write"]
    (rule,) = remote["write_relabel_configs"]
    assert rule["action"] == "keep"
    kept = re.compile(rule["regex"])
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules/eagle-recording.rules.yaml").read_text())
    recorded = {each["record"] for group in rules["groups"] for each in group["rules"]}
    assert {name for name in recorded if not kept.fullmatch(name)} == set()
    assert kept.fullmatch("up")
    assert not kept.fullmatch("eagle_phase_duration_seconds_bucket")
    assert not kept.fullmatch("sglang:num_running_reqs")


@pytest.mark.parametrize("folder", ["compose", "kubernetes", "prometheus", "alertmanager"])
def test_yamllint_has_nothing_to_say(folder: str) -> None:
    rules = (
        "{extends: default, rules: {document-start: disable, line-length: disable, comments-indentation: disable,"
        " braces: disable, comments: {min-spaces-from-content: 1}, indentation: {indent-sequences: consistent},"
        " new-lines: disable}, ignore: ['*.test.yaml', '*.rules.yaml']}"
    )
    done = subprocess.run(
        [venv_program("yamllint"), "--strict", "-d", rules, ROOT / "deploy" / folder], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
