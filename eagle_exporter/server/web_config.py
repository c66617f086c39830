"""The web configuration file: TLS, passwords, headers, in the format of the Prometheus exporter-toolkit.

The file is checked whole before it is used. While the exporter runs it is re-read when it or a certificate
changed; a wrong file is refused with its line and key, and what was in force stays in force.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_Choice = TypeVar("_Choice")
_Stamp = tuple[tuple[int, int, int, int], ...]

_MAX_BYTES = 1024 * 1024
_BCRYPT = re.compile(r"\$2[abxy]\$(?:0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
_TLS_VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_HEADERS: dict[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
"""Header -> the values it may have, any when empty."""


class WebConfigError(Exception):
    """The file is wrong; the message starts with ``FILE:LINE: KEY:``."""


@dataclass(frozen=True)
class WebConfig:
    """A checked configuration.

    Attributes:
        tls: Context for new connections; None without TLS.
        headers: Put on every response.
        users: User name -> bcrypt hash; everybody is let in when empty.
        files: Every file it was made of, to be watched for changes.
    """

    tls: ssl.SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, bytes] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def load(path: Path) -> WebConfig:
    """Read and check a file.

    Raises:
        WebConfigError: It cannot be read, or something in it is wrong.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise WebConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > _MAX_BYTES:
        raise WebConfigError(f"{path}: larger than {_MAX_BYTES} bytes")
    return parse(text, path)


def parse(text: bytes, path: Path) -> WebConfig:
    """Check the content of a file.

    Args:
        text: The content.
        path: Its name, for messages; files named in it are relative to its directory.

    Raises:
        WebConfigError: Something is wrong.
    """
    try:
        # Nodes instead of values: they know their line, and no YAML tag can build an object.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise WebConfigError(f"{path}:{line}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise WebConfigError(f"{path}: not YAML: {str(error).splitlines()[0] if str(error) else 'too deep'}") from error
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == "tag:yaml.org,2002:null"):
        return WebConfig(files=(path,))
    return _Parser(path).config(root)


