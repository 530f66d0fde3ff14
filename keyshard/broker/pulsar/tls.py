"""TLS of what keyshard asks itself, and what went wrong with it in one sentence.

pulsar-client says of every failure that the connection failed; so the first question goes first,
with the same files and the same checks.
"""

from __future__ import annotations

import os
import ssl
from functools import lru_cache
from pathlib import Path

import certifi

from keyshard.config.connection import Connection
from keyshard.errors import ConfigError, TlsError

CONTEXTS_MAX = 8
"""Connections whose TLS is kept; one takes half a megabyte."""


def tls_context(connection: Connection) -> ssl.SSLContext:
    """TLS as the connection says it.

    Raises:
        ConfigError: One of its files does not hold what it should.
    """
    return _made(*_asked(connection))


def shared_tls_context(connection: Connection) -> ssl.SSLContext:
    """The same for all clients of one library, as long as the files are the same ones.

    To read the authorities takes longer than all that a task asks of the admin interface.

    Raises:
        ConfigError: One of its files does not hold what it should.
    """
    asked = _asked(connection)
    trusted, certificate, key, _ = asked
    return _kept(asked, tuple(map(_state, (trusted or certifi.where(), certificate, key))))


_Path = str | os.PathLike[str] | None
_Asked = tuple[_Path, _Path, _Path, bool]


def _asked(connection: Connection) -> _Asked:
    return (
        connection.tls_trust_certs_file_path, connection.tls_certificate_file_path,
        connection.tls_key_file_path, connection.tls_hostname_verification,
    )  # fmt: skip


@lru_cache(maxsize=CONTEXTS_MAX)
def _kept(asked: _Asked, _: tuple[object, ...]) -> ssl.SSLContext:
    return _made(*asked)


def _state(path: _Path) -> object:
    """Another value when the file is another."""
    try:
        found = None if path is None else Path(path).stat()
    except OSError:
        return None
    return found and (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _made(trusted: _Path, certificate: _Path, key: _Path, verification: bool) -> ssl.SSLContext:
    context = client_context(trusted)
    context.check_hostname = verification
    if certificate is not None and key is not None:
        try:
            # With a text here nobody is asked for a passphrase at a terminal.
            context.load_cert_chain(certificate, key, password="")
        except OSError as exc:
            raise ConfigError(
                f"tls_certificate_file_path {certificate} and tls_key_file_path {key} do not go "
                f"together as PEM files without a passphrase ({_reason(exc)})."
            ) from exc
    return context


def client_context(ca: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """TLS that trusts some authorities; ``None``: those of the package certifi.

    Raises:
        ConfigError: The file does not hold certificates.
    """
    try:
        return ssl.create_default_context(cafile=certifi.where() if ca is None else ca)
    except OSError as exc:
        raise ConfigError(
            f"tls_trust_certs_file_path {ca} holds no certificates as PEM ({_reason(exc)})."
        ) from exc


def tls_error(exc: BaseException, where: str, connection: Connection) -> TlsError | None:
    """What a failed handshake means; ``None`` when the other side does not speak TLS."""
    found: BaseException | None = exc
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    if isinstance(found, ssl.SSLCertVerificationError):
        told = found.verify_message.rstrip(".") or _reason(found)
        if "mismatch" in told or "is not valid for" in told:
            return TlsError(
                f"{where} shows a certificate of another host: {told}. Name the host as in the "
                "certificate, or switch tls_hostname_verification off."
            )
        ca = connection.tls_trust_certs_file_path
        trusted = "the package certifi" if ca is None else f"the file {ca}"
        return TlsError(
            f"{where} shows a certificate that is not trusted: {told}. Trusted are the authorities "
            f"of {trusted}: name the right file in tls_trust_certs_file_path."
        )
    if isinstance(found, ssl.SSLError) and "ALERT" in (getattr(found, "reason", None) or ""):
        own = connection.tls_certificate_file_path
        shown = "No certificate is given" if own is None else f"The certificate is {own}"
        return TlsError(
            f"{where} refuses this side of TLS ({_reason(found)}). {shown}: check "
            "tls_certificate_file_path."
        )
    return None


def _reason(exc: OSError) -> str:
    reason = getattr(exc, "reason", None) or exc.strerror or type(exc).__name__
    return str(reason).replace("_", " ").lower()
