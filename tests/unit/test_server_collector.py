"""What a scrape shows of ranks that live, end, come back, and of files that are broken."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from eagle_exporter import catalogue
from eagle_exporter.catalogue import Kind, Source
from eagle_exporter.server.collector import OneRead, RegistryCollector, make_registry
from eagle_exporter.server.view import RETIREMENT_SECONDS, RegistryView
from tests.ranks import RankProcess, write_ended
from tests.tools import find_tool

if TYPE_CHECKING:
    from pathlib import Path

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Clock:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scraper:
    """An exporter without HTTP, its clock in the test's hands."""

    def __init__(self, root: Path) -> None:
        self.clock = Clock()
        self.collector = RegistryCollector(RegistryView(root, clock=self.clock))

    def text(self) -> str:
        return generate_latest(OneRead(self.collector, None)).decode()

    def series(self) -> Series:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in parse_text(self.text())
            for sample in family.samples
        }

    def names(self) -> set[str]:
        return {name for name, labels in self.series() if dict(labels).get("server")}

    def value(self, name: str, **labels: str) -> float | None:
        found = [
            value
            for (sample, pairs), value in self.series().items()
            if sample == name and labels.items() <= dict(pairs).items()
        ]
        assert len(found) <= 1, f"{name}{labels} is not one series"
        return found[0] if found else None


GAUGES = {
    metric.name
    for metric in catalogue.METRICS
    if metric.source is Source.RANK and metric.kind in (Kind.GAUGE, Kind.INFO)
}


def test_a_living_rank_shows_everything_it_wrote(tmp_path: Path) -> None:
    with RankProcess(tmp_path) as process:
        process.set("eagle_kernel_last_capture_timestamp_seconds", 1.7643e9)
        process.cycles(7, accepted=2)
        scraper = Scraper(tmp_path)
        assert scraper.value("eagle_cycles_total") == 7
        assert scraper.value("eagle_accepted_tokens_total") == 14
        assert scraper.value("eagle_rank_up") == 1
        assert scraper.value("eagle_cycle_duration_seconds_count") == 7
        assert scraper.value("eagle_cycle_duration_seconds_sum") == pytest.approx(7 * 0.03024)
        assert scraper.value("eagle_cycle_duration_seconds_bucket", le="+Inf") == 7
        assert scraper.value("eagle_cycle_duration_seconds_bucket", le="0.025") == 0
        assert scraper.value("eagle_accept_length_tokens_bucket", le="3.0") == 7
        assert scraper.names() >= GAUGES
        assert scraper.value("eagle_spec_config_info", config_id="1a2b3c4d") == 1


