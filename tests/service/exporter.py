"""The exporter as a process, for tests."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_exporter.demo.sglang_server import free_port

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from typing_extensions import Self

ROOT = Path(__file__).resolve().parent.parent.parent

# The interpreter may lie where another user cannot read, so everything is loaded before the change.
_AS_USER = """
import encodings.idna, os, sys, uvicorn
import eagle_exporter.cli.serve, eagle_exporter.server.process
from eagle_exporter.server.landing import LandingPage
LandingPage("/metrics")
uvicorn.Config(lambda a, b, c: None, interface="asgi3", lifespan="off", ws="none").load()
user = int(sys.argv.pop(1))
os.setgroups([]); os.setgid(user); os.setuid(user)
sys.exit(eagle_exporter.cli.main())
"""


def wait_for(condition: Callable[[], object], seconds: float = 15, what: str = "the condition") -> None:
    """Wait until `condition` returns something true.

    Raises:
        TimeoutError: It did not within `seconds`.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not happen within {seconds} s")
        time.sleep(0.05)


def answers(port: int) -> bool:
    """Return whether a server on a port answers; under TLS its complaint about plain HTTP will do."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
            connection.recv(1)
    except OSError:
        return False
    return True


def environment(**more: str) -> dict[str, str]:
    """Return an environment without settings of whoever runs the tests."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EAGLE_EXPORTER_")}
    return {**clean, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **more}


class Answer:
    """An HTTP response that was read whole."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()


class Exporter:
    """``eagle-exporter serve`` on a free port. Use it as a context manager: it is ready then."""

    def __init__(
        self,
        root: Path,
        *arguments: str,
        port: int | None = None,
        variables: Mapping[str, str] | None = None,
        user: int | None = None,
    ) -> None:
        """Start it on `root` with more `arguments` and `variables`, as another `user` (needs root)."""
        self.port = port or free_port()
        self._log = (root.parent / f"exporter-{self.port}.log").open("w+b")
        started = time.monotonic()
        self.process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    *(("-m", "eagle_exporter") if user is None else ("-c", _AS_USER, str(user))),
                ),
                *("serve", "--dir", str(root)),
                *("--web.listen-address", f"127.0.0.1:{self.port}", *arguments),
            ],
            stderr=self._log,
            env=environment(**(variables or {})),
        )
        wait_for(self._is_ready, what="the start of the exporter")
        self.startup_seconds = time.monotonic() - started

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the exporter ended with {self.process.returncode}: {self.log()}")
        return answers(self.port)

    def get(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 20,
    ) -> Answer:
        """Send one request."""
        connection = (
            http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout, context=tls)
            if tls
            else http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        )
        try:
            connection.request(method, path, headers=dict(headers or {}))
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def log(self) -> str:
        """Return what it wrote to standard error."""
        self._log.seek(0)
        return self._log.read().decode()

    def memory_bytes(self) -> int:
        """Return its resident memory."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))

    def close(self) -> None:
        """End it as systemd would."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
