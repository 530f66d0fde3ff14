"""TLS and tokens of a development broker: its authority, certificates, signed tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from keyshard.config.connection import Connection, Token
from keyshard.errors import DevBrokerError
from keyshard.redaction import Secret
from keyshard.testing.devbroker.process import LOOPBACK

ADMIN = "admin"
"""Role that may do everything."""

_DAYS = 3_650
"""Lifetime of a certificate, days: it lasts as long as its data directory, which may be kept."""
_PRIVATE = 0o600


class Authority:
    """The certificate authority of one broker, in its own folder.

    Args:
        folder: Folder of its files, which are created if they are missing.

    Raises:
        DevBrokerError: The package that makes certificates is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "ca.pem"
        """Certificate of the authority."""
        folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            self._make("ca", "keyshard development authority", signed_by=None)

    def certificate(self, name: str, unit: str = "") -> tuple[Path, Path]:
        """Return certificate and key of a server at the loopback address, or of a client's role.

        Args:
            name: Its common name.
            unit: Its organizational unit, where bookies look for roles (``0:role``); may be empty.
        """
        path, key = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        if not (path.exists() and key.exists()):
            self._make(name, name, signed_by="ca", unit=unit)
        return path, key

    def _make(self, file: str, subject: str, *, signed_by: str | None, unit: str = "") -> None:
        try:
            from cryptography import x509  # noqa: PLC0415 - an extra
            from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
            from cryptography.hazmat.primitives.asymmetric import rsa  # noqa: PLC0415
        except ImportError as exc:
            raise DevBrokerError(
                "A broker with TLS needs the package cryptography.",
                "Run pip install 'keyshard[broker]'.",
            ) from exc
        own = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
        facts = {x509.NameOID.COMMON_NAME: subject, x509.NameOID.ORGANIZATIONAL_UNIT_NAME: unit}
        name = x509.Name([x509.NameAttribute(kind, text) for kind, text in facts.items() if text])
        now = datetime.now(timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .public_key(own.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=_DAYS))
            .add_extension(x509.BasicConstraints(ca=signed_by is None, path_length=None), True)  # noqa: FBT003
        )
        issuer, key = name, own
        if signed_by is not None:
            pem = (self._folder / f"{signed_by}.pem").read_bytes()
            issuer = x509.load_pem_x509_certificate(pem).subject
            read: Any = serialization.load_pem_private_key(
                (self._folder / f"{signed_by}-key.pem").read_bytes(), None
            )
            key = read
            names = [x509.DNSName("localhost"), x509.IPAddress(ip_address(LOOPBACK))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.issuer_name(issuer).sign(key, hashes.SHA256())
        _write(
            self._folder / f"{file}-key.pem",
            own.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        _write(self._folder / f"{file}.pem", signed.public_bytes(serialization.Encoding.PEM))


class TokenSigner:
    """Signs tokens (JWT, HS256) with a secret in a folder; a missing secret is created."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "token-secret"
        if not self.path.exists():
            _write(self.path, secrets.token_bytes(32))

    def token(self, role: str, expires_in_s: float | None = None) -> str:
        """Return a token of a role.

        Args:
            role: Role of the token's holder.
            expires_in_s: Seconds until it expires; negative: it has expired; default: never.
        """
        claims: dict[str, Any] = {"sub": role}
        if expires_in_s is not None:
            claims["exp"] = int(time.time() + expires_in_s)
        signed = f"{_encoded({'alg': 'HS256', 'typ': 'JWT'})}.{_encoded(claims)}"
        digest = hmac.new(self.path.read_bytes(), signed.encode(), hashlib.sha256).digest()
        return f"{signed}.{_base64(digest)}"


def tls_settings(authority: Authority, port: int, admin_port: int) -> dict[str, str]:
    """Return broker settings for TLS on both ports, and no port without TLS."""
    certificate, key = authority.certificate("broker")
    return {
        "brokerServicePort": "",
        "webServicePort": "",
        "brokerServicePortTls": str(port),
        "webServicePortTls": str(admin_port),
        "tlsCertificateFilePath": str(certificate),
        "tlsKeyFilePath": str(key),
        "tlsTrustCertsFilePath": str(authority.path),
        "brokerClientTlsEnabled": "true",
        "brokerClientTrustCertsFilePath": str(authority.path),
    }


def token_settings(signer: TokenSigner, *, tls: bool) -> dict[str, str]:
    """Return settings for authentication and authorization: only :data:`ADMIN` has rights."""
    providers = ["Token", "Tls"] if tls else ["Token"]
    prefix = "org.apache.pulsar.broker.authentication.AuthenticationProvider"
    return {
        "authenticationEnabled": "true",
        "authenticationProviders": ",".join(prefix + name for name in providers),
        "authenticationRefreshCheckSeconds": "1",
        "tokenSecretKey": signer.path.as_uri(),
        "authorizationEnabled": "true",
        "superUserRoles": ADMIN,
        "brokerClientAuthenticationPlugin": (
            "org.apache.pulsar.client.impl.auth.AuthenticationToken"
        ),
        "brokerClientAuthenticationParameters": f"token:{signer.token(ADMIN)}",
    }


def write_client_conf(path: Path, connection: Connection) -> None:
    """Write a ``client.conf`` of Pulsar for a broker; only the user can read the file.

    Raises:
        DevBrokerError: It cannot be written.
    """
    said = {
        "brokerServiceUrl": connection.service_url,
        "webServiceUrl": connection.admin_url or "",
    }
    if connection.tls:
        said["tlsTrustCertsFilePath"] = str(connection.tls_trust_certs_file_path)
        said["tlsEnableHostnameVerification"] = "true"
    token = connection.authentication
    if isinstance(token, Token) and isinstance(token.value, Secret):
        said["authPlugin"] = "org.apache.pulsar.client.impl.auth.AuthenticationToken"
        said["authParams"] = f"token:{token.value.reveal()}"
    text = "".join(f"{name}={value}\n" for name, value in said.items())
    try:
        _write(path, text.encode())
    except OSError as exc:
        raise DevBrokerError(f"{path} cannot be written: {exc}.", "Use another --data.") from exc


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.touch(_PRIVATE)
    fresh.write_bytes(data)
    fresh.replace(path)


def _encoded(claims: Mapping[str, Any]) -> str:
    return _base64(json.dumps(claims, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
