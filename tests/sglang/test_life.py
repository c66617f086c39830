"""Life with a real server: faults in our own code, switch and fuse, an exporter that dies, servers that come and go."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eagle_exporter.demo import answers
from eagle_exporter.demo.sglang_server import SGLangServer, free_port
from eagle_exporter.registry.layout import directory_name
from eagle_exporter.registry.reader import RegistryReader
from tests.prometheus.servers import Prometheus, prometheus
from tests.service.exporter import wait_for
from tests.sglang import processes
from tests.sglang.measured import ROOT, Configuration, Difference, one_rank, settled, start
from tests.tools import soak

TREE = Configuration(topk=4, num_draft_tokens=8, overlap=True)
PROMPT, COUNT = [5, 44, 17], 30
FAULTY_HOOKS = (
    "cycle",
    "verify",
    "target_verify",
    "draft",
    "tree_build",
    "prepare",
    "sample",
    "draft_extend",
    "kv_prepare",
    "kv_compact",
    "kv_allocation",
    "accept",
    "scheduler",
)
"""Every hook whose code runs on the CPU: draft_graph does not, identity and prefill have none of their own."""


def scrape(port: int) -> str:
    """GET /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=15) as response:
        content: bytes = response.read()
    return content.decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample of an exposition; fails when one comes twice."""
    result: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in result, f"{key} comes twice"
            result[key] = sample.value
    return result


def value(text: str, name: str, **labels: str) -> float:
    """Return the sum over the samples of a name that have these labels; -1 when there is none."""
    found = [
        number
        for (sample, pairs), number in samples(text).items()
        if sample == name and labels.items() <= dict(pairs).items()
    ]
    return sum(found) if found else -1.0


def answer_is_right(server: SGLangServer, count: int = COUNT) -> bool:
    """Send one request; return whether the tokens are the known ones."""
    (reply,) = server.generate([PROMPT], count)
    tokens: list[int] = reply["output_ids"]
    return tokens == answers.expected_tokens(PROMPT, count)


def drafts(count: int = COUNT) -> int:
    """Return the verify cycles that one such request takes."""
    return len(answers.expected_accept_lengths(PROMPT, count, num_steps=3, topk=4, num_draft_tokens=8))


def switch(registry: Path, command: str) -> None:
    """Run ``eagle-exporter off`` or ``on``."""
    done = subprocess.run(
        [sys.executable, "-m", "eagle_exporter", command, "--dir", str(registry)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@dataclass
class Served:
    """A server that speculates over trees, with faults at hand and an exporter of its own."""

    server: SGLangServer
    registry: Path
    port: int
    faults: Path

    def plant(self, fault: str) -> None:
        """Let a hook fail from now on; nothing when empty."""
        self.faults.write_text(fault)

    def state(self) -> str:
        """Return the state of the timing."""
        rank = one_rank(self.registry)
        family = rank.family("eagle_timing_enabled")
        assert family is not None
        (state,) = (series.labels[0] for series in family.series if series.value == 1.0)
        return state


@pytest.fixture(scope="module")
def served(models: Path, sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all faults."""
    directory = tmp_path_factory.mktemp("life")
    faults, port = directory / "faults", free_port()
    faults.write_text("")
    environment = {
        "EAGLE_FAULTS": str(faults),
        "EAGLE_FAULTS_FUSE_SECONDS": "2",
        "EAGLE_EXPORTER_SAMPLE_EVERY": "1",
        "EAGLE_EXPORTER_EMBED": "1",
        "EAGLE_EXPORTER_LISTEN": f"127.0.0.1:{port}",
    }
    server = start(
        models,
        sglang_python,
        TREE,
        directory,
        environment=environment,
        plugin_path=[ROOT / "tests" / "sglang" / "fault_plugin"],
    )
    with server:
        wait_for(lambda: value(scrape(port), "eagle_rank_up") == 1.0, 30, "the exporter of the server")
        yield Served(server, directory / "registry", port, faults)


