"""Access tokens by client credentials (OAuth 2.0), for brokers and the admin interface."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import httpx

from keyshard.broker.auth.http_client import Proxies
from keyshard.broker.auth.http_log import unlogged
from keyshard.broker.auth.tls import client_context
from keyshard.config.connection import OAuth2
from keyshard.errors import AuthenticationError, BrokerUnavailableError, ConfigError
from keyshard.redaction import Secret, scrubbed

ASK_S = 5.0
"""Longest time of one request to the issuer, seconds."""
EARLY = 0.1
"""Share of a token's lifetime, before its end, in which it is renewed."""
LIFE_S = 300.0
"""Lifetime of a token if the issuer does not state it, seconds."""
TOKENS_MAX = 4
"""Number of remembered tokens, including the current one."""
_UNEXPECTED = (ValueError, LookupError, TypeError, AttributeError)
"""Errors that reading an answer of an unexpected shape may raise."""
_DISCOVERY = "/.well-known/openid-configuration"

_in_use: WeakValueDictionary[tuple[OAuth2, Any], AccessTokens] = WeakValueDictionary()
_looking = threading.Lock()


def access_tokens(own: OAuth2, ca: Any) -> AccessTokens:
    """Return the access tokens of a client; equal clients share them while they are in use.

    Args:
        own: The client and its issuer.
        ca: PEM file of trusted authorities; ``None``: those of the package certifi.
    """
    with _looking:
        shared = _in_use.get((own, ca))
        if shared is None:
            shared = _in_use[own, ca] = AccessTokens(own, ca)
        return shared


class AccessTokens:
    """Requests a token from the issuer if there is none, or if it expires soon.

    Args: as for :func:`access_tokens`.
    """

    def __init__(self, own: OAuth2, ca: Any) -> None:
        self._own = own
        self._ca = ca
        self._lock = threading.Lock()
        self._tokens: deque[Secret] = deque(maxlen=TOKENS_MAX)
        """The last one is current; all are redacted from texts of others."""
        self._secret: Secret | None = None
        """The client secret, as last read from its file."""
        self._ask_at_s = 0.0

    def current(self) -> str:
        """Return a token that remains valid for a while.

        Raises:
            AuthenticationError: The issuer refuses.
            BrokerUnavailableError: The issuer does not answer.
            ConfigError: The environment names a proxy that cannot be used, or that refuses.
        """
        with self._lock:
            if time.monotonic() >= self._ask_at_s:
                answer = self._ask()
                life_s = answer.get("expires_in")
                life_s = life_s if isinstance(life_s, (int, float)) and life_s > 0 else LIFE_S
                self._tokens.append(Secret(str(answer["access_token"])))
                self._ask_at_s = time.monotonic() + life_s * (1 - EARLY)
            return self._tokens[-1].reveal()

    def _ask(self) -> dict[str, Any]:
        own = self._own
        client_id, client_secret = self._client()
        asked = {
            "grant_type": "client_credentials",
            "client_id": client_id, "client_secret": client_secret.reveal(),
            "audience": own.audience, "scope": own.scope,
        }  # fmt: skip
        issuer = own.issuer_url.rstrip("/")
        proxies = Proxies()
        where = f"{issuer}{proxies.via(issuer)}"
        context = client_context(self._ca)
        try:
            with unlogged(), proxies.client(context, timeout=ASK_S) as client:
                found = client.get(issuer + _DISCOVERY).raise_for_status().json()
                answer = client.post(
                    found["token_endpoint"],
                    data={name: value for name, value in asked.items() if value is not None},
                )
                fields: dict[str, Any] = answer.json()
                if answer.is_success and fields["access_token"]:
                    return fields
                why = fields.get("error_description") or fields.get("error") or answer.status_code
        except httpx.TransportError as exc:
            raise BrokerUnavailableError(
                f"The issuer {issuer} does not answer: {exc}.", "Check issuer_url."
            ) from scrubbed(exc)
        except ConfigError:
            # A proxy cannot be used. It is a ValueError as well.
            raise
        except (
            httpx.HTTPError,
            httpx.InvalidURL,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as exc:
            raise AuthenticationError(
                f"{where} does not answer as an OAuth 2.0 issuer does: {exc!r}.",
                "Check issuer_url.",
            ) from scrubbed(exc)
        raise AuthenticationError(
            f"The issuer {issuer} rejects client {client_id!r}: {why}.",
            "Check client_id, client_secret and audience.",
        )

    def _client(self) -> tuple[str, Secret]:
        """Read the id and the secret of the client."""
        own = self._own
        if own.credentials_file is None:
            assert own.client_id is not None
            assert isinstance(own.client_secret, Secret)
            return own.client_id, own.client_secret
        try:
            found = json.loads(Path(own.credentials_file).read_bytes())
            self._secret = Secret(str(found["client_secret"]))
            return str(found["client_id"]), self._secret
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise AuthenticationError(
                f"The file {own.credentials_file} does not contain client_id and client_secret as "
                f"JSON ({type(exc).__name__}).",
                "Write both to this file.",
            ) from None
