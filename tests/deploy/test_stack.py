"""What the compose file would run, run here: its configurations, real servers, and an exporter that may only read."""

from __future__ import annotations

import re
import shutil
import stat
from typing import TYPE_CHECKING

from tests.folders import open_folder
from tests.prometheus.servers import alertmanager, prometheus
from tests.ranks import RankProcess
from tests.service.exporter import Exporter, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

USER = 10077
"""User and group of the image."""


def test_the_stack_of_the_compose_file(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_EXPORTER_GROUP", str(USER))
    compose = written / "deploy" / "compose"
    with open_folder() as folder:
        # As the volume of the compose file: it belongs to root, and everybody may enter.
        root = folder / "registry"
        root.mkdir(mode=0o755)
        with (
            RankProcess(root, {"server": "sglang"}) as ranks,
            Exporter(root, user=USER) as exporter,
            alertmanager(tmp_path, (written / "deploy/alertmanager/alertmanager.yaml").read_text()) as alerts,
        ):
            directory = root / "sglang"
            assert stat.S_IMODE(directory.stat().st_mode) == 0o2750
            assert directory.stat().st_gid == USER
            ranks.cycles(10)
            text = (compose / "prometheus.yml").read_text()
            text = text.replace("scrape_interval: 15s", "scrape_interval: 1s")
            text = text.replace("evaluation_interval: 15s", "evaluation_interval: 1s")
            text = text.replace("exporter:10077", f"127.0.0.1:{exporter.port}")
            text = text.replace("alertmanager:9093", alerts.removeprefix("http://"))
            text = text.replace("sglang:30000", "127.0.0.1:9")
            shutil.copytree(written / "deploy/prometheus/rules", tmp_path / "rules")
            with prometheus(tmp_path / "data", text) as server:
                wait_for(lambda: server.query("eagle_cycles_total"), what="the first scrape")
                ranks.cycles(5)
                wait_for(lambda: server.query("eagle_cycles_total == 15"), what="the next scrape")
                (series,) = server.query("eagle_cycles_total")
                assert series["metric"]["job"] == "eagle-exporter"
                assert series["metric"]["node"] == "localhost"
                assert series["metric"]["server"] == "sglang"
                (up,) = server.query('up{job="sglang"}')
                assert up["metric"]["node"] == "localhost"
                assert len(server.get("rules")["groups"]) >= 5
                found = [each["url"] for each in server.get("alertmanagers")["activeAlertmanagers"]]
                assert found == [f"{alerts}/api/v2/alerts"]
            # Read access is all it has, and all it needs.
            before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
            exporter.get("/metrics")
            assert set(before) == set(root.rglob("*"))
            assert re.search(r"^eagle_rank_up\{.*\} 1\.0$", exporter.get("/metrics").text, re.MULTILINE)


def test_another_user_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above means something only if the group is what lets the exporter in."""
    monkeypatch.setenv("EAGLE_EXPORTER_GROUP", str(USER))
    with open_folder() as folder:
        root = folder / "registry"
        root.mkdir(mode=0o755)
        with RankProcess(root, {"server": "sglang"}), Exporter(root, user=USER + 1) as exporter:
            text = exporter.get("/metrics").text
            assert "eagle_rank_up{" not in text
            assert 'eagle_registry_files_skipped{reason="unreadable"} 1.0' in text


def test_a_server_over_two_nodes_counts_acceptance_once(tmp_path: Path) -> None:
    """Each node has its own exporter; the server has one name, and its recording rank is on one of the nodes."""
    nodes = [tmp_path / name / "registry" for name in ("node-a", "node-b")]
    for root in nodes:
        root.parent.mkdir()
    ranks = [{"server": "10.0.0.1:5000", "tp_rank": rank, "recording": rank == 0} for rank in range(4)]
    with (
        RankProcess(nodes[0], *ranks[:2]) as first,
        RankProcess(nodes[1], *ranks[2:]) as second,
        Exporter(nodes[0]) as exporter_a,
        Exporter(nodes[1]) as exporter_b,
    ):
        first.cycles(5)
        second.cycles(5)
        configuration = f"""
scrape_configs:
  - job_name: eagle-exporter
    scrape_interval: 1s
    static_configs:
      - targets: ["127.0.0.1:{exporter_a.port}", "127.0.0.1:{exporter_b.port}"]
"""
        with prometheus(tmp_path / "data", configuration) as server:
            wait_for(lambda: server.query("count(eagle_rank_up) == 4"), what="all ranks")

            def only(expression: str) -> tuple[dict[str, str], float]:
                (series,) = server.query(expression)
                return series["metric"], float(series["value"][1])

            assert only("count by (server) (eagle_rank_up == 1)") == ({"server": "10.0.0.1:5000"}, 4)
            assert only("sum by (server) (eagle_drafts_total)") == ({"server": "10.0.0.1:5000"}, 5)
            assert only("sum by (server) (eagle_cycles_total)") == ({"server": "10.0.0.1:5000"}, 20)
