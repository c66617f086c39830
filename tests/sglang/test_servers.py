"""Servers that come and go on one node, and random kills, under a real Prometheus."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from eagle_exporter.demo.sglang_server import SGLangServer, free_port
from eagle_exporter.registry.reader import RegistryReader
from tests.prometheus.servers import Prometheus, prometheus
from tests.service.exporter import Exporter, wait_for
from tests.sglang import processes
from tests.sglang.measured import start
from tests.sglang.page import COUNT, PROMPT, TREE, answer_is_right, reachable, samples, scrape, value
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
    """SIGKILL of scheduler, exporter or main process at random moments, while a real Prometheus scrapes.

    The server starts anew only after a kill that it cannot survive; a killed exporter is started alone, and the next
    server's own one waits behind it.
    """
    directory = tmp_path_factory.mktemp("kills")
    registry, port = directory / "registry", free_port()
    rng = random.Random(20)
    roles = (
        ["exporter", "scheduler", "main"]
        if not soak()
        else rng.choices(("scheduler", "exporter", "main"), (1, 2, 1), k=200)
    )
    served = starts = 0
    server: SGLangServer | None = None
    alone: Exporter | None = None
    with prometheus(tmp_path / "prometheus", scraping(port)) as store:
        try:
            for number, role in enumerate(roles):
                if server is None:
                    server = on_node(models, sglang_python, directory, port, "killed")
                    server.start()
                    starts += 1
                for _ in range(rng.randint(1, 3)):
                    assert answer_is_right(server)
                    served += COUNT
                request = None
                if rng.random() < 0.5:  # in the middle of a request, which may have been served to its end
                    request = threading.Thread(target=answer_or_not, args=(server,))
                    request.start()
                    served += COUNT
                time.sleep(rng.random() * (0.2 if request else 1.0))
                victims = processes.of_server(registry)[role]
                assert victims, f"no {role} to kill"
                for pid in victims:
                    processes.kill(pid)
                if request is not None:
                    request.join(60)
                    assert not request.is_alive(), "a request outlived its server"
                if role == "exporter":
                    assert answer_is_right(server)  # the server does not need it
                    served += COUNT
                    if alone is not None:
                        alone.close()
                    alone = Exporter(registry, port=port, variables={"EAGLE_EXPORTER_DIR": str(registry)})
                else:
                    server.stop()
                    server = None
                    left = {alone.process.pid} if alone is not None else set()
                    wait_for(partial(only_run, registry, left), 60, "every process of the server ending")
                assert len(list(registry.rglob("*.bin"))) <= 1
                if soak():
                    print(f"{number + 1}: {role} killed, {served} tokens", flush=True)
            assert samples(scrape(port)) if alone is not None else True
        finally:
            if server is not None:
                server.stop()
            if alone is not None:
                alone.close()
        wait_for(lambda: not running(registry), 60, "every process ending")
        increase = stored(store, 'increase(eagle_output_tokens_total{server="killed"}[6h])')
        assert 0 < increase <= served * 1.05
        assert stored(store, "count(scrape_samples_post_metric_relabeling == 0 and up == 1)") == 0
    counts = {role: roles.count(role) for role in ("scheduler", "exporter", "main")}
    print(f"\n{len(roles)} kills ({counts}), {starts} starts: {served} tokens asked for, increase() {increase:.0f}")


def answer_or_not(server: SGLangServer) -> None:
    """Send a request that may be cut off."""
    with contextlib.suppress(Exception):
        server.generate([PROMPT], COUNT)


def only_run(registry: Path, pids: set[int]) -> bool:
    """Return whether these are the only processes of the servers of a registry."""
    return running(registry) == pids


def running(registry: Path) -> set[int]:
    """Return the pids of all processes that belong to the servers of a registry."""
    return {pid for pids in processes.of_server(registry).values() for pid in pids}
