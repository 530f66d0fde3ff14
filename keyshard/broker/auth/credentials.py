"""Credentials of a connection, and the description of the client in error texts."""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import time
from collections import deque
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from keyshard.config.connection import Basic, Connection, OAuth2, Token, check_secret
from keyshard.errors import AuthenticationError, ConfigError
from keyshard.redaction import Secret

if TYPE_CHECKING:
    from keyshard.broker.auth.oauth2 import AccessTokens

TOKEN_BYTES_MAX = 64 * 1024
"""Longest file that is accepted as a token, bytes."""
SHOWN_MAX = 8
"""Number of sent tokens that are remembered."""

_log = logging.getLogger(__name__)


def warn_of_secrets_in_the_clear(connection: Connection) -> None:
    """Warn if the secret of a connection is sent without encryption."""
    if option := connection.says_secrets_in_the_clear:
        _log.warning(
            "%s does not use TLS, so the secret of this connection is sent unencrypted. Write %s",
            option, "pulsar+ssl://" if option == "service_url" else "https://",
        )  # fmt: skip


class Shown(NamedTuple):
    """Credentials as they are sent."""

    method: str
    """Name of the method in Pulsar's protocol."""
    data: str
    """The secret; empty if TLS identifies the client."""


class Credentials:
    """Credentials of a connection. Those that may change are read for each use.

    Args:
        connection: The connection.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._shown: deque[Secret] = deque(maxlen=SHOWN_MAX)
        """The credentials sent last. While they are kept here, server texts are redacted."""
        own = connection.authentication
        self._access_tokens: AccessTokens | None = None
        if isinstance(own, OAuth2):
            from keyshard.broker.auth.oauth2 import access_tokens  # noqa: PLC0415 - loads httpx

            self._access_tokens = access_tokens(own, connection.tls_trust_certs_file_path)

    def show(self) -> Shown:
        """Return the current credentials.

        Raises:
            AuthenticationError: They are not available: a file is missing, or the issuer refuses.
            ConfigError: The environment names a proxy that cannot be used for the issuer.
        """
        own = self._connection.authentication
        if self._access_tokens is not None:
            return Shown("token", self._access_tokens.current())
        if isinstance(own, Token):
            token = _token(own)
            if token not in self._shown:
                self._shown.append(token)
            return Shown("token", token.reveal())
        if isinstance(own, Basic):
            assert isinstance(own.password, Secret)
            return Shown("basic", f"{own.user}:{own.password.reveal()}")
        return Shown("tls" if self._connection.tls_certificate_file_path else "none", "")

    def header(self) -> str:
        """Return the value of the header ``Authorization``; empty for none.

        Raises:
            AuthenticationError: As for :meth:`show`.
        """
        shown = self.show()
        if shown.method == "basic":
            return "Basic " + base64.b64encode(shown.data.encode()).decode()
        return f"Bearer {shown.data}" if shown.data else ""

    def who(self) -> str:
        """Describe the client, and why it may be refused, for an error text; without secrets."""
        try:
            shown = self.show()
        except (AuthenticationError, ConfigError) as exc:
            return f"this connection ({exc.message.rstrip('.')})"
        if shown.method == "none":
            return "a client without authentication"
        if shown.method == "tls":
            return f"the holder of the certificate {self._connection.tls_certificate_file_path}"
        if shown.method == "basic":
            return f"user {shown.data.partition(':')[0]!r}"
        claims = _claims(shown.data)
        role = str(claims.get("sub", ""))
        name = f"role {role!r}" if role else "the holder of a token without a role"
        expires = claims.get("exp")
        if isinstance(expires, (int, float)) and 0 < expires < min(time.time(), 1e11):
            at = datetime.fromtimestamp(expires, timezone.utc)
            name += f" with a token that expired at {at:%Y-%m-%d %H:%M:%S} UTC"
        return name


def _token(token: Token) -> Secret:
    if isinstance(token.value, Secret):
        return token.value
    if token.environment is not None:
        where, text = f"variable {token.environment}", os.environ.get(token.environment, "")
    else:
        assert token.file is not None
        where = f"file {token.file}"
        try:
            with Path(token.file).open("rb") as file:
                text = file.read(TOKEN_BYTES_MAX).decode(errors="replace")
        except OSError as exc:
            raise AuthenticationError(
                f"The token file {token.file} cannot be read: {exc.strerror}.",
                "Write the token to this file.",
            ) from exc
    try:
        return check_secret("token", text.strip())
    except ConfigError as exc:
        raise AuthenticationError(
            f"The {where} contains no token.", "Write a token there."
        ) from exc


def _claims(token: str) -> dict[str, Any]:
    """Return the unverified claims of a token; empty if it is not a JWT."""
    try:
        part = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (IndexError, ValueError, binascii.Error, RecursionError):
        return {}
    return claims if isinstance(claims, dict) else {}
