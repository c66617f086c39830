"""Life with a real server: faults in our own code, switch and fuse, an exporter that dies, servers that come and go."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from eagle_exporter.demo import answers
from eagle_exporter.demo.sglang_server import SGLangServer, free_port
from eagle_exporter.registry.layout import directory_name
from eagle_exporter.registry.reader import RegistryReader
from tests.service.exporter import wait_for
from tests.sglang import processes
from tests.sglang.measured import ROOT, Difference, one_rank, settled, start
from tests.sglang.page import COUNT, PROMPT, TREE, answer_is_right, reachable, scrape, value

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
    assert answer_is_right(served.server)
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


def test_a_deleted_registry_leaves_the_server_serving(served: Served) -> None:
    """The last test with this server: what is deleted does not come back before a restart."""
    directory = served.registry / directory_name(one_rank(served.registry).labels["server"])
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    assert answer_is_right(served.server)
    assert RegistryReader(served.registry).read().ranks == ()
    assert served.server.is_running()
