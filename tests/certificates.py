"""Certificates for tests, made on the spot."""

from __future__ import annotations

import datetime
import ipaddress
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path


class Authority:
    """A certificate authority; ``ca.pem`` in its folder is its certificate."""

    def __init__(self, folder: Path) -> None:
        """Make the authority, a new one each time."""
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self._certificate = self._sign(self._name, self._key, is_authority=True)
        (folder / "ca.pem").write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> int:
        """Write ``NAME.pem`` and ``NAME.key`` for localhost and return the serial number."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, is_authority=False)
        (self._folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (self._folder / f"{name}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate.serial_number

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
