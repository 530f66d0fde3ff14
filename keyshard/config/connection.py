"""The connection to a cluster: URLs, TLS, authentication, time limits. Shows no secret."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from keyshard.config.field_types import short_repr
from keyshard.core.option_checks import (
    check_bool,
    check_choice,
    check_integer,
    check_text,
    suggesting_options,
)
from keyshard.errors import ConfigError
from keyshard.redaction import Secret, shown

SERVICE_URL = "pulsar://127.0.0.1:6650"
"""Default URL of the broker."""
MEMORY = "memory://"
"""Prefix of the URL of an in-memory cluster of this process; the name follows."""
AUTO: Final = "auto"
CLIENT: Final = "client"
WIRE: Final = "wire"
Transport = Literal["auto", "wire", "client"]
_SERVICE = re.compile(r"pulsar(\+ssl)?://[^/\s,]+(,[^/\s,]+)*/?")
_MEMORY = re.compile(r"memory://[^/\s,]+")
_HTTP = re.compile(r"https?://[^/\s]+/?")
_LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?/?")
_SERVICE_WANTED = "Write pulsar://host:port or pulsar+ssl://host:port."


@dataclass(frozen=True, slots=True)
class Token:
    """A token (JWT), given as text, file or environment variable.

    A file is read again for each authentication, so a renewed token takes effect without a restart.
    """

    value: Secret | str | None = None
    file: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    """Path of the file that holds the token."""
    environment: str | None = field(default=None, kw_only=True)
    """Name of the environment variable that holds the token."""

    def __post_init__(self) -> None:
        if [self.value, self.file, self.environment].count(None) != 2:
            raise ConfigError(
                "A token has one source.", "Give a value, a file or an environment variable."
            )
        if self.value is not None:
            object.__setattr__(self, "value", check_secret("token", self.value))
        if self.file is not None:
            object.__setattr__(self, "file", check_file("token file", self.file))
        if self.environment is not None:
            name = check_text(
                "environment",
                self.environment,
                "Name the environment variable that contains the token.",
            )
            if not os.environ.get(name):
                raise ConfigError(
                    f"The environment variable {shown(name)} of the token is not set.",
                    "Set it, or name another one.",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuth2:
    """Client credentials for OAuth 2.0. The issuer exchanges them for tokens."""

    issuer_url: str
    """Issuer of tokens, ``https://host/path``. Its OpenID discovery document names the token
    endpoint."""
    audience: str | None = None
    """Name of the cluster at the issuer."""
    scope: str | None = None
    """Scopes, separated by spaces."""
    credentials_file: str | os.PathLike[str] | None = None
    """JSON file with ``client_id`` and ``client_secret``, in the format of Pulsar's other
    clients."""
    client_id: str | None = None
    """Instead of ``credentials_file``."""
    client_secret: Secret | str | None = None
    """Instead of ``credentials_file``."""

    def __post_init__(self) -> None:
        remedy = "Write https://host/path."
        url = check_text("issuer_url", self.issuer_url, remedy)
        if url.partition("://")[0] not in ("http", "https") or not _host(url):
            raise ConfigError(f"issuer_url is {shown(url)}.", remedy)
        for name in ("audience", "scope", "client_id"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name), "Write the text that the issuer expects.")
        own = (self.client_id is not None, self.client_secret is not None)
        if (own != (True, True)) if self.credentials_file is None else any(own):
            raise ConfigError(
                "OAuth 2.0 needs one source of credentials.",
                "Give credentials_file, or client_id and client_secret.",
            )
        if self.credentials_file is None:
            secret = check_secret("client_secret", self.client_secret)
            object.__setattr__(self, "client_secret", secret)
        else:
            path = check_file("credentials_file", self.credentials_file)
            object.__setattr__(self, "credentials_file", path)


@dataclass(frozen=True, slots=True)
class Basic:
    """A user's name and password."""

    user: str
    password: Secret | str

    def __post_init__(self) -> None:
        check_text("user", self.user, "Name the user.")
        if ":" in self.user:
            raise ConfigError(f"user is {shown(self.user)}; it must not contain a colon.")
        password = check_secret("password", self.password).reveal()
        object.__setattr__(self, "password", Secret(password, self.user))