@pytest.mark.parametrize("hook", FAULTY_HOOKS)
def test_a_fault_in_a_hook_changes_no_token_is_counted_and_logged_once(served: Served, hook: str) -> None:
    before = settled(served.registry)
    errors_before = before.value("eagle_hook_errors_total", hook) or 0.0
    served.plant(hook)
    for _ in range(6):  # the parts of the verify overhead are measured in every 16th cycle only
        assert answer_is_right(served.server)
        if value(scrape(served.port), "eagle_hook_errors_total", hook=hook) > errors_before:
            break
    served.plant("")
    switch(served.registry, "on")  # twenty errors in a row blow the fuse
    wait_for(lambda: served.state() == "on", 10)
    errors = Difference(before, settled(served.registry)).by_label("eagle_hook_errors_total")
    assert errors.pop(hook) >= 1
    assert not any(errors.values()), "another hook failed too"
    assert served.server.log().count(f"hook {hook!r} failed") == 1

    before = settled(served.registry)
    assert answer_is_right(served.server)
    after = Difference(before, settled(served.registry))
    assert after("eagle_drafts_total") == drafts()
    assert after("eagle_output_tokens_total") == COUNT
    assert after.total("eagle_hook_errors_total") == 0
    assert sum(after.buckets("eagle_cycle_duration_seconds")) == drafts()


def test_off_and_on_take_effect_with_the_next_cycle(served: Served) -> None:
    settled(served.registry)
    switch(served.registry, "off")
    wait_for(lambda: served.state() == "off", 10)
    before = one_rank(served.registry)
    assert answer_is_right(served.server)
    time.sleep(1.0)
    off = Difference(before, one_rank(served.registry))
    assert off("eagle_cycles_total") == off("eagle_output_tokens_total") == 0
    text = scrape(served.port)
    assert value(text, "eagle_timing_enabled", reason="off") == 1.0
    assert value(text, "eagle_hook_up") == 0.0
    assert value(text, "eagle_running_requests") == -1.0, "nobody looks, so nobody says"

    switch(served.registry, "on")
    wait_for(lambda: served.state() == "on", 10)
    before = settled(served.registry)
    assert answer_is_right(served.server)
    assert Difference(before, settled(served.registry))("eagle_drafts_total") == drafts()
    assert value(scrape(served.port), "eagle_timing_enabled", reason="on") == 1.0


def test_timing_that_costs_too_much_is_stopped_and_acceptance_goes_on(served: Served) -> None:
    served.plant("cost")
    try:
        for _ in range(40):
            assert answer_is_right(served.server)
            if served.state() == "fuse_cost":
                break
    finally:
        served.plant("")
    assert served.state() == "fuse_cost"
    before = settled(served.registry)
    assert answer_is_right(served.server)
    blown = Difference(before, settled(served.registry))
    assert blown("eagle_drafts_total") == drafts()
    assert blown("eagle_output_tokens_total") == COUNT
    assert sum(blown.buckets("eagle_cycle_duration_seconds")) == 0
    switch(served.registry, "on")
    wait_for(lambda: served.state() == "on", 10)


def test_repeated_errors_stop_everything(served: Served) -> None:
    served.plant("cycle")
    try:
        for _ in range(20):
            assert answer_is_right(served.server)
            if served.state() == "fuse_errors":
                break
    finally:
        served.plant("")
    assert served.state() == "fuse_errors"
    before = one_rank(served.registry)
    assert answer_is_right(served.server)
    time.sleep(1.0)
    assert Difference(before, one_rank(served.registry))("eagle_cycles_total") == 0
    switch(served.registry, "on")
    wait_for(lambda: served.state() == "on", 10)


def test_an_exporter_restarted_alone_shows_the_same_numbers(served: Served) -> None:
    settled(served.registry)
    before = value(scrape(served.port), "eagle_drafts_total")
    (pid,) = processes.of_server(served.registry)["exporter"]
    processes.kill(pid)
    wait_for(lambda: not processes.exists(pid), 10)
    command = ["-m", "eagle_exporter", "serve", "--dir", str(served.registry)]
    alone = subprocess.Popen(
        [sys.executable, *command, "--web.listen-address", f"127.0.0.1:{served.port}"], stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: reachable(served.port), 20, "the new exporter")
        assert value(scrape(served.port), "eagle_drafts_total") == before
        assert answer_is_right(served.server)
        settled(served.registry)
        assert value(scrape(served.port), "eagle_drafts_total") == before + drafts()
    finally:
        alone.terminate()
        alone.wait(10)


def reachable(port: int) -> bool:
    """Return whether /metrics answers."""
    try:
        return bool(scrape(port))
    except OSError:
        return False


def test_a_deleted_registry_leaves_the_server_serving(served: Served) -> None:
    """The last test with this server: what is deleted does not come back before a restart."""
    directory = served.registry / directory_name(one_rank(served.registry).labels["server"])
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    assert answer_is_right(served.server)
    assert RegistryReader(served.registry).read().ranks == ()
    assert served.server.is_running()


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
