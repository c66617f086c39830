"""One server on two nodes shows what it would show on one: the rules and every panel, from three real exporters.

Tensor parallelism over two nodes has one recording rank, on the first node. The same cycles run on a server whose four
ranks are on one node and on one with two ranks on each of two nodes; each node has an exporter of its own.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.prometheus import build as rules
from eagle_exporter import cli
from grafana import build, client
from tests.prometheus.servers import Prometheus, prometheus
from tests.ranks import RankProcess
from tests.service.exporter import Exporter, wait_for

WHOLE, SPLIT = "one-node:30000", "two-nodes:30000"
SLOW_RANK = 3
# All that happens lies within the window of the rules.
RULES = rules.Rules(dataclasses.replace(rules.SHIPPED, window="90s", interval="1s", traffic=0.01))

Values = dict[tuple[tuple[str, str], ...], float]


@dataclass
class Stack:
    """What the tests look at: Prometheus, and the moments between which everything happened."""

    server: Prometheus
    start: float
    end: float

    def session(self, server: str, **chosen: list[str]) -> client.Session:
        """Return a session about one server whose windows hold everything."""
        window = self.end - self.start + 1.5
        chosen = {"job": ["eagle-exporter"], "server": [server], **chosen}
        return client.Session(self.server.url, self.end - 1, self.end, 1, window, chosen, math.ceil(window))


def plans(server: str, *ranks: int) -> list[dict[str, Any]]:
    return [{"server": server, "tp_rank": rank, "recording": rank == 0, "tiers": [0, 3]} for rank in ranks]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("two-nodes")
    with ExitStack() as opened:
        nodes = {"node-a": plans(WHOLE, 0, 1, 2, 3), "node-b": plans(SPLIT, 0, 1), "node-c": plans(SPLIT, 2, 3)}
        processes, targets = {}, []
        for node, ranks in nodes.items():
            root = directory / node / "registry"
            root.parent.mkdir()
            processes[node] = opened.enter_context(RankProcess(root, *ranks))
            exporter = opened.enter_context(Exporter(root))
            targets.append({"targets": [f"127.0.0.1:{exporter.port}"], "labels": {"node": node}})
        for name, text in {"rules.yaml": rules.render(RULES.recording_groups())}.items():
            (directory / name).write_text(text)
        configuration = {
            "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
            "rule_files": [str(directory / "rules.yaml")],
            "scrape_configs": [{"job_name": "eagle-exporter", "static_configs": targets}],
        }
        server = opened.enter_context(prometheus(directory / "data", json.dumps(configuration)))
        wait_for(
            lambda: server.query("count(count_over_time(eagle_cycles_total[1m]) >= 2) == 8"), 60, "the first scrapes"
        )
        start = time.time()
        for batch_size, accepted in ((1, 1), (6, 2), (1, 2), (6, 1), (20, 1)):
            for rank in range(4):
                others = {"whole": ("node-a", rank), "split": ("node-b" if rank < 2 else "node-c", rank % 2)}
                for node, index in others.values():
                    gap = 0.009 if rank == SLOW_RANK else 0.0004
                    processes[node].cycles(40, rank=index, batch_size=batch_size, accepted=accepted, gap=gap)
                    processes[node].cycles(10, rank=index, batch_size=batch_size, num_steps=0, accepted=0)
            time.sleep(2.2)
        for rank in range(4):
            for node, index in (("node-a", rank), ("node-b" if rank < 2 else "node-c", rank % 2)):
                _capture(processes[node], index, allreduce=0.002 if rank == SLOW_RANK else 0.012)
        settled = "count(eagle_kernel_profiled_cycles_total == 10) == 8"
        wait_for(lambda: server.query(settled), 30, "the last scrapes")
        # On a busy machine a scrape may time out, and its series are stale until the next.
        wait_for(lambda: server.query("count(min_over_time(up[5s]) == 1) == 3"), 60, "scrapes without a failure")
        yield Stack(server, start, time.time())


def _capture(process: RankProcess, rank: int, allreduce: float) -> None:
    verify = "target_verify"
    process.set("eagle_kernel_seconds_total", 10 * allreduce, verify, "allreduce_nccl", rank=rank)
    process.set("eagle_kernel_seconds_total", 10 * (0.027 - allreduce), verify, "gemm", rank=rank)
    process.set("eagle_kernel_busy_seconds_total", 10 * 0.027, verify, rank=rank)
    process.set("eagle_kernel_phase_seconds_total", 10 * 0.0287, verify, rank=rank)
    process.set("eagle_kernel_captures_total", 1, "completed", rank=rank)
    process.set("eagle_kernel_last_capture_timestamp_seconds", time.time(), rank=rank)
    process.set("eagle_kernel_profiled_cycles_total", 10, rank=rank)


PLACE = {"server", "node", "instance", "job", "__name__"}


def without_place(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in labels.items() if name not in PLACE))


def panel_targets() -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    for name in build.DASHBOARDS:
        document = client.load(build.OUTPUT / name)
        for panel in client.panels(document):
            for target in panel["targets"]:
                yield document, panel, target


ABOUT_EXPORTERS = {"Exporters down", "Scrape duration", "Exporters"}
BY_THE_WALL_CLOCK = {
    *(("Output tok/s", "A"), ("Output", "A"), ("Output by server", "A"), ("Servers", "F")),
    *(("Target verify", "A"), ("Accept length distribution", "A"), ("By batch size and step count", "A")),
    *(("Captured cycles", "A"), ("Captures", "A"), ("Verify by rank", "F")),
}
"""Rates and counts: Prometheus extrapolates them to the edges of a window, by when each exporter was scraped."""

WEIGHTED = {
    "Phases by kernel class",
    "Kernel classes",
    "All-reduce in verify",
    "Verify by kernel class, capture by capture",
}
"""Means over ranks that differ; where a series began within the window nothing is extrapolated, and it weighs less."""


def test_every_panel_shows_the_same_for_two_nodes_as_for_one(stack: Stack) -> None:
    compared = 0
    rough: set[tuple[str, str]] = set()
    for document, panel, target in panel_targets():
        title = panel["title"]
        if title in ABOUT_EXPORTERS:
            continue
        found: list[Values] = []
        for server in (WHOLE, SPLIT):
            answer = stack.session(server).run(document, target)
            values = {without_place(series.labels): series.value for series in answer}
            assert len(values) == len(answer), f"{title}: a series for each node"
            found.append(values)
        whole, split = found
        assert set(split) == set(whole), (title, target["refId"])
        compared += len(whole)
        if "time() -" in target["expr"]:
            assert all(abs(split[key] - value) < 15 for key, value in whole.items()), title
        elif title in WEIGHTED:
            assert split == pytest.approx(whole, rel=0.1), title
        elif split != pytest.approx(whole, rel=1e-6):
            assert split == pytest.approx(whole, rel=0.45), title  # neither half nor double
            rough.add((title, target["refId"]))
    assert rough <= BY_THE_WALL_CLOCK
    assert compared > 150


def test_the_rules_record_the_same_for_two_nodes_as_for_one(stack: Stack) -> None:
    recorded = 0
    for rule in RULES.recordings():
        found: dict[str, Values] = {WHOLE: {}, SPLIT: {}}
        for series in stack.server.query(rule.record):
            key = without_place(series["metric"])
            values = found[series["metric"]["server"]]
            assert key not in values, f"{rule.record}: a series for each node"
            values[key] = float(series["value"][1])
        assert set(found[SPLIT]) == set(found[WHOLE]), rule.record
        # Figures by the wall clock are extrapolated, and weights are made of them.
        exact = "timed_cycles" not in rule.record and ":rate" not in rule.record
        tolerance = 1e-6 if exact and not rule.record.startswith("server:eagle_speedup") else 0.35
        assert found[SPLIT] == pytest.approx(found[WHOLE], rel=tolerance), rule.record
        recorded += len(found[SPLIT])
    assert recorded > 60


def test_a_rank_is_compared_with_those_of_the_other_node(stack: Stack) -> None:
    """The gap of the slow rank exceeds that of the others by 8.6 ms of a cycle of 30.2 ms."""
    for series in stack.server.query(f'{RULES.gap_excess}{{server="{SPLIT}"}}'):
        excess = float(series["value"][1])
        slow = series["metric"]["tp_rank"] == str(SLOW_RANK)
        assert (excess > rules.SHIPPED.gap_skew) == slow, series


def rows(stack: Stack, title: str, **chosen: list[str]) -> list[dict[str, Any]]:
    document, panel = next((d, p) for d, p, _ in panel_targets() if p["title"] == title)
    session = stack.session(SPLIT, **chosen)
    return client.table(panel, {target["refId"]: session.run(document, target) for target in panel["targets"]})


def test_the_ranks_of_both_nodes_are_listed_with_their_node(stack: Stack) -> None:
    for title in ("Ranks", "Verify by rank"):
        nodes = {row["TP"]: row["Node"] for row in rows(stack, title)}
        assert nodes == {"0": "node-b", "1": "node-b", "2": "node-c", "3": "node-c"}, title
    slowest = min(rows(stack, "Verify by rank"), key=lambda row: float(row["All-reduce"]))
    assert slowest["TP"] == str(SLOW_RANK)


def test_figures_do_not_come_from_a_node_that_records_no_acceptance(stack: Stack) -> None:
    """The node with the recording rank shows what both show, the other one nothing rather than something else."""
    for title in ("Verify share", "Cycle", "Accept length", "Speed-up", "Gap between cycles"):
        for document, panel, target in panel_targets():
            if panel["title"] != title:
                continue
            both, first, second = (
                [series.value for series in stack.session(SPLIT, **chosen).run(document, target)]
                for chosen in ({}, {"node": ["node-b"]}, {"node": ["node-c"]})
            )
            assert first == pytest.approx(both, rel=1e-6), title
            assert both or "quantile" in target["expr"], title
            assert second == [], title


def test_advise_names_the_rank_of_the_other_node_that_all_wait_for(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """From Prometheus, where the series of three of the four ranks began with the only capture."""
    command = ["advise", "--prometheus", stack.server.url, "--window", "10m", "--server"]
    texts = {}
    for server in (SPLIT, WHOLE):
        assert cli.main([*command, server]) == 0
        texts[server] = " ".join(capsys.readouterr().out.replace(server, "").split())
    assert "10 captured cycles of each of 4 ranks" in texts[SPLIT]
    assert "tp3 pp0 spends 2.00 ms of verify in all-reduce and the other ranks 12.00 ms" in texts[SPLIT]
    assert "33% of verify is all-reduce by NCCL's own kernels (9.50 ms of 28.70 ms" in texts[SPLIT]
    assert "NCCL_PROTO=LL and NCCL_ALGO=Ring are set already" in texts[SPLIT]
    beside = re.compile(r", the last [^;)]* ago")
    inside = [
        beside.sub("", text.partition("Inside verify")[2].partition("Beyond the cycle")[0]) for text in texts.values()
    ]
    assert inside[0] == inside[1]


def test_tokens_are_counted_once(stack: Stack) -> None:
    (series,) = stack.server.query(f'sum by (server) (eagle_output_tokens_total{{server="{SPLIT}"}})')
    assert float(series["value"][1]) == 40 * (1 * 2 + 6 * 3 + 1 * 3 + 6 * 2 + 20 * 2)