def test_both_formats_satisfy_promtool_and_the_openmetrics_parser(tmp_path: Path) -> None:
    with RankProcess(tmp_path, {}, {"tp_rank": 1, "recording": False}, {"server": "b:1"}) as process:
        process.cycles(3)
        scraper = Scraper(tmp_path)
        text = scraper.text()
        openmetrics = generate_openmetrics(OneRead(scraper.collector, None)).decode()  # type: ignore[no-untyped-call]
    checked = subprocess.run(
        [find_tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    families = {family.name for family in parse_openmetrics(openmetrics)}  # type: ignore[no-untyped-call]
    assert {"eagle_cycles", "eagle_spec_config", "eagle_cycle_duration_seconds"} <= families
    assert "_created" not in text + openmetrics


def test_ranks_share_one_family_and_its_help_is_the_catalogues(tmp_path: Path) -> None:
    with RankProcess(tmp_path, {}, {"tp_rank": 1, "recording": False}, {"server": "b:1"}):
        text = Scraper(tmp_path).text()
    types = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(types) == len(set(types))
    assert set(types) <= set(catalogue.BY_NAME)
    for name in types:
        assert f"# HELP {name} {catalogue.BY_NAME[name].help}\n" in text
    assert len(re.findall(r"^eagle_cycles_total\{", text, re.MULTILINE)) == 3


def test_gauges_of_an_ended_rank_go_at_once_and_its_counters_after_five_minutes(tmp_path: Path) -> None:
    scraper = Scraper(tmp_path)
    with RankProcess(tmp_path) as process:
        process.cycles(7)
        assert scraper.value("eagle_rank_up") == 1
        process.kill()
        scraper.clock.now += 60  # the rank may have ended at any time since the last scrape
        assert scraper.value("eagle_rank_up") == 0
        assert not GAUGES & scraper.names()
        assert scraper.value("eagle_cycles_total") == 7
        assert scraper.value("eagle_cycle_duration_seconds_count") == 7
    scraper.clock.now += RETIREMENT_SECONDS - 1
    assert scraper.value("eagle_cycles_total") == 7
    scraper.clock.now += 1
    assert scraper.names() == {"eagle_rank_up"}
    scraper.clock.now += 86400
    assert scraper.value("eagle_rank_up") == 0


def test_a_rank_that_had_ended_before_the_exporter_started_gets_the_same_five_minutes(tmp_path: Path) -> None:
    write_ended(tmp_path, cycles=4)
    scraper = Scraper(tmp_path)
    assert scraper.value("eagle_cycles_total") == 4
    assert not GAUGES & scraper.names()
    scraper.clock.now += RETIREMENT_SECONDS
    assert scraper.names() == {"eagle_rank_up"}


def test_a_restarted_rank_begins_at_zero_and_its_two_lives_are_never_added(tmp_path: Path) -> None:
    write_ended(tmp_path, cycles=1000)
    scraper = Scraper(tmp_path)
    assert scraper.value("eagle_cycles_total") == 1000
    scraper.clock.now += RETIREMENT_SECONDS + 1
    assert scraper.names() == {"eagle_rank_up"}
    with RankProcess(tmp_path) as process:
        assert scraper.value("eagle_cycles_total") == 0
        process.cycles(3)
        assert scraper.value("eagle_cycles_total") == 3
        assert scraper.value("eagle_rank_up") == 1
        process.kill()
        # Its five minutes are its own, not what its predecessor left of them.
        assert scraper.value("eagle_cycles_total") == 3
        scraper.clock.now += RETIREMENT_SECONDS - 1
        assert scraper.value("eagle_cycles_total") == 3


def test_nothing_remains_of_a_rank_whose_file_was_removed(tmp_path: Path) -> None:
    write_ended(tmp_path)
    scraper = Scraper(tmp_path)
    assert scraper.names()
    for path in tmp_path.glob("*/*.bin"):
        path.unlink()
    assert not scraper.names()


def test_broken_files_are_counted_by_reason_and_the_others_still_shown(tmp_path: Path) -> None:
    with RankProcess(tmp_path, {}, {"server": "b:1"}) as process:
        process.cycles(2)
        broken = next(tmp_path.glob("b*/*.bin"))
        broken.with_name("tp1-pp0-dp0.bin").write_bytes(b"")
        broken.with_name("tp2-pp0-dp0.bin").write_bytes(b"something else, and longer than a header" * 4)
        broken.with_name("tp3-pp0-dp0.bin").mkdir()
        scraper = Scraper(tmp_path)
        skipped = {
            reason: scraper.value("eagle_registry_files_skipped", reason=reason) for reason in catalogue.SKIPPED_REASONS
        }
        assert skipped == {
            **dict.fromkeys(catalogue.SKIPPED_REASONS, 0),
            "truncated": 1,
            "foreign": 1,
            "not_a_file": 1,
        }
        assert scraper.value("eagle_cycles_total", server="b:1") == 2
        assert scraper.value("eagle_scrape_collector_success", collector="registry") == 1


def test_an_empty_or_missing_root_shows_the_exporter_itself(tmp_path: Path) -> None:
    scraper = Scraper(tmp_path / "missing")
    assert not scraper.names()
    assert scraper.value("eagle_scrape_collector_success") == 1
    assert {name for name, _ in scraper.series()} == {
        "eagle_registry_files_skipped",
        "eagle_scrape_collector_duration_seconds",
        "eagle_scrape_collector_success",
        "eagle_exporter_build_info",
    }


def test_a_root_that_cannot_be_read_is_a_failed_collector_and_not_a_failed_scrape(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("")
    scraper = Scraper(root)
    assert scraper.value("eagle_scrape_collector_success") == 0
    assert scraper.value("eagle_exporter_build_info") == 1


def test_names_select_families_by_family_or_sample_name(tmp_path: Path) -> None:
    with RankProcess(tmp_path):
        scraper = Scraper(tmp_path)

        def families(*names: str) -> set[str]:
            return {family.name for family in scraper.collector.collect(frozenset(names))}

        assert families("eagle_cycles_total") == {"eagle_cycles"}
        assert families("eagle_cycle_duration_seconds_bucket") == {"eagle_cycle_duration_seconds"}
        assert families("eagle_cycle_duration_seconds", "eagle_rank_up") == {
            "eagle_cycle_duration_seconds",
            "eagle_rank_up",
        }
        assert families("up") == set()


def test_the_collector_registers_without_reading_a_file(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("")
    registry = make_registry(RegistryView(root))
    assert b"eagle_exporter_build_info" in generate_latest(registry)