@suggesting_options
@dataclass(frozen=True, slots=True, repr=False)
class Connection:
    """Connection settings, used for the broker and its admin interface.

    ::

        Connection(
            "pulsar+ssl://broker:6651", "https://broker:8443",
            tls_trust_certs_file_path="ca.pem", authentication=Token(file="/run/secrets/token"),
        )

    A client certificate without other authentication identifies the source (mTLS).

    Raises:
        ConfigError: A value is wrong, a file is missing, or two values contradict each other.
    """

    service_url: str = SERVICE_URL
    """URL of the broker: ``pulsar://host:port``, or with TLS ``pulsar+ssl://host:port``.
    ``memory://name`` is an in-memory cluster of this process, for tests."""
    admin_url: str | None = None
    """Admin REST interface, ``http://host:port`` or ``https://host:port``. Enables checks that
    the client cannot make. For an in-memory cluster, use the URL of the cluster."""
    authentication: Token | OAuth2 | Basic | None = field(default=None, kw_only=True)
    """Credentials for the broker and its admin interface."""
    tls_trust_certs_file_path: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    """PEM file of trusted certificate authorities; ``None``: those of the package certifi."""
    tls_certificate_file_path: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    """PEM file of the client certificate. Needs ``tls_key_file_path``."""
    tls_key_file_path: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    """PEM file of the private key of the client certificate, without a passphrase."""
    tls_hostname_verification: bool = field(default=True, kw_only=True)
    """Whether the certificate must match the host in the URL."""
    listener_name: str | None = field(default=None, kw_only=True)
    """Listener whose advertised address is used (``advertisedListeners`` of the broker)."""
    operation_timeout_ms: int = field(default=30_000, kw_only=True)
    """Time limit of one request to the broker, milliseconds."""
    connection_timeout_ms: int = field(default=10_000, kw_only=True)
    """Time limit of establishing a connection, milliseconds."""
    transport: Transport = field(default=AUTO, kw_only=True)
    """Transport that consumes and reads, and publishes dead letters. ``wire`` implements Pulsar's
    protocol and takes whole entries. ``client`` is pulsar-client. ``auto`` is ``wire``. Sinks need
    ``wire``; ``keyshard produce`` always publishes through pulsar-client."""

    def __repr__(self) -> str:
        return short_repr(self, always=("service_url",))

    def __post_init__(self) -> None:
        self._check_urls()
        if not isinstance(self.authentication, (Token, OAuth2, Basic, type(None))):
            raise ConfigError(
                f"authentication is {shown(self.authentication)}.", "Give a Token, OAuth2 or Basic."
            )
        for name in _FILES:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_file(name, getattr(self, name)))
        check_bool("tls_hostname_verification", self.tls_hostname_verification)
        if self.listener_name is not None:
            check_text("listener_name", self.listener_name, "Name one of advertisedListeners.")
        check_integer("operation_timeout_ms", self.operation_timeout_ms, 1_000, 3_600_000)
        check_integer("connection_timeout_ms", self.connection_timeout_ms, 100, 3_600_000)
        check_choice("transport", self.transport, AUTO, CLIENT, WIRE)
        self._check_together()

    def _check_urls(self) -> None:
        url = check_text("service_url", self.service_url, _SERVICE_WANTED)
        admin = self.admin_url
        if admin is not None:
            check_text("admin_url", admin, "Write http://host:port.")
        if self.in_memory:
            if admin not in (None, url):
                raise ConfigError(
                    f"admin_url is {shown(admin)}, but the admin interface of the in-memory "
                    f"cluster {shown(url)} has the same URL.",
                    "Leave admin_url out.",
                )
            return
        if not _SERVICE.fullmatch(url) or not _ports_fit(url):
            raise ConfigError(f"service_url is {shown(url)}.", _SERVICE_WANTED)
        _check_hosts("service_url", url, self.hosts)
        if "@" in url:
            raise ConfigError(
                f"service_url is {shown(url)}, but a service URL cannot contain a user or a "
                "password.",
                _SERVICE_WANTED,
            )
        if admin is not None and not (
            _HTTP.fullmatch(admin) and _ports_fit(admin) and _host(admin)
        ):
            raise ConfigError(f"admin_url is {shown(admin)}.", "Write http://host:port.")
        if admin is not None:
            _check_hosts("admin_url", admin, [admin.partition("://")[2].rstrip("/")])

    def _check_together(self) -> None:
        missing = {"tls_certificate_file_path", "tls_key_file_path"} - {
            name for name in _FILES if getattr(self, name) is not None
        }
        if len(missing) == 1:
            (name,) = missing
            raise ConfigError(f"{name} is missing. A certificate needs its key.", "Give both.")
        given = [name for name in _FILES if getattr(self, name) is not None]
        if given and not self.tls and not (self.admin_url or "").startswith("https://"):
            raise ConfigError(
                f"{given[0]} is given, but service_url is {shown(self.service_url)}, without TLS.",
                f"Write pulsar+ssl://host:port (default port 6651), or leave {given[0]} out.",
            )
        if self.in_memory and (
            self.authentication is not None
            or self.listener_name is not None
            or self.transport != AUTO
        ):
            raise ConfigError(
                f"service_url is {shown(self.service_url)}, and an in-memory cluster supports "
                "neither authentication nor listener_name nor transport.",
                "Leave them out.",
            )
        if self.authentication is not None and "@" in (self.admin_url or ""):
            raise ConfigError(
                "admin_url contains a user, and authentication is given as well.",
                "Give only one of them.",
            )

    @property
    def in_memory(self) -> bool:
        """Whether the broker is an in-memory cluster of this process."""
        return _MEMORY.fullmatch(self.service_url) is not None

    @property
    def by_client(self) -> bool:
        """Whether pulsar-client consumes and reads."""
        return self.transport == CLIENT and not self.in_memory

    @property
    def tls(self) -> bool:
        """Whether connections to the broker use TLS."""
        return self.service_url.startswith("pulsar+ssl://")

    @property
    def hosts(self) -> Sequence[str]:
        """Hosts of the service URL, each with its port if it has one."""
        return self.service_url.partition("://")[2].rstrip("/").split(",")

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of the service URL; ``None`` if it has several hosts, or is in memory."""
        if self.in_memory or len(self.hosts) > 1:
            return None
        return host_and_port(self.hosts[0], tls=self.tls)

    @property
    def says_secrets_in_the_clear(self) -> str:
        """The option whose URL sends a secret over a network without TLS; empty for none."""
        if self.authentication is None:
            return ""
        if not self.tls and not all(map(_LOOPBACK.fullmatch, self.hosts)):
            return "service_url"
        admin = self.admin_url or ""
        plain = admin.startswith("http://") and not _LOOPBACK.fullmatch(admin.partition("://")[2])
        return "admin_url" if plain else ""


_FILES = ("tls_trust_certs_file_path", "tls_certificate_file_path", "tls_key_file_path")


def set_shorthands(
    config: Any, names: Iterable[str], connection: object, before: object = None
) -> None:
    """Set options of a source or a sink to the values of its connection.

    Args:
        config: The source or the sink.
        names: The options, which are fields of both.
        connection: The connection.
        before: A connection whose values do not contradict it; ``None`` for none.

    Raises:
        ConfigError: It is not a connection, or an option has another value.
    """
    if not isinstance(connection, Connection):
        raise ConfigError(f"connection is {shown(connection)}.", "Give a keyshard.Connection.")
    for name in names:
        unsaid = [type(config).__dataclass_fields__[name].default, getattr(connection, name)]
        if isinstance(before, Connection):
            unsaid.append(getattr(before, name))
        if getattr(config, name) not in unsaid:
            raise ConfigError(
                f"{name} is given, but the connection has another value.",
                "Set it in the connection only.",
            )
        object.__setattr__(config, name, getattr(connection, name))


def host_and_port(host: str, *, tls: bool) -> tuple[str, int]:
    """Split ``host:port`` of a service URL; the port defaults to Pulsar's."""
    parts = urlsplit(f"//{host}")
    return parts.hostname or "", parts.port or (6651 if tls else 6650)


