"""``eagle-exporter top``: what a terminal shows, and what a script reads."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from eagle_exporter.catalogue import COMMON_LABELS
from eagle_exporter.cli import captures
from eagle_exporter.cli.top import render
from eagle_exporter.kernels import files
from eagle_exporter.registry.writer import server_directory
from eagle_exporter.server.models import Cycle
from eagle_exporter.server.view import RegistryView
from eagle_exporter.server.windows import Windows
from tests.captures import rank_answer, write_capture
from tests.ranks import RankProcess, write_ended
from tests.service.exporter import Exporter, environment

if TYPE_CHECKING:
    from pathlib import Path

TOP = [sys.executable, "-m", "eagle_exporter", "top"]


def top(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOP, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment(COLUMNS=str(columns)),
        check=False,
    )


def shown(document: dict[str, Any], width: int, **more: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(document, "10s", width, **more))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("registry")
    plans = [{"tp_rank": rank, "recording": rank == 0} for rank in range(8)]
    with (
        RankProcess(root, *plans) as process,
        subprocess.Popen(
            [*TOP, "--dir", str(root), "--once", "--json"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        ) as command,
    ):
        # The two seconds that --once looks at begin some time after the start.
        for _ in range(30):
            process.cycles(5)
            time.sleep(0.1)
        output, _ = command.communicate(timeout=120)
    return dict(json.loads(output))


def test_json_is_the_document_of_the_api(document: dict[str, Any]) -> None:
    cycle = Cycle.model_validate(document)
    assert cycle.state.value == "live"
    assert len(cycle.servers[0].ranks) == 8


@pytest.mark.parametrize("width", [80, 140])
def test_it_fits_the_terminal_and_shows_all_phases_and_ranks(document: dict[str, Any], width: int) -> None:
    lines = shown(document, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    assert "verify 94.9 %" in text
    assert "accept length 2.00" in text
    for phase, ms, share in (
        ("draft_steps", "0.870", "2.9 %"),
        ("target_verify", "28.7", "94.9 %"),
        ("draft_extend", "0.290", "1.0 %"),
        ("verify_overhead", "0.310", "1.0 %"),
        ("kv_cache", "0.050", "0.2 %"),
        ("other", "0.020", "0.1 %"),
        ("cycle", "30.2", ""),
    ):
        assert re.search(rf"{phase}\s+{re.escape(ms)}\s+{re.escape(share)}", text), phase
    assert len(re.findall(r"^tp\d.* up .*NVIDIA H200", text, re.MULTILINE)) == 8


def test_ranks_that_do_not_fit_are_counted(document: dict[str, Any]) -> None:
    lines = shown(document, 80, height=30)
    assert len(lines) <= 30
    shown_ranks = sum(line.startswith("tp") for line in lines)
    assert 1 <= shown_ranks < 8
    assert f"… and {8 - shown_ranks} more ranks" in lines
    # Servers that are left out take no room.
    ended = [
        {**server, "server": f"ended-{i}", "ranks": [{**rank, "up": False} for rank in server["ranks"]]}
        for i in range(4)
        for server in document["servers"]
    ]
    lines = shown({**document, "servers": [*document["servers"], *ended]}, 80, height=30)
    assert len(lines) <= 30
    assert lines[-1] == "Ended, left out: ended-0, ended-1, ended-2, ended-3."


def document_of(root: Path) -> dict[str, Any]:
    windows = Windows(RegistryView(root))
    windows.sample()
    return dict(json.loads(windows.document()))


def test_it_says_plainly_what_is_wrong(tmp_path: Path) -> None:
    text = "".join(shown(document_of(tmp_path), 80))
    assert "no rank" in text
    assert str(tmp_path) in text
    with RankProcess(tmp_path, {"hooks_down": ["target_verify"]}):
        text = "\n".join(shown(document_of(tmp_path), 80))
    assert "no traffic" in text
    assert "Hook target_verify is down on tp0" in text
    write_ended(tmp_path)
    text = "\n".join(shown(document_of(tmp_path), 80))
    assert "every rank has ended" in text
    assert "Ended: tp0." in text


def test_a_server_that_was_switched_off_is_called_that(tmp_path: Path) -> None:
    with RankProcess(tmp_path) as process:
        process.stop_timing("off")
        text = "\n".join(shown(document_of(tmp_path), 80))
    assert "measuring is stopped" in text
    assert "Switched off on tp0" in text
    assert "eagle-exporter on" in text
    assert "is down" not in text
    assert "no traffic" not in text
    assert "No decode cycle" not in text
    assert re.search(r"^tp0 \* +off ", text, re.MULTILINE)


def test_a_server_that_has_ended_is_one_line_below_those_that_run(tmp_path: Path) -> None:
    write_ended(tmp_path, {"server": "a-ended"})
    with RankProcess(tmp_path, {"server": "b-running"}):
        lines = shown(document_of(tmp_path), 80)
    assert [line for line in lines if "a-ended" in line] == ["Ended, left out: a-ended."] == lines[-1:]
    assert sum(line.startswith("verify ") for line in lines) == 1


def test_into_a_pipe_it_prints_page_after_page(tmp_path: Path) -> None:
    with (
        RankProcess(tmp_path) as process,
        subprocess.Popen(
            [*TOP, "--dir", str(tmp_path), "--interval", "0.2"], stdout=subprocess.PIPE, text=True, env=environment()
        ) as command,
    ):
        process.run(per_second=30)
        assert command.stdout is not None
        heads = 0
        for line in command.stdout:
            assert "\x1b" not in line
            heads += line.startswith("eagle-exporter top")
            if heads == 3:
                break
        command.send_signal(signal.SIGINT)
        command.stdout.read()
        assert command.wait(60) == 0


def test_once_prints_and_ends(tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    with RankProcess(registry):
        result = top("--dir", str(registry), "--once")
    assert (result.returncode, result.stderr) == (0, "")
    assert "no traffic" in result.stdout
    file = tmp_path / "file"
    file.write_text("")
    wrong = top("--dir", str(file), "--once")
    assert wrong.returncode == 1
    assert "EAGLE_EXPORTER_DIR" in wrong.stderr


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_once_without_a_rank_fails_and_says_so(tmp_path: Path, form: list[str]) -> None:
    for root in (tmp_path, tmp_path / "not-there"):
        result = top("--dir", str(root), "--once", *form)
        assert result.returncode == 1
        (line,) = result.stderr.splitlines()
        assert f"no SGLang server writes to {root}" in line
        assert "no rank" in result.stdout or '"no_rank"' in result.stdout


def inside_verify(lines: list[str]) -> list[str]:
    """The lines of the section, without its bar."""
    start = next(index for index, line in enumerate(lines) if line.startswith("inside verify"))
    end = lines.index("", start)
    return [lines[start], *lines[start + 2 : end]]


CLASSES = {"allreduce_nccl": 0.183, "gemm": 0.094, "norm": 0.008}


@pytest.mark.parametrize("width", [80, 140])
def test_the_newest_capture_of_the_server_is_shown(document: dict[str, Any], width: int) -> None:
    labels = dict(zip(COMMON_LABELS, ("node-a:30000", "kimi-k2.5", "unified", "3", "0", ""), strict=True))
    older = rank_answer(labels | {"tp_rank": "0"}, {"gemm": 1.0}, age=900.0)
    other = rank_answer(labels | {"server": "node-b:30000"}, {"gemm": 1.0}, age=1.0)
    lines = shown(document, width, captured=[older, rank_answer(labels, CLASSES, age=300.0), other])
    assert max(map(len, lines)) <= width
    section = inside_verify(lines)
    assert section[0] == "inside verify: 10 captured cycles of tp3 pp0, the last 5 min ago"
    text = " ".join(" ".join(section[1:]).split())
    assert text == (
        "allreduce_nccl 18.3 ms 61.0 % gemm 9.40 ms 31.3 % norm 0.800 ms 2.7 % idle under the profiler 1.50 ms 5.0 %"
    )


def test_operators_of_a_cpu_are_called_that(document: dict[str, Any]) -> None:
    labels = dict(zip(COMMON_LABELS, ("node-a:30000", "kimi-k2.5", "unified", "0", "0", ""), strict=True))
    rank = rank_answer(labels, CLASSES, age=300.0)
    rank["capture"]["device"] = "cpu"
    (head, *_) = inside_verify(shown(document, 80, captured=[rank]))
    assert head == "inside verify: CPU operators, 10 captured cycles of tp0 pp0, the last 5 min ago"


def test_without_a_capture_there_is_no_such_section(document: dict[str, Any]) -> None:
    assert not any("inside verify" in line for line in shown(document, 80))


def test_a_capture_in_the_registry_is_found_and_a_broken_or_failed_one_is_not(tmp_path: Path) -> None:
    labels = dict(zip(COMMON_LABELS, ("node-a:30000", "kimi-k2.5", "unified", "0", "0", ""), strict=True))
    with RankProcess(tmp_path):
        write_capture(tmp_path, labels, age=120.0, verify={"gemm": 0.1})
        write_capture(tmp_path, labels, age=60.0, outcome="failed")
        broken = write_capture(tmp_path, labels, age=1.0, verify={"gemm": 0.1})
        directory = server_directory(tmp_path, labels["server"])
        files.write(files.result_path(directory, broken["rank"], broken["id"]), b'{"outcome": "completed"}')
        with Exporter(tmp_path) as exporter:
            results = [top("--dir", str(tmp_path), "--once"), top("--url", f"127.0.0.1:{exporter.port}", "--once")]
    for result in results:
        assert result.returncode == 0
        assert re.search("inside verify: 10 captured cycles of tp0 pp0, the last (120|12.|2 min)", result.stdout)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cycles": 0},
        {"cycles": "ten"},
        {"ended": -1.0},
        {"phases": {"target_verify": {"seconds": 1.0}}},
        {"phases": {"a phase of tomorrow": {"seconds": 1.0, "busy_seconds": 1.0, "classes": {}}}},
        {"phases": {"target_verify": {"seconds": 1.0, "busy_seconds": 1.0, "classes": {"a class of tomorrow": 1.0}}}},
        {"phases": None},
    ],
)
def test_a_capture_that_is_not_understood_is_left_out(wrong: dict[str, Any]) -> None:
    labels = dict.fromkeys(COMMON_LABELS, "0")
    sound = rank_answer(labels, {"gemm": 0.1})
    assert captures.completed_in({"ranks": [sound, {**sound, "capture": {**sound["capture"], **wrong}}]}) == [sound]
    others: list[Any] = [None, [], {"ranks": 3}, {"ranks": [None, {"capture": None}]}]
    for answer in others:
        assert captures.completed_in(answer) == []


def test_control_characters_of_a_file_do_not_reach_the_terminal(document: dict[str, Any]) -> None:
    hostile = json.loads(json.dumps(document))
    hostile["servers"][0]["server"] = "a\x1b]0;owned\x07\x1b[2J\r\nb"
    hostile["servers"][0]["ranks"][0]["gpu"] = "[red]x[/red]\x9b31m"
    text = "\n".join(shown(hostile, 140))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    # Markup of rich is text here.
    assert "[red]x[/red]" in text


def test_old_numbers_are_called_old(document: dict[str, Any]) -> None:
    assert any("These numbers are old" in line for line in shown(document, 80, problem="refused"))


def test_it_reads_an_exporter_by_address_also_with_a_password(tmp_path: Path) -> None:
    web = tmp_path / "web.yml"
    # The password is "secret".
    web.write_text("basic_auth_users: {a: $2b$04$wLBgNyjjGIqbbAmwEHCUOuWP7TQ8.JGJ5Cd3Qdf06PQ39y/Xa9ePe}\n")
    registry = tmp_path / "registry"
    with RankProcess(registry), Exporter(registry, "--web.config.file", str(web)) as exporter:
        address = f"127.0.0.1:{exporter.port}"
        assert "no traffic" in top("--url", f"http://a:secret@{address}", "--once").stdout
        refused = top("--url", address, "--once")
        assert refused.returncode == 1
        assert "401" in refused.stderr
    gone = top("--url", address, "--once")
    assert gone.returncode == 1
    assert len(gone.stderr.splitlines()) == 1


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a", "http://", "http://a:port"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    result = top("--url", url, "--once")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("columns", [80, 140])
def test_it_runs_live_in_a_terminal_and_ends_with_ctrl_c(tmp_path: Path, columns: int) -> None:
    with RankProcess(tmp_path) as process:
        process.run(per_second=30)
        pid, terminal = pty.fork()
        if pid == 0:  # pragma: no cover - the child becomes another program
            os.execvpe(
                TOP[0],
                [*TOP, "--dir", str(tmp_path), "--interval", "0.2"],
                environment(TERM="xterm-256color"),
            )
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        output = b""
        end = time.monotonic() + 60
        while output.count(b"target_verify") < 10 and time.monotonic() < end:
            if select.select([terminal], [], [], 0.2)[0]:
                output += os.read(terminal, 65536)
        os.write(terminal, b"\x03")
        # A terminal that nobody reads fills up, and its program waits. Linux reports the end as an error.
        with contextlib.suppress(OSError):
            while rest := os.read(terminal, 65536):
                output += rest
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert output.count(b"target_verify") >= 10
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"Traceback" not in output
