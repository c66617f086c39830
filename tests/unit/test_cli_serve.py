"""``eagle-exporter serve`` as a process: settings, the port, the parent, what it imports."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from eagle_exporter.demo.sglang_server import free_port
from tests.certificates import Authority
from tests.folders import open_folder
from tests.service.exporter import Exporter, answers, environment, wait_for

if TYPE_CHECKING:
    from pathlib import Path

SERVE = [sys.executable, "-m", "eagle_exporter", "serve"]


def serve(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SERVE, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(**variables),
        check=False,
    )


def test_a_root_that_is_no_directory_ends_it_with_2_and_names_the_variable(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("")
    result = serve("--dir", str(root))
    assert result.returncode == 2
    assert str(root) in result.stderr
    assert "EAGLE_EXPORTER_DIR" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert serve(EAGLE_EXPORTER_DIR=str(root)).returncode == 2


def test_an_unreadable_root_ends_it_with_2() -> None:
    # Root reads everything, so it is tried as nobody.
    code = (
        "import os, sys; from eagle_exporter.cli import main; import eagle_exporter.cli.serve, "
        "eagle_exporter.server.process\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(main(['serve', '--dir', sys.argv[1]]))"
    )
    with open_folder() as folder:
        root = folder / "secret"
        root.mkdir(mode=0o000)
        result = subprocess.run(
            [sys.executable, "-c", code, str(root)],
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
    assert result.returncode == 2
    assert f"{root} cannot be read: Permission denied" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (["--web.listen-address", "nonsense"], {}, "nonsense"),
        ([], {"EAGLE_EXPORTER_LISTEN": "10077"}, "EAGLE_EXPORTER_LISTEN"),
        ([], {"EAGLE_EXPORTER_LOG_LEVEL": "loud"}, "EAGLE_EXPORTER_LOG_LEVEL"),
        ([], {"EAGLE_EXPORTER_SAMPLE_EVERY": "abc"}, "EAGLE_EXPORTER_SAMPLE_EVERY='abc': "),
        (["--web.telemetry-path", "metrics"], {}, "--web.telemetry-path"),
        (["--web.telemetry-path", "/-/healthy"], {}, "--web.telemetry-path"),
        (["--web.telemetry-path", "/{x}"], {}, "--web.telemetry-path"),
        (["--log.format", "xml"], {}, "--log.format"),
        (["--web.config.file", "/nonexistent.yml"], {}, "/nonexistent.yml"),
    ],
)
def test_a_wrong_setting_ends_it_with_2_and_is_named(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], named: str
) -> None:
    result = serve("--dir", str(tmp_path), *arguments, **variables)
    assert result.returncode == 2
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def test_a_busy_port_ends_it_with_1_and_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = serve("--dir", str(tmp_path), "--web.listen-address", address)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert address in result.stderr
    assert "EAGLE_EXPORTER_LISTEN" in result.stderr


def test_a_port_of_another_exporter_is_said_to_be_one(tmp_path: Path) -> None:
    with Exporter(tmp_path) as exporter:
        address = f"127.0.0.1:{exporter.port}"
        result = serve("--dir", str(tmp_path), "--web.listen-address", address)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert f"another eagle-exporter serves {address} already" in line
    assert "EAGLE_EXPORTER_LISTEN" in line


@pytest.mark.parametrize(
    "variables",
    [
        {"EAGLE_EXPORTER_LOG_LEVEL": "warn"},
        {"EAGLE_EXPORTER_DIR": "overridden", "EAGLE_EXPORTER_SAMPLE_EVERY": "auto"},
    ],
)
def test_a_variable_that_is_right_or_overridden_does_not_keep_it_from_starting(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    with Exporter(tmp_path, variables=variables) as exporter:
        assert exporter.get("/metrics").status == 200


def test_a_wrong_setting_of_the_hooks_does_not_end_an_embedded_exporter(tmp_path: Path) -> None:
    variables = {"EAGLE_EXPORTER_SAMPLE_EVERY": "abc"}
    with Exporter(tmp_path, "--embedded", variables=variables) as exporter:
        assert exporter.get("/metrics").status == 200


@pytest.mark.parametrize("address", ["192.0.2.1:10077", "a..b:10077", "no-such-host.invalid:10077"])
def test_an_address_that_cannot_be_had_ends_it_with_1_and_one_line(tmp_path: Path, address: str) -> None:
    result = serve("--dir", str(tmp_path), "--web.listen-address", address)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert address in result.stderr


def test_it_serves_every_address_it_was_given(tmp_path: Path) -> None:
    other = free_port()
    with Exporter(tmp_path, "--web.listen-address", f"[::1]:{other}") as exporter:
        assert exporter.get("/-/healthy").status == 200
        socket.create_connection(("::1", other), 2).close()


def test_a_signal_ends_it_with_0(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with Exporter(tmp_path) as exporter:
            exporter.process.send_signal(number)
            assert exporter.process.wait(5) == 0


def test_log_lines_are_json_when_asked(tmp_path: Path) -> None:
    with Exporter(tmp_path, "--log.format", "json") as exporter:
        wait_for(exporter.log)
        line = json.loads(exporter.log().splitlines()[0])
    assert line["level"] == "info"
    assert line["msg"] == "listening"
    assert line["address"] == f"127.0.0.1:{exporter.port}"


def test_sglangs_multiprocess_directory_is_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "sglang"
    directory.mkdir()
    variables = {"PROMETHEUS_MULTIPROC_DIR": str(directory), "prometheus_multiproc_dir": str(directory)}
    with Exporter(tmp_path / "registry", variables=variables) as exporter:
        assert "eagle_exporter_build_info" in exporter.get("/metrics").text
    assert list(directory.iterdir()) == []
    code = (
        "import os, sys; from eagle_exporter.cli import main; main(['serve', '--dir', sys.argv[1]]); "
        "from prometheus_client import values; "
        "print(values.ValueClass.__name__, 'PROMETHEUS_MULTIPROC_DIR' in os.environ)"
    )
    file = tmp_path / "file"
    file.write_text("")
    result = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        capture_output=True,
        text=True,
        env=environment(**variables),
        check=False,
    )
    assert result.stdout.split() == ["MutexValue", "False"]


def test_serve_imports_nothing_of_the_hook_side_or_of_other_commands(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    code = (
        "import sys; from eagle_exporter.cli import main; main(['serve', '--dir', sys.argv[1]]); "
        "print('\\n'.join(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, env=environment(), check=True
    )
    loaded = set(result.stdout.split())
    assert "eagle_exporter.server.app" in loaded
    unwanted = (
        "torch",
        "sglang",
        "rich",
        "bcrypt",
        "eagle_exporter.hooks",
        "eagle_exporter.timing",
        "eagle_exporter.demo",
    )
    assert [name for name in loaded if name.startswith(unwanted)] == []


PARENT = """
import os, subprocess, sys, time
read, write = os.pipe()
os.set_inheritable(read, True)
child = subprocess.Popen([*sys.argv[1:], "--embedded", "--parent-fd", str(read)], pass_fds=(read,))
os.close(read)
print(child.pid, flush=True)
sys.stdin.read()
"""


class Parent:
    """A process that starts an exporter as the plugin in SGLang does."""

    def __init__(self, root: Path, port: int) -> None:
        self._log = (root / f"embedded-{time.monotonic_ns()}.log").open("w+b")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", PARENT, *SERVE),
                *("--dir", str(root), "--web.listen-address", f"127.0.0.1:{port}"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(),
        )
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode()

    def child_is_running(self) -> bool:
        try:
            os.kill(self.child, 0)
            with open(f"/proc/{self.child}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] != "Z"
        except (ProcessLookupError, FileNotFoundError):
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        wait_for(lambda: not self.child_is_running(), 10, "the end of the exporter")
        for stream in (self.process.stdin, self.process.stdout, self._log):
            if stream is not None:
                stream.close()


def test_an_embedded_exporter_is_gone_3_seconds_after_its_parent_was_killed(tmp_path: Path) -> None:
    port = free_port()
    parent = Parent(tmp_path, port)
    try:
        wait_for(lambda: answers(port), what="the start")
        # An open connection must not keep it.
        with socket.create_connection(("127.0.0.1", port), 2) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n")
            parent.kill()
            wait_for(lambda: not parent.child_is_running(), 3, "the end of the exporter")
        assert "Traceback" not in parent.log()
    finally:
        parent.close()


def test_the_next_exporter_waits_for_the_port_and_takes_over_within_2_seconds(tmp_path: Path) -> None:
    port = free_port()
    first = Parent(tmp_path, port)
    second = None
    try:
        wait_for(lambda: answers(port), what="the start of the first")
        second = Parent(tmp_path, port)
        wait_for(lambda: "waiting to take over" in second.log(), what="the second waiting")
        time.sleep(1.5)
        assert second.child_is_running()
        assert second.log().count("waiting to take over") == 1
        first.kill()
        wait_for(lambda: not first.child_is_running(), 3, "the end of the first")
        wait_for(lambda: answers(port), 2, "the second taking over")
        assert "Traceback" not in second.log()
    finally:
        first.close()
        if second is not None:
            second.close()


def test_a_waiting_exporter_ends_with_its_parent_too(tmp_path: Path) -> None:
    port = free_port()
    with Exporter(tmp_path, port=port):
        parent = Parent(tmp_path, port)
        try:
            wait_for(lambda: "waiting to take over" in parent.log(), what="waiting")
            parent.kill()
            wait_for(lambda: not parent.child_is_running(), 3, "the end of the exporter")
        finally:
            parent.close()


def test_it_knows_another_exporter_behind_tls_and_a_password(tmp_path: Path) -> None:
    Authority(tmp_path).issue("server")
    web = tmp_path / "web.yml"
    web.write_text(
        "tls_server_config: {cert_file: server.pem, key_file: server.key}\n"
        "basic_auth_users: {a: $2b$04$ZI5i1DBXbiGqgCMKWUV8m.yYIPIiTxHHTwtLwbFPlHEDF4vJWc5pi}\n"
    )
    registry = tmp_path / "registry"
    registry.mkdir()
    with Exporter(registry, "--web.config.file", str(web)) as exporter:
        parent = Parent(registry, exporter.port)
        try:
            wait_for(lambda: "waiting to take over" in parent.log(), what="waiting")
        finally:
            parent.close()


def test_a_port_that_something_else_holds_is_one_error_line_and_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = serve("--dir", str(tmp_path), "--web.listen-address", f"127.0.0.1:{port}", "--embedded")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "EAGLE_EXPORTER_LISTEN" in result.stderr
