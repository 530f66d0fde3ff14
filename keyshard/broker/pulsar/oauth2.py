"""Access tokens by client credentials (OAuth 2.0), for the client and the admin interface."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import httpx

from keyshard.broker.pulsar.http_log import unlogged
from keyshard.broker.pulsar.tls import client_context
from keyshard.config.connection import OAuth2
from keyshard.errors import AuthenticationError, BrokerUnavailableError
from keyshard.redaction import Secret, scrubbed

ASK_S = 5.0
"""Longest time of one request to the issuer, seconds."""
EARLY = 0.1
"""Share of a token's life before its end at which another one is asked for."""
LIFE_S = 300.0
"""Life of a token where the issuer does not say it, seconds."""
TOKENS_MAX = 4
"""Tokens that are remembered, the current one among them."""
_DISCOVERY = "/.well-known/openid-configuration"

_in_use: WeakValueDictionary[tuple[OAuth2, Any], AccessTokens] = WeakValueDictionary()
_looking = threading.Lock()


def access_tokens(own: OAuth2, ca: Any) -> AccessTokens:
    """The tokens of a client, which all who are the same client share while they are there.

    Args:
        own: Who asks whom.
        ca: PEM file of the authorities to trust; ``None``: those of the package certifi.
    """
    with _looking:
        shared = _in_use.get((own, ca))
        if shared is None:
            shared = _in_use[own, ca] = AccessTokens(own, ca)
        return shared


class AccessTokens:
    """Asks the issuer for a token when there is none, or its end is near.

    Args: as for :func:`access_tokens`.
    """

    def __init__(self, own: OAuth2, ca: Any) -> None:
        self._own = own
        self._ca = ca
        self._lock = threading.Lock()
        self._tokens: deque[Secret] = deque(maxlen=TOKENS_MAX)
        """The last is current; texts of others are printed without any of them."""
        self._secret: Secret | None = None
        """The client secret, as its file had it last."""
        self._ask_at_s = 0.0

    def current(self) -> str:
        """A token that is good for a while.

        Raises:
            AuthenticationError: The issuer refuses.
            BrokerUnavailableError: It does not answer.
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
        try:
            with unlogged(), httpx.Client(timeout=ASK_S, verify=client_context(self._ca)) as client:
                found = client.get(issuer + _DISCOVERY).raise_for_status().json()
                answer = client.post(
                    found["token_endpoint"],
                    data={name: value for name, value in asked.items() if value is not None},
                )
                told: dict[str, Any] = answer.json()
                if answer.is_success and told["access_token"]:
                    return told
                why = told.get("error_description") or told.get("error") or answer.status_code
        except httpx.TransportError as exc:
            raise BrokerUnavailableError(
                f"The issuer {issuer} does not answer: {exc}. Check issuer_url."
            ) from scrubbed(exc)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise AuthenticationError(
                f"{issuer} does not answer as an issuer of OAuth 2.0 does: {exc!r}. Check "
                "issuer_url."
            ) from scrubbed(exc)
        raise AuthenticationError(
            f"The issuer {issuer} gives client {client_id!r} no token: {why}. Check client_id, "
            "client_secret and audience."
        )

    def _client(self) -> tuple[str, Secret]:
        """Name and secret of the client."""
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
                f"The file {own.credentials_file} does not hold client_id and client_secret as "
                f"JSON ({type(exc).__name__})."
            ) from None