class _Parser:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = [path]

    def config(self, root: yaml.Node) -> WebConfig:
        sections = self._mapping(root, "", ("tls_server_config", "http_server_config", "basic_auth_users"))
        tls = sections.get("tls_server_config")
        http = sections.get("http_server_config")
        users = sections.get("basic_auth_users")
        return WebConfig(
            tls=self._tls(tls) if tls is not None and not _is_null(tls) else None,
            headers=self._http(http) if http is not None and not _is_null(http) else {},
            users=self._users(users) if users is not None and not _is_null(users) else {},
            files=tuple(self._files),
        )

    def _tls(self, node: yaml.Node) -> ssl.SSLContext:
        section = "tls_server_config"
        keys = self._mapping(
            node,
            section,
            ("cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version", "max_version"),
            elsewhere=(
                *("cert", "key", "client_ca", "client_allowed_sans", "cipher_suites", "curve_preferences"),
                "prefer_server_cipher_suites",
            ),
        )
        for needed in ("cert_file", "key_file"):
            if needed not in keys:
                raise self._error(node, section, f"{needed} is missing")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        lowest = self._choice(keys.get("min_version"), f"{section}.min_version", _TLS_VERSIONS, "TLS12")
        highest = self._choice(keys.get("max_version"), f"{section}.max_version", _TLS_VERSIONS, "TLS13")
        if lowest > highest:
            raise self._error(keys.get("min_version", node), f"{section}.min_version", "above max_version")
        context.minimum_version = lowest
        context.maximum_version = highest
        certificate = self._file(keys["cert_file"], f"{section}.cert_file")
        key = self._file(keys["key_file"], f"{section}.key_file")
        try:
            # Without a password callback OpenSSL would ask for the one of an encrypted key on the terminal.
            context.load_cert_chain(certificate, key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise self._error(
                keys["cert_file"], f"{section}.cert_file", f"cannot be used with {key}: {_reason(error)}"
            ) from error
        authority = keys.get("client_ca_file")
        default = "NoClientCert" if authority is None else "RequireAndVerifyClientCert"
        mode = self._choice(keys.get("client_auth_type"), f"{section}.client_auth_type", _CLIENT_AUTH, default)
        if authority is not None:
            if mode is ssl.CERT_NONE:
                raise self._error(authority, f"{section}.client_ca_file", "set, but client_auth_type is NoClientCert")
            file = self._file(authority, f"{section}.client_ca_file")
            try:
                context.load_verify_locations(file)
            except (ssl.SSLError, OSError) as error:
                raise self._error(authority, f"{section}.client_ca_file", _reason(error)) from error
        elif mode is not ssl.CERT_NONE:
            raise self._error(
                keys["client_auth_type"],
                f"{section}.client_auth_type",
                "needs client_ca_file to verify against",
            )
        context.verify_mode = mode
        return context

    def _http(self, node: yaml.Node) -> dict[str, str]:
        section = "http_server_config"
        keys = self._mapping(node, section, ("http2", "headers"))
        if "http2" in keys:
            # Accepted so that one file serves several exporters; this one speaks HTTP/1.1 either way.
            self._choice(keys["http2"], f"{section}.http2", {"true": True, "false": False}, "true")
        headers = keys.get("headers")
        if headers is None or _is_null(headers):
            return {}
        result: dict[str, str] = {}
        for name, value in self._mapping(headers, f"{section}.headers", tuple(_HEADERS)).items():
            key = f"{section}.headers.{name}"
            text = self._string(value, key)
            allowed = _HEADERS[name]
            if allowed and text.lower() not in allowed:
                raise self._error(value, key, f"{text!r} is not one of {', '.join(allowed)}")
            if not text.isascii() or not text.isprintable():
                raise self._error(value, key, "not printable ASCII")
            if text:
                result[name] = text
        return result

    def _users(self, node: yaml.Node) -> dict[str, bytes]:
        section = "basic_auth_users"
        result: dict[str, bytes] = {}
        for name, value in self._mapping(node, section, None).items():
            key = f"{section}.{name}"
            if not name or ":" in name:
                raise self._error(value, key, "a user name is not empty and has no colon")
            text = self._string(value, key)
            if not _BCRYPT.fullmatch(text):
                # The value stays out of the message: it may be a password written in clear by mistake.
                raise self._error(value, key, "not a bcrypt hash (htpasswd -nBC 10 '' makes one)")
            result[name] = text.encode()
        return result

    def _mapping(
        self, node: yaml.Node, section: str, known: tuple[str, ...] | None, *, elsewhere: tuple[str, ...] = ()
    ) -> dict[str, yaml.Node]:
        """Return the keys of a mapping; any key is known when `known` is None."""
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, section or "file", "expected keys and values")
        result: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = self._string(key, section or "file")
            path = f"{section}.{name}" if section else name
            if known is not None and name not in known:
                if name in elsewhere:
                    raise self._error(key, path, "this key of the exporter-toolkit is not supported here")
                raise self._error(key, path, f"unknown key; known are {', '.join(known)}")
            if name in result:
                raise self._error(key, path, "given twice")
            result[name] = value
        return result

    def _string(self, node: yaml.Node, key: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or _is_null(node):
            raise self._error(node, key, "expected a text")
        return str(node.value)

    def _choice(self, node: yaml.Node | None, key: str, choices: Mapping[str, _Choice], default: str) -> _Choice:
        if node is None:
            return choices[default]
        text = self._string(node, key)
        if text not in choices:
            raise self._error(node, key, f"{text!r} is not one of {', '.join(choices)}")
        return choices[text]

    def _file(self, node: yaml.Node, key: str) -> Path:
        text = self._string(node, key)
        file = self._path.parent / text
        try:
            with file.open("rb"):
                pass
        except (OSError, ValueError) as error:
            raise self._error(node, key, f"{file} cannot be read: {_reason(error)}") from error
        self._files.append(file)
        return file

    def _error(self, node: yaml.Node, key: str, problem: str) -> WebConfigError:
        return WebConfigError(f"{self._path}:{node.start_mark.line + 1}: {key}: {problem}")


class Watcher:
    """Tells when a configuration has to be read again."""

    def __init__(self, path: Path, config: WebConfig) -> None:
        """Watch `path` and the files of `config`, which was read from it."""
        self._path = path
        self._files = config.files
        self._stamp = _stamp(self._files)

    def reload(self, *, force: bool = False) -> WebConfig | None:
        """Return the new configuration; None when nothing changed.

        Args:
            force: Read it even if no file looks changed.

        Raises:
            WebConfigError: The changed file is wrong. It is not tried again before it changes once more.
        """
        stamp = _stamp(self._files)
        if stamp == self._stamp and not force:
            return None
        self._stamp = stamp
        config = load(self._path)
        self._files = config.files
        self._stamp = _stamp(self._files)
        return config


def _stamp(files: tuple[Path, ...]) -> _Stamp:
    result = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            result.append((0, 0, 0, 0))
        else:
            result.append((status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(result)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and bool(node.tag == "tag:yaml.org,2002:null")


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not a certificate in PEM format"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
