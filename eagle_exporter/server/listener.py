"""Sockets, and the server that accepts from them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Sequence

DEFAULT_ADDRESS = "0.0.0.0:10077"
_BACKLOG = 512
_MAX_CONNECTIONS = 512
_HEADER_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 75
_READ_SECONDS = 30.0
_MAX_HEADER_BYTES = 32 * 1024

log = logging.getLogger(__name__)


class BusyAddressError(OSError):
    """Something else listens on an address already."""

    def __init__(self, address: str) -> None:
        super().__init__(errno.EADDRINUSE, f"{address} is in use")
        self.address = address


def parse_address(text: str) -> tuple[str, int]:
    """Split a listen address.

    Args:
        text: ``host:port``, ``[ipv6]:port`` or ``:port`` (every address of the machine).

    Returns:
        Host ("" for every address) and port.

    Raises:
        ValueError: It is none of these; the message says what is expected.
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not (port.isascii() and port.isdigit() and int(port) <= 65535) or (":" in host and not bracketed):
        raise ValueError(f"{text!r} is no listen address; expected HOST:PORT, [IPV6]:PORT or :PORT")
    return host[1:-1] if bracketed else host, int(port)


def bind(addresses: Sequence[str]) -> list[socket.socket]:
    """Bind every address, or none.

    Raises:
        BusyAddressError: An address is taken.
        OSError: An address cannot be had for another reason.
        ValueError: An address is malformed.
    """
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            sockets.append(_bind(address))  # noqa: PERF401 - closed one by one on an error
    except BaseException:
        for bound in sockets:
            bound.close()
        raise
    return sockets


def _bind(address: str) -> socket.socket:
    host, port = parse_address(address)
    if host in ("", "::"):
        host = "::" if host or _has_ipv6() else "0.0.0.0"  # noqa: S104
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no such host"
        raise OSError(errno.EADDRNOTAVAIL, f"cannot listen on {address}: {reason}") from error
    family, kind, protocol, _, target = found[0]
    result = socket.socket(family, kind, protocol)
    try:
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "[::]" means every address, as it does for exporters in Go.
            result.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(target[0] != "::"))
        result.bind(target)
        # Two sockets with SO_REUSEADDR may both be bound; only one may listen.
        result.listen(_BACKLOG)
    except OSError as error:
        result.close()
        if error.errno == errno.EADDRINUSE:
            raise BusyAddressError(address) from error
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
    result.setblocking(False)
    return result


def _has_ipv6() -> bool:
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def address_of(bound: socket.socket) -> str:
    """Return the address of a bound socket as ``host:port``."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Server(uvicorn.Server):
    """A uvicorn server on given sockets, whose TLS can be replaced while it runs."""

    def __init__(self, app: Any, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None) -> None:
        """Serve `app` on `sockets`, with TLS when `tls` is given."""
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            )
        )
        self._sockets = list(sockets)
        self._tls = tls
        self._idle: dict[Connection, None] = {}
        self.servers: list[asyncio.base_events.Server] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Begin to accept."""
        await self._accept()
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever owns the process."""
        yield

    async def replace_tls(self, tls: ssl.SSLContext | None) -> None:
        """Use `tls` (None: no TLS) for connections from now on; those that exist go on as they are."""
        self._tls = tls
        old = self.servers
        await self._accept()
        for server in old:
            server.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()

        def protocol() -> Connection:
            return Connection(self.config, self.server_state, {}, _loop=loop, idle=self._idle)

        # A server closes its socket with itself, so each gets a duplicate: the queue of waiting connections
        # belongs to both, and none is refused while one server takes over from the other.
        self.servers = [
            await loop.create_server(
                protocol,
                sock=bound.dup(),
                ssl=self._tls,
                ssl_handshake_timeout=_HEADER_SECONDS if self._tls else None,
                backlog=_BACKLOG,
            )
            for bound in self._sockets
        ]


class Connection(H11Protocol):
    """A connection that cannot hold the server up.

    uvicorn waits without end for the first request of a connection, and for a client that does not read. Here
    both have a time limit, and when there are too many connections the one that has been idle for longest
    makes room.
    """

    def __init__(self, *args: Any, idle: dict[Connection, None], **kwargs: Any) -> None:
        """Make a protocol that is in `idle` (the longest idle first) whenever it has no request."""
        super().__init__(*args, **kwargs)
        self._idle = idle
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection; when all places are taken by requests at work, close it."""
        if len(self.connections) >= _MAX_CONNECTIONS:
            victim = next((other for other in self._idle if not other.transport.get_write_buffer_size()), None)
            if victim is None:
                self.transport = transport
                self.flow = FlowControl(transport)
                transport.abort()
                return
            victim.drop()
        super().connection_made(transport)
        self._idle[self] = None
        self._limit(_HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._unlimit()
        self._idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read; the headers of a request have to be complete in time, however few bytes come at once."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._unlimit()
            self._idle.pop(self, None)
        elif self._timer is None and not self.transport.is_closing():
            self._limit(_HEADER_SECONDS)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._idle[self] = None
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._limit(_READ_SECONDS)

    def drop(self) -> None:
        """Close the connection at once, whatever was not sent yet."""
        self.connections.discard(self)
        self._idle.pop(self, None)
        self.transport.abort()

    def _limit(self, seconds: float) -> None:
        self._unlimit()
        self._timer = self.loop.call_later(seconds, self._time_is_up)

    def _unlimit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self) -> None:
        self._timer = None
        waiting_for_request = self.timeout_keep_alive_task is None
        if waiting_for_request or self.transport.get_write_buffer_size():
            self.drop()
