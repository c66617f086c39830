"""TLS and passwords of a running exporter, changed while it runs."""

from __future__ import annotations

import http.client
import signal
import socket
import ssl
from typing import TYPE_CHECKING

import pytest
from cryptography import x509

from tests.certificates import Authority
from tests.service.exporter import Exporter, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Authority(tmp_path).issue("server")
    (tmp_path / "web.yml").write_text(TLS)
    return tmp_path


@pytest.fixture
def exporter(folder: Path) -> Iterator[Exporter]:
    with Exporter(folder / "registry", "--web.config.file", str(folder / "web.yml")) as running:
        yield running


def trust(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "ca.pem")


def serial(exporter: Exporter) -> int:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", exporter.port), 5) as connection,
        context.wrap_socket(connection) as wrapped,
    ):
        certificate = wrapped.getpeercert(binary_form=True)
        assert certificate is not None
        return x509.load_der_x509_certificate(certificate).serial_number


def test_a_new_certificate_is_used_for_new_connections_and_old_ones_go_on(folder: Path, exporter: Exporter) -> None:
    before = serial(exporter)
    old = http.client.HTTPSConnection("127.0.0.1", exporter.port, timeout=10, context=trust(folder))
    old.request("GET", "/-/healthy")
    old.getresponse().read()
    authority = Authority(folder)
    after = authority.issue("server")
    assert after != before
    wait_for(lambda: serial(exporter) == after, 5, "the new certificate")
    assert exporter.get("/-/healthy", tls=trust(folder)).status == 200
    old.request("GET", "/-/healthy")
    assert old.getresponse().status == 200
    old.close()


def test_a_wrong_file_is_refused_with_line_and_key_and_the_running_one_stays(folder: Path, exporter: Exporter) -> None:
    (folder / "web.yml").write_text(TLS + "  min_version: TLS9\n")
    wait_for(lambda: "web configuration refused" in exporter.log(), 5, "the refusal")
    assert "web.yml:4: tls_server_config.min_version" in exporter.log()
    assert exporter.get("/-/healthy", tls=trust(folder)).status == 200
    (folder / "server.pem").write_text("nonsense")
    (folder / "web.yml").write_text(TLS)
    wait_for(lambda: "web.yml:2: tls_server_config.cert_file" in exporter.log(), 5, "the second refusal")
    assert exporter.get("/-/healthy", tls=trust(folder)).status == 200
    assert "Traceback" not in exporter.log()


def test_passwords_and_tls_can_be_switched_while_it_runs(folder: Path, exporter: Exporter) -> None:
    web = folder / "web.yml"
    web.write_text(TLS + "basic_auth_users: {a: $2b$04$ZI5i1DBXbiGqgCMKWUV8m.yYIPIiTxHHTwtLwbFPlHEDF4vJWc5pi}\n")
    wait_for(lambda: exporter.get("/metrics", tls=trust(folder)).status == 401, 5, "the password")
    web.write_text("")

    def plain() -> bool:
        try:
            return exporter.get("/metrics").status == 200
        except (OSError, http.client.HTTPException):
            return False

    wait_for(plain, 5, "plain HTTP")


def test_a_hangup_signal_reads_the_file_again(folder: Path, exporter: Exporter) -> None:
    exporter.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "loaded again" in exporter.log(), 5, "the reload")
    assert exporter.get("/-/healthy", tls=trust(folder)).status == 200


def test_only_clients_with_a_certificate_get_in_and_only_with_the_least_version(folder: Path) -> None:
    authority = Authority(folder)
    authority.issue("server")
    authority.issue("client")
    web = folder / "web.yml"
    web.write_text(
        TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n  min_version: TLS13\n"
    )
    with Exporter(folder / "registry", "--web.config.file", str(web)) as exporter:
        known = trust(folder)
        known.load_cert_chain(folder / "client.pem", folder / "client.key")
        assert exporter.get("/metrics", tls=known).status == 200
        with pytest.raises(OSError, match=r"(?i)certificate required|reset|eof|closed connection"):
            exporter.get("/metrics", tls=trust(folder))
        old = trust(folder)
        old.load_cert_chain(folder / "client.pem", folder / "client.key")
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError, match=r"(?i)version|eof"):
            exporter.get("/metrics", tls=old)
        assert exporter.get("/metrics", tls=known).status == 200
        assert "Traceback" not in exporter.log()
