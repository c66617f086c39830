"""Servers that come and go on one node, and random kills, under a real Prometheus."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from eagle_exporter.demo.sglang_server import SGLangServer, free_port
from eagle_exporter.registry.reader import RegistryReader
from tests.prometheus.servers import Prometheus, prometheus
from tests.service.exporter import wait_for
from tests.sglang import processes
from tests.sglang.measured import start
from tests.sglang.page import COUNT, TREE, answer_is_right, reachable, scrape, value
from tests.tools import soak


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the servers of one node share."""
    return tmp_path_factory.mktemp("node")


def scraping(port: int) -> str:
    """Return a configuration of Prometheus that scrapes one exporter every second."""
    return f"""
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
- job_name: eagle
  static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def on_node(models: Path, python: str, node: Path, exporter: int, name: str) -> SGLangServer:
    """Return a server of the node: one registry root, one exporter port, a log of its own."""
    environment = {
        "EAGLE_EXPORTER_SERVER": name,
        "EAGLE_EXPORTER_EMBED": "1",
        "EAGLE_EXPORTER_LISTEN": f"127.0.0.1:{exporter}",
    }
    server = start(models, python, TREE, node, environment=environment)
    server.log_file = node / f"{name}-{len(list(node.glob('*.log')))}.log"
    server.log_file.touch()
    return server


def test_servers_of_one_node_come_and_go_without_a_wrong_number(
    models: Path, sglang_python: str, node: Path, tmp_path: Path
) -> None:
    """Two servers of one model share registry and port; the first stops, the second is killed and restarted."""
    registry, port = node / "registry", free_port()
    served_tokens = 0
    with prometheus(tmp_path / "prometheus", scraping(port)) as store:
        second = on_node(models, sglang_python, node, port, "second")
        with on_node(models, sglang_python, node, port, "first") as first, second:
            for server in (first, second):
                assert answer_is_right(server)
            served_tokens += COUNT
            wait_for(lambda: value(scrape(port), "eagle_output_tokens_total") == 2 * COUNT, 20, "both servers' tokens")
            text = scrape(port)
            assert value(text, "eagle_output_tokens_total", server="first") == COUNT
            assert value(text, "eagle_output_tokens_total", server="second") == COUNT
            wait_for(lambda: stored(store, 'eagle_output_tokens_total{server="second"}') == COUNT, 20)

            # The same server started twice by mistake: the running one keeps its files.
            inode = (registry / "second" / "tp0-pp0-dp0.bin").stat().st_ino
            with on_node(models, sglang_python, node, port, "second") as twin:
                assert answer_is_right(twin)
                assert twin.log().count("hooks stay off") == 1
            assert (registry / "second" / "tp0-pp0-dp0.bin").stat().st_ino == inode
            assert answer_is_right(second)
            served_tokens += COUNT

            # The first one stops, and with it the exporter that held the port.
            first.stop()
            wait_for(lambda: reachable(port), 15, "the second server's exporter taking over")
            text = scrape(port)
            assert value(text, "eagle_rank_up", server="first") == 0.0
            assert value(text, "eagle_rank_up", server="second") == 1.0
            assert answer_is_right(second)
            served_tokens += COUNT
            wait_for(lambda: stored(store, 'eagle_output_tokens_total{server="second"}') == served_tokens, 20)

            # Its scheduler is killed: SGLang ends, and nothing of the dead rank is shown as alive.
            (scheduler,) = scheduler_of(registry, "second")
            processes.kill(scheduler)
            wait_for(lambda: not second.is_running(), 60, "SGLang ending with its scheduler")
            second.stop()
        wait_for(lambda: not any(processes.of_server(registry).values()), 20, "every process ending")

        with on_node(models, sglang_python, node, port, "second") as again:
            assert answer_is_right(again)
            served_tokens += COUNT
            wait_for(lambda: stored(store, 'eagle_output_tokens_total{server="second"}') == COUNT, 20)
            rank = next(rank for rank in RegistryReader(registry).read().ranks if rank.labels["server"] == "second")
            assert rank.alive
            assert rank.value("eagle_output_tokens_total") == COUNT
            increase = stored(store, 'increase(eagle_output_tokens_total{server="second"}[30m])')
            # increase() extrapolates by up to half a scrape interval on both ends; it must invent no restart's worth.
            assert increase <= served_tokens * 1.05
            assert (
                stored(store, 'max_over_time(eagle_output_tokens_total{server="second"}[30m])') == served_tokens - COUNT
            )
        assert len(list(registry.rglob("*.bin"))) <= 2


def scheduler_of(registry: Path, server: str) -> list[int]:
    """Return the pid of a server's scheduler: the one that has its file open."""
    wanted = str(registry / server / "tp0-pp0-dp0.bin")
    found = []
    for pid in processes.of_server(registry)["scheduler"]:
        try:
            open_files = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
        if wanted in open_files:
            found.append(pid)
    return found


def stored(store: Prometheus, expression: str) -> float:
    """Return the sum of an instant query, 0 when it is empty."""
    return sum(float(series["value"][1]) for series in store.query(expression))


@pytest.mark.timeout(5 * 3600 if soak() else 900)
def test_random_kills_invent_nothing_and_leave_nothing(
    models: Path, sglang_python: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """SIGKILL of scheduler, exporter or main process at random moments, while a real Prometheus scrapes."""
    directory = tmp_path_factory.mktemp("kills")
    registry, port = directory / "registry", free_port()
    rng = random.Random(20)
    rounds = 200 if soak() else 3
    answered = 0
    roles: dict[str, int] = {}
    with prometheus(tmp_path / "prometheus", scraping(port)) as store:
        for number in range(rounds):
            role = (
                ("scheduler", "exporter", "main")[number % 3]
                if rounds == 3
                else rng.choice(("scheduler", "exporter", "main"))
            )
            server = on_node(models, sglang_python, directory, port, "killed")
            server.start()
            try:
                for _ in range(rng.randint(1, 4)):
                    assert answer_is_right(server)
                    answered += COUNT
                time.sleep(rng.random())
                victims = processes.of_server(registry)[role]
                assert victims, f"no {role} to kill"
                for pid in victims:
                    processes.kill(pid)
                roles[role] = roles.get(role, 0) + 1
                if role == "exporter":
                    assert answer_is_right(server)  # the server does not need it
                    answered += COUNT
                else:
                    wait_for(lambda: not processes.of_server(registry)["exporter"], 30, "the exporter ending")
            finally:
                server.stop()
            wait_for(lambda: not any(processes.of_server(registry).values()), 30, "every process ending")
            assert len(list(registry.rglob("*.bin"))) <= 1
        increase = stored(store, 'increase(eagle_output_tokens_total{server="killed"}[6h])')
        assert increase <= answered * 1.05
        assert stored(store, "count(scrape_samples_post_metric_relabeling == 0 and up == 1)") == 0
    print(f"\n{rounds} kills ({roles}): {answered} tokens served, increase() {increase:.0f}")
    assert sum(roles.values()) == rounds
