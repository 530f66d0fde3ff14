"""Options of commands for the connection to a cluster."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from keyshard.config.connection import SERVICE_URL, Connection
from keyshard.errors import ConfigError

if TYPE_CHECKING:
    from keyshard.control import RunningSource

T = TypeVar("T")
ADMIN_URL = "http://127.0.0.1:8080"
OTHER_S = 3.0
"""Longest wait for a sink or a worker, seconds: a suspended one must not hold up the others."""
_PANEL = "Connection"


def _option(name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=_PANEL)


ClientConfOption = Annotated[
    Path | None,
    _option("--client-conf", "Pulsar's client.conf. Other options override its values."),
]
ConfigOption = Annotated[
    Path | None,
    _option("--config", "TOML file with settings. Default: that of KEYSHARD_CONFIG."),
]
_OPTIONS: dict[str, tuple[str, Any]] = {
    "service_url": (
        "serviceUrl",
        Annotated[
            str | None, _option("--service-url", f"URL of the broker. Default: {SERVICE_URL}.")
        ],
    ),
    "admin_url": (
        "webServiceUrl",
        Annotated[
            str | None,
            _option(
                "--admin-url",
                f"URL of the admin interface. Default with the default broker: {ADMIN_URL}.",
            ),
        ],
    ),
    "auth_plugin": (
        "authPluginClassName",
        Annotated[
            str | None, _option("--auth-plugin", "Authentication: token, tls, oauth2 or basic.")
        ],
    ),
    "auth_params": (
        "authParams",
        Annotated[
            str | None,
            _option(
                "--auth-params",
                "Parameters of the authentication. For a token: file:///path or env:NAME.",
            ),
        ],
    ),
    "tls_trust_certs": (
        "tlsTrustCertsFilePath",
        Annotated[str | None, _option("--tls-trust-certs", "PEM file of the trusted authorities.")],
    ),
    "tls_certificate": (
        "tlsCertificateFilePath",
        Annotated[str | None, _option("--tls-certificate", "PEM file of the client certificate.")],
    ),
    "tls_key": (
        "tlsKeyFilePath",
        Annotated[
            str | None, _option("--tls-key", "PEM file of the key of the client certificate.")
        ],
    ),
    "tls_hostname_verification": (
        "tlsHostnameVerificationEnable",
        Annotated[
            bool | None,
            _option(
                "--tls-hostname-verification/--no-tls-hostname-verification",
                "Check that the certificate of the server names its host. Default: on.",
            ),
        ],
    ),
    "listener_name": (
        "listenerName",
        Annotated[
            str | None, _option("--listener-name", "Name of the advertised listener to use.")
        ],
    ),
    "transport": (
        "transport",
        Annotated[
            str | None,
            _option(
                "--transport",
                "Client to consume and read with: wire, client, or auto (wire). Default: auto.",
            ),
        ],
    ),
}  # fmt: skip


def with_connection(command: Callable[..., T]) -> Callable[..., T]:
    """Add the options of a connection to a command, which gets it as ``connection``."""
    own = inspect.signature(command, eval_str=True)
    kept = [one for one in own.parameters.values() if one.name != "connection"]
    files = {"client_conf": ClientConfOption, "config": ConfigOption}
    kinds = files | {name: kind for name, (_, kind) in _OPTIONS.items()}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in kinds.items()
    ]

    @wraps(command)
    def run(**given: Any) -> T:
        said = {name: given.pop(name) for name in kinds}
        client_conf, config = said.pop("client_conf"), said.pop("config")
        return command(connection=connection_of(client_conf, said, config), **given)

    del run.__wrapped__  # tools that follow it would see the command without these options
    keyword_only = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in kept]
    run.__signature__ = own.replace(parameters=[*keyword_only, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in [*kept, *added]}
    return run


def connection_of(
    client_conf: Path | None, given: dict[str, Any], config: Path | None = None
) -> Connection:
    """Return the connection of options, the environment and files; options override the others.

    Raises:
        ConfigError: A value is wrong. The error names the option.
    """
    from keyshard.config.settings import read_settings

    names = {
        _OPTIONS[name][0]: str(value).lower() if isinstance(value, bool) else value
        for name, value in given.items()
        if value is not None
    }
    try:
        made = read_settings(config, client_conf=client_conf, options=names).connection()
        if made.service_url == SERVICE_URL and made.admin_url is None:
            return replace(made, admin_url=ADMIN_URL)
    except ConfigError as exc:
        raise exc.with_text(_as_options(exc.problem), _as_options(exc.remedy)) from exc
    return made


def _as_options(text: str) -> str:
    """Replace the names of fields in a text with those of options."""
    from keyshard.config.connection_names import NAMES

    for option, (name, _) in _OPTIONS.items():
        own = {name} if name == "authParams" else {name, NAMES[name]}
        for word in own:
            text = text.replace(word, f"--{option.replace('_', '-')}")
    return text


def source_of(
    subscription: str | None, service_url: str | None, client_conf: Path | None, pid: int | None
) -> RunningSource:
    """Return the running source that matches the options; raises as ``running_source``."""
    from keyshard.control import running_source

    return running_source(subscription, _cluster(service_url, client_conf), pid)


def sources_of(
    subscription: str | None, service_url: str | None, client_conf: Path | None, pid: int | None
) -> list[RunningSource]:
    """Return all running sources that match the options; raises as ``running_sources``."""
    from keyshard.control import running_sources

    found = running_sources(subscription, _cluster(service_url, client_conf))
    return [one for one in found if pid in (None, one.pid)]


def others_of(
    kind: str,
    name: str | None,
    service_url: str | None,
    client_conf: Path | None,
    pid: int | None,
) -> tuple[list[RunningSource], list[str]]:
    """Return the sinks or workers that match, and the errors of those that do not answer.

    Args:
        kind: ``SINK`` or ``WORKER`` of the control socket.
        name: Their name; ``None``: any.
        service_url: Their cluster, as for sources.
        client_conf: As for sources.
        pid: Their process id; ``None``: any.
    """
    from keyshard.control import answering_sources

    found, errors = answering_sources(OTHER_S, kind, _cluster(service_url, client_conf))
    matching = [one for one in found if name in (None, one.name) and pid in (None, one.pid)]
    return matching, errors


def _cluster(service_url: str | None, client_conf: Path | None) -> str | None:
    from keyshard.config.connection_names import read_client_conf

    if service_url is None and client_conf is not None:
        named: str | None = read_client_conf(client_conf).get("service_url")
        return named
    return service_url
