"""Servers that must not be measured, or cannot be: they serve as if the plugin were not there."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from eagle_exporter.demo import answers
from eagle_exporter.demo.sglang_server import CPU_STANDINS, free_port
from eagle_exporter.registry.reader import RegistryReader
from tests.sglang.measured import TOGETHER, Configuration, expect, send_together, start

TOKENS = [answers.expected_tokens(prompt, count) for prompt, count in TOGETHER]


def is_listening(port: int) -> bool:
    """Return whether anything listens on a port."""
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


def test_a_server_without_speculation_is_not_touched(models: Path, sglang_python: str, tmp_path: Path) -> None:
    port = free_port()
    environment = {"EAGLE_EXPORTER_EMBED": "1", "EAGLE_EXPORTER_LISTEN": f"127.0.0.1:{port}"}
    with start(models, sglang_python, None, tmp_path, environment=environment) as server:
        served = [answer["output_ids"] for answer in send_together(server)]
        assert served == TOKENS
        assert not (tmp_path / "registry").exists()
        assert not is_listening(port)
        assert "eagle-exporter:" not in server.log()


# --- offline engines ---------------------------------------------------------------------------------------
def offline(
    models: Path, python: str, directory: Path, *, served: Callable[[], bool] = lambda: True, **variables: str
) -> tuple[list[list[int]], bool]:
    """Run an offline engine; return its tokens and whether an exporter listened meanwhile.

    Args:
        models: The pair.
        python: SGLang's interpreter.
        directory: Of the log and the registry.
        served: Waited for before the engine is shut down, which kills its scheduler wherever that is.
        variables: For the environment.
    """
    port = free_port()
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("EAGLE_EXPORTER_", "SGLANG_")) and name != "PYTHONPATH"
    }
    environment = {
        **clean,
        "PYTHONPATH": str(CPU_STANDINS),
        "PYTHONWARNINGS": "ignore",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "EAGLE_EXPORTER_DIR": str(directory / "registry"),
        "EAGLE_EXPORTER_LISTEN": f"127.0.0.1:{port}",
        "EAGLE_EXPORTER_SAMPLE_EVERY": "1",
        **variables,
    }
    script = Path(__file__).with_name("offline_engine.py")
    arguments = [str(models / "target"), str(models / "draft"), json.dumps(TOGETHER)]
    with (directory / "engine.log").open("w+") as log:
        process = subprocess.Popen(
            [python, str(script), *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout is not None
        try:
            line = next((line for line in process.stdout if line.startswith("ANSWERS ")), None)
            assert line is not None, (directory / "engine.log").read_text()[-4000:]
            deadline = time.monotonic() + 15
            while not served() and time.monotonic() < deadline:
                time.sleep(0.05)
            return json.loads(line.removeprefix("ANSWERS ")), is_listening(port)
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.communicate("\n", timeout=60)
            process.kill()
            process.wait()


def test_an_offline_engine_is_not_touched(models: Path, sglang_python: str, tmp_path: Path) -> None:
    tokens, exporter = offline(models, sglang_python, tmp_path)
    assert tokens == TOKENS
    assert not (tmp_path / "registry").exists()
    assert not exporter


def test_an_offline_engine_is_measured_when_it_is_asked_for(models: Path, sglang_python: str, tmp_path: Path) -> None:
    expected = expect(TOGETHER, Configuration())

    def counted() -> bool:
        (rank,) = RegistryReader(tmp_path / "registry").read().ranks
        return rank.value("eagle_drafts_total") == expected.drafts

    tokens, _ = offline(
        models, sglang_python, tmp_path, served=counted, EAGLE_EXPORTER_ENABLED="1", EAGLE_EXPORTER_EMBED="0"
    )
    assert tokens == TOKENS
    (rank,) = RegistryReader(tmp_path / "registry").read().ranks
    assert rank.labels["server"].endswith(":engine")
    assert rank.value("eagle_drafts_total") == expected.drafts
    assert rank.value("eagle_accepted_tokens_total") == expected.accepted
    assert rank.value("eagle_output_tokens_total") == expected.output
    assert not rank.alive


# --- nowhere to write --------------------------------------------------------------------------------------
REFUSE = """
import errno, os

def register():
    def posix_fallocate(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate = posix_fallocate
"""


@contextlib.contextmanager
def full_file_system(directory: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Give a registry root on a full file system, and import paths for the server.

    Root mounts a real tmpfs and fills it. Nobody else may mount, so there the server's allocations are refused with the
    same error instead: that shows the message and that SGLang serves, but not the absence of SIGBUS.
    """
    root = directory / "registry"
    if os.geteuid() != 0:
        packages = directory / "packages"
        information = packages / "refuse-1.0.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: refuse\nVersion: 1.0.0\n")
        (information / "entry_points.txt").write_text("[sglang.srt.plugins]\nrefuse = refuse:register\n")
        (packages / "refuse.py").write_text(REFUSE)
        yield root, [packages]
        return
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "eagle-test", root], check=True)
    try:
        with (root / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while ballast.write(b"x" * 4096):
                pass
        yield root, []
    finally:
        subprocess.run(["umount", "--lazy", root], check=True)


def test_a_full_registry_and_a_busy_port_cost_the_metrics_and_nothing_else(
    models: Path, sglang_python: str, tmp_path: Path
) -> None:
    with socket.socket() as busy, full_file_system(tmp_path) as (root, packages):
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        environment = {"EAGLE_EXPORTER_EMBED": "1", "EAGLE_EXPORTER_LISTEN": address}
        with start(
            models,
            sglang_python,
            Configuration(),
            tmp_path,
            environment=environment,
            plugin_path=packages,
        ) as server:
            served = [answer["output_ids"] for answer in send_together(server)]
            assert served == TOKENS
            assert server.is_running()
            assert RegistryReader(root).read().ranks == ()
            lines = server.log().splitlines()
    said = [line for line in lines if "hooks stay off" in line]
    assert len(said) == 1, said
    assert "No space left on device" in said[0]
    assert "--shm-size" in said[0]
    port_lines = [line for line in lines if "EAGLE_EXPORTER_LISTEN" in line]
    assert len(port_lines) == 1, port_lines
