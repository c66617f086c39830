"""Plugin and sidecar are images of their own: one may be a minor version ahead of the other."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eagle_exporter.cli import doctor
from tests.ranks import RankProcess
from tests.service.exporter import Exporter
from tests.tools import ROOT

FUTURE = 'Metric("eagle_future_total", Kind.COUNTER, "A metric of the next version."),'


def other_version(folder: Path, *, newer: bool) -> Path:
    """Write this package as it may be in the next minor version, or was in the one before; returns its parent."""
    copy = folder / "eagle_exporter"
    shutil.copytree(ROOT / "eagle_exporter", copy, ignore=shutil.ignore_patterns("demo", "__pycache__"))
    catalogue = copy / "catalogue.py"
    text = catalogue.read_text()
    text = re.sub(r'CATALOGUE_VERSION = ".*"', f'CATALOGUE_VERSION = "{"1.9" if newer else "0.9"}"', text)
    if newer:
        text = text.replace("METRICS: tuple[Metric, ...] = (", f"METRICS: tuple[Metric, ...] = (\n    {FUTURE}", 1)
    else:
        text, count = re.subn(
            r"    Metric\(\n        \"eagle_wasted_rows_total\",.*?\n    \),\n", "", text, flags=re.DOTALL
        )
        assert count == 1
    catalogue.write_text(text)
    return folder


@contextmanager
def rank_of(package: Path, root: Path) -> Iterator[None]:
    """Hold a rank that the other version writes."""
    command = [sys.executable, str(ROOT / "tests" / "ranks.py"), str(root), json.dumps([{}])]
    environment = {**os.environ, "PYTHONPATH": f"{package}:{ROOT}"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        process.stdin.write(json.dumps({"do": "cycles", "rank": None, "count": 9}) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        try:
            yield
        finally:
            process.kill()


@pytest.mark.parametrize(("newer", "version"), [(True, "1.9"), (False, "0.9")])
def test_an_exporter_serves_what_it_shares_with_another_plugin(tmp_path: Path, newer: bool, version: str) -> None:
    root = tmp_path / "registry"
    with rank_of(other_version(tmp_path, newer=newer), root), Exporter(root) as exporter:
        text = exporter.get("/metrics").text
        report = doctor.examine({}, root=root, url=f"http://127.0.0.1:{exporter.port}")
    assert re.search(r"^eagle_cycles_total\{.*\} 9\.0$", text, re.MULTILINE)
    assert "eagle_registry_files_skipped{" not in text or not re.search(
        r"^eagle_registry_files_skipped\{.*\} [1-9]", text, re.MULTILINE
    )
    assert "eagle_future_total" not in text
    assert ("eagle_wasted_rows_total{" in text) == newer
    assert report.status == "ok"
    assert any(f"its plugin has metric catalogue {version}" in each.text for each in report.findings)


@pytest.mark.parametrize(("newer", "version"), [(True, "1.9"), (False, "0.9")])
def test_another_exporter_serves_what_it_shares_with_this_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: bool, version: str
) -> None:
    root = tmp_path / "registry"
    package = other_version(tmp_path, newer=newer)
    with RankProcess(root) as ranks:
        ranks.cycles(9)
        monkeypatch.chdir(package)  # where python -m looks first
        with Exporter(root, variables={"PYTHONPATH": str(package)}) as exporter:
            text = exporter.get("/metrics").text
            report = doctor.examine({}, root=root, url=f"http://127.0.0.1:{exporter.port}")
    assert re.search(rf'^eagle_exporter_build_info\{{.*catalogue_version="{re.escape(version)}"', text, re.MULTILINE)
    assert re.search(r"^eagle_cycles_total\{.*\} 9\.0$", text, re.MULTILINE)
    assert ("eagle_wasted_rows_total{" in text) == newer
    assert report.status == "ok"
    assert any(f"the exporter has metric catalogue {version}" in each.text for each in report.findings)
