"""What the plugin does to SGLang: nothing. And where it must stay away, it does.

Two ranks (tensor parallel 2), SGLang's own metrics, the exporter that the plugin starts, a real Prometheus.
"""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eagle_exporter import catalogue
from eagle_exporter.demo import answers
from eagle_exporter.demo.sglang_server import SGLangServer, free_port
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader
from tests.prometheus.servers import Prometheus, prometheus
from tests.service.exporter import wait_for
from tests.sglang.measured import (
    ALONE,
    TOGETHER,
    Configuration,
    expect,
    numbers,
    send_alone,
    send_together,
    start,
)
from tests.tools import find_tool

CONFIGURATION = Configuration()
TOKENS = [answers.expected_tokens(prompt, count) for prompt, count in (*ALONE, *TOGETHER)]


def served_tokens(server: SGLangServer) -> list[list[int]]:
    """Send everything; return the tokens of each request."""
    return [answer["output_ids"] for answer in (*send_alone(server), *send_together(server))]


def series_names(text: str) -> set[tuple[str, tuple[str, ...]]]:
    """Return name and label names of every series in an exposition."""
    return {
        (sample.name, tuple(sorted(sample.labels)))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def fetch(url: str) -> str:
    """GET a page."""
    with urllib.request.urlopen(url, timeout=30) as response:
        content: bytes = response.read()
    return content.decode()


@dataclass
class Plain:
    """What a server without the plugin served, and its own metrics."""

    tokens: list[list[int]]
    metrics: str


@pytest.fixture(scope="module")
def plain(models: Path, sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """The same server as below, started and stopped before it, without the plugin."""
    directory = tmp_path_factory.mktemp("plain")
    only_others = {"SGLANG_PLUGINS": "none-of-them"}
    with start(
        models,
        sglang_python,
        CONFIGURATION,
        directory,
        environment=only_others,
        enable_metrics=True,
        tensor_parallel=2,
    ) as server:
        tokens = served_tokens(server)
        metrics = fetch(f"{server.url}/metrics")
    assert not (directory / "registry").exists(), "the plugin was loaded"
    return Plain(tokens, metrics)


@dataclass
class Embedded:
    """A measured server with two ranks and the exporter that its plugin started."""

    server: SGLangServer
    root: Path
    port: int
    tokens: list[list[int]]
    sglang_metrics: str

    @property
    def url(self) -> str:
        """The exporter."""
        return f"http://127.0.0.1:{self.port}"

    def ranks(self) -> tuple[RankSnapshot, RankSnapshot]:
        """The leader and the other rank."""
        leader, other = RegistryReader(self.root).read().ranks
        return leader, other


@pytest.fixture(scope="module")
def embedded(
    plain: Plain, models: Path, sglang_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Embedded]:
    directory = tmp_path_factory.mktemp("embedded")
    port = free_port()
    server = start(
        models,
        sglang_python,
        CONFIGURATION,
        directory,
        environment={"EAGLE_EXPORTER_EMBED": "1", "EAGLE_EXPORTER_LISTEN": f"127.0.0.1:{port}"},
        enable_metrics=True,
        tensor_parallel=2,
    )
    with server:
        tokens = served_tokens(server)
        metrics = fetch(f"{server.url}/metrics")
        made = Embedded(server, directory / "registry", port, tokens, metrics)
        drafts = expect([*ALONE, *TOGETHER], CONFIGURATION).drafts
        wait_for(lambda: made.ranks()[0].value("eagle_drafts_total") == drafts, what="the last commit")
        yield made


# --- nothing changes -------------------------------------------------------------------------------------
def test_the_served_tokens_are_the_same_with_and_without_the_plugin(plain: Plain, embedded: Embedded) -> None:
    assert plain.tokens == embedded.tokens == TOKENS


def test_sglangs_own_metrics_are_complete_with_the_plugin(plain: Plain, embedded: Embedded) -> None:
    without, with_plugin = series_names(plain.metrics), series_names(embedded.sglang_metrics)
    assert with_plugin == without
    assert any(name.startswith("sglang:spec_accept") for name, _ in without)
    assert len(without) > 50


def test_none_of_our_metrics_are_among_sglangs(embedded: Embedded) -> None:
    assert "eagle_" not in embedded.sglang_metrics


# --- two ranks -------------------------------------------------------------------------------------------
def test_one_rank_of_two_counts_what_was_accepted(embedded: Embedded) -> None:
    leader, other = embedded.ranks()
    assert (leader.labels["tp_rank"], other.labels["tp_rank"]) == ("0", "1")
    expected = expect([*ALONE, *TOGETHER], CONFIGURATION)
    assert leader.value("eagle_accepted_tokens_total") == expected.accepted
    assert leader.value("eagle_output_tokens_total") == expected.output
    names = {family.name for family in other.families}
    assert not names & {metric.name for metric in catalogue.METRICS if metric.acceptance}


def test_both_ranks_count_and_time_the_same_cycles(embedded: Embedded) -> None:
    leader, other = embedded.ranks()
    for name in ("eagle_batch_cycles_total", "eagle_batch_timed_cycles_total"):
        mine = {key: value for key, value in numbers(leader).items() if key[0] == name}
        theirs = {key: value for key, value in numbers(other).items() if key[0] == name}
        assert mine == theirs
    for rank in (leader, other):
        cycles = rank.value("eagle_cycles_total")
        assert cycles
        phases = [key for key in numbers(rank) if key[0] == "eagle_batch_phase_seconds_total"]
        assert sum(numbers(rank)[key][0] for key in phases) > 0
        assert sum(numbers(rank)[key][0] for key in numbers(rank) if key[0] == "eagle_hook_errors_total") == 0


def test_the_other_rank_has_no_histogram(embedded: Embedded) -> None:
    leader, other = embedded.ranks()
    assert [family.name for family in other.families if family.kind == "histogram"] == []
    assert [family.name for family in leader.families if family.kind == "histogram"] != []


# --- the exporter ----------------------------------------------------------------------------------------
def own_metrics(embedded: Embedded) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(fetch(f"{embedded.url}/metrics"))
        for sample in family.samples
    }


def test_the_exporter_beside_the_server_shows_what_the_scheduler_counted(embedded: Embedded) -> None:
    shown = own_metrics(embedded)
    leader, other = embedded.ranks()
    for rank in (leader, other):
        for family in rank.families:
            if family.kind == "histogram" or family.name == "eagle_hook_host_seconds_total":
                continue
            for series in family.series:
                labels = {**rank.labels, **dict(zip(family.labels, series.labels, strict=True))}
                assert shown[family.name, tuple(sorted(labels.items()))] == series.value
        assert shown["eagle_rank_up", tuple(sorted(rank.labels.items()))] == 1
    common = tuple(sorted(leader.labels.items()))
    assert shown["eagle_cycle_duration_seconds_count", common] == leader.value("eagle_cycles_total")


def test_all_six_phases_are_shown(embedded: Embedded) -> None:
    shown = own_metrics(embedded)
    for phase in catalogue.PHASES:
        counts = [
            value
            for (name, labels), value in shown.items()
            if name == "eagle_phase_duration_seconds_sum" and ("phase", phase) in labels
        ]
        assert len(counts) == 1
        assert counts[0] > 0


def test_promtool_has_nothing_to_say(embedded: Embedded) -> None:
    done = subprocess.run(
        [find_tool("promtool"), "check", "metrics"],
        input=fetch(f"{embedded.url}/metrics"),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def only_value(server: Prometheus, expression: str) -> str | None:
    found: list[Any] = server.query(expression)
    return str(found[0]["value"][1]) if len(found) == 1 else None


def test_a_real_prometheus_scrapes_it(embedded: Embedded, tmp_path: Path) -> None:
    configuration = f"""\
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: eagle
    static_configs: [{{targets: ["127.0.0.1:{embedded.port}"]}}]
"""
    expected = expect([*ALONE, *TOGETHER], CONFIGURATION)
    with prometheus(tmp_path / "data", configuration) as server:
        wait_for(lambda: only_value(server, "up") == "1", what="the first scrape")
        assert only_value(server, "eagle_drafts_total") == str(expected.drafts)
        assert only_value(server, "sum(eagle_accepted_tokens_per_pos_total)") == str(expected.accepted)
        assert len(server.query("eagle_rank_up == 1")) == 2
        assert len(server.query("eagle_spec_config_info")) == 2


def test_the_exporter_ends_with_its_server(embedded: Embedded) -> None:
    """The last test of this server."""
    assert fetch(f"{embedded.url}/-/healthy")
    embedded.server.stop()
    leader, other = embedded.ranks()
    assert not leader.alive
    assert not other.alive

    def is_gone() -> bool:
        try:
            fetch(f"{embedded.url}/-/healthy")
        except OSError:
            return True
        return False

    wait_for(is_gone, 30, "the end of the exporter")
