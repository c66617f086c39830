"""The life of the exporter process: settings, the port, the parent, signals."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import resource
import signal
import ssl
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from eagle_exporter import __version__
from eagle_exporter.server import logs, web_config
from eagle_exporter.server.app import create_app, root_problem
from eagle_exporter.server.guard import IDENTITY_HEADER, Guard
from eagle_exporter.server.listener import (
    DEFAULT_ADDRESS,
    BusyAddressError,
    Server,
    address_of,
    bind,
    parse_address,
)
from eagle_exporter.server.web_config import Watcher, WebConfig, WebConfigError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from pathlib import Path
    from socket import socket

    from typing_extensions import Self

_RETRY_SECONDS = 0.5
_PARENT_SECONDS = 1.0
_RELOAD_SECONDS = 1.0
_SHUTDOWN_SECONDS = 1.5
_PROBE_SECONDS = 1.5
_PROBE_EVERY_SECONDS = 5.0
_SILENT_ANSWERS = 3
_RESERVED_PATHS = ("/-/healthy", "/-/ready", "/api/v1/cycle", "/openapi.json")

log = logging.getLogger("eagle_exporter")


class WrongSettingError(Exception):
    """A setting is wrong; the message says which and what to do."""


@dataclass(frozen=True)
class Settings:
    """What ``serve`` was told.

    Attributes:
        root: Registry root.
        listen: Listen addresses, at least one.
        telemetry_path: Path of the metrics.
        web_config: File with TLS and passwords.
        log_level: One of `logs.LEVELS`.
        log_format: One of `logs.FORMATS`.
        embedded: Started by the plugin: end with the parent, wait for a port that another exporter holds.
        parent_fd: Reading end of a pipe whose writing end only the parent has.
    """

    root: Path
    listen: tuple[str, ...] = (DEFAULT_ADDRESS,)
    telemetry_path: str = "/metrics"
    web_config: Path | None = None
    log_level: str = "info"
    log_format: str = "logfmt"
    embedded: bool = False
    parent_fd: int | None = None

    def check(self) -> None:
        """Check everything that needs no socket.

        Raises:
            WrongSettingError: Something is wrong.
        """
        problem = root_problem(self.root)
        if problem:
            raise WrongSettingError(f"registry root {problem}")
        for address in self.listen:
            try:
                parse_address(address)
            except ValueError as error:
                raise WrongSettingError(f"{error}; set --web.listen-address or EAGLE_EXPORTER_LISTEN") from error
        path = self.telemetry_path
        if not path.startswith("/") or set(path) & set("{}?#% ") or path in _RESERVED_PATHS:
            raise WrongSettingError(f"--web.telemetry-path {path!r} is no usable path; expected one like /metrics")


def listen_from_environment(environment: Mapping[str, str]) -> list[str]:
    """Return the addresses of EAGLE_EXPORTER_LISTEN (comma-separated), or the default."""
    addresses = [part.strip() for part in environment.get("EAGLE_EXPORTER_LISTEN", "").split(",") if part.strip()]
    return addresses or [DEFAULT_ADDRESS]


def log_level_from_environment(environment: Mapping[str, str]) -> str:
    """Return EAGLE_EXPORTER_LOG_LEVEL, or the default.

    Raises:
        WrongSettingError: It is no level.
    """
    level = environment.get("EAGLE_EXPORTER_LOG_LEVEL", "").strip().lower() or "info"
    level = {"warning": "warn"}.get(level, level)
    if level not in logs.LEVELS:
        raise WrongSettingError(
            f"EAGLE_EXPORTER_LOG_LEVEL={level!r} is no level; expected one of {', '.join(logs.LEVELS)}"
        )
    return level


def serve(settings: Settings) -> int:
    """Serve until the end and return the exit code."""
    logs.configure(settings.log_level, settings.log_format)
    # A connection costs a descriptor, and the usual soft limit of 1024 is little.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard > 0 else 65536, hard))
    return asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> int:
    config = WebConfig()
    watcher = None
    if settings.web_config is not None:
        try:
            config = web_config.load(settings.web_config)
        except WebConfigError as error:
            log.error(str(error))
            return 2
        watcher = web_config.Watcher(settings.web_config, config)
    life = _Life(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, life.end, signal.Signals(number).name)
    hangup = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    async with _Tasks() as tasks:
        if settings.embedded:
            tasks.start(life.watch_parent())
        sockets = await _sockets(settings, life)
        if sockets is None:
            return 0 if life.ended.is_set() else 1
        app = create_app(settings.root, telemetry_path=settings.telemetry_path)
        guard = Guard(app, config)
        server = Server(guard, sockets, config.tls)
        fields = {
            "address": ",".join(address_of(bound) for bound in sockets),
            "tls": "on" if config.tls else "off",
            "registry": str(settings.root),
            "version": __version__,
        }
        log.info("listening", extra={"fields": fields})
        tasks.start(app.state.live.run())
        tasks.start(_stop_at_end(life, server))
        if watcher is not None:
            tasks.start(_reload(watcher, hangup, guard, server))
        await server.serve()
        for bound in sockets:
            bound.close()
    return 0


class _Tasks:
    """Background tasks that end with the block; one that fails is logged, not silent."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(_log_failure)
        self._tasks.append(task)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task failed", exc_info=error)


