"""The options by which commands are told how a cluster is reached."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from keyshard.config.connection import SERVICE_URL, Connection
from keyshard.errors import ConfigError

if TYPE_CHECKING:
    from keyshard.observe.control import RunningSource

T = TypeVar("T")
ADMIN_URL = "http://127.0.0.1:8080"
_PANEL = "Connection"


def _option(name: str, told: str) -> Any:
    return typer.Option(name, help=told, rich_help_panel=_PANEL)


ClientConfOption = Annotated[
    Path | None, _option("--client-conf", "client.conf of Pulsar; other options come before it.")
]
_OPTIONS: dict[str, tuple[str, Any]] = {
    "service_url": (
        "serviceUrl",
        Annotated[str | None, _option("--service-url", f"URL of the broker ({SERVICE_URL}).")],
    ),
    "admin_url": (
        "webServiceUrl",
        Annotated[
            str | None,
            _option(
                "--admin-url", f"URL of its admin interface; for the default broker {ADMIN_URL}."
            ),
        ],
    ),
    "auth_plugin": (
        "authPluginClassName",
        Annotated[str | None, _option("--auth-plugin", "token, tls, oauth2 or basic.")],
    ),
    "auth_params": (
        "authParams",
        Annotated[
            str | None,
            _option("--auth-params", "Its parameters; for token file:///path or env:NAME."),
        ],
    ),
    "tls_trust_certs": (
        "tlsTrustCertsFilePath",
        Annotated[str | None, _option("--tls-trust-certs", "PEM file of trusted authorities.")],
    ),
    "tls_certificate": (
        "tlsCertificateFilePath",
        Annotated[str | None, _option("--tls-certificate", "PEM file of the own certificate.")],
    ),
    "tls_key": ("tlsKeyFilePath", Annotated[str | None, _option("--tls-key", "Its key, PEM.")]),
    "tls_hostname_verification": (
        "tlsHostnameVerificationEnable",
        Annotated[
            bool | None,
            _option(
                "--tls-hostname-verification/--no-tls-hostname-verification",
                "Whether the certificate has to be that of the host.",
            ),
        ],
    ),
    "listener_name": (
        "listenerName",
        Annotated[str | None, _option("--listener-name", "Which of advertisedListeners is used.")],
    ),
    "transport": (
        "transport",
        Annotated[
            str | None,
            _option("--transport", "What consumes and reads: auto, wire or client."),
        ],
    ),
}  # fmt: skip


def with_connection(command: Callable[..., T]) -> Callable[..., T]:
    """Give a command the options of a connection, and the connection as ``connection``."""
    own = inspect.signature(command, eval_str=True)
    kept = [one for one in own.parameters.values() if one.name != "connection"]
    kinds = {"client_conf": ClientConfOption} | {name: kind for name, (_, kind) in _OPTIONS.items()}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in kinds.items()
    ]

    @wraps(command)
    def run(**given: Any) -> T:
        said = {name: given.pop(name) for name in kinds}
        return command(connection=connection_of(said.pop("client_conf"), said), **given)

    del run.__wrapped__  # its signature is not that of this
    keyword_only = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in kept]
    run.__signature__ = own.replace(parameters=[*keyword_only, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in [*kept, *added]}
    return run


def connection_of(client_conf: Path | None, given: dict[str, Any]) -> Connection:
    """The connection that options say, over what a file says.

    Raises:
        ConfigError: A value is wrong; names the option.
    """
    from keyshard.config.connection_names import NAMES, fields_of, read_client_conf

    names = {
        _OPTIONS[name][0]: str(value).lower() if isinstance(value, bool) else value
        for name, value in given.items()
        if value is not None
    }
    said = {} if client_conf is None else read_client_conf(client_conf)
    if "authPluginClassName" in names:
        said.pop("authentication", None)
    try:
        fields = said | fields_of(names)
        if fields.get("service_url", SERVICE_URL) == SERVICE_URL:
            fields.setdefault("admin_url", ADMIN_URL)
        return Connection(**fields)
    except ConfigError as exc:
        text = exc.message
        for option, (name, _) in _OPTIONS.items():
            shown = f"--{option.replace('_', '-')}"
            own = {name} if name == "authParams" else {name, NAMES[name]}
            for word in own:
                text = text.replace(word, shown)
        raise ConfigError(text) from exc


def source_of(
    subscription: str | None, service_url: str | None, client_conf: Path | None, pid: int | None
) -> RunningSource:
    """The running source that options mean; raises as ``running_source``."""
    from keyshard.observe.control import running_source

    return running_source(subscription, _cluster(service_url, client_conf), pid)


def sources_of(
    subscription: str | None, service_url: str | None, client_conf: Path | None, pid: int | None
) -> list[RunningSource]:
    """Every running source that options mean; raises as ``running_sources``."""
    from keyshard.observe.control import running_sources

    found = running_sources(subscription, _cluster(service_url, client_conf))
    return [one for one in found if pid in (None, one.pid)]


def _cluster(service_url: str | None, client_conf: Path | None) -> str | None:
    from keyshard.config.connection_names import read_client_conf

    if service_url is None and client_conf is not None:
        named: str | None = read_client_conf(client_conf).get("service_url")
        return named
    return service_url
