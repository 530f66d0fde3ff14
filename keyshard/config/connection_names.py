"""A connection by the usual names: ``pulsar.client.*`` options and ``client.conf``."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keyshard.config.connection import Basic, Connection, OAuth2, Token
from keyshard.config.field_types import of_type
from keyshard.core.option_checks import did_you_mean
from keyshard.errors import ConfigError
from keyshard.redaction import Secret, shown

NAMES: Mapping[str, str] = {
    "serviceUrl": "service_url",
    "webServiceUrl": "admin_url",
    "authPluginClassName": "authentication",
    "authParams": "authentication",
    "tlsTrustCertsFilePath": "tls_trust_certs_file_path",
    "tlsCertificateFilePath": "tls_certificate_file_path",
    "tlsKeyFilePath": "tls_key_file_path",
    "tlsHostnameVerificationEnable": "tls_hostname_verification",
    "listenerName": "listener_name",
    "operationTimeoutMs": "operation_timeout_ms",
    "connectionTimeoutMs": "connection_timeout_ms",
    "transport": "transport",
}
"""Option names (of Pulsar's Java client; ``transport`` is keyshard's) and the fields of
:class:`Connection`."""
_ALIASES = {
    "brokerServiceUrl": "serviceUrl",
    "authPlugin": "authPluginClassName",
    "tlsEnableHostnameVerification": "tlsHostnameVerificationEnable",
    "tlsHostnameVerificationEnabled": "tlsHostnameVerificationEnable",
}
_PEM = "keyshard reads PEM files; name them in tlsTrustCertsFilePath and tlsCertificateFilePath"
_CANNOT = {
    "useTls": "the URL decides about TLS; write pulsar+ssl:// or https://",
    "tlsAllowInsecureConnection": (
        "keyshard accepts no untrusted certificate; name its authority in tlsTrustCertsFilePath"
    ),
    "useKeyStoreTls": _PEM,
    "tlsTrustStorePath": _PEM,
    "tlsTrustStorePassword": _PEM,
    "tlsKeyStorePath": _PEM,
    "tlsKeyStorePassword": _PEM,
    "proxyServiceUrl": "keyshard does not support SNI proxies",
    "proxyProtocol": "keyshard does not support SNI proxies",
    "memoryLimitBytes": "the client has no memory limit; window_bytes_max limits the received data",
}
"""Options that the Python client does not support, and the alternative."""
_NOTHING = {"tlsTrustStoreType", "tlsKeyStoreType", "webserviceTlsProvider"}
"""Options without an effect of their own that every ``client.conf`` contains."""
_BY_NAME = {name.lower(): name for name in [*NAMES, *_ALIASES, *_CANNOT, *_NOTHING]}
_BOOLEANS, _NUMBERS = of_type(Connection, bool), of_type(Connection, int)
_PLUGINS = {
    "authenticationtoken": "token",
    "authenticationtls": "tls",
    "authenticationoauth2": "oauth2",
    "authenticationbasic": "basic",
}
CLIENT_CONF_BYTES_MAX = 1024 * 1024
"""Most bytes of a ``client.conf``."""


def fields_of(given: Mapping[str, str]) -> dict[str, Any]:
    """Return fields of :class:`Connection` from option names of Pulsar's Java client.

    Empty values are ignored.

    Raises:
        ConfigError: A name is unknown, given twice or unsupported, or a value is wrong. The text
            contains no secret.
    """
    values = canonical_names(given)
    plugin = values.pop("authPluginClassName", None)
    params = values.pop("authParams", None)
    fields: dict[str, Any] = {NAMES[name]: _value(name, text) for name, text in values.items()}
    return fields | _authentication(plugin, params, fields)


def canonical_names(given: Mapping[str, str]) -> dict[str, str]:
    """Return options by the names in ``NAMES``, without those that are empty or mean nothing.

    Raises:
        ConfigError: A name is unknown, given twice or unsupported.
    """
    values: dict[str, str] = {}
    for name, text in given.items():
        known = _BY_NAME.get(name.lower())
        if known is None:
            hint = did_you_mean(name, _BY_NAME.values(), f"The options are: {', '.join(NAMES)}.")
            raise ConfigError(f"{shown(name)} is not an option of a connection.", hint)
        if not text or known in _NOTHING:
            continue
        if known in _CANNOT:
            if text.lower() != "false":
                raise ConfigError(f"{known} is not supported: {_CANNOT[known]}.")
            continue
        canonical = _ALIASES.get(known, known)
        if values.setdefault(canonical, text) != text:
            raise ConfigError(
                f"{canonical} is given twice, also as {name!r}.", "Give only one of them."
            )
    return values


def read_client_conf(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return fields of :class:`Connection` from a ``client.conf`` of Pulsar.

    Raises:
        ConfigError: The file cannot be read, or an option is wrong.
    """
    names = client_conf_names(path)
    try:
        return fields_of(names)
    except ConfigError as exc:
        raise exc.with_text(f"{os.fspath(path)}: {exc.problem}", exc.remedy) from exc


