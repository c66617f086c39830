"""The doctor before the real wheels: which worker serves what, what resolves, and how a server is measured at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_exporter.cli import doctor
from eagle_exporter.cli.doctor import Report
from eagle_exporter.hooks import points
from eagle_exporter.hooks.selection import Configuration
from eagle_exporter.hooks.source import Source
from tests.versions import matrix, wheels

VERSIONS = ("0.5.6", "0.5.10", "0.5.12", "0.5.16", wheels.VERSIONS[-1])
V1 = "sglang.srt.speculative.eagle_worker:EAGLEWorker"


class Installed:
    """Has the doctor see a wheel as the installed SGLang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self._monkeypatch, self._root = monkeypatch, root

    def examine(self, version: str, source: Source | None = None, **environment: str) -> Report:
        """Return what it says."""
        wheel = source or wheels.source(version)
        self._monkeypatch.setattr(Source, "installed", lambda _package: wheel)
        self._monkeypatch.setattr(points, "sglang_version", lambda: version)
        return doctor.examine(environment, root=self._root, url="http://127.0.0.1:9")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Installed:
    """Call ``examine`` on it."""
    return Installed(monkeypatch, tmp_path / "registry")


def text_of(report: Report, check: str) -> str:
    return "\n".join(f"{each.text} -> {each.remedy}" for each in report.findings if each.check == check)


@pytest.mark.parametrize("version", VERSIONS)
def test_it_says_what_the_matrix_says(installed: Installed, version: str) -> None:
    report = installed.examine(version)
    examined = matrix.version(version)
    assert report.status == "ok", report.findings
    default = examined.workers[Configuration()]
    assert default is not None
    assert report.family == examined.families[default]
    found = {(family.name, worker) for family in report.families for worker in family.workers}
    drafting = {(family, worker) for worker, family in examined.families.items() if family != points.GENERIC.name}
    assert found <= drafting
    # All that needs no switch; with it 0.5.6 to 0.5.10 have V2 too.
    assert {family for family, _ in found} == {family for family, _ in drafting}
    for family in report.families:
        assert all(hook.resolves for hook in family.hooks)
        known = (*matrix.BY_NAME[family.name].hooks, *matrix.BY_NAME[family.name].knows)
        assert not set(family.not_in_sglang) & set(known)
    assert version in text_of(report, "sglang")


def test_without_plugins_it_names_launch(installed: Installed) -> None:
    for version in ("0.5.6", "0.5.10"):
        assert "eagle-exporter launch -- " in text_of(installed.examine(version), "plugin")
    assert "would be loaded" in text_of(installed.examine("0.5.12"), "plugin")
    assert "launch" not in text_of(installed.examine("0.5.12"), "plugin")


def test_it_says_which_worker_serves_which_configuration(installed: Installed) -> None:
    said = text_of(installed.examine("0.5.12"), "hooks").splitlines()
    assert "v2-0.5.6 (EAGLEWorkerV2, StandaloneWorkerV2) serves EAGLE3; STANDALONE: all 1" in said[0]
    assert "v1 (EAGLEWorker) serves EAGLE3 (top-k 2); EAGLE3 (overlap off): all 1" in said[1]
    assert any("not in this SGLang: draft_step, draft_graph" in line for line in said if "multi-layer" in line)
    switched = installed.examine("0.5.12", SGLANG_ENABLE_SPEC_V2="0")
    assert switched.family == "v1"
    assert installed.examine("0.5.10").family == "v1"
    assert installed.examine("0.5.10", SGLANG_ENABLE_SPEC_V2="true").family == "v2-0.5.6"


@pytest.mark.parametrize(
    ("version", "function", "status"),
    [
        ("0.5.10", f"{V1}.forward_batch_generation", "broken"),
        # Not what EAGLE-3 gets by default.
        ("0.5.12", f"{V1}.forward_batch_generation", "degraded"),
        ("0.5.12", f"{V1}.forward_draft_extend_after_decode", "degraded"),
    ],
)
def test_what_is_gone_of_one_worker_is_told_for_that_one(
    installed: Installed, version: str, function: str, status: str
) -> None:
    report = installed.examine(version, matrix.renamed(wheels.source(version), function))
    assert report.status == status
    for family in report.families:
        down = [hook.target for hook in family.hooks if not hook.resolves]
        assert down == ([function] if family.name == "v1" else [])
    (finding,) = [each for each in report.findings if "cannot be attached" in each.text]
    assert finding.text.startswith("v1 (EAGLEWorker")


def test_a_worker_of_tomorrow_is_told(installed: Installed) -> None:
    newest = wheels.VERSIONS[-1]
    wheel = wheels.source(newest)
    path = "sglang/srt/speculative/spec_info.py"
    text = wheel.text(path) or b""
    tomorrow = wheel.changed({path: text.replace(b"EAGLEWorkerV2", b"EAGLEWorkerV3")})
    report = installed.examine(newest, tomorrow)
    assert report.status == "degraded"
    assert report.families[0].name == points.GENERIC.name
    assert "generic (EAGLEWorkerV3) serves EAGLE3; " in text_of(report, "hooks")
    assert "of no known family" in text_of(report, "hooks")


def test_where_the_choice_cannot_be_read_the_workers_that_are_there_are_shown(installed: Installed) -> None:
    newest = wheels.VERSIONS[-1]
    create = points.CREATE_WORKER[0]
    report = installed.examine(newest, matrix.renamed(wheels.source(newest), create))
    assert report.status == "ok"
    assert [family.name for family in report.families] == list(matrix.version(newest).present)
    assert all(family.serves == () for family in report.families)
