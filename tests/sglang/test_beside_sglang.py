"""What the plugin does to SGLang: nothing. And where it must stay away, it does.

Two ranks (tensor parallel 2), SGLang's own metrics, the exporter that the plugin starts, a real Prometheus. At the end
one rank's host is made slow: what each rank's series show of it, and what the rules make of that.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.prometheus import build
from eagle_exporter import catalogue
from eagle_exporter.demo import answers
from eagle_exporter.demo.sglang_server import SGLangServer, free_port
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader
from grafana import queries
from tests.prometheus.servers import Prometheus, prometheus
from tests.service.exporter import wait_for
from tests.sglang.measured import (
    ALONE,
    TOGETHER,
    Difference,
    expect,
    numbers,
    prompt,
    send_alone,
    send_together,
    start,
)
from tests.sglang.runs import TENSOR_PARALLEL
from tests.tools import find_tool

CONFIGURATION = TENSOR_PARALLEL.configuration
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
        tensor_parallel=TENSOR_PARALLEL.tensor_parallel,
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
    fault: Path
    """What `slow_rank_plugin` reads."""

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
    fault = directory / "fault"
    server = start(
        models,
        sglang_python,
        CONFIGURATION,
        directory,
        environment={
            "EAGLE_EXPORTER_EMBED": "1",
            "EAGLE_EXPORTER_LISTEN": f"127.0.0.1:{port}",
            "EAGLE_SLOW_RANK": str(fault),
        },
        enable_metrics=True,
        tensor_parallel=TENSOR_PARALLEL.tensor_parallel,
        plugin_path=[Path(__file__).parent / "slow_rank_plugin"],
    )
    with server:
        tokens = served_tokens(server)
        metrics = fetch(f"{server.url}/metrics")
        made = Embedded(server, directory / "registry", port, tokens, metrics, fault)
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


# --- a capture of one rank -------------------------------------------------------------------------------
def test_a_capture_of_one_rank_is_left_out_of_the_times_of_both(embedded: Embedded) -> None:
    """It stalls the group, so neither rank times the cycles from the request until two after the stop."""
    before = embedded.ranks()
    finished = threading.Event()

    def serve() -> None:
        while not finished.is_set():
            send_together(embedded.server, TOGETHER[:2])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        asked = ["profile", "--dir", str(embedded.root), "--rank", "1", "--cycles", "3", "--json"]
        done = subprocess.run([sys.executable, "-m", "eagle_exporter", *asked], capture_output=True, text=True)
    finally:
        finished.set()
        thread.join()
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["rank"], result["cycles"]) == ("tp1-pp0-dp0", 3)
    collective = sum(part["classes"].get("allreduce_custom", 0.0) for part in result["phases"].values())
    assert collective > 0, "the ranks add up their parts"

    def settled() -> bool:
        leader, other = embedded.ranks()
        equal = leader.value("eagle_cycles_total") == other.value("eagle_cycles_total")
        return equal and other.value("eagle_kernel_captures_total", "completed") == 1

    wait_for(settled, seconds=60, what="the last commit of both ranks")
    counted = [Difference(*pair) for pair in zip(before, embedded.ranks(), strict=True)]
    for rank in counted:
        left_out = rank("eagle_cycles_excluded_total", "profiled")
        assert left_out >= 3
        assert rank.total("eagle_batch_timed_cycles_total") == rank("eagle_cycles_total") - left_out
    assert counted[0]("eagle_kernel_profiled_cycles_total") == 0
    assert counted[1]("eagle_kernel_profiled_cycles_total") == 3
    (shown,) = json.loads(fetch(f"{embedded.url}/api/v1/kernels"))["ranks"]
    assert (shown["tp_rank"], shown["capture"]["id"]) == ("1", result["id"])


# --- one rank has a slow host ----------------------------------------------------------------------------
SLOW_SECONDS = 0.15
"""The planted sleep of each cycle: far above what a busy machine adds to a phase."""


@contextlib.contextmanager
def slow_rank(embedded: Embedded, rank: int, place: str) -> Iterator[None]:
    """Let the host of one rank sleep in every cycle, see `slow_rank_plugin`."""
    temporary = embedded.fault.with_suffix(".new")
    temporary.write_text(json.dumps({"rank": rank, "place": place, "seconds": SLOW_SECONDS}))
    temporary.rename(embedded.fault)
    try:
        yield
    finally:
        embedded.fault.unlink()


@dataclass
class PerCycle:
    """What one rank's series gained per timed cycle, in seconds."""

    phases: dict[str, float]
    host: dict[str, float]
    gap: float


