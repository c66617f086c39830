"""The web configuration file: what is accepted, and how a wrong one is refused."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_exporter.server import web_config
from eagle_exporter.server.web_config import Watcher, WebConfigError
from tests.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

HASH = "$2b$04$ZI5i1DBXbiGqgCMKWUV8m.yYIPIiTxHHTwtLwbFPlHEDF4vJWc5pi"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority = Authority(tmp_path)
    authority.issue("server")
    authority.issue("other")
    return tmp_path


def load(folder: Path, text: str) -> web_config.WebConfig:
    path = folder / "web.yml"
    path.write_text(text)
    return web_config.load(path)


FULL = f"""\
tls_server_config:
  cert_file: server.pem
  key_file: server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.pem
  min_version: TLS13
http_server_config:
  http2: true
  headers:
    Strict-Transport-Security: max-age=31536000
    X-Frame-Options: deny
basic_auth_users:
  prometheus: {HASH}
"""


def test_a_whole_configuration_is_read(folder: Path) -> None:
    config = load(folder, FULL)
    assert config.tls is not None
    assert config.tls.minimum_version is ssl.TLSVersion.TLSv1_3
    assert config.tls.verify_mode is ssl.CERT_REQUIRED
    assert config.headers == {"Strict-Transport-Security": "max-age=31536000", "X-Frame-Options": "deny"}
    assert config.users == {"prometheus": HASH.encode()}
    assert {file.name for file in config.files} == {"web.yml", "server.pem", "server.key", "ca.pem"}


@pytest.mark.parametrize("text", ["", "# nothing\n", "~\n", "{}\n", "tls_server_config:\nbasic_auth_users:\n"])
def test_an_empty_configuration_is_no_configuration(folder: Path, text: str) -> None:
    config = load(folder, text)
    assert (config.tls, config.headers, config.users) == (None, {}, {})


def test_tls_defaults_to_1_2_and_no_client_certificate(folder: Path) -> None:
    config = load(folder, "tls_server_config: {cert_file: server.pem, key_file: server.key}\n")
    assert config.tls is not None
    assert config.tls.minimum_version is ssl.TLSVersion.TLSv1_2
    assert config.tls.verify_mode is ssl.CERT_NONE


TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"


@pytest.mark.parametrize(
    ("text", "line", "key", "problem"),
    [
        ("tls_config: {}\n", 1, "tls_config", "unknown key"),
        (TLS + "  min_versoin: TLS12\n", 4, "tls_server_config.min_versoin", "unknown key"),
        (TLS + "  min_version: TLS14\n", 4, "tls_server_config.min_version", "'TLS14' is not one of"),
        (
            TLS + "  min_version: TLS13\n  max_version: TLS12\n",
            4,
            "tls_server_config.min_version",
            "above max_version",
        ),
        (TLS + "  cipher_suites: [X]\n", 4, "tls_server_config.cipher_suites", "not supported here"),
        (
            TLS + "  client_auth_type: RequireAnyClientCert\n",
            4,
            "tls_server_config.client_auth_type",
            "not one of",
        ),
        (
            TLS + "  client_auth_type: RequireAndVerifyClientCert\n",
            4,
            "tls_server_config.client_auth_type",
            "needs client_ca_file",
        ),
        (
            TLS + "  client_auth_type: NoClientCert\n  client_ca_file: ca.pem\n",
            5,
            "tls_server_config.client_ca_file",
            "NoClientCert",
        ),
        (TLS + "  client_ca_file: web.yml\n", 4, "tls_server_config.client_ca_file", ""),
        ("tls_server_config:\n  cert_file: server.pem\n", 2, "tls_server_config", "key_file is missing"),
        (
            "tls_server_config:\n  cert_file: none.pem\n  key_file: server.key\n",
            2,
            "tls_server_config.cert_file",
            "cannot be read",
        ),
        (
            "tls_server_config:\n  cert_file: server.pem\n  key_file: other.key\n",
            2,
            "tls_server_config.cert_file",
            "cannot be used",
        ),
        ("\n\nbasic_auth_users:\n  a: hunter2\n", 4, "basic_auth_users.a", "not a bcrypt hash"),
        ("basic_auth_users:\n  a: $2b$99$x\n", 2, "basic_auth_users.a", "not a bcrypt hash"),
        (f"basic_auth_users:\n  'a:b': {HASH}\n", 2, "basic_auth_users.a:b", "no colon"),
        (f"basic_auth_users:\n  a: {HASH}\n  a: {HASH}\n", 3, "basic_auth_users.a", "given twice"),
        ("basic_auth_users: [a]\n", 1, "basic_auth_users", "expected keys and values"),
        (
            "http_server_config:\n  headers:\n    X-Other: a\n",
            3,
            "http_server_config.headers.X-Other",
            "unknown key",
        ),
        (
            "http_server_config:\n  headers:\n    X-Frame-Options: maybe\n",
            3,
            "http_server_config.headers.X-Frame-Options",
            "not one of",
        ),
        (
            'http_server_config:\n  headers:\n    X-XSS-Protection: "a\\r\\nSet-Cookie: b"\n',
            3,
            "http_server_config.headers.X-XSS-Protection",
            "not printable",
        ),
        ("http_server_config:\n  http2: maybe\n", 2, "http_server_config.http2", "not one of"),
        ("- a\n", 1, "file", "expected keys and values"),
        ("a: [\n", 2, "not YAML", ""),
        ("a: b\n c: d\n", 2, "not YAML", ""),
    ],
)
def test_a_wrong_file_is_refused_with_its_line_and_key(
    folder: Path, text: str, line: int, key: str, problem: str
) -> None:
    with pytest.raises(WebConfigError) as caught:
        load(folder, text)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'web.yml'}:{line}: {key}: ")
    assert problem in message
    assert "\n" not in message
    # A password that was written in clear by mistake must not reach the log.
    assert "hunter2" not in message


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(WebConfigError, match=r"nowhere\.yml: cannot be read"):
        web_config.load(tmp_path / "nowhere.yml")


def test_a_file_is_read_again_when_it_or_a_certificate_changed_and_only_then(folder: Path) -> None:
    path = folder / "web.yml"
    watcher = Watcher(path, load(folder, TLS))
    assert watcher.reload() is None
    path.write_text(TLS + "  min_version: TLS13\n")
    config = watcher.reload()
    assert config is not None
    assert config.tls is not None
    assert config.tls.minimum_version is ssl.TLSVersion.TLSv1_3
    assert watcher.reload() is None
    Authority(folder).issue("server")
    assert watcher.reload() is not None
    assert watcher.reload() is None
    assert watcher.reload(force=True) is not None


def test_a_wrong_change_is_refused_once_and_the_next_right_one_accepted(folder: Path) -> None:
    path = folder / "web.yml"
    watcher = Watcher(path, load(folder, TLS))
    path.write_text("nonsense: 1\n")
    with pytest.raises(WebConfigError):
        watcher.reload()
    assert watcher.reload() is None
    path.write_text(TLS)
    assert watcher.reload() is not None


KEYS = st.sampled_from(
    [
        *(
            "tls_server_config",
            "http_server_config",
            "basic_auth_users",
            "cert_file",
            "key_file",
            "headers",
            "http2",
        ),
        *("min_version", "client_auth_type", "client_ca_file", "X-Frame-Options"),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from([HASH, "TLS12", "/", "."])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=4),
)


@given(text=st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode(errors="replace")))
def test_no_bytes_do_more_than_be_refused(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    check(text, tmp_path_factory.getbasetemp() / "web.yml")


@given(tree=TREES)
def test_no_yaml_does_more_than_be_refused(tmp_path_factory: pytest.TempPathFactory, tree: object) -> None:
    import yaml

    check(yaml.safe_dump(tree).encode(), tmp_path_factory.getbasetemp() / "web.yml")


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 5000,
        b"a: &a [*a]",
        b"x: &x {basic_auth_users: *x}",
        b"!!python/object/apply:os.system ['false']",
        b"tls_server_config: !!python/name:os.system {}",
        b"\xff\xfe\x00",
        b"a: \x00",
        b"---\na: b\n---\nc: d\n",
    ],
)
def test_hostile_yaml_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(WebConfigError):
        web_config.parse(text, tmp_path / "web.yml")


def check(text: bytes, path: Path) -> None:
    message = str(path)
    try:
        web_config.parse(text, path)
    except WebConfigError as error:
        message = str(error)
    assert message.startswith(str(path))