def client_conf_names(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the options of a ``client.conf`` by the names in ``NAMES``.

    Raises:
        ConfigError: The file cannot be read, or a name is unknown, given twice or unsupported.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(CLIENT_CONF_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not a text file"
        raise ConfigError(
            f"client_conf is {shown(os.fspath(path))}, which cannot be read: {why}.",
            "Name a client.conf of Pulsar.",
        ) from exc
    given: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, value = line.strip().partition("=")
        if not name or name.startswith(("#", "!")):
            continue
        if not equals:
            raise ConfigError(
                f"Line {number} of {os.fspath(path)} has no '='.", "Write name=value."
            )
        given[name.strip()] = value.strip()
    try:
        return canonical_names(given)
    except ConfigError as exc:
        raise exc.with_text(f"{os.fspath(path)}: {exc.problem}", exc.remedy) from exc


def names_of(connection: Connection) -> dict[str, str]:
    """Return the options that differ from the defaults, by name: the inverse of ``fields_of``.

    The result contains secrets.
    """
    plain = Connection()
    fields = {field: name for name, field in NAMES.items() if field != "authentication"}
    found: dict[str, str] = {}
    for field, name in fields.items():
        value = getattr(connection, field)
        if value != getattr(plain, field):
            found[name] = str(value).lower() if field in _BOOLEANS else str(value)
    plugin, params = _said(connection.authentication)
    return found | ({"authPluginClassName": plugin, "authParams": params} if plugin else {})


def _value(name: str, text: str) -> Any:
    field = NAMES[name]
    if field in _BOOLEANS:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{field} is {shown(text)}; it must be true or false.")
        return text.lower() == "true"
    if field in _NUMBERS:
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise ConfigError(f"{field} is {shown(text)}; it must be an integer.")
        return int(text)
    return text


def _authentication(
    plugin: str | None, params: str | None, fields: Mapping[str, Any]
) -> dict[str, Any]:
    if plugin is None:
        if params is not None:
            raise ConfigError(
                "authParams is given without authPluginClassName.",
                "Set authPluginClassName to token, tls, oauth2 or basic, or to the class of the "
                "Java client.",
            )
        return {}
    last = plugin.rpartition(".")[2].lower()
    kind = _PLUGINS.get(last, last)
    if kind == "tls":
        return _certificate(params or "", fields)
    if kind not in _PLUGINS.values():
        raise ConfigError(
            f"authPluginClassName is {shown(plugin)}.", "Write token, tls, oauth2 or basic."
        )
    if params is None:
        raise ConfigError(
            f"authParams is missing, which authPluginClassName {kind} needs.", "Set both."
        )
    if kind == "token":
        return {"authentication": _token(params)}
    parameters = _json(kind, params)
    return {"authentication": _basic(parameters) if kind == "basic" else _oauth2(parameters)}


def _token(params: str) -> Token:
    kind, colon, rest = params.partition(":")
    if colon and kind == "file":
        return Token(file=_path(params))
    if colon and kind == "env":
        return Token(environment=rest)
    return Token(rest if colon and kind == "token" else params)


def _certificate(params: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return certificate and key, from the parameters or from options of their own."""
    parameters = _json("tls", params) if params.startswith("{") else _pairs(params)
    names = {"tlsCertFile": "tls_certificate_file_path", "tlsKeyFile": "tls_key_file_path"}
    if unknown := parameters.keys() - names.keys():
        raise ConfigError(
            f"authParams of tls has no parameter {shown(min(unknown))}.",
            f"Its parameters: {_CERTIFICATE}.",
        )
    found = {names[name]: _path(value) for name, value in parameters.items()}
    for field, value in found.items():
        if fields.get(field, value) != value:
            raise ConfigError(
                f"{field} is given, but authParams names another file.", "Give only one of them."
            )
    if not {**fields, **found}.keys() >= set(names.values()):
        raise ConfigError(f"authPluginClassName tls needs authParams: {_CERTIFICATE}.")
    return found


_CERTIFICATE = "tlsCertFile:/path,tlsKeyFile:/path"


def _pairs(params: str) -> dict[str, str]:
    parts = [part.partition(":") for part in params.split(",") if part]
    return {name.strip(): value.strip() for name, _, value in parts}


def _basic(parameters: Mapping[str, str]) -> Basic:
    user = parameters.get("userId", parameters.get("username"))
    password = parameters.get("password")
    if not user or not password:
        raise ConfigError(
            "authParams of basic cannot be read.", "Write JSON with userId and password."
        )
    return Basic(user, password)


def _oauth2(parameters: Mapping[str, str]) -> OAuth2:
    def one(*names: str) -> str | None:
        return next((parameters[name] for name in names if parameters.get(name)), None)

    issuer, key = one("issuerUrl", "issuer_url"), one("privateKey", "private_key")
    if issuer is None:
        raise ConfigError(
            "authParams of oauth2 cannot be read.",
            "Write JSON with issuerUrl, privateKey and audience.",
        )
    more: dict[str, Any] = {
        "client_id": one("clientId", "client_id"),
        "client_secret": one("clientSecret", "client_secret"),
    }
    if key is not None and key.startswith("data:"):
        try:
            held = json.loads(base64.b64decode(key.partition(",")[2]))
            more = {name: str(held[name]) for name in more}
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                "privateKey of oauth2 cannot be read.",
                "Write base64 of JSON with client_id and client_secret.",
            ) from None
    elif key is not None:
        more["credentials_file"] = _path(key)
    return OAuth2(issuer_url=issuer, audience=one("audience"), scope=one("scope"), **more)


def _json(kind: str, params: str) -> dict[str, str]:
    try:
        parameters = json.loads(params)
        if isinstance(parameters, dict) and all(
            isinstance(value, str) for value in parameters.values()
        ):
            return parameters
    except (ValueError, RecursionError):
        pass
    raise ConfigError(
        f"authParams of {kind} cannot be read.", "Write a JSON object whose values are texts."
    )


def _path(text: str) -> str:
    """Return the path in ``/path``, ``file:/path`` or ``file:///path``."""
    return text.removeprefix("file:").removeprefix("//")


def _said(authentication: Token | OAuth2 | Basic | None) -> tuple[str, str]:
    """Return plugin and parameters of an authentication, including the secret."""
    own = authentication
    if isinstance(own, Token):
        if isinstance(own.value, Secret):
            return "token", f"token:{own.value.reveal()}"
        return "token", f"file:{own.file}" if own.file else f"env:{own.environment}"
    if isinstance(own, Basic):
        assert isinstance(own.password, Secret)
        parameters = {"userId": own.user, "password": own.password.reveal()}
        return "basic", json.dumps(parameters)
    if isinstance(own, OAuth2):
        secret = own.client_secret.reveal() if isinstance(own.client_secret, Secret) else None
        said = {
            "issuerUrl": own.issuer_url, "audience": own.audience, "scope": own.scope,
            "privateKey": own.credentials_file, "clientId": own.client_id, "clientSecret": secret,
        }  # fmt: skip
        return "oauth2", json.dumps({name: text for name, text in said.items() if text is not None})
    return "", ""