def measured_by_rank(embedded: Embedded) -> list[PerCycle]:
    """Serve one request; return what both ranks show of it, in the order of their numbers."""
    before = embedded.ranks()
    embedded.server.generate([prompt(5, 20)], 24)
    cycles = len(answers.expected_accept_lengths(prompt(5, 20), 24, num_steps=3, topk=1, num_draft_tokens=4))
    after = before

    def settled() -> bool:
        nonlocal after
        after = embedded.ranks()
        return all(Difference(old, new)("eagle_cycles_total") == cycles for old, new in zip(before, after, strict=True))

    wait_for(settled, what="the last commit")
    found = []
    for old, new in zip(before, after, strict=True):
        gained = Difference(old, new)
        timed = gained.total("eagle_batch_timed_cycles_total")
        assert timed == cycles

        def phase(name: str, phase: str, gained: Difference = gained, timed: float = timed) -> float:
            return gained.total(name, lambda labels: phase in labels) / timed

        found.append(
            PerCycle(
                {p: phase("eagle_batch_phase_seconds_total", p) for p in catalogue.PHASES},
                {p: phase("eagle_phase_host_seconds_total", p) for p in catalogue.PHASES},
                gained.total("eagle_batch_gap_seconds_total") / timed,
            )
        )
    return found


@pytest.mark.parametrize("slow", [1, 0])
def test_a_slow_host_inside_the_cycle_is_named_by_its_phase_and_the_other_rank_waits_in_the_draft(
    embedded: Embedded, slow: int
) -> None:
    """The draft has the first collective of a cycle."""
    with slow_rank(embedded, slow, "in_cycle"):
        ranks = measured_by_rank(embedded)
    named, waiting = ranks[slow], ranks[1 - slow]
    assert named.host["kv_cache"] > 0.9 * SLOW_SECONDS
    assert waiting.host["kv_cache"] < 0.3 * SLOW_SECONDS
    assert waiting.phases["draft_steps"] - named.phases["draft_steps"] > 0.6 * SLOW_SECONDS
    # On the CPU the host itself waits: as much host time on both, which is why nobody is named by their sum.
    assert sum(waiting.host.values()) == pytest.approx(sum(named.host.values()), abs=0.4 * SLOW_SECONDS)


def test_a_slow_host_over_results_is_in_the_gap_of_all_ranks(embedded: Embedded) -> None:
    """The schedulers meet where requests are handed round, before the next cycle."""
    with slow_rank(embedded, 1, "result"):
        ranks = measured_by_rank(embedded)
    assert all(rank.gap > 0.8 * SLOW_SECONDS for rank in ranks)
    assert all(
        rank.phases["draft_steps"] < ranks[1 - number].phases["draft_steps"] + 0.4 * SLOW_SECONDS
        for number, rank in enumerate(ranks)
    )


RULES = build.Settings(
    window="5s",
    interval="1s",
    baseline_interval="1m",
    smoothing="3s",
    smoothing_samples=2,
    skew_for="2s",
    drift_keep_firing="2s",
)
"""The shipped rules with minutes as seconds."""


def test_the_rules_name_a_rank_whose_host_is_slow_before_the_cycle_and_no_other(
    embedded: Embedded, tmp_path: Path
) -> None:
    """Its own gap grows; the other rank waits, with its host, in the draft, and must not be told for that."""
    rules = build.Rules(RULES)
    for name, text in build.files(RULES).items():
        (tmp_path / name).write_text(text)
    configuration = f"""\
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{", ".join(str(tmp_path / name) for name in build.files(RULES))}]
scrape_configs:
  - job_name: {RULES.job}
    static_configs: [{{targets: ["127.0.0.1:{embedded.port}"]}}]
"""
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            embedded.server.generate([prompt(5, 20)], 24)

    traffic = threading.Thread(target=send, daemon=True)
    with prometheus(tmp_path / "data", configuration) as server:
        firing = 'ALERTS{alertname="EagleRankSkew",alertstate="firing"}'
        traffic.start()
        try:
            with slow_rank(embedded, 1, "before_cycle"):
                wait_for(lambda: server.query(firing), 60, "the alert")
                time.sleep(3)  # as long as another rank would take to be told
                told = {(a["metric"]["tp_rank"], a["metric"]["signal"]) for a in server.query(firing)}
                host, panel = by_rank(server, rules.rank_host), by_rank(server, shown_in_ranks_panel(RULES.window))
                excess = by_rank(server, rules.gap_excess)
                unjudged = server.query(rules.host_excess)
        finally:
            stop.set()
            traffic.join(60)
    assert told == {("1", "gap")}
    assert excess["1"] > RULES.gap_skew > excess["0"]
    assert panel["1"] > panel["0"] + 0.5 * SLOW_SECONDS
    assert host["0"] > host["1"] + 0.5 * SLOW_SECONDS
    assert unjudged == [], "host time is no sign of a slow host where it contains waiting"


def by_rank(server: Prometheus, expression: str) -> dict[str, float]:
    """Return an expression's values by tensor-parallel rank."""
    return {series["metric"]["tp_rank"]: float(series["value"][1]) for series in server.query(expression)}


def shown_in_ranks_panel(window: str) -> str:
    """Return what the dashboard's table of ranks asks for the gap, with all choices at "all"."""
    expression = queries.rank_figure("eagle_batch_gap_seconds_total").replace(queries.WINDOW, window)
    return re.sub(r'=~"\$\w+"', '=~".*"', expression)


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
