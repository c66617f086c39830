"""What every response has and every request must pass, whatever it asks for."""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from eagle_exporter import __version__
from eagle_exporter.server.web_config import WebConfig
from eagle_exporter.server.worker import Worker

IDENTITY_HEADER = "X-Eagle-Exporter"
"""On every response: by it another exporter knows who holds the port."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_FIXED_HEADERS = (
    (IDENTITY_HEADER.lower().encode(), __version__.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
_TEXT = (b"content-type", b"text/plain; charset=utf-8")
_MAX_REMEMBERED = 128
_MAX_CHECKING = 16
# A valid hash of no password: an unknown user costs as much time as a known one.
_NOBODY = b"$2b$10$vHbyHMb3o/7uq/KwVdkT/Ov5TYmEsVVJWSDPa56ErK7d1kUFZhzUi"


class Guard:
    """An ASGI application around the real one: authentication, headers, no request bodies."""

    def __init__(self, app: App, config: WebConfig | None = None) -> None:
        """Guard `app` as `config` says."""
        self._app = app
        self._passwords = _Passwords()
        self.config = config or WebConfig()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        config = self.config
        own = [(name.lower().encode(), value.encode()) for name, value in config.headers.items()]
        replaced = {name for name, _ in own}
        fixed = [item for item in _FIXED_HEADERS if item[0] not in replaced] + own

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [item for item in message.get("headers", ()) if item[0] not in replaced]
                message["headers"] = [_allow(item) for item in headers] + fixed
            await send(message)

        headers: dict[bytes, bytes] = dict(scope["headers"])
        if config.users:
            allowed = await self._passwords.check(config.users, headers.get(b"authorization", b""))
            if allowed is None:
                await _answer(send_with_headers, 503, b"too many passwords are being checked\n", (b"retry-after", b"1"))
                return
            if not allowed:
                await _answer(
                    send_with_headers,
                    401,
                    b"Unauthorized\n",
                    (b"www-authenticate", b'Basic realm="eagle-exporter"'),
                )
                return
        if headers.get(b"content-length", b"0").strip(b"0") or b"transfer-encoding" in headers:
            await _answer(send_with_headers, 413, b"no request here has a body\n", (b"connection", b"close"))
            return
        if scope["method"] == "HEAD":
            # Answered like GET everywhere; the server leaves the body out.
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send_with_headers)


def _allow(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    return (b"allow", b"GET, HEAD") if header == (b"allow", b"GET") else header


async def _answer(send: Send, status: int, text: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", str(len(text)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_TEXT, length, *headers]})
    await send({"type": "http.response.body", "body": text})


class _Passwords:
    """Checks passwords beside the event loop, and remembers the answers: bcrypt is slow on purpose."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._checking = 0
        # A salted digest instead of the password, so that no memory dump holds passwords in clear.
        self._salt = secrets.token_bytes(16)
        self._known: OrderedDict[bytes, bool] = OrderedDict()

    async def check(self, users: Mapping[str, bytes], header: bytes) -> bool | None:
        """Return whether an Authorization header has a user and the right password; None when too busy."""
        credentials = _decode(header)
        if credentials is None:
            return False
        user, password = credentials
        expected = users.get(user)
        digest = hashlib.sha256(
            b"\0".join((self._salt, user.encode(), expected or b"", hashlib.sha256(password).digest()))
        ).digest()
        known = self._known.get(digest)
        if known is not None:
            self._known.move_to_end(digest)
            return known
        if self._checking >= _MAX_CHECKING:
            return None
        if self._worker is None:
            self._worker = Worker("passwords")
        self._checking += 1
        try:
            right = await self._worker.submit(lambda: _matches(password, expected or _NOBODY))
        finally:
            self._checking -= 1
        allowed = right and expected is not None
        self._known[digest] = allowed
        if len(self._known) > _MAX_REMEMBERED:
            self._known.popitem(last=False)
        return allowed


def _decode(header: bytes) -> tuple[str, bytes] | None:
    scheme, _, encoded = header.partition(b" ")
    if scheme.lower() != b"basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon else None
    except (binascii.Error, UnicodeDecodeError):
        return None


def _matches(password: bytes, expected: bytes) -> bool:
    import bcrypt

    try:
        return bcrypt.checkpw(password, expected)
    except ValueError:
        # Longer than bcrypt takes, or with a zero byte: no stored hash can be of such a password.
        return False
