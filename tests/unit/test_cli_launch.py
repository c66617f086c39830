"""``eagle-exporter launch``: SGLang's own command in its own process, and the hooks in every process below it."""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_exporter.hooks import plugin
from tests.tools import ROOT

LAUNCH = [sys.executable, "-m", "eagle_exporter", "launch"]

SERVER = """
import multiprocessing, os, signal, sys, time
from sglang.processes import controller, report

if __name__ == "__main__":
    report("server", name=__name__, arguments=sys.argv, pid=os.getpid())
    if "plugins" in sys.argv:
        # What SGLang 0.5.11 and newer does with the entry point.
        from eagle_exporter.hooks.plugin import register
        register()
        report("server with plugins")
    if "children" in sys.argv:
        multiprocessing.set_start_method("spawn", force=True)
        child = multiprocessing.Process(target=controller)
        child.start()
        child.join()
    if "wait" in sys.argv:
        print("waiting", flush=True)
        time.sleep(60)
    sys.exit(7)
"""
PROCESSES = """
import json, multiprocessing, os, sys

def report(who, **facts):
    plugin = sys.modules.get("eagle_exporter.hooks.plugin")
    watched = [getattr(finder, "_module", None) for finder in sys.meta_path]
    facts.update(who=who, registered=bool(plugin and plugin._registered),
                 watched=sorted(module for module in watched if module and module.startswith("sglang.")))
    print(json.dumps(facts), flush=True)

def controller():
    # Nothing of ours is imported by this module: what is registered here was registered before the target was found.
    report("controller")
    child = multiprocessing.Process(target=scheduler)
    child.start()
    child.join()

def scheduler():
    report("scheduler")
"""


@pytest.fixture
def sglang(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``sglang`` is a server that says who it is and what was done to its processes."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(SERVER)
    (package / "processes.py").write_text(PROCESSES)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EAGLE_EXPORTER_")}
    return environment | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def launched(environment: dict[str, str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code and what each process reported."""
    done = subprocess.run(
        [*LAUNCH, "--", *arguments], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.stderr == ""
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, {report["who"]: report for report in reports}


def test_arguments_are_sglangs_and_reach_it_unchanged(sglang: dict[str, str]) -> None:
    arguments = ["--model-path", "a b", "--help", "-h", "--", "", "--flag=x", "launch"]
    _, reports = launched(sglang, *arguments)
    server = reports["server"]
    assert server["name"] == "__main__"
    assert server["arguments"][1:] == arguments
    # Its usage names the program.
    assert Path(server["arguments"][0]).name == "launch_server.py"


def test_the_exit_code_is_sglangs(sglang: dict[str, str]) -> None:
    code, _ = launched(sglang)
    assert code == 7


def test_it_is_one_process_so_that_signals_are_sglangs(sglang: dict[str, str]) -> None:
    with subprocess.Popen([*LAUNCH, "--", "wait"], stdout=subprocess.PIPE, text=True, env=sglang) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["pid"] == process.pid
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == -signal.SIGTERM


def test_the_hooks_wait_in_the_server_in_its_children_and_in_their_children(sglang: dict[str, str]) -> None:
    """The controller of data parallelism starts schedulers of its own."""
    _, reports = launched(sglang, "children")
    assert set(reports) == {"server", "controller", "scheduler"}
    for report in reports.values():
        assert report["registered"]
        assert report["watched"] == ["sglang.srt.entrypoints.engine", "sglang.srt.managers.scheduler"]


def test_an_sglang_that_loads_plugins_gets_the_hooks_once(sglang: dict[str, str]) -> None:
    _, reports = launched(sglang, "plugins")
    assert reports["server with plugins"]["watched"] == reports["server"]["watched"] != []


def test_switched_off_it_is_sglangs_own_command(sglang: dict[str, str]) -> None:
    _, reports = launched(sglang | {"EAGLE_EXPORTER_ENABLED": "0"}, "children")
    assert len(reports) == 3
    assert [report["watched"] for report in reports.values()] == [[], [], []]


def test_an_error_of_ours_does_not_stop_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(plugin, "register", fail)
    with caplog.at_level(logging.ERROR, "eagle_exporter"):
        runpy.run_module("eagle_exporter.hooks.launch", run_name="__mp_main__")
    assert "not started; SGLang is not affected" in caplog.text


def test_without_sglang_it_says_so_and_ends_with_1() -> None:
    # No site-packages, so none of this environment's either.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "eagle_exporter", "launch", "--", "--model-path", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "SGLang is not installed" in done.stderr
    assert sys.executable in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--model-path", "x"], ["model-path", "x"], []])
def test_without_the_two_dashes_it_says_where_they_go_and_ends_with_2(
    arguments: list[str], sglang: dict[str, str]
) -> None:
    done = subprocess.run([*LAUNCH, *arguments], capture_output=True, text=True, timeout=60, env=sglang)
    assert done.returncode == 2
    assert "eagle-exporter launch -- --model-path" in done.stderr
    assert done.stdout == ""


def test_help_is_ours_and_names_the_two_dashes(sglang: dict[str, str]) -> None:
    done = subprocess.run([*LAUNCH, "--help"], capture_output=True, text=True, timeout=60, env=sglang)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: eagle-exporter launch [-h] -- ARGUMENT ...")
    assert "Put -- before SGLang's arguments" in done.stdout
