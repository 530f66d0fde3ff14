"""Who a connection is: what it shows a broker, its admin interface and a person."""

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
from typing import Any, NamedTuple

from keyshard.broker.pulsar.oauth2 import access_tokens
from keyshard.config.connection import Basic, Connection, OAuth2, Token, check_secret
from keyshard.errors import AuthenticationError, ConfigError
from keyshard.redaction import Secret

TOKEN_BYTES_MAX = 64 * 1024
"""Longest file that is taken for a token."""
SHOWN_MAX = 8
"""Tokens that are remembered as shown."""

_log = logging.getLogger(__name__)


def warn_of_secrets_in_the_clear(connection: Connection) -> None:
    """Log that whoever listens on the way learns the secret of a connection, where that is so."""
    if option := connection.says_secrets_in_the_clear:
        _log.warning(
            "%s is without TLS, and who reads along on the way learns the secret of this "
            "connection: write %s",
            option, "pulsar+ssl://" if option == "service_url" else "https://",
        )  # fmt: skip


class Shown(NamedTuple):
    """What is shown to be let in."""

    method: str
    """Its name in Pulsar's protocol."""
    data: str
    """The secret itself; empty where TLS shows who this is."""


class Credentials:
    """What a connection shows; what may change meanwhile is read each time.

    Args:
        connection: Whose.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._shown: deque[Secret] = deque(maxlen=SHOWN_MAX)
        """Credentials that were shown last; texts of others are printed without them."""
        own = connection.authentication
        self._access_tokens = (
            access_tokens(own, connection.tls_trust_certs_file_path)
            if isinstance(own, OAuth2)
            else None
        )

    def show(self) -> Shown:
        """What is shown now.

        Raises:
            AuthenticationError: It cannot be had: a file is gone, or no issuer gives a token.
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
        """The header ``Authorization``; empty for none.

        Raises:
            AuthenticationError: As for :meth:`show`.
        """
        shown = self.show()
        if shown.method == "basic":
            return "Basic " + base64.b64encode(shown.data.encode()).decode()
        return f"Bearer {shown.data}" if shown.data else ""

    def who(self) -> str:
        """Who this is, for a sentence, and why that may not convince; never a secret."""
        try:
            shown = self.show()
        except AuthenticationError as exc:
            return f"this connection ({exc.message.rstrip('.')})"
        if shown.method == "none":
            return "who gives no authentication"
        if shown.method == "tls":
            return f"the holder of the certificate {self._connection.tls_certificate_file_path}"
        if shown.method == "basic":
            return f"user {shown.data.partition(':')[0]!r}"
        claims = _claims(shown.data)
        role = str(claims.get("sub", ""))
        name = f"role {role!r}" if role else "the holder of a token that names no role"
        expires = claims.get("exp")
        if isinstance(expires, (int, float)) and 0 < expires < min(time.time(), 1e11):
            at = datetime.fromtimestamp(expires, timezone.utc)
            name += f" by a token that expired at {at:%Y-%m-%d %H:%M:%S} UTC"
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
                f"The token file {token.file} cannot be read: {exc.strerror}. Write the token "
                "there again."
            ) from exc
    try:
        return check_secret("token", text.strip())
    except ConfigError as exc:
        raise AuthenticationError(f"The {where} holds no token. Write one there.") from exc


def _claims(token: str) -> dict[str, Any]:
    """What a token says, unproved; nothing where it is no JWT."""
    try:
        part = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (IndexError, ValueError, binascii.Error, RecursionError):
        return {}
    return claims if isinstance(claims, dict) else {}
