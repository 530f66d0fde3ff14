"""TLS contexts for keyshard's own requests, and explanations of TLS failures.

pulsar-client reports every failure as a failed connection. keyshard therefore connects first, with
the same files and the same checks.
"""

from __future__ import annotations

import os
import ssl
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import certifi

from keyshard.config.connection import Connection
from keyshard.config.segments import Segments
from keyshard.errors import ConfigError, TlsError

CONTEXTS_MAX = 8
"""Number of cached TLS contexts; one takes half a megabyte."""


def tls_context(connection: Connection) -> ssl.SSLContext:
    """Create the TLS context of a connection.

    Raises:
        ConfigError: One of its files has invalid content.
    """
    return context_of(_asked(connection))


def shared_tls_context(connection: Connection) -> ssl.SSLContext:
    """Return a context that httpx clients share while the files are unchanged.

    Loading the authorities takes longer than all admin requests of a task. Only httpx may use this
    context, because httpx changes it: it sets the ALPN protocols.

    Raises:
        ConfigError: One of its files has invalid content.
    """
    asked = _asked(connection)
    files = asked.trusted or certifi.where(), asked.certificate, asked.key
    return _kept(asked, tuple(map(_state, files)))


_Path = str | os.PathLike[str] | None


class TlsOptions(NamedTuple):
    """TLS options for some hosts, and the option names that error texts use for them."""

    trusted: _Path
    """PEM file of trusted authorities; ``None``: those of certifi."""
    certificate: _Path
    """PEM file of the client certificate."""
    key: _Path
    """PEM file of its key."""
    verification: bool
    """Whether the certificate must name the host."""
    prefix: str = "tls_"
    """Prefix of the option names of all four."""
    named_in: str = "the URL"
    """Where a user sets the host, for error texts."""


def _asked(connection: Connection) -> TlsOptions:
    return TlsOptions(
        connection.tls_trust_certs_file_path, connection.tls_certificate_file_path,
        connection.tls_key_file_path, connection.tls_hostname_verification,
    )  # fmt: skip


def of_bookies(segments: Segments) -> TlsOptions | None:
    """Return how TLS is spoken with bookies; ``None``: not at all."""
    if segments.bookies_trust_certs_file_path is None:
        return None
    return TlsOptions(
        segments.bookies_trust_certs_file_path, segments.bookies_certificate_file_path,
        segments.bookies_key_file_path, segments.bookies_hostname_verification,
        "bookies_", "bookies_map",
    )  # fmt: skip


@lru_cache(maxsize=CONTEXTS_MAX)
def _kept(asked: TlsOptions, _: tuple[object, ...]) -> ssl.SSLContext:
    return context_of(asked)


def _state(path: _Path) -> object:
    """Return a value that changes if the file changes."""
    try:
        found = None if path is None else Path(path).stat()
    except OSError:
        return None
    return found and (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def context_of(asked: TlsOptions) -> ssl.SSLContext:
    """Create a TLS context.

    Raises:
        ConfigError: One of the files has invalid content.
    """
    certificate, key, prefix = asked.certificate, asked.key, asked.prefix
    context = client_context(asked.trusted, prefix)
    context.check_hostname = asked.verification
    if certificate is not None and key is not None:
        try:
            # An explicit password prevents a prompt for a passphrase at the terminal.
            context.load_cert_chain(certificate, key, password="")
        except OSError as exc:
            raise ConfigError(
                f"{prefix}certificate_file_path {certificate} and {prefix}key_file_path {key} are "
                f"not a matching pair of PEM files without a passphrase ({_reason(exc)}).",
                "Correct one of them.",
            ) from exc
    return context


def client_context(ca: _Path, prefix: str = "tls_") -> ssl.SSLContext:
    """Create a context that trusts a file of authorities; ``None``: those of certifi.

    Raises:
        ConfigError: The file does not hold certificates.
    """
    try:
        return ssl.create_default_context(cafile=certifi.where() if ca is None else ca)
    except OSError as exc:
        raise ConfigError(
            f"{prefix}trust_certs_file_path {ca} contains no PEM certificates ({_reason(exc)}).",
            "Name a PEM file of trusted authorities.",
        ) from exc


def tls_error(exc: BaseException, where: str, connection: Connection) -> TlsError | None:
    """Explain a failed handshake; ``None`` if the other side does not speak TLS."""
    return explained(exc, where, _asked(connection))


def explained(exc: BaseException, where: str, asked: TlsOptions) -> TlsError | None:
    """Explain a failed handshake; ``None`` if the other side does not speak TLS."""
    prefix = asked.prefix
    found: BaseException | None = exc
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    if isinstance(found, ssl.SSLCertVerificationError):
        reason = found.verify_message.rstrip(".") or _reason(found)
        if "mismatch" in reason or "is not valid for" in reason:
            return TlsError(
                f"{where} presents a certificate of another host: {reason}.",
                f"Use the host name of the certificate in {asked.named_in}, or set "
                f"{prefix}hostname_verification to false.",
            )
        if "expired" in reason or "not yet valid" in reason:
            return TlsError(
                f"{where} presents a certificate that is not valid now: {reason}.",
                "Renew the certificate of the broker, or correct the clock of this machine.",
            )
        ca = asked.trusted
        trusted = "the package certifi" if ca is None else f"the file {ca}"
        return TlsError(
            f"{where} presents a certificate that is not trusted: {reason}. The trusted "
            f"authorities are those of {trusted}.",
            f"Set {prefix}trust_certs_file_path to the file of the right authority.",
        )
    if isinstance(found, ssl.SSLError) and "ALERT" in (getattr(found, "reason", None) or ""):
        if "PROTOCOL_VERSION" in (found.reason or ""):
            return TlsError(
                f"{where} and this client have no version of TLS in common ({_reason(found)}).",
                "Enable TLS 1.2 or 1.3 at the broker.",
            )
        own = asked.certificate
        shown = "This connection has no certificate" if own is None else f"The certificate is {own}"
        return TlsError(
            f"{where} rejects the TLS handshake of this client ({_reason(found)}). {shown}.",
            f"Check {prefix}certificate_file_path.",
        )
    return None


def _reason(exc: OSError) -> str:
    reason = getattr(exc, "reason", None) or exc.strerror or type(exc).__name__
    return str(reason).replace("_", " ").lower()