async def _stop_at_end(life: _Life, server: Server) -> None:
    await life.ended.wait()
    server.should_exit = True
    await asyncio.sleep(_SHUTDOWN_SECONDS)
    # A connection does not end: the process does.
    os._exit(0)


async def _reload(watcher: Watcher, hangup: asyncio.Event, guard: Guard, server: Server) -> None:
    """Use the web configuration again whenever it changed, or on SIGHUP."""
    while True:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(hangup.wait(), _RELOAD_SECONDS)
        try:
            config = await asyncio.to_thread(watcher.reload, force=hangup.is_set())
        except WebConfigError as error:
            log.error(f"web configuration refused, the running one stays: {error}")
            continue
        finally:
            hangup.clear()
        if config is not None:
            guard.config = config
            await server.replace_tls(config.tls)
            log.info("web configuration loaded again", extra={"fields": {"tls": "on" if config.tls else "off"}})


class _Life:
    """When the process has to end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._parent = os.getppid()
        self.ended = asyncio.Event()

    def end(self, reason: str) -> None:
        """End the process."""
        if not self.ended.is_set():
            log.info("ending", extra={"fields": {"reason": reason}})
            self.ended.set()

    async def watch_parent(self) -> None:
        """End when the parent is gone.

        Two ways, since each has a gap: the pipe stays open when another child of the parent inherited its
        writing end, and the parent's number says nothing when the parent was gone before we looked.
        """
        descriptor = self._settings.parent_fd
        if descriptor is not None:
            try:
                os.set_blocking(descriptor, False)
                asyncio.get_running_loop().add_reader(descriptor, self._read_pipe, descriptor)
            except OSError as error:
                log.error("--parent-fd is no open pipe", extra={"fields": {"err": error}})
        while os.getppid() == self._parent:
            await asyncio.sleep(_PARENT_SECONDS)
        self.end("the parent process ended")

    def _read_pipe(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, 4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(descriptor)
            self.end("the parent process ended")


async def _sockets(settings: Settings, life: _Life) -> list[socket] | None:
    """Return bound sockets, or None when the process has to end instead."""
    waiting = False
    silent = 0
    next_probe = 0.0
    while not life.ended.is_set():
        try:
            return bind(settings.listen)
        except BusyAddressError as error:
            if not settings.embedded:
                log.error(_busy(error.address, await asyncio.to_thread(_holder, error.address)))
                return None
            if time.monotonic() >= next_probe:
                holder = await asyncio.to_thread(_holder, error.address)
                # Silence once is not enough: an exporter that is just ending does not answer either.
                silent = silent + 1 if holder is _Holder.SILENT else 0
                if holder is _Holder.OTHER or silent >= _SILENT_ANSWERS:
                    log.error(_busy(error.address, holder))
                    return None
                if holder is _Holder.EXPORTER:
                    next_probe = time.monotonic() + _PROBE_EVERY_SECONDS
                    if not waiting:
                        waiting = True
                        log.info(
                            "another exporter serves the address; waiting to take over",
                            extra={"fields": {"address": error.address}},
                        )
        except OSError as error:
            log.error(
                "%s; set EAGLE_EXPORTER_LISTEN or --web.listen-address to an address of this machine",
                error.strerror or error,
            )
            return None
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(life.ended.wait(), _RETRY_SECONDS)
    return None


def _busy(address: str, holder: _Holder) -> str:
    remedy = "set EAGLE_EXPORTER_LISTEN or --web.listen-address to a free one"
    if holder is _Holder.EXPORTER:
        return (
            f"another eagle-exporter serves {address} already, with every server of its registry: one is enough for "
            f"all servers of a machine. For a second one {remedy}"
        )
    return f"{address} is in use by another program; {remedy}"


class _Holder(Enum):
    EXPORTER = "another exporter"
    OTHER = "something else"
    SILENT = "nobody answered"


def _holder(address: str) -> _Holder:
    """Return who listens on an address; an exporter is known by the header it puts on every response."""
    host, port = parse_address(address)
    host = {"": "localhost", "0.0.0.0": "127.0.0.1", "::": "localhost"}.get(host, host)  # noqa: S104
    # Nothing secret is sent and nothing believed but the name, so the certificate does not matter.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    answered = False
    for connection in (
        http.client.HTTPConnection(host, port, timeout=_PROBE_SECONDS),
        http.client.HTTPSConnection(host, port, timeout=_PROBE_SECONDS, context=context),
    ):
        try:
            connection.request("GET", "/-/healthy", headers={"Connection": "close"})
            if connection.getresponse().getheader(IDENTITY_HEADER) is not None:
                return _Holder.EXPORTER
            answered = True
        except TimeoutError:
            # A TLS port closes at once when it hears plain HTTP; who is silent now is silent then too.
            break
        except (OSError, http.client.HTTPException, ValueError):
            continue
        finally:
            connection.close()
    return _Holder.OTHER if answered else _Holder.SILENT
