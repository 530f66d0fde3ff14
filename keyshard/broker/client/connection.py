"""Creates the clients of pulsar-client; no other module does."""

from __future__ import annotations

import logging
from typing import Any

import pulsar

from keyshard.broker.auth.credentials import Credentials, warn_of_secrets_in_the_clear
from keyshard.broker.client.log import open_client
from keyshard.config.connection import Basic, Connection, OAuth2, Token
from keyshard.errors import KeyShardError
from keyshard.redaction import Secret

_log = logging.getLogger(__name__)


def client_of(
    connection: Connection, credentials: Credentials | None = None, **options: Any
) -> pulsar.Client:
    """Create a client. Close it with :func:`keyshard.broker.client.log.close_client`.

    Args:
        connection: How the cluster is reached.
        credentials: Those of the connection, if they exist already.
        **options: Further options of ``pulsar.Client``.
    """
    warn_of_secrets_in_the_clear(connection)
    if connection.tls:
        ca = connection.tls_trust_certs_file_path
        options = {
            "tls_trust_certs_file_path": ca,
            "tls_certificate_file_path": connection.tls_certificate_file_path,
            "tls_private_key_file_path": connection.tls_key_file_path,
            "tls_validate_hostname": connection.tls_hostname_verification,
            **options,
        }
    return open_client(
        connection.service_url,
        **{
            "authentication": _authentication(connection, credentials or Credentials(connection)),
            "operation_timeout_seconds": max(1, connection.operation_timeout_ms // 1000),
            "connection_timeout_ms": connection.connection_timeout_ms,
            "listener_name": connection.listener_name,
            **options,
        },
    )


def _authentication(connection: Connection, credentials: Credentials) -> Any:
    own = connection.authentication
    if isinstance(own, Basic):
        assert isinstance(own.password, Secret)
        return pulsar.AuthenticationBasic(own.user, own.password.reveal())
    if isinstance(own, Token) and own.file is None:
        return pulsar.AuthenticationToken(credentials.show().data)
    if isinstance(own, (Token, OAuth2)):
        # The client calls this for every connection, and when the broker wants a newer token. If
        # the client read the file itself, it would include the end of the line.
        return pulsar.AuthenticationToken(lambda: _token(credentials))
    if connection.tls and connection.tls_certificate_file_path is not None:
        return pulsar.AuthenticationTLS(
            connection.tls_certificate_file_path, connection.tls_key_file_path
        )
    return None


def _token(credentials: Credentials) -> str:
    """Return the token. The client's threads call it, so it must not raise."""
    try:
        return credentials.show().data
    except KeyShardError as exc:
        _log.warning("the client has no token: %s", exc.summary)
        return ""