def check_file(name: str, path: object) -> str:
    """Check that a file can be read, and return its path."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise ConfigError(f"{name} is {shown(path)}.", "Name a file.")
    text = check_text(name, os.fspath(path), "Name a file.")
    try:
        with Path(text).open("rb"):
            return text
    except OSError as exc:
        raise ConfigError(
            f"{name} is {shown(text)}, which cannot be read: {exc.strerror}.",
            "Correct the path or its permissions.",
        ) from exc


def check_secret(name: str, value: object) -> Secret:
    """Check that a secret fits a header. The error does not contain the secret."""
    text = value.reveal() if isinstance(value, Secret) else value
    if not isinstance(text, str) or not text.strip() or not (text.isascii() and text.isprintable()):
        raise ConfigError(f"{name} is not valid. It must be printable ASCII text.")
    return Secret(text.strip())


def _host(url: str) -> str:
    """Return the host of a URL; empty if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _check_hosts(option: str, url: str, hosts: Sequence[str]) -> None:
    """Refuse a URL whose host is neither a valid name nor an IP address."""
    for text in hosts:
        host = _host(f"//{text}")
        if not _is_host(host, in_brackets=text.rpartition("@")[2].startswith("[")):
            named = shown(host or text.rpartition("@")[2])
            raise ConfigError(
                f"{option} is {shown(url)}, and {named} is not a valid host. Each label of a name "
                "has 1 to 63 characters, and an IPv6 address has brackets.",
                "Correct the URL.",
            )


def _is_host(host: str, *, in_brackets: bool) -> bool:
    try:
        if in_brackets:
            ipaddress.IPv6Address(host.partition("%")[0])
        else:
            name = host.removesuffix(".").encode("idna")
            return 0 < len(name) <= 253 and b"\0" not in name
    except ValueError:
        return False
    return True


def _ports_fit(url: str) -> bool:
    """Return whether all ports in a URL are valid."""
    hosts = url.partition("://")[2].rstrip("/").rpartition("@")[2].split(",")
    ports = [port for host in hosts for _, colon, port in [host.rpartition(":")] if colon]
    return all(port.endswith("]") or _is_port(port) for port in ports)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) < 65_536
