"""Real Prometheus servers for tests, and what promtool does with them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_exporter.demo.sglang_server import free_port
from tests.tools import find_tool

_MAX_POINTS = 10_000
"""Prometheus answers at most 11,000 points per series."""


def run_promtool(*arguments: str | Path, cwd: Path | None = None) -> str:
    """Run promtool and return what it said, whether it liked it or not."""
    return _promtool(*arguments, cwd=cwd)[1]


def promtool(*arguments: str | Path, cwd: Path | None = None) -> str:
    """Run promtool and return what it said; an assertion fails where promtool does."""
    code, output = _promtool(*arguments, cwd=cwd)
    assert code == 0, output
    return output


def _promtool(*arguments: str | Path, cwd: Path | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [find_tool("promtool"), *(str(argument) for argument in arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        # Most of what promtool computes in the long stories is garbage collection.
        env={**os.environ, "GOGC": "800"},
    )
    return done.returncode, done.stdout + done.stderr


_SHARE = "/usr/share/prometheus/alertmanager"


def alertmanager_program(directory: Path) -> Path:
    """Return an Alertmanager to be run in `directory`.

    Debian's reads its templates from /usr/share. Where the package is only unpacked, a copy of the program looks for
    them in its working directory instead: a path of the same length takes the place of the one inside.
    """
    program = find_tool("alertmanager")
    content = program.read_bytes()
    share = program.parent.parent / "share" / "prometheus" / "alertmanager"
    if _SHARE.encode() not in content or Path(_SHARE).is_dir() or not share.is_dir():
        return program
    link = "shared"
    (directory / link).symlink_to(share)
    copy = directory / "alertmanager-copy"
    copy.write_bytes(content.replace(_SHARE.encode(), link.rjust(len(_SHARE), "-").replace("--", "./").encode()))
    copy.chmod(0o755)
    return copy


@contextlib.contextmanager
def running(
    command: Sequence[str | Path], log: Path, url: str, *, cwd: Path | None = None, seconds: float = 60.0
) -> Iterator[None]:
    """Run a server until the block ends; its ``/-/ready`` answers before the block begins."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=cwd
        )
    try:
        deadline = time.monotonic() + seconds
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{command[0]} is not ready:\n{log.read_text()[-3000:]}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:
                if answer.status == 200:
                    break
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def get(self, path: str, **parameters: str | float) -> Any:
        """GET an API path; returns ``data`` of the answer."""
        query = urllib.parse.urlencode({name: str(value) for name, value in parameters.items()})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=300) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error
        assert content["status"] == "success", content
        return content["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Evaluate now."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def active(
        self, expression: str, start: int, end: int, step: int = 60
    ) -> dict[tuple[tuple[str, str], ...], list[float]]:
        """Evaluate over a range; returns the times at which each label set has a result."""
        found: dict[tuple[tuple[str, str], ...], list[float]] = {}
        for first in range(start, end + 1, _MAX_POINTS * step):
            last = min(end, first + (_MAX_POINTS - 1) * step)
            for series in self.get("query_range", query=expression, start=first, end=last, step=step)["result"]:
                labels = tuple(sorted(series["metric"].items()))
                found.setdefault(labels, []).extend(float(time) for time, _ in series["values"])
        return found


@contextlib.contextmanager
def prometheus(data: Path, configuration: str = "", *, arguments: Iterable[str] = ()) -> Iterator[Prometheus]:
    """Run a Prometheus over `data`, which may hold blocks already."""
    data.mkdir(parents=True, exist_ok=True)
    file = data.parent / "prometheus.yaml"
    file.write_text(configuration or "{}\n")
    url = f"http://127.0.0.1:{free_port()}"
    command: list[str | Path] = [
        find_tool("prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={data}",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address={url.removeprefix('http://')}",
        *arguments,
    ]
    with running(command, data.parent / "prometheus.log", url):
        yield Prometheus(url)


@contextlib.contextmanager
def alertmanager(directory: Path, configuration: str) -> Iterator[str]:
    """Run an Alertmanager; yields its address."""
    file = directory / "alertmanager.yaml"
    file.write_text(configuration)
    url = f"http://127.0.0.1:{free_port()}"
    command: list[str | Path] = [
        alertmanager_program(directory),
        f"--config.file={file}",
        f"--storage.path={directory / 'alertmanager'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--cluster.listen-address=",
    ]
    with running(command, directory / "alertmanager.log", url, cwd=directory):
        yield url
